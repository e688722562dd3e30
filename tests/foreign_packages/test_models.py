"""Models of other packages, in loops as their users write them: learn as FP32 does, and resume bit for bit."""

from __future__ import annotations

import copy
import dataclasses
import functools
import io
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import mmaction.structures
import mmpose.testing
import peft
import pytest
import timm
import timm.loss
import torch
import torch.nn.functional as F
import torch_geometric.nn as gnn
import toy_training
import transformers
from bits import differences
from mmengine.config import Config
from mmengine.registry import MODELS, DefaultScope
from timm.optim import create_optimizer_v2
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch_geometric.data import Batch, Data
from toy_training import CAST, SCALED
from transformers import get_scheduler

from amp_wrapper import amp
from amp_wrapper.errors import AmpAttachError

LEVELS = ('O1', 'O2', 'O4', 'O5')
F32, BF16 = torch.float32, torch.bfloat16


@dataclasses.dataclass(frozen=True)
class Task:
    """What is trained.

    Attributes:
        model: Builds it in FP32.
        batch: Of an index.
        loss: Of a model and a batch.
        optimizer: Of the model.
        schedule: A name of transformers' ``get_scheduler``.
        along: Smallest cosine between the ways that the weights went from their start, at a level and in FP32.
        steps: How many.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    loss: Callable[[Any, Any], Tensor]
    optimizer: Callable[[nn.Module], Optimizer]
    schedule: str = 'linear'
    along: float = 0.8
    steps: int = 24


class Training(toy_training.Training):
    def __init__(self, task: Task, level: str = 'O0', door: str = 'amp', seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.task, self.curve = task, []
        model = task.model().train()
        self.start = copy.deepcopy(model.state_dict())
        scale = dict(init_scale=128.0) if level in SCALED else None
        super().__init__(level, door, lambda _: self.made(task.optimizer(model)), model, loss_scale=scale)
        self.parts = {'model': model, 'optimizer': self.wrapper or self.optimizer, 'scheduler': self.scheduler}
        self.parts |= {} if self.wrapper else {'amp': amp}
        torch.manual_seed(1)

    def made(self, optimizer: Optimizer) -> Optimizer:
        self.scheduler = get_scheduler(self.task.schedule, optimizer, num_warmup_steps=6, num_training_steps=40)
        return optimizer

    def train(self, *indices: int) -> list[float]:
        for index in indices:
            loss = self.forward(call=functools.partial(self.task.loss, self.model, self.task.batch(index)))
            self.curve.append(loss.item())
            self.backward(loss)
            self.step()
            self.clear()
            self.scheduler.step()
        return self.curve

    def save(self) -> bytes:
        file = io.BytesIO()
        torch.save(({name: part.state_dict() for name, part in self.parts.items()}, torch.get_rng_state()), file)
        return file.getvalue()

    def load(self, file: bytes) -> None:
        saved, random = torch.load(io.BytesIO(file), weights_only=True)
        for name, part in self.parts.items():
            part.load_state_dict(saved[name])
        torch.set_rng_state(random)

    def went(self) -> Tensor:
        """From the start to now, in one vector."""
        now = self.model.state_dict()
        names = [name for name, _ in self.model.named_parameters() if name in now]
        return torch.cat([(now[name].double() - self.start[name].double()).flatten() for name in names])


@functools.cache
def in_fp32(name: str) -> tuple[list[float], Tensor]:
    training = Training(TASKS[name])
    return training.train(*range(TASKS[name].steps)), training.went()


def check(name: str, level: str, door: str) -> None:
    training, half, steps = Training(TASKS[name], level, door), TASKS[name].steps // 2, TASKS[name].steps
    training.train(*range(half))
    file = training.save()
    losses = training.train(*range(half, steps))
    saved, trained = training.model.state_dict(), [p for p in training.model.named_parameters() if p[1].requires_grad]
    # the optimizer may have frozen weights, too
    assert len(training.masters()) >= len(trained)
    for key, weight in trained:
        # with peft, some are not in it
        if key in saved:
            assert saved[key].dtype is F32 and torch.equal(weight, saved[key].to(weight.dtype)), key
    assert CAST.get(level, F32) in {weight.dtype for _, weight in trained}
    curve, way = in_fp32(name)
    fall, expected = (1 - sum(each[-5:]) / 5 / curve[0] for each in (losses, curve))
    assert expected > 0.05 or steps == 2, 'FP32 does not learn'
    assert abs(fall - expected) <= 0.1
    assert float(F.cosine_similarity(training.went(), way, dim=0)) >= TASKS[name].along
    ended = training.save()
    # amp.state_dict() numbers the scales of all that is alive
    del training, saved, trained, weight
    again = Training(TASKS[name], level, door, seed=3)
    again.load(file)
    assert again.train(*range(half, steps)) == losses[half:]
    found, wanted = (torch.load(io.BytesIO(each), weights_only=True) for each in (again.save(), ended))
    assert differences(found, wanted) == []


# -- timm -------------------------------------------------------------------------------------------------------------------


def pictures(index: int) -> tuple[Tensor, Tensor]:
    """(12, 3, 32, 32) of noise, whose colour is the class."""
    labels = torch.arange(12) % 3
    images = torch.randn(12, 3, 32, 32, generator=torch.Generator().manual_seed(index))
    return images + F.one_hot(labels, 3).view(12, 3, 1, 1), labels


def of_timm(model: str, name: str, rate: float, decay: float | None = None, **words: Any) -> Task:
    return Task(
        lambda: timm.create_model(model, num_classes=3, **words),
        pictures,
        lambda m, batch: timm.loss.LabelSmoothingCrossEntropy(0.1)(m(batch[0]), batch[1]),
        lambda m: create_optimizer_v2(m, name, lr=rate, weight_decay=0.05, layer_decay=decay),
    )


VIT = dict(img_size=32, patch_size=8, embed_dim=48, depth=3, num_heads=3, drop_path_rate=0.1)
ATTO = dict(depths=(1, 1, 2, 1), dims=(8, 16, 24, 32), drop_path_rate=0.1)
TIMM = {
    'ViT, layer decay': of_timm('vit_tiny_patch16_224', 'adamw', 3e-3, 0.75, **VIT),
    'ViT, lamb': of_timm('vit_tiny_patch16_224', 'lamb', 1e-2, 0.75, **VIT),
    'ResNet, lion': of_timm('resnet10t', 'lion', 1e-3, stem_width=8, channels=(8, 16, 24, 32)),
    'ConvNeXt, nadamw': of_timm('convnext_atto', 'nadamw', 3e-3, 0.8, **ATTO),
}

# -- transformers and peft --------------------------------------------------------------------------------------------------


def language(index: int) -> dict[str, Tensor]:
    """Sequences that count up from a start by a step of two or three, with padding."""
    generator = torch.Generator().manual_seed(index)
    begin = torch.randint(2, 12, (16, 1), generator=generator)
    by = torch.randint(2, 4, (16, 1), generator=generator)
    mask = torch.arange(16) < torch.randint(10, 17, (16, 1), generator=generator)
    ids = torch.where(mask, begin + by * torch.arange(16), 0)
    return dict(input_ids=ids, attention_mask=mask.long(), labels=torch.where(mask, ids, -100))


def steps_of_counting(index: int) -> dict[str, Tensor]:
    """The label says whether it is two or three."""
    batch = language(index)
    return dict(batch, labels=batch['input_ids'][:, 1] - batch['input_ids'][:, 0] - 2)


def groups(model: nn.Module) -> Optimizer:
    """As the Trainer makes them."""
    flat, rest = ([p for p in model.parameters() if (p.ndim < 2) is few] for few in (True, False))
    return AdamW([dict(params=rest, weight_decay=0.01), dict(params=flat, weight_decay=0.0)], lr=5e-3)


def built(name: str, checkpointed: bool = False, **words: Any) -> Any:
    cls = getattr(transformers, name)
    model = cls(cls.config_class(**words))
    if checkpointed:
        model.gradient_checkpointing_enable(dict(use_reentrant=False))
    return model


def own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss


def of_transformers(name: str, words: dict[str, Any], batch: Any = language, schedule: str = 'linear') -> Task:
    return Task(lambda: built(name, **words), batch, own_loss, groups, schedule)


SIZE = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
TEXT = dict(SIZE, max_position_embeddings=32)
LLAMA = dict(TEXT, num_key_value_heads=2, use_cache=False)
GPT2 = dict(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=4, use_cache=False)
T5 = dict(
    vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0, use_cache=False
)
BERT = dict(TEXT, num_labels=2, attn_implementation='eager')
TRANSFORMERS = {
    'BERT': of_transformers('BertForSequenceClassification', BERT, steps_of_counting),
    'GPT-2': of_transformers('GPT2LMHeadModel', GPT2),
    'GPT-2, checkpointed': of_transformers('GPT2LMHeadModel', dict(GPT2, checkpointed=True)),
    'Llama': of_transformers('LlamaForCausalLM', LLAMA, schedule='polynomial'),
    'T5': of_transformers('T5ForConditionalGeneration', T5),
}
PARTS = ['q_proj', 'v_proj', 'down_proj']
ADAPTERS: dict[str, Callable[[], peft.PeftConfig]] = {
    'LoRA': lambda: peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=PARTS),
    'DoRA': lambda: peft.LoraConfig(r=4, lora_alpha=8, use_dora=True, target_modules=PARTS),
    'LoRA and head': lambda: peft.LoraConfig(r=4, target_modules=PARTS[:2], modules_to_save=['lm_head', 'norm']),
    'IA3': lambda: peft.IA3Config(target_modules=['k_proj', *PARTS[1:]], feedforward_modules=PARTS[2:]),
    'VeRA': lambda: peft.VeraConfig(r=8, target_modules=['q_proj', 'o_proj']),
    'prompts': lambda: peft.PromptTuningConfig(task_type='CAUSAL_LM', num_virtual_tokens=4),
}


@functools.cache
def pretrained() -> dict[str, Tensor]:
    """Weights that have learned to count."""
    with torch.random.fork_rng():
        training = Training(TRANSFORMERS['Llama'])
        training.train(*range(40))
    return training.model.state_dict()


def adapted(name: str, base: torch.dtype) -> nn.Module:
    weights, model = pretrained(), built('LlamaForCausalLM', **LLAMA)
    model.load_state_dict(weights)
    return peft.get_peft_model(model.to(base), ADAPTERS[name]())


def of_peft(name: str, base: torch.dtype) -> Task:
    """What the adapters learn are the sequences of the base, backwards."""
    rate = 0.1 if name in ('IA3', 'VeRA', 'prompts') else 0.02
    return Task(
        lambda: adapted(name, base),
        lambda index: {key: value.flip(1) for key, value in language(index).items()},
        own_loss,
        lambda model: AdamW([p for p in model.parameters() if p.requires_grad], lr=rate),
    )


PEFT = {f'{name}, {base}': of_peft(name, base) for name in ADAPTERS for base in (F32, BF16)}

# -- torch_geometric ----------------------------------------------------------------------------------------------------------

PNA = dict(
    aggregators=['mean', 'min', 'max', 'std'], scalers=['identity', 'amplification'], deg=torch.tensor([0, 2, 20, 20])
)
CONVS: dict[str, Callable[[int, int], nn.Module]] = {
    **{name: getattr(gnn, name) for name in ('GCNConv', 'SAGEConv', 'GraphConv', 'TAGConv')},
    'SAGEConv, max': lambda i, o: gnn.SAGEConv(i, o, aggr='max'),
    'ChebConv': lambda i, o: gnn.ChebConv(i, o, K=3),
    'GATConv': lambda i, o: gnn.GATConv(i, o // 4, heads=4, dropout=0.1),
    'GATv2Conv': lambda i, o: gnn.GATv2Conv(i, o // 4, heads=4),
    'TransformerConv': lambda i, o: gnn.TransformerConv(i, o // 4, heads=4),
    'GINConv': lambda i, o: gnn.GINConv(nn.Sequential(nn.Linear(i, o), nn.ReLU(), nn.Linear(o, o)), train_eps=True),
    'PNAConv': lambda i, o: gnn.PNAConv(i, o, **PNA),
}


def rings(index: int) -> Batch:
    """Rings whose nodes' features hint at the class of the graph."""
    generator, found = torch.Generator().manual_seed(index), []
    for number in range(24):
        around = torch.arange(5 + number % 4)
        edges = torch.stack([around, around.roll(1)])
        x = torch.randn(len(around), 8, generator=generator) + F.one_hot(torch.tensor(number % 3), 8)
        found.append(Data(x=x, edge_index=torch.cat([edges, edges.flip(0)], 1), y=torch.tensor([number % 3])))
    return Batch.from_data_list(found)


