"""Models of mmpretrain, mmsegmentation and mmdetection, from the configs of these projects, against FP32.

See ``nox -s downstream``. No module is replaced, except SyncBN, which has no CPU implementation: it becomes BN.
"""

from __future__ import annotations

import dataclasses
import functools
import runpy
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torchvision_schemas import declare_torchvision_ops

declare_torchvision_ops()

import torch._dynamo
import torch.distributed as dist
from bits import differences
from mmengine.config import Config
from mmengine.evaluator import BaseMetric
from mmengine.hub import get_config
from mmengine.model import MMDistributedDataParallel, revert_sync_batchnorm
from mmengine.optim import OptimWrapper, build_optim_wrapper
from mmengine.registry import DATASETS, METRICS, MODELS, init_default_scope
from mmengine.structures import BaseDataElement, InstanceData, PixelData
from on_ranks import Group, Here
from planted_overflows import examine
from torch import Tensor, nn

from amp_wrapper import AmpOptimWrapper

ROOT = Path(__file__).resolve().parents[2]
OWN_CONFIGS = sorted((ROOT / 'configs').glob('mm*/*.py'))
CLASSES = 4
TYPES = {'O1': torch.float16, 'O2': torch.float16, 'O4': torch.bfloat16, 'O5': torch.bfloat16}
CAST = ('O2', 'O5')


class Bounds(NamedTuple):
    """How far a level may be from FP32, as a part: the losses of two steps, and the way of all weights."""

    loss: float
    way: float


