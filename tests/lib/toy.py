"""A small model, data set and runner for tests of the mmengine integration."""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import mmengine.runner.runner
import numpy as np
import torch
import torch.nn.functional as F
from mmengine.config import Config
from mmengine.evaluator import BaseMetric
from mmengine.hooks import Hook
from mmengine.logging import MMLogger
from mmengine.model import BaseDataPreprocessor, BaseModel
from mmengine.registry import DATA_SAMPLERS, DATASETS, HOOKS, METRICS, MODELS
from mmengine.runner import FlexibleRunner, Runner
from torch import Tensor, nn
from torch.utils.data import Dataset, RandomSampler

import amp_wrapper  # noqa: F401  (takes over the registry names)

_runs = itertools.count()
LEVELS = ('O0', 'O1', 'O2', 'O3', 'O4', 'O5')


@MODELS.register_module()
class ToyPreprocessor(BaseDataPreprocessor):
    """A mean that float16 cannot hold."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer('mean', torch.tensor([0.123675]), persistent=False)

    def forward(self, data: dict[str, Any], training: bool = False) -> dict[str, Any]:
        assert self.mean.dtype == torch.float32
        data = dict(self.cast_data(data))
        data['inputs'] = data['inputs'] - self.mean
        return data


@MODELS.register_module()
class ToyModel(BaseModel):
    """Convolution, BatchNorm, LayerNorm, a linear layer, an FP32 tensor made on the fly; the loss inside forward."""

    def __init__(self, width: int = 4, dropout: float = 0.0, ballast: int = 0) -> None:
        super().__init__(data_preprocessor=dict(type='ToyPreprocessor'))
        self.dropout = dropout
        # makes a checkpoint large enough to be caught in the middle of being written
        self.register_buffer('ballast', torch.zeros(ballast) if ballast else None)
        self.conv = nn.Conv2d(1, width, 3, padding=1)
        self.bn = nn.BatchNorm2d(width)
        self.norm = nn.LayerNorm(width)
        self.fc = nn.Linear(width, 3)
        self.seen: list[torch.dtype] = []

    def extract_feat(self, inputs: Tensor) -> Tensor:
        x = F.relu(self.bn(self.conv(inputs)))
        x = F.dropout(x, self.dropout, self.training)
        return self.norm(x.mean((2, 3)) + torch.linspace(0, 0.1, x.shape[1], device=x.device))

    def forward(self, inputs: Tensor, labels: Tensor | None = None, mode: str = 'tensor') -> Any:
        logits = self.fc(self.extract_feat(inputs))
        self.seen = [self.conv.weight.dtype, self.bn.weight.dtype, logits.dtype]
        if mode == 'loss':
            return dict(loss=F.cross_entropy(logits, labels))
        if mode == 'predict':
            return [dict(pred=p, label=label) for p, label in zip(logits, labels)]
        return logits


@DATASETS.register_module()
class ToyData(Dataset):
    """Images whose class can be learned."""

    METAINFO = dict(classes=('a', 'b', 'c'))

    def __init__(self, length: int = 28, augment: bool = False) -> None:
        self.augment = augment
        generator = torch.Generator().manual_seed(1)
        self.labels = torch.arange(length) % 3
        self.images = torch.randn(length, 1, 6, 6, generator=generator) + self.labels.view(-1, 1, 1, 1) * 0.5
        self.metainfo = dict(self.METAINFO)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        image = self.images[index]
        if self.augment:
            # each of the generators that data pipelines draw from
            image = image + 0.1 * random.random() + 0.1 * float(np.random.rand()) + 0.1 * torch.randn(())
        return dict(inputs=image, labels=self.labels[index])


@DATA_SAMPLERS.register_module()
class ToyRandomSampler(RandomSampler):
    """torch's own sampler under mmengine: its order comes from the global generator."""

    def __init__(self, dataset: Any, shuffle: bool = True, seed: int | None = None) -> None:
        super().__init__(dataset)


