"""Attaches a model to an engine and detaches it: casts, FP32 masters, DDP, buffers."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .. import distributed_internals
from ..casting import cast_module, checks, roots
from ..casting.masters import Masters
from ..casting.modules import module_device
from ..casting.plan import CastPlan
from ..casting.sharding import Sharding, shard
from ..errors import AmpAttachError, AmpUsageError, some
from ..optim.fused import FusedOptimizer
from ..policy import Policy, dtype_name
from ..policy.nested import HALF_TYPES, EnterObject
from . import averages
from .before_calls import before_calls
from .buffer_snapshot import BufferSnapshot
from .ddp import Ddp, check_unknown_listeners
from .optimizer_state import cast_state_to_parameters
from .optimizers import check_owners
from .parts import EngineParts, Stage

#: Integrations decide where these lines go.
logger = logging.getLogger('amp_wrapper')


def attach_model(
    parts: EngineParts,
    model: nn.Module,
    leave: tuple[type, ...],
    average: tuple[type, ...],
    foreign: Iterable[Tensor],
    enter: EnterObject | None,
) -> None:
    """Cast a model for one engine, make masters and take them into the optimizer; see :meth:`AmpEngine.attach`."""
    policy, optimizer = parts.policy, parts.optimizer
    inner = roots.unwrap(model)
    distributed_internals.reshard(inner)
    parts.names = {id(parameter): name for name, parameter in inner.named_parameters()}
    ddp = Ddp(parts.weights, [model], parts.names, policy.verbosity >= 1)
    if policy.casts_model and not ddp.ddps:
        check_unknown_listeners(inner)
    ddp.check(policy.casts_model)
    check_levels(parts)
    foreign = list(foreign)
    if optimizer is not None:
        theirs = [weight for other in parts.others for weight in other.weights()]
        check_owners([optimizer], [inner], [*foreign, *theirs], casts=policy.casts_model)
    done, shared_weights = _cast_by_others(parts)
    plan = CastPlan(roots.find_roots(inner, optimizer, foreign, done), policy, leave, average, enter, within=[inner])
    _make_masters(parts, plan)
    plan.apply()
    parts.casts = plan
    _take_cast(parts, plan, shared_weights)
    checks.warn(plan.rounded, plan.momentum, policy)
    watch_buffers(parts, [('', inner)], leave)
    parts.ddp = ddp
    parts.shard_groups = distributed_internals.shard_groups([inner])
    ddp.rebuild([*plan.parameters.values(), *plan.raised])
    ddp.watch([model])
    if optimizer is not None and plan.parameters:
        cast_module.copies_are_fp32([root for _, root in plan.roots])
    if policy.verbosity >= 2 and policy.cast_model_type is not None:
        for name in plan.parameters:
            logger.info(f'amp: {name} is {dtype_name(policy.cast_model_type)} now')


def attach_parts(
    engines: Sequence[EngineParts], models: Sequence[nn.Module], policy: Policy, sharding: Sharding | None
) -> CastPlan:
    """The work of :func:`amp_wrapper.engine.attach_together`, on the engines' parts."""
    for model in models:
        roots.unwrap(model)
        distributed_internals.reshard(model)
        if policy.casts_model:
            check_unknown_listeners(model)
    for engine in engines:
        check_once(engine, names_of(models))
    if sharding is not None:
        shard(models, policy, sharding, [engine.optimizer for engine in engines if engine.optimizer is not None])
    named, names = named_roots(models), names_of(models)
    first = next((each for each in engines if each.gradients.is_shared), engines[0] if engines else None)
    for engine in engines:
        assert first is not None
        engine.names = names
        engine.gradients.share(first.gradients)
        engine.ddp = Ddp(engine.weights, names=names, speaks=policy.verbosity >= 1)
        join(engine, [other for other in engines if other is not engine])
    plan = CastPlan(named, policy, covers_forward=True)
    for engine in engines:
        _make_masters(engine, plan)
    plan.apply()
    checks.warn(plan.rounded, plan.momentum, policy)
    for engine in engines:
        _take_cast(engine, plan)
        watch_buffers(engine, named)
        engine.ddp.watch(models)
        engine.shard_groups = distributed_internals.shard_groups(models)
        begin(engine, models[0] if models else None)
    if engines and plan.parameters:
        cast_module.copies_are_fp32(models)
    return plan


