"""The private names of torch that the package uses: each with its reason, and what happens where a version lacks it.

A name is private if it, or a module on the way to it, begins with one underscore. All of them are here, but for those that
torch itself tells its users to use, and those that every version has had for years and that countless packages rely on, such as
``module._forward_hooks``.

:data:`TRIED` names the versions that every name here was tried on; ``tests/system/test_internals.py`` tries them again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import optimizer as optimizer_module
from torch.utils import _python_dispatch, checkpoint

#: The versions of torch on which the tests of this file were run; ``benchmarks/results/versions.md`` says what else was.
TRIED: tuple[str, ...] = ('2.6.0', '2.13.0', '2.14.1', '2.15.0')
#: The torch that is there, as (2, 13).
VERSION = tuple(int(number) for number in torch.__version__.split('.')[:2])

# -- the dispatcher, autograd and tensors ------------------------------------------------------------------------------

#: Which backward pass runs on this thread; -1 for none. torch.autograd.graph gives the current node at most. Since 2.1.
graph_task_id: Callable[[], int] = torch._C._current_graph_task_id
#: The node of the graph whose backward function runs on this thread; None outside of a backward pass. torch's profilers and its
#: anomaly mode ask that. Since 2.1.
current_node: Callable[[], Any] = torch._C._current_autograd_node
#: Whether the dispatcher has a kernel of its own for an op, such as 'aten::exp', at a dispatch key, such as 'AutocastCPU'.
#: ``torch.library`` registers kernels, but has no list of them. Since 1.8.
has_kernel: Callable[[str, str], bool] = torch._C._dispatch_has_kernel_for_dispatch_key
# of the name of a dispatch key: the enumeration in Python lacks some of them
_dispatch_key = torch._C._dispatch_key_parse
#: 1 where elements of a tensor share memory, 0 where none do, 2 where that is not known; no public function says so. Since 1.2.
internal_overlap: Callable[[Tensor], int] = torch._debug_has_internal_overlap
#: Whether a tensor is of a subclass that holds other tensors (DTensor and its like), and so no memory of its own. The public
#: name is newer than the oldest version that was tried. Since 2.1.
is_traceable_wrapper_subclass = _python_dispatch.is_traceable_wrapper_subclass
#: Sees every op on a thread, in forward and backward passes. "Extending PyTorch" of torch's notes explains it, and it has no
#: public module. Since 1.12.
TorchDispatchMode = _python_dispatch.TorchDispatchMode


def writes_in_place(op: Any) -> bool:
    """Whether an op that a dispatch mode is given writes to its arguments: its schema says so. In every version since 1.12."""
    return bool(op._schema.is_mutable)


def in_function_transform() -> bool:
    """Whether ``torch.jit.trace`` records, or ``torch.func`` transforms, what runs on this thread.

    :func:`torch.jit.is_tracing` knows the first alone. In every version since 2.0.
    """
    return torch._C._get_tracing_state() is not None or torch._C._functorch.peek_interpreter_stack() is not None


def keys_below(key: str) -> Any:
    """The dispatch keys below one, for ``OpOverload.redispatch`` in a kernel that ``Library.impl(..., with_keyset=True)`` made.

    The public counterpart, :class:`torch._C._AutoDispatchBelowAutograd`, is private as well. In every version since 1.13.
    """
    return torch._C._dispatch_keyset_full_after(_dispatch_key(key))


@functools.cache
def fall_through(key: str) -> Any:
    """Let ops that have no kernel at a dispatch key pass it by, those of higher order too.

    ``torch.library`` has fallbacks of its own since 2.7, for functions of Python alone. In every version since 2.6.

    Returns:
        The library of the fallback, which torch takes out when that dies: the cache holds it.
    """
    fallback = torch._C._dispatch_library('IMPL', '_', key)
    fallback.fallback_fallthrough()
    dispatch_key = _dispatch_key(key)
    for op in torch._ops._higher_order_ops.values():
        op.fallthrough(dispatch_key)  # type: ignore[no-untyped-call]
    torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS.append(dispatch_key)
    return fallback


def include_key(key: str) -> Callable[[bool], None]:
    """A function that lets the ops of its thread come to a dispatch key that their tensors do not have, or not any more.

    In every version since 1.13.
    """
    return functools.partial(torch._C._dispatch_tls_set_dispatch_key_included, _dispatch_key(key))


def variable_function(name: str) -> Callable[..., Any] | None:
    """The binding of an op that ``torch.name`` is, which reads its arguments faster than the op of ``torch.ops`` does.

    Not every op has a public name in ``torch``. In every version since 1.0; None where there is none.
    """
    return getattr(torch._C._VariableFunctions, name, None)


def wrap_segments(wrap: Callable[[Any], Any]) -> None:
    """Let each function that is checkpointed become another one, by whatever way it came to torch.

    All of them come to one of two functions; torch has no hook there. The names are those of every version since 2.1; since
    2.14 another one does the work of the first.

    Args:
        wrap: Makes the new function of the old one, when it is about to run for the first time.
    """
    module: Any = checkpoint
    name = '_checkpoint_without_reentrant_generator'
    name = f'{name}_impl' if hasattr(module, f'{name}_impl') else name
    generate, forward = getattr(module, name), module.CheckpointFunction.forward
    setattr(module, name, lambda function, *args, **kwargs: generate(wrap(function), *args, **kwargs))
    module.CheckpointFunction.forward = staticmethod(lambda ctx, function, *args: forward(ctx, wrap(function), *args))


# -- modules -----------------------------------------------------------------------------------------------------------

#: What all BatchNorm classes derive from; only the derived ones are public, as in the two lines below. Since 1.0.
BatchNorm = nn.modules.batchnorm._BatchNorm
#: What all BatchNorm and InstanceNorm classes derive from.
BatchOrInstanceNorm = nn.modules.batchnorm._NormBase
#: What all losses derive from.
Loss = nn.modules.loss._Loss

# -- optimizers --------------------------------------------------------------------------------------------------------


def hooks_before_step(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Those of all, and those of one optimizer, which has none where its class does not call torch's constructor. Since 2.0."""
    own = getattr(optimizer, '_optimizer_step_pre_hooks', None) or {}
    return [*optimizer_module._global_optimizer_pre_hooks.values(), *own.values()]


