"""Faults planted in models of timm, mmpretrain, mmsegmentation and mmdetection, each in one known module, as they happen there.

A fault is a weight, an option of a module, a loss in place of another, or what a batch holds; its line is that of the
package, or of the loss. Models of a package that is missing are skipped.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from mmengine.registry import DATASETS
from mmengine.runner import Runner
from planted_overflows import examine
from test_models import CASES, Pictures, batch_of, build, load_config
from torch import Tensor, nn

from amp_wrapper import Diagnosis


class RootLoss(nn.Module):
    """The distance of boxes; for boxes whose weight is 0 it is the root of zero, which has no derivative."""

    def forward(self, pred: Tensor, target: Tensor, weight: Tensor, avg_factor: float) -> Tensor:
        return ((pred - target) * weight).square().sum(-1).sqrt().sum() / avg_factor


class LogOfSoftmax(nn.Module):
    """Cross entropy as books write it. Its name does not end as those of losses do, which are computed in FP32."""

    def forward(self, score: Tensor, label: Tensor, avg_factor: float) -> Tensor:
        return -(F.one_hot(label, score.shape[-1]) * score.softmax(-1).log()).sum() / avg_factor


class MeanOfLabelled(nn.Module):
    """The mean over pixels that have a label: 0 divided by 0 where none has."""

    loss_name = 'loss_mean'

    def forward(self, score: Tensor, label: Tensor, weight: Any = None, ignore_index: int = 255) -> Tensor:
        labelled = (label != ignore_index).float()
        return (F.cross_entropy(score, label * labelled.long(), reduction='none') * labelled).sum() / labelled.sum()


class Planted(NamedTuple):
    """A fault, and what has to be told of it.

    Attributes:
        model: Of timm, or a case of ``test_models.py``.
        edits: What becomes of attributes: a value, or a function of the old one.
        levels: At which it is tried.
        cause: Several with spaces between them are as good.
        module: Its name.
        op: A part of the op, or of the node of the first gradient.
        source: The file of the line.
        words: Of the model, for timm.
    """

    model: str
    edits: dict[str, Any]
    levels: str
    cause: str
    module: str
    op: str
    source: str = ''
    words: dict[str, Any] = {}


_ALL, _OWN, _SHIFTED, _NORM = 'O1 O2 O5', 'test_diagnosis.py', 'layers.0.blocks.1', 'blocks.1.0.bn1'
_ATTN, _MLP, _BOX, _PIXELS = 'blocks.1.attn', 'stages.2.blocks.0.mlp', 'rpn_head.loss_bbox', 'decode_head.loss_decode'
_VIT = dict(img_size=32, patch_size=8, embed_dim=48, depth=3, num_heads=3)
_SWIN = dict(img_size=32, window_size=4, embed_dim=24, depths=(2, 1), num_heads=(2, 2))
_ATTO, _BIAS = dict(depths=(1, 1, 2, 1), dims=(8, 16, 24, 32)), 'head.layers.head.bias'
TABLE = {
    'large logits': Planted('vit_tiny_patch16_224', {f'{_ATTN}.fused_attn': False, f'{_ATTN}.qkv.weight': lambda w: 3000 * w},
        'O1 O2', 'forward_range', _ATTN, 'bmm', 'attention.py', _VIT),
    'masked row': Planted(
        'swin_tiny_patch4_window7_224', {f'{_SHIFTED}.attn_mask': lambda old: old.index_fill(1, torch.tensor([3]), -torch.inf)},
        _ALL, 'forward_nan', f'{_SHIFTED}.attn.softmax', 'softmax', 'swin_transformer.py', _SWIN),
    'eps of zero': Planted('convnextv2_atto', {f'{_MLP}.fc1.weight': 0, f'{_MLP}.fc1.bias': 0, f'{_MLP}.grn.eps': 1e-8},
        'O2', 'forward_range', f'{_MLP}.grn', 'div', 'grn.py', _ATTO),
    # they are divided by their norm or 1e-12, whichever is larger: gradients are multiplied by 1e12. A new norm is zero
    'queries of zero': Planted('swinv2_tiny_window8_256', {
        f'{_SHIFTED}.attn.qkv.weight': lambda old: old * (torch.arange(72) > 23)[:, None], f'{_SHIFTED}.norm1.weight': 1},
        'O1 O2', 'gradient_range', f'{_SHIFTED}.attn', 'copy', words=_SWIN),
    'negative variance': Planted('mobilenetv3_small_050', {f'{_NORM}.training': False, f'{_NORM}.running_var': -1},
        _ALL, 'forward_nan', _NORM, 'batch_norm', 'norm_act.py', dict(in_chans=3)),
    # a box of infinite area overlaps with nothing, so that its loss is finite; what comes back is 0 times infinity
    'exp of boxes': Planted('FCOS', {'bbox_head.conv_reg.bias': 100},
        _ALL, 'forward_nan gradient_nan', 'bbox_head', 'exp', 'fcos_head.py'),
    'root of zero': Planted('Faster R-CNN', {_BOX: lambda _: RootLoss()}, _ALL, 'gradient_nan', _BOX, 'sqrt'),
    'log of zero': Planted('ViT', {_BIAS: torch.tensor([40, 0, 0, 0]), 'head.loss_module': lambda _: LogOfSoftmax()},
        'O2', 'forward_range', 'head.loss_module', 'log', _OWN),
    'nothing labelled': Planted('FCN', {_PIXELS: lambda _: MeanOfLabelled()}, _ALL, 'loss forward_nan', _PIXELS, 'div', _OWN),
}  # fmt: skip


def plant(model: nn.Module, edits: dict[str, Any]) -> None:
    for path, new in edits.items():
        place, _, name = path.rpartition('.')
        old = getattr(model.get_submodule(place), name)
        value = new(old) if callable(new) else new
        if isinstance(old, Tensor):
            old.data.copy_(torch.as_tensor(value))
        else:
            setattr(model.get_submodule(place), name, value)


def train(case: Planted, level: str) -> list[Diagnosis]:
    """Plant a fault in a new model, and train for a step."""
    # what a dynamic one does by itself is not told
    options = dict(loss_scale=128.0) if level in ('O1', 'O2') else {}
    torch.manual_seed(0)
    if case.words:
        model = pytest.importorskip('timm').create_model(case.model, num_classes=2, **case.words)
        plant(model, case.edits)
        return examine(model, level, [torch.randn(2, 3, 32, 32)], **options)
    pytest.importorskip(CASES[case.model].project)
    model, batch = build(case.model), batch_of(case.model, 0)
    plant(model, case.edits)
    for sample in batch['data_samples'] if case.module == _PIXELS else ():
        sample.gt_sem_seg.data.fill_(255)

    def losses(batch: dict[str, Any]) -> Any:
        return model(**model.data_preprocessor(batch, True), mode='loss')

    return examine(model, level, [batch], lambda found: model.parse_losses(found)[0], call=losses, **options)


@pytest.mark.parametrize('case', TABLE.values(), ids=TABLE)
def test_fault_is_named_with_its_line(case: Planted) -> None:
    for level in case.levels.split():
        (found,) = train(case, level)
        assert found.cause in case.cause.split() and found.module == case.module, (level, found.text)
        assert case.op in found.text.lower(), (level, found.text)
        # a line is that of a forward pass
        assert found.phase == ('forward' if case.source else 'backward'), (level, found.text)
        assert f'/{case.source}:' in found.source or not case.source, (level, found.text)
        # what is out of range is mended by a setting, what is no number in FP32 is not
        mended = any(remedy.finite for remedy in found.remedies)
        assert mended == found.cause.endswith('range'), (level, found.remedies)


@DATASETS.register_module()
class SpoiledPictures(Pictures):
    """Their files have names, and one number of the last one is NaN."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        image, sample = super().__getitem__(index).values()
        sample.set_metainfo(dict(img_path=f'train/{index}.tiff'))
        spoiled = torch.arange(image.numel()).view_as(image) == (4321 if index == 3 else -1)
        return dict(inputs=image.float().masked_fill(spoiled, torch.nan), data_samples=sample)


@pytest.mark.parametrize('level', ['O2', 'O5'])
def test_nan_in_a_picture_is_told_with_the_names_of_the_files(level: str, tmp_path: Path) -> None:
    model, dataset = load_config('RetinaNet').model, dict(type='mmengine.SpoiledPictures', project='mmdet', size=128)
    loader = dict(batch_size=2, sampler=dict(type='DefaultSampler', shuffle=False), dataset=dataset)
    wrapper = dict(type='AmpOptimWrapper', opt_level=level, verbosity=0, optimizer=dict(type='SGD', lr=1e-4))
    words = dict(default_scope='mmdet', experiment_name=tmp_path.name, log_level='ERROR', randomness=dict(seed=0))
    hooks, loop = [dict(type='amp_wrapper.AmpMonitorHook')], dict(by_epoch=False, max_iters=2)
    Runner(model, str(tmp_path), loader, train_cfg=loop, optim_wrapper=wrapper, custom_hooks=hooks, **words).train()
    (found,) = (json.loads(path.read_text()) for path in (tmp_path / 'amp_diagnosis').glob('*.json'))
    assert (found['cause'], found['iteration']) == ('input', 2), found['text']
    assert found['samples'] == ['train/2.tiff', 'train/3.tiff']