def take_over(parts: EngineParts, models: Sequence[nn.Module]) -> None:
    """After attaching: gradients that masters have from before are no news.

    Args:
        parts: Of an attached engine.
        models: Those of earlier optimizers, whose weights this one steps.
    """
    _follow_at_entry(parts, models)
    watch_buffers(parts, named_roots(models))
    parts.gradients.take_over(parts.params.pairs)


def detach_model(parts: EngineParts) -> None:
    """Take the hooks off and give back FP32 weights; see :meth:`AmpEngine.detach`."""
    if parts.is_accumulating and parts.policy.enabled:
        raise AmpUsageError('detach() in the middle of an accumulation would lose its gradients: step() first.')
    params = parts.params
    casts = parts.casts is not None and parts.casts.parameters
    params.release()
    if parts.casts is not None:
        parts.casts.remove()
        parts.ddp.rebuild(parts.casts.parameters.values())
    if not params.have_fp32_values and parts.optimizer is not None and casts:
        _state_to_fp32(parts.optimizer)
    parts.reset()


def let_go(parts: EngineParts) -> None:
    """For a model that nobody uses any more: its memory, and that of masters and optimizer, is freed with the last reference.

    The hooks of a model hold its engine. An engine holds what it has of the model, and its DDPs hold the engine: all of it
    would wait for Python to find these cycles.

    Args:
        parts: Not to be used any more, nor the model; attached, or in the middle of it.
    """
    parts.reset()
    parts.ddp = Ddp(list)


def begin(parts: EngineParts, model: nn.Module | None) -> None:
    """Everything is in place: from here on, gradients may come.

    Args:
        parts: Of the engine.
        model: Its model; None where only gradients are scaled.
    """
    device = next((parameter.device for parameter in parts.params.parameters()), None)
    if device is None:
        device = torch.device('cpu') if model is None else module_device(model)
    parts.device = device
    parts.overflow.to(device)
    parts.scales.to(device)
    parts.stage = Stage.READY


def join(parts: EngineParts, others: Iterable[object]) -> None:
    """Say whose parameters the losses of an engine may reach as well; see :meth:`AmpEngine.join`."""
    parts.others = tuple(others)  # type: ignore[arg-type]
    check_levels(parts)


def check_levels(parts: EngineParts) -> None:
    """Refuse parameters that two optimizers step at levels that cannot share them.

    Raises:
        AmpAttachError: Names the parameters.
    """
    mine = {id(weight) for weight in parts.weights()}
    policy = parts.policy
    for other in parts.others:
        theirs = other.policy if isinstance(other, EngineParts) else None
        both = [weight for weight in other.weights() if id(weight) in mine]
        casts = policy.casts_model or (theirs is not None and theirs.casts_model)
        if both and casts and (theirs is None or _kind(theirs) != _kind(policy)):
            names = [parts.names.get(id(weight), f'of shape {tuple(weight.shape)}') for weight in both[:5]]
            raise AmpAttachError(
                f'{len(both)} parameters are stepped by two optimizers ({", ".join(names)}), at '
                f'{policy.opt_level} and {theirs.opt_level if theirs else "without this package"}: they cannot be '
                f'16-bit for one and something else for the other. Give both the same level, or each parameter one '
                f'optimizer: losses of the others reach it all the same.'
            )


def _kind(policy: Policy) -> tuple[object, ...]:
    return policy.casts_model, policy.cast_model_type, policy.master_weights, policy.split_masters


