"""As ``saved_runs.py``: trainings by mmengine's runners, whose checkpoints are kept as they lie on the disk.

What draws random numbers draws whole ones: torch's normal and Bernoulli numbers depend on the CPU.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mmengine.runner.runner
import numpy as np
import torch
from mmengine.config import Config
from mmengine.evaluator import BaseMetric
from mmengine.hooks import Hook
from mmengine.logging import HistoryBuffer
from mmengine.model import BaseModel
from mmengine.optim import DefaultOptimWrapperConstructor, OptimWrapperDict
from mmengine.registry import DATA_SAMPLERS, DATASETS, HOOKS, METRICS, MODELS, OPTIM_WRAPPER_CONSTRUCTORS
from mmengine.runner import FlexibleRunner, Runner
from mmengine.runner.loops import _InfiniteDataloaderIterator
from saved_runs import MOVING, Exact, added
from torch import Tensor
from torch.utils.data import Dataset, RandomSampler

import amp_wrapper  # noqa: F401  (takes over the registry names)

SGD = dict(type='SGD', lr=2.0**-7, momentum=0.5, weight_decay=2.0**-6)
FUSED_SGD = dict(type='FusedSGD', lr=2.0**-7, momentum=0.9, weight_decay=0.01)
FUSED_ADAMW = dict(type='FusedAdamW', lr=2.0**-6)


@MODELS.register_module()
class SavedModel(BaseModel):
    """:class:`Exact` in mmengine's form, with numbers that are left out at random."""

    def __init__(self, nets: int = 1) -> None:
        super().__init__()
        self.nets = torch.nn.ModuleList(Exact(unique) for unique in range(nets))

    def forward(self, inputs: Tensor, mode: str = 'tensor', **words: Any) -> Any:
        x = inputs.view(1, 1)
        if mode != 'loss':
            return [dict(value=added(torch.stack([net(x) for net in self.nets])))]
        kept = torch.randint(0, 4, (len(self.nets),), dtype=torch.int64).clamp(max=1)
        return dict(loss=added(torch.stack([net(x) * int(one) for net, one in zip(self.nets, kept)])))

    def train_step(self, data: Any, optim_wrapper: Any) -> Any:
        if not hasattr(optim_wrapper, 'keys'):
            return super().train_step(data, optim_wrapper)
        losses = {}
        data = self.data_preprocessor(data, True)
        for name in optim_wrapper.keys():  # noqa: SIM118  (it is no dict)
            with optim_wrapper[name].optim_context(self):
                loss = self(**data, mode='loss')['loss']
            optim_wrapper[name].update_params(loss)
            losses[name] = loss.detach()
        return losses


@DATASETS.register_module()
class SavedData(Dataset):
    """Seven small dyadic numbers, each changed a little by every generator that data pipelines draw from."""

    metainfo: dict[str, Any] = {}

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        drawn = random.randrange(4) + int(np.random.randint(4)) + int(torch.randint(0, 4, ()))
        return dict(inputs=torch.tensor((index - 3) / 4 + drawn / 16))


@DATA_SAMPLERS.register_module()
class SavedRandomSampler(RandomSampler):
    """torch's own, whose order comes from the global generator."""

    def __init__(self, dataset: Any, shuffle: bool = True, seed: int | None = None) -> None:
        super().__init__(dataset)


@METRICS.register_module()
class SavedScore(BaseMetric):
    """What the model gives, added up in order."""

    default_prefix = 'saved'

    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.results += [float(sample['value']) for sample in data_samples]

    def compute_metrics(self, results: list[float]) -> dict[str, float]:
        return dict(score=sum(results))


@HOOKS.register_module()
class SavedTerminate(Hook):
    """The machine is to be taken away."""

    def __init__(self, at: int) -> None:
        self.at = at

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        if runner.iter == self.at:
            os.kill(os.getpid(), signal.SIGTERM)


