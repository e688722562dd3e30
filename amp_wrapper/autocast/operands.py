"""Lets operands of unlike types meet in a forward: what models compute in FP32 on the way, beside weights in 16-bit.

Models make tensors in their forward (masks, anchors, noise, targets of a denoising part), and those are FP32. With them matrix
products and convolutions compute in the 16-bit type, as under autocast; and what is written into another tensor takes its type.
torch raises in both cases.

The casts are kernels of the dispatcher at the autocast key of a kind of device that no tensor has. So torch keeps for each
thread whether they act, and other ops do not notice. The type of that autocast says which of them act: float16 those that
write, bfloat16 the products as well.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from .. import torch_internals
from ..compiler_internals import never_compiled
from ..policy.autocast_lists import FOLLOW, OP_RULES
from ..policy.nested import CASTABLE, HALF_TYPES
from .kernels import overload_of, without_schema
from .state import SPARE, operands_type

_PRODUCTS = """
    mm addmm addmm_ bmm baddbmm baddbmm_ addbmm addbmm_ mv addmv addmv_ addr addr_ dot vdot
    tensordot linalg_multi_dot chain_matmul convolution conv1d conv2d conv3d conv1d.padding conv2d.padding conv3d.padding
    conv_transpose1d conv_transpose2d.input conv_transpose3d.input scaled_dot_product_attention
"""
_WRITES = 'index_put index_copy index_add index_reduce masked_scatter put scatter.src scatter_add scatter_reduce.two'
# torch's own, also where a name in torch stands for something else while graphs are made
_is_enabled, _get_type = torch.is_autocast_enabled, torch.get_autocast_dtype
_set_enabled, _set_type = torch.set_autocast_enabled, torch.set_autocast_dtype
_reach = torch_internals.include_key(torch_internals.SPARE_KEY)
_libraries: list[Library] = []

#: Whether the kernels acted, and their type: what :func:`begin` gives and :func:`end` takes.
Before = tuple[bool, torch.dtype]


def begin(keys: frozenset[str]) -> Before:
    """Let the casts that are among ``keys``, and no others, act on this thread.

    Returns:
        For :func:`end`: what was active before.
    """
    prepare()
    before = _is_enabled(SPARE), _get_type(SPARE)
    dtype = operands_type(keys)
    _set_enabled(SPARE, dtype is not None)
    if dtype is not None:
        _set_type(SPARE, dtype)
    return before


def end(before: Before) -> None:
    """The counterpart of :func:`begin`."""
    enabled, dtype = before
    _set_enabled(SPARE, enabled)
    _set_type(SPARE, dtype)


def prepare() -> None:
    """Let ops of this thread come to the kernels, where they act."""
    _install()
    _reach(True)


@functools.cache
def _install() -> None:
    torch_internals.fall_through(torch_internals.SPARE_KEY)
    library = Library('aten', 'IMPL')  # type: ignore[no-untyped-call]
    follow = [rule.op for rule in OP_RULES.values() if rule.rule == FOLLOW]
    products = _PRODUCTS.split()
    for name in dict.fromkeys((*products, *_WRITES.split(), *follow)):
        op = overload_of(name)
        if op is not None:
            kernel = _kernel(op, is_product=name in products)
            library.impl(op, kernel, torch_internals.SPARE_KEY)  # type: ignore[no-untyped-call]
    _libraries.append(library)


def _kernel(op: Any, is_product: bool) -> Callable[..., Any]:
    run = without_schema(op)
    into = torch_internals.writes_in_place(op) or not is_product
    # a mask of attention, the fourth argument, may be FP32
    count = 3 if is_product else 4

    def kernel(*args: Any, **kwargs: Any) -> Any:
        # what the op calls has operands of one type
        _reach(False)
        try:
            given = args[0] if isinstance(args[0], (list, tuple)) else args[:count]
            dtype = args[0].dtype if into else _half_of(given)
            if dtype not in CASTABLE or (is_product and _get_type(SPARE) is not torch.bfloat16):
                return run(*args, **kwargs)
            cast = [_cast(value, dtype) for value in given]
            return run(cast) if given is args[0] else run(*cast, *args[count:], **kwargs)
        finally:
            _reach(True)

    kernel.__name__ = f'amp_{op.overloadpacket.__name__}'
    never_compiled(kernel, with_callees=True)
    return kernel


def _half_of(operands: Sequence[Any]) -> torch.dtype | None:
    """The 16-bit type among operands of unlike types; None where their types agree."""
    first = operands[0].dtype
    for value in operands:
        if isinstance(value, Tensor) and value.dtype is not first:
            return first if first in HALF_TYPES else value.dtype if value.dtype in HALF_TYPES else None
    return None


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.dtype in CASTABLE else value
