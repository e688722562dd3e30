"""The multi-tensor operations of a training step: the one place through which the engine reaches them.

Each call goes to the compiled kernel where the library has one for the device and the dtypes, and to the plain-torch reference
of :mod:`amp_wrapper.ops.reference` otherwise. Both give the same bits.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .. import torch_internals
from . import checks, loader, reference
from . import optimizer_step as reference_step
from . import schemas as schemas
from .optimizer_step import ADAM, DECISION, HYPER, ROW, SGD
from .reference import add_gradients

#: What the compiled kernels take; anything else is left to the reference.
COMPILED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _library() -> ModuleType | None:
    """The compiled functions, or None. Warns once where they are missing. Loaded at the first call."""
    loader.warn_if_missing()
    return loader.library().module


def compiled_devices() -> frozenset[str]:
    """Types of the devices that compiled kernels serve."""
    return loader.library().devices


@torch_internals.constant_when_traced
def _serves(kind: str) -> bool:
    # torch.compile knows what to do with a constant bool, and not with a set
    return kind in loader.library().devices


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
    text = ', '.join(f'{kind.upper()} op' for kind in served)
    return f'{text}; reference on GPUs' if 'cuda' not in served and torch.cuda.is_available() else text


def _is_served(lists: Sequence[Sequence[Tensor]], scalars: Sequence[Tensor | None]) -> bool:
    """Whether one call of the compiled op can take all of this."""
    everything = [tensor for tensors in lists for tensor in tensors]
    places = {tensor.device for tensor in [*everything, *(scalar for scalar in scalars if scalar is not None)]}
    return (
        len(places) == 1
        and _serves(places.pop().type)
        and all(tensor.dtype in COMPILED_DTYPES for tensor in everything)
    )


def _has_kernel(first: object) -> bool:
    """Whether to call the compiled function, which turns off the layer that counts versions: the reference needs it."""
    if not isinstance(first, Tensor) or first.device.type in loader.library().devices:
        return True
    if first.device.type == 'cuda':
        loader.warn_if_cuda_is_missing()
    return False


def _try(name: str, lists: Sequence[Sequence[Tensor]], scalars: Sequence[Tensor | None], *options: bool) -> Any:
    """The result of the compiled op, or NotImplemented where the reference has to do it."""
    if torch.compiler.is_compiling():
        # what is traced cannot try and see, and the graph wants the dispatcher's op
        if _is_served(lists, scalars):
            return getattr(torch.ops.amp_wrapper, name)(*lists, *scalars, *options)
        return NotImplemented
    module = _library()
    if module is None or len(lists[0]) == 0 or not _has_kernel(lists[0][0]):
        return NotImplemented
    try:
        # its own checks are the cheapest way to find out; they come before anything is written
        return getattr(module, name)(*lists, *scalars, *options)
    except NotImplementedError:
        return NotImplemented


def _by_device(
    call: Callable[..., None],
    named: Mapping[str, Sequence[Tensor]],
    factors: Mapping[str, Tensor | None],
    found_inf: Tensor | None,
    floating: bool = True,
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
    if floating:
        checks.check_floating(*named.items())
    for name, factor in factors.items():
        checks.check_scalar(name, factor)
    checks.check_scalar('found_inf', found_inf, written=True)
    checks.check_apart(read, [written], **factors, found_inf=found_inf)
    for device, indices in groups.items():
        moved = [None if factor is None else factor.to(device) for factor in factors.values()]
        flag = None if found_inf is None else torch.zeros((), dtype=torch.float32, device=device)
        call(*([tensors[i] for i in indices] for tensors in lists), *moved, flag)
        if flag is not None and found_inf is not None:
            torch.maximum(found_inf, flag.to(found_inf.device).view_as(found_inf), out=found_inf)
    return True


def multi_tensor_scale(
    sources: Sequence[Tensor],
    targets: Sequence[Tensor],
    scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    if _try('multi_tensor_scale', (sources, targets), (scale, found_inf)) is NotImplemented:
        named = {'sources': sources, 'targets': targets}
        if not _by_device(multi_tensor_scale, named, {'scale': scale}, found_inf):
            reference.multi_tensor_scale(sources, targets, scale, found_inf)


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
    if _try('multi_tensor_axpby', (xs, ys, targets), (a, b, found_inf), check_x, check_y) is NotImplemented:
        named = {'xs': xs, 'ys': ys, 'targets': targets}
        once = functools.partial(multi_tensor_axpby, check_x=check_x, check_y=check_y)
        if not _by_device(once, named, {'a': a, 'b': b}, found_inf):
            reference.multi_tensor_axpby(xs, ys, targets, a, b, found_inf, check_x, check_y)


def _copy_and_no_flag(sources: Sequence[Tensor], targets: Sequence[Tensor], _: None) -> None:
    multi_tensor_copy(sources, targets)


def multi_tensor_copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    if _try('multi_tensor_copy', (sources, targets), ()) is NotImplemented:
        named = {'sources': sources, 'targets': targets}
        if not _by_device(_copy_and_no_flag, named, {}, None, floating=False):
            reference.multi_tensor_copy(sources, targets)


def multi_tensor_isnonfinite(tensors: Sequence[Tensor], found_inf: Tensor) -> None:
    if _try('multi_tensor_isnonfinite', (tensors,), (found_inf,)) is NotImplemented and not _by_device(
        multi_tensor_isnonfinite, {'tensors': tensors}, {}, found_inf
    ):
        reference.multi_tensor_isnonfinite(tensors, found_inf)


def multi_tensor_l2norm(
    tensors: Sequence[Tensor],
    inverse_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    per_tensor: bool = False,
) -> tuple[Tensor, Tensor]:
    norms: Any = _try('multi_tensor_l2norm', (tensors,), (inverse_scale, found_inf), per_tensor)
    if norms is NotImplemented:
        # the sum runs over tensors in the order of the list: several devices are left to the reference
        norms = reference.multi_tensor_l2norm(tensors, inverse_scale, found_inf, per_tensor)
    return norms  # type: ignore[no-any-return]


def multi_tensor_maxnorm(
    tensors: Sequence[Tensor],
    inverse_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    per_tensor: bool = False,
) -> tuple[Tensor, Tensor]:
    norms: Any = _try('multi_tensor_maxnorm', (tensors,), (inverse_scale, found_inf), per_tensor)
    if norms is NotImplemented:
        norms = reference.multi_tensor_maxnorm(tensors, inverse_scale, found_inf, per_tensor)
    return norms  # type: ignore[no-any-return]


def multi_tensor_scale_l2norm(
    sources: Sequence[Tensor],
    targets: Sequence[Tensor],
    scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> Tensor:
    norm: Any = _try('multi_tensor_scale_l2norm', (sources, targets), (scale, found_inf))
    if norm is NotImplemented:
        norm = reference.multi_tensor_scale_l2norm(sources, targets, scale, found_inf)
    return norm  # type: ignore[no-any-return]


def multi_tensor_refresh(weights: Sequence[Tensor], masters: Sequence[Tensor]) -> Tensor:
    flags: Any = _try('multi_tensor_refresh', (weights, masters), ())
    if flags is NotImplemented:
        flags = reference.multi_tensor_refresh(weights, masters)
    return flags  # type: ignore[no-any-return]


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
    state = (scale, growth_tracker, hysteresis_tracker, found_inf)
    bounds = (min_scale, max_scale)
    if torch.compiler.is_compiling():
        torch.ops.amp_wrapper.update_scale(*state, growth_factor, backoff_factor, growth_interval, hysteresis, *bounds)
        return
    module = _library()
    if module is not None and _has_kernel(scale):
        try:
            module.update_scale(*state, growth_factor, backoff_factor, growth_interval, hysteresis, *bounds)
            return
        except NotImplementedError:
            # the reference knows why
            pass
    reference.update_scale(*state, growth_factor, backoff_factor, growth_interval, hysteresis, *bounds)


def _call(name: str, tables: tuple[object, object], *arguments: Any) -> None:
    """An op of the step: on one device, or refused.

    Args:
        name: Of the op.
        tables: Decision and rows.
        *arguments: Of the op.
    """
    device = tables[0]
    if torch.compiler.is_compiling():
        # which kernel serves cannot be tried and seen; the tables of float64 are for plain torch
        whole = all(not isinstance(table, Tensor) or table.dtype is not torch.float64 for table in tables)
        getattr(torch.ops.amp_wrapper if whole else reference_step, name)(*arguments)
        return
    module = _library()
    if module is not None and _has_kernel(device) and hasattr(module, name):
        try:
            getattr(module, name)(*arguments)
            return
        except NotImplementedError:
            # the reference serves it, or knows why not
            pass
    getattr(reference_step, name)(*arguments)


def step_prologue(
    decision: Tensor,
    rows: Tensor,
    steps: Sequence[Tensor],
    hyper: Tensor,
    groups: Tensor,
    kind: int,
    rates: Sequence[Tensor] = (),
    rated: Sequence[int] = (),
    found_inf: Tensor | None = None,
    learned: Tensor | None = None,
    norm: Tensor | None = None,
    scale: Tensor | None = None,
    growth_tracker: Tensor | None = None,
    hysteresis_tracker: Tensor | None = None,
    counts: Tensor | None = None,
    rule: Sequence[float] = (),
    max_norm: float | None = None,
    clip_value: float | None = None,
) -> None:
    scalars = (found_inf, learned, norm, scale, growth_tracker, hysteresis_tracker, counts)
    table = (decision, rows, steps, hyper, groups, kind, rates, rated)
    _call('step_prologue', (decision, rows), *table, *scalars, rule, max_norm, clip_value)


def fused_adam(
    grads: Sequence[Tensor],
    params: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    max_exp_avg_sqs: Sequence[Tensor],
    partners: Sequence[Tensor],
    rows: Tensor,
    decision: Tensor,
) -> None:
    states = (exp_avgs, exp_avg_sqs, max_exp_avg_sqs)
    _call('fused_adam', (decision, rows), grads, params, *states, partners, rows, decision)


def fused_sgd(
    grads: Sequence[Tensor],
    params: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor],
    partners: Sequence[Tensor],
    rows: Tensor,
    decision: Tensor,
) -> None:
    _call('fused_sgd', (decision, rows), grads, params, momentum_buffers, partners, rows, decision)


# the meaning is told once, at the reference
for _function in (
    multi_tensor_scale,
    multi_tensor_axpby,
    multi_tensor_copy,
    multi_tensor_isnonfinite,
    multi_tensor_l2norm,
    multi_tensor_maxnorm,
    multi_tensor_scale_l2norm,
    multi_tensor_refresh,
    update_scale,
    step_prologue,
    fused_adam,
    fused_sgd,
):
    _function.__doc__ = schemas.REFERENCES[_function.__name__].__doc__

__all__ = [
    'ADAM',
    'COMPILED_DTYPES',
    'DECISION',
    'HYPER',
    'ROW',
    'SGD',
    'add_gradients',
    'backend',
    'backend_of',
    'compiled_devices',
    'fused_adam',
    'fused_sgd',
    'multi_tensor_axpby',
    'multi_tensor_copy',
    'multi_tensor_isnonfinite',
    'multi_tensor_l2norm',
    'multi_tensor_maxnorm',
    'multi_tensor_refresh',
    'multi_tensor_scale',
    'multi_tensor_scale_l2norm',
    'step_prologue',
    'update_scale',
]
