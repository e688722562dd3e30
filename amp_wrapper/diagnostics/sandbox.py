"""Runs a copy of a model at any level, and leaves everything else as it was."""

from __future__ import annotations

import copy
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import BuiltinMethodType, CellType, FunctionType, MethodType
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.optim import Optimizer

from ..casting import cast_module, region
from ..casting.roots import unwrap
from ..checkpoint import random_state
from ..compiler_internals import COMPILED_CALL, eager
from ..engine import Engine, attach_together, forward_context
from ..errors import AmpUsageError
from ..policy import Policy
from ..shards import any_sharded

#: Attaches a copy of a model to an engine, as the original was attached.
Attach = Callable[[Engine, nn.Module], object]

#: What talks to other ranks, by its name in ``torch.distributed``.
_COLLECTIVES = (
    'all_gather',
    'all_gather_into_tensor',
    'all_gather_object',
    'all_reduce',
    'all_to_all',
    'all_to_all_single',
    'barrier',
    'broadcast',
    'broadcast_object_list',
    'gather',
    'gather_object',
    'irecv',
    'isend',
    'monitored_barrier',
    'recv',
    'reduce',
    'reduce_scatter',
    'reduce_scatter_tensor',
    'scatter',
    'scatter_object_list',
    'send',
)


class CannotCopyError(AmpUsageError):
    """A model of which no copy can be made, or which talks to other ranks without asking whether there are any."""


@dataclasses.dataclass(frozen=True)
class Sandbox:
    """A copy of a model, attached at a level of its own.

    Attributes:
        model: The copy. Its weights were the FP32 values of the original before it was attached.
        engine: Its engine.
    """

    model: nn.Module
    engine: Engine

    @contextmanager
    def forward(self) -> Iterator[None]:
        """What surrounds a training forward call of the copy."""
        with forward_context(self.engine, self.model):
            yield
        # autocast keeps its casts of weights until the outermost region ends, which is that of isolated()
        torch.clear_autocast_cache()


def attach_whole(engine: Engine, model: nn.Module) -> None:
    """Attach a model as ``amp.initialize`` does."""
    attach_together([engine], [model], engine.policy)


def fp32_copy(model: nn.Module) -> nn.Module:
    """A copy of a model with FP32 values, those of its masters where it has some, and without hooks of this package.

    Args:
        model: Attached or not; wrapped in DDP or ``torch.compile`` or not. It is left as it is.

    Raises:
        CannotCopyError: A sharded model; one with something that Python cannot copy.
    """
    inner = unwrap(model)
    if any_sharded(inner.parameters()):
        raise CannotCopyError('the model is sharded, and each rank has a part of it alone.')
    memo: dict[int, Any] = {}
    # torch copies no tensor that is part of a graph, and some models keep their last loss
    for module in inner.modules():
        for tensor in _tensors_in(vars(module)):
            if not tensor.is_leaf:
                memo[id(tensor)] = tensor.detach().clone()
    try:
        with torch.no_grad():
            copied = copy.deepcopy(inner, memo)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise CannotCopyError(f'copy.deepcopy(model) failed ({type(error).__name__}: {error}).') from error
    _rebind_functions(inner, copied, memo)
    for module in copied.modules():
        cast_module.take_off(module)
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key, hook in list(hooks.items()):
                hooks[key] = _rebound(hook, memo, is_deep=True)
    return copied


def _rebind_functions(original: nn.Module, copied: nn.Module, memo: dict[int, Any]) -> None:
    """Functions that stand in for methods of single modules, as mmengine's ``activation_checkpointing`` has them.

    Python copies no function, so they would still run the module that they were made for.
    """
    for module, other in zip(original.modules(), copied.modules()):
        for name, value in vars(module).items():
            # what module.compile() keeps would compile the copy anew
            if isinstance(value, (FunctionType, functools.partial)) and name != COMPILED_CALL:
                vars(other)[name] = _rebound(value, memo)


def _rebound(held: Any, memo: dict[int, Any], is_deep: bool = False) -> Any:
    """What takes the place of something that a function holds: copies of modules, parameters and their methods, inside of
    functions and containers too; all else is held by both, as the state of a random generator has to be. Of hooks
    (``is_deep``), other objects are copied as well: they collect what they see."""
    known = (nn.Module, Tensor, FunctionType) if not is_deep else object
    if id(held) in memo and isinstance(held, known):
        return memo[id(held)]
    if isinstance(held, MethodType) and id(held.__self__) in memo:
        return MethodType(held.__func__, memo[id(held.__self__)])
    if isinstance(held, BuiltinMethodType) and type(held.__self__) in (list, dict):
        return getattr(_rebound(held.__self__, memo, is_deep), held.__name__)
    if isinstance(held, functools.partial):
        words = {name: _rebound(value, memo, is_deep) for name, value in held.keywords.items()}
        return functools.partial(_rebound(held.func, memo, is_deep), *_rebound(held.args, memo, is_deep), **words)
    if isinstance(held, FunctionType):
        return _rebound_function(held, memo, is_deep)
    if type(held) in (list, tuple, dict):
        if type(held) is dict:
            made: Any = {key: _rebound(value, memo, is_deep) for key, value in held.items()}
        else:
            made = type(held)(_rebound(value, memo, is_deep) for value in held)
        # the next function that holds it gets the same copy
        memo[id(held)] = made
        return made
    return _copied(held, memo) if is_deep else held


