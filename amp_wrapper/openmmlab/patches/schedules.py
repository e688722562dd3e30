"""Schedules that wait for skipped steps: ``on_skip='hold'``.

mmengine's ``ParamSchedulerHook`` moves every iteration-based schedule after each iteration, whatever the step did.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

#: What iteration-based schedules do at a skipped step: they move on, as in mmengine, or stay where they are.
ON_SKIP = ('advance', 'hold')


def _moving(schedulers: Any, wrapper: Any) -> Any:
    """The schedulers that move after this iteration. Syncs, where a wrapper asks to hold."""
    if isinstance(schedulers, list) and getattr(wrapper, 'on_skip', 'advance') == 'hold' and wrapper.take_skip():
        return [scheduler for scheduler in schedulers if scheduler.by_epoch]
    if isinstance(schedulers, dict) and hasattr(wrapper, 'optim_wrappers'):
        return {name: _moving(some, wrapper.optim_wrappers.get(name)) for name, some in schedulers.items()}
    return schedulers


def after_train_iter(original: Callable[..., None], hook: Any, runner: Any, *args: Any, **kwargs: Any) -> None:
    """Replaces ``ParamSchedulerHook.after_train_iter``: after a skipped step, schedules of iterations may stay."""
    schedulers = runner.param_schedulers
    runner.param_schedulers = _moving(schedulers, runner.optim_wrapper)
    try:
        original(hook, runner, *args, **kwargs)
    finally:
        runner.param_schedulers = schedulers