@HOOKS.register_module()
class SavedAgain(Hook):
    """Saves what was loaded, before anything is trained."""

    priority = 'LOWEST'

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def before_train(self, runner: Any) -> None:
        meta = dict(epoch=runner.epoch, iter=runner.iter)
        runner.save_checkpoint(self.folder, 'again.pth', meta=meta, by_epoch=False)


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class SavedPair:
    """An ``OptimWrapperDict`` with a wrapper for each of two models."""

    def __init__(self, optim_wrapper_cfg: dict[str, Any], paramwise_cfg: Any = None) -> None:
        self.words = optim_wrapper_cfg

    def __call__(self, model: Any) -> OptimWrapperDict:
        members = {
            f'part{index}': DefaultOptimWrapperConstructor(copy.deepcopy(self.words['member']))(net)
            for index, net in enumerate(model.nets)
        }
        return OptimWrapperDict(**members)


def loader(train: bool, sampler: str = 'DefaultSampler') -> dict[str, Any]:
    return dict(
        batch_size=1,
        num_workers=0,
        dataset=dict(type='SavedData'),
        sampler=dict(type=sampler, shuffle=train),
        collate_fn=dict(type='default_collate'),
    )


def case(
    optim_wrapper: dict[str, Any],
    kept: str,
    by_epoch: bool = True,
    end: int = 4,
    interval: int = 1,
    hooks: tuple[Any, ...] = (),
    ending: tuple[Any, ...] = (),
    save_within: bool = False,
    flexible: bool = False,
    nets: int = 1,
    sampler: str | None = None,
    second: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """One training.

    Args:
        optim_wrapper: Its wrapper.
        kept: Name of the checkpoint that is kept.
        by_epoch: Whether the loop counts epochs, of seven iterations, or iterations.
        end: How many of them.
        interval: Of checkpoints.
        hooks: Further hooks.
        ending: Hooks of the run that is ended, alone.
        save_within: Whether checkpoints are saved by iterations in a loop of epochs.
        flexible: Whether mmengine's ``FlexibleRunner`` trains.
        nets: Models within the model.
        sampler: Of the training data.
        second: What the run that goes on has in its config instead.
    """
    limits = dict(max_epochs=end, val_interval=1) if by_epoch else dict(max_iters=end, val_interval=4)
    warm_up = dict(type='LinearLR', start_factor=0.25, by_epoch=False, begin=0, end=9)
    if optim_wrapper.get('optimizer') is SGD:
        # powers of two alone
        warm_up = dict(type='ConstantLR', factor=0.25, by_epoch=False, begin=0, end=9)
    config = dict(
        model=dict(type='SavedModel', nets=nets),
        work_dir='work',
        default_scope='mmengine',
        train_dataloader=loader(True, sampler or ('DefaultSampler' if by_epoch else 'InfiniteSampler')),
        val_dataloader=loader(False),
        val_evaluator=dict(type='SavedScore'),
        train_cfg=dict(by_epoch=by_epoch, **limits),
        val_cfg=dict(),
        optim_wrapper=optim_wrapper,
        param_scheduler=[
            warm_up,
            dict(type='MultiStepLR', milestones=[12], gamma=0.5, by_epoch=False),
        ],
        default_hooks=dict(
            logger=dict(type='LoggerHook', interval=2),
            checkpoint=dict(
                type='CheckpointHook',
                interval=interval,
                by_epoch=by_epoch and not save_within,
                save_best='saved/score',
                rule='less',
            ),
        ),
        custom_hooks=[dict(type='amp_wrapper.ExactResumeHook'), *hooks],
        log_level='ERROR',
        randomness=dict(seed=0, deterministic=True),
    )
    if nets > 1:
        config['param_scheduler'] = dict.fromkeys(('part0', 'part1'), config['param_scheduler'])
    if flexible:
        config |= dict(strategy=dict(type='SingleDeviceStrategy'), randomness=dict(seed=0), env_cfg={})
    return dict(config=config, kept=kept, flexible=flexible, ending=list(ending), second=second or {})


def ours(level: str, optimizer: dict[str, Any], **words: Any) -> dict[str, Any]:
    return dict(type='AmpOptimWrapper', opt_level=level, optimizer=optimizer, **words)


EMA = dict(type='EMAHook', momentum=0.25, begin_iter=2)
EARLY = dict(type='EarlyStoppingHook', monitor='saved/score', rule='less', patience=50)
STOP = dict(type='amp_wrapper.PreemptionHook')


def _pair(level: str, **words: Any) -> dict[str, Any]:
    return dict(constructor='SavedPair', member=ours(level, FUSED_SGD, **words))


def _cases() -> dict[str, dict[str, Any]]:
    moving = dict(loss_scale=MOVING)
    found = {
        # accumulations of two, seven iterations an epoch: after three epochs, one gradient waits
        'epochs_O2': case(ours('O2', FUSED_ADAMW, accumulative_counts=2, **moving), 'epoch_3.pth', hooks=(EARLY,)),
        'epochs_O2_ema': case(
            ours('O2', FUSED_SGD, accumulative_counts=2, clip_grad=dict(max_norm=1.0), **moving),
            'epoch_1.pth',
            hooks=(EMA,),
        ),
        # saved in the middle of an epoch, and of an accumulation, in which the average was updated
        'within_O5_ema': case(
            ours('O5', FUSED_ADAMW, accumulative_counts=3),
            'iter_10.pth',
            end=3,
            interval=5,
            save_within=True,
            hooks=(EMA, EARLY),
        ),
        'iterations_O1_ema': case(
            ours('O1', SGD, accumulative_counts=2, **moving),
            'iter_9.pth',
            by_epoch=False,
            end=16,
            interval=3,
            hooks=(EMA,),
        ),
        'iterations_O5_split': case(
            ours('O5', FUSED_ADAMW, master_weights='split'),
            'iter_8.pth',
            by_epoch=False,
            end=13,
            interval=4,
            hooks=(EMA,),
        ),
        'iterations_O2_hold': case(
            ours('O2', FUSED_SGD, on_skip='hold', **moving), 'iter_6.pth', by_epoch=False, end=13, interval=3
        ),
        'preempted_O2': case(
            ours('O2', FUSED_ADAMW, accumulative_counts=2, **moving),
            'preempted.pth',
            end=3,
            hooks=(STOP, EMA),
            ending=(dict(type='SavedTerminate', at=8),),
        ),
        'preempted_O4_iterations': case(
            ours('O4', SGD),
            'preempted.pth',
            by_epoch=False,
            end=12,
            interval=5,
            hooks=(STOP,),
            ending=(dict(type='SavedTerminate', at=6),),
        ),
        'dict_O2': case(_pair('O2', accumulative_counts=2, **moving), 'epoch_1.pth', end=3, nets=2),
        'dict_O1_ema': case(
            _pair('O1', **moving), 'iter_5.pth', by_epoch=False, end=11, interval=5, nets=2, hooks=(EMA,)
        ),
        # the order of the data is drawn anew from the states at the start of the epoch
        'within_O4_sampler': case(
            ours('O4', SGD), 'iter_10.pth', end=3, interval=5, save_within=True, sampler='SavedRandomSampler'
        ),
        # a script that knows no seed before it reads the file
        'epochs_O4_no_seed': case(
            ours('O4', FUSED_SGD), 'epoch_1.pth', end=3, second=dict(randomness=dict(seed=None, deterministic=True))
        ),
        'O0': case(ours('O0', SGD), 'epoch_1.pth', end=2),
        'O3': case(ours('O3', FUSED_SGD), 'epoch_1.pth', end=2),
        'disabled': case(ours('O2', FUSED_ADAMW, enabled=False), 'epoch_1.pth', end=2),
        'flexible_O5': case(ours('O5', FUSED_ADAMW), 'epoch_1.pth', end=3, flexible=True, hooks=(EARLY,)),
    }
    return found


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    """No path of this machine gets into a file."""
    before = Path.cwd()
    os.chdir(folder)
    collect, mmengine.runner.runner.collect_env = mmengine.runner.runner.collect_env, dict
    try:
        yield
    finally:
        os.chdir(before)
        mmengine.runner.runner.collect_env = collect


_runs = itertools.count()


def _train(folder: Path, words: dict[str, Any], **more: Any) -> None:
    config = Config(copy.deepcopy(words['config']))
    config.update(copy.deepcopy({key: value for key, value in more.items() if key != 'hooks'}))
    # mmengine gives out what an earlier run of the same name has made
    config.experiment_name = f'saved_{next(_runs)}'
    config.custom_hooks = [*config.custom_hooks, *more.get('hooks', ())]
    folder.mkdir(parents=True, exist_ok=True)
    with _inside(folder):
        (FlexibleRunner if words['flexible'] else Runner).from_cfg(config).train()


def last(folder: Path) -> bytes:
    """The checkpoint that a run has ended with."""
    return (folder / (folder / 'work' / 'last_checkpoint').read_text()).read_bytes()


def run(folder: Path, words: dict[str, Any]) -> tuple[bytes, bytes]:
    """The checkpoint that is kept, and the last one of the uninterrupted run.

    Args:
        folder: Empty.
        words: From :data:`RUNNERS`.
    """
    whole = folder / 'whole'
    _train(whole, words)
    if words['ending']:
        ended = folder / 'ended'
        with contextlib.suppress(SystemExit):
            _train(ended, words, hooks=words['ending'])
        return (ended / 'work' / words['kept']).read_bytes(), last(whole)
    return (whole / 'work' / words['kept']).read_bytes(), last(whole)


def resume(folder: Path, words: dict[str, Any], saved: bytes) -> tuple[bytes, bytes]:
    """What is saved again right after loading, and the last checkpoint of the run that goes on.

    Args:
        folder: Empty.
        words: From :data:`RUNNERS`.
        saved: A checkpoint.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / 'saved.pth').write_bytes(saved)
    again = dict(type='SavedAgain', folder=str(folder))
    _train(folder, words, resume=True, load_from=str(folder / 'saved.pth'), hooks=[again], **words['second'])
    return (folder / 'again.pth').read_bytes(), last(folder)


#: Log values that clocks and the machine decide.
_CLOCKS = ('time', 'memory', 'eta')
_OF_A_RUN = (
    'cfg',
    'time',
    'eta',
    'experiment_name',
    'mmengine',
    'mmengine_version',
    'amp_saves',
    'amp_waiting_removals',
)
#: onedl-mmengine makes the iterator of an endless loader, which draws a number, only when the first sample is drawn.
_LATE_ITERATOR = hasattr(_InfiniteDataloaderIterator, 'skip_iter')


def comparable(checkpoint: dict[str, Any], at_once: bool = False) -> dict[str, Any]:
    """A checkpoint as plain values, without what differs from run to run; that such a key is there stays.

    Args:
        checkpoint: As read.
        at_once: Leave out what the beginning of a training sets, and the record of ``ExactResumeHook``, whose moment it is not.
    """
    checkpoint = _values(checkpoint)
    hub, meta = checkpoint['message_hub'], checkpoint['meta']
    for name in hub['log_scalars']:
        if any(word in name for word in _CLOCKS):
            hub['log_scalars'][name] = 'a clock'
    for part in ('log_scalars', 'resumed_keys'):
        # logged from the first skipped step on; at every step before
        hub[part] = {name: value for name, value in hub[part].items() if not name.endswith('amp_skipped')}
    for part in ('log_scalars', 'runtime_info', 'resumed_keys'):
        # in the order in which values first came from the device
        hub[part] = dict(sorted(hub[part].items()))
    info = hub['runtime_info']
    for name in ('last_ckpt', 'best_ckpt'):
        if info.get(name) is not None:
            info[name] = Path(info[name]).name
    for holder in (info, meta):
        for name in _OF_A_RUN:
            if name in holder:
                holder[name] = type(holder[name]).__name__
    # a loop of iterations counts one epoch
    if _LATE_ITERATOR and info['max_epochs'] == 1 and checkpoint['exact_resume'] is not None:
        for rank in checkpoint['exact_resume']['ranks']:
            for moment in ('begin', 'start'):
                if rank[moment] is not None:
                    rank[moment]['torch'] = None
    if at_once:
        for name in ('loop_stage', 'epoch', 'iter'):
            info[name] = None
        checkpoint['exact_resume'] = None
    return checkpoint


def _values(node: Any) -> Any:
    if isinstance(node, HistoryBuffer):
        return [list(map(_values, column)) for column in node.data]
    if isinstance(node, dict):
        return type(node)((key, _values(value)) for key, value in node.items())
    if isinstance(node, (list, tuple)):
        return type(node)(map(_values, node))
    return node.item() if isinstance(node, np.generic) else node


RUNNERS = _cases()