BOUNDS = {torch.float16: Bounds(0.002, 0.02), torch.bfloat16: Bounds(0.01, 0.1)}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model.

    Attributes:
        config: Of the project, as ``_base_`` names it.
        changes: What makes it small, beside :func:`smaller`; keys have dots.
        by: What numbers of channels are divided by.
        size: Edge of the images, in pixels.
        lr: Of the two steps.
        noise: What the bounds on the way of the weights are multiplied by; None for no bound.
        draws: Whether its loss draws samples among candidates that rounded scores choose.
    """

    config: str
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)
    by: int = 8
    size: int = 64
    lr: float = 0.001
    noise: float | None = 1
    draws: bool = False

    @property
    def project(self) -> str:
        return self.config.split('::')[0]


_SWIN = dict(embed_dims=12, depths=[1, 2, 1, 1], num_heads=[1, 2, 4, 8])
_VIT = dict(embed_dims=96, num_layers=2, num_heads=3, feedforward_channels=96)
_VIT_BACKBONE = {'backbone.arch': _VIT, 'backbone.img_size': 32, 'backbone.patch_size': 8}
_DECODER = {'neck.decoder_embed_dim': 32, 'neck.decoder_depth': 1, 'neck.decoder_num_heads': 2}
_MAE = {'neck.num_patches': 16, 'neck.patch_size': 8, 'neck.embed_dim': 96, 'head.patch_size': 8, **_DECODER}
_TWINS = dict(embed_dims=[8, 16, 32, 64], depths=[2, 1, 1, 1], num_heads=[1, 2, 4, 8], patch_sizes=[4, 2, 2, 2])
_TWINS_REST = dict(strides=[4, 2, 2, 2], mlp_ratios=[4] * 4, sr_ratios=[8, 4, 2, 1], window_sizes=[7] * 4)
_FILTERS = [*[dict(type='DW', kernel_size=7)] * 2, dict(type='GF', h=14, w=8), dict(type='GF', h=7, w=4)]
_HORNET = dict(base_dim=8, depths=[1] * 4, orders=[2, 3, 4, 5], dw_cfg=_FILTERS)
_DINO = {'backbone.base_channels': 32, 'backbone.stem_channels': 32, 'neck.in_channels': [64, 128, 256]}
_NARROW = {'backbone.widen_factor': 0.125}
_GROUPS = {'bbox_head.norm_cfg': dict(type='GN', num_groups=8)}
_PROTOS = {'bbox_head.num_protos': 4, 'mask_head.num_protos': 4, 'mask_head.proto_channels': (16, 16, 16, None, 16, 4)}

# 64 pixels would give the pyramids of detectors a stride-2 convolution over one pixel, whose bfloat16 weight gradient torch's
# CPU kernel leaves uninitialised now and then
CASES = {
    'ResNet-18': Case('mmpretrain::resnet/resnet18_8xb32_in1k.py', {'head.topk': (1,)}),
    'Swin': Case('mmpretrain::swin_transformer/swin-tiny_16xb64_in1k.py', {
        'backbone.arch': _SWIN, 'backbone.img_size': 64, 'backbone.window_size': 4, 'backbone.pad_small_map': True}),
    'ViT': Case('mmpretrain::vision_transformer/vit-base-p16_64xb64_in1k.py', {
        **_VIT_BACKBONE, 'head.hidden_dim': 64}, size=32),
    'ConvNeXt': Case('mmpretrain::convnext/convnext-tiny_32xb128_in1k.py', {
        'backbone.arch': dict(depths=[1, 1, 2, 1], channels=[12, 24, 48, 96])}),
    'MAE': Case('mmpretrain::mae/mae_vit-base-p16_8xb512-amp-coslr-300e_in1k.py', {**_VIT_BACKBONE, **_MAE}, size=32),
    'MobileNetV3': Case('mmpretrain::mobilenet_v3/mobilenet-v3-small-050_8xb128_in1k.py', {'head.topk': (1,)}, by=1, noise=6),
    'Twins': Case('mmpretrain::twins/twins-svt-small_8xb128_in1k.py', {'backbone.arch': {**_TWINS, **_TWINS_REST}}),
    'HorNet': Case('mmpretrain::hornet/hornet-tiny-gf_8xb128_in1k.py', {'backbone.arch': _HORNET}),
    'FCN': Case('mmseg::fcn/fcn_r50-d8_4xb2-40k_cityscapes-512x1024.py', by=32),
    'PSPNet': Case('mmseg::pspnet/pspnet_r50-d8_4xb2-40k_cityscapes-512x1024.py', by=32),
    'DeepLabV3+': Case('mmseg::deeplabv3plus/deeplabv3plus_r50-d8_4xb2-40k_cityscapes-512x1024.py', by=32),
    'SegFormer': Case('mmseg::segformer/segformer_mit-b0_8xb2-160k_ade20k-512x512.py', by=2),
    'UPerNet': Case('mmseg::upernet/upernet_r50_4xb2-40k_cityscapes-512x1024.py', by=32),
    'RetinaNet': Case('mmdet::retinanet/retinanet_r50_fpn_1x_coco.py', by=16, size=128),
    'FCOS': Case('mmdet::fcos/fcos_r50-caffe_fpn_gn-head_1x_coco.py', _GROUPS, by=16, size=128, noise=2),
    'Faster R-CNN': Case('mmdet::faster_rcnn/faster-rcnn_r50_fpn_1x_coco.py', by=16, noise=3, draws=True),
    'Mask R-CNN': Case('mmdet::mask_rcnn/mask-rcnn_r50_fpn_1x_coco.py', by=16, noise=3, draws=True),
    'DETR': Case('mmdet::detr/detr_r50_8xb2-150e_coco.py', lr=1e-5, noise=6),
    'Deformable DETR': Case('mmdet::deformable_detr/deformable-detr_r50_16xb2-50e_coco.py', {'bbox_head.embed_dims': 32}),
    # its decoder knows no other width
    'DINO': Case('mmdet::dino/dino-4scale_r50_8xb2-12e_coco.py', _DINO, by=1, noise=4),
    'Sparse R-CNN': Case('mmdet::sparse_rcnn/sparse-rcnn_r50_fpn_1x_coco.py', lr=1e-5, noise=None, draws=True),
    'YOLACT': Case('mmdet::yolact/yolact_r50_1xb8-55e_coco.py', _PROTOS, by=16, size=128, lr=1e-5, noise=8),
    'YOLOX': Case('mmdet::yolox/yolox_tiny_8xb8-300e_coco.py', _NARROW, by=3, noise=None, draws=True),
    'RTMDet': Case('mmdet::rtmdet/rtmdet_tiny_8xb32-300e_coco.py', _NARROW, by=3),
}  # fmt: skip
#: RTMDet's first loss is nearly 0, since rounded scores choose what is learned.
COMPARED = [name for name in CASES if name != 'RTMDet']

_NUMBERS = dict(num_classes=CLASSES, num_queries=20, num_proposals=20, max_per_img=20, score_thr=0.0)


def smaller(node: Any, by: int, random: bool, key: str = '') -> Any:
    """A config's model with fewer channels, layers, classes and queries; without dropout, unless ``random``."""
    if isinstance(node, dict):
        found = {name: smaller(value, by, random, name) for name, value in node.items()}
        if found.get('type') in ('ResNet', 'ResNetV1c'):
            first = 64 // by * (1 if node['depth'] == 18 else 4)
            found.update(depth=18, base_channels=first, stem_channels=first, style='pytorch')
        if found.get('type') == 'SyncBN':
            found['type'] = 'BN'
        return None if found.get('type') == 'Pretrained' else found
    if isinstance(node, (list, tuple)):
        # six are the stages of a decoder
        return [smaller(item, by, random, key) for item in (node[:2] if len(node) == 6 else node)]
    if key == 'pretrained' or not isinstance(node, (int, float)):
        return None if key == 'pretrained' else node
    if key.endswith(('channels', 'channel', 'embed_dims', 'num_feats')) and node % by == 0:
        return node // by
    if key in ('num_layers', 'num_stages') and node == 6:
        return 2
    return 0.0 if 'drop' in key and not random else _NUMBERS.get(key, node)