def of_geometric(conv: Callable[[int, int], nn.Module], rate: float = 2e-2, along: float = 0.8) -> Task:
    def model() -> nn.Module:
        first = [(conv(8, 16), 'x, edges -> x'), (gnn.GraphNorm(16), 'x, batch -> x'), nn.ReLU(), nn.Dropout(0.1)]
        second = [(conv(16, 16), 'x, edges -> x'), gnn.BatchNorm(16), nn.ReLU()]
        end = [(gnn.global_mean_pool, 'x, batch -> x'), nn.Linear(16, 3)]
        return gnn.Sequential('x, edges, batch', [*first, *second, *end])

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch.x, batch.edge_index, batch.batch), batch.y)

    return Task(model, rings, loss, lambda m: Adam(m.parameters(), lr=rate, weight_decay=5e-4), 'constant', along)


# of its deviations little is left in bfloat16: torch.autocast goes 0.73 of the way of FP32
GEOMETRIC = {name: of_geometric(conv, *((5e-3, 0.6) if 'PNA' in name else ())) for name, conv in CONVS.items()}

# -- mmpose and mmaction2 ---------------------------------------------------------------------------------------------------

SIZES = dict(input_size=(64, 64), heatmap_size=(16, 16))


def pose(index: int) -> Any:
    """The same batch each time: eight pictures with labels of every kind."""
    return mmpose.testing.get_packed_inputs(8, img_shape=(64, 64), **SIZES)