@functools.cache
def after_zero_grad(clear: Callable[[nn.Module, bool], None]) -> None:
    """From now on, have a function called after ``zero_grad()`` of any module; there is no hook. In every version since 1.7.

    Args:
        clear: Gets the module, and ``set_to_none``. Asked for again, it is called once.
    """
    own = nn.Module.zero_grad

    @functools.wraps(own)
    def zero_grad(module: nn.Module, set_to_none: bool = True) -> None:
        own(module, set_to_none)
        clear(module, set_to_none)

    nn.Module.zero_grad = zero_grad  # type: ignore[assignment, method-assign]


def step_without_hooks(kind: type[torch.optim.Optimizer]) -> Callable[[torch.optim.Optimizer], Any]:
    """The ``step`` of a class of ``torch.optim`` for a class that derives from it, whose own ``step`` runs the hooks.

    torch wraps the step of each class that is used, and a hook would run twice. In every version since 2.0.
    """
    step: Any = kind.step
    return step.__wrapped__ if getattr(step, 'hooked', False) else step  # type: ignore[no-any-return]


def note_step(optimizer: torch.optim.Optimizer) -> None:
    """Tell learning rate schedulers that the optimizer has stepped; they warn where they are first, and ask for this mark.

    In every version since 2.4; before, it was a count of calls.
    """
    optimizer._opt_called = True  # type: ignore[attr-defined]


def is_zero(optimizer: Any) -> bool:
    """Whether an optimizer is torch's ``ZeroRedundancyOptimizer``, which has its module loaded then, or derives from it."""
    return any(base.__name__ == 'ZeroRedundancyOptimizer' for base in type(optimizer).__mro__)


def overlaps_with_ddp(optimizer: Any) -> bool:
    """Whether a ``ZeroRedundancyOptimizer`` steps inside of DDP's backward pass; it keeps the argument. Since 1.10."""
    return bool(getattr(optimizer, '_overlap_with_ddp', False))


def note_parameters(optimizer: Any) -> None:
    """Let a ``ZeroRedundancyOptimizer`` take notice of other parameters in its groups: it has no method for it. Since 1.12."""
    optimizer._all_params = [parameter for group in optimizer.param_groups for parameter in group['params']]
    optimizer._clear_cache()