def load_config(name: str, random: bool = False) -> Config:
    """The project's config with a small model; with ``random``, it keeps dropout, and mixed or resized batches."""
    case = CASES[name]
    register(case.project)
    cfg = get_config(case.config)
    # as the projects' own runners do it
    cfg.model.setdefault('data_preprocessor', cfg.get('data_preprocessor'))
    model = smaller(cfg.model.to_dict(), case.by, random)
    for path, value in case.changes.items():
        *parents, last = path.split('.')
        functools.reduce(dict.__getitem__, parents, model)[last] = value
    if case.project == 'mmseg':
        model['data_preprocessor']['size'] = (case.size, case.size)
    if not random:
        # Mixup, CutMix and sizes of YOLOX that are drawn
        model['data_preprocessor'].pop('batch_augments', None)
        if case.project == 'mmpretrain':
            model.pop('train_cfg', None)
    cfg.model = model
    return cfg


def register(project: str) -> None:
    """Import a project's models into the registries."""
    if project != 'mmpretrain' and find_spec('mmcv._ext') is None:
        pytest.skip(f'{project} imports the compiled ops of mmcv, and this is mmcv-lite')
    import_module(f'{project}.utils').register_all_modules(init_default_scope=False)
    init_default_scope(project)


def build(name: str) -> nn.Module:
    """The small model in FP32, initialised by its own rules."""
    cfg = load_config(name)
    torch.manual_seed(0)
    model = MODELS.build(cfg.model)
    model.init_weights()
    return model.train()


# -- data -------------------------------------------------------------------------------------------------------------


def make_batch(project: str, size: int, count: int = 2, seed: int = 0, stacked: bool = False) -> dict[str, Any]:
    """Images with something to learn, and labels, masks or boxes, as the project's own pipelines pack them.

    Args:
        stacked: As self-supervised models take them: a list would be several views of an image.
    """
    generator = torch.Generator().manual_seed(seed)
    inputs, samples = [], []
    for index in range(count):
        image = torch.randint(0, 40, (3, size, size), generator=generator)
        label = (index + seed) % CLASSES
        lo, hi = size // 8 + 2 * index, size // 8 + size // 2 + 2 * index
        image[label % 3, lo:hi, lo:hi] += 150
        inputs.append(image.to(torch.uint8))
        samples.append(_SAMPLES[project](size, lo, hi, label))
    return dict(inputs=torch.stack(inputs) if stacked else inputs, data_samples=samples)


