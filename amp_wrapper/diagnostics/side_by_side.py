"""Trains copies of a model at several levels, side by side: time, memory, skipped steps, losses."""

from __future__ import annotations

import copy
import dataclasses
import gc
import math
import os
import random
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..casting.modules import is_batchnorm, module_device
from ..engine import backward, before_forward, take_step
from ..engine.clipping import GradientClip
from ..errors import AmpAttachError, AmpConfigError
from ..policy import Policy
from .deviations import check_loss
from .memory import MemoryCount, SavedBytes, count_memory
from .sandbox import Attach, Sandbox, isolated, sandbox

#: Steps whose time does not count.
WARM_UP = 2
#: How often the first step is repeated, at most, until the loss scale has fallen so far that it is taken.
MOST_SETTLING = 40
#: Batches whose loss is computed again after the last step.
CHECKED = 4
#: Bytes of a parameter with gradient, master, two moments and room for copies, to see how many copies there is room for.
_BYTES_EACH = 24
#: The share of the free memory that copies may take.
_SHARE = 0.6


@dataclasses.dataclass(frozen=True)
class Task:
    """What is trained.

    Attributes:
        model: The original; copies of it are trained.
        loss_fn: From model and batch to the loss.
        batches: At least one; step ``n`` takes number ``n`` modulo their number.
        make_optimizer: From a model to its optimizer.
        seed: Of the random generators; step ``n`` takes ``seed + n``.
        attach: Attaches a copy at a level.
        clip: How gradients are clipped.
        surrounds: Whether the engine surrounds ``loss_fn``, as mmengine's wrapper does; ``amp.initialize`` leaves that to the
            model.
    """

    model: nn.Module
    loss_fn: Callable[[nn.Module, Any], Tensor]
    batches: Sequence[Any]
    make_optimizer: Callable[[nn.Module], Optimizer]
    seed: int
    attach: Attach
    clip: GradientClip | None = None
    surrounds: bool = False

    def loss(self, box: Sandbox, batch: Any) -> Tensor:
        """The loss of a copy."""
        before_forward(box.engine, box.model)
        with box.forward() if self.surrounds else nullcontext():
            return check_loss(self.loss_fn(box.model, batch))

    def batch(self, index: int) -> Any:
        """A copy of a batch: ``loss_fn`` may write to it."""
        batch = self.batches[index % len(self.batches)]
        try:
            return copy.deepcopy(batch)
        except (RuntimeError, TypeError):
            # such as tensors with a graph
            return batch

    def set_seed(self, step: int) -> None:
        """Set all random generators for a step."""
        seed = (self.seed + step) % 2**32
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)


@dataclasses.dataclass(frozen=True)
class Plan:
    """One copy to train.

    Attributes:
        name: How it is called in the results.
        policy: Its level.
        order: Which batch each step takes, and which random numbers; None for the usual order.
    """

    name: str
    policy: Policy
    order: tuple[int, ...] | None = None


@dataclasses.dataclass
class LevelRun:
    """What one copy did.

    Attributes:
        name: Of the plan.
        seconds: Step to its seconds, of those that count.
        losses: Of each step that was run.
        checked: Losses after the last step, of the first few batches.
        skips: Skipped steps, those included that were repeated at the beginning.
        skipped_at_end: How many of the last steps in a row were skipped.
        scale: The loss scale at the end; None without one.
        first_scale: That at the beginning.
        memory: Counted bytes; None where no step was run.
        peak: The peak of a step as the GPU's allocator measured it, with all that the copy holds, in bytes; None on a CPU.
        problem: Why it ended early, in words; empty where it did not.
        lost: Type to the shares of updates that are lost without masters: the nonzero updates of the last step which, added to
            the weight rounded to that type and rounded again, change nothing. Empty where it was not measured.
        done: Whether all steps were run.
    """

    name: str
    seconds: dict[int, float] = dataclasses.field(default_factory=dict)
    losses: list[float] = dataclasses.field(default_factory=list)
    checked: list[float] = dataclasses.field(default_factory=list)
    skips: int = 0
    skipped_at_end: int = 0
    scale: float | None = None
    first_scale: float | None = None
    memory: MemoryCount | None = None
    peak: int | None = None
    problem: str = ''
    lost: dict[str, float] = dataclasses.field(default_factory=dict)
    done: bool = False

    @property
    def median(self) -> float:
        """Seconds of a step, the median; NaN without any that counts."""
        return float(np.median(list(self.seconds.values()))) if self.seconds else math.nan

    def times(self, other: LevelRun) -> float | None:
        """How many times as long a step takes as one of another run: the median over the steps that both have taken, which were
        taken one right after the other where they ran side by side. None without any."""
        ratios = [self.seconds[step] / other.seconds[step] for step in self.seconds.keys() & other.seconds.keys()]
        return float(np.median(ratios)) if ratios else None

    @property
    def bytes(self) -> int | None:
        """Measured where there is a measurement, else counted."""
        return self.peak if self.peak is not None else None if self.memory is None else self.memory.total


