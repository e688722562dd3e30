"""``amp.monitor`` and what a script may ask of an initialised optimizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import nn
from torch.optim import Optimizer

from ..diagnostics.overflow import MOST_REPORTS
from ..diagnostics.training_monitor import MonitorOptions, TrainingMonitor
from ..engine import Engine, attach_together
from ..errors import AmpConfigError
from .registry import registry


def monitor(
    optimizer: Optimizer,
    interval: int | None = 50,
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
            None is that of ``ranges_interval``.
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
    options = MonitorOptions.read(
        interval=interval, ranges_interval=ranges_interval, diagnose_overflow=diagnose_overflow, max_reports=max_reports
    )
    if log is not None and not callable(log):
        raise AmpConfigError([f'log={log!r} must be a function of a step and a dict of numbers.'])
    engines, session = registry.engines_of(optimizer), registry.session_of(optimizer)
    place = None if folder is None else Path(folder)
    watch = TrainingMonitor(options, place, place, log=log)
    if session is not None:
        engine, models = engines[0], [root for _, root in session.casts.roots]

        def attach(engine: Engine, copied: nn.Module) -> None:
            attach_together([engine], [copied] if len(models) == 1 else list(copied.children()), engine.policy)

        # it counts the steps by itself
        engine.observers.append(watch)
        watch.watch(engine, models, attach)
    return watch


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
    engines = registry.engines_of(optimizer)
    return engines[0].scales.of(loss_id).get_scale() if engines else 1.0


def skipped_steps(optimizer: Optimizer) -> int:
    """How many steps of an optimizer were skipped, those of a run that was resumed among them. Syncs.

    Args:
        optimizer: An initialised one.

    Raises:
        AmpUsageError: An optimizer that was not initialised.
    """
    return sum(int(engine.scales.steps.counts[1]) for engine in registry.engines_of(optimizer))


def last_step_skipped(optimizer: Optimizer) -> bool:
    """Whether the last step of an optimizer was skipped; False before the first. Syncs.

    Args:
        optimizer: An initialised one.

    Raises:
        AmpUsageError: An optimizer that was not initialised.
    """
    # skips in a row up to now
    return any(int(engine.scales.steps.counts[2]) > 0 for engine in registry.engines_of(optimizer))
