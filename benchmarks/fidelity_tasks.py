"""What the benchmark of fidelity trains: four tasks by mmengine's runner, at each level and with torch's own autocast."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import logging
import math
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.optim import OptimWrapper, OptimWrapperDict
from mmengine.registry import OPTIM_WRAPPERS
from mmengine.runner import Runner
from torch import Tensor, nn

from amp_wrapper import AmpOptimWrapper
from amp_wrapper.errors import OverflowStreakError
from amp_wrapper.policy import LEVELS

from . import fidelity_text
from .wrapping import TorchAmp

CONFIGS = Path(__file__).parents[1] / 'configs'
#: torch's own peers of O1 and O4.
STOCK = {'autocast float16': 'float16', 'autocast bfloat16': 'bfloat16'}
VARIANTS = (*LEVELS, *STOCK)
REFERENCE = 'O0'
#: Losses of so many steps are kept one by one; later ones as means of so many.
FIRST, BLOCK = 20, 5


@OPTIM_WRAPPERS.register_module()
class AutocastOptimWrapper(OptimWrapper):
    """``torch.autocast``, and ``GradScaler`` for float16, in mmengine's loop. mmengine's own class refuses a CPU.

    Args:
        optimizer: A torch optimizer over FP32 parameters.
        dtype: Of autocast.
        clip_grad: ``dict(max_norm=...)``, or None.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, dtype: str, clip_grad: dict[str, Any] | None = None) -> None:
        super().__init__(optimizer)
        self.amp = TorchAmp(optimizer, clip_grad, getattr(torch, dtype))
        self.skipped = False

    @contextmanager
    def optim_context(self, model: nn.Module) -> Iterator[None]:
        """Around the forward pass."""
        with super().optim_context(model), self.amp.optim_context(model):
            yield

    def update_params(self, loss: Tensor, *_: Any, **__: Any) -> None:
        """Backward, clip, step, clear."""
        before = self.scale()
        self.amp.update_params(loss)
        self.skipped = self.scale() < before
        self._inner_count += 1

    def scale(self) -> float:
        """The loss scale."""
        return float(self.amp.scaler.get_scale())


@dataclasses.dataclass(frozen=True)
class Task:
    """A model, its data and its recipe.

    Attributes:
        name: On the command line.
        title: On the page.
        metric: The number of the last validation that counts, as mmengine names it.
        metric_title: The same, for readers.
        higher: Whether more of it is better.
        losses: Losses whose sum is drawn, as ``train_step`` names them.
        loss_title: The same, for readers.
        recipe: In a sentence.
        digits: Of the metric, behind the point.
    """

    name: str
    title: str
    metric: str
    metric_title: str
    higher: bool
    losses: tuple[str, ...]
    loss_title: str
    recipe: str
    digits: int = 2

    def config(self) -> Config:
        """The config, at whatever level it has."""
        return _config(self.name)


TASKS = {
    task.name: task
    for task in (
        Task(
            'cnn', 'CNN with BatchNorm on digits', 'accuracy/top1', 'accuracy, %', True, ('loss',), 'cross-entropy',
            'model and recipe of `configs/digits/cnn_o2.py` in 4 epochs of 23 steps: SGD with momentum, cosine schedule, '
            'clipping by norm',
        ),
        Task(
            'vit', 'ViT with LayerNorm on digits', 'accuracy/top1', 'accuracy, %', True, ('loss',), 'cross-entropy',
            'model and recipe of `configs/digits/vit_o5.py` with two layers and patches of 4 x 4, in 8 epochs of 23 steps: '
            "AdamW (the fused one of this package at O0 to O5, torch's with stock autocast) with a learning rate of 0.004, "
            'warm-up, cosine schedule, dropout, clipping by norm, an average of the weights; and half of the images are '
            'shifted by up to a pixel',
        ),
        Task(
            'text', 'Transformer on characters', 'text/bits', 'bits per character', False, ('loss',), 'cross-entropy',
            'two layers of `nn.TransformerEncoderLayer` of width 64 with dropout, windows of 32 characters at random places of '
            'the help texts of Python (`pydoc_data.topics`), every twentieth topic held out: AdamW (the fused one of this '
            "package at O0 to O5, torch's with stock autocast), warm-up, cosine schedule, clipping by norm, 150 steps of 16 "
            'windows',
            4,
        ),
        Task(
            'gan', 'GAN on digits', 'gan/frechet', 'Fréchet distance', False, ('loss_real', 'loss_fake'),
            'loss of the discriminator',
            'models and recipe of `configs/digits/gan_o2_o5.py`, both networks at the same level, with widths of 16 and 8, in '
            "3 epochs of 180 steps of 8 images: Adam (torch's) with a learning rate of 0.002, cosine schedule, dropout",
        ),
    )
}  # fmt: skip


