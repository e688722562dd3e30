"""The record that a checkpoint keeps for an exact resume, and what it may hold: one entry for each rank, and counters."""

from __future__ import annotations

from typing import Any

from . import random_state, schema

#: Where it lies in a checkpoint.
KEY = 'exact_resume'
VERSION = 1

_SEEDS = schema.Is(
    'the seeds of sampler and workers',
    lambda seeds: schema.MapOf(schema.Maybe(schema.whole())).fits(seeds) and set(seeds) == {'sampler', 'workers'},
)
_RANK = schema.Record(
    {
        'now': random_state.STATES,
        'begin': schema.Maybe(random_state.STATES),
        'start': schema.Maybe(random_state.STATES),
        'seeds': _SEEDS,
        'statistics': schema.named('a dict of tensors', schema.MapOf(schema.TENSOR)),
    },
    missing='{path} must be a dict of now, begin, start, seeds and statistics: the file is damaged.',
)
_EARLY_STOPPING = schema.Both(
    schema.named('a dict of wait_count, best_score, settings', schema.Record({'settings': schema.kind('a text', str)})),
    schema.Record({'wait_count': schema.whole(bits=None), 'best_score': schema.kind('a number', float)}),
)
_RECORD = schema.Record(
    {
        'version': schema.version(VERSION),
        'batches': schema.whole(),
        'length': schema.whole(-1),
        'validated': schema.whole(-1),
        'stop_training': schema.SWITCH,
        'early_stopping': schema.ListOf(_EARLY_STOPPING),
        'ranks': schema.ListOf(_RANK, 'a list of one entry per process', least=1),
    }
)


def check(saved: Any) -> None:
    """Validate the record of a file, applying nothing.

    Args:
        saved: What lies under :data:`KEY`.

    Raises:
        AmpCheckpointError: Names the key and what was expected.
    """
    _RECORD.check(saved, KEY, show=False)
