"""The arguments of ``amp.initialize``: checked, resolved, and printed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from .. import compiler_internals
from ..casting.cast_module import holds_casts
from ..casting.sharding import Sharding
from ..errors import AmpAttachError, AmpConfigError, short
from ..policy import LEVELS, OPTIONS, OptLevel, Policy, SharedOptions, resolve
from . import known_models
from .session import Session

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

#: Options of models, which optimizers that are initialised later share.
_OF_MODELS = (
    'cast_model_type',
    'patch_torch_functions',
    'keep_batchnorm_fp32',
    'master_weights',
    'cast_model_outputs',
    'keep_fp32',
    'fp32_ops',
    'keep_inputs',
)


#: Options that are printed where they are given.
_PRINTED = (*_OF_MODELS[:4], 'loss_scale', *_OF_MODELS[5:])


class InitializeOptions(SharedOptions, total=False):
    """What :func:`amp_wrapper.amp.initialize` takes beside models and optimizers."""

    opt_level: OptLevel
    master_weights: bool | None
    mesh: DeviceMesh | None
    sharding: Mapping[str, Any] | None


def policy_of(opt_level: OptLevel, given: Mapping[str, Any]) -> Policy:
    """The configuration.

    Args:
        opt_level: 'O0' to 'O5'.
        given: The other options.

    Raises:
        AmpConfigError: Every conflict of the configuration in one message.
    """
    enabled = given['enabled']
    is_level = isinstance(enabled, str) and enabled.upper() in LEVELS
    if is_level or isinstance(enabled, (nn.Module, Optimizer)):
        several = 'several models go in a list: amp.initialize([model1, model2], optimizer)'
        remedy = f'write opt_level={enabled.upper()!r}' if is_level else several
        raise AmpConfigError([f'enabled={short(enabled)}, the third argument, must be True or False: {remedy}.'])
    masters = given['master_weights']
    if masters is not None and not isinstance(masters, bool):
        raise AmpConfigError(
            [
                f"master_weights={masters!r} must be True, False or None (the level's own); 'split' needs gradients "
                'that are unscaled by the step, as AmpOptimWrapper has them.'
            ]
        )
    options: Any = dict(given)
    return resolve(opt_level, **options)


def uncompiled(models: Sequence[nn.Module]) -> list[nn.Module]:
    """The models inside of what ``torch.compile(model)`` made: what is cast is the same, whichever of the two is called."""
    return [compiler_internals.compiled_module(model) or model for model in models]


def listed(value: Any, kind: type, name: str, word: str) -> list[Any]:
    """One object or several, as a list.

    Args:
        value: An instance of ``kind``, or a list or tuple of them.
        kind: What each has to be.
        name: Of the argument.
        word: What it has to be, in words.

    Raises:
        AmpConfigError: Something else; a ``TypeError`` as well.
    """
    if isinstance(value, kind):
        return [value]
    if kind is Optimizer and hasattr(value, 'param_groups') and hasattr(value, 'step'):
        raise AmpConfigError(
            [
                f'{name}={short(value)} is no torch.optim.Optimizer, but {type(value).__name__}, which behaves like one: '
                f'initialize the optimizer that it is built around, and then build {type(value).__name__} around that.'
            ]
        )
    if not isinstance(value, (list, tuple)) or isinstance(value, nn.ModuleList):
        swapped = isinstance(value, Optimizer if kind is nn.Module else nn.Module)
        order = ' The model comes first: amp.initialize(model, optimizer).' if swapped else ''
        raise AmpConfigError(
            [f'{name}={short(value)} must be {word} or a list or tuple of them, but is {type(value).__name__}.{order}']
        )
    for index, item in enumerate(value):
        if not isinstance(item, kind):
            raise AmpConfigError([f'{name}[{index}]={short(item)} must be {word}, but is {type(item).__name__}.'])
    return list(value)


def like(value: Any, items: list[Any]) -> Any:
    """``items`` in a container of the type of ``value``, which is a list or tuple."""
    if isinstance(value, list):
        return items
    make = getattr(type(value), '_make', type(value))
    return make(items)


def of_known_models(policy: Policy, optimizers: Sequence[Optimizer], given: Mapping[str, Any]) -> Policy:
    """The configuration of optimizers that come without models: that of the models whose parameters they hold.

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
    found = known_models.policies_of(optimizers) if policy.enabled else []
    if not found:
        return policy
    models, *others = found
    if others:
        raise AmpAttachError(
            f'the optimizers hold parameters of models at {" and ".join(each.opt_level for each in found)}, which were '
            f'initialised apart: call amp.initialize([], optimizer) for the optimizers of each.'
        )
    if policy.opt_level not in ('O1', models.opt_level):
        raise AmpAttachError(
            f'opt_level={policy.opt_level!r}, and the parameters of the optimizer belong to a model at {models.opt_level}: '
            f'leave opt_level out, it is that of the model.'
        )
    decided = [name for name in _OF_MODELS if given[name] is not None]
    if decided:
        raise AmpConfigError(
            [
                f'{name}={given[name]!r} was decided when the model was initialised: leave it out of '
                f'amp.initialize([], optimizer).'
                for name in decided
            ]
        )
    scale = models.loss_scale
    scaling: Any = {name: given[name] for name in ('loss_scale', 'min_loss_scale', 'max_loss_scale')}
    if any(value != OPTIONS[name].default for name, value in scaling.items()):
        scale = resolve(models.opt_level, **scaling).loss_scale
    losses = policy.num_losses if policy.num_losses > 1 else models.num_losses
    return dataclasses.replace(models, loss_scale=scale, num_losses=losses, verbosity=policy.verbosity)


