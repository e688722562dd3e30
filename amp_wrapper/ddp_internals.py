"""The private names of ``DistributedDataParallel``: as in ``torch_internals.py``, with the versions that have them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
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


def reducer_parameters(ddp: DistributedDataParallel) -> Iterable[Tensor]:
    """The parameters that the reducer of a DDP listens to, which are in its buckets alone. In every version since 1.11.

    Raises:
        RuntimeError: Sparse gradients have no bucket before the first backward pass.
    """
    buckets = ddp.reducer._get_zeros_like_grad_buckets()
    return (parameter for bucket in buckets for parameter in bucket.parameters())


def ddp_log(ddp: DistributedDataParallel) -> Mapping[str, Any]:
    """What the reducer of a DDP logs about itself: sizes and the name of its communication hook are nowhere else.

    In every version since 1.9.
    """
    return cast('Mapping[str, Any]', ddp._get_ddp_logging_data())  # type: ignore[no-untyped-call]


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


def builtin_comm_hooks() -> dict[str, Any]:
    """DDP's communication hooks that are written in C++, by name; ``register_comm_hook`` does not take them.

    In every version since 1.9 that has ``torch.distributed``.
    """
    return dict(torch._C._distributed_c10d.BuiltinCommHookType.__members__)


def register_builtin_comm_hook(ddp: DistributedDataParallel, hook: Any) -> None:
    """Let a DDP use one of :func:`builtin_comm_hooks`. In every version since 1.9."""
    ddp._register_builtin_comm_hook(hook)  # type: ignore[no-untyped-call]


def remove_accumulate_hooks(ddp: DistributedDataParallel) -> None:
    """Take off the parameters what DDP puts there, where ``torch.compile`` traces it; it would stay when the reducer goes.

    In every version since 2.4.
    """
    for handle in getattr(ddp, '_accum_grad_hooks', []):
        handle.remove()


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
