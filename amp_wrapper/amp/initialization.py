"""``amp.initialize``: its arguments are checked, resolved and printed, and a session is made."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import Unpack

from ..casting.sharding import Sharding, shard
from ..errors import AmpAttachError, AmpConfigError, short
from ..policy import OPTIONS, OptLevel, Policy, SharedOptions, dtype_name, resolve
from ..policy.levels import DEFAULT_MAX_LOSS_SCALE
from ..policy.options import Fp32Names
from ..shards import rank
from .registry import listed, registry
from .session import Session

# what is handed over comes back, of the same type
_Models = TypeVar('_Models', bound=nn.Module | Sequence[nn.Module])
_Optimizers = TypeVar('_Optimizers', bound=Optimizer | Sequence[Optimizer])


class InitializeOptions(SharedOptions, total=False):
    """What :func:`amp_wrapper.amp.initialize` takes beside models and optimizers."""

    opt_level: OptLevel
    master_weights: bool | None
    mesh: DeviceMesh | None
    sharding: Mapping[str, Any] | None


@overload
def initialize(models: _Models, optimizers: None = None, *args: Any, **given: Unpack[InitializeOptions]) -> _Models: ...
@overload
def initialize(
    models: _Models, optimizers: _Optimizers, *args: Any, **given: Unpack[InitializeOptions]
) -> tuple[_Models, _Optimizers]: ...
def initialize(  # type: ignore[misc]
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: OptLevel = 'O1',
    cast_model_type: str | torch.dtype | bool | None = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | Mapping[str, Any] | None = None,
    cast_model_outputs: str | torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float | None = DEFAULT_MAX_LOSS_SCALE,
    *,
    keep_fp32: str | type | Sequence[str | type] | None = None,
    fp32_ops: Fp32Names | None = None,
    keep_inputs: str | Sequence[str] | None = None,
    from_16bit: bool = False,
    restore_buffers_on_skip: bool = True,
    mesh: DeviceMesh | None = None,
    sharding: Mapping[str, Any] | None = None,
) -> Any:
    """Cast models, make FP32 masters for their optimizers, and set up the loss scales. In place.

    Call it once, after the models are on their device and hold their first (or loaded) FP32 weights, after the optimizers were
    built, and before ``DistributedDataParallel`` wraps a model. It may be called again for other models and optimizers: each
    call has loss scales of its own.

    Args:
        models: One or a list or tuple of them; all are cast as wholes, whoever steps their parameters. An empty list is for
            optimizers of models that were initialised before: their level holds, and their masters are kept.
        optimizers: One or several that will be stepped, or None for inference. ``step`` and ``zero_grad`` of these objects lead
            through this package from now on; class, pickled form and schedulers stay as they are.
        enabled: False makes this and all that follows a no-op; the rest is still checked. With a ``mesh``, the models are
            sharded all the same, in FP32.
        opt_level: 'O0' to 'O5'.
        cast_model_type: Type of the model weights, or False for no cast.
        patch_torch_functions: Whether operations are cast one by one (O1 and O4).
        keep_batchnorm_fp32: Whether BatchNorm stays FP32; True, False, 'True' or 'False'.
        master_weights: Whether the optimizer steps FP32 counterparts of 16-bit weights.
        loss_scale: 'dynamic', a positive number (also as a string), a dict in ``GradScaler``'s words, or None for the level's
            own.
        cast_model_outputs: Type of the models' floating outputs; FP32 where None.
        num_losses: Losses with a scale of their own, chosen by ``loss_id``.
        verbosity: 0 silent, 1 warnings, the options and skipped steps, 2 a line for each cast too.
        min_loss_scale: Floor of a dynamic scale.
        max_loss_scale: Ceiling of a dynamic scale, or None; default 2**24.
        keep_fp32: Module classes, class names or glob patterns over qualified names that stay FP32. With several models,
            the names are those within each.
        fp32_ops: Functions, methods, autograd Functions and module classes that run in FP32 beside those of the registry
            (:data:`amp_wrapper.policy.fp32_registry.FP32_OPS`): dotted names, objects, or dicts such as
            ``dict(name='torch.Tensor.sum', output='float32')``, whose results stay FP32.
        keep_inputs: Names of arguments of ``forward``, of a model or of a module below it, whose floating tensors stay as they
            are: time steps, coordinates, positions. At the levels that cast the model.
        from_16bit: Whether trainable weights that are 16-bit already are taken: their FP32 values begin with the rounded ones.
            Frozen 16-bit weights are always taken.
        restore_buffers_on_skip: Whether a skipped step gives buffers (BatchNorm's statistics, counters) back that its forward
            passes have changed. apex left them as they were, NaN included.
        mesh: Shards the models over these ranks, by FSDP2, and puts the shards into the optimizers, which must not have
            stepped. Leave it out for models that were sharded before; they are checked against the level.
        sharding: How: a dict of ``blocks``, ``reduce_dtype``, ``reshard_after_forward`` and ``offload``, as for
            :func:`amp_wrapper.fully_shard`.

    Returns:
        ``models``, or ``(models, optimizers)`` where optimizers were given: the same objects, in lists or tuples as they came.

    Raises:
        AmpConfigError: Every conflict of the configuration in one message.
        AmpAttachError: A model that is wrapped or cast already, 16-bit without ``from_16bit``, or beyond the range of float16;
            an optimizer that cannot be wrapped, was initialised already, or steps nothing of the models. Nothing has been
            changed.
        TypeError: Something else than models and optimizers.
    """
    given: dict[str, Any] = {name: value for name, value in locals().items() if name in OPTIONS}
    policy = _policy_of(opt_level, given)
    model_list = listed(models, nn.Module, 'models')
    optimizer_list = [] if optimizers is None else listed(optimizers, Optimizer, 'optimizers')
    registry.check_new(optimizer_list)
    if mesh is None and sharding is not None:
        raise AmpConfigError([f'sharding={sharding!r} without a mesh: write mesh=..., or leave it out.'])
    chosen = None if mesh is None else Sharding.of(mesh, sharding, policy)
    if policy.enabled:
        _check_models(model_list)
        if not model_list:
            policy = _of_known_models(policy, optimizer_list, given)
        # the first rank prints for all
        policy = dataclasses.replace(policy, verbosity=0 if rank() else policy.verbosity)
        session = Session(policy, model_list, optimizer_list, sharding=chosen)
        if policy.verbosity:
            _print_options(policy, given, session)
    else:
        if chosen is not None:
            shard(model_list, policy, chosen, optimizer_list)
        registry.add(optimizer_list, None)
    return models if optimizers is None else (models, optimizers)


def _policy_of(opt_level: OptLevel, given: dict[str, Any]) -> Policy:
    """Resolve the configuration.

    Args:
        opt_level: 'O0' to 'O5'.
        given: The other options.

    Raises:
        AmpConfigError: Every conflict of the configuration in one message.
    """
    enabled, masters = given['enabled'], given['master_weights']
    if isinstance(enabled, (str, nn.Module, Optimizer)):
        remedy = "a level has its name, opt_level='O2'; several models go in a list, amp.initialize([model, other], optimizer)"
        raise AmpConfigError([f'enabled={short(enabled)}, the third argument, must be True or False: {remedy}.'])
    if masters is not None and not isinstance(masters, bool):
        raise AmpConfigError([f"master_weights={masters!r} must be True, False or None; only wrappers take 'split'."])
    return resolve(opt_level, **given)


def _of_known_models(policy: Policy, optimizers: Sequence[Optimizer], given: Mapping[str, Any]) -> Policy:
    """Find the configuration of optimizers that come without models: that of the models whose parameters they hold.

    Args:
        policy: What the arguments say by themselves.
        optimizers: Not initialised.
        given: The arguments of ``amp.initialize``.

    Returns:
        ``policy``, where the parameters belong to no model that was initialised.

    Raises:
        AmpAttachError: Models of several configurations; another level than theirs.
        AmpConfigError: An argument that was decided together with the models.
    """
    found = list(registry.models_of(optimizers).values())
    if not found:
        return policy
    kinds = {(each.opt_level, each.cast_model_type, each.autocast_dtype, each.master_weights) for each in found}
    models, levels = found[0], ' and '.join(dict.fromkeys(each.opt_level for each in found))
    if policy.opt_level not in ('O1', levels) or len(kinds) > 1:
        text = f'opt_level={policy.opt_level!r}, and the parameters are those of models at {levels}'
        raise AmpAttachError(f'{text}: leave opt_level out, and call amp.initialize([], optimizer) for each model.')
    decided = {name: value for name, value in _overrides(given).items() if not name.endswith('loss_scale')}
    if decided:
        text = 'was decided when the model was initialised: leave it out of amp.initialize([], optimizer).'
        raise AmpConfigError([f'{name}={value!r} {text}' for name, value in decided.items()])
    scaling: Any = {name: value for name, value in given.items() if name.endswith('loss_scale')}
    own = all(value == OPTIONS[name].default for name, value in scaling.items())
    scale = models.loss_scale if own else resolve(models.opt_level, **scaling).loss_scale
    losses = policy.num_losses if policy.num_losses > 1 else models.num_losses
    return dataclasses.replace(models, loss_scale=scale, num_losses=losses, verbosity=policy.verbosity)


def _overrides(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options that change what a level means."""
    return {name: value for name, value in given.items() if OPTIONS[name].default is None and value is not None}


def _check_models(models: Sequence[nn.Module]) -> None:
    """Refuse models that are wrapped already, or named twice.

    Raises:
        AmpAttachError: Names the model, and what to do.
    """
    for index, model in enumerate(models):
        name = type(model).__name__
        if isinstance(model, (DistributedDataParallel, DataParallel)):
            raise AmpAttachError(f'models[{index}] is inside {name}. The order: amp.initialize, then {name}(model).')
        if any(model is other for other in models[:index]):
            raise AmpAttachError(f'models[{index}] is in the list twice: name each model once.')


def _print_options(policy: Policy, given: Mapping[str, Any], session: Session) -> None:
    """Print the options, where people who used apex look for them; with ``verbosity=2`` every cast too."""
    dtype, scale = policy.cast_model_type and dtype_name(policy.cast_model_type), policy.loss_scale
    overrides = ', '.join(f'{name}={value!r}' for name, value in _overrides(given).items())
    options = {name: getattr(policy, name) for name in ('enabled', 'opt_level', 'patch_torch_functions')}
    options |= {'cast_model_type': dtype, 'loss_scale': 'dynamic' if scale.dynamic else scale.init_scale}
    # as in the table of levels, None is what does not apply
    options['keep_batchnorm_fp32'] = policy.keep_batchnorm_fp32 if policy.casts_model else None
    options['master_weights'] = policy.master_weights if dtype else None
    print(f'amp: {policy.describe()}\namp: overrides of {policy.opt_level}: {overrides or "none"}')
    for name, value in options.items():
        print(f'    {name:<22}: {value}')
    for name in session.casts.parameters if policy.verbosity >= 2 and dtype else ():
        print(f'amp: {name} is {dtype} now')
