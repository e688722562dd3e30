"""``amp.monitor`` and what a script may ask of an initialised optimizer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.optim import Optimizer

from ..diagnostics.diagnosis import Diagnosis
from ..diagnostics.diagnosis_page import publish
from ..diagnostics.measured_numbers import NUMBERS
from ..diagnostics.monitor import LayerRanges, Monitor, check_interval, is_due, low_precision
from ..diagnostics.overflow import MOST_REPORTS, OverflowDiagnosis, check_mode, check_reports
from ..diagnostics.records import JsonLines
from ..diagnostics.sandbox import attach_whole
from ..engine import attach_together
from ..engine.engine import Engine, StepObserver
from ..engine.flags import StepResult
from ..engine.host_read import LateRead
from ..errors import AmpConfigError
from . import session as amp_session

logger = logging.getLogger('amp_wrapper')
#: What :meth:`TrainingMonitor.read` gives, and the files hold, beside the numbers of a measurement.
_MORE = ('amp_scale', 'amp_skipped')


class TrainingMonitor(StepObserver):
    """Measures one step in every ``interval`` of an optimizer, and examines those that are skipped; made by :func:`monitor`.

    Attributes:
        diagnoses: What was found out about skipped steps.
    """

    def __init__(
        self,
        engine: Engine,
        models: list[nn.Module],
        interval: int,
        ranges_interval: int | None,
        folder: Path | None,
        log: Callable[[int, dict[str, float]], object] | None,
        diagnoses: bool,
        max_reports: int,
    ) -> None:
        self.diagnoses: list[Diagnosis] = []
        self._engine = engine
        self._interval, self._ranges_interval = interval, ranges_interval
        self._folder, self._log = folder, log
        self._log_failed = False
        self._steps = 0
        self._latest: dict[str, float] = {}
        self._rows: list[tuple[int, LateRead]] = []
        self._layers: list[tuple[int, LayerRanges]] = []
        first = not torch.distributed.is_available() or not torch.distributed.is_initialized()
        self._writes = first or torch.distributed.get_rank() == 0
        self._numbers = None if folder is None else JsonLines(folder / 'amp_monitor.jsonl')
        self._ranges = None if folder is None else JsonLines(folder / 'amp_ranges.jsonl')
        wants_layers = self._take_layers if folder is not None and ranges_interval is not None else None
        self._observers: list[Any] = [self]
        if low_precision(engine.policy) is not None:
            self._observers.append(Monitor(self._is_due, self._take, wants_layers, self._writes))
        self._diagnosis: OverflowDiagnosis | None = None
        if diagnoses and engine.scales.check and models:
            attach = attach_whole if len(models) == 1 else _attach_each
            self._diagnosis = OverflowDiagnosis(models, attach, self._publish, max_reports)
            self._observers.append(self._diagnosis)
        engine.observers += self._observers

    # -- what a script calls -----------------------------------------------------------------------------------------

    def read(self) -> dict[str, float]:
        """The numbers of the last measured step, by name; empty before the first. Syncs, where they are on their way."""
        self._collect(wait=True)
        return dict(self._latest)

    def close(self) -> None:
        """Write what is left, and watch no longer. Syncs."""
        self._collect(wait=True)
        if self._diagnosis is not None:
            self._diagnosis.disarm()
        for observer in self._observers:
            if observer in self._engine.observers:
                self._engine.observers.remove(observer)

    def __enter__(self) -> TrainingMonitor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- the steps of the engine -------------------------------------------------------------------------------------

    def before_step(self, engine: Engine) -> None:
        """Count it."""
        self._steps += 1

    def after_step(self, engine: Engine, result: StepResult) -> None:
        """Hand on what has reached the host."""
        self._collect(wait=False)

    def _is_due(self) -> tuple[bool, bool]:
        ranges = self._ranges_interval
        return is_due(self._steps, self._interval), ranges is not None and is_due(self._steps, ranges)

    def _take(self, row: Tensor) -> None:
        if self._writes:
            scales = self._engine.scales
            more = torch.stack([scales.first.current_scale.double(), scales.steps.counts[1].double()])
            self._rows.append((self._steps, LateRead(torch.cat([row[: len(NUMBERS)].double(), more.to(row.device)]))))

    def _take_layers(self, ranges: LayerRanges) -> None:
        if self._writes:
            self._layers.append((self._steps, ranges))

    def _collect(self, wait: bool) -> None:
        while self._rows and (wait or self._rows[0][1].is_there):
            step, read = self._rows.pop(0)
            found = dict(zip((*NUMBERS, *_MORE), read.wait()))
            self._latest = {name: value for name, value in found.items() if value == value}
            if self._numbers is not None:
                self._numbers.append({'iteration': step, **self._latest})
            if self._log is not None:
                self._tell(self._log, step)
        while self._layers and (wait or self._layers[0][1].is_there):
            step, ranges = self._layers.pop(0)
            assert self._ranges is not None
            self._ranges.append({'iteration': step, **ranges.plain()})

    def _tell(self, log: Callable[[int, dict[str, float]], object], step: int) -> None:
        try:
            log(step, dict(self._latest))
        except Exception as error:
            # functions are those of others: a training does not end because of what is told about it
            if not self._log_failed:
                name = f'{type(error).__name__}: {" ".join(str(error).split())}'
                logger.warning(f'amp: log= of amp.monitor failed at step {step} ({name}). The training goes on.')
            self._log_failed = True

    def _publish(self, found: Diagnosis) -> str:
        self.diagnoses.append(found)
        if self._folder is None:
            return ''
        rank = 0
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            rank = torch.distributed.get_rank()
        if rank and found.cause == 'other_rank':
            return ''
        stem = f'iter_{self._steps}' + (f'_rank{rank}' if rank else '')
        facts = {'iteration': self._steps, 'rank': rank}
        return publish(found, self._folder / 'amp_diagnosis', stem, facts, low_precision(self._engine.policy))


def monitor(
    optimizer: Optimizer,
    interval: int = 50,
    *,
    folder: str | Path | None = None,
    log: Callable[[int, dict[str, float]], object] | None = None,
    ranges_interval: int | None = 500,
    diagnose_overflow: bool = True,
    max_reports: int = MOST_REPORTS,
) -> TrainingMonitor:
    """Watch how well the types of a training fit, and why steps are skipped.

    The numbers are those of :data:`amp_wrapper.diagnostics.measured_numbers.MEANINGS`, ``amp_scale`` and ``amp_skipped``.
    They are computed on the device, and handed on when they have reached the host, without waiting for it.

    ```python
    model, optimizer = amp.initialize(model, optimizer, opt_level='O2')
    watch = amp.monitor(optimizer, folder='runs/1', log=lambda step, numbers: writer.add_scalars('amp', numbers, step))
    ```

    Args:
        optimizer: An initialised one; with ``enabled=False`` nothing is watched.
        interval: Steps from one measurement to the next: steps 1, ``interval``, 2 * ``interval`` and so on are measured.
        folder: Where ``amp_monitor.jsonl``, ``amp_ranges.jsonl`` and the reports in ``amp_diagnosis/`` are written; None writes
            nothing.
        log: Called with the step, counted from 1, and the numbers by name. Where it raises, a warning says so once.
        ranges_interval: The same for measurements per layer, for ``amp_ranges.jsonl``, at steps that are measured; None for
            none.
        diagnose_overflow: Whether skipped steps are examined, the first one on. For that, each step keeps references to its
            inputs, which takes a tenth of a millisecond or so. That a dynamic loss scale falls is not reported.
        max_reports: Reports of this training.

    Returns:
        An object with ``read()``, ``diagnoses`` and ``close()``; also a context manager.

    Raises:
        AmpUsageError: An optimizer that was not initialised.
        AmpConfigError: An interval that is no whole number above 0; another ``diagnose_overflow``; a ``max_reports`` that is no
            whole number; a ``log`` that cannot be called.
    """
    interval = check_interval('interval', interval)
    if ranges_interval is not None:
        ranges_interval = check_interval('ranges_interval', ranges_interval)
    diagnose_overflow = check_mode(diagnose_overflow)
    max_reports = check_reports(max_reports)
    if log is not None and not callable(log):
        raise AmpConfigError([f'log={log!r} must be a function of a step and a dict of numbers.'])
    engines = amp_session.engines_of(optimizer)
    if not engines:
        return _Off()
    session = amp_session.session_of(optimizer)
    assert session is not None
    return TrainingMonitor(
        engines[0],
        [root for _, root in session.casts.roots],
        interval,
        ranges_interval,
        None if folder is None else Path(folder),
        log,
        diagnose_overflow,
        max_reports,
    )


def _attach_each(engine: Engine, copied: nn.Module) -> None:
    """Attach the copies of several models that were initialised together."""
    attach_together([engine], list(copied.children()), engine.policy)


class _Off(TrainingMonitor):
    """Of an optimizer that was initialised with ``enabled=False``: there is nothing to watch."""

    def __init__(self) -> None:
        self.diagnoses = []

    def read(self) -> dict[str, float]:
        """Nothing was measured."""
        return {}

    def close(self) -> None:
        """There is nothing to end."""


def loss_scale(optimizer: Optimizer, loss_id: int = 0) -> float:
    """The present loss scale. Syncs where it is dynamic.

    Args:
        optimizer: An initialised one.
        loss_id: Which of the ``num_losses``.

    Returns:
        1.0 with ``enabled=False``.

    Raises:
        AmpUsageError: An optimizer that was not initialised; no such loss.
    """
    engine = _engine_of(optimizer)
    return 1.0 if engine is None else engine.scales.of(loss_id).get_scale()


def skipped_steps(optimizer: Optimizer) -> int:
    """How many steps of an optimizer were skipped, those of a run that was resumed among them. Syncs.

    Args:
        optimizer: An initialised one.

    Raises:
        AmpUsageError: An optimizer that was not initialised.
    """
    return _count(optimizer, 1)


def last_step_skipped(optimizer: Optimizer) -> bool:
    """Whether the last step of an optimizer was skipped; False before the first. Syncs.

    Args:
        optimizer: An initialised one.

    Raises:
        AmpUsageError: An optimizer that was not initialised.
    """
    # skips in a row up to now
    return _count(optimizer, 2) > 0


def _count(optimizer: Optimizer, place: int) -> int:
    """One of the counters of steps; 0 with ``enabled=False``."""
    engine = _engine_of(optimizer)
    return 0 if engine is None else int(engine.scales.steps.counts[place])


def _engine_of(optimizer: Optimizer) -> Engine | None:
    return next(iter(amp_session.engines_of(optimizer)), None)
