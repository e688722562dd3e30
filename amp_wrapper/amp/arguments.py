"""The arguments of ``amp.initialize``: checked, resolved, and printed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from ..errors import AmpAttachError, AmpConfigError, short
from ..policy import OPTIONS, OptLevel, Policy, SharedOptions, dtype_name, resolve
from .registry import registry
from .session import Session


class InitializeOptions(SharedOptions, total=False):
    """What :func:`amp_wrapper.amp.initialize` takes beside models and optimizers."""

    opt_level: OptLevel
    master_weights: bool | None
    mesh: DeviceMesh | None
    sharding: Mapping[str, Any] | None


def policy_of(opt_level: OptLevel, given: dict[str, Any]) -> Policy:
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


def of_known_models(policy: Policy, optimizers: Sequence[Optimizer], given: Mapping[str, Any]) -> Policy:
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
        raise AmpAttachError(
            f'opt_level={policy.opt_level!r}, and the optimizers have parameters of models at {levels}: leave opt_level out, '
            f'and call amp.initialize([], optimizer) for those of each model.'
        )
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


def check_models(models: Sequence[nn.Module]) -> None:
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


def print_options(policy: Policy, given: Mapping[str, Any], session: Session) -> None:
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
