"""The private names of torch that the package uses: each with its reason, and what happens where a version lacks it.

A name is private if it, or a module on the way to it, begins with one underscore. All of them are here, but for those that
torch itself tells its users to use, and those that every version has had for years and that countless packages rely on:
``tests/system/test_private_names.py`` has the list, with a reason for each, and looks for any other in the whole package.

:data:`TRIED` names the versions that every name here was tried on; ``tests/system/test_torch_internals.py`` tries them again.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn, overrides
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils import _python_dispatch, checkpoint
from torch.utils.hooks import RemovableHandle

_Function = TypeVar('_Function', bound=Callable[..., Any])
_Hooks = dict[int, Callable[..., Any]]

#: The versions of torch on which the tests of this file were run; ``docs/versions.md`` says what else was.
TRIED: tuple[str, ...] = ('2.6.0', '2.13.0', '2.14.1', '2.15.0')
_VERSION = tuple(int(number) for number in torch.__version__.split('.')[:2])
#: Whether what DDP broadcasts into buffers moves their version counters: so in 2.6, not in 2.13, unknown in between.
COUNTS_BROADCASTS = _VERSION < (2, 13)

# -- the dispatcher, autograd and tensors ------------------------------------------------------------------------------

#: 1 where elements of a tensor share memory, 0 where none do, 2 where that is not known; no public function says so. Since 1.2.
internal_overlap: Callable[[Tensor], int] = torch._debug_has_internal_overlap
#: Whether a tensor is of a subclass that holds other tensors (DTensor and its like), and so no memory of its own. The public
#: name is newer than the oldest version that was tried. Since 2.1.
is_traceable_wrapper_subclass = _python_dispatch.is_traceable_wrapper_subclass


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


def function_of(context: Any) -> Any:
    """The :class:`torch.autograd.Function` that the context of one of its calls belongs to.

    torch makes a class of its own for contexts, and that has no public way back. In every version since 1.0.
    """
    return type(context)._forward_cls


def checkpointed_function() -> Any:
    """The class of what ``checkpoint(use_reentrant=False)`` makes of a function, as a decorator.

    Such an object calls neither the public function nor ``CheckpointFunction.apply``.

    Returns:
        The class, since torch 2.14; None where ``checkpoint`` is no decorator.
    """
    return getattr(checkpoint, '_CheckpointedFunction', None)


# -- torch.compile -----------------------------------------------------------------------------------------------------


def is_compile_wrapper(model: nn.Module) -> bool:
    """Whether ``torch.compile(model)`` made it, a module around another.

    Its class is in ``torch._dynamo``, which would be loaded. In every version since 2.0.
    """
    return hasattr(model, '_orig_mod')


def compiled_module(wrapper: nn.Module) -> nn.Module:
    """The module inside one that :func:`is_compile_wrapper`; nothing public leads to it. In every version since 2.0."""
    return cast(nn.Module, wrapper._orig_mod)


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile has been at a module: is around it, or has replaced its call (``module.compile()``) or a method.

    :mod:`torch.compiler` has no such question. In every version since 2.2.
    """
    replaced = [value for value in module.__dict__.values() if callable(value)]
    return (
        is_compile_wrapper(module)
        or getattr(module, '_compiled_call_impl', None) is not None
        or any(hasattr(method, '_torchdynamo_orig_callable') for method in replaced)
    )


class _Calls(threading.local):
    # what is untraced, and was called by code that is compiled
    from_compiled = 0


_calls = _Calls()
_listeners: list[Callable[[Any], None]] = []


def is_called_by_compiled_code() -> bool:
    """Of a function that is :func:`untraced`: whether code that is compiled calls it, between two graphs, on this thread.

    Before 2.13 nobody can tell; there it is True as soon as anything may be compiled.
    """
    return _calls.from_compiled > 0 if _VERSION >= (2, 13) else bool(_listeners)


