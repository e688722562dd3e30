"""mmpose and mmaction2: models, optimizers and schedules of their own configs, in mmengine's Runner, resumed in every phase."""

from __future__ import annotations

import copy
import dataclasses
import logging
import math
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.evaluator import BaseMetric
from mmengine.hooks import Hook
from mmengine.registry import DefaultScope
from mmengine.runner import Runner
from torch import Tensor
from torch.utils.data import Dataset
from ways import CAST, LEVELS, SCALE

EPOCHS, ITERATIONS, SIZE = 4, 4, 2
#: Iterations that a warm-up of hundreds becomes: the first checkpoint lies inside.
WARM_UP = 6
_SEEN: dict[str, Any] = {}


@dataclasses.dataclass(frozen=True)
class Case:
    """One model; see ``tests/downstream/zoo.py``.

    Attributes:
        name: As its authors write it.
        package: Distribution.
        config: Path below its ``configs``.
        model: What is merged into the config's ``model`` to make it small.
        sample: Gives ``inputs`` and a data sample of an index.
        lr: Learning rate in place of the config's, which belongs to another batch size.
        near: How far the falls of the loss may be apart, as a part of the first loss.
    """

    name: str
    package: str
    config: str
    model: dict[str, Any]
    sample: Callable[[int, Config], dict[str, Any]]
    lr: float
    near: float = 0.1

    def __str__(self) -> str:
        return self.name


def pose(index: int, cfg: Config) -> dict[str, Any]:
    """A picture with a bright spot at each joint, encoded by the config's own codec."""
    from mmpose.datasets.transforms import GenerateTarget, PackPoseInputs

    width, height = cfg.codec['input_size']
    random = np.random.default_rng(index)
    joints = random.uniform([8, 8], [width - 8, height - 8], size=(1, 17, 2)).astype(np.float32)
    image = random.integers(0, 40, (height, width, 3), dtype=np.uint8)
    for number, (x, y) in enumerate(joints[0].astype(int)):
        image[y - 2 : y + 2, x - 2 : x + 2, number % 3] += 150
    results = dict(
        img=image,
        img_shape=(height, width),
        ori_shape=(height, width),
        id=index,
        img_id=index,
        img_path='',
        category_id=1,
        bbox=np.array([[0, 0, width, height]], dtype=np.float32),
        bbox_center=np.array([[width / 2, height / 2]], dtype=np.float32),
        bbox_scale=np.array([[width, height]], dtype=np.float32),
        bbox_score=np.ones(1, dtype=np.float32),
        input_size=(width, height),
        input_center=np.array([width / 2, height / 2]),
        input_scale=np.array([width, height]),
        keypoints=joints,
        transformed_keypoints=joints,
        keypoints_visible=np.ones((1, 17), dtype=np.float32),
        flip_indices=[0, *(part for pair in range(1, 17, 2) for part in (pair + 1, pair))],
    )
    return PackPoseInputs()(GenerateTarget(encoder=dict(cfg.codec))(results))


def _action(inputs: Tensor, label: int) -> dict[str, Any]:
    from mmaction.structures import ActionDataSample

    return dict(inputs=inputs, data_samples=ActionDataSample(metainfo=dict(img_shape=(32, 32))).set_gt_label(label))


def frames(shape: tuple[int, ...], channel: int) -> Callable[[int, Config], dict[str, Any]]:
    """Videos, (clips, 3, frames, 32, 32) or (segments, 3, 32, 32), whose colour is the class."""

    def make(index: int, cfg: Config) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(index)
        inputs = torch.randint(0, 60, shape, generator=generator)
        inputs.select(channel, index % 3).add_(120)
        return _action(inputs.to(torch.uint8), index % 3)

    return make


def skeleton(index: int, cfg: Config) -> dict[str, Any]:
    """(clips, persons, frames, joints, 3), whose speed is the class."""
    generator = torch.Generator().manual_seed(index)
    inputs = torch.rand(1, 2, 20, 17, 3, generator=generator)
    inputs[..., 0] += torch.arange(20).view(1, 1, 20, 1) * 0.1 * (index % 3)
    return _action(inputs, index % 3)


