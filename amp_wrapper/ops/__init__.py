"""The multi-tensor operations of a training step: the one place through which the engine reaches them.

What runs today is the plain-torch reference of :mod:`amp_wrapper.ops.reference` on every device; compiled kernels take
their place behind the same names.
"""

from .reference import (
    add_gradients,
    multi_tensor_copy,
    multi_tensor_isnonfinite,
    multi_tensor_refresh,
    multi_tensor_scale,
    update_scale,
)


def backend() -> str:
    """The implementation that serves the ops, for logs."""
    return 'reference (plain torch)'


__all__ = [
    'add_gradients',
    'backend',
    'multi_tensor_copy',
    'multi_tensor_isnonfinite',
    'multi_tensor_refresh',
    'multi_tensor_scale',
    'update_scale',
]
