"""Numbers of a training that say how well its types fit: computed on the device every so many steps, and read late."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..casting import fp32_values
from ..engine.engine import Engine, StepObserver
from ..engine.flags import STREAK, StepResult
from ..engine.host_read import LateRead
from ..errors import AmpConfigError
from ..policy import Policy, dtype_name
from ..policy.nested import HALF_TYPES
from ..policy.options import is_count
from ..shards import is_sharded, local
from .measured_numbers import NUMBERS
from .ranges import BINS, NONFINITE, ZERO, Ranges, count_on_device, range_of

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


def is_due(step: int, interval: int) -> bool:
    """Whether a step is measured: the first one, so that short trainings have numbers, and each ``interval``-th.

    Args:
        step: Counted from 1.
        interval: Steps from one measurement to the next.
    """
    return step == 1 or step % interval == 0


def numbers_of(engine: Engine) -> tuple[str, ...]:
    """Those of :data:`NUMBERS` that there can be: 16-bit weights without FP32 values have none of updates, and where
    non-finite steps are not looked for, none is skipped."""
    # shards are FP32
    has_masters = engine.policy.casts_model and (engine.policy.master_weights or bool(engine.params.layout.groups))
    return tuple(
        name
        for name in NUMBERS
        if (has_masters or not name.startswith('amp_update')) and (engine.scales.check or name != 'amp_skip_rate')
    )


@dataclasses.dataclass(frozen=True)
class LayerRanges:
    """Ranges per layer at one step, on their way to the host.

    Attributes:
        names: Of the weights.
        dtype: The 16-bit type of the level.
    """

    names: tuple[str, ...]
    dtype: torch.dtype
    _read: LateRead
    _unscaled: bool

    @property
    def is_there(self) -> bool:
        """Whether :meth:`plain` returns without waiting for the device."""
        return self._read.is_there

    def plain(self) -> dict[str, Any]:
        """``dtype``, ``loss_scale``, ``without_scale`` (whether gradients are without the loss scale), and the ranges of
        ``gradients`` and ``weights`` by the name of the weight, as :meth:`Ranges.plain` gives them. Syncs, where not
        :attr:`is_there`."""
        scale, *numbers = self._read.wait()
        width, found = BINS + 1, []
        for start in range(0, len(numbers), width):
            row = numbers[start : start + width]
            found.append(Ranges(tuple(map(int, row[:BINS])), row[BINS]).plain())
        half = len(self.names)
        return {
            'dtype': dtype_name(self.dtype),
            'loss_scale': scale,
            'without_scale': self._unscaled,
            'gradients': dict(zip(self.names, found[:half])),
            'weights': dict(zip(self.names, found[half:])),
        }


class Monitor(StepObserver):
    """Measures some of the steps of one engine, on the device: one list op over gradients and weights, and some small ones.

    The device is not read. At levels without a 16-bit type (O0, ``enabled=False``) nothing is measured.

    Args:
        is_due: Asked before each step: whether to measure it, and whether per layer too.
        take: Is given each row, a float32 vector on the device whose first numbers are :data:`NUMBERS`; NaN stands for
            "nothing this time".
        take_layers: Is given the ranges per layer.
        is_wanted: Whether somebody reads the numbers on this rank. Where parameters are sharded, all ranks measure anyway.

    Attributes:
        window_start: The counters of steps at the last measurement, a tensor on the device; None before the first step. The
            share of skipped steps is that since then. A resumed training sets it.
    """

    def __init__(
        self,
        is_due: Callable[[], tuple[bool, bool]],
        take: Callable[[Tensor], None],
        take_layers: Callable[[LayerRanges], None] | None = None,
        is_wanted: bool = True,
    ) -> None:
        self._is_wanted = is_wanted
        self._is_due = is_due
        self._take = take
        self._take_layers = take_layers
        self._row: list[Tensor] | None = None
        self._before: list[Tensor] = []
        self.window_start: Tensor | None = None

    # -- the steps of an engine --------------------------------------------------------------------------------------

    @torch.no_grad()
    def before_step(self, engine: Engine) -> None:
        """Measure gradients and weights, where the step is due."""
        self._row = None
        dtype = low_precision(engine.policy)
        if dtype is None:
            return
        if self.window_start is None:
            self.window_start = engine.scales.steps.counts.clone()
        measured, layers = self._is_due()
        if measured and (self._is_wanted or engine.params.layout.groups):
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
        before_it, self.window_start = self.window_start, engine.scales.steps.counts.clone()
        assert before_it is not None
        steps = (self.window_start - before_it.to(self.window_start.device)).float()
        rate = torch.where(steps[0] > 0, steps[1] / steps[0].clamp(min=1), torch.nan)
        # of nothing but zeros, there is no power of two
        numbers = [
            torch.where(number.isfinite(), number, torch.nan) for number in (rate.to(engine.device), *row, *lost)
        ]
        filled = torch.full((_ROW,), torch.nan, dtype=torch.float32, device=engine.device)
        filled[: len(numbers)] = torch.stack([number.float() for number in numbers])
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
        if layers and self._take_layers is not None:
            self._send_layers([name for name, *_ in found], dtype, counts, largest, scale, unscaled)
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

    def _send_layers(
        self,
        names: Sequence[str],
        dtype: torch.dtype,
        counts: Tensor,
        largest: Tensor,
        scale: Tensor,
        unscaled: bool,
    ) -> None:
        assert self._take_layers is not None
        # doubles hold counts and float32 numbers exactly
        numbers = torch.cat([counts.double(), largest.double().unsqueeze(1)], dim=1).flatten()
        read = LateRead(torch.cat([scale.double().reshape(1), numbers]))
        self._take_layers(LayerRanges(tuple(names), dtype, read, unscaled))


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


def check_interval(name: str, value: Any) -> int:
    """A whole number of steps, one of NumPy too.

    Raises:
        AmpConfigError: Something else.
    """
    if not is_count(value):
        raise AmpConfigError([f'{name}={value!r} must be a whole number of steps, at least 1.'])
    return int(value)
