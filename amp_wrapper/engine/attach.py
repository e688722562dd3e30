"""Attaches a model to an engine and detaches it: casts, FP32 masters, DDP, buffers."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .. import distributed_internals
from ..casting import cast_module, checks, roots
from ..casting.modules import module_device
from ..casting.plan import CastPlan
from ..casting.sharding import Sharding, shard
from ..errors import AmpUsageError
from ..optim.fused import FusedOptimizer
from ..policy import Policy, dtype_name
from ..policy.nested import HALF_TYPES, EnterObject
from . import averages
from .before_calls import before_calls
from .buffer_snapshot import BufferSnapshot
from .ddp import Ddp, check_unknown_listeners
from .engine import Engine, Stage
from .optimizer_state import cast_state_to_parameters
from .optimizers import check_once, check_owners, check_shared
from .state import restore_accumulation

#: Integrations decide where these lines go.
logger = logging.getLogger('amp_wrapper')


def attach(
    engine: Engine,
    model: nn.Module | None,
    leave: tuple[type, ...] = (),
    average: tuple[type, ...] = (),
    foreign: Iterable[Tensor] = (),
    enter: EnterObject | None = None,
) -> None:
    """Cast a model for one engine, make masters and take them into the optimizer. Does nothing when attached already.

    The weights must be FP32 and final: initialised or loaded. With an optimizer that owns only some of the trainable
    parameters (one wrapper of several), only modules whose every parameter it owns are cast.

    Args:
        engine: Of the optimizer.
        model: The model, wrapped in DDP (every rank calls this then) or not; None where only gradients are scaled (O0, O1, O4).
        leave: Module classes to leave alone.
        average: Classes of averaged models, which stay FP32.
        foreign: Parameters that other optimizers step.
        enter: Casts tensors inside output objects of a framework's own kind.

    Raises:
        AmpAttachError: The optimizer steps nothing of the model; the model is 16-bit already or beyond float16's range,
            cast already by somebody else, compiled, sharded, or in a DDP that cannot be carried over. Nothing has been
            changed.
        AmpConfigError: A ``keep_fp32`` pattern that matches nothing. Nothing has been changed.
        AmpUsageError: No model, where the level casts it.
    """
    if engine.attached:
        return
    if not engine.policy.enabled:
        engine.stage = Stage.READY
        return
    if model is None:
        if engine.policy.casts_model:
            raise AmpUsageError(
                f'{engine.policy.opt_level} casts the model, but no model was handed over before the first backward: '
                f'run the forward pass under "with optim_wrapper.optim_context(model):".'
            )
        _begin(engine, [])
    else:
        engine.casts = _cast(engine, model, leave, average, list(foreign), enter)
    pending, engine.pending = engine.pending, None
    if pending is not None and pending.window is not None:
        restore_accumulation(engine, pending.window)


def _cast(
    engine: Engine,
    model: nn.Module,
    leave: tuple[type, ...],
    average: tuple[type, ...],
    foreign: list[Tensor],
    enter: EnterObject | None,
) -> CastPlan:
    policy, optimizer = engine.policy, engine.optimizer
    inner = roots.unwrap(model)
    distributed_internals.reshard(inner)
    engine.names = names_of([inner])
    engine.ddp = Ddp(engine.weakly(), [model], engine.names, policy.verbosity >= 1)
    if policy.casts_model and not engine.ddp.ddps:
        check_unknown_listeners(inner)
    engine.ddp.check(policy.casts_model)
    theirs = [other.weights() for other in engine.others]
    check_shared(engine.weights(), theirs, engine.names)
    if optimizer is not None:
        elsewhere = [*foreign, *itertools.chain.from_iterable(theirs)]
        check_owners([optimizer], [inner], elsewhere, casts=policy.casts_model)
    named = roots.find_roots(inner, optimizer, foreign, _cast_by_others(engine))
    plan = CastPlan(named, policy, leave, average, enter, within=[inner])
    _carry_out([engine], policy, plan, [inner], [model], leave)
    if policy.verbosity >= 2 and policy.cast_model_type is not None:
        for name in plan.parameters:
            logger.info(f'amp: {name} is {dtype_name(policy.cast_model_type)} now')
    return plan


def attach_together(
    engines: Sequence[Engine], models: Sequence[nn.Module], policy: Policy, sharding: Sharding | None = None
) -> CastPlan:
    """Cast models as wholes, and make masters for all that the engines' optimizers step of them.

    Unlike :func:`attach`, it does not matter which optimizer owns what, nor whether any does. Losses of each engine may reach
    the parameters of the others.

    Args:
        engines: Not attached; with ``policy``.
        models: FP32, not wrapped.
        policy: The configuration.
        sharding: How the models are sharded first; None for as they are.

    Returns:
        The plan of the casts, which takes them off.

    Raises:
        AmpAttachError: As :func:`attach`. Nothing has been changed.
    """
    for model in models:
        roots.unwrap(model)
        distributed_internals.reshard(model)
        if policy.casts_model:
            check_unknown_listeners(model)
    for place, engine in enumerate(engines):
        if engine.optimizer is not None and not engine.is_plain:
            check_once(engine.optimizer, engine.weights(), names_of(models))
        check_shared(engine.weights(), [other.weights() for other in engines[:place]], names_of(models))
    if sharding is not None:
        shard(models, policy, sharding, [engine.optimizer for engine in engines if engine.optimizer is not None])
    for engine in engines:
        engine.names = names_of(models)
        engine.ddp = Ddp(engine.weakly(), names=engine.names, speaks=policy.verbosity >= 1)
        engine.join([other for other in engines if other is not engine])
    plan = CastPlan(named_roots(models), policy, covers_forward=True)
    _carry_out(engines, policy, plan, models, models)
    return plan


def _carry_out(
    engines: Sequence[Engine],
    policy: Policy,
    plan: CastPlan,
    models: Sequence[nn.Module],
    wrapped: Sequence[nn.Module],
    leave: tuple[type, ...] = (),
) -> None:
    """Cast models by a plan, and let engines take hold of them: masters, buffers, DDP.

    Args:
        engines: All that step something of the models.
        policy: Their configuration.
        plan: What is cast.
        models: Not wrapped.
        wrapped: The same, in DDP or not.
        leave: Module classes to leave alone.
    """
    for engine in engines:
        if engine.optimizer is not None and engine.policy.master_weights:
            # from the weights before they are rounded
            kind: Literal['split', 'whole'] = 'split' if engine.policy.split_masters else 'whole'
            engine.use_params(plan.parameters, kind, engine.policy.cast_model_type)
    plan.apply()
    for engine in engines:
        engine.kept = plan.kept
        _take_cast(engine, plan)
        watch_buffers(engine, named_roots(models), leave)
        engine.ddp.rebuild([*plan.parameters.values(), *plan.raised])
        engine.ddp.watch(wrapped)
        engine.shard_groups = distributed_internals.shard_groups(models)
        _begin(engine, models)
    checks.warn(plan.rounded, plan.momentum, policy)
    if plan.parameters and any(engine.optimizer is not None for engine in engines):
        cast_module.copies_are_fp32([root for _, root in plan.roots])


def join_models(engine: Engine, models: Sequence[nn.Module]) -> None:
    """Go on with models of earlier optimizers; gradients that their masters have from before are no news.

    Args:
        engine: Of an attached engine.
        models: Those of earlier optimizers, whose weights this one steps.
    """
    _follow_at_entry(engine, models)
    watch_buffers(engine, named_roots(models))
    engine.gradients.mark_stepped()


def detach(engine: Engine) -> None:
    """Take the hooks off, give the model FP32 weights (the masters) and the optimizer its own parameters back.

    DDP modules average FP32 gradients again; every rank calls this.

    Raises:
        AmpUsageError: Gradients are waiting for a step; a weight and its master that were both written to.
    """
    if not engine.attached:
        return
    if engine.is_accumulating and engine.policy.enabled:
        raise AmpUsageError('detach() in the middle of an accumulation would lose its gradients: step() first.')
    params = engine.params
    casts = engine.casts is not None and engine.casts.parameters
    params.release()
    if engine.casts is not None:
        engine.casts.remove()
        engine.ddp.rebuild(engine.casts.parameters.values())
    if not params.have_fp32_values and engine.optimizer is not None and casts:
        _state_to_fp32(engine.optimizer)
    engine.reset()


def _begin(engine: Engine, models: Sequence[nn.Module]) -> None:
    """Everything is in place: from here on, gradients may come."""
    parameters = engine.params.parameters()
    device = module_device(models[0]) if models else torch.device('cpu')
    engine.device = parameters[0].device if parameters else device
    engine.flags.to(engine.device)
    engine.scales.to(engine.device)
    engine.stage = Stage.READY


def _cast_by_others(engine: Engine) -> set[int]:
    """The modules that other engines have cast, by id."""
    # at O0 inputs and outputs are cast
    plans = [each.casts for each in engine.others if each.casts is not None and each.policy.cast_model_type is not None]
    return {id(module) for plan in plans for _, root in plan.roots for module in root.modules()}


def _take_cast(engine: Engine, plan: CastPlan) -> None:
    """After the cast: let the optimizer's state and the weights follow."""
    optimizer = engine.optimizer
    if plan.rounded and optimizer is not None and (engine.params.have_fp32_values or plan.raised):
        # of weights that are FP32 from now on, here or as masters
        _state_to_fp32(optimizer)
    averages.patch_loaded()
    _follow_at_entry(engine, [root for _, root in plan.roots])
    if engine.params.have_fp32_values:
        # the cast rounded each weight; copying again settles the version counters
        engine.params.write_weights()
    elif optimizer is not None and not isinstance(optimizer, FusedOptimizer):
        # ours compute in FP32, and keep their state in the type they were given
        cast_state_to_parameters(optimizer, [*plan.parameters.values()])


