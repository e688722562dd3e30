"""Batches of random images with random labels, in the form that the models of OpenMMLab's projects take."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np
import torch
from mmengine.structures import InstanceData, PixelData
from torch import Tensor, nn

from ..errors import AmpUsageError

#: Objects in each generated image of a detector.
OBJECTS = 3


def batch(model: nn.Module, shape: Sequence[int]) -> dict[str, Any]:
    """One batch, as the data loader of the model's project would collate it; from torch's and NumPy's global generators.

    Args:
        model: Of mmpretrain, mmsegmentation or mmdetection; or one whose ``forward`` takes ``inputs`` and ``labels`` and that
            has a last linear layer, by which the classes are counted.
        shape: (N, C, H, W) of the images.

    Raises:
        AmpUsageError: Any other model.
    """
    projects = {cls.__module__.partition('.')[0] for cls in type(model).__mro__}
    for project, make in _MAKERS.items():
        if project in projects:
            return make(model, shape)
    words = inspect.signature(model.forward).parameters
    if 'inputs' in words and 'labels' in words:
        labels = torch.randint(_classes(model), (shape[0],))
        return dict(inputs=torch.rand(tuple(shape)) * 255, labels=labels)
    raise AmpUsageError(
        f'--input-shape: no data can be generated for {type(model).__name__}, which is no model of mmpretrain, mmsegmentation '
        f'or mmdetection: leave it out, and let the config read its data set (--cfg-options data_root=PATH).'
    )


def _images(shape: Sequence[int]) -> list[Tensor]:
    return list((torch.rand(tuple(shape)) * 256).to(torch.uint8))


def _classes(model: nn.Module, *places: str) -> int:
    """The number of classes: of the first of the attributes that says it, or the outputs of the last linear layer."""
    for place in places:
        found: Any = model
        for name in place.split('.'):
            found = getattr(found, name, None)
        if isinstance(found, int) and found > 0:
            return found
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    return linear[-1].out_features if linear else 2


def _classification(model: nn.Module, shape: Sequence[int]) -> dict[str, Any]:
    sample = import_module('mmpretrain.structures').DataSample
    classes, samples = _classes(model, 'head.num_classes'), []
    for _ in range(shape[0]):
        made = sample()
        made.set_gt_label(int(torch.randint(classes, ())))
        made.set_metainfo(dict(num_classes=classes, img_shape=tuple(shape[2:]), ori_shape=tuple(shape[2:])))
        samples.append(made)
    return dict(inputs=torch.stack(_images(shape)), data_samples=samples)


def _segmentation(model: nn.Module, shape: Sequence[int]) -> dict[str, Any]:
    sample = import_module('mmseg.structures').SegDataSample
    classes, size, samples = _classes(model, 'num_classes', 'decode_head.num_classes'), tuple(shape[2:]), []
    for _ in range(shape[0]):
        made = sample(metainfo=dict(img_shape=size, ori_shape=size, pad_shape=size, scale_factor=1.0, flip=False))
        made.gt_sem_seg = PixelData(data=torch.randint(classes, (1, *size)))
        samples.append(made)
    return dict(inputs=_images(shape), data_samples=samples)


def _detection(model: nn.Module, shape: Sequence[int]) -> dict[str, Any]:
    sample = import_module('mmdet.structures').DetDataSample
    masks = import_module('mmdet.structures.mask').BitmapMasks
    places = ('bbox_head.num_classes', 'roi_head.bbox_head.num_classes', 'panoptic_head.num_things_classes')
    classes, (height, width), samples = _classes(model, *places), shape[2:], []
    for index in range(shape[0]):
        corner = torch.rand(OBJECTS, 2) * 0.5
        far = corner + 0.2 + torch.rand(OBJECTS, 2) * 0.3
        boxes = torch.cat([corner, far], 1) * torch.tensor([width, height, width, height])
        grid = np.zeros((OBJECTS, height, width), dtype=np.uint8)
        for mask, (left, top, right, bottom) in zip(grid, boxes.int().tolist()):
            mask[top:bottom, left:right] = 1
        size = (height, width)
        made = sample(
            metainfo=dict(
                img_id=index, img_shape=size, ori_shape=size, pad_shape=size, scale_factor=(1.0, 1.0), flip=False
            )
        )
        made.gt_instances = InstanceData(
            bboxes=boxes, labels=torch.randint(classes, (OBJECTS,)), masks=masks(grid, height, width)
        )
        made.ignored_instances = InstanceData(bboxes=torch.zeros(0, 4), labels=torch.zeros(0, dtype=torch.long))
        samples.append(made)
    return dict(inputs=_images(shape), data_samples=samples)


_MAKERS = {'mmpretrain': _classification, 'mmseg': _segmentation, 'mmdet': _detection}