_BODY = 'body_2d_keypoint'
_SMALL = dict(depth=18, base_channels=16, init_cfg=None)
_HEAD = dict(num_classes=3)
CASES = (
    Case(
        'RTMPose',
        'mmpose',
        f'{_BODY}/rtmpose/coco/rtmpose-t_8xb256-420e_coco-256x192.py',
        dict(
            backbone=dict(widen_factor=0.125, init_cfg=None),
            # 7 x 7 over 2 x 2 would leave bfloat16 weight gradients of torch's CPU kernel uninitialised now and then
            head=dict(
                in_channels=128,
                in_featuremap_size=(2, 2),
                final_layer_kernel_size=3,
                gau_cfg=dict(hidden_dims=32, s=16),
            ),
        ),
        pose,
        4e-3,
    ),
    Case(
        'HRNet heatmaps',
        'mmpose',
        f'{_BODY}/topdown_heatmap/coco/td-hm_hrnet-w32_8xb64-210e_coco-256x192.py',
        dict(
            backbone=dict(
                init_cfg=None,
                extra=dict(
                    stage2=dict(num_blocks=(1, 1), num_channels=(8, 16)),
                    stage3=dict(num_modules=1, num_blocks=(1, 1, 1), num_channels=(8, 16, 32)),
                    stage4=dict(num_modules=1, num_blocks=(1, 1, 1, 1), num_channels=(8, 16, 32, 64)),
                ),
            ),
            head=dict(in_channels=8),
        ),
        pose,
        2e-3,
    ),
    Case(
        'ResNet heatmaps, DARK',
        'mmpose',
        f'{_BODY}/topdown_heatmap/coco/td-hm_res50_dark-8xb64-210e_coco-256x192.py',
        dict(backbone=_SMALL, head=dict(in_channels=128, deconv_out_channels=(32, 32, 32))),
        pose,
        2e-3,
    ),
    Case(
        'SimCC',
        'mmpose',
        f'{_BODY}/simcc/coco/simcc_res50_8xb64-210e_coco-256x192.py',
        dict(
            backbone=_SMALL,
            head=dict(in_channels=128, in_featuremap_size=(2, 2), deconv_out_channels=(32, 32, 32)),
        ),
        pose,
        2e-3,
    ),
    Case(
        'Integral regression, DSNT',
        'mmpose',
        f'{_BODY}/integral_regression/coco/ipr_res50_dsnt-8xb64-210e_coco-256x256.py',
        dict(
            backbone=_SMALL,
            head=dict(in_channels=128, in_featuremap_size=(2, 2), deconv_out_channels=(32, 32, 32)),
            init_cfg=None,
        ),
        pose,
        2e-3,
    ),
    Case(
        'TSN',
        'mmaction2',
        'recognition/tsn/tsn_imagenet-pretrained-r50_8xb32-1x1x3-100e_kinetics400-rgb.py',
        dict(backbone=dict(depth=18, pretrained=None), cls_head=dict(_HEAD, in_channels=512)),
        frames((3, 3, 32, 32), 1),
        0.001,
        0.2,
    ),
    Case(
        'TSM',
        'mmaction2',
        'recognition/tsm/tsm_imagenet-pretrained-r50_8xb16-1x1x8-50e_kinetics400-rgb.py',
        dict(backbone=dict(depth=18, pretrained=None, pretrained2d=False), cls_head=dict(_HEAD, in_channels=512)),
        frames((8, 3, 32, 32), 1),
        0.002,
    ),
    Case(
        'SlowOnly',
        'mmaction2',
        'recognition/slowonly/slowonly_r50_8xb16-4x16x1-256e_kinetics400-rgb.py',
        dict(backbone=dict(depth=18, base_channels=8), cls_head=dict(_HEAD, in_channels=64)),
        frames((1, 3, 4, 32, 32), 1),
        0.05,
    ),
    Case(
        'Video Swin',
        'mmaction2',
        'recognition/swin/swin-tiny-p244-w877_in1k-pre_8xb8-amp-32x2x1-30e_kinetics400-rgb.py',
        dict(
            backbone=dict(
                arch=dict(_delete_=True, embed_dims=16, depths=[1, 1, 1, 1], num_heads=[1, 2, 4, 4]),
                pretrained=None,
                pretrained2d=False,
                window_size=(2, 4, 4),
            ),
            cls_head=dict(_HEAD, in_channels=128),
        ),
        frames((1, 3, 4, 32, 32), 1),
        2e-3,
    ),
    Case(
        'ST-GCN++',
        'mmaction2',
        'skeleton/stgcnpp/stgcnpp_8xb16-joint-u100-80e_ntu60-xsub-keypoint-2d.py',
        dict(
            backbone=dict(base_channels=16, num_stages=4, inflate_stages=[2, 3], down_stages=[2, 3]),
            cls_head=dict(_HEAD, in_channels=64),
        ),
        skeleton,
        0.02,
    ),
)


