"""A project's own schedules over a training of a few iterations: the same schedulers, factors and order, shorter ranges."""

from __future__ import annotations

import copy
from typing import Any

from mmengine.config import Config

#: How long the training of the schedules is.
EPOCHS, LENGTH = 3, 2
#: Where the first range ends: a warm-up, where there is one, lasts one epoch and a half.
FIRST = 1.5


def shortened(cfg: Config) -> list[dict[str, Any]]:
    """The schedulers of a config over :data:`EPOCHS` epochs of :data:`LENGTH` iterations.

    Where a range begins or ends within the training, it does so at one epoch and a half, or later, in the same order; lengths
    of periods keep their part of the whole, milestones are epochs of their own.

    Args:
        cfg: As the project wrote it; not changed.
    """
    written = cfg.get('param_scheduler') or []
    schedulers = [copy.deepcopy(dict(one)) for one in (written if isinstance(written, list) else [written])]
    loop = cfg.train_cfg
    whole = loop['max_epochs'] if 'max_epochs' in loop else loop['max_iters']
    counts_epochs = 'max_epochs' in loop
    inner: dict[bool, list[float]] = {}
    for by_epoch in (True, False):
        ends = {
            one[key]
            for one in schedulers
            for key in ('begin', 'end')
            if one.get('by_epoch', True) is by_epoch and key in one
        }
        inner[by_epoch] = sorted(x for x in ends if x > 0 and not (x >= whole and by_epoch is counts_epochs))
    return [_shorten(one, inner[one.get('by_epoch', True)], whole) for one in schedulers]


def _shorten(one: dict[str, Any], inner: list[float], whole: int) -> dict[str, Any]:
    by_epoch = one.get('by_epoch', True)
    unit = 1 if by_epoch else LENGTH

    def place(point: float) -> float:
        if point <= 0:
            return 0
        later = EPOCHS - FIRST
        epochs = FIRST + later * inner.index(point) / len(inner) if point in inner else EPOCHS
        return epochs if by_epoch else int(epochs * unit)

    begin, end = one.get('begin', 0), one.get('end', whole)
    span = place(end) - place(begin)
    # mmengine would take the end from the length of a run
    one.update(begin=place(begin), end=place(end))
    if 'T_max' in one:
        one['T_max'] = one['T_max'] / (end - begin) * span
    if 'step_size' in one:
        one['step_size'] = max(1, round(one['step_size'] * EPOCHS * unit / whole))
    if 'milestones' in one:
        one['milestones'] = [(index + 1) * unit for index, _ in enumerate(one['milestones'])]
    return one