def watch_buffers(engine: Engine, named: Sequence[tuple[str, nn.Module]], leave: tuple[type, ...] = ()) -> None:
    """Restore buffers after skipped steps from now on, where steps may be skipped; optimizers of a model share its snapshot."""
    if engine.optimizer is None or not engine.scales.check or not engine.policy.restore_buffers_on_skip:
        return
    for name, model in named:
        listeners = before_calls(model)
        known = [snapshot for each in listeners for snapshot in each.snapshots if model in snapshot]
        snapshot = known[0] if known else BufferSnapshot()
        snapshot.add(model, name, leave)
        for each in listeners:
            each.snapshots.add(snapshot)
        engine.snapshots = tuple(dict.fromkeys((*engine.snapshots, snapshot)))


def _follow_at_entry(engine: Engine, models: Sequence[nn.Module]) -> None:
    if engine.params.kind == 'whole':
        for each in [each for model in models for each in before_calls(model)]:
            each.masters.add(engine.params)


def named_roots(models: Sequence[nn.Module]) -> list[tuple[str, nn.Module]]:
    """(what comes before the names in it, model), for messages and files."""
    several = len(models) > 1
    return [(f'models[{index}]' if several else '', model) for index, model in enumerate(models)]


def names_of(models: Sequence[nn.Module]) -> dict[int, str]:
    """The names of all parameters, by id."""
    named = named_roots(models)
    return {id(parameter): key for name, model in named for key, parameter in model.named_parameters(prefix=name)}


def _state_to_fp32(optimizer: Optimizer) -> None:
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dtype in HALF_TYPES:
                state[key] = value.float()