def _rebound_function(held: FunctionType, memo: dict[int, Any], is_deep: bool) -> FunctionType:
    cells = tuple(CellType() for _ in held.__closure__ or ())
    made = FunctionType(held.__code__, held.__globals__, held.__name__, None, cells or None)
    # functions that call themselves hold themselves
    memo[id(held)] = made
    for cell, old in zip(cells, held.__closure__ or ()):
        for value in _contents(old):
            cell.cell_contents = _rebound(value, memo, is_deep)
    made.__defaults__ = _rebound(held.__defaults__, memo, is_deep)
    made.__kwdefaults__ = _rebound(held.__kwdefaults__, memo, is_deep)
    return made


def _copied(held: Any, memo: dict[int, Any]) -> Any:
    kind = type(getattr(held, '__self__', held))
    if kind.__module__.partition('.')[0] in ('numpy', 'random', 'torch', 'builtins') or isinstance(held, type):
        return held
    try:
        return copy.deepcopy(held, memo)
    except Exception:
        return held


def _contents(cell: CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()


def _tensors_in(values: Any, depth: int = 3) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif depth and isinstance(values, (dict, list, tuple)):
        for value in values.values() if isinstance(values, dict) else values:
            yield from _tensors_in(value, depth - 1)


@contextmanager
def sandbox(
    model: nn.Module,
    policy: Policy,
    make_optimizer: Callable[[nn.Module], Optimizer] | None = None,
    attach: Attach = attach_whole,
) -> Iterator[Sandbox]:
    """Run a copy of a model at a level. Random states and everything of the original are as before when the block ends.

    Inside, gradients are enabled, autocast of the caller is off, what ``torch.compile`` made runs as it was written, and code
    that asks ``torch.distributed`` is told that there is one process, on this thread.

    Args:
        model: Attached or not, wrapped or not.
        policy: The level of the copy; its ``verbosity`` is taken as 0.
        make_optimizer: Makes the optimizer of the copy; without one, nothing can be stepped.
        attach: Attaches the copy.

    Yields:
        The copy and its engine.

    Raises:
        CannotCopyError: As :func:`fp32_copy`; inside, a collective call of the model.
        AmpAttachError: The level cannot be had for this model.
        AmpConfigError: A ``keep_fp32`` pattern that matches nothing.
        AmpUsageError: ``make_optimizer`` made no optimizer.
    """
    with isolated():
        copied = fp32_copy(model)
        optimizer = None if make_optimizer is None else made_optimizer(make_optimizer, copied)
        engine = Engine(dataclasses.replace(policy, verbosity=0, from_16bit=True), optimizer)
        try:
            attach(engine, copied)
            yield Sandbox(copied, engine)
        finally:
            engine.reset()


def made_optimizer(make_optimizer: Callable[[nn.Module], Optimizer], model: nn.Module) -> Optimizer:
    """The optimizer of a copy.

    Raises:
        AmpUsageError: The function gave something else.
    """
    made: Any = make_optimizer(model)
    if not isinstance(made, Optimizer):
        what = 'None' if made is None else type(made).__name__
        raise AmpUsageError(f'make_optimizer(model) gave {what}: it must return a torch.optim.Optimizer.')
    return made


@contextmanager
def isolated() -> Iterator[None]:
    """What happens inside leaves no trace in the random generators, reaches no other rank, and is not compiled: the hooks that
    look at a copy would be compiled with it, anew for each copy."""
    before = random_state.capture()
    devices = {'cpu'} | ({'cuda'} if torch.cuda.is_available() else set())
    with ExitStack() as stack:
        stack.callback(random_state.restore, before)
        stack.enter_context(alone())
        stack.enter_context(eager())
        stack.enter_context(torch.enable_grad())
        for device in (*devices, *region.KINDS):
            stack.enter_context(torch.autocast(device, enabled=False))
        yield


@contextmanager
def alone() -> Iterator[None]:
    """On this thread, ``torch.distributed`` says that it is not initialised, and refuses collective calls.

    A rank that runs a forward pass of its own would wait for the others, which do not: models ask for the number of positives
    of all ranks, synchronise BatchNorm, or gather features. Other threads, which may save a checkpoint, see what there is.

    Raises:
        CannotCopyError: Inside, at a collective call.
    """
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        yield
        return
    here = threading.get_ident()

    def is_here() -> bool:
        # threads of autograd, which recompute checkpointed segments, were not made by Python
        return threading.get_ident() == here or isinstance(threading.current_thread(), threading._DummyThread)

    modules = [torch.distributed, torch.distributed.distributed_c10d]
    with ExitStack() as stack:
        for module in modules:
            _replace(stack, module, 'is_initialized', lambda original: lambda: not is_here() and original())
            _replace(stack, module, 'get_world_size', lambda original: _if_alone(is_here, original, 1))
            _replace(stack, module, 'get_rank', lambda original: _if_alone(is_here, original, 0))
            for name in _COLLECTIVES:
                _replace(stack, module, name, lambda original, name=name: _refused(is_here, original, name))  # type: ignore[misc]
        yield


def _replace(stack: ExitStack, module: Any, name: str, make: Callable[[Any], Any]) -> None:
    original = getattr(module, name, None)
    if original is not None:
        setattr(module, name, make(original))
        stack.callback(setattr, module, name, original)


def _if_alone(is_here: Callable[[], bool], original: Callable[..., Any], value: int) -> Callable[..., Any]:
    return lambda *args, **kwargs: value if is_here() else original(*args, **kwargs)


def _refused(is_here: Callable[[], bool], original: Callable[..., Any], name: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if is_here():
            raise CannotCopyError(
                f'the model calls torch.distributed.{name} without asking whether there are other ranks, so one rank cannot '
                f'run it again alone.'
            )
        return original(*args, **kwargs)

    return call


def trainable(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """The parameters of modules that take gradients, each once."""
    found = {id(p): p for module in modules for p in module.parameters() if p.requires_grad}
    return list(found.values())
