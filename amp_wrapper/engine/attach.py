"""Attaches a model to an engine and detaches it: casts, FP32 masters, DDP, buffers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .. import distributed_internals
from ..casting import cast_module, checks, roots
from ..casting.modules import module_device
from ..casting.plan import CastPlan
from ..casting.sharding import Sharding, shard
from ..errors import AmpUsageError, logger
from ..optim.fused import FusedOptimizer
from ..policy import Policy, dtype_name
from ..policy.nested import HALF_TYPES, EnterObject
from . import averages
from .before_calls import before_calls
from .buffer_snapshot import BufferSnapshot
from .ddp import Ddp, check_before_cast
from .engine import Engine
from .flags import Flags
from .optimizers import check_owners
from .state import restore_accumulation


def attach(
    engine: Engine,
    model: nn.Module | None,
    leave: tuple[type, ...] = (),
    average: tuple[type, ...] = (),
    foreign: Iterable[Tensor] = (),
    enter: EnterObject | None = None,
) -> None:
    """Cast a model for one engine, make masters and take them into the optimizer.

    The weights must be FP32 and final: initialised or loaded. With an optimizer that owns only some of the trainable
    parameters (one wrapper of several), only modules whose every parameter it owns are cast.

    Args:
        engine: Of the optimizer; not attached.
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
    policy, optimizer = engine.policy, engine.optimizer
    if model is None and policy.casts_model:
        raise AmpUsageError(f'{policy.opt_level} casts the model, and has none: enter optim_context(model) first.')
    if model is None or not policy.enabled:
        _begin(engine, [])
    else:
        inner = roots.unwrap(model)
        distributed_internals.reshard(inner)
        if policy.casts_model:
            check_before_cast(model, inner)
        foreign = list(foreign)
        if optimizer is not None:
            theirs = [weight for other in engine.others for weight in other.weights()]
            check_owners([optimizer], [inner], [*foreign, *theirs], casts=policy.casts_model)
        # at O0 inputs and outputs are cast
        plans = [e.casts for e in engine.others if e.casts is not None and e.policy.cast_model_type is not None]
        done = {id(module) for plan in plans for _, root in plan.roots for module in root.modules()}
        named = roots.find_roots(inner, optimizer, foreign, done)
        plan = engine.casts = CastPlan(named, policy, leave, average, enter, within=[inner])
        _carry_out([engine], plan, [model])
        for name, weight in plan.parameters.items() if policy.verbosity >= 2 and policy.casts_model else ():
            logger.info(f'amp: {name} is {dtype_name(weight.dtype)} now')
    pending, engine.pending = engine.pending, None
    if pending is not None and pending.window is not None:
        restore_accumulation(engine, pending.window)


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
            check_before_cast(model, model)
    for engine in engines:
        engine.names = names_of(models)
        engine.join(other for other in engines if other is not engine)
    if sharding is not None:
        shard(models, policy, sharding, [engine.optimizer for engine in engines if engine.optimizer is not None])
    plan = CastPlan(named_roots(models), policy, covers_forward=True)
    _carry_out(engines, plan, models)
    return plan


def _carry_out(engines: Sequence[Engine], plan: CastPlan, models: Sequence[nn.Module]) -> None:
    """Cast models by a plan, and let engines take hold of them: masters, buffers, DDP.

    Args:
        engines: All that step something of the models.
        plan: What is cast.
        models: Wrapped in DDP or not.
    """
    inner = list(map(roots.unwrap, models))
    for engine in engines:
        engine.names = names_of(inner)
        if engine.optimizer is not None and engine.policy.master_weights:
            # from the weights before they are rounded
            engine.use_params(plan.parameters)
    plan.apply()
    averages.patch_loaded()
    for engine in engines:
        engine.kept = plan.kept
        _take_cast(engine, plan)
        _listen(engine, inner, plan.leave)
        engine.ddp = Ddp(engine.params, models, engine.names, engine.policy.verbosity >= 1)
        engine.ddp.rebuild([*plan.parameters.values(), *plan.raised])
        engine.shard_groups = distributed_internals.shard_groups(models)
        _begin(engine, models)
    checks.warn(plan.rounded, plan.momentum, plan.policy)
    if plan.parameters and any(engine.optimizer is not None for engine in engines):
        cast_module.copies_are_fp32([root for _, root in plan.roots])