def batch_of(name: str, seed: int) -> dict[str, Any]:
    return make_batch(CASES[name].project, CASES[name].size, seed=seed, stacked=name == 'MAE')


def _meta(size: int) -> dict[str, Any]:
    shape = (size, size)
    shapes = dict(img_shape=shape, ori_shape=shape, pad_shape=shape, batch_input_shape=shape)
    return dict(shapes, img_id=1, scale_factor=(1.0, 1.0), flip=False)


def _classified(size: int, lo: int, hi: int, label: int) -> Any:
    from mmpretrain.structures import DataSample

    return DataSample(metainfo=_meta(size)).set_gt_label(label)


def _segmented(size: int, lo: int, hi: int, label: int) -> Any:
    from mmseg.structures import SegDataSample

    mask = torch.zeros(1, size, size, dtype=torch.int64)
    mask[:, lo:hi, lo:hi] = 1 + label % (CLASSES - 1)
    mask[:, :2] = 255
    return SegDataSample(metainfo=_meta(size), gt_sem_seg=PixelData(data=mask))


def _detected(size: int, lo: int, hi: int, label: int) -> Any:
    from mmdet.structures import DetDataSample
    from mmdet.structures.mask import BitmapMasks

    boxes = torch.tensor([[lo, lo, hi, hi], [lo / 2, hi - 4, hi, size - 2]], dtype=torch.float32)
    masks = np.zeros((2, size, size), dtype=np.uint8)
    for mask, box in zip(masks, boxes.int().tolist()):
        mask[box[1] : box[3], box[0] : box[2]] = 1
    labels = torch.tensor([label, (label + 1) % CLASSES])
    sample = DetDataSample(metainfo=_meta(size))
    sample.gt_instances = InstanceData(bboxes=boxes, labels=labels, masks=BitmapMasks(masks, size, size))
    sample.ignored_instances = InstanceData(bboxes=torch.zeros(0, 4), labels=torch.zeros(0, dtype=torch.int64))
    return sample


_SAMPLES = {'mmpretrain': _classified, 'mmseg': _segmented, 'mmdet': _detected}


@DATASETS.register_module()
class Pictures(torch.utils.data.Dataset):
    """Four images in memory."""

    def __init__(self, project: str, size: int) -> None:
        self.project, self.size = project, size

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, Any]:
        batch = make_batch(self.project, self.size, 1, index)
        if self.project == 'mmdet':
            # which those that are given here have no use for
            del batch['data_samples'][0].gt_instances.masks
        return dict(inputs=batch['inputs'][0], data_samples=batch['data_samples'][0])


def narrow(value: Any) -> list[str]:
    """Where there are 16-bit numbers in predictions."""
    if isinstance(value, BaseDataElement):
        value = dict(value.all_items())
    if isinstance(value, dict):
        return [f'{key}.{path}' for key, item in value.items() for path in narrow(item)]
    if isinstance(value, (list, tuple)):
        return [path for item in value for path in narrow(item)]
    return [str(value.dtype)] if isinstance(value, Tensor) and value.dtype in TYPES.values() else []


@METRICS.register_module()
class Narrow(BaseMetric):
    """How many 16-bit tensors there are in predictions."""

    default_prefix = 'types'

    def process(self, data_batch: Any, data_samples: Any) -> None:
        assert narrow(data_samples) == []
        self.results.append(1)

    def compute_metrics(self, results: list[int]) -> dict[str, float]:
        return dict(seen=len(results))


# -- training ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Trained:
    """What two steps came to."""

    model: nn.Module
    start: dict[str, Tensor]
    losses: list[float]

    def end(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self.model.state_dict().items()}

    def way(self) -> Tensor:
        """How the weights moved, all in one vector."""
        end = self.end()
        names = [name for name, _ in self.model.named_parameters()]
        return torch.cat([(end[name].double() - self.start[name].double()).flatten() for name in names])


