"""One training step of a copy of a model at a level: what it holds in memory, and what each module did."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from ..casting.modules import module_device
from ..engine import backward, take_step
from ..errors import AmpConfigError, AmpUsageError, nearest
from ..policy import OPTIONS, Policy, dtype_name
from ..policy.levels import LossScaleConfig
from .memory import MemoryCount, SavedBytes, count_memory
from .module_record import ModuleRecorder
from .recorder import outputs_of
from .rounding import Gathering, Measured
from .sandbox import Attach, Sandbox, attach_whole, sandbox, trainable


@dataclasses.dataclass(frozen=True)
class Subject:
    """What is tried: a model, and how it is run.

    Attributes:
        model: Left as it is.
        run: Runs a copy of the model on the example; gives the loss, or what the model gave.
        has_loss: Whether it gives the loss.
        make_optimizer: Makes the optimizer of a copy; None for none: a plain SGD without state stands in, for the masters.
        attach: Attaches a copy to its engine.
        surrounds: Whether the engine surrounds ``run``, as mmengine's wrapper does; with ``amp.initialize``, the model does it.
    """

    model: nn.Module
    run: Callable[[nn.Module], Any]
    has_loss: bool
    make_optimizer: Callable[[nn.Module], Optimizer] | None = None
    attach: Attach = attach_whole
    surrounds: bool = False

    def optimizer_maker(self) -> Callable[[nn.Module], Optimizer] | None:
        """What makes the optimizer of a copy; None for a model without weights to train."""
        if not trainable([self.model]):
            return None
        return self.make_optimizer or (lambda copied: SGD(trainable([copied]), lr=0.0))


def check_functions(**given: object) -> None:
    """Refuse arguments that are neither functions nor None, and the class of an optimizer.

    Raises:
        AmpConfigError: Names them.
    """
    problems = [
        f'{name}={type(value).__name__} must be a function{_FUNCTIONS[name]}, or None.'
        for name, value in given.items()
        if value is not None and not callable(value)
    ]
    maker = given.get('make_optimizer')
    if isinstance(maker, type) and issubclass(maker, Optimizer):
        name = maker.__name__
        problems.append(
            f'make_optimizer={name} is the class, which takes parameters: write make_optimizer=lambda model: '
            f'{name}(model.parameters(), ...).'
        )
    if problems:
        raise AmpConfigError(problems)


_FUNCTIONS = {
    'loss_fn': ' from (model, example) to the loss',
    'make_optimizer': ' from a model to its optimizer, such as lambda model: torch.optim.AdamW(model.parameters())',
}


def check_options(overrides: Mapping[str, object], others: Iterable[str] = ()) -> None:
    """Refuse options that do not exist.

    Args:
        overrides: For :func:`amp_wrapper.policy.resolve`.
        others: Arguments of the same call, one of which may be meant.

    Raises:
        AmpConfigError: Names them, and the nearest ones that there are.
    """
    unknown = [name for name in overrides if name not in OPTIONS]
    if unknown:
        known = [*OPTIONS, *others]
        raise AmpConfigError([f'{name}=... is no option{nearest(name, known)}.' for name in unknown])


@dataclasses.dataclass(frozen=True)
class WeightTypes:
    """How the own parameters of one module are stored.

    Attributes:
        types: Type to number of elements.
        masters: 'float32' or 'split' where the optimizer steps something beside them; '' otherwise.
        bytes: Of the parameters, without masters.
    """

    types: Mapping[str, int]
    masters: str
    bytes: int


@dataclasses.dataclass(frozen=True)
class Trial:
    """What a step at a level has shown.

    Attributes:
        policy: The level.
        memory: What was counted.
        loss: Its value; None without a loss.
        weights: By name of the module, where it has any.
        recorder: What the modules did, where that was asked for.
        weight_ranges: The same for the values of parameters, by name of the module.
        gradient_ranges: The same for their gradients.
    """

    policy: Policy
    memory: MemoryCount
    loss: float | None
    weights: dict[str, WeightTypes]
    recorder: ModuleRecorder | None = None
    weight_ranges: dict[str, Measured] = dataclasses.field(default_factory=dict)
    gradient_ranges: dict[str, Measured] = dataclasses.field(default_factory=dict)


def always_steps(policy: Policy) -> Policy:
    """A configuration whose first step is taken, whatever its gradients are: optimizer state is made by a step."""
    return dataclasses.replace(policy, loss_scale=LossScaleConfig(dynamic=False, init_scale=1.0), skip_nonfinite=False)


def run_trial(
    subject: Subject, policy: Policy, records: bool = False, rounds: bool = False, scale: float | None = None
) -> Trial:
    """Run one step of a copy. Syncs.

    Args:
        subject: What is run.
        policy: The level; its loss scale is 1 here.
        records: Whether to record what each module does.
        rounds: Whether to measure weights and gradients too, and what rounding does to all of them.
        scale: Of :class:`~amp_wrapper.diagnostics.rounding.Gathering`, for gradients.

    Raises:
        AmpError: The level cannot be had for the model, or refuses an op of it; a loss that is no scalar.
        Exception: What the model raises at this level, such as an op without a 16-bit kernel.
    """
    with sandbox(subject.model, always_steps(policy), subject.optimizer_maker(), subject.attach) as box:
        recorder = ModuleRecorder(box.model, policy, box.engine.kept, rounds, scale=scale) if records else None
        saved = SavedBytes(box.model)
        with ExitStack() as stack:
            if recorder is not None:
                stack.enter_context(recorder.forward())
            stack.enter_context(saved)
            if subject.surrounds:
                stack.enter_context(box.forward())
            result = subject.run(box.model)
        loss = _loss_of(result) if subject.has_loss else None
        weights = _weight_types(box)
        weight_ranges = _by_module(box.model, lambda parameter: parameter) if rounds else {}
        gradient_ranges: dict[str, Measured] = {}
        target = _stand_in(result) if loss is None else loss
        if target is not None and target.requires_grad and box.engine.optimizer is not None:
            backward(box.engine, target)
            if rounds and loss is not None:
                gradient_ranges = _by_module(box.model, lambda parameter: parameter.grad, scale)
            take_step(box.engine)
        memory = count_memory(box.model, box.engine, saved.total)
        value = None if loss is None else float(loss.detach())
        return Trial(policy, memory, value, weights, recorder, weight_ranges, gradient_ranges)


def measured_peak(subject: Subject, policy: Policy) -> int | None:
    """The bytes that two steps at a level take of a GPU at most, beside what was taken before. Syncs.

    It resets the peak that ``torch.cuda.max_memory_allocated`` tells.

    Returns:
        None where the model is not on a GPU.
    """
    device = module_device(subject.model)
    if device.type != 'cuda':
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    with sandbox(subject.model, always_steps(policy), subject.optimizer_maker(), subject.attach) as box:
        torch.cuda.reset_peak_memory_stats(device)
        # the state of the optimizer comes with the first
        for _ in range(2):
            with box.forward() if subject.surrounds else ExitStack():
                result = subject.run(box.model)
            target = _loss_of(result) if subject.has_loss else _stand_in(result)
            if target is not None and target.requires_grad and box.engine.optimizer is not None:
                backward(box.engine, target)
                take_step(box.engine)
                box.engine.zero_grad()
            del result, target
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before


def _loss_of(result: Any) -> Tensor:
    if not isinstance(result, Tensor) or result.numel() != 1 or not result.is_floating_point():
        kind = f'a tensor of shape {tuple(result.shape)}' if isinstance(result, Tensor) else type(result).__name__
        raise AmpUsageError(
            f'loss_fn(model, example) gave {kind}: it must give the loss, a floating tensor of one element.'
        )
    return result


def _stand_in(result: Any) -> Tensor | None:
    """Something to begin a backward pass with, where there is no loss."""
    outputs = [tensor.float().sum() for tensor in outputs_of(result) if tensor.requires_grad]
    return torch.stack(outputs).sum() if outputs else None


def _by_module(
    model: nn.Module, choose: Callable[[nn.Parameter], Tensor | None], scale: float | None = None
) -> dict[str, Measured]:
    """What the own parameters of modules lead to, measured."""
    found: dict[str, Measured] = {}
    seen: set[int] = set()
    for name, module in model.named_modules():
        gathered = Gathering(scale=scale)
        for parameter in module.parameters(recurse=False):
            tensor = choose(parameter)
            if tensor is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                with torch.no_grad():
                    gathered.add([tensor])
        measured = gathered.read()
        if measured is not None:
            found[name] = measured
    return found


def _weight_types(box: Sandbox) -> dict[str, WeightTypes]:
    own = {id(parameter) for parameter in box.model.parameters()}
    masters: dict[int, str] = {}
    if box.engine.optimizer is not None:
        lists = box.engine.params.lists()
        for stepped, beside in zip(lists.parameters, lists.copies):
            if id(stepped) not in own and beside is not None:
                masters[id(beside)] = dtype_name(stepped.dtype)
            elif id(stepped) in own and beside is not None:
                masters[id(stepped)] = 'split'
    found: dict[str, WeightTypes] = {}
    for name, module in box.model.named_modules():
        types: dict[str, int] = {}
        parameters = list(module.parameters(recurse=False))
        for parameter in parameters:
            key = dtype_name(parameter.dtype)
            types[key] = types.get(key, 0) + parameter.numel()
        if parameters:
            kind = next((masters[id(p)] for p in parameters if id(p) in masters), '')
            found[name] = WeightTypes(types, kind, sum(p.numel() * p.element_size() for p in parameters))
    return found
