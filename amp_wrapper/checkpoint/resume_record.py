"""The record that a checkpoint keeps for an exact resume, and what it may hold: one entry for each rank, and counters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..errors import AmpCheckpointError
from . import random_state

#: Where it lies in a checkpoint.
KEY = 'exact_resume'
VERSION = 1


def _is_seed(value: Any) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63)


def check(saved: Any) -> None:
    """Judge the record of a file, applying nothing.

    Args:
        saved: What lies under :data:`KEY`.

    Raises:
        AmpCheckpointError: Names the key and what was expected.
    """

    def need(good: bool, name: str, expected: str) -> None:
        if not good:
            raise AmpCheckpointError(f'{KEY}{name} must be {expected}: the file is damaged.')

    need(isinstance(saved, Mapping), '', 'a dict')
    version = saved.get('version')
    need(isinstance(version, int) and not isinstance(version, bool) and version >= 1, "['version']", 'a whole number')
    if version > VERSION:
        raise AmpCheckpointError(
            f"{KEY}['version']={version} comes from a newer amp_wrapper; this one reads up to {VERSION}: upgrade it."
        )
    for key, low in (('batches', 0), ('length', -1), ('validated', -1)):
        value = saved.get(key)
        need(
            isinstance(value, int) and not isinstance(value, bool) and low <= value < 2**63,
            f'[{key!r}]',
            f'a whole number from {low}',
        )
    need(isinstance(saved.get('stop_training'), bool), "['stop_training']", 'True or False')
    need(isinstance(saved.get('early_stopping'), (list, tuple)), "['early_stopping']", 'a list')
    for index, state in enumerate(saved['early_stopping']):
        label = f"['early_stopping'][{index}]"
        need(
            isinstance(state, Mapping) and isinstance(state.get('settings'), str),
            label,
            'a dict of wait_count, best_score, settings',
        )
        count = state.get('wait_count')
        need(
            isinstance(count, int) and not isinstance(count, bool) and count >= 0,
            f"{label}['wait_count']",
            'a whole number',
        )
        need(isinstance(state.get('best_score'), float), f"{label}['best_score']", 'a number')
    need(
        isinstance(saved.get('ranks'), (list, tuple)) and len(saved['ranks']) > 0,
        "['ranks']",
        'a list of one entry per process',
    )
    for index, rank in enumerate(saved['ranks']):
        label = f"['ranks'][{index}]"
        need(
            isinstance(rank, Mapping) and {'now', 'begin', 'start', 'seeds', 'statistics'} <= set(rank),
            label,
            'a dict of now, begin, start, seeds and statistics',
        )
        seeds = rank['seeds']
        good = isinstance(seeds, Mapping) and set(seeds) == {'sampler', 'workers'}
        need(
            good and all(_is_seed(seed) for seed in seeds.values()),
            f"{label}['seeds']",
            'the seeds of sampler and workers',
        )
        tensors = rank['statistics']
        good = isinstance(tensors, Mapping) and all(isinstance(value, torch.Tensor) for value in tensors.values())
        need(good, f"{label}['statistics']", 'a dict of tensors')
        random_state.check(rank['now'], f"{KEY}{label}['now']")
        for moment in ('begin', 'start'):
            if rank[moment] is not None:
                random_state.check(rank[moment], f'{KEY}{label}[{moment!r}]')
