"""What the runs of the benchmark of fidelity say about a level: mean, spread, distance from FP32 by pairs of one seed."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from .fidelity_tasks import FIRST, REFERENCE

#: A mean that is further from that of O0, in standard errors of the difference, is explained.
LIMIT = 2.0


@dataclasses.dataclass(frozen=True)
class Level:
    """The runs of one task at one level.

    Attributes:
        task: Name of the task.
        variant: Level, or stock autocast.
        values: The last metric of each seed, where it is finite.
        runs: How many there are.
        differences: Of the metric from O0 with the same seed.
        deviation: The largest relative distance of the loss from that of O0 in the first steps, over all seeds; infinite where
            the loss of a step was not finite.
        last: Mean of the loss over the last tenth of the steps.
        skipped: Skipped steps of a run, in the mean.
        scales: Loss scale at the end of each run.
    """

    task: str
    variant: str
    values: tuple[float, ...]
    runs: int
    differences: tuple[float, ...]
    deviation: float
    last: float
    skipped: float
    scales: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Of the metric."""
        return statistics.fmean(self.values) if self.values else math.nan

    @property
    def spread(self) -> float:
        """Standard deviation of the metric over the seeds."""
        return statistics.stdev(self.values) if len(self.values) > 1 else math.nan

    @property
    def difference(self) -> float:
        """Mean difference from O0."""
        return statistics.fmean(self.differences) if self.differences else math.nan

    @property
    def error(self) -> float:
        """Standard error of :attr:`difference`."""
        if len(self.differences) < 2:
            return math.nan
        return statistics.stdev(self.differences) / math.sqrt(len(self.differences))

    @property
    def is_far(self) -> bool:
        """Whether it is more than :data:`LIMIT` standard errors from O0, or a run ended without a finite metric."""
        if self.variant == REFERENCE:
            return False
        return len(self.values) < self.runs or abs(self.difference) > LIMIT * self.error


def levels_of(records: Sequence[Mapping[str, Any]], task: str) -> list[Level]:
    """One for each variant that has runs, in the order of the records' variants.

    Args:
        records: Of runs.
        task: Name of the task.
    """
    mine = [record for record in records if record['task'] == task]
    base = {record['seed']: record for record in mine if record['variant'] == REFERENCE}
    return [
        _level(task, variant, [record for record in mine if record['variant'] == variant], base)
        for variant in dict.fromkeys(record['variant'] for record in mine)
    ]


def _level(task: str, variant: str, runs: Sequence[Mapping[str, Any]], base: Mapping[int, Mapping[str, Any]]) -> Level:
    pairs = [(run, base[run['seed']]) for run in runs if run['seed'] in base]
    differences = [
        run['metric'] - other['metric'] for run, other in pairs if None not in (run['metric'], other['metric'])
    ]
    return Level(
        task=task,
        variant=variant,
        values=tuple(run['metric'] for run in runs if run['metric'] is not None),
        runs=len(runs),
        differences=tuple(differences),
        deviation=max((_deviation(run['first'], other['first']) for run, other in pairs), default=math.nan),
        last=statistics.fmean(_last(run['curve']) for run in runs),
        skipped=statistics.fmean(run['skipped'] for run in runs),
        scales=tuple(run['scale at the end'] for run in runs),
    )


def _deviation(losses: Sequence[float | None], others: Sequence[float | None]) -> float:
    found = [
        math.inf if a is None or b is None else abs(a - b) / abs(b) for a, b in zip(losses[:FIRST], others[:FIRST])
    ]
    return max(found, default=math.nan)


def _last(curve: Sequence[float | None]) -> float:
    part = curve[-max(1, len(curve) // 10) :]
    return math.nan if None in part else statistics.fmean(value for value in part if value is not None)
