"""Copies a model at any level, runs training steps of the copy, and leaves everything else as it was."""

from __future__ import annotations

import copy
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer

from ..casting import cast_module, region
from ..casting.modules import module_device
from ..casting.roots import unwrap
from ..checkpoint import random_state
from ..compiler_internals import COMPILED_CALL, eager
from ..engine import Engine, attach_together, backward, before_forward, forward_context, take_step
from ..engine.clipping import GradientClip
from ..errors import AmpUsageError
from ..policy import Policy
from ..policy.options import Option
from ..shards import any_sharded
from ..torch_internals import TorchDispatchMode
from .watches import storage_key, tensors_of

#: What a process that is alone is told.
_ALONE = {'is_initialized': False, 'get_world_size': 1, 'get_rank': 0}
_FUNCTIONS = (FunctionType, functools.partial)

#: Attaches a copy of a model to an engine, as the original was attached.
Attach = Callable[[Engine, nn.Module], object]


class CannotCopyError(AmpUsageError):
    """A model of which no copy can be made, or which talks to other ranks without asking whether there are any."""


class Sandbox(NamedTuple):
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
        originals, here = set(map(id, model.modules())), threading.get_ident()

        def refuse(module: nn.Module, args: Any) -> None:
            if id(module) in originals and _is_on(here):
                raise AmpUsageError(f'{type(module).__name__} of the original was called, not that of the copy.')

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
            raise CannotCopyError(f'the model calls {func}, and does not ask whether there are other ranks.')
        return func(*args, **(kwargs or {}))