@METRICS.register_module()
class ToyScore(BaseMetric):
    """Mean log-probability of the right class: differs with every bit of the weights."""

    default_prefix = 'toy'

    def __init__(self, fp32: bool = True) -> None:
        super().__init__()
        self.fp32 = fp32

    def process(self, data_batch: Any, data_samples: Any) -> None:
        for sample in data_samples:
            assert not self.fp32 or sample['pred'].dtype == torch.float32, sample['pred'].dtype
            self.results.append(float(sample['pred'].float().log_softmax(0)[int(sample['label'])]))

    def compute_metrics(self, results: list[float]) -> dict[str, float]:
        return dict(score=sum(results) / len(results))


def loader(
    batch_size: int = 4,
    shuffle: bool = True,
    length: int = 28,
    augment: bool = False,
    num_workers: int = 0,
    sampler: str = 'DefaultSampler',
) -> dict[str, Any]:
    return dict(
        batch_size=batch_size,
        num_workers=num_workers,
        dataset=dict(type='ToyData', length=length, augment=augment),
        sampler=dict(type=sampler, shuffle=shuffle),
        collate_fn=dict(type='default_collate'),
    )


def toy_config(work_dir: Path | str, optim_wrapper: dict[str, Any], **overrides: Any) -> Config:
    """A whole config: 7 batches an epoch, validation each epoch."""
    config: dict[str, Any] = dict(
        model=dict(type='ToyModel'),
        work_dir=str(work_dir),
        default_scope='mmengine',
        train_dataloader=loader(),
        val_dataloader=loader(shuffle=False),
        val_evaluator=dict(type='ToyScore'),
        train_cfg=dict(by_epoch=True, max_epochs=2, val_interval=1),
        val_cfg=dict(),
        optim_wrapper=optim_wrapper,
        default_hooks=dict(logger=dict(type='LoggerHook', interval=1)),
        log_level='WARNING',
        randomness=dict(seed=0, deterministic=True),
        # runs of one second and one name would log into one history
        experiment_name=f'toy_{next(_runs)}',
    )
    config.update(overrides)
    return Config(config)


def everything(
    level: str,
    by_epoch: bool = True,
    num_workers: int = 0,
    save_each: int | None = None,
    ballast: int = 0,
    max_epochs: int = 4,
    max_keep_ckpts: int = 2,
    patience: int = 3,
    min_delta: float = 0.01,
    sampler: str | None = None,
) -> dict[str, Any]:
    """``optim_wrapper`` and overrides of a training with all that draws random numbers, counts, averages or decides.

    Args:
        level: The opt level.
        by_epoch: Whether the loop counts epochs (7 iterations each) or iterations.
        num_workers: Of the train dataloader.
        save_each: Save each so many iterations, within epochs too; None for each epoch, or each 3 iterations.
        ballast: Numbers of float32 that make the checkpoint larger.
        max_epochs: Length of the training.
        max_keep_ckpts: How many checkpoints stay.
        patience: Of early stopping.
        min_delta: Of early stopping: what counts as better.
        sampler: Type of the train sampler.
    """
    end = 7 * max_epochs
    saving = dict(interval=1) if by_epoch and save_each is None else dict(interval=save_each or 3, by_epoch=False)
    train_cfg = (
        dict(by_epoch=True, max_epochs=max_epochs, val_interval=1)
        if by_epoch
        else dict(by_epoch=False, max_iters=end, val_interval=5)
    )
    return dict(
        optim_wrapper=dict(
            type='AmpOptimWrapper',
            opt_level=level,
            # grows and backs off within the run
            loss_scale=dict(init_scale=2.0**18, growth_interval=3) if level in ('O1', 'O2') else None,
            optimizer=dict(type='SGD', lr=0.2, momentum=0.9, weight_decay=1e-3),
            accumulative_counts=2,
            clip_grad=dict(max_norm=0.5),
            paramwise_cfg=dict(bias_decay_mult=0.0, custom_keys=dict(fc=dict(lr_mult=0.5))),
        ),
        model=dict(type='ToyModel', dropout=0.3, ballast=ballast),
        train_dataloader=loader(
            augment=True,
            num_workers=num_workers,
            sampler=sampler or ('DefaultSampler' if by_epoch else 'InfiniteSampler'),
        ),
        # validation draws as many random numbers as it likes
        val_dataloader=loader(shuffle=False, augment=True),
        train_cfg=train_cfg,
        param_scheduler=[
            dict(type='LinearLR', start_factor=0.1, by_epoch=False, begin=0, end=9),
            dict(type='CosineAnnealingLR', T_max=end, by_epoch=False),
        ],
        default_hooks=dict(
            logger=dict(type='LoggerHook', interval=3),
            checkpoint=dict(
                type='CheckpointHook', max_keep_ckpts=max_keep_ckpts, save_best='toy/score', rule='greater', **saving
            ),
        ),
        custom_hooks=[
            dict(type='EMAHook', momentum=0.1, begin_iter=4),
            dict(type='EarlyStoppingHook', monitor='toy/score', rule='greater', patience=patience, min_delta=min_delta),
            dict(type='amp_wrapper.ExactResumeHook'),
        ],
    )


