"""What each rank puts into the record of an exact resume: random states, seeds of the data, statistics of BatchNorm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from mmengine.dist import get_rank, get_world_size

from ...checkpoint import random_state
from ..log import warn
from ..wrappers import inner_model
from . import data_order


def capture(runner: Any) -> dict[str, Any]:
    """The states of the random generators of this rank, those of the data loader among them."""
    return random_state.capture(_generators(runner), all_devices=get_world_size() == 1)


def restore(runner: Any, states: Mapping[str, Any] | None) -> list[str]:
    """Set the random generators of this rank; None changes nothing.

    Args:
        runner: Whose data loader may have generators of its own.
        states: Of :func:`capture`.

    Returns:
        What could not be set.
    """
    return [] if states is None else random_state.restore(states, _generators(runner))


def of_this_rank(saved: Mapping[str, Any], key: str) -> Any:
    """What this rank has put into a record; None where it was not there.

    Args:
        saved: The whole record.
        key: Of the rank's part.
    """
    return saved['ranks'][get_rank()][key] if get_rank() < len(saved['ranks']) else None


def part_of_this_rank(runner: Any, moments: Mapping[str, Any]) -> dict[str, Any]:
    """What this rank puts into a record.

    Args:
        runner: That trains.
        moments: Random states: 'now', at the 'begin' of the epoch, and at the 'start' of its data.
    """
    statistics = {}
    if get_rank() > 0:
        # the model part of a file holds those of rank 0; without SyncBN each rank has its own
        statistics = {name: value.detach().cpu().clone() for name, value in _statistics(runner)}
    return {**moments, 'seeds': data_order.seeds_of(_loader(runner)), 'statistics': statistics}


def restore_statistics(runner: Any, saved: Mapping[str, Any]) -> None:
    """Give each rank its own statistics of BatchNorm back.

    Args:
        runner: Whose model is loaded.
        saved: The whole record.
    """
    mine = of_this_rank(saved, 'statistics') if get_world_size() == len(saved['ranks']) else None
    for name, value in _statistics(runner):
        if mine and name in mine and mine[name].shape == value.shape:
            value.copy_(mine[name])


def warn_of_other_ranks(saved: Mapping[str, Any]) -> None:
    """Warn where the file was saved by another number of processes.

    Args:
        saved: The whole record.
    """
    ranks = len(saved['ranks'])
    if ranks != get_world_size():
        warn(f'saved by {ranks} processes and resumed by {get_world_size()}: data and random numbers will differ')


def _loader(runner: Any) -> Any:
    built = not isinstance(getattr(runner, '_train_loop', None), (dict, type(None)))
    return getattr(runner.train_loop, 'dataloader', None) if built else None


def _generators(runner: Any) -> list[torch.Generator]:
    loader = _loader(runner)
    found = [getattr(loader, 'generator', None), getattr(data_order.sampler_of(loader), 'generator', None)]
    return [generator for generator in dict.fromkeys(found) if isinstance(generator, torch.Generator)]


def _statistics(runner: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The running statistics of BatchNorm and its kin, by qualified name."""
    for name, buffer in inner_model(runner.model).named_buffers():
        if name.rpartition('.')[2] in ('running_mean', 'running_var', 'num_batches_tracked'):
            yield name, buffer
