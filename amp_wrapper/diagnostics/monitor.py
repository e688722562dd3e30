"""Numbers of a training that say how well its types fit: computed on the device every so many steps, and read late."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..casting import fp32_values
from ..engine.engine import Engine, StepObserver
from ..engine.flags import STREAK, StepResult
from ..policy import Policy, dtype_name
from ..policy.nested import HALF_TYPES
from ..shards import is_sharded, local, rank
from .ranges import BINS, NONFINITE, ZERO, Ranges, count_on_device, range_of
from .records import LateRecords

#: How many elements of masters are copied at most, to see what a step does to them.
SAMPLE = 2**22
#: Rows are as long as the infos of steps, so that both are copied to the host together.
_ROW = STREAK + 1


def low_precision(policy: Policy) -> torch.dtype | None:
    """The 16-bit type that a level computes in; None at O0."""
    if not policy.enabled:
        return None
    dtype = policy.cast_model_type if policy.casts_model else policy.autocast_dtype
    return dtype if dtype in HALF_TYPES else None


class Monitor(StepObserver):
    """Measures some of the steps of one engine, on the device: one list op over gradients and weights, and some small ones.

    The device is not read. At levels without a 16-bit type (O0, ``enabled=False``) nothing is measured.

    Args:
        interval: Steps from one measurement to the next: the first one, so that short trainings have numbers, and each
            ``interval``-th is measured. None measures nothing.
        ranges_interval: The same for measurements per layer, at steps that are measured; None for none.
        take: Is given each row on the first rank, a float32 vector on the device that begins with
            :data:`.measured_numbers.NUMBERS`; NaN stands for "nothing this time".
        ranges: Is given the ranges per layer on the first rank.

    Attributes:
        iteration: The present one, counted from 1.
        interval: As given.
    """

    def __init__(
        self,
        interval: int | None,
        ranges_interval: int | None,
        take: Callable[[Tensor], object],
        ranges: LateRecords | None = None,
    ) -> None:
        self.iteration = 0
        self.interval, self._ranges_interval = interval, ranges_interval
        self._take, self._ranges = take, ranges
        # where parameters are sharded, all ranks measure
        self._is_first = rank() == 0
        # whether the next step is measured, and per layer too
        self._due = False, False
        self._row: list[Tensor] | None = None
        self._before: list[Tensor] = []
        # the counters of steps at the last measurement
        self._window_start: Tensor | None = None

    def begin(self, iteration: int) -> None:
        """Say which iteration comes. While gradients are accumulated, the next step that is taken is measured.

        Args:
            iteration: Counted from 1.
        """

        def is_due(interval: int | None) -> bool:
            return interval is not None and (iteration == 1 or iteration % interval == 0)

        self.iteration = iteration
        if is_due(self.interval):
            self._due = True, is_due(self._ranges_interval) or self._due[1]

    def state(self) -> list[int] | None:
        """Give what a resumed training needs to have the same numbers; None before the first step. Syncs.

        Returns:
            Five whole numbers.
        """
        return None if self._window_start is None else [*self._window_start.tolist(), *map(int, self._due)]

    def resume(self, state: Sequence[int], like: Tensor) -> None:
        """Go on as :meth:`state` says.

        Args:
            state: Five whole numbers.
            like: Counters of steps, of the type and on the device that these have.
        """
        *start, measured, layers = state
        self._window_start = torch.tensor(start, dtype=like.dtype, device=like.device)
        self._due = bool(measured), bool(layers)

    # -- the steps of an engine --------------------------------------------------------------------------------------

    @torch.no_grad()
    def before_step(self, engine: Engine) -> None:
        """Measure gradients and weights, where the step is due."""
        self._row = None
        dtype = low_precision(engine.policy)
        if dtype is None:
            return
        if self._window_start is None:
            self._window_start = engine.scales.steps.counts.clone()
        (measured, layers), self._due = self._due, (False, False)
        if measured and (self._is_first or engine.params.layout.groups):
            self._row = self._measure(engine, dtype, layers)
            self._before = _masters_of(engine)

    @torch.no_grad()
    def after_step(self, engine: Engine, result: StepResult) -> None:
        """See what the step did, where it is measured."""
        row, self._row = self._row, None
        if row is None:
            return
        before, self._before = self._before, []
        dtype = low_precision(engine.policy)
        assert dtype is not None
        lost = _lost_updates(before, _masters_of(engine), dtype, engine.device)
        start, self._window_start = self._window_start, engine.scales.steps.counts.clone()
        assert start is not None
        steps = (self._window_start - start.to(self._window_start.device)).float()
        # where non-finite steps are not looked for, none is skipped
        is_known = (steps[0] > 0) & engine.scales.check
        rate = torch.where(is_known, steps[1] / steps[0].clamp(min=1), torch.nan)
        # of nothing but zeros, there is no power of two
        numbers = [
            torch.where(number.isfinite(), number, torch.nan) for number in (rate.to(engine.device), *row, *lost)
        ]
        filled = torch.full((_ROW,), torch.nan, dtype=torch.float32, device=engine.device)
        filled[: len(numbers)] = torch.stack([number.float() for number in numbers])
        if self._is_first:
            self._take(filled)

    # -- measuring ---------------------------------------------------------------------------------------------------

    def _measure(self, engine: Engine, dtype: torch.dtype, layers: bool) -> list[Tensor]:
        found = [
            each
            for each in engine.gradients_at_hand()
            # FP32 weights of a cast model have FP32 gradients, which are in no danger; shards are FP32, and gathered in 16-bit
            if (each[1].dtype in HALF_TYPES or not engine.policy.casts_model or is_sharded(each[1]))
            and not each[2].is_sparse
        ]
        nothing = torch.full((), torch.nan, dtype=torch.float32, device=engine.device)
        if not found or len({grad.device for _, _, grad, _ in found}) > 1:
            return [nothing] * 4
        gradients = local([grad for _, _, grad, _ in found])
        weights = local([weight.detach() for _, weight, _, _ in found])
        counts, largest = count_on_device([*gradients, *weights])
        half, unscaled = len(found), found[0][3]
        scale = engine.scales.first.current_scale.to(counts.device)
        if layers and self._is_first and self._ranges is not None:
            names = [name for name, *_ in found]
            # doubles hold counts and float32 numbers exactly
            numbers = torch.cat([counts.double(), largest.double().unsqueeze(1)], dim=1).flatten()
            numbers = torch.cat([scale.double().reshape(1), numbers])
            self._ranges.add(self.iteration, numbers, partial(_plain_ranges, names, dtype, unscaled))
        totals = engine.params.layout.exchange(counts[:half].sum(0).double())
        peaks = torch.stack([largest[:half].max(), largest[half:].max()]).double()
        peaks = engine.params.layout.exchange(peaks, greatest=True)
        known = range_of(dtype)
        # elements keep their place above zero when the loss scale is taken out: it is the limits that move
        shift = torch.log2(scale).double() if unscaled else torch.zeros((), dtype=torch.float64, device=counts.device)
        powers = torch.arange(BINS, device=counts.device) - 127 + shift
        is_number = torch.arange(BINS, device=counts.device) < NONFINITE
        under = totals[ZERO] + totals[is_number & (powers < known.bottom - 1)].sum()
        tiny = totals[is_number & (powers >= known.bottom) & (powers < known.bottom + 2)].sum()
        elements = totals.sum().clamp(min=1)
        below = torch.log2(peaks / known.largest)
        return [under / elements, tiny / elements, below[0] + shift, below[1]]


def _plain_ranges(names: Sequence[str], dtype: torch.dtype, unscaled: bool, numbers: Sequence[float]) -> dict[str, Any]:
    """Make plain data of the counts per layer.

    Args:
        names: Of the weights.
        dtype: The 16-bit type of the level.
        unscaled: Whether gradients are without the loss scale.
        numbers: The loss scale; then the counts and the largest number of each gradient, and of each weight.

    Returns:
        ``dtype``, ``loss_scale``, ``without_scale``, and ``gradients`` and ``weights`` by the name of the weight, as
        :meth:`Ranges.plain` gives them.
    """
    rows = [numbers[start : start + BINS + 1] for start in range(1, len(numbers), BINS + 1)]
    found = [Ranges(tuple(map(int, row[:BINS])), row[BINS]).plain() for row in rows]
    return {
        'dtype': dtype_name(dtype),
        'loss_scale': numbers[0],
        'without_scale': unscaled,
        'gradients': dict(zip(names, found)),
        'weights': dict(zip(names, found[len(names) :])),
    }


def _masters_of(engine: Engine) -> list[Tensor]:
    """Copies of the FP32 values of 16-bit weights; of large models, of a part of the elements."""
    if not engine.policy.casts_model:
        return []
    # shards are their own FP32 values
    weights = [w for w in engine.weights() if w.requires_grad and (is_sharded(w) or fp32_values.pair_of(w) is not None)]
    found = local([w.detach() if is_sharded(w) else fp32_values.fp32_value(w) for w in weights])
    elements = sum(value.numel() for value in found)
    if not elements:
        return []
    step = math.ceil(elements / SAMPLE)
    return [value.reshape(-1)[::step].clone() for value in found]


def _lost_updates(
    before: Sequence[Tensor], after: Sequence[Tensor], dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """The share of updates that are lost where 16-bit weights are updated, and the mean update in their spacing.

    An update is lost where the rounded weight plus the update, rounded, is the rounded weight again.
    """
    nothing = torch.full((), torch.nan, dtype=torch.float32, device=device)
    if not before or len(before) != len(after):
        return [nothing, nothing]
    old, new = torch.cat([value.to(device) for value in before]), torch.cat([value.to(device) for value in after])
    update = new - old
    rounded = old.to(dtype)
    moved = update != 0
    lost = moved & ((rounded.float() + update).to(dtype) == rounded)
    known, digits = range_of(dtype), range_of(dtype).normal - range_of(dtype).bottom
    # the exponent of frexp is one above that of the leading digit
    power = (torch.frexp(rounded.float()).exponent - 1).clamp(min=known.normal).float()
    sizes = update.abs() / torch.exp2(power - digits)
    count = moved.sum()
    share = lost.sum() / count
    mean = torch.where(moved & sizes.isfinite(), sizes, 0).sum() / count
    return [share, mean]