def _config(name: str) -> Config:
    if name == 'cnn':
        cfg = Config.fromfile(CONFIGS / 'digits/cnn_o2.py')
        cfg.train_cfg.max_epochs, cfg.param_scheduler.T_max = 4, 4
        return cfg
    if name == 'vit':
        cfg = Config.fromfile(CONFIGS / 'digits/vit_o5.py')
        cfg.model.backbone.update(layers=2, patch=4)
        cfg.optim_wrapper.optimizer.lr = 4e-3
        cfg.train_cfg.max_epochs, cfg.param_scheduler[1].T_max = 8, 7
        shift = dict(type='PadAndCrop', padding=1)
        cfg.train_dataloader.dataset.pipeline = [dict(type='RandomApply', transforms=[shift], prob=0.5)]
        return cfg
    if name == 'gan':
        cfg = Config.fromfile(CONFIGS / 'digits/gan_o2_o5.py')
        # narrower and shorter, in smaller batches: float16 convolutions with strides take a CPU a second a step otherwise
        cfg.model.generator.width, cfg.model.discriminator.width = 16, 8
        cfg.train_dataloader.batch_size = 8
        for network in ('generator', 'discriminator'):
            cfg.optim_wrapper[network].optimizer.lr = 2e-3
        cfg.train_cfg.max_epochs, cfg.param_scheduler.T_max = 3, 3
        cfg.train_cfg.val_interval = 3
        # it draws pictures
        cfg.custom_hooks = []
        return cfg
    base = Config.fromfile(CONFIGS / '_base_/default_runtime.py')
    loader: dict[str, Any] = dict(num_workers=0, collate_fn=dict(type='default_collate'))
    base.merge_from_dict(
        dict(
            model=dict(type='CharTransformer', length=32, width=64, layers=2, heads=4, dropout=0.1),
            train_dataloader=dict(
                batch_size=16,
                dataset=dict(type='Topics', length=32),
                sampler=dict(type='InfiniteSampler', shuffle=True),
                **loader,
            ),
            val_dataloader=dict(
                batch_size=128,
                dataset=dict(type='Topics', train=False, length=32),
                sampler=dict(type='DefaultSampler', shuffle=False),
                **loader,
            ),
            val_evaluator=dict(type='BitsPerCharacter'),
            optim_wrapper=dict(
                optimizer=dict(type='amp_wrapper.FusedAdamW', lr=3e-3, weight_decay=0.05), clip_grad=dict(max_norm=1.0)
            ),
            param_scheduler=[
                dict(type='LinearLR', start_factor=0.01, by_epoch=False, end=15),
                dict(type='CosineAnnealingLR', begin=15, T_max=135, by_epoch=False),
            ],
            train_cfg=dict(by_epoch=False, max_iters=150, val_interval=75),
            val_cfg=dict(),
            default_hooks=dict(checkpoint=dict(by_epoch=False)),
        )
    )
    return base


def at(wrapper: Mapping[str, Any], variant: str) -> dict[str, Any]:
    """The config of an optimizer wrapper, at a level or with torch's own autocast.

    Args:
        wrapper: The config of one; or of several, with their constructor.
        variant: One of :data:`VARIANTS`.
    """
    found = copy.deepcopy(dict(wrapper))
    if 'optimizer' not in found:
        # one for each network
        return {name: at(one, variant) if isinstance(one, Mapping) else one for name, one in found.items()}
    if variant not in STOCK:
        return {**found, 'type': 'AmpOptimWrapper', 'opt_level': variant, 'verbosity': 0}
    found.pop('opt_level', None)
    optimizer = dict(found.pop('optimizer'))
    optimizer['type'] = optimizer['type'].removeprefix('amp_wrapper.Fused')
    return {**found, 'type': 'AutocastOptimWrapper', 'dtype': STOCK[variant], 'optimizer': optimizer}