def train(
    name: str,
    level: str | None,
    seeds: Sequence[int] = (0, 1),
    accumulate: int = 1,
    prepare: Callable[[nn.Module], nn.Module] = lambda model: model,
) -> Trained:
    """A pass over the batch of each seed, by this package or, without a level, by mmengine's wrapper in FP32.

    Args:
        prepare: Gives what is trained in place of the model.
    """
    model = build(name)
    start = {key: value.clone() for key, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=CASES[name].lr)
    options: dict[str, Any] = dict(optimizer=optimizer, accumulative_counts=accumulate)
    if level is None:
        wrapper = OptimWrapper(**options)
    else:
        # a dynamic one would skip steps while it is searched for
        scale = dict(loss_scale=64.0) if level in ('O1', 'O2') else {}
        wrapper = AmpOptimWrapper(opt_level=level, verbosity=0, **scale, **options)
    trained = prepare(model)
    wrapper.initialize_count_status(trained, 0, len(seeds))
    losses = []
    for seed in seeds:
        torch.manual_seed(seed)
        losses.append(float(trained.train_step(batch_of(name, seed), wrapper)['loss']))
    return Trained(model, start, losses)


def apart(left: Trained, right: Trained) -> float:
    """How far the ways of the weights are from each other, as a part of the second one."""
    return float((left.way() - right.way()).norm() / right.way().norm())


@functools.cache
def fp32(name: str) -> Trained:
    return train(name, None)


# -- tests ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('level', ['O0', *TYPES])
@pytest.mark.parametrize('name', COMPARED)
def test_two_steps_are_those_of_fp32(name: str, level: str) -> None:
    """Losses and the way of the weights; FP32 predictions; weights and gradients in the level's types; plain state dicts."""
    case, reference, trained = CASES[name], fp32(name), train(name, level)
    model, end = trained.model, trained.end()
    assert end.keys() == trained.start.keys()
    assert all(value.dtype is trained.start[key].dtype and value.isfinite().all() for key, value in end.items())
    if level == 'O0':
        assert differences([trained.losses, end], [reference.losses, reference.end()]) == []
        return
    bounds = BOUNDS[TYPES[level]]
    assert trained.losses == pytest.approx(reference.losses, rel=0.08 if case.draws else bounds.loss)
    assert case.noise is None or apart(trained, reference) <= bounds.way * case.noise
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    kept = {id(parameter) for norm in norms for parameter in norm.parameters()}
    for key, parameter in model.named_parameters():
        expected = TYPES[level] if level in CAST and id(parameter) not in kept else torch.float32
        assert parameter.dtype is expected, key
    if name != 'MAE':  # predicts nothing
        model.eval()
        with torch.no_grad():
            predictions = model.val_step(batch_of(name, 0))
        assert predictions and narrow(predictions) == []


@pytest.mark.parametrize('name', [name for name in COMPARED if CASES[name].noise is not None])
def test_bounds_are_exceeded_by_other_batches(name: str) -> None:
    assert apart(train(name, None, (2, 3)), fp32(name)) > 1.2 * BOUNDS[torch.bfloat16].way * CASES[name].noise


@pytest.mark.parametrize(('name', 'level'), [('ResNet-18', 'O2'), ('ViT', 'O4'), ('Swin', 'O5')])
def test_compiled_training(name: str, level: str) -> None:
    """The losses of eager training, in the graphs of plain FP32 training.

    Where a graph breaks, torch tries the frames around the place by themselves, and the call of a cast module is one of them.
    """

    def compiled(model: nn.Module) -> nn.Module:
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        model.compile(backend='aot_eager')
        return model

    def graphs(level: str | None) -> int:
        register(CASES[name].project)
        losses = train(name, level, prepare=compiled).losses
        assert losses == pytest.approx(fp32(name).losses, rel=0.02)
        return torch._dynamo.utils.counters['stats']['unique_graphs']

    count = graphs(None)
    assert graphs(level) <= count + (count > 1)