def run(work_dir: Path | str, optim_wrapper: dict[str, Any], **overrides: Any) -> Runner:
    """Train the toy."""
    torch.manual_seed(0)
    runner = Runner.from_cfg(toy_config(work_dir, optim_wrapper, **overrides))
    runner.train()
    return runner


def run_flexible(work_dir: Path | str, optim_wrapper: dict[str, Any], **overrides: Any) -> FlexibleRunner:
    """Train the toy with mmengine's other runner."""
    config = toy_config(work_dir, optim_wrapper, **overrides)
    config.strategy = dict(type='SingleDeviceStrategy')
    config.randomness, config.env_cfg = dict(seed=0), {}
    torch.manual_seed(0)
    runner = FlexibleRunner.from_cfg(config)
    runner.train()
    return runner


def _plain_text(config: Config) -> str:
    return '\n'.join(f'{name} = {value!r}' for name, value in config.to_dict().items())


@contextmanager
def quick_runners() -> Iterator[None]:
    """mmengine formats the whole config, asks git for each file and looks for compilers at each start: not inside."""
    with (
        mock.patch.object(Config, 'pretty_text', property(_plain_text)),
        mock.patch.object(mmengine.runner.runner, 'collect_env', dict),
        mock.patch.object(mmengine.runner.runner, 'get_git_hash', str),
    ):
        yield


class Stop(Exception):
    """The run was interrupted."""


@HOOKS.register_module()
class StopAt(Hook):
    """Interrupts a run, in place of SIGKILL: before an epoch, an iteration or a validation."""

    priority = 'LOWEST'

    def __init__(self, epochs: int | None = None, iters: int | None = None, val: int | None = None) -> None:
        self.epochs = epochs
        self.iters = iters
        self.val = val

    def before_train_epoch(self, runner: Any) -> None:
        if runner.epoch == self.epochs:
            raise Stop

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        if runner.iter == self.iters:
            raise Stop

    def before_val(self, runner: Any) -> None:
        if runner.iter == self.val:
            raise Stop


def checkpoint(work_dir: Path | str, name: str | None = None) -> dict[str, Any]:
    """The last checkpoint, or the named one, under ``weights_only``."""
    folder = Path(work_dir)
    path = folder / name if name else Path((folder / 'last_checkpoint').read_text())
    return torch.load(path, map_location='cpu', weights_only=True)


@contextmanager
def run_log() -> Iterator[list[str]]:
    """What the loggers of runners made inside say; give them ``log_level='INFO'``."""
    lines: list[str] = []
    original = MMLogger.callHandlers

    def keep(self: MMLogger, record: logging.LogRecord) -> None:
        lines.append(record.getMessage())
        original(self, record)

    with mock.patch.object(MMLogger, 'callHandlers', keep):
        yield lines


@MODELS.register_module()
class PoisonedModel(ToyModel):
    """The loss of some iterations is infinite."""

    def __init__(self, poisoned: tuple[int, ...] = (), **words: Any) -> None:
        super().__init__(**words)
        self.poisoned = poisoned
        self.calls = 0

    def forward(self, inputs: Tensor, labels: Tensor | None = None, mode: str = 'tensor') -> Any:
        result = super().forward(inputs, labels, mode)
        if mode == 'loss':
            self.calls += 1
            if self.calls in self.poisoned:
                result['loss'] = result['loss'] * float('inf')
        return result
