"""The models of mmpretrain, mmsegmentation and mmdetection that are tried, each from its project's own config.

Every case takes the whole ``model`` of a config and makes it narrower and shallower; no module is replaced, with one
exception that the projects themselves make on a CPU: SyncBN becomes BN.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from torch import nn

#: Classes in the generated data.
CLASSES = 4


@dataclasses.dataclass(frozen=True)
class Case:
    """One model.

    Attributes:
        name: As its authors write it.
        project: Package that defines it: 'mmpretrain', 'mmseg' or 'mmdet'.
        config: Path below the project's ``configs`` folder.
        model: What is merged into the config's ``model`` to make it small.
        lr: Learning rate of the overfitting run, with AdamW.
        size: Edge of the square images, in pixels.
        draws: Whether its loss draws samples at random among candidates that rounded scores choose: one candidate more or
            less changes them all.
    """

    name: str
    project: str
    config: str
    model: dict[str, Any]
    lr: float = 2e-3
    size: int = 64
    draws: bool = False

    @property
    def slug(self) -> str:
        """A name for files and test ids."""
        return self.name.lower().replace(' ', '_').replace('-', '_')


_TINY_VIT = dict(_delete_=True, embed_dims=48, num_layers=2, num_heads=3, feedforward_channels=96)
_RESNET18 = dict(depth=18, base_channels=16, init_cfg=None)
_FPN = dict(in_channels=[16, 32, 64, 128], out_channels=32)
# an untrained detector is sure of nothing
_ANY_SCORE = dict(score_thr=0.0)
_SEG_RESNET = dict(pretrained=None, backbone=dict(depth=18, stem_channels=16, base_channels=16))
_SEG_AUX = dict(in_channels=64, channels=16, num_classes=CLASSES)


def _roi_head(**extra: Any) -> dict[str, Any]:
    head = dict(
        bbox_roi_extractor=dict(out_channels=32),
        bbox_head=dict(in_channels=32, fc_out_channels=64, num_classes=CLASSES),
    )
    return dict(
        backbone=_RESNET18,
        neck=_FPN,
        rpn_head=dict(in_channels=32, feat_channels=32),
        roi_head=dict(head, **extra),
        train_cfg=dict(rpn_proposal=dict(max_per_img=60), rcnn=dict(sampler=dict(num=64))),
        test_cfg=dict(rcnn=_ANY_SCORE),
    )


_DII_HEAD = dict(
    in_channels=32,
    feedforward_channels=64,
    num_heads=4,
    num_classes=CLASSES,
    dynamic_conv_cfg=dict(in_channels=32, feat_channels=8, out_channels=32),
)


def _attention(**extra: Any) -> dict[str, Any]:
    return dict(embed_dims=32, **extra)


def _detr_layers(deformable: bool) -> dict[str, Any]:
    feed_forward = dict(embed_dims=32, feedforward_channels=64)
    cross = _attention(num_heads=4)
    return dict(
        encoder=dict(num_layers=2, layer_cfg=dict(self_attn_cfg=_attention(num_heads=4), ffn_cfg=feed_forward)),
        decoder=dict(
            num_layers=2,
            layer_cfg=dict(self_attn_cfg=_attention(num_heads=4), cross_attn_cfg=cross, ffn_cfg=feed_forward),
        ),
        positional_encoding=dict(num_feats=16),
        num_queries=20,
        test_cfg=dict(max_per_img=20),
    )


CASES: tuple[Case, ...] = (
    Case(
        'ResNet-18',
        'mmpretrain',
        'resnet/resnet18_8xb32_in1k.py',
        dict(
            backbone=dict(stem_channels=16, base_channels=16),
            head=dict(in_channels=128, num_classes=CLASSES, topk=(1,)),
        ),
    ),
    Case(
        'Swin',
        'mmpretrain',
        'swin_transformer/swin-tiny_16xb64_in1k.py',
        dict(
            backbone=dict(
                arch=dict(_delete_=True, embed_dims=16, depths=[1, 2, 1, 1], num_heads=[1, 2, 4, 8]),
                img_size=64,
                window_size=4,
                pad_small_map=True,
                drop_path_rate=0.0,
            ),
            head=dict(in_channels=128, num_classes=CLASSES),
        ),
    ),
    Case(
        'ViT',
        'mmpretrain',
        'vision_transformer/vit-base-p16_64xb64_in1k.py',
        dict(
            backbone=dict(arch=_TINY_VIT, img_size=32, patch_size=8, drop_rate=0.0),
            head=dict(in_channels=48, hidden_dim=64, num_classes=CLASSES),
        ),
        size=32,
    ),
    Case(
        'ConvNeXt',
        'mmpretrain',
        'convnext/convnext-tiny_32xb128_in1k.py',
        dict(
            backbone=dict(arch=dict(_delete_=True, depths=[1, 1, 2, 1], channels=[16, 32, 48, 64]), drop_path_rate=0.0),
            head=dict(in_channels=64, num_classes=CLASSES),
        ),
    ),
    Case(
        'MAE',
        'mmpretrain',
        'mae/mae_vit-base-p16_8xb512-amp-coslr-300e_in1k.py',
        dict(
            backbone=dict(arch=_TINY_VIT, img_size=32, patch_size=8),
            neck=dict(
                num_patches=16,
                patch_size=8,
                embed_dim=48,
                decoder_embed_dim=32,
                decoder_depth=1,
                decoder_num_heads=2,
            ),
            head=dict(patch_size=8),
        ),
        size=32,
    ),
    Case(
        'MobileNetV3',
        'mmpretrain',
        'mobilenet_v3/mobilenet-v3-small-050_8xb128_in1k.py',
        dict(head=dict(num_classes=CLASSES, mid_channels=[64], dropout_rate=0.0, topk=(1,))),
    ),
    Case(
        'Twins',
        'mmpretrain',
        'twins/twins-svt-small_8xb128_in1k.py',
        dict(
            backbone=dict(
                arch=dict(
                    _delete_=True,
                    embed_dims=[16, 32, 32, 64],
                    depths=[2, 1, 1, 1],
                    num_heads=[1, 2, 4, 8],
                    patch_sizes=[4, 2, 2, 2],
                    strides=[4, 2, 2, 2],
                    mlp_ratios=[4, 4, 4, 4],
                    sr_ratios=[8, 4, 2, 1],
                    window_sizes=[7, 7, 7, 7],
                ),
                drop_path_rate=0.0,
            ),
            head=dict(in_channels=64, num_classes=CLASSES),
        ),
    ),
    Case(
        'HorNet',
        'mmpretrain',
        'hornet/hornet-tiny-gf_8xb128_in1k.py',
        dict(
            backbone=dict(
                arch=dict(
                    _delete_=True,
                    base_dim=16,
                    depths=[1, 1, 1, 1],
                    orders=[2, 3, 4, 5],
                    dw_cfg=[dict(type='DW', kernel_size=7)] * 2
                    + [dict(type='GF', h=14, w=8), dict(type='GF', h=7, w=4)],
                ),
                drop_path_rate=0.0,
            ),
            head=dict(in_channels=128, num_classes=CLASSES),
        ),
    ),
    Case(
        'FCN',
        'mmseg',
        'fcn/fcn_r50-d8_4xb2-40k_cityscapes-512x1024.py',
        dict(
            **_SEG_RESNET,
            decode_head=dict(in_channels=128, channels=16, num_classes=CLASSES, dropout_ratio=0.0),
            auxiliary_head=dict(_SEG_AUX, dropout_ratio=0.0),
        ),
    ),
    Case(
        'PSPNet',
        'mmseg',
        'pspnet/pspnet_r50-d8_4xb2-40k_cityscapes-512x1024.py',
        dict(
            **_SEG_RESNET,
            decode_head=dict(in_channels=128, channels=16, num_classes=CLASSES, dropout_ratio=0.0),
            auxiliary_head=dict(_SEG_AUX, dropout_ratio=0.0),
        ),
    ),
    Case(
        'DeepLabV3+',
        'mmseg',
        'deeplabv3plus/deeplabv3plus_r50-d8_4xb2-40k_cityscapes-512x1024.py',
        dict(
            **_SEG_RESNET,
            decode_head=dict(
                in_channels=128, channels=16, c1_in_channels=16, c1_channels=8, num_classes=CLASSES, dropout_ratio=0.0
            ),
            auxiliary_head=dict(_SEG_AUX, dropout_ratio=0.0),
        ),
    ),
    Case(
        'SegFormer',
        'mmseg',
        'segformer/segformer_mit-b0_8xb2-160k_ade20k-512x512.py',
        dict(
            backbone=dict(
                embed_dims=16, num_layers=[1, 1, 1, 1], num_heads=[1, 2, 4, 4], drop_path_rate=0.0, init_cfg=None
            ),
            decode_head=dict(in_channels=[16, 32, 64, 64], channels=32, num_classes=CLASSES, dropout_ratio=0.0),
        ),
    ),
    Case(
        'UPerNet',
        'mmseg',
        'upernet/upernet_r50_4xb2-40k_cityscapes-512x1024.py',
        dict(
            **_SEG_RESNET,
            decode_head=dict(in_channels=[16, 32, 64, 128], channels=16, num_classes=CLASSES, dropout_ratio=0.0),
            auxiliary_head=dict(_SEG_AUX, dropout_ratio=0.0),
        ),
    ),
    # 64 pixels would give these pyramids a stride-2 convolution over one pixel, whose bfloat16 weight gradient torch's CPU
    # kernel leaves uninitialised now and then
    Case(
        'RetinaNet',
        'mmdet',
        'retinanet/retinanet_r50_fpn_1x_coco.py',
        dict(
            backbone=_RESNET18,
            neck=_FPN,
            bbox_head=dict(in_channels=32, feat_channels=32, stacked_convs=2, num_classes=CLASSES),
            test_cfg=_ANY_SCORE,
        ),
        size=128,
    ),
    Case(
        'FCOS',
        'mmdet',
        'fcos/fcos_r50-caffe_fpn_gn-head_1x_coco.py',
        dict(
            backbone=dict(_RESNET18, style='pytorch'),
            neck=_FPN,
            bbox_head=dict(in_channels=32, feat_channels=32, stacked_convs=2, num_classes=CLASSES),
            test_cfg=_ANY_SCORE,
        ),
        size=128,
    ),
    Case('Faster R-CNN', 'mmdet', 'faster_rcnn/faster-rcnn_r50_fpn_1x_coco.py', _roi_head(), draws=True),
    Case(
        'Mask R-CNN',
        'mmdet',
        'mask_rcnn/mask-rcnn_r50_fpn_1x_coco.py',
        _roi_head(
            mask_roi_extractor=dict(out_channels=32),
            mask_head=dict(num_convs=2, in_channels=32, conv_out_channels=32, num_classes=CLASSES),
        ),
        draws=True,
    ),
    Case(
        'DETR',
        'mmdet',
        'detr/detr_r50_8xb2-150e_coco.py',
        dict(
            backbone=_RESNET18,
            neck=dict(in_channels=[128], out_channels=32),
            bbox_head=dict(embed_dims=32, num_classes=CLASSES),
            **_detr_layers(deformable=False),
        ),
    ),
    Case(
        'Deformable DETR',
        'mmdet',
        'deformable_detr/deformable-detr_r50_16xb2-50e_coco.py',
        dict(
            backbone=_RESNET18,
            neck=dict(in_channels=[32, 64, 128], out_channels=32),
            bbox_head=dict(embed_dims=32, num_classes=CLASSES),
            **_detr_layers(deformable=True),
        ),
    ),
    Case(
        'DINO',
        'mmdet',
        'dino/dino-4scale_r50_8xb2-12e_coco.py',
        dict(
            backbone=_RESNET18,
            neck=dict(in_channels=[32, 64, 128]),
            bbox_head=dict(num_classes=CLASSES),
            # its decoder knows no other width than 256
            encoder=dict(num_layers=2, layer_cfg=dict(ffn_cfg=dict(feedforward_channels=64))),
            decoder=dict(num_layers=2, layer_cfg=dict(ffn_cfg=dict(feedforward_channels=64))),
            dn_cfg=dict(group_cfg=dict(num_dn_queries=10)),
            num_queries=20,
            test_cfg=dict(max_per_img=20),
        ),
    ),
    Case(
        'Sparse R-CNN',
        'mmdet',
        'sparse_rcnn/sparse-rcnn_r50_fpn_1x_coco.py',
        dict(
            backbone=_RESNET18,
            neck=_FPN,
            rpn_head=dict(num_proposals=20, proposal_feature_channel=32),
            roi_head=dict(
                proposal_feature_channel=32,
                num_stages=2,
                stage_loss_weights=[1, 1],
                bbox_roi_extractor=dict(out_channels=32),
                bbox_head={'0': _DII_HEAD, '1': _DII_HEAD},
            ),
            test_cfg=dict(rcnn=dict(max_per_img=20)),
        ),
    ),
    Case(
        'YOLACT',
        'mmdet',
        'yolact/yolact_r50_1xb8-55e_coco.py',
        dict(
            backbone=_RESNET18,
            neck=_FPN,
            bbox_head=dict(in_channels=32, feat_channels=32, num_protos=8, num_classes=CLASSES),
            mask_head=dict(in_channels=32, proto_channels=(16, 16, 16, None, 16, 8), num_protos=8, num_classes=CLASSES),
            test_cfg=_ANY_SCORE,
        ),
        size=128,
    ),
    Case(
        'YOLOX',
        'mmdet',
        'yolox/yolox_tiny_8xb8-300e_coco.py',
        dict(
            backbone=dict(deepen_factor=0.33, widen_factor=0.125),
            neck=dict(in_channels=[32, 64, 128], out_channels=32),
            bbox_head=dict(in_channels=32, feat_channels=32, num_classes=CLASSES),
            test_cfg=_ANY_SCORE,
        ),
    ),
)
#: Two ranges by different counts, an average of weights and a pipeline that is switched. It is resumed, and not held against
#: FP32: its first loss is nearly 0, since rounded scores choose what is learned.
RTMDET = Case(
    'RTMDet',
    'mmdet',
    'rtmdet/rtmdet_tiny_8xb32-300e_coco.py',
    dict(
        backbone=dict(widen_factor=0.125, init_cfg=None),
        neck=dict(in_channels=[32, 64, 128], out_channels=32),
        bbox_head=dict(in_channels=32, feat_channels=32, num_classes=CLASSES),
        test_cfg=_ANY_SCORE,
    ),
)
BY_NAME = {case.name: case for case in CASES}


def configs_folder(project: str) -> Path:
    """Where an installed project keeps its configs."""
    spec = find_spec(project)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / '.mim' / 'configs'


def load_config(case: Case, augment: bool = False) -> Config:
    """The project's config with the model made small.

    Args:
        case: The model.
        augment: Whether batches are mixed and resized at random, and dropout and stochastic depth are on, where the config
            says so.
    """
    cfg = Config.fromfile(configs_folder(case.project) / case.config)
    if case.project == 'mmpretrain':
        if not augment:
            cfg.model.pop('train_cfg', None)
        if 'data_preprocessor' in cfg and 'num_classes' in cfg.data_preprocessor:
            # Mixup makes vectors of class scores
            cfg.data_preprocessor.num_classes = CLASSES
    if case.name == 'YOLOX':
        preprocessor = cfg.model.data_preprocessor
        if augment:
            preprocessor.batch_augments[0].update(random_size_range=(64, 96), interval=1)
        else:
            preprocessor.batch_augments = None
    if case.name == 'Sparse R-CNN':
        # lists are merged item by item
        del cfg.model.roi_head.bbox_head[2:]
    model = copy.deepcopy(case.model)
    cfg.merge_from_dict(dict(model=_with_dropout(model) if augment else model))
    _sync_bn_to_bn(cfg.model)
    if case.project == 'mmseg':
        cfg.model.data_preprocessor.size = (case.size, case.size)
    return cfg


def _with_dropout(node: Any) -> Any:
    """What makes a model small, without what turns its random numbers off."""
    if not isinstance(node, dict):
        return node
    off = ('drop_rate', 'drop_path_rate', 'dropout_ratio', 'dropout_rate')
    return {key: _with_dropout(value) for key, value in node.items() if key not in off}


def _sync_bn_to_bn(node: Any) -> None:
    if isinstance(node, dict):
        if node.get('type') == 'SyncBN':
            node['type'] = 'BN'
        for item in node.values():
            _sync_bn_to_bn(item)
    elif isinstance(node, (list, tuple)):
        for item in node:
            _sync_bn_to_bn(item)


def build_model(case: Case, seed: int = 0) -> nn.Module:
    """The small model in FP32, initialised by its own rules from ``seed``."""
    register(case.project)
    cfg = load_config(case)
    init_default_scope(cfg.get('default_scope', case.project))
    if case.project == 'mmpretrain' and 'data_preprocessor' in cfg:
        # as its Runner does it
        cfg.model.setdefault('data_preprocessor', cfg.data_preprocessor)
    torch.manual_seed(seed)
    model = MODELS.build(cfg.model)
    model.init_weights()
    return model


def register(project: str) -> None:
    """Import a project's models into the registries."""
    if project == 'mmpretrain':
        from mmpretrain.utils import register_all_modules
    elif project == 'mmseg':
        from mmseg.utils import register_all_modules
    else:
        from mmdet.utils import register_all_modules
    register_all_modules(init_default_scope=False)