def train_on_rank(here: Here, name: str, level: str, unused: bool) -> None:
    """Both ranks end with the same bits, near the FP32 training on the batches of both."""

    def wrap(model: nn.Module) -> nn.Module:
        return MMDistributedDataParallel(model, broadcast_buffers=False, find_unused_parameters=unused)

    mine = train(name, level, (here.rank, 2 + here.rank), prepare=wrap)
    ends: list[Any] = [None] * here.world
    dist.all_gather_object(ends, {key: mine.end()[key] for key, _ in mine.model.named_parameters()})
    assert differences(*ends) == []
    both = train(name, None, (0, 1, 2, 3), accumulate=2)
    distance = apart(mine, both)
    # without an average, it would be near 1
    assert distance <= 0.2, distance


@pytest.fixture(scope='session')
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    group = Group(tmp_path_factory.mktemp('ranks'), torch.device('cpu'), 2)
    yield group
    group.close()


@pytest.mark.parametrize(
    ('name', 'level', 'unused'),
    [('ResNet-18', 'O2', False), ('ViT', 'O5', False), ('PSPNet', 'O1', True), ('RetinaNet', 'O5', False)],
)
def test_two_ranks_train_on_batches_of_both(name: str, level: str, unused: bool, ranks: Group, tmp_path: Path) -> None:
    ranks.run(tmp_path, train_on_rank, name=name, level=level, unused=unused)


def test_overflow_is_named_with_module_and_op() -> None:
    name, place = 'RetinaNet', 'backbone.layer3.0.conv2'
    model = build(name)
    with torch.no_grad():
        model.get_submodule(place).weight.fill_(6e4)

    def losses(batch: dict[str, Any]) -> Any:
        return model(**model.data_preprocessor(batch, True), mode='loss')

    (found,) = examine(model, 'O2', [batch_of(name, 0)], lambda named: model.parse_losses(named)[0], call=losses)
    assert (found.cause, found.module, found.phase) == ('forward_range', place, 'forward'), found.text
    assert 'conv' in found.op, found.text


# -- whole runs -------------------------------------------------------------------------------------------------------

RUNS = [
    ('ResNet-18', 'O1'),
    ('Swin', 'O2'),
    ('FCN', 'O2'),
    ('SegFormer', 'O5'),
    ('Faster R-CNN', 'O4'),
    ('RTMDet', 'O5'),
]


def run_config(name: str, folder: Path) -> Config:
    """Two epochs of two iterations with the project's optimizer, schedulers, dropout and averages of weights."""
    case, cfg = CASES[name], load_config(name, random=True)
    schedulers = cfg.param_scheduler if isinstance(cfg.param_scheduler, list) else [cfg.param_scheduler]
    # otherwise it would be that of the run, before some begin
    cfg.param_scheduler = [dict(dict(end=one.get('begin', 0) + 300), **one) for one in schedulers]
    hooks = [hook for hook in cfg.get('custom_hooks', []) if 'Switch' not in hook['type']]
    loader = dict(batch_size=2, num_workers=0, persistent_workers=False, pin_memory=False)
    loader['dataset'] = dict(type='mmengine.Pictures', project=case.project, size=case.size)
    validate = dict(loader, sampler=dict(type='DefaultSampler', shuffle=False))
    evaluator = dict(type='mmengine.Narrow')
    for loop in ('train', 'val', 'test'):
        for part in ('cfg', 'dataloader', 'evaluator', 'pipeline'):
            cfg.pop(f'{loop}_{part}', None)
    cfg.update(
        train_cfg=dict(by_epoch=True, max_epochs=2, val_interval=1),
        train_dataloader=dict(loader, sampler=dict(type='DefaultSampler', shuffle=True)),
        **dict(val_cfg={}, val_dataloader=validate, val_evaluator=evaluator),
        **dict(test_cfg={}, test_dataloader=validate, test_evaluator=evaluator),
        default_hooks=dict(checkpoint=dict(type='CheckpointHook', interval=1, by_epoch=True)),
        custom_hooks=[*hooks, dict(type='amp_wrapper.ExactResumeHook')],
        custom_imports=dict(imports=['amp_wrapper'], allow_failed_imports=False),
        **dict(
            work_dir=str(folder / 'run'), log_level='ERROR', randomness=dict(seed=0), vis_backends=[], visualizer=None
        ),
    )
    return cfg