def _cast_by_others(parts: EngineParts) -> tuple[set[int], list[nn.Parameter]]:
    """The modules that other engines have cast, by id, and those of their weights that this optimizer steps too."""
    # at O0 inputs and outputs are cast
    plans = [
        other.casts
        for other in parts.others
        if isinstance(other, EngineParts) and other.casts is not None and other.policy.cast_model_type is not None
    ]
    modules = {id(module) for plan in plans for _, root in plan.roots for module in root.modules()}
    cast = {id(weight) for plan in plans for weight in plan.parameters.values()}
    return modules, [weight for weight in parts.weights() if id(weight) in cast]


def _make_masters(parts: EngineParts, plan: CastPlan) -> None:
    """From the weights before they are rounded."""
    policy = parts.policy
    if parts.optimizer is not None and policy.master_weights:
        kind: Literal['split', 'whole'] = 'split' if policy.split_masters else 'whole'
        parts.params = Masters(parts.optimizer, plan.parameters, kind, policy.cast_model_type)


def _take_cast(parts: EngineParts, plan: CastPlan, shared_weights: Iterable[Tensor] = ()) -> None:
    """After the cast."""
    optimizer = parts.optimizer
    parts.kept = plan.kept
    if plan.rounded and optimizer is not None and (parts.params.have_fp32_values or plan.raised):
        # of weights that are FP32 from now on, here or as masters
        _state_to_fp32(optimizer)
    averages.patch_loaded()
    _follow_at_entry(parts, [root for _, root in plan.roots])
    if parts.params.have_fp32_values:
        # the cast rounded each weight; copying again settles the version counters
        parts.params.write_weights()
    elif optimizer is not None and not isinstance(optimizer, FusedOptimizer):
        # ours compute in FP32, and keep their state in the type they were given
        cast_state_to_parameters(optimizer, [*plan.parameters.values(), *shared_weights])


def watch_buffers(parts: EngineParts, named: Sequence[tuple[str, nn.Module]], leave: tuple[type, ...] = ()) -> None:
    """Restore buffers after skipped steps from now on, where steps may be skipped; optimizers of a model share its snapshot."""
    if parts.optimizer is None or not parts.scales.check or not parts.policy.restore_buffers_on_skip:
        return
    for name, model in named:
        listeners = before_calls(model)
        known = [snapshot for each in listeners for snapshot in each.snapshots if model in snapshot]
        snapshot = known[0] if known else BufferSnapshot()
        snapshot.add(model, name, leave)
        for each in listeners:
            each.snapshots.add(snapshot)
        parts.snapshots = tuple(dict.fromkeys((*parts.snapshots, snapshot)))


def _follow_at_entry(parts: EngineParts, models: Sequence[nn.Module]) -> None:
    if parts.params.kind == 'whole':
        for each in [each for model in models for each in before_calls(model)]:
            each.masters.add(parts.params)


def named_roots(models: Sequence[nn.Module]) -> list[tuple[str, nn.Module]]:
    """(what comes before the names in it, model), for messages and files."""
    several = len(models) > 1
    return [(f'models[{index}]' if several else '', model) for index, model in enumerate(models)]


def names_of(models: Sequence[nn.Module]) -> dict[int, str]:
    """The names of all parameters, by id."""
    named = named_roots(models)
    return {id(parameter): key for name, model in named for key, parameter in model.named_parameters(prefix=name)}


def check_once(engine: EngineParts, names: Mapping[int, str]) -> None:
    """Refuse an optimizer that has a parameter twice: its gradient would be unscaled twice, and have two masters.

    Raises:
        AmpAttachError: Names the parameters. Nothing has been changed.
    """
    seen: set[int] = set()
    twice = []
    for weight in () if engine.is_plain else engine.weights():
        if id(weight) in seen:
            twice.append(names.get(id(weight), f'one of shape {tuple(weight.shape)}'))
        seen.add(id(weight))
    if twice:
        raise AmpAttachError(
            f'{type(engine.optimizer).__name__} has parameters twice ({some(twice)}): give it each of them once, such as '
            f'{{id(p): p for p in parameters}}.values().'
        )


def _state_to_fp32(optimizer: Optimizer) -> None:
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dtype in HALF_TYPES:
                state[key] = value.float()