def make_batch(case: Case, count: int = 2, seed: int = 0) -> dict[str, Any]:
    """Images with something to learn, in the form that the case's pipelines pack them.

    Returns:
        ``inputs``, uint8 tensors of shape (3, size, size), and ``data_samples`` of the project's own class.
    """
    generator = torch.Generator().manual_seed(seed)
    size = case.size
    inputs, samples = [], []
    for index in range(count):
        image = torch.randint(0, 40, (3, size, size), generator=generator)
        label = index % CLASSES
        lo, hi = size // 8 + 2 * index, size // 8 + size // 2 + 2 * index
        image[label % 3, lo:hi, lo:hi] += 150
        inputs.append(image.to(torch.uint8))
        samples.append(_SAMPLES[case.project](size, lo, hi, label))
    # self-supervised models take several views of an image as a list, so theirs come stacked
    return dict(inputs=torch.stack(inputs) if case.name == 'MAE' else inputs, data_samples=samples)


def _classification_sample(size: int, lo: int, hi: int, label: int) -> Any:
    from mmpretrain.structures import DataSample

    return DataSample(metainfo=dict(img_shape=(size, size), ori_shape=(size, size))).set_gt_label(label)


def _segmentation_sample(size: int, lo: int, hi: int, label: int) -> Any:
    from mmengine.structures import PixelData
    from mmseg.structures import SegDataSample

    mask = torch.zeros(1, size, size, dtype=torch.int64)
    mask[:, lo:hi, lo:hi] = 1 + label % (CLASSES - 1)
    mask[:, :2] = 255
    meta = dict(img_shape=(size, size), ori_shape=(size, size), pad_shape=(size, size), flip=False)
    return SegDataSample(metainfo=meta, gt_sem_seg=PixelData(data=mask))


