"""Runs a copy of a model at any level, and leaves everything else as it was."""

from __future__ import annotations

import copy
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer

from ..casting import cast_module, region
from ..casting.roots import unwrap
from ..checkpoint import random_state
from ..compiler_internals import COMPILED_CALL, eager
from ..engine import Engine, attach_together
from ..errors import AmpUsageError
from ..policy import Policy
from ..policy.nested import map_tensors
from ..shards import any_sharded
from ..torch_internals import TorchDispatchMode
from .watches import tensors_of

#: What a process that is alone is told.
_ALONE = {'is_initialized': False, 'get_world_size': 1, 'get_rank': 0}
_FUNCTIONS = (FunctionType, functools.partial)

#: Attaches a copy of a model to an engine, as the original was attached.
Attach = Callable[[Engine, nn.Module], object]


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


def attach_whole(engine: Engine, model: nn.Module) -> None:
    """Attach a model as ``amp.initialize`` does."""
    attach_together([engine], [model], engine.policy)


def fp32_copy(model: nn.Module) -> nn.Module:
    """Return a copy of a model with FP32 values, those of its masters where it has some, and without casts.

    Forward hooks that are functions stay behind: what they collect is not for a copy. Hooks that are objects, or methods of
    objects, are copied with them.

    Args:
        model: Attached or not; wrapped in DDP or ``torch.compile`` or not. It is left as it is.

    Raises:
        CannotCopyError: A sharded model; one with something that Python cannot copy, or with a function in place of a method.
    """
    inner = unwrap(model)
    if any_sharded(inner.parameters()):
        raise CannotCopyError('the model is sharded, and each rank has a part of it alone.')
    memo: dict[int, Any] = {}
    for name, module in inner.named_modules():
        for key, value in vars(module).items():
            # what module.compile() keeps is no part of copies
            is_function = isinstance(value, _FUNCTIONS) and key != COMPILED_CALL
            if is_function and (hasattr(type(module), key) or _holds_module(value)):
                place = f'{name}.{key}'.lstrip('.')
                raise CannotCopyError(f'{place} of the model is a function, and a copy would run that of the original.')
        # torch copies no tensor that is part of a graph, and some models keep their last loss
        memo |= {id(each): each.detach().clone() for each in tensors_of(vars(module)) if not each.is_leaf}
    try:
        with torch.no_grad():
            copied = copy.deepcopy(inner, memo)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise CannotCopyError(f'copy.deepcopy(model) failed ({type(error).__name__}: {error}).') from error
    for module in copied.modules():
        cast_module.take_off(module)
        for hooks, key in own_functions(module):
            del hooks[key]
    return copied


def _holds_module(function: Any) -> bool:
    """Return whether a function, or a method in it, is bound to a module: that of the original, in a copy."""
    cells = [cell.cell_contents for cell in getattr(function, '__closure__', None) or ()]
    held = [function.func, *function.args] if isinstance(function, functools.partial) else cells
    return any(isinstance(getattr(each, '__self__', each), nn.Module) for each in held)


def own_functions(module: nn.Module) -> list[tuple[dict[int, Any], int]]:
    """Return the forward hooks of a module that are functions: the dicts that hold them, and their keys."""
    found = [(hooks, key) for hooks in (module._forward_pre_hooks, module._forward_hooks) for key in hooks]
    return [(hooks, key) for hooks, key in found if isinstance(hooks[key], _FUNCTIONS)]


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
        AmpUsageError: ``make_optimizer`` made no optimizer; inside, a call of the original.
    """
    with isolated():
        copied = fp32_copy(model)
        optimizer: Any = None if make_optimizer is None else make_optimizer(copied)
        if make_optimizer is not None and not isinstance(optimizer, Optimizer):
            raise AmpUsageError(f'make_optimizer(model) gave {optimizer!r}: it must return a torch.optim.Optimizer.')
        engine = Engine(dataclasses.replace(policy, verbosity=0, from_16bit=True), optimizer)
        originals = set(map(id, model.modules()))

        def refuse(module: nn.Module, args: Any) -> None:
            if id(module) in originals:
                raise AmpUsageError(
                    'the original was called, and not its copy: loss_fn has to call the model that it is given.'
                )

        hook = register_module_forward_pre_hook(refuse)
        try:
            attach(engine, copied)
            yield Sandbox(copied, engine)
        finally:
            hook.remove()
            engine.reset()
            # what its level names must not act on others, and a copy that holds itself waits for the garbage collector
            for module in copied.modules():
                cast_module.take_off(module)


@contextmanager
def isolated() -> Iterator[None]:
    """Restore the states of the random generators at the end. Inside, no other rank is reached, and nothing is compiled: hooks
    that look at a copy would be compiled with it, anew for each copy."""
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


class _NoCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses ops that reach other ranks, however they are called."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if 'c10d' in func.namespace:
            raise CannotCopyError(
                f'the model calls {func} without asking whether there are other ranks, so one rank cannot run it again alone.'
            )
        return func(*args, **(kwargs or {}))


@contextmanager
def alone() -> Iterator[None]:
    """Tell this thread that ``torch.distributed`` is not initialised, and refuse collective calls.

    A rank that runs a forward pass of its own would wait for the others, which do not: models ask for the number of positives
    of all ranks, synchronise BatchNorm, or gather features. Other threads, which may save a checkpoint, see what there is.

    Raises:
        CannotCopyError: Inside, at a collective call.
    """
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        yield
        return
    here = threading.get_ident()

    def instead(original: Callable[..., Any], answer: object) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            # threads of autograd, which recompute checkpointed segments, were not made by Python
            is_here = threading.get_ident() == here or isinstance(threading.current_thread(), threading._DummyThread)
            return answer if is_here else original(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for name, answer in _ALONE.items():
            original = getattr(torch.distributed, name)
            stack.callback(setattr, torch.distributed, name, original)
            setattr(torch.distributed, name, instead(original, answer))
        stack.enter_context(_NoCollectives())  # type: ignore[no-untyped-call]
        yield


def trainable(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Return the parameters of modules that take gradients, each once."""
    found = {id(p): p for module in modules for p in module.parameters() if p.requires_grad}
    return list(found.values())


def copied_batch(value: Any, cuts: bool = False) -> Any:
    """Copy what a model is given, with its tensors: models may write to it. What Python cannot copy is the same object.

    Args:
        value: A batch, or arguments.
        cuts: Whether tensors with a graph alone take gradients in the copy: leaves are weights.
    """
    memo: dict[int, Any] = {}
    for each in tensors_of(value):
        memo[id(each)] = each.detach().clone().requires_grad_(each.requires_grad and not (cuts and each.is_leaf))
    try:
        return copy.deepcopy(value, dict(memo))
    except Exception:
        return map_tensors(lambda tensor: memo.get(id(tensor), tensor), value)
