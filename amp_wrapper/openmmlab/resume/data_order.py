"""The order in which a training sees its data: its seeds, its start, and the reasons why a resume may not repeat it."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from mmengine.dataset import worker_init_fn
from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop
from mmengine.runner.loops import _InfiniteDataloaderIterator
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from ...torch_internals import forget_workers
from ..log import log


def restart_iterator(loop: Any) -> None:
    """Let workers that are started anew load the data of a loop, by its present sampler and ``worker_init_fn``.

    An iteration-based loop has made its iterator when it was built, and gets a new one.

    Args:
        loop: That has not fetched a batch yet.
    """
    if isinstance(loop.dataloader, DataLoader):
        forget_workers(loop.dataloader)
    if not isinstance(loop, IterBasedTrainLoop):
        return
    sampler = sampler_of(loop.dataloader)
    if hasattr(sampler, '_indices_of_rank'):
        # workers have fetched some ahead
        sampler.indices = sampler._indices_of_rank()
    states = torch.get_rng_state()
    loop.dataloader_iterator = _InfiniteDataloaderIterator(loop.dataloader)
    torch.set_rng_state(states)


def batches_of(loop: Any) -> int:
    """Batches of an epoch; -1 where nobody knows."""
    try:
        return len(loop.dataloader)
    except (AttributeError, TypeError):
        return -1


def sampler_of(loader: Any) -> Any:
    """The sampler of a data loader, inside a batch sampler or not; None where there is none."""
    batches = getattr(loader, 'batch_sampler', None)
    return getattr(batches, 'sampler', None) if batches is not None else getattr(loader, 'sampler', None)


def seeds_of(loader: Any) -> dict[str, int | None]:
    """What the sampler and the workers of a data loader were seeded with; None where nobody knows."""
    seed = getattr(sampler_of(loader), 'seed', None)
    init = getattr(loader, 'worker_init_fn', None)
    # PreemptionHook puts its own around it
    init = getattr(init, 'then', init)
    ours = isinstance(init, functools.partial) and init.func is worker_init_fn
    return {
        'sampler': seed if isinstance(seed, int) else None,
        'workers': init.keywords.get('seed') if ours and init else None,
    }


def follow_seeds(loop: Any, saved: Mapping[str, int | None] | None) -> None:
    """Samplers and workers are built before a checkpoint is read: give them the seeds they had.

    Args:
        loop: About to train.
        saved: Of :func:`seeds_of`; None changes nothing.
    """
    loader = loop.dataloader
    here = seeds_of(loader)
    if saved is None or here == saved:
        return
    if None not in (saved['sampler'], here['sampler']):
        sampler_of(loader).seed = saved['sampler']
    if None not in (saved['workers'], here['workers']):
        outer = loader.worker_init_fn
        init = getattr(outer, 'then', outer)
        new = functools.partial(init.func, *init.args, **{**init.keywords, 'seed': saved['workers']})
        if init is outer:
            loader.worker_init_fn = new
        else:
            outer.then = new
    restart_iterator(loop)
    log('the order of the data follows the seed of the checkpoint')


def why_inexact(runner: Any, loop: Any) -> list[str]:
    """Why a resume of this configuration cannot be exact: one sentence each, with what to write instead.

    Args:
        runner: About to train.
        loop: Its train loop.
    """
    loader = getattr(loop, 'dataloader', None)
    reasons = []
    by_epoch = isinstance(loop, EpochBasedTrainLoop)
    if not by_epoch and not isinstance(loop, IterBasedTrainLoop):
        reasons.append(
            f'the train loop {type(loop).__name__} is unknown, so data already seen in an epoch is not skipped.'
        )
    elif by_epoch and type(loop).run_epoch is not EpochBasedTrainLoop.run_epoch:
        reasons.append(f'{type(loop).__name__} has a run_epoch of its own: an epoch that was begun is begun again.')
    if getattr(loop, 'fast_forward_on_resume', False):
        reasons.append(
            'fast_forward_on_resume=True begins the data anew in place of passing over those seen. Write '
            'fast_forward_on_resume=False.'
        )
    if not isinstance(loader, DataLoader):
        return [*reasons, f'the train dataloader is a {type(loader).__name__}, whose state nobody saves.']
    sampler = sampler_of(loader)
    endless = hasattr(sampler, '_infinite_indices') or hasattr(sampler, 'indices')
    if loader.num_workers and loader.persistent_workers and (by_epoch or not endless):
        reasons.append(
            'persistent_workers=True keeps the random states of the workers from epoch to epoch, where nobody can save them. '
            'Write persistent_workers=False.'
        )
    if (runner.cfg.get('randomness') or {}).get('seed') is None:
        reasons.append(
            'the config has no seed, and data sets are built before a checkpoint is read. amp-wrapper train --resume takes the '
            'seed from the checkpoint; for other scripts write randomness=dict(seed=0).'
        )
    if not by_epoch and not endless and loader.num_workers and seeds_of(loader)['workers'] is None:
        reasons.append("the workers' seeds are drawn at each pass over the data. Use mmengine's InfiniteSampler.")
    if isinstance(loader.dataset, IterableDataset):
        reasons.append('an IterableDataset has a position of its own, which nobody saves.')
    elif not by_epoch and isinstance(sampler, RandomSampler):
        reasons.append(
            "torch's RandomSampler draws a new order at each pass over the data. Use mmengine's InfiniteSampler."
        )
    elif not hasattr(sampler, 'seed') and not isinstance(sampler, (RandomSampler, SequentialSampler)):
        reasons.append(f'{type(sampler).__name__} has no seed.')
    if torch.cuda.is_available() and not torch.are_deterministic_algorithms_enabled():
        reasons.append('some GPU kernels add in any order. Write randomness=dict(seed=0, deterministic=True).')
    return reasons