def _detection_sample(size: int, lo: int, hi: int, label: int) -> Any:
    import numpy as np
    from mmdet.structures import DetDataSample
    from mmdet.structures.mask import BitmapMasks
    from mmengine.structures import InstanceData

    boxes = torch.tensor([[lo, lo, hi, hi], [lo / 2, hi - 4, hi, size - 2]], dtype=torch.float32)
    masks = np.zeros((2, size, size), dtype=np.uint8)
    for mask, box in zip(masks, boxes.int().tolist()):
        mask[box[1] : box[3], box[0] : box[2]] = 1
    instances = InstanceData(
        bboxes=boxes,
        labels=torch.tensor([label, (label + 1) % CLASSES]),
        masks=BitmapMasks(masks, size, size),
    )
    meta = dict(
        img_id=1,
        img_shape=(size, size),
        ori_shape=(size, size),
        pad_shape=(size, size),
        batch_input_shape=(size, size),
        scale_factor=(1.0, 1.0),
        flip=False,
    )
    sample = DetDataSample(metainfo=meta, gt_instances=instances)
    sample.ignored_instances = InstanceData(bboxes=torch.zeros(0, 4), labels=torch.zeros(0, dtype=torch.int64))
    return sample


_SAMPLES: dict[str, Callable[[int, int, int, int], Any]] = {
    'mmpretrain': _classification_sample,
    'mmseg': _segmentation_sample,
    'mmdet': _detection_sample,
}
