"""The private names of ``torch.compile`` that the package uses, as :mod:`amp_wrapper.torch_internals` has those of the rest.

Nothing here loads ``torch._dynamo``, which takes seconds, before something is compiled.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import CodeType, FunctionType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from .torch_internals import VERSION

_Function = TypeVar('_Function', bound=Callable[..., Any])


def compiled_module(model: nn.Module) -> nn.Module | None:
    """The module inside of what ``torch.compile(model)`` made, a module around another; None of every other module.

    The class of such wrappers is in ``torch._dynamo``, which would be loaded. In every version since 2.0.
    """
    return getattr(model, '_orig_mod', None)


def name_without_wrappers(name: str) -> str:
    """The name of a module, as ``named_modules()`` gives it, without the parts that wrappers of torch.compile add to it.

    A wrapper and the module inside are two modules: the name of the latter stays, so that none has the other's.
    """
    return name.replace('_orig_mod.', '')


def is_loaded() -> bool:
    """Whether ``torch._dynamo`` is loaded: before, nothing was compiled. In every version since 2.0."""
    return 'torch._dynamo' in sys.modules


def forget_graphs() -> None:
    """Forget what was compiled, before classes of modules change: torch 2.9 does not look at them before it takes a graph."""
    if is_loaded() and (2, 7) <= VERSION < (2, 11):
        torch.compiler.reset()


def eager() -> AbstractContextManager[Any]:
    """Inside, what ``torch.compile`` made runs as it was written, on all threads. Nothing is compiled or forgotten.

    Does nothing where nothing was compiled yet.
    """
    return torch.compiler.set_stance('force_eager') if is_loaded() else nullcontext()


@functools.cache
def before_compiled_calls(listener: Callable[[], None]) -> None:
    """Be told before each call of what ``torch.compile`` made, from now on; :mod:`torch._dynamo` is loaded.

    :mod:`torch.compiler` has no such hook. All that is compiled asks one function of ``torch._dynamo.eval_frame`` what compiles
    it, whenever it is called from outside. In every version since 2.6.

    Args:
        listener: Called without arguments. A second call with the same one does nothing.
    """
    from torch._dynamo import eval_frame

    ask = eval_frame._callback_from_stance

    def call(callback: Any) -> Any:
        chosen = ask(callback)
        # None inside of eager()
        if chosen is not None and chosen is not False:
            listener()
        return chosen

    never_compiled(call)
    eval_frame._callback_from_stance = call


def backward_without_autocast() -> None:
    """Let backward passes of the graphs that are made from now on be made without autocast, as they run in eager training.

    Otherwise torch makes both passes of a graph under the autocast that is on when it makes the graph, and a product in FP32
    has a backward pass in 16-bit. Does nothing in versions that cannot do otherwise; 2.11 and all that were tried since can.
    """
    functorch: Any = sys.modules.get('torch._functorch.config')
    if hasattr(functorch, 'backward_pass_autocast'):
        functorch.backward_pass_autocast = 'off'


def untraced(function: _Function) -> _Function:
    """Break the graph of ``torch.compile`` at every call of ``function``, which runs as it is, with all that it calls.

    :func:`torch.compiler.disable` does the same, but loads ``torch._dynamo`` where a function is decorated, and sets its state
    at every call. Here the function itself has the mark that ``torch._dynamo`` looks for in what it calls, and its frames tell
    what compiles frames to leave them alone, and their callees; a call costs nothing. In every version since 2.13.

    In 2.6, each look for what compiles drops a reference to it, or to None, that is not its own, until Python crashes. There,
    and in the versions in between, ``torch._dynamo`` is loaded at the first call, and its state is set at every call.

    Args:
        function: A function or method.
    """
    if VERSION < (2, 13):
        return torch._disable_dynamo(function)  # type: ignore[attr-defined, return-value]
    cast(Any, function)._torchdynamo_disable = True
    never_compiled(function, with_callees=True)
    return function


def never_compiled(function: Callable[..., Any], with_callees: bool = False) -> None:
    """Keep ``torch.compile`` from compiling a function by itself. It is traced all the same where its caller is.

    In 2.6 by ``skip_code``; by a strategy in the versions that were tried since.

    Args:
        function: A function of Python, also one that makes a generator.
        with_callees: Whether to keep it from what the function calls, too; not in 2.6.
    """
    frames: Any = torch._C._dynamo.eval_frame
    codes = [cast(Any, function).__code__]
    for code in codes:
        # the functions, and in Python 3.10 and 3.11 the comprehensions, inside
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
        if hasattr(frames, 'skip_code'):
            frames.skip_code(code)
        else:
            inside = frames._FrameAction.SKIP if with_callees else frames._FrameAction.DEFAULT
            frames.set_code_exec_strategy(code, frames._FrameExecStrategy(frames._FrameAction.SKIP, inside))


def never_compiled_alone(names: Mapping[str, Any]) -> None:
    """Keep ``torch.compile`` from compiling the functions and methods of a module by themselves. They are traced with a caller.

    Args:
        names: The ``globals()`` of the module, at its end.
    """
    classes = [value for value in names.values() if isinstance(value, type)]
    for value in [*names.values(), *(each for cls in classes for each in vars(cls).values())]:
        if isinstance(value, FunctionType) and value.__code__.co_filename == names['__file__']:
            never_compiled(value)


def eager_block(manager: _Function) -> _Function:
    """Decorator around ``contextmanager``: what begins and ends the block is never compiled; what is inside of it may be.

    torch 2.15 traces a beginning and an end in which nothing is called that is :func:`untraced`.

    Args:
        manager: Of :func:`contextlib.contextmanager`.
    """
    never_compiled(cast(Any, manager).__wrapped__, with_callees=True)
    return untraced(manager)


def constant_when_traced(function: _Function) -> _Function:
    """Let ``torch.compile`` call ``function`` while it traces, and take the result for a constant.

    :func:`torch.compiler.assume_constant_result` sets the same mark, but loads ``torch._dynamo``. In every version since 2.0.

    Args:
        function: Its result must not change as long as the process lives.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def keeps_compiled_functions(module: nn.Module) -> bool:
    """Whether ``module.compile()`` was called, or a function of ``torch.compile`` took the place of a method of one module.

    What :func:`torch.compiler.disable` returns is none. In every version since 2.2.
    """
    functions = [vars(value) for value in vars(module).values() if isinstance(value, FunctionType)]
    return any('_torchdynamo_orig_callable' in each and '_torchdynamo_disable' not in each for each in functions)