def actions(*shape: int) -> Callable[[int], Any]:
    def batch(index: int) -> dict[str, Any]:
        inputs = 255 * torch.rand(6, *shape, generator=torch.Generator().manual_seed(index))
        samples = [mmaction.structures.ActionDataSample(metainfo=dict(img_shape=(32, 32))) for _ in inputs]
        return dict(inputs=list(inputs), data_samples=[each.set_gt_label(i % 3) for i, each in enumerate(samples)])

    return batch


def of_openmmlab(path: str, backbone: dict[str, Any], head: dict[str, Any], batch: Callable[[int], Any] = pose) -> Task:
    """A model of a package's own config, made smaller, for two steps."""
    package = 'mmpose' if batch is pose else 'mmaction'

    def model() -> nn.Module:
        module = import_module(package)
        import_module(f'{package}.utils').register_all_modules(init_default_scope=False)
        cfg = Config.fromfile(f'{Path(str(module.__file__)).parent}/.mim/configs/{path}.py')
        if package == 'mmpose':
            for part in (cfg.codec, cfg.model.head):
                part.update({key: size for key, size in SIZES.items() if key in part})
            cfg.model.head.decoder = cfg.codec
        name = 'head' if package == 'mmpose' else 'cls_head'
        cfg.merge_from_dict({'model': {'backbone': copy.deepcopy(backbone), name: head}})
        with DefaultScope.overwrite_default_scope(package):
            return MODELS.build(cfg.model)

    def loss(model: Any, batch: Any) -> Tensor:
        return model.parse_losses(model(**model.data_preprocessor(batch, True), mode='loss'))[0]

    return Task(model, batch, loss, lambda model: SGD(model.parameters(), lr=1e-3), 'constant', steps=2)


