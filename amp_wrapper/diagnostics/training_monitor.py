"""Watches the steps of an optimizer, for ``amp.monitor`` and for ``AmpMonitorHook``: numbers, ranges per layer, and reports."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..engine.engine import Engine, StepObserver
from ..engine.flags import StepResult
from ..errors import AmpConfigError
from ..policy.options import Option, is_count, is_whole
from ..shards import rank
from .diagnosis import Diagnosis
from .diagnosis_page import publish
from .measured_numbers import NUMBERS
from .monitor import Monitor, low_precision
from .overflow import MOST_REPORTS, OverflowDiagnosis
from .records import LateRecords, Taker
from .sandbox import Attach

_STEPS = Option(None, (is_count, None), 'a whole number of steps, at least 1')
_OPTIONS = {
    'interval': _STEPS,
    'ranges_interval': _STEPS,
    # versions up to 0.2 had 'after_skip'
    'diagnose_overflow': Option(True, (True, False, 'after_skip'), 'True or False'),
    'max_reports': Option(MOST_REPORTS, (is_whole,), 'a whole number of reports, 0 for none'),
}


@dataclasses.dataclass(frozen=True)
class MonitorOptions:
    """What ``amp.monitor`` and ``AmpMonitorHook`` take alike; see there."""

    interval: int | None
    ranges_interval: int | None
    diagnose_overflow: bool | str
    max_reports: int

    @classmethod
    def read(cls, **given: Any) -> MonitorOptions:
        """Check the options.

        Raises:
            AmpConfigError: All that are wrong, in one message.
        """
        problems: list[str] = []
        read = {name: option.read(name, given[name], problems) for name, option in _OPTIONS.items()}
        if problems:
            raise AmpConfigError(problems)
        return cls(**read)


class TrainingMonitor(StepObserver):
    """Measures some steps of an optimizer, and examines those that are skipped; made by :func:`amp_wrapper.amp.monitor`.

    Args:
        options: When.
        folder: Of the files with numbers; None writes none.
        reports: Folder in which ``amp_diagnosis`` has the reports; None writes none.
        name: Of the optimizer, for the names of files, where there are several.
        take: Is given the numbers of each step that is measured, as :class:`Monitor` gives them. By default they go to
            ``amp_monitor.jsonl`` and ``log``, with ``amp_scale`` and ``amp_skipped``.
        log: Called with the step and the numbers by name.

    Attributes:
        diagnoses: What was found out about skipped steps.
    """

    def __init__(
        self,
        options: MonitorOptions,
        folder: Path | None,
        reports: Path | None,
        name: str = '',
        take: Callable[[Tensor], object] | None = None,
        log: Taker | None = None,
    ) -> None:
        self.diagnoses: list[Diagnosis] = []
        self._options, self._reports, self._name = options, reports, name
        self._rows = LateRecords(folder and folder / 'amp_monitor.jsonl', log)
        self._ranges = LateRecords(folder and folder / f'{name}_amp_ranges.jsonl'.removeprefix('_'))
        interval = options.interval or options.ranges_interval
        ranges_interval = None if folder is None else options.ranges_interval
        self.numbers = Monitor(interval, ranges_interval, take or self._add_row, self._ranges)
        self._facts: dict[str, Any] = {}
        self._engine: Engine | None = None
        self._diagnosis: OverflowDiagnosis | None = None

    def watch(
        self,
        engine: Engine,
        models: Sequence[nn.Module],
        attach: Attach,
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Begin to watch.

        Args:
            engine: Of the optimizer.
            models: Those whose parameters it steps, not wrapped.
            attach: Attaches copies of them, as for :class:`OverflowDiagnosis`.
            around: As for :class:`OverflowDiagnosis`.
        """
        self._engine = engine
        if self.numbers.interval is not None and low_precision(engine.policy) is not None:
            engine.observers.append(self.numbers)
        if self._options.diagnose_overflow and engine.scales.check and models:
            self._diagnosis = OverflowDiagnosis(
                models, attach, partial(self._publish, engine), self._options.max_reports, around
            )
            engine.observers.append(self._diagnosis)

    def begin(self, iteration: int, **facts: Any) -> None:
        """Say which iteration comes.

        Args:
            iteration: Counted from 1.
            **facts: What else belongs to a report.
        """
        self.numbers.begin(iteration)
        self._facts = facts

    def hand_on(self, wait: bool = False) -> None:
        """Hand on what has reached the host.

        Args:
            wait: Whether to wait for the rest. Syncs.
        """
        self._rows.hand_on(wait)
        self._ranges.hand_on(wait)

    def read(self) -> dict[str, float]:
        """The numbers of the last measured step, by name; empty before the first. Syncs, where they are on their way."""
        self.hand_on(wait=True)
        return dict(self._rows.latest)

    def close(self) -> None:
        """Write what is left, and watch no longer. Syncs."""
        self.hand_on(wait=True)
        # they hold the model
        diagnosis, engine = self._diagnosis, self._engine
        self._diagnosis = self._engine = None
        if diagnosis is not None:
            diagnosis.disarm()
        if engine is not None:
            # the list may be in use: a log function may close
            mine = (self, self.numbers, diagnosis)
            engine.observers = [each for each in engine.observers if each not in mine]

    def __enter__(self) -> TrainingMonitor:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # -- where nobody else says which iteration it is, it is an observer itself --------------------------------------

    def before_step(self, engine: Engine) -> None:
        """Count it."""
        self.begin(self.numbers.iteration + 1)

    def after_step(self, engine: Engine, result: StepResult) -> None:
        """Hand on what has reached the host."""
        self.hand_on()

    # -- what was found ----------------------------------------------------------------------------------------------

    def _add_row(self, row: Tensor) -> None:
        assert self._engine is not None
        scales = self._engine.scales
        more = torch.stack([scales.first.current_scale.double(), scales.steps.counts[1].double()])
        self._rows.add(self.numbers.iteration, torch.cat([row[: len(NUMBERS)].double(), more.to(row.device)]), _by_name)

    def _publish(self, engine: Engine, found: Diagnosis) -> str:
        self.diagnoses.append(found)
        at, iteration = rank(), self.numbers.iteration
        # one report without a cause is enough
        if self._reports is None or (at and found.cause == 'other_rank'):
            return ''
        stem = '_'.join(filter(None, (f'iter_{iteration}', self._name, f'rank{at}' if at else '')))
        facts = {'iteration': iteration, **self._facts, 'rank': at}
        if self._name:
            facts['optimizer'] = self._name
        return publish(found, self._reports / 'amp_diagnosis', stem, facts, low_precision(engine.policy))


def _by_name(numbers: Sequence[float]) -> dict[str, float]:
    values = zip((*NUMBERS, 'amp_scale', 'amp_skipped'), numbers)
    return {name: value for name, value in values if value == value}