class Samples(Dataset):
    """What a case's function makes, with the classes that mmengine's loops ask for."""

    def __init__(self, case: Case, cfg: Config, first: int, count: int) -> None:
        self.metainfo = dict(dataset_name='generated', classes=('a', 'b', 'c'))
        self.items = [case.sample(first + index, cfg) for index in range(count)]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return copy.deepcopy(self.items[index])


class Watch(Hook):
    """Keeps losses, and what was resumed."""

    priority = 'VERY_LOW'

    def __init__(self, losses: list[float], rates: list[float], types: set[torch.dtype]) -> None:
        self.losses, self.rates, self.types = losses, rates, types

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        self.losses.append(float(outputs['loss'].detach()))
        self.rates.append(runner.optim_wrapper.param_groups[0]['lr'])
        self.types.update(parameter.dtype for parameter in runner.model.parameters())


class Predictions(BaseMetric):
    """That all predictions are FP32 and finite."""

    default_prefix = 'seen'

    def process(self, data_batch: Any, data_samples: Any) -> None:
        for sample in data_samples:
            values = [sample['pred_instances'][key] for key in ('keypoints',)] if 'pred_instances' in sample else []
            values += [sample['pred_score']] if 'pred_score' in sample else []
            assert values
            for value in values:
                value = torch.as_tensor(value)
                assert value.dtype not in (torch.float16, torch.bfloat16) and torch.isfinite(value).all()
            self.results.append(1)

    def compute_metrics(self, results: list[int]) -> dict[str, float]:
        return dict(count=len(results))


def load(case: Case) -> Config:
    name = {'mmaction2': 'mmaction'}.get(case.package, case.package)
    spec = find_spec(name)
    assert spec is not None and spec.origin is not None
    cfg = Config.fromfile(Path(spec.origin).parent / '.mim' / 'configs' / case.config)
    if case.package == 'mmpose':
        # 64 x 64 pixels, with heatmaps of a quarter
        cfg.codec.update(input_size=(64, 64), **(dict(heatmap_size=(16, 16)) if 'heatmap_size' in cfg.codec else {}))
        cfg.model.head.decoder = cfg.codec
        if 'input_size' in cfg.model.head:
            cfg.model.head.input_size = (64, 64)
    model = copy.deepcopy(case.model)
    cfg.merge_from_dict(dict(model=model))
    _plain_bn(cfg.model)
    return cfg


def _plain_bn(node: Any) -> None:
    if isinstance(node, dict):
        if node.get('type') == 'SyncBN':
            node['type'] = 'BN'
        for item in node.values():
            _plain_bn(item)


def shorter(schedulers: list[Any], epochs: int) -> list[Any]:
    """The config's own schedulers, over a training of ``EPOCHS``."""

    def scaled(value: float) -> int:
        return math.ceil(value * EPOCHS / epochs)

    found = []
    for scheduler in copy.deepcopy(schedulers):
        if scheduler.get('by_epoch', True):
            for key in ('begin', 'end', 'T_max'):
                if key in scheduler:
                    scheduler[key] = scaled(scheduler[key])
            if 'milestones' in scheduler:
                scheduler['milestones'] = [scaled(value) for value in scheduler['milestones']]
        else:
            scheduler['end'] = WARM_UP
        found.append(scheduler)
    return found


