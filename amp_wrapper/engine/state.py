"""Saves and loads the state of an engine: the optimizer's state dict with loss scales and open accumulation."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from .. import checkpoint
from ..checkpoint import report
from ..distributed_internals import hold_back
from ..errors import AmpCheckpointError
from ..policy.nested import parameters_of
from ..shards import any_sharded, is_sharded, shard_like
from .ddp import has_several_processes
from .optimizer_state import keep_scalar_state
from .parts import EngineParts, Stage

#: Integrations decide where these lines go.
logger = logging.getLogger('amp_wrapper')


def state_of(parts: EngineParts) -> dict[str, Any]:
    """The optimizer's state dict and, unless disabled, what :mod:`amp_wrapper.checkpoint` adds to it. Syncs."""
    assert parts.optimizer is not None
    state: dict[str, Any] = parts.optimizer.state_dict()
    if not parts.policy.enabled:
        return state
    scalers = parts.scales.scalers
    stock_shaped = parts.policy.opt_level in ('O1', 'O4') and len(scalers) == 1
    states = [scaler.state_dict() for scaler in scalers]
    return checkpoint.write(state, parts.policy.to_dict(), states, _open_accumulation(parts), stock_shaped)


def _open_accumulation(parts: EngineParts) -> checkpoint.Window | None:
    if not parts.is_accumulating:
        return None
    # shards are averages, unless somebody waits with that; what is unscaled has left flags on its rank
    shared = bool(parts.shard_groups) and not hold_back(parts.shard_groups) and not parts.gradients.unscaled
    if has_several_processes() and not parts.ddp.same_everywhere() and not shared:
        _say(
            parts,
            logging.WARNING,
            'amp: saved in the middle of an accumulation of several processes: the gradients so far are '
            'not in the checkpoint. Save after a step for an exact resume.',
        )
        return None
    gradients, overflow = parts.gradients, parts.overflow
    found, of_others = overflow.state()
    buffers = {name: copy for snapshot in parts.snapshots for name, copy in snapshot.state().items()}
    saved = gradients.save(parts.lists())
    return checkpoint.Window(saved, gradients.unscaled, list(overflow.used), found, of_others, buffers)


def check_state(parts: EngineParts, state: Mapping[str, Any]) -> checkpoint.SavedAmp:
    """Whether a state dict can be taken over, applying nothing.

    Args:
        parts: Of the engine.
        state: As for :func:`load_state`.

    Raises:
        AmpCheckpointError: Names the key and what was expected.
    """
    assert parts.optimizer is not None
    form = checkpoint.own_form(parts.optimizer)
    saved = checkpoint.read(state, form)
    if form is None:
        checkpoint.check_optimizer_state(saved, parts.optimizer)
    return saved


def load_state(parts: EngineParts, state: Mapping[str, Any]) -> list[str]:
    """Take over a state dict; before or after attaching; see :meth:`AmpEngine.load_state_dict`."""
    optimizer, policy = parts.optimizer, parts.policy
    assert optimizer is not None
    saved = check_state(parts, state)
    try:
        # torch aliases tensors of the right type: without a copy, training would write into the caller's dict
        optimizer.load_state_dict(_copied(saved.optimizer, optimizer))
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise AmpCheckpointError(f'the optimizer state does not fit {type(optimizer).__name__}: {error}') from error
    if not policy.enabled:
        dropped = [] if saved.kind == 'plain' else ['the loss scale, for mixed precision is off']
        return report.describe(saved, policy, [], dropped)
    if 'param_groups' in saved.optimizer:
        keep_scalar_state(optimizer, saved.optimizer)
    parts.pending = None
    if parts.attached:
        parts.zero_grad()
    scales, dropped, new = parts.scales.load(saved.loss_scalers)
    parts.monitor.start(int(parts.scales.first.counts[2]))
    engines = [other for other in parts.others if isinstance(other, EngineParts)]
    for snapshot in () if saved.window or any(each.is_accumulating for each in engines) else parts.snapshots:
        # of another file
        snapshot.load({})
    if saved.window is not None:
        if not report.window_fits(saved, policy):
            dropped.append('the gradients of an unfinished accumulation, which belong to another configuration')
        elif parts.attached:
            restore_accumulation(parts, saved.window)
        else:
            # the gradients alone: a second copy of the optimizer state would wait in memory for nothing
            parts.pending = dataclasses.replace(saved, optimizer={}, window=copy.deepcopy(saved.window))
    return report.describe(saved, policy, scales, dropped, new)


def _copied(saved: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """A deep copy of an optimizer's state dict, with shards in place of whole tensors where its parameters are sharded."""
    parameters = parameters_of(optimizer)
    if 'param_groups' not in saved or not any_sharded(parameters):
        return copy.deepcopy(dict(saved))
    keys = [key for group in saved['param_groups'] for key in group['params']]
    state = dict(saved['state'])
    for key, parameter in zip(keys, parameters):
        if is_sharded(parameter) and key in state:
            state[key] = {
                name: shard_like(value, parameter)
                if isinstance(value, Tensor) and not is_sharded(value) and value.shape == parameter.shape
                else copy.deepcopy(value)
                for name, value in state[key].items()
            }
    rest = {name: value for name, value in saved.items() if name != 'state'}
    return {**copy.deepcopy(rest), 'state': state}


def restore_accumulation(parts: EngineParts, window: checkpoint.Window) -> None:
    """Put back the gradients of an accumulation that was open when it was saved."""
    parts.gradients.restore(window.gradients, parts.lists())
    parts.overflow.restore(window.used, window.found_inf, window.foreign_found_inf)
    for snapshot in parts.snapshots:
        snapshot.load(window.buffers)
    parts.stage = Stage.ACCUMULATING
    _say(
        parts,
        logging.INFO,
        'amp: the gradients of an unfinished accumulation were in the checkpoint and are back: nothing of it is lost',
    )


def _say(parts: EngineParts, level: int, line: str) -> None:
    if parts.policy.verbosity >= 1:
        logger.log(level, line)
