"""Schedules that wait for skipped steps: ``on_skip='hold'``.

mmengine's ``ParamSchedulerHook`` moves every iteration-based schedule after each iteration, whatever the step did. The patch is
the identity for wrappers that do not ask to hold.
"""

from __future__ import annotations

import functools
from typing import Any

from mmengine.hooks import ParamSchedulerHook

#: What may become of iteration-based schedules at a skipped step: mmengine's way, and the other one.
ON_SKIP = ('advance', 'hold')


def _holds(wrapper: Any) -> bool:
    """Whether schedules of this wrapper stay where they are after the iteration, in which it has skipped a step.

    Syncs, where a wrapper asks to hold.
    """
    return getattr(wrapper, 'on_skip', 'advance') == 'hold' and bool(wrapper.take_skip())


def _without_held(schedulers: Any, wrappers: Any) -> Any:
    """The schedulers that move; the very object where all do."""
    if isinstance(schedulers, list):
        return [one for one in schedulers if one.by_epoch] if _holds(wrappers) else schedulers
    if isinstance(schedulers, dict) and hasattr(wrappers, 'optim_wrappers'):
        members = wrappers.optim_wrappers
        moving = {name: _without_held(some, members.get(name)) for name, some in schedulers.items()}
        if any(moving[name] is not some for name, some in schedulers.items()):
            return moving
    return schedulers


def patch() -> None:
    """Put the patch in place."""
    original = ParamSchedulerHook.after_train_iter

    @functools.wraps(original)
    def after_train_iter(self: Any, runner: Any, *args: Any, **kwargs: Any) -> None:
        schedulers = runner.param_schedulers
        moving = _without_held(schedulers, runner.optim_wrapper)
        if moving is schedulers:
            original(self, runner, *args, **kwargs)
            return
        runner.param_schedulers = moving
        try:
            original(self, runner, *args, **kwargs)
        finally:
            runner.param_schedulers = schedulers

    ParamSchedulerHook.after_train_iter = after_train_iter
