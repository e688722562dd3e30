"""The private names of ``DistributedDataParallel``: as in ``torch_internals.py``, with the versions that have them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

#: What DDP's constructor makes anew, and no argument of it sets; those that a version does not have are passed over.
DDP_FIELDS = (
    '_join_config',
    '_ddp_sink_clone',
    '_divide_by_initial_world_size',
    'device_mesh',
    'require_backward_grad_sync',
    'require_forward_param_sync',
)


def active_ddp() -> DistributedDataParallel | None:
    """The DDP whose forward call is under way on this thread, which it tells nobody. In every version since 2.0."""
    return DistributedDataParallel._get_active_ddp_module()  # type: ignore[no-untyped-call, no-any-return]


def ddp_parameters(ddp: DistributedDataParallel) -> Sequence[nn.Parameter]:
    """The parameters that a DDP broadcast when it was made, trainable or not. In every version since 1.11."""
    return cast('Sequence[nn.Parameter]', ddp._module_parameters)


def count_listened(ddp: DistributedDataParallel) -> int:
    """How many parameters the reducer of a DDP listens to; it tells which to nobody. In every version since 1.9."""
    return int(ddp._get_ddp_logging_data()['num_parameter_tensors'])  # type: ignore[no-untyped-call]


def is_finalized(ddp: DistributedDataParallel) -> bool:
    """Whether nothing is still to be averaged: DDP asks its reducer that before each forward call, and raises.

    In every version since 1.13.
    """
    try:
        ddp.reducer._check_reducer_finalized()
    except RuntimeError:
        # a part of the parameters is still waiting for another backward pass
        return False
    return True


def comm_hooks(ddp: DistributedDataParallel) -> list[tuple[Callable[..., Any], Any]]:
    """The communication hooks that were registered on a DDP, each with its state. In every version since 2.0."""
    return list(getattr(ddp, '_comm_hooks', ()))


def joins(ddp: DistributedDataParallel) -> bool:
    """Whether a DDP runs under ``join()``, which it tells nobody. In every version since 1.10."""
    return getattr(getattr(ddp, '_join_config', None), 'enable', False)


def delays_all_reduce(ddp: DistributedDataParallel) -> bool:
    """Whether a DDP was made with ``delay_all_reduce_named_params``; it keeps no more of the argument.

    In every version since 2.1.
    """
    return bool(getattr(ddp, '_delay_all_reduce_params', None))


def steps_in_backward(parameter: Tensor) -> bool:
    """Whether ``torch.distributed.optim`` steps an optimizer where the gradient of a parameter arrives.

    It leaves this mark, and no public one. In every version since 1.13.
    """
    return hasattr(parameter, '_in_backward_optimizers')