def before_compiled_calls(listener: Callable[[Any], None]) -> None:
    """Be told before each call of what ``torch.compile`` made, from now on; :mod:`torch._dynamo` is loaded.

    :mod:`torch.compiler` has no such hook. All that is compiled asks one function of ``torch._dynamo.eval_frame`` what compiles
    it, whenever it is called from outside. In every version since 2.6.

    Args:
        listener: Called with what compiles it, an object of its own for each call of ``torch.compile``.
    """
    from torch._dynamo import eval_frame

    if not _listeners:
        ask = eval_frame._callback_from_stance

        @functools.wraps(ask)
        def call(callback: Any) -> Any:
            if callback is not None and callback is not False:
                for each in _listeners:
                    each(callback)
            return ask(callback)

        never_compiled(call)
        eval_frame._callback_from_stance = call
    _listeners.append(listener)


def load_compiler_tables() -> None:
    """Let ``torch._dynamo`` look at torch's functions, which it knows by identity from the first time on that it compiles.

    So does :mod:`torch.overrides`, which it asks. In every version since 2.1.
    """
    from torch._dynamo import trace_rules

    trace_rules.get_torch_obj_rule_map()
    overrides.get_testing_overrides()
    overrides.get_overridable_functions()


def untraced(function: _Function) -> _Function:
    """Break the graph of ``torch.compile`` at every call of ``function``, which runs as it is, with all that it calls.

    :func:`torch.compiler.disable` does the same, but loads ``torch._dynamo`` where a function is decorated, and sets its state
    at every call. Here both wait for a call while something is compiled; every other call costs one more of Python.
    ``torch._dynamo`` skips the wrapper by the same two marks as what its own ``skip`` decorates. In every version since 2.13.

    In 2.6, each look for what compiles drops a reference to it, or to None, that is not its own, until Python crashes. There,
    and in the versions in between, ``torch._dynamo`` is loaded at the first call, and its state is set at every call.

    Args:
        function: A function or method.
    """
    untraced_call: _Function = torch._disable_dynamo(function)  # type: ignore[attr-defined, assignment]
    if _VERSION < (2, 13):
        return untraced_call
    frame_compiler = torch._C._dynamo.eval_frame.get_eval_frame_callback

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        # what compiles the frames of this thread: None where nothing does
        if frame_compiler() is None:
            return function(*args, **kwargs)
        _calls.from_compiled += 1
        try:
            return untraced_call(*args, **kwargs)
        finally:
            _calls.from_compiled -= 1

    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    never_compiled(call)
    return call  # type: ignore[return-value]


def traced_as(traced: Callable[..., Any]) -> Callable[[_Function], _Function]:
    """Decorator: where ``torch.compile`` traces a caller, ``traced`` takes the place of the function and belongs to the graph.

    Everywhere else the function runs as it is, with all that it calls, also where code that is compiled calls it between two
    graphs. The mark that keeps torch from compiling the wrapper by itself is what tells the two apart:
    :func:`torch.compiler.is_compiling` is True inside of a graph then, and nowhere else. In every version since 2.6.

    Args:
        traced: A function of the same arguments.
    """

    def decorate(function: _Function) -> _Function:
        run = untraced(function)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return traced(*args, **kwargs)
            return run(*args, **kwargs)

        never_compiled(call)
        return call  # type: ignore[return-value]

    return decorate


def never_compiled(function: Callable[..., Any]) -> None:
    """Keep ``torch.compile`` from compiling a function by itself. It is traced all the same where its caller is.

    In 2.6 by ``skip_code``; by a strategy in the versions that were tried since.

    Args:
        function: A function of Python.
    """
    frames: Any = torch._C._dynamo.eval_frame
    code = cast(Any, function).__code__
    if hasattr(frames, 'skip_code'):
        frames.skip_code(code)
    else:
        action = frames._FrameAction
        frames.set_code_exec_strategy(code, frames._FrameExecStrategy(action.SKIP, action.DEFAULT))


def function_modes() -> int:
    """The number of function modes that are open on this thread, or where a graph is traced.

    torch shows the class of a mode, and not the stack. In every version since 1.13, traced since 2.6, as the three below.
    """
    return torch._C._len_torch_function_stack()


