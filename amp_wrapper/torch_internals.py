"""The private names of torch that the package uses: each with its reason, and what happens where a version lacks it.

:data:`TRIED` names the versions that every one of them was tried on; ``tests/system/test_torch_internals.py`` tries them again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils import checkpoint

_Function = TypeVar('_Function', bound=Callable[..., Any])

#: The versions of torch on which the tests of this file were run; ``docs/versions.md`` says what else was.
TRIED: tuple[str, ...] = ('2.6.0', '2.13.0', '2.14.1', '2.15.0')
#: Whether what DDP broadcasts into buffers moves their version counters: so in 2.6, not in 2.13, unknown in between.
COUNTS_BROADCASTS = tuple(int(number) for number in torch.__version__.split('.')[:2]) < (2, 13)


def graph_task_id() -> int:
    """Which backward pass runs on this thread; -1 for none.

    torch.autograd.graph gives public code the current node at most. In every version since 2.1.
    """
    return torch._C._current_graph_task_id()


def in_function_transform() -> bool:
    """Whether ``torch.jit.trace`` records, or ``torch.func`` transforms, what runs on this thread.

    :func:`torch.jit.is_tracing` knows the first alone. In every version since 2.0.
    """
    return torch._C._get_tracing_state() is not None or torch._C._functorch.peek_interpreter_stack() is not None


def has_kernel(op: str, key: str) -> bool:
    """Whether the dispatcher has a kernel of its own for an op at a dispatch key, such as 'AutocastCPU'.

    ``torch.library`` registers kernels, but has no list of them. In every version since 1.8.

    Args:
        op: With its namespace, such as 'aten::exp'.
        key: The name of the key.
    """
    return torch._C._dispatch_has_kernel_for_dispatch_key(op, key)


def keys_below(key: str) -> Any:
    """The dispatch keys below one, for ``OpOverload.redispatch`` in a kernel that ``Library.impl(..., with_keyset=True)`` made.

    The public counterpart, :class:`torch._C._AutoDispatchBelowAutograd`, is private as well. In every version since 1.13.
    """
    return torch._C._dispatch_keyset_full_after(getattr(torch._C.DispatchKey, key))


def variable_function(name: str) -> Callable[..., Any] | None:
    """The binding of an op that ``torch.name`` is, which reads its arguments faster than the op of ``torch.ops`` does.

    Not every op has a public name in ``torch``. In every version since 1.0; None where there is none.
    """
    return getattr(torch._C._VariableFunctions, name, None)


def checkpointed_function() -> Any:
    """The class of what ``checkpoint(use_reentrant=False)`` makes of a function, as a decorator.

    Such an object calls neither the public function nor ``CheckpointFunction.apply``.

    Returns:
        The class, since torch 2.14; None where ``checkpoint`` is no decorator.
    """
    return getattr(checkpoint, '_CheckpointedFunction', None)


def builtin_comm_hooks() -> dict[str, Any]:
    """DDP's communication hooks that are written in C++, by name; ``register_comm_hook`` does not take them.

    In every version since 1.9 that has ``torch.distributed``.
    """
    return dict(torch._C._distributed_c10d.BuiltinCommHookType.__members__)


def untraced(function: _Function) -> _Function:
    """Break the graph of ``torch.compile`` at every call of ``function``, which runs as it is, with all that it calls.

    :func:`torch.compiler.disable` does the same, but loads ``torch._dynamo`` where a function is decorated, and sets its state
    at every call. Here both wait for a call while something is compiled; every other call costs one more of Python.
    ``torch._dynamo`` skips the wrapper by the same two marks as what its own ``skip`` decorates. In every version since 2.6.

    Args:
        function: A function or method.
    """
    untraced_call = torch._disable_dynamo(function)  # type: ignore[attr-defined]
    frame_compiler = torch._C._dynamo.eval_frame.get_eval_frame_callback

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        # what compiles the frames of this thread: None where nothing does
        return (function if frame_compiler() is None else untraced_call)(*args, **kwargs)

    _skip(call)
    return call  # type: ignore[return-value]


def _skip(function: Any) -> None:
    function._torchdynamo_disable = True
    frames: Any = torch._C._dynamo.eval_frame
    if hasattr(frames, 'skip_code'):
        frames.skip_code(function.__code__)
    else:
        # since torch 2.8
        action = frames._FrameAction
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(action.SKIP, action.DEFAULT))


def constant_when_traced(function: _Function) -> _Function:
    """Let ``torch.compile`` call ``function`` while it traces, and take the result for a constant.

    :func:`torch.compiler.assume_constant_result` sets the same mark, but loads ``torch._dynamo``. In every version since 2.0.

    Args:
        function: Its result must not change as long as the process lives.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
