"""Batches for models of other projects, which are not installed here: stand-ins have the names and methods of theirs."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from mmengine.structures import BaseDataElement
from torch import nn

from amp_wrapper.openmmlab import generated_data


class ClassSample(BaseDataElement):
    """As mmpretrain's ``DataSample``."""

    def set_gt_label(self, value: int) -> None:
        self.set_field(torch.tensor([value]), 'gt_label')


class Masks:
    """As mmdetection's ``BitmapMasks``."""

    def __init__(self, masks: np.ndarray, height: int, width: int) -> None:
        self.masks, self.height, self.width = masks, height, width

    def __len__(self) -> int:
        return len(self.masks)


@pytest.fixture
def projects(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    for name, members in {
        'mmpretrain.structures': dict(DataSample=ClassSample),
        'mmseg.structures': dict(SegDataSample=BaseDataElement),
        'mmdet.structures': dict(DetDataSample=BaseDataElement),
        'mmdet.structures.mask': dict(BitmapMasks=Masks),
    }.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setitem(sys.modules, name.partition('.')[0], ModuleType(name.partition('.')[0]))


def model_of(project: str, place: str, classes: int) -> nn.Module:
    """A model whose class comes from a project, with the number of classes where that project has it."""
    model = type('Model', (nn.Module,), {'__module__': f'{project}.models'})()
    holder: Any = model
    *parts, last = place.split('.')
    for part in parts:
        setattr(holder, part, nn.Module())
        holder = getattr(holder, part)
    setattr(holder, last, classes)
    return model


@pytest.mark.usefixtures('projects')
def test_classification() -> None:
    made = generated_data.batch(model_of('mmpretrain', 'head.num_classes', 5), (16, 3, 4, 6))
    assert made['inputs'].shape == (16, 3, 4, 6)
    assert made['inputs'].dtype == torch.uint8
    labels = {int(sample.gt_label) for sample in made['data_samples']}
    assert len(made['data_samples']) == 16
    assert labels <= set(range(5))
    assert len(labels) > 1


@pytest.mark.usefixtures('projects')
def test_segmentation() -> None:
    made = generated_data.batch(model_of('mmseg', 'decode_head.num_classes', 4), (2, 3, 8, 6))
    assert [image.shape for image in made['inputs']] == [(3, 8, 6)] * 2
    for sample in made['data_samples']:
        assert sample.gt_sem_seg.data.shape == (1, 8, 6)
        assert set(sample.gt_sem_seg.data.unique().tolist()) == {0, 1, 2, 3}
        assert sample.img_shape == (8, 6)


@pytest.mark.usefixtures('projects')
def test_detection() -> None:
    made = generated_data.batch(model_of('mmdet', 'roi_head.bbox_head.num_classes', 7), (2, 3, 40, 60))
    for index, sample in enumerate(made['data_samples']):
        boxes, masks = sample.gt_instances.bboxes, sample.gt_instances.masks
        assert (boxes[:, 2:] > boxes[:, :2]).all()
        assert ((boxes >= 0) & (boxes <= torch.tensor([60.0, 40.0, 60.0, 40.0]))).all()
        assert (masks.height, masks.width) == (40, 60)
        # a mask fills its box
        for mask, (left, top, right, bottom) in zip(masks.masks, boxes.int().tolist()):
            assert mask.sum() == (right - left) * (bottom - top) > 0
        assert set(sample.gt_instances.labels.tolist()) <= set(range(7))
        assert sample.ignored_instances.bboxes.shape == (0, 4)
        assert sample.img_id == index