def join_models(engine: Engine, models: Sequence[nn.Module]) -> None:
    """Go on with models of earlier optimizers; gradients that their masters have from before are no news.

    Args:
        engine: Of an attached engine.
        models: Those of earlier optimizers, whose weights this one steps.
    """
    _listen(engine, models)
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
    params, casts = engine.params, engine.casts
    params.release()
    if casts is not None:
        casts.remove()
        engine.ddp.rebuild(casts.parameters.values())
        if casts.parameters and not params.have_fp32_values:
            _state_to_fp32(engine.optimizer)
    engine.reset()


def _begin(engine: Engine, models: Sequence[nn.Module]) -> None:
    """Everything is in place: from here on, gradients may come."""
    parameters = engine.params.parameters()
    device = module_device(models[0]) if models else torch.device('cpu')
    engine.device = parameters[0].device if parameters else device
    engine.flags = Flags(engine.policy.num_losses, engine.device)
    engine.scales.to(engine.device)
    engine.attached = True


def _take_cast(engine: Engine, plan: CastPlan) -> None:
    """After the cast: let the optimizer's state and the weights follow."""
    optimizer, has_values = engine.optimizer, engine.params.have_fp32_values
    if plan.rounded and (has_values or plan.raised):
        # of weights that are FP32 from now on, here or as masters
        _state_to_fp32(optimizer)
    if has_values:
        # the cast rounded each weight; copying again settles the version counters
        engine.params.write_weights()
    elif optimizer is not None and not isinstance(optimizer, FusedOptimizer):
        # ours compute in FP32, and keep their state in the type they were given. State that was loaded while the parameters
        # were FP32 is FP32; without masters, training goes on in 16-bit, so it becomes what it was when it was saved
        for parameter in plan.parameters.values():
            state = optimizer.state.get(parameter) or {}
            for key, value in state.items():
                # counters and running products keep their type; only what has an entry per element follows the parameter
                is_moment = isinstance(value, Tensor) and value.is_floating_point() and value.shape == parameter.shape
                if is_moment and key != 'step':
                    state[key] = value.to(parameter.dtype)


def _listen(engine: Engine, models: Sequence[nn.Module], leave: tuple[type, ...] = ()) -> None:
    """Let weights follow masters before calls of models, and restore buffers after skipped steps, where steps may be skipped.

    Optimizers of one model share its snapshot.
    """
    restores = engine.optimizer is not None and engine.scales.check and engine.policy.restore_buffers_on_skip
    for name, model in named_roots(models):
        listeners = before_calls(model)
        known = [snapshot for each in listeners for snapshot in each.snapshots if model in snapshot]
        snapshot = known[0] if known else BufferSnapshot()
        for each in listeners:
            if engine.params.kind == 'whole':
                each.masters.add(engine.params)
            if restores:
                each.snapshots.add(snapshot)
        if restores:
            snapshot.add(model, name, leave)
            engine.snapshots = tuple(dict.fromkeys((*engine.snapshots, snapshot)))


def named_roots(models: Sequence[nn.Module]) -> list[tuple[str, nn.Module]]:
    """(what comes before the names in it, model), for messages and files."""
    return [(f'models[{index}]' if len(models) > 1 else '', model) for index, model in enumerate(models)]


def names_of(models: Sequence[nn.Module]) -> dict[int, str]:
    """The names of all parameters, by id."""
    named = named_roots(models)
    return {id(parameter): key for name, model in named for key, parameter in model.named_parameters(prefix=name)}


def _state_to_fp32(optimizer: Optimizer | None) -> None:
    for state in () if optimizer is None else optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dtype in HALF_TYPES:
                state[key] = value.float()