#: Where ``module.compile()`` keeps the call, which torch leaves out of copies. In every version since 2.2.
COMPILED_CALL = '_compiled_call_impl'


def _traced_nodes() -> list[Any]:
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return list(InstructionTranslator.current_tx().output.graph.nodes)


def _traced_tensor(node: Any) -> Any:
    return node.meta.get('example_value') if isinstance(node, torch.fx.Node) else None


def last_traced_tensor() -> int:
    """What :func:`was_written` knows the last tensor by of the graph that is being traced. In every version since 2.1."""
    return id([each for each in map(_traced_tensor, _traced_nodes()) if isinstance(each, Tensor)][-1])


def was_written(tensor: int) -> bool:
    """Whether the graph that is being traced has written to a tensor of :func:`last_traced_tensor`.

    In inference mode tensors do not count what is written to them, and what is written by lists is not counted. Before 2.11,
    items that are set are not counted either, and are looked for.
    """
    nodes = _traced_nodes()
    items = [node.args[0] for node in nodes if node.target is operator.setitem]
    counted = [each for each in map(_traced_tensor, nodes) if isinstance(each, Tensor) and not each.is_inference()]
    return any(id(_traced_tensor(each)) == tensor for each in items) or any(
        id(each) == tensor and each._version > 0 for each in counted
    )