def recipe_digest(task: Task) -> str:
    """Twelve digits that tell two recipes apart: runs of another recipe are not taken up."""
    text = json.dumps(task.config().to_dict(), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


class Record(Hook):
    """Keeps losses, loss scales and skipped steps of a run.

    Args:
        names: Losses whose sum is kept.
    """

    priority = 'VERY_LOW'

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.losses: list[float] = []
        self.skips: list[int] = []
        self.scales: list[float] = []

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Of one step."""
        self.losses.append(sum(float(outputs[name].detach()) for name in self.names))
        wrapper = runner.optim_wrapper
        found = [_state(one) for one in (wrapper.values() if isinstance(wrapper, OptimWrapperDict) else [wrapper])]
        if any(skipped for _, skipped in found):
            self.skips.append(len(self.losses))
        self.scales.append(min(scale for scale, _ in found))


def _state(wrapper: Any) -> tuple[float, bool]:
    """Loss scale, and whether the last step was skipped. Syncs."""
    if isinstance(wrapper, AmpOptimWrapper):
        return wrapper.loss_scaler.get_scale(), wrapper.step_was_skipped()
    return wrapper.scale(), wrapper.skipped


def run(task: Task, variant: str, seed: int, quick: bool = False) -> dict[str, Any]:
    """Train once, in this process.

    Args:
        task: What to train.
        variant: One of :data:`VARIANTS`.
        seed: Of the first weights, the order of the data, dropout, augmentation, noise.
        quick: A few steps, to see whether everything runs.

    Returns:
        The record of the run, of plain values. Losses that are not finite are None.
    """
    cfg = task.config()
    cfg.optim_wrapper = at(cfg.optim_wrapper, variant)
    cfg.randomness = dict(cfg.randomness, seed=seed)
    cfg.log_level = 'ERROR'
    # mmengine keeps what is logged under this name
    cfg.experiment_name = uuid.uuid4().hex
    # nothing is saved
    cfg.default_hooks.checkpoint = None
    record = Record(task.losses)
    if quick:
        cfg.train_cfg.update(
            dict(max_epochs=2, val_interval=2) if cfg.train_cfg.by_epoch else dict(max_iters=48, val_interval=48)
        )
    with tempfile.TemporaryDirectory() as folder:
        cfg.work_dir = folder
        begin = time.process_time()
        runner = Runner.from_cfg(cfg)
        logging.disable(logging.WARNING)
        ended = ''
        try:
            runner.register_hook(record)
            runner.train()
        except OverflowStreakError as error:
            # the training has failed, and this is what is to be found out
            ended = f'{type(error).__name__} after step {len(record.losses)}'
        finally:
            logging.disable(logging.NOTSET)
        seconds = time.process_time() - begin
        scalars = runner.message_hub.log_scalars
        metrics = {
            name.removeprefix('val/'): float(scalars[name].current())
            for name in scalars
            if name.startswith('val/') and not name.endswith('time')
        }
        # a closed one would stay at the logger, which the next training of the process gets, too
        for handler in list(runner.logger.handlers):
            if isinstance(handler, logging.FileHandler):
                runner.logger.removeHandler(handler)
                handler.close()
    return {
        'task': task.name,
        'variant': variant,
        'seed': seed,
        'recipe': recipe_digest(task),
        **({'text': fidelity_text.digest()} if task.name == 'text' else {}),
        'metric': None if ended else _plain(metrics[task.metric]),
        **({'ended': ended} if ended else {}),
        'metrics': {name: _plain(value) for name, value in metrics.items()},
        'first': [_plain(loss) for loss in record.losses[:FIRST]],
        'curve': [_plain(fmean(record.losses[start : start + BLOCK])) for start in range(0, len(record.losses), BLOCK)],
        'steps': len(record.losses),
        'skipped': len(record.skips),
        'skipped at': record.skips[:50],
        'scale at the end': record.scales[-1],
        'smallest scale': min(record.scales),
        'seconds': round(seconds, 1),
    }


def _plain(value: float) -> float | None:
    """Six digits; None where it is not finite, which JSON does not know."""
    return float(f'{value:.6g}') if math.isfinite(value) else None