def check_models(models: Sequence[nn.Module], policy: Policy) -> None:
    """Refuse models that are wrapped or cast already.

    Raises:
        AmpAttachError: Names the model, and what to do.
    """
    for index, model in enumerate(models):
        if isinstance(model, (DistributedDataParallel, DataParallel)):
            name = type(model).__name__
            raise AmpAttachError(
                f'models[{index}] is wrapped in {name} already. The order is: model.to(device), optimizer = ..., model, '
                f'optimizer = amp.initialize(model, optimizer), and then model = {name}(model). {name} has to see the types '
                f'that the parameters have after the cast.'
            )
        if policy.cast_model_type is not None and holds_casts(model):
            raise AmpAttachError(
                f'models[{index}] ({type(model).__name__}) holds casts already, of another amp.initialize() or of a wrapper: '
                f'initialize a model once, together with all its optimizers, as lists. For another optimizer, or one more: '
                f'amp.initialize([], optimizer). For more parameters: optimizer.add_param_group(). To begin anew, build '
                f'the model again and load model.state_dict(), which is FP32.'
            )
        if any(model is other for other in models[:index]):
            raise AmpAttachError(f'models[{index}] is in the list twice: name each model once.')


def sharding_of(mesh: DeviceMesh | None, options: Mapping[str, Any] | None, policy: Policy) -> Sharding | None:
    """How models are to be sharded; None where no mesh was given.

    Raises:
        AmpConfigError: Options of sharding that mean nothing; some without a mesh.
    """
    if mesh is not None:
        return Sharding.of(mesh, options, policy)
    if options is not None:
        raise AmpConfigError([f'sharding={options!r} without a mesh: write mesh=..., or leave it out.'])
    return None


def print_options(policy: Policy, given: Mapping[str, Any], session: Session) -> None:
    """The options on standard output, where people who used apex look for them."""
    if policy.verbosity < 1:
        return
    print(f'amp: {policy.describe()}')
    overrides = ', '.join(f'{name}={given[name]!r}' for name in _PRINTED if given[name] is not None)
    print(f'amp: overrides of {policy.opt_level}: {overrides or "none"}')
    scale, options = policy.loss_scale, policy.to_dict()
    options['patch_torch_functions'] = policy.patch_torch_functions
    options['loss_scale'] = 'dynamic' if scale.dynamic else scale.init_scale
    # as in the table of levels: None is what does not apply
    if policy.cast_model_type in (None, torch.float32):
        options['keep_batchnorm_fp32'] = None
    if policy.cast_model_type is None:
        options['master_weights'] = None
    for name in ('enabled', 'opt_level', *_PRINTED[:5]):
        print(f'    {name:<22}: {options[name]}')
    if policy.verbosity >= 2 and policy.cast_model_type is not None:
        for name in session.casts.parameters:
            print(f'amp: {name} is {options["cast_model_type"]} now')