class _Lane:
    """One copy on its way."""

    def __init__(self, task: Task, plan: Plan, box: Sandbox, run: LevelRun, is_reference: bool) -> None:
        self._task, self._plan, self._box, self.run, self._is_reference = task, plan, box, run, is_reference
        self._device = module_device(box.model)
        self._resident = 0
        scaler = box.engine.scales.scalers[0]
        if not scaler.is_one:
            run.first_scale = run.scale = scaler.get_scale()

    def advance(self, step: int, steps: int) -> None:
        """Take one step."""
        run, task = self.run, self._task
        which = step if self._plan.order is None else self._plan.order[step]
        before = self._weights() if self._is_reference and step == steps - 1 else None
        for attempt in range(MOST_SETTLING if step == 0 else 1):
            batch = task.batch(which)
            task.set_seed(which)
            saved = SavedBytes(self._box.model) if step == 0 else None
            loss, seconds, skipped, peak = self._timed(batch, saved)
            if not attempt:
                run.losses.append(loss)
            run.skips += skipped
            scaler = self._box.engine.scales.scalers[0]
            run.scale = None if scaler.is_one else scaler.get_scale()
            if saved is not None:
                run.memory = count_memory(self._box.model, self._box.engine, saved.total)
            if peak is not None:
                run.peak = max(run.peak or 0, peak)
            if not math.isfinite(loss):
                run.problem = f'the loss was {loss} at step {step + 1}'
                return
            if not skipped or not scaler.is_dynamic:
                break
        run.skipped_at_end = run.skipped_at_end + 1 if skipped else 0
        if step >= WARM_UP and not skipped:
            run.seconds[step] = seconds
        if skipped and step == 0:
            times = f'the first step was skipped {attempt + 1} times, down to a loss scale of {run.scale or 1.0:g}'
            static = f'the first step was skipped, at a loss scale of {run.scale or 1.0:g}, which does not move'
            run.problem = f'{times if scaler.is_dynamic else static}: its gradients are not finite'
        if before is not None:
            run.lost = _lost_shares(before, self._weights())

    def check(self) -> None:
        """Compute the losses of some batches again, after the last step."""
        task = self._task
        for index in range(min(CHECKED, len(task.batches))):
            batch = task.batch(index)
            task.set_seed(index)
            # losses may call torch.autograd.grad; the graph goes with the loss
            self.run.checked.append(float(task.loss(self._box, batch).detach()))
        self.run.done = True

    def _timed(self, batch: Any, saved: SavedBytes | None) -> tuple[float, float, bool, int | None]:
        """Loss, seconds, whether the step was skipped, and the peak."""
        box, cuda = self._box, self._device.type == 'cuda'
        resident = torch.cuda.memory_allocated(self._device) if cuda else 0
        if cuda:
            torch.cuda.reset_peak_memory_stats(self._device)
            torch.cuda.synchronize(self._device)
        began = time.perf_counter()
        # segments that the backward pass computes again are not kept
        with saved or nullcontext():
            loss = self._task.loss(box, batch)
        backward(box.engine, loss)
        result = take_step(box.engine, self._task.clip)
        box.engine.zero_grad()
        if cuda:
            torch.cuda.synchronize(self._device)
        seconds = time.perf_counter() - began
        value, skipped = float(loss.detach()), result.was_skipped()
        del loss
        if not cuda:
            return value, seconds, skipped, None
        # what this copy holds itself, and what the step took on top of what was there
        peak = self._resident + torch.cuda.max_memory_allocated(self._device) - resident
        self._resident += torch.cuda.memory_allocated(self._device) - resident
        return value, seconds, skipped, peak

    @property
    def runs_16_bit(self) -> bool:
        """Whether it differs from what the user would run without this package."""
        return self._plan.policy.runs_16_bit

    def note_resident(self, size: int) -> None:
        """The copy itself took so many bytes on the GPU."""
        self._resident = size

    def _weights(self) -> list[Tensor]:
        """Copies of what masters would be made for."""
        kept = {id(p) for module in self._box.model.modules() if is_batchnorm(module) for p in module.parameters()}
        weights = self._box.engine.weights()
        return [
            p.detach().clone() for p in weights if id(p) not in kept and p.requires_grad and p.dtype == torch.float32
        ]


