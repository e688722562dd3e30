"""Small generated data sets on disk, in the layouts that the projects read, and the loaders' part of a config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from zoo import CLASSES, Case

COUNT = 4
NAMES = tuple(f'class{index}' for index in range(CLASSES))


def write(root: Path, size: int) -> Path:
    """Write the images once, with a folder per class, a mask per image and COCO annotations.

    Args:
        root: Folder; made where it is missing.
        size: Edge of the images.

    Returns:
        The folder of this size.
    """
    folder = root / f'size{size}'
    if (folder / 'done').exists():
        return folder
    generator = np.random.default_rng(0)
    annotations, images = [], []
    for index in range(COUNT):
        label = index % CLASSES
        image = generator.integers(0, 40, (size, size, 3), dtype=np.uint8)
        mask = np.zeros((size, size), dtype=np.uint8)
        low, high = size // 8 + index, size // 8 + size // 2 + index
        image[low:high, low:high, label % 3] += 150
        mask[low:high, low:high] = 1 + label % (CLASSES - 1)
        name = f'{index}.png'
        for parent, data in ((f'classes/{NAMES[label]}', image), ('images', image), ('masks', mask)):
            (folder / parent).mkdir(parents=True, exist_ok=True)
            Image.fromarray(data).save(folder / parent / name)
        images.append(dict(id=index, file_name=name, width=size, height=size))
        corners = [low, low, high, low, high, high, low, high]
        annotations.append(
            dict(
                id=index + 1,
                image_id=index,
                category_id=label,
                bbox=[low, low, high - low, high - low],
                area=(high - low) ** 2,
                iscrowd=0,
                segmentation=[corners],
            )
        )
    categories = [dict(id=index, name=name) for index, name in enumerate(NAMES)]
    coco = dict(images=images, annotations=annotations, categories=categories)
    (folder / 'coco.json').write_text(json.dumps(coco))
    (folder / 'done').touch()
    return folder


def loaders(case: Case, folder: Path) -> dict[str, Any]:
    """The data part of a config: loaders and evaluators over what :func:`write` wrote."""
    data = _DATA[case.project](case, folder)
    common = dict(batch_size=2, num_workers=0, persistent_workers=False, pin_memory=False)
    if case.project == 'mmpretrain':
        common['collate_fn'] = dict(type='default_collate')
    train = dict(common, sampler=dict(type='DefaultSampler', shuffle=False), dataset=data['train'])
    result: dict[str, Any] = dict(train_dataloader=train)
    if data['val'] is None:
        return dict(result, val_dataloader=None, val_evaluator=None, test_dataloader=None, test_evaluator=None)
    val = dict(common, sampler=dict(type='DefaultSampler', shuffle=False), dataset=data['val'])
    evaluators = [*data['evaluators'], dict(type='mmengine.TypeWatch')]
    return dict(result, val_dataloader=val, val_evaluator=evaluators, test_dataloader=val, test_evaluator=evaluators)


def _classification(case: Case, folder: Path) -> dict[str, Any]:
    pipeline = [dict(type='LoadImageFromFile'), dict(type='Resize', scale=case.size), dict(type='PackInputs')]
    dataset = dict(type='CustomDataset', data_root=str(folder), data_prefix='classes', pipeline=pipeline)
    if case.name == 'MAE':
        return dict(train=dataset, val=None)
    return dict(train=dataset, val=dataset, evaluators=[dict(type='Accuracy', topk=(1,))])


def _segmentation(case: Case, folder: Path) -> dict[str, Any]:
    def dataset(*last: dict[str, Any]) -> dict[str, Any]:
        return dict(
            type='BaseSegDataset',
            data_root=str(folder),
            data_prefix=dict(img_path='images', seg_map_path='masks'),
            img_suffix='.png',
            seg_map_suffix='.png',
            metainfo=dict(classes=NAMES, palette=[[index, 0, 0] for index in range(CLASSES)]),
            pipeline=[
                dict(type='LoadImageFromFile'),
                dict(type='LoadAnnotations'),
                *last,
                dict(type='PackSegInputs'),
            ],
        )

    crop = dict(type='RandomCrop', crop_size=(case.size, case.size))
    return dict(train=dataset(crop), val=dataset(), evaluators=[dict(type='IoUMetric', iou_metrics=['mIoU'])])


def _detection(case: Case, folder: Path) -> dict[str, Any]:
    with_mask = case.name in ('Mask R-CNN', 'YOLACT')
    meta = ('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor')

    def dataset(*last: dict[str, Any], **extra: Any) -> dict[str, Any]:
        return dict(
            type='CocoDataset',
            data_root=str(folder),
            ann_file='coco.json',
            data_prefix=dict(img='images/'),
            metainfo=dict(classes=NAMES),
            pipeline=[
                dict(type='LoadImageFromFile'),
                dict(type='LoadAnnotations', with_bbox=True, with_mask=with_mask),
                dict(type='Resize', scale=(case.size, case.size), keep_ratio=True),
                *last,
            ],
            **extra,
        )

    metric = dict(
        type='CocoMetric', ann_file=str(folder / 'coco.json'), metric=['bbox', 'segm'] if with_mask else ['bbox']
    )
    return dict(
        train=dataset(dict(type='PackDetInputs')),
        val=dataset(dict(type='PackDetInputs', meta_keys=meta), test_mode=True),
        evaluators=[metric],
    )


_DATA = {'mmpretrain': _classification, 'mmseg': _segmentation, 'mmdet': _detection}
