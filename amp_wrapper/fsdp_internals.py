"""The private names of FSDP2 (``torch.distributed.fsdp.fully_shard``) that the package uses, each with its reason.

FSDP2 has public functions that shard a model, and none that say how a model was sharded. Nothing here loads
``torch.distributed.fsdp``: before somebody has, no model is sharded by it. Tried on the versions of
:data:`amp_wrapper.torch_internals.TRIED`.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from .torch_internals import VERSION

_MODULE = 'torch.distributed.fsdp'
#: Whether what ``fully_shard`` has sharded trains on a CPU. In 2.6 it asks the device for streams, which a CPU has not.
TRAINS_ON_CPUS = VERSION >= (2, 7)
#: Whether a group of several modules ends its forward pass where only some of them were called. Before, it keeps its gathered
#: parameters, and the next backward pass does not average their gradients.
COMPLETES_GROUPS = VERSION >= (2, 13)
#: Whether gradients are averaged in the type of the shards where no type is given. Before, in the type of what is gathered.
AVERAGES_IN_OWN_TYPE = VERSION >= (2, 15)


@dataclasses.dataclass(frozen=True, eq=False)
class ShardGroup:
    """The parameters that one call of ``fully_shard`` has sharded, and gathers together.

    Attributes:
        modules: What it was called for: one module or several.
        parameters: The sharded parameters.
        param_dtype: The type they are gathered in; None for their own.
        reduce_dtype: The type gradients are averaged in; None for that of the parameters.
    """

    modules: Sequence[nn.Module]
    parameters: Sequence[nn.Parameter]
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None


def is_fully_sharded(module: nn.Module) -> bool:
    """Whether ``fully_shard`` was called for this module. ``FSDPModule`` is public, since 2.6."""
    kind = getattr(sys.modules.get(_MODULE), 'FSDPModule', None)
    return kind is not None and isinstance(module, kind)


def _sharded(models: Iterable[nn.Module]) -> list[Any]:
    """The modules that ``fully_shard`` was called for."""
    return [module for model in models for module in model.modules() if is_fully_sharded(module)]


def _param_groups(modules: Iterable[Any]) -> Iterator[Any]:
    """FSDP2's own records of its groups; ``_fsdp_param_groups`` since 2.12, one of them in a state before."""
    # modules of one group share a state
    for state in dict.fromkeys(module._get_fsdp_state() for module in modules):
        groups = state._fsdp_param_groups if hasattr(state, '_fsdp_param_groups') else [state._fsdp_param_group]
        yield from filter(None, groups)


def shard_groups(model: nn.Module) -> list[ShardGroup]:
    """The groups of a model, each once. No public function tells which parameter is in which, nor of what type.

    Args:
        model: Sharded, as a whole or in part, or not at all.
    """
    found = []
    for group in _param_groups(_sharded([model])):
        parameters = [each.sharded_param for each in group.fsdp_params]
        policy = group.fsdp_params[0].mp_policy
        reduce_dtype = policy.reduce_dtype or (None if AVERAGES_IN_OWN_TYPE else policy.param_dtype)
        found.append(ShardGroup(tuple(group.modules), parameters, policy.param_dtype, reduce_dtype))
    return found


class Reductions:
    """The groups of some models: whether each averages gradients in its next backward pass. False without any group.

    Args:
        models: Sharded as far as they will be.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._modules = _sharded(models)
        self._groups = list(_param_groups(self._modules))

    def __bool__(self) -> bool:
        return bool(self._groups)

    def reshard(self) -> None:
        """Free what a forward pass has gathered and no backward pass has freed: a step would leave it as it was before."""
        for module in self._modules:
            module.reshard()

    @property
    def hold_back(self) -> bool:
        """Whether gradients stay in a group, whole, until a later pass averages them (``set_requires_gradient_sync``)."""
        return not all(group.reduce_grads for group in self._groups)


def reshard(model: nn.Module) -> None:
    """Let every module hold its sharded parameters. A forward pass may have left gathered ones in their place."""
    Reductions([model]).reshard()
