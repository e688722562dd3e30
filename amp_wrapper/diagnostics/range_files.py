"""Reads the ranges per layer that ``AmpMonitorHook`` and ``amp.monitor`` write: ``amp_ranges.jsonl``."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..errors import AmpUsageError
from .log_files import ranges_files
from .log_rows import json_rows

#: What is counted per layer.
KINDS = ('gradients', 'weights')


@dataclasses.dataclass(frozen=True)
class Counts:
    """How many elements of a tensor, or of several, lie between each two powers of two.

    Attributes:
        elements: All of them.
        zeros: Those that are zero.
        nonfinite: Infinities and NaN.
        powers: Power of two to the elements from it up to the next one.
    """

    elements: int
    zeros: int
    nonfinite: int
    powers: Mapping[int, int]

    def median(self) -> int | None:
        """The power of two of the median of the finite elements that are not zero; None where there is none."""
        half, seen = sum(self.powers.values()) / 2, 0
        for power in sorted(self.powers):
            seen += self.powers[power]
            if seen >= half and seen:
                return power
        return None


@dataclasses.dataclass(frozen=True)
class StepRanges:
    """The ranges of one training step.

    Attributes:
        iteration: Its number.
        dtype: 'float16' or 'bfloat16'.
        loss_scale: Of this step.
        gradients: By the name of the weight, with the loss scale in them.
        weights: By name.
    """

    iteration: int
    dtype: str
    loss_scale: float
    gradients: Mapping[str, Counts]
    weights: Mapping[str, Counts]


def read_ranges(path: str | os.PathLike[str], member: str = '') -> list[StepRanges]:
    """The measurements of a training, in the order of its iterations.

    Gradients that were measured without the loss scale get it back, rounded to a power of two: it is what the 16-bit type
    sees.

    Args:
        path: A file ``amp_ranges.jsonl``, or a log beside it: what
            :func:`amp_wrapper.diagnostics.log_files.read_run` takes.
        member: Of an ``OptimWrapperDict``.

    Raises:
        AmpUsageError: There is no such file, or no complete line in it.
    """
    found: list[StepRanges] = []
    files = ranges_files(path, member)
    for file in files:
        try:
            for step in map(_step, json_rows(file)):
                if step is not None:
                    # a resumed training measures again what came after its checkpoint
                    while found and found[-1].iteration >= step.iteration:
                        found.pop()
                    found.append(step)
        except OSError as error:
            raise AmpUsageError(f'{str(file)!r} cannot be read: {error.strerror or error}.') from error
    if not found:
        raise AmpUsageError(
            f'{str(files[0])!r} has no line with "iteration", "gradients" and "weights", as AmpMonitorHook and amp.monitor '
            'write it.'
        )
    return found


def added(counts: Iterable[Counts]) -> Counts:
    """Those of several tensors together."""
    powers: dict[int, int] = {}
    elements = zeros = nonfinite = 0
    for each in counts:
        elements, zeros, nonfinite = elements + each.elements, zeros + each.zeros, nonfinite + each.nonfinite
        for power, count in each.powers.items():
            powers[power] = powers.get(power, 0) + count
    return Counts(elements, zeros, nonfinite, powers)


def layers_of(steps: Sequence[StepRanges], kind: str) -> list[str]:
    """The names of the weights, in the order of the model.

    Args:
        steps: Measurements.
        kind: One of :data:`KINDS`.
    """
    return list(dict.fromkeys(name for step in steps for name in getattr(step, kind)))


def _step(row: Mapping[str, Any]) -> StepRanges | None:
    """A line as a measurement; None of one that is no such."""
    try:
        scale = float(row.get('loss_scale') or 1.0)
        # a product with a power of two moves each element by as many places
        shift = round(math.log2(scale)) if row.get('without_scale') and scale > 0 else 0
        return StepRanges(
            int(row['iteration']),
            str(row.get('dtype', 'float16')).removeprefix('torch.'),
            scale,
            {str(name): _counts(counts, shift) for name, counts in row['gradients'].items()},
            {str(name): _counts(counts, 0) for name, counts in row['weights'].items()},
        )
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        # damaged
        return None


def _counts(row: Mapping[str, Any], shift: int) -> Counts:
    powers = {int(power) + shift: int(count) for power, count in row['powers'].items()}
    return Counts(int(row['elements']), int(row['zeros']), int(row['nonfinite']), powers)