def train(
    case: Case, level: str | None, folder: Path, resume: Path | None = None, epochs: int = EPOCHS
) -> tuple[Any, Watch]:
    cfg = load(case)
    scope = 'mmaction' if case.package == 'mmaction2' else case.package
    wrapper = copy.deepcopy(cfg.optim_wrapper)
    wrapper.optimizer.lr = case.lr
    if level is None:
        wrapper.type = 'OptimWrapper'
    else:
        wrapper.update(type='AmpOptimWrapper', opt_level=level)
        if level in ('O1', 'O2'):
            wrapper.loss_scale = dict(SCALE)
    watch = Watch([], [], set())
    # the registries of the project are filled as its own tools do it
    if scope == 'mmpose':
        from mmpose.utils import register_all_modules
    else:
        from mmaction.utils import register_all_modules
    register_all_modules(init_default_scope=False)

    def loader(first: int, count: int) -> dict[str, Any]:
        return dict(
            batch_size=SIZE,
            num_workers=0,
            dataset=Samples(case, cfg, first, count),
            sampler=dict(type='DefaultSampler', shuffle=False),
            collate_fn=dict(type='pseudo_collate'),
        )

    runner = Runner(
        model=cfg.model,
        work_dir=str(folder),
        train_dataloader=loader(0, ITERATIONS * SIZE),
        val_dataloader=loader(100, 2),
        val_evaluator=[Predictions()],
        train_cfg=dict(by_epoch=True, max_epochs=epochs, val_interval=2),
        val_cfg=dict(),
        optim_wrapper=wrapper,
        param_scheduler=shorter(cfg.param_scheduler, cfg.train_cfg.max_epochs),
        custom_hooks=[watch, dict(type='amp_wrapper.ExactResumeHook')],
        default_hooks=dict(
            checkpoint=dict(type='CheckpointHook', interval=1, max_keep_ckpts=-1),
            logger=dict(type='LoggerHook', interval=1000),
        ),
        default_scope=scope,
        randomness=dict(seed=0),
        log_level=logging.ERROR,
        load_from=None if resume is None else str(resume),
        resume=resume is not None,
        experiment_name=f'{folder.name}_{case.name}_{level}',
    )
    runner.train()
    return runner, watch


_plain: dict[str, list[float]] = {}


def fp32(case: Case, folder: Path) -> list[float]:
    """Losses of a plain OptimWrapper, once for all levels."""
    if case.name not in _plain:
        _plain[case.name] = train(case, None, folder / 'fp32')[1].losses
    return _plain[case.name]


@pytest.fixture(autouse=True)
def scopes() -> Any:
    before = dict(DefaultScope._instance_dict)
    yield
    DefaultScope._instance_dict.clear()
    DefaultScope._instance_dict.update(before)


@pytest.mark.parametrize('level', LEVELS)
@pytest.mark.parametrize('case', CASES, ids=str)
def test_trains_and_resumes(case: Case, level: str, tmp_path: Path) -> None:
    """Losses as in FP32; resumed after each epoch: in the warm-up, before the next scheduler begins, and after."""

    plain = fp32(case, tmp_path)
    runner, watch = train(case, level, tmp_path / 'whole')
    assert len(watch.losses) == EPOCHS * ITERATIONS and all(map(math.isfinite, watch.losses))
    first, ours, theirs = plain[0], sum(watch.losses[-4:]) / 4, sum(plain[-4:]) / 4
    assert theirs < 0.95 * first, f'FP32 does not learn: {plain}'
    assert abs(ours - theirs) <= case.near * first, (plain, watch.losses)
    assert CAST.get(level, torch.float32) in watch.types
    expected = {key: value.clone() for key, value in runner.model.state_dict().items()}
    # in the warm-up or before the second scheduler begins, and after the last has begun
    for epoch in (1, EPOCHS - 1):
        again, seen = train(case, level, tmp_path / f'again{epoch}', tmp_path / 'whole' / f'epoch_{epoch}.pth')
        assert seen.rates == watch.rates[epoch * ITERATIONS :]
        assert seen.losses == watch.losses[epoch * ITERATIONS :], f'resumed after epoch {epoch}'
        off = [key for key, value in again.model.state_dict().items() if not torch.equal(value, expected[key])]
        assert not off, f'resumed after epoch {epoch}: {off[:5]}'
