"""Saves and restores the counters of ``EarlyStoppingHook``, which mmengine does not save."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mmengine.hooks import CheckpointHook, EarlyStoppingHook

from ..log import log, warn


def put_first(runner: Any) -> None:
    """``save_best`` saves the file again: early stopping must have counted this validation by then.

    Args:
        runner: Whose hooks are put in order.
    """
    hooks = runner._hooks
    for hook in _hooks(runner):
        savers = [index for index, other in enumerate(hooks) if isinstance(other, CheckpointHook)]
        if savers and hooks.index(hook) > savers[0]:
            hooks.remove(hook)
            hooks.insert(savers[0], hook)


def states_of(runner: Any) -> list[dict[str, Any]]:
    """For a checkpoint: one entry for each hook."""
    return [
        {'wait_count': int(hook.wait_count), 'best_score': float(hook.best_score), 'settings': _settings(hook)}
        for hook in _hooks(runner)
    ]


def restore(runner: Any, states: Sequence[Mapping[str, Any]]) -> None:
    """Set the counters.

    Args:
        runner: About to train.
        states: Of :func:`states_of`.
    """
    hooks = _hooks(runner)
    if len(hooks) != len(states):
        warn(f'{len(states)} early stopping hooks were saved and {len(hooks)} are configured: they start anew')
        return
    for hook, state in zip(hooks, states):
        hook.wait_count, hook.best_score = state['wait_count'], state['best_score']


def stop_again(runner: Any, states: Sequence[Mapping[str, Any]]) -> None:
    """A run that was ended by early stopping stays ended, unless the settings are others now.

    Args:
        runner: Whose run had been ended.
        states: Of :func:`states_of`.
    """
    if [state['settings'] for state in states] == [_settings(hook) for hook in _hooks(runner)]:
        runner.train_loop.stop_training = True
        log('this run was ended by early stopping already')
    else:
        log('early stopping had ended this run; its settings were changed since, so the run goes on')


def _hooks(runner: Any) -> list[Any]:
    return [hook for hook in runner.hooks if isinstance(hook, EarlyStoppingHook)]


def _settings(hook: Any) -> str:
    names = ('monitor', 'rule', 'min_delta', 'check_finite', 'patience', 'stopping_threshold')
    return ', '.join(f'{name}={getattr(hook, name, None)!r}' for name in names)