def function_mode_at(place: int) -> Any:
    """One of the function modes that are open; the outermost is at 0. The mode whose work is being done is not among them."""
    return torch._C._get_function_stack_at(place)


def push_function_mode(mode: Any) -> None:
    """Open a function mode, without a block. The outermost is open first."""
    torch._C._push_on_torch_function_stack(mode)


def pop_function_mode() -> Any:
    """Close the innermost function mode, and return it."""
    return torch._C._pop_torch_function_stack()


def tracing_context() -> object | None:
    """What stands for the graph that is made on this thread, by any part of ``torch.compile``. In every version since 2.0."""
    return torch._guards.TracingContext.try_get()


def constant_when_traced(function: _Function) -> _Function:
    """Let ``torch.compile`` call ``function`` while it traces, and take the result for a constant.

    :func:`torch.compiler.assume_constant_result` sets the same mark, but loads ``torch._dynamo``. In every version since 2.0.

    Args:
        function: Its result must not change as long as the process lives.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@dataclasses.dataclass(frozen=True)
class CompileCounts:
    """What ``torch.compile`` has counted in this process so far.

    Attributes:
        graphs: Graphs that were compiled.
        recompilations: Of code that had been compiled before.
        breaks: Graph breaks, by their reasons.
    """

    graphs: int = 0
    recompilations: int = 0
    breaks: Mapping[str, int] = dataclasses.field(default_factory=dict)


def compile_counts() -> CompileCounts:
    """What ``torch.compile`` has counted so far; zeros where it is not loaded. :mod:`torch.compiler` shows no counters.

    In every version since 2.6.
    """
    dynamo: Any = sys.modules.get('torch._dynamo')
    if dynamo is None:
        return CompileCounts()
    counters = dynamo.utils.counters
    ids = [str(metrics.compile_id) for metrics in dynamo.utils.get_compilation_metrics()]
    again = sum(not name.split('_')[0].endswith('/0') for name in set(ids) if '/' in name)
    return CompileCounts(counters['stats'].get('unique_graphs', 0), again, dict(counters['graph_break']))


def compile_problem(options: Mapping[str, Any], weight: Tensor | None) -> str | None:
    """Why a model cannot be compiled and trained with some keywords of :func:`torch.compile`; None where it can.

    Args:
        options: The keywords.
        weight: Of the model.
    """
    backend = options.get('backend', 'inductor')
    if isinstance(backend, str):
        known = torch.compiler.list_backends(exclude_tags=())
        if backend not in known:
            return f'there is no backend {backend!r}; torch has {", ".join(sorted(known))}.'
    if backend != 'inductor':
        return None
    from torch._inductor import config, cpp_builder, exc

    if config.freezing or (options.get('options') or {}).get('freezing'):
        return 'freezing makes constants of weights, which a training changes. Leave options=dict(freezing=True) out.'
    if weight is not None and weight.device.type == 'cpu':
        try:
            cpp_builder.get_cpp_compiler()
        except exc.InvalidCxxCompiler as error:
            return (
                f'the backend inductor needs a C++ compiler on a CPU ({" ".join(str(error).split())[:200]}). Install g++ '
                f'(apt-get install g++) or name one in CXX, or take compile=dict(backend="aot_eager"), which needs none and '
                f'is no faster than no compilation.'
            )
    return None


# -- modules -----------------------------------------------------------------------------------------------------------

#: What all BatchNorm classes derive from; only the derived ones are public, as in the two lines below. Since 1.0.
BatchNorm = nn.modules.batchnorm._BatchNorm
#: What all BatchNorm and InstanceNorm classes derive from.
BatchOrInstanceNorm = nn.modules.batchnorm._NormBase
#: What all losses derive from.
Loss = nn.modules.loss._Loss
#: The attributes with the forward pre-hooks and the forward hooks of a module; see :func:`forward_pre_hooks`.
FORWARD_HOOKS = ('_forward_pre_hooks', '_forward_hooks')
#: The methods that torch and mmengine call while they save and load. The first two are those of one module alone, which others
#: override; torch documents neither. Since 0.4.
STATE_DICT_METHODS = ('_load_from_state_dict', '_save_to_state_dict', 'load_state_dict', 'state_dict')


def forward_pre_hooks(module: nn.Module) -> _Hooks:
    """The forward pre-hooks of a module. torch registers and removes hooks, and shows none. In every version since 0.2."""
    return module._forward_pre_hooks


def forward_hooks(module: nn.Module) -> _Hooks:
    """The forward hooks of a module; see :func:`forward_pre_hooks`."""
    return module._forward_hooks


def first_pre_hook(module: nn.Module, hook: Callable[..., Any], with_kwargs: bool = False) -> RemovableHandle:
    """Register a forward pre-hook to be called before all others of a module.

    Some versions of torch.compile, 2.11 among them, read an ordered dict in the order in which its keys came, whatever was
    moved to its front; so the dict is filled anew.
    """
    handle = module.register_forward_pre_hook(hook, prepend=True, with_kwargs=with_kwargs)
    refill(module._forward_pre_hooks)
    return handle


def refill(hooks: _Hooks) -> None:
    """Take the hooks of a dict out and put them in again, in their order; see :func:`first_pre_hook`."""
    items = list(hooks.items())
    hooks.clear()
    hooks.update(items)


def hooks_of(module: nn.Module) -> tuple[_Hooks, ...]:
    """All hooks of a module that the package has some of: forward pre-hooks, forward hooks, those of state dicts.

    In every version since 2.0; see :func:`forward_pre_hooks`.
    """
    return (
        module._forward_pre_hooks,
        module._forward_hooks,
        module._state_dict_hooks,
        module._load_state_dict_pre_hooks,
        module._load_state_dict_post_hooks,
    )


def saving_and_loading_hooks(module: nn.Module) -> list[Any]:
    """What runs while a module saves or loads: hooks, as they were registered. In every version since 2.0."""
    kinds = (module._load_state_dict_pre_hooks, module._state_dict_pre_hooks, module._state_dict_hooks)
    return [getattr(hook, 'hook', hook) for hooks in kinds for hook in hooks.values()]


def drop_hook_flags(module: nn.Module) -> None:
    """After hooks were taken out of their dicts: what torch notes of them goes as well.

    The handles of hooks do both, but copies of modules have hooks without handles. In every version since 2.0.
    """
    for flags, hooks in (
        (module._forward_pre_hooks_with_kwargs, module._forward_pre_hooks),
        (module._forward_hooks_always_called, module._forward_hooks),
    ):
        for key in [key for key in flags if key not in hooks]:
            del flags[key]


def wrap_apply(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace what ``half()``, ``to()`` and their like end in, for every module: torch has no hook there.

    In every version since 0.1.

    Args:
        wrap: Makes the new method of the old one.
    """
    nn.Module._apply = wrap(nn.Module._apply)  # type: ignore[method-assign]


# -- optimizers --------------------------------------------------------------------------------------------------------

#: The hooks before, and after, the step of every optimizer. torch registers and removes them, and shows none. Since 2.0.
global_pre_hooks: Any = _global_optimizer_pre_hooks
global_post_hooks: Any = _global_optimizer_post_hooks


def step_pre_hooks(optimizer: Optimizer) -> _Hooks | None:
    """The hooks before the step of one optimizer; None where its class does not call the constructor of torch's. Since 2.0."""
    return getattr(optimizer, '_optimizer_step_pre_hooks', None)


def step_post_hooks(optimizer: Optimizer) -> _Hooks | None:
    """The hooks after the step of one optimizer; see :func:`step_pre_hooks`."""
    return getattr(optimizer, '_optimizer_step_post_hooks', None)


def note_step(optimizer: Optimizer) -> None:
    """Tell learning rate schedulers that the optimizer has stepped; they warn where they are first, and ask for this mark.

    In every version since 2.4; before, it was a count of calls.
    """
    optimizer._opt_called = True  # type: ignore[attr-defined]


# -- DistributedDataParallel -------------------------------------------------------------------------------------------

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
