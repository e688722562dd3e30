"""The multi-tensor operations of a training step: the one place through which the engine reaches them.

Each call goes to the compiled kernel where the library has one for the device and the dtypes, and to the plain-torch reference
of :mod:`amp_wrapper.ops.reference` otherwise. Both give the same bits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from . import checks, loader, reference
from . import schemas as schemas
from .reference import add_gradients

_OPS = torch.ops.amp_wrapper
#: What the compiled kernels take; anything else is left to the reference.
COMPILED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@torch.compiler.assume_constant_result
def compiled_devices() -> frozenset[str]:
    """Types of the devices that compiled kernels serve. Warns once where the library is missing."""
    loader.warn_if_missing()
    return loader.library().devices


def backend_of(device: torch.device | str) -> str:
    """What serves the ops on a device: 'CUDA op', 'CPU op' or 'reference'.

    Args:
        device: Such as ``torch.device('cuda', 0)`` or 'cpu'.
    """
    kind = torch.device(device).type
    return f'{kind.upper()} op' if kind in loader.library().devices else 'reference'


def backend() -> str:
    """The implementation that serves the ops, for logs."""
    served = sorted(loader.library().devices)
    if not served:
        return 'reference (plain torch)'
    return ', '.join(f'{kind.upper()} op' for kind in served)


def _is_served(lists: Sequence[Sequence[Tensor]], scalars: Sequence[Tensor | None]) -> bool:
    """Whether one call of the compiled op can take all of this; a traced call cannot try and see."""
    everything = [tensor for tensors in lists for tensor in tensors]
    devices = {tensor.device for tensor in [*everything, *(s for s in scalars if s is not None)]}
    return len(devices) == 1 and all(tensor.dtype in COMPILED_DTYPES for tensor in everything)


def _try(op: Any, lists: Sequence[Sequence[Tensor]], scalars: Sequence[Tensor | None], *options: Any) -> tuple[bool, Any]:
    """(whether the compiled op took the call, its result)."""
    if not lists[0] or lists[0][0].device.type not in compiled_devices():
        return False, None
    if torch.compiler.is_compiling():
        if not _is_served(lists, scalars):
            return False, None
        return True, op(*lists, *scalars, *options)
    try:
        # its own checks are the cheapest way to find out; they come before anything is written
        return True, op(*lists, *scalars, *options)
    except NotImplementedError:
        return False, None


def _by_device(
    call: Callable[..., None],
    named: Mapping[str, Sequence[Tensor]],
    factors: Sequence[Tensor | None],
    found_inf: Tensor | None,
) -> bool:
    """Call once for each device, where every tuple of tensors is on one; False, and nothing done, where that is not so."""
    lists = list(named.values())
    if len({tensor.device for tensor in lists[0]}) < 2 or len({len(tensors) for tensors in lists}) > 1:
        return False
    groups: dict[torch.device, list[int]] = defaultdict(list)
    for index, tensors in enumerate(zip(*lists)):
        if len({tensor.device for tensor in tensors}) > 1:
            return False
        groups[tensors[0].device].append(index)
    # all of it, before the first of the calls writes anything
    *read, written = named.items()
    checks.check_lists(read or [written], [written] if read else [])
    for device, indices in groups.items():
        moved = [None if factor is None else factor.to(device) for factor in factors]
        flag = None if found_inf is None else torch.zeros((), device=device)
        call(*([tensors[i] for i in indices] for tensors in lists), *moved, flag)
        if flag is not None and found_inf is not None:
            torch.maximum(found_inf, flag.to(found_inf.device), out=found_inf)
    return True


@torch.no_grad()
def multi_tensor_scale(
    sources: Sequence[Tensor],
    targets: Sequence[Tensor],
    scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    if _try(_OPS.multi_tensor_scale.default, (sources, targets), (scale, found_inf))[0]:
        return
    named = {'sources': sources, 'targets': targets}
    if not _by_device(multi_tensor_scale, named, (scale,), found_inf):
        reference.multi_tensor_scale(sources, targets, scale, found_inf)


@torch.no_grad()
def multi_tensor_axpby(
    xs: Sequence[Tensor],
    ys: Sequence[Tensor],
    targets: Sequence[Tensor],
    a: Tensor | None = None,
    b: Tensor | None = None,
    found_inf: Tensor | None = None,
    check_x: bool = True,
    check_y: bool = True,
) -> None:
    if _try(_OPS.multi_tensor_axpby.default, (xs, ys, targets), (a, b, found_inf), check_x, check_y)[0]:
        return
    named = {'xs': xs, 'ys': ys, 'targets': targets}

    def call(*arguments: Any) -> None:
        multi_tensor_axpby(*arguments, check_x=check_x, check_y=check_y)

    if not _by_device(call, named, (a, b), found_inf):
        reference.multi_tensor_axpby(xs, ys, targets, a, b, found_inf, check_x, check_y)


@torch.no_grad()
def multi_tensor_copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    if any(source is target for source, target in zip(sources, targets)) and len(sources) == len(targets):
        # nothing is written there, and autograd shall not think so
        pairs = [(source, target) for source, target in zip(sources, targets) if source is not target]
        sources, targets = [source for source, _ in pairs], [target for _, target in pairs]
    if _try(_OPS.multi_tensor_copy.default, (sources, targets), ())[0]:
        return
    named = {'sources': sources, 'targets': targets}
    if not _by_device(lambda s, t, _: multi_tensor_copy(s, t), named, (), None):
        reference.multi_tensor_copy(sources, targets)


@torch.no_grad()
def multi_tensor_isnonfinite(tensors: Sequence[Tensor], found_inf: Tensor) -> None:
    if not _try(_OPS.multi_tensor_isnonfinite.default, (tensors,), (found_inf,))[0]:
        if not _by_device(multi_tensor_isnonfinite, {'tensors': tensors}, (), found_inf):
            reference.multi_tensor_isnonfinite(tensors, found_inf)


@torch.no_grad()
def multi_tensor_l2norm(
    tensors: Sequence[Tensor],
    inverse_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    per_tensor: bool = False,
) -> tuple[Tensor, Tensor]:
    done, norms = _try(_OPS.multi_tensor_l2norm.default, (tensors,), (inverse_scale, found_inf), per_tensor)
    # the sum runs over tensors in the order of the list: several devices are left to the reference
    result: tuple[Tensor, Tensor] = (
        norms if done else reference.multi_tensor_l2norm(tensors, inverse_scale, found_inf, per_tensor)
    )
    return result


@torch.no_grad()
def multi_tensor_maxnorm(
    tensors: Sequence[Tensor],
    inverse_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    per_tensor: bool = False,
) -> tuple[Tensor, Tensor]:
    done, norms = _try(_OPS.multi_tensor_maxnorm.default, (tensors,), (inverse_scale, found_inf), per_tensor)
    result: tuple[Tensor, Tensor] = (
        norms if done else reference.multi_tensor_maxnorm(tensors, inverse_scale, found_inf, per_tensor)
    )
    return result


@torch.no_grad()
def multi_tensor_refresh(weights: Sequence[Tensor], masters: Sequence[Tensor]) -> Tensor:
    done, flags = _try(_OPS.multi_tensor_refresh.default, (weights, masters), ())
    if done:
        return flags  # type: ignore[no-any-return]
    return reference.multi_tensor_refresh(weights, masters)


@torch.no_grad()
def update_scale(
    scale: Tensor,
    growth_tracker: Tensor,
    hysteresis_tracker: Tensor,
    found_inf: Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    hysteresis: int,
    min_scale: float | None = None,
    max_scale: float | None = None,
) -> None:
    served = scale.device.type in compiled_devices()
    (_OPS.update_scale.default if served else reference.update_scale)(
        scale,
        growth_tracker,
        hysteresis_tracker,
        found_inf,
        growth_factor,
        backoff_factor,
        growth_interval,
        hysteresis,
        min_scale,
        max_scale,
    )


# the meaning is told once, at the reference
for _function in (
    multi_tensor_scale,
    multi_tensor_axpby,
    multi_tensor_copy,
    multi_tensor_isnonfinite,
    multi_tensor_l2norm,
    multi_tensor_maxnorm,
    multi_tensor_refresh,
    update_scale,
):
    _function.__doc__ = getattr(reference, _function.__name__).__doc__

__all__ = [
    'COMPILED_DTYPES',
    'add_gradients',
    'backend',
    'backend_of',
    'compiled_devices',
    'multi_tensor_axpby',
    'multi_tensor_copy',
    'multi_tensor_isnonfinite',
    'multi_tensor_l2norm',
    'multi_tensor_maxnorm',
    'multi_tensor_refresh',
    'multi_tensor_scale',
    'update_scale',
]