def _lost_shares(before: Sequence[Tensor], after: Sequence[Tensor]) -> dict[str, float]:
    """For each 16-bit type the share of updates that would be lost without masters. Syncs."""
    shares: dict[str, float] = {}
    for name, dtype in (('float16', torch.float16), ('bfloat16', torch.bfloat16)):
        lost = total = 0
        for old, new in zip(before, after):
            update = new - old
            rounded = old.to(dtype)
            is_lost = ((rounded.float() + update).to(dtype) == rounded) & (update != 0)
            lost += int(is_lost.sum())
            total += int((update != 0).sum())
        if total:
            shares[name] = lost / total
    return shares


def free_memory(device: torch.device) -> int | None:
    """Bytes that are free on a device; None where the system does not tell."""
    if device.type == 'cuda':
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        return os.sysconf('SC_AVPHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')
    except (ValueError, OSError, AttributeError):
        return None


def fit_together(model: nn.Module, copies: int) -> bool:
    """Whether there is room for so many copies of a model with their optimizers at once."""
    free = free_memory(module_device(model))
    needed = copies * _BYTES_EACH * sum(p.numel() for p in model.parameters())
    # what does not tell is asked for little
    return needed < (free * _SHARE if free is not None else 2**30)


def train_side_by_side(
    task: Task, plans: Sequence[Plan], steps: int, runs: dict[str, LevelRun], tick: Callable[[str], None]
) -> bool:
    """Train a copy for each plan. Each step is taken by all copies, one after the other, before the next one; where the memory
    does not suffice for all copies at once, one copy after the other.

    The order within a step turns around each time, so that none is always the first after a pause. The first plan is the one on
    which lost updates are measured.

    Args:
        task: What to train.
        plans: The copies.
        steps: How many steps, those of the warm-up included.
        runs: Gets what each did, by the name of its plan, while it goes on: what is there can be used after an interruption.
        tick: Called before each step with the name of the plan.

    Returns:
        Whether all were trained side by side.

    Raises:
        AmpUsageError: ``loss_fn`` returned no loss.
        CannotCopyError: As :func:`~amp_wrapper.diagnostics.sandbox.sandbox`.
    """
    if fit_together(task.model, len(plans)):
        try:
            _train(task, plans, steps, runs, tick, plans[0])
            return True
        except (torch.OutOfMemoryError, MemoryError):
            for plan in plans:
                runs.pop(plan.name, None)
            _tidy(task.model)
    for plan in plans:
        try:
            _train(task, [plan], steps, runs, tick, plans[0])
        except (torch.OutOfMemoryError, MemoryError):
            runs[plan.name].problem = 'there is not enough memory'
        _tidy(task.model)
    return False


def _tidy(model: nn.Module) -> None:
    gc.collect()
    if module_device(model).type == 'cuda':
        torch.cuda.empty_cache()


def _train(
    task: Task,
    plans: Sequence[Plan],
    steps: int,
    runs: dict[str, LevelRun],
    tick: Callable[[str], None],
    reference: Plan,
) -> None:
    with ExitStack() as stack:
        stack.enter_context(isolated())
        lanes = []
        for plan in plans:
            run = runs[plan.name] = LevelRun(plan.name)
            lane = _open(stack, task, plan, run, plan is reference)
            if lane is not None:
                lanes.append(lane)
        for step in range(steps):
            for lane in lanes if step % 2 == 0 else lanes[::-1]:
                if not lane.run.problem:
                    tick(lane.run.name)
                    _guarded(lane, partial(_Lane.advance, lane, step, steps))
        for each in lanes:
            if not each.run.problem:
                _guarded(each, each.check)


def _open(stack: ExitStack, task: Task, plan: Plan, run: LevelRun, is_reference: bool) -> _Lane | None:
    device = module_device(task.model)
    before = torch.cuda.memory_allocated(device) if device.type == 'cuda' else 0
    try:
        box = stack.enter_context(sandbox(task.model, plan.policy, task.make_optimizer, task.attach))
    except (AmpAttachError, AmpConfigError) as error:
        run.problem = str(error)
        return None
    ensure_training(box.model)
    lane = _Lane(task, plan, box, run, is_reference)
    if device.type == 'cuda':
        lane.note_resident(torch.cuda.memory_allocated(device) - before)
    return lane


def ensure_training(model: nn.Module) -> None:
    """A model that was left in evaluation is trained; one that is in training keeps the modules that are not."""
    if not model.training:
        model.train()


def _guarded(lane: _Lane, work: Callable[[], None]) -> None:
    """An op that a type does not have, say, ends this copy alone. FP32 is the user's own code: its errors are theirs."""
    try:
        work()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        # whatever the model does at this level
        if not lane.runs_16_bit:
            raise
        lane.run.problem = first_line(error)


def first_line(error: BaseException) -> str:
    """An error in one line."""
    text = str(error).strip().splitlines()
    return f'{type(error).__name__}: {text[0][:200] if text else ""}'