def run_tool(path: Path, *words: str) -> None:
    """Do what ``python PATH WORDS`` does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, 'argv', [str(path), *words])
        runpy.run_path(str(path), run_name='__main__')


@pytest.mark.parametrize(('name', 'level'), RUNS)
def test_resume_is_exact_in_the_projects_own_tool(name: str, level: str, tmp_path: Path) -> None:
    """``tools/train.py --amp`` with a level; the metric sees no 16-bit predictions, and the checkpoint no 16-bit weights."""
    project, cfg = CASES[name].project, run_config(name, tmp_path)
    tool = Path(str(find_spec(project).origin)).parent / '.mim' / 'tools' / 'train.py'
    words = ['--amp', '--cfg-options', f'optim_wrapper.opt_level={level}']
    if level in ('O1', 'O2'):
        words.append('optim_wrapper.loss_scale=64')
    ends = []
    for run in ('whole', 'resumed'):
        # mmengine keeps loggers and hubs by the name of the config
        cfg.dump(path := tmp_path / f'{tmp_path.name}_{run}.py')
        folder = tmp_path / run
        if run == 'resumed':
            folder.mkdir()
            shutil.copy(tmp_path / 'whole' / 'epoch_1.pth', folder)
        run_tool(tool, str(path), '--work-dir', str(folder), *(['--resume'] if run == 'resumed' else []), *words)
        ends.append(torch.load(folder / 'epoch_2.pth', weights_only=True))
    state = ends[0]['optimizer']
    assert state.get('amp', state['loss_scaler'].get('amp'))['opt_level'] == level
    assert ends[0]['meta']['iter'] == 4 and not narrow(ends[0]['state_dict'])
    for part in ('state_dict', 'ema_state_dict', 'optimizer', 'param_schedulers'):
        assert differences(ends[0].get(part), ends[1].get(part)) == [], part


# -- the repository's configs -----------------------------------------------------------------------------------------


def test_there_is_a_config_for_each_model() -> None:
    text = ''.join(path.read_text() for path in OWN_CONFIGS)
    assert [name for name in COMPARED if CASES[name].config not in text and name != 'YOLOX'] == []


@pytest.mark.parametrize('path', OWN_CONFIGS, ids=lambda path: path.stem)
def test_own_config_trains(path: Path) -> None:
    """At full size: for one step, but with float16, in which a step takes minutes on a CPU, for none."""
    project, level = path.parent.name, path.stem[-2:].upper()
    register(project)
    cfg = Config.fromfile(path)
    if project == 'mmpretrain':
        cfg.model.setdefault('data_preprocessor', cfg.data_preprocessor)
    model = revert_sync_batchnorm(MODELS.build(cfg.model)).train()
    if 'sparse' in path.stem:
        # without its own initial values, boxes have negative sizes
        model.rpn_head.init_weights()
    wrapper = build_optim_wrapper(model, cfg.optim_wrapper)
    assert type(wrapper) is AmpOptimWrapper and wrapper.opt_level == level
    # a base of ours must not lose what the project's optimizer was told
    assert wrapper.param_groups[0]['lr'] > 0 and type(wrapper.optimizer).__name__ in ('SGD', 'AdamW', 'RMSprop')
    wrapper.initialize_count_status(model, 0, 1)
    assert (TYPES[level] in {parameter.dtype for parameter in model.parameters()}) == (level in CAST)
    if TYPES[level] is torch.bfloat16:
        # DINO takes its 900 queries from the pixels of its maps
        size = 224 if path.stem.startswith(('vit', 'swin', 'dino')) else 64
        assert model.train_step(make_batch(project, size), wrapper)['loss'].isfinite()
