"""Runs one training step on a copy of a model, and counts the bytes that it holds: every tool of this room runs steps here."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer

from ..casting.modules import module_device
from ..engine import Engine, backward, before_forward, forward_context, take_step
from ..engine.clipping import GradientClip
from ..errors import AmpConfigError, AmpUsageError
from ..policy.options import Option
from .sandbox import Attach, Sandbox, attach_whole
from .watches import storage_key

#: What a backward pass begins with: tensors with their gradients; a loss, which the engine scales, has none.
Pass = Sequence[tuple[Tensor, Tensor | None]]


def _is_maker(value: Any) -> bool:
    return callable(value) and not isinstance(value, type)


#: Arguments that several tools take.
LOSS_FN = Option(None, (callable,), 'a function from the model and a batch to the loss')
_MAKER = 'a function from a model to its optimizer, such as lambda model: torch.optim.AdamW(model.parameters())'
MAKE_OPTIMIZER = Option(None, (None, _is_maker), _MAKER)


def read_options(table: Mapping[str, Option], given: Mapping[str, Any]) -> dict[str, Any]:
    """Check arguments by a table.

    Raises:
        AmpConfigError: All that are wrong, in one message.
    """
    problems: list[str] = []
    found = {name: option.read(name, given[name], problems) for name, option in table.items()}
    if problems:
        raise AmpConfigError(problems)
    return found


@dataclasses.dataclass(frozen=True)
class Task:
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
        updates: Whether the optimizer steps; gradients are not kept then.
        clip: How gradients are clipped before that.
        counts: Whether to count memory, which takes time.
    """
    found, engine, device = Step(), box.engine, module_device(box.model)
    if device.type == 'cuda':
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
    if device.type == 'cuda':
        torch.cuda.synchronize(device)
    found.seconds = time.perf_counter() - began
    if counts:
        is_gpu = device.type == 'cuda'
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
    """Count what a forward pass keeps for the backward pass. Memory that is kept twice counts once.

    Weights and buffers of the model do not count: they are there anyway. Casts of weights that autocast makes do.

    Args:
        model: Whose forward pass it is.

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
    """Count the bytes of the weights and buffers of a model, their masters, the optimizer's state, and a gradient for each weight
    that is trained. Memory that is shared counts once. No host read."""
    tensors: list[Any] = [*model.parameters(), *model.buffers()]
    if engine.optimizer is not None:
        lists = engine.params.lists()
        tensors += [*lists.parameters, *lists.copies]
        tensors += [value for values in engine.optimizer.state.values() for value in values.values()]
    sizes = {storage_key(each): each.untyped_storage().nbytes() for each in tensors if isinstance(each, Tensor)}
    return sum(sizes.values()) + sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