POSE, R18 = dict(in_channels=128, in_featuremap_size=(2, 2)), dict(depth=18, base_channels=16)
DECONV = dict(POSE, deconv_out_channels=(32, 32, 32))
# 7 x 7 over 2 x 2 would leave bfloat16 weight gradients of torch's CPU kernel uninitialised now and then
GAU = dict(POSE, final_layer_kernel_size=3, gau_cfg=dict(hidden_dims=32, s=16))
TINY = dict(widen_factor=0.125, norm_cfg=dict(type='BN'))
SWIN = dict(arch=dict(_delete_=True, embed_dims=16, depths=[1, 1, 1, 1], num_heads=[1, 2, 4, 4]), window_size=(2, 4, 4))
GCN = dict(base_channels=16, num_stages=4, inflate_stages=[2, 3], down_stages=[2, 3])
BODY, OF_2D, RGB, NTU = 'body_2d_keypoint', 'imagenet-pretrained-r50', 'kinetics400-rgb', 'ntu60-xsub-keypoint-2d'
VIDEO = (1, 3, 4, 32, 32)
OPENMMLAB = {
    'RTMPose': of_openmmlab(f'{BODY}/rtmpose/coco/rtmpose-t_8xb256-420e_coco-256x192', TINY, GAU),
    'SimCC': of_openmmlab(f'{BODY}/simcc/coco/simcc_res50_8xb64-210e_coco-256x192', R18, DECONV),
    'DSNT': of_openmmlab(f'{BODY}/integral_regression/coco/ipr_res50_dsnt-8xb64-210e_coco-256x256', R18, DECONV),
    **{
        name: of_openmmlab(path, backbone, dict(num_classes=3, in_channels=channels), actions(*shape))
        for name, path, backbone, channels, shape in (
            ('TSM', f'recognition/tsm/tsm_{OF_2D}_8xb16-1x1x8-50e_{RGB}', dict(depth=18), 512, (8, 3, 32, 32)),
            ('SlowOnly', f'recognition/slowonly/slowonly_r50_8xb16-4x16x1-256e_{RGB}', R18, 128, VIDEO),
            ('Swin', f'recognition/swin/swin-tiny-p244-w877_in1k-pre_8xb8-amp-32x2x1-30e_{RGB}', SWIN, 128, VIDEO),
            ('ST-GCN++', f'skeleton/stgcnpp/stgcnpp_8xb16-joint-u100-80e_{NTU}', GCN, 64, (1, 2, 20, 17, 3)),
        )
    },
}

TASKS = {**TIMM, **TRANSFORMERS, **PEFT, **GEOMETRIC, **OPENMMLAB}
# peft leaves these copies 16-bit, and they are trained: their FP32 values are lost
REFUSED = f'LoRA and head, {BF16}'
# two 16-bit types meet in torch.cat: torch.autocast refuses it; O4 is for such a base
NOT_AT_O1 = (f'VeRA, {BF16}', f'prompts, {BF16}')


def levels(name: str) -> tuple[str, ...]:
    # float16 is slow on a processor
    return ('O2', 'O5')[name == 'TSM' :] if name in OPENMMLAB else LEVELS[name in NOT_AT_O1 :]


@pytest.mark.parametrize(('name', 'level'), [(name, level) for name in TASKS for level in levels(name)])
def test_learns_and_resumes_as_in_fp32(name: str, level: str) -> None:
    door = ('wrapper', 'amp')[(list(TASKS).index(name) + LEVELS.index(level)) % 2]
    with pytest.raises(AmpAttachError, match='from_16bit') if name == REFUSED else nullcontext():
        check(name, level, door)
