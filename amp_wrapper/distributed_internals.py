"""The private names of DDP and of FSDP2 (``fully_shard``), each with its reason and the versions that have it.

FSDP2 has public functions that shard a model, and none that say how a model was sharded. Nothing here loads
``torch.distributed.fsdp``. Tried on the versions of :data:`amp_wrapper.torch_internals.TRIED`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .torch_internals import VERSION

# -- DDP ---------------------------------------------------------------------------------------------------------------

#: The DDP whose forward call is under way on this thread, or None; it tells nobody. In every version since 2.0.
active_ddp: Callable[[], DistributedDataParallel | None] = DistributedDataParallel._get_active_ddp_module


def ddp_parameters(ddp: Any) -> Sequence[nn.Parameter]:
    """The parameters that a DDP broadcast when it was made, trainable or not. In every version since 1.11."""
    return list(ddp._module_parameters)


def count_listened(ddp: Any) -> int:
    """How many parameters the reducer of a DDP listens to; it tells which to nobody. In every version since 1.9."""
    return int(ddp._get_ddp_logging_data()['num_parameter_tensors'])


def comm_hooks(ddp: Any) -> list[tuple[Callable[..., Any], Any]]:
    """The communication hooks that were registered on a DDP, each with its state. In every version since 2.0."""
    return list(getattr(ddp, '_comm_hooks', ()))


def renew_reducer(ddp: Any) -> None:
    """Give a DDP a new reducer, which listens to its parameters as they are now. Collective.

    The DDP keeps its identity, class, settings, hooks, communication hooks, mode, and what a subclass put on it. Where the new
    reducer cannot be made, it keeps the old one. In every version since 2.6.
    """
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    # most arguments are kept under their names; the group stands for a mesh
    settings = {name: getattr(ddp, name) for name in known if hasattr(ddp, name) and name != 'device_mesh'}
    if 'forward_sync_buffers' in settings:
        # its other name
        del settings['broadcast_buffers']
    if 'init_sync' in known:
        # the ranks agree already, and a broadcast would only reach the rounded weights, not their masters
        settings['init_sync'] = False
    # without a bound of its own, DDP starts with a small first bucket; an explicit 25 would change that
    settings['bucket_cap_mb'] = None if ddp.bucket_bytes_cap_default else ddp.bucket_bytes_cap / 2**20
    if getattr(ddp, 'bucket_bytes_cap_list', None):
        settings['bucket_cap_mb_list'] = [size / 2**20 for size in ddp.bucket_bytes_cap_list]
    made = DistributedDataParallel(**settings)
    for hook, state in comm_hooks(ddp):
        made.register_comm_hook(state, hook)
    # all that belongs to the module, and what the constructor makes anew and no argument of it sets
    kept = {*vars(nn.Module()), '_join_config', '_ddp_sink_clone'}
    kept |= {'require_backward_grad_sync', 'require_forward_param_sync'}
    vars(ddp).update({name: value for name, value in vars(made).items() if name not in kept})


def joins(ddp: Any) -> bool:
    """Whether a DDP runs under ``join()``, which it tells nobody. In every version since 1.10."""
    return getattr(getattr(ddp, '_join_config', None), 'enable', False)


def cannot_be_rebuilt(ddp: Any) -> bool:
    """Whether a DDP was made with ``mixed_precision`` or ``delay_all_reduce_named_params``, which put hooks on the model.

    It keeps no more of the latter. In every version since 2.1.
    """
    return getattr(ddp, 'mixed_precision', None) is not None or bool(getattr(ddp, '_delay_all_reduce_params', None))


# -- FSDP2 -------------------------------------------------------------------------------------------------------------

#: Whether a group of several modules ends its forward pass where only some of them were called. Before, it keeps its gathered
#: parameters, and the next backward pass does not average their gradients.
COMPLETES_GROUPS = VERSION >= (2, 13)


def is_fully_sharded(module: nn.Module) -> bool:
    """Whether ``fully_shard`` was called for this module, by a method that it adds. In every version since 2.6."""
    return hasattr(module, '_get_fsdp_state')


def shard_groups(models: Iterable[nn.Module]) -> list[Any]:
    """FSDP2's own records of the groups of some models, each once; no public function tells what is in which.

    A group has ``modules``, those that ``fully_shard`` was called for, and can ``reshard()``. torch has them under
    ``_fsdp_param_groups`` since 2.12, and before one of them in a state.

    Args:
        models: Sharded, as a whole or in part, or not at all.
    """
    modules: list[Any] = [module for model in models for module in model.modules() if is_fully_sharded(module)]
    found: list[Any] = []
    # modules of one group share a state
    for state in dict.fromkeys(module._get_fsdp_state() for module in modules):
        found += state._fsdp_param_groups if hasattr(state, '_fsdp_param_groups') else [state._fsdp_param_group]
    return [group for group in found if group is not None]


def parameters_of_group(group: Any) -> list[nn.Parameter]:
    """The sharded parameters of one of :func:`shard_groups`. In every version since 2.6."""
    return [each.sharded_param for each in group.fsdp_params]


def types_of_group(group: Any) -> tuple[torch.dtype | None, torch.dtype | None]:
    """The types that parameters are gathered in, None for their own, and that gradients are averaged in, None for theirs.

    Before 2.15, gradients are averaged in the type of what is gathered where no type is given.
    """
    policy = group.fsdp_params[0].mp_policy
    return policy.param_dtype, policy.reduce_dtype or (None if VERSION >= (2, 15) else policy.param_dtype)


def hold_back(groups: Iterable[Any]) -> bool:
    """Whether gradients stay in one of the groups, whole, until a later pass averages them (``set_requires_gradient_sync``)."""
    return not all(group.reduce_grads for group in groups)


def reshard(model: nn.Module) -> None:
    """Let every module hold its sharded parameters. A forward pass may have left gathered ones in their place."""
    for group in shard_groups([model]):
        group.reshard()
