"""Saves and loads the state of an engine: the optimizer's state dict with loss scales and open accumulation."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from .. import checkpoint
from ..distributed_internals import hold_back
from ..errors import AmpCheckpointError, logger
from ..policy.nested import parameters_of
from ..shards import is_sharded, shard_like
from .ddp import has_several_processes
from .engine import Engine


def state_of(engine: Engine) -> dict[str, Any]:
    """The optimizer's state dict and, unless disabled, what :mod:`amp_wrapper.checkpoint` adds to it. Syncs."""
    assert engine.optimizer is not None
    state: dict[str, Any] = engine.optimizer.state_dict()
    if not engine.policy.enabled:
        return state
    scalers = engine.scales.scalers
    stock_shaped = engine.policy.opt_level in ('O1', 'O4') and len(scalers) == 1
    states = [scaler.state_dict() for scaler in scalers]
    return checkpoint.write(state, engine.policy.to_dict(), states, _open_accumulation(engine), stock_shaped)


def _open_accumulation(engine: Engine) -> dict[str, Any] | None:
    if not engine.is_accumulating:
        return None
    # shards are averages, unless somebody waits with that; what is unscaled has left flags on its rank
    shared = bool(engine.shard_groups) and not hold_back(engine.shard_groups) and not engine.gradients.after_each_pass
    if has_several_processes() and not engine.ddp.same_everywhere() and not shared:
        if engine.policy.verbosity >= 1:
            logger.warning('amp: gradients of several processes that wait for a step are not saved: save after a step.')
        return None
    found, of_others = engine.flags.state()
    buffers = {name: copy for snapshot in engine.snapshots for name, copy in snapshot.state().items()}
    gradients, unscaled = engine.gradients.save(engine.params.lists()), engine.gradients.after_each_pass
    window = dict(gradients=gradients, unscaled=unscaled, used=list(engine.flags.used), found_inf=found)
    optional = {'foreign_found_inf': of_others} if of_others is not None else {}
    return {**window, **optional, **({'buffers': buffers} if buffers else {})}


def check_state(optimizer: Optimizer, state: Any) -> checkpoint.SavedAmp:
    """Check that a state dict is of an optimizer and scales such as these, applying nothing.

    Args:
        optimizer: Of the engine.
        state: As for :func:`load_state`.

    Raises:
        AmpCheckpointError: Names the key and what was expected.
    """
    form = checkpoint.own_form(optimizer)
    saved = checkpoint.read(state, form)
    if form is None:
        checkpoint.check_groups(saved, optimizer)
    return saved


def load_state(engine: Engine, state: Any) -> str:
    """Take over a state dict; before or after attaching.

    Returns:
        A line for the log: whose state it was, and what of it could not be kept.

    Raises:
        AmpCheckpointError: As :func:`check_state`; or the optimizer refuses its part. Nothing has been applied.
    """
    optimizer, policy = engine.optimizer, engine.policy
    assert optimizer is not None
    saved = check_state(optimizer, state)
    try:
        # torch aliases tensors of the right type: without a copy, training would write into the caller's dict
        optimizer.load_state_dict(_copied(saved.optimizer, optimizer))
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise AmpCheckpointError(f'the optimizer state does not fit {type(optimizer).__name__}: {error}') from error
    if not policy.enabled:
        dropped = [] if saved.kind == 'plain' else ['the loss scale, for mixed precision is off']
        return saved.resumed('without mixed precision', [], dropped)
    _keep_scalar_state(optimizer, saved.optimizer)
    engine.pending = None
    if engine.attached:
        engine.zero_grad()
    scales, dropped = engine.scales.load(saved.loss_scalers)
    engine.monitor.start(int(engine.scales.first.counts[2]))
    for snapshot in () if saved.window or any(each.is_accumulating for each in engine.others) else engine.snapshots:
        # of another file
        snapshot.load({})
    if saved.window is not None:
        if not saved.window_fits(policy):
            dropped.append('the gradients of an unfinished accumulation, which belong to another configuration')
        elif engine.attached:
            restore_accumulation(engine, saved.window)
        else:
            # the gradients alone: a second copy of the optimizer state would wait in memory for nothing
            engine.pending = dataclasses.replace(saved, optimizer={}, window=copy.deepcopy(saved.window))
    return saved.resumed(f'at {policy.opt_level}', scales, dropped)


def _copied(saved: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """Make a deep copy of an optimizer's state dict, with shards in place of whole tensors where its parameters are sharded."""
    if 'param_groups' not in saved:
        return copy.deepcopy(dict(saved))
    state = {key: dict(values) for key, values in saved['state'].items()}
    for key, parameter in _by_key(saved, optimizer).items():
        for name, value in state.get(key, {}).items() if is_sharded(parameter) else ():
            if isinstance(value, Tensor) and not is_sharded(value) and value.shape == parameter.shape:
                state[key][name] = shard_like(value, parameter)
    return copy.deepcopy({**saved, 'state': state})


def _by_key(saved: Mapping[str, Any], optimizer: Optimizer) -> dict[Any, Tensor]:
    """Find the parameter that each key of a state dict is about; none in a form of its own."""
    keys = [key for group in saved.get('param_groups', ()) for key in group['params']]
    return dict(zip(keys, parameters_of(optimizer)))


def _keep_scalar_state(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Give scalar state of 16-bit parameters back the type it was saved in, which torch casts while loading."""
    for key, parameter in _by_key(saved, optimizer).items():
        # ZeroRedundancyOptimizer has None for what other ranks step
        state = optimizer.state.get(parameter) or {}
        for name, value in saved['state'].get(key, {}).items():
            now, is_scalar = state.get(name), isinstance(value, Tensor) and value.shape != parameter.shape
            if is_scalar and isinstance(now, Tensor) and now.dtype != value.dtype:
                state[name] = value.detach().to(now.device, copy=True)


def restore_accumulation(engine: Engine, window: Mapping[str, Any]) -> None:
    """Put back the gradients of an accumulation that was open when it was saved."""
    saved, unscales = window['gradients'], engine.gradients.after_each_pass
    if window['unscaled'] != unscales:
        # of an earlier version, or of a wrapper that had no others beside it then, or had some
        scale = engine.scales.first.get_scale()
        factor = 1 / scale if unscales else scale
        saved = [None if gradient is None else gradient.float() * factor for gradient in saved]
    engine.gradients.restore(saved, engine.params.lists())
    engine.flags.restore(window['used'], window['found_inf'], window.get('foreign_found_inf'))
    for snapshot in engine.snapshots:
        snapshot.load(window.get('buffers', {}))
    engine.is_accumulating = True
    if engine.policy.verbosity >= 1:
        logger.info('amp: the gradients of an unfinished accumulation were in the checkpoint and are back')