def _is_on(thread: int) -> bool:
    """Return whether this thread is the one, or one of autograd, which recomputes checkpointed segments: not made by Python."""
    return threading.get_ident() == thread or isinstance(threading.current_thread(), threading._DummyThread)


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
            return answer if _is_on(here) else original(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for name, answer in _ALONE.items():
            original = getattr(torch.distributed, name)
            stack.callback(setattr, torch.distributed, name, original)
            setattr(torch.distributed, name, instead(original, answer))
        stack.enter_context(_NoCollectives())  # type: ignore[no-untyped-call]
        yield


# -- a step of a copy --------------------------------------------------------------------------------------------------

#: What a backward pass begins with: tensors with their gradients; a loss, which the engine scales, has none.
Pass = Sequence[tuple[Tensor, Tensor | None]]
#: What several tools take.
LOSS_FN = Option(None, (callable,), 'a function from the model and a batch to the loss')


class Task(NamedTuple):
    """What is run, on copies.

    Attributes:
        model: The original, which is left as it is.
        make_optimizer: Makes the optimizer of a copy; None for none.
        attach: Attaches a copy at a level.
        surrounds: As for :func:`run_step`.
        clip: How gradients are clipped.
    """

    model: nn.Module
    make_optimizer: Callable[[nn.Module], Optimizer] | None = None
    attach: Attach = attach_whole
    surrounds: bool = False
    clip: GradientClip | None = None


@dataclasses.dataclass
class Step:
    """What one step has shown.

    Attributes:
        gradients: By the name of the parameter; with the loss scale, unless that was taken out.
        scale: The loss scale of the gradients; 1.0 where it was taken out.
        skipped: Whether the optimizer's step was skipped.
        seconds: Of all of it, with the device.
        memory: The bytes that were held at most: on a GPU those of the allocator, else those of :func:`held_bytes`.
    """

    gradients: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    scale: float = 1.0
    skipped: bool = False
    seconds: float = 0.0
    memory: int = 0


def run_step(
    box: Sandbox,
    run: Callable[[nn.Module], Pass],
    watches: Iterable[AbstractContextManager[Any]] = (),
    *,
    surrounds: bool = False,
    updates: bool = True,
    clip: GradientClip | None = None,
    counts: bool = False,
) -> Step:
    """Run the forward pass, the backward pass and the optimizer's step of a copy. Syncs.

    Args:
        box: The copy. Its gradients are cleared at the end.
        run: Runs the forward pass of the copy, and returns what the backward pass begins with; nothing for none.
        watches: Entered around the forward and backward passes.
        surrounds: Whether the engine surrounds ``run``, as mmengine's wrapper does; with ``amp.initialize``, the model does it.
        updates: Whether the optimizer steps, after clipping by ``clip``; gradients are not kept then.
        counts: Whether to count memory, which takes time.
    """
    found, engine, device = Step(), box.engine, module_device(box.model)
    is_gpu = device.type == 'cuda'
    if is_gpu:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    began = time.perf_counter()
    before_forward(engine, box.model)
    with ExitStack() as stack:
        for watch in watches:
            stack.enter_context(watch)
        with ExitStack() as forward:
            saved = forward.enter_context(saved_bytes(box.model)) if counts else []
            if surrounds:
                forward.enter_context(forward_context(engine, box.model))
            begin = run(box.model)
        if begin:
            _backward(box, begin, found, not updates)
    if updates and begin and engine.optimizer is not None:
        found.skipped = take_step(engine, clip).was_skipped()
    if is_gpu:
        torch.cuda.synchronize(device)
    found.seconds = time.perf_counter() - began
    if counts:
        found.memory = torch.cuda.max_memory_allocated(device) if is_gpu else held_bytes(box.model, engine) + sum(saved)
    if engine.optimizer is not None:
        engine.zero_grad()
    # autocast keeps its casts of weights until the outermost block ends, which is that around the copy
    torch.clear_autocast_cache()
    return found


def _backward(box: Sandbox, begin: Pass, found: Step, keeps: bool) -> None:
    """Run a backward pass, and keep its gradients."""
    engine, scaler = box.engine, box.engine.scales.scalers[0]
    found.scale = 1.0 if scaler.is_one else scaler.get_scale()
    if begin[0][1] is None:
        backward(engine, begin[0][0])
        at_hand = engine.gradients_at_hand() if keeps else []
        found.gradients = {name: gradient for name, _, gradient, _ in at_hand}
        found.scale = 1.0 if any(is_unscaled for *_, is_unscaled in at_hand) else found.scale
    else:
        torch.autograd.backward([each for each, _ in begin], [each for _, each in begin])
        found.gradients = {name: p.grad for name, p in box.model.named_parameters() if p.grad is not None}
        for parameter in box.model.parameters():
            parameter.grad = None


def check_loss(loss: Any) -> Tensor:
    """Return a loss as a scalar.

    Raises:
        AmpUsageError: It is no floating tensor of one element.
    """
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        given = f'a tensor of shape {tuple(loss.shape)}' if isinstance(loss, Tensor) else type(loss).__name__
        raise AmpUsageError(f'loss_fn gave {given}: it must give the loss, a floating tensor of one element.')
    return loss.reshape(())


# -- memory ------------------------------------------------------------------------------------------------------------


@contextmanager
def saved_bytes(model: nn.Module) -> Iterator[list[int]]:
    """Count what a forward pass of a model keeps for the backward pass. Memory that is kept twice counts once.

    Weights and buffers of the model do not count: they are there anyway. Casts of weights that autocast makes do.

    Yields:
        The bytes of each piece of memory that was kept so far.
    """
    found: list[int] = []
    # nobody else may get this memory while it counts
    kept = {storage_key(tensor): tensor.detach() for tensor in (*model.parameters(), *model.buffers())}

    def pack(tensor: Tensor) -> Tensor:
        key = storage_key(tensor)
        if tensor.layout is torch.strided and key not in kept:
            kept[key] = tensor.detach()
            found.append(tensor.untyped_storage().nbytes())
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found
    kept.clear()


def held_bytes(model: nn.Module, engine: Engine) -> int:
    """Count the bytes of the weights and buffers of a model, their masters, the optimizer's state, and a gradient for each
    weight that is trained. Memory that is shared counts once. No host read."""
    tensors: list[Any] = [*model.parameters(), *model.buffers()]
    if engine.optimizer is not None:
        lists = engine.params.lists()
        tensors += [*lists.parameters, *lists.copies]
        tensors += [value for values in engine.optimizer.state.values() for value in values.values()]
    sizes = {storage_key(each): each.untyped_storage().nbytes() for each in tensors if isinstance(each, Tensor)}
    return sum(sizes.values()) + sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
