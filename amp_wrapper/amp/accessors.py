"""What a script asks of initialised optimizers: what they step, how that went, and their loss scales in apex's form."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..checkpoint.format import read_apex, write_apex
from ..diagnostics.watch import OPTIONS, Log, TrainingWatch, lines_to
from ..engine import Engine, attach_together
from ..errors import AmpCheckpointError, AmpConfigError, AmpUsageError, logger, short
from ..policy.nested import parameters_of
from ..policy.options import read_options
from .registry import Optimizers, registry


def master_params(optimizer: Optimizer) -> Iterator[Tensor]:
    """What an optimizer steps: FP32 masters, and parameters that are their own; of any optimizer, initialised or not.

    Their ``.grad`` is unscaled after :func:`scale_loss`: clip these.

    Args:
        optimizer: A torch optimizer.

    Yields:
        Parameters, in the order of the groups.

    Raises:
        AmpUsageError: No optimizer.
    """
    if not hasattr(optimizer, 'param_groups'):
        raise AmpUsageError(f'optimizer={short(optimizer)} must be a torch optimizer, not {type(optimizer).__name__}.')
    session = registry.session_of(optimizer)
    yield from parameters_of(optimizer) if session is None else session.engine(optimizer).master_params()


def weights_changed(optimizer: Optimizer, tensors: Iterable[Tensor] | None = None) -> list[str]:
    """Say that model weights were edited through ``.data``: their FP32 masters take the new values. Syncs.

    Edits under ``torch.no_grad()`` are noticed by themselves; those through ``.data`` leave no trace, so call this right after
    them. apex had no such function.

    Args:
        optimizer: Steps the weights.
        tensors: The edited parameters of the model; all by default.

    Returns:
        The names of the weights that differed from their masters; nothing without masters.

    Raises:
        AmpUsageError: An optimizer that was not initialised; a master among ``tensors``, or none given and a master was written
            to as well.
    """
    return [name for engine in registry.engines_of(optimizer) for name in engine.params.changed('weight', tensors)]


def masters_changed(optimizer: Optimizer, tensors: Iterable[Tensor] | None = None) -> None:
    """Say that FP32 masters were edited through ``.data``: the model's weights take the new values. No host read.

    Masters are what ``optimizer.param_groups`` and :func:`master_params` hold. Edits under ``torch.no_grad()`` are noticed by
    themselves; those through ``.data`` leave no trace, so call this right after them. apex had no such function.

    Args:
        optimizer: Steps the masters.
        tensors: The edited masters; all by default.

    Raises:
        AmpUsageError: An optimizer that was not initialised; a weight among ``tensors``, or none given and a weight was written
            to as well.
    """
    for engine in registry.engines_of(optimizer):
        engine.params.changed('master', tensors)


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


def monitor(
    optimizer: Optimizer,
    interval: int | None = 50,
    *,
    folder: str | Path | None = None,
    log: Log | None = None,
    diagnose_overflow: bool = True,
) -> TrainingWatch:
    """Watch why steps are skipped, and how well gradients fit into float16.

    Skipped steps are examined, the first one on; that a dynamic loss scale falls is not reported. For that, each step keeps
    references to its inputs, which takes some tenths of a millisecond. Numbers are computed on the device, and handed on when
    they have reached the host, without waiting for it.

    ```python
    model, optimizer = amp.initialize(model, optimizer, opt_level='O2')
    watch = amp.monitor(optimizer, folder='runs/1', log=lambda step, numbers: writer.add_scalars('amp', numbers, step))
    ```

    Args:
        optimizer: An initialised one.
        interval: Steps from one measurement to the next: steps 1, ``interval``, 2 * ``interval`` and so on are measured. None
            measures nothing. :class:`~amp_wrapper.TrainingWatch` says what the numbers are.
        folder: Where ``amp_monitor.jsonl`` and the reports in ``amp_diagnosis/`` are written; None writes nothing.
        log: Called with the step, counted from 1, and the numbers by name. Where it raises, a warning says so once.
        diagnose_overflow: Whether skipped steps are examined.

    Returns:
        An object with ``read()``, ``diagnoses`` and ``close()``; also a context manager.

    Raises:
        AmpUsageError: An optimizer that was not initialised.
        AmpConfigError: An interval that is no whole number above 0; a ``diagnose_overflow`` that is neither True nor False; a
            ``log`` that cannot be called.
    """
    options = read_options(OPTIONS, {'interval': interval, 'diagnose_overflow': diagnose_overflow})
    if log is not None and not callable(log):
        raise AmpConfigError([f'log={log!r} must be a function of a step and a dict of numbers.'])
    engines, session = registry.engines_of(optimizer), registry.session_of(optimizer)
    place = None if folder is None else Path(folder)
    logs: dict[str, Log] = {} if place is None else {'amp_monitor.jsonl': lines_to(place / 'amp_monitor.jsonl')}
    if log is not None:
        logs['log= of amp.monitor'] = log
    models = [] if session is None else [root for _, root in session.casts.roots]

    def attach(engine: Engine, copied: nn.Module) -> None:
        attach_together([engine], [copied] if len(models) == 1 else list(copied.children()), engine.policy)

    return TrainingWatch(engines[0] if engines else None, models, attach, options, logs, place)


def state_dict(destination: dict[str, Any] | None = None, optimizers: Optimizers | None = None) -> dict[str, Any]:
    """The loss scales in apex's form: ``{'loss_scaler0': {'loss_scale': float, 'unskipped': int}, ...}``. Syncs.

    Those of several ``amp.initialize`` calls are numbered on, in the order of the calls; calls without optimizers have none. A
    call counts for as long as somebody holds one of its optimizers: what else is left of it, a model or the graph of a loss,
    does not count. Masters are in the models' own ``state_dict()``, moments in the optimizers'.

    Args:
        destination: A dict to write to.
        optimizers: Only the calls to which these belong count. For notebooks, where ``Out`` or the traceback of an error may
            hold an optimizer of an earlier call.

    Returns:
        ``destination``, or a new dict. Empty where mixed precision is not enabled.

    Raises:
        AmpUsageError: Before :func:`initialize`; one of ``optimizers`` was not initialised.
    """
    scalers = []
    for session in registry.sessions(optimizers):
        session.read()
        for scaler in session.scalers:
            state = scaler.state_dict()
            if scaler.config.hysteresis == 1:
                # without hysteresis the tracker is always 1
                del state['hysteresis_tracker']
            scalers.append(state)
    result = {} if destination is None else destination
    result.update(write_apex(scalers))
    return result


def load_state_dict(state_dict: Mapping[str, Any], optimizers: Optimizers | None = None) -> None:
    """Take over loss scales from :func:`state_dict`, or from ``apex.amp.state_dict()``.

    Models and optimizers load their own states, before or after :func:`initialize`.

    Args:
        state_dict: Not changed. With more scales than are configured, or fewer, those of the same number are taken over, and a
            warning says so.
        optimizers: As in :func:`state_dict`.

    Raises:
        AmpCheckpointError: Unknown keys, a hole in the numbering, or an impossible value. Nothing has been applied.
        AmpUsageError: As :func:`state_dict`.
    """
    sessions = registry.sessions(optimizers)
    speaks = not sessions or any(session.policy.verbosity >= 1 for session in sessions)
    scalers = [scaler for session in sessions for scaler in session.scalers]
    try:
        saved = read_apex(state_dict, 'state_dict') if state_dict != {} else []
    except AmpCheckpointError as error:
        raise AmpCheckpointError(f"{error} Hand over what amp.state_dict() gave: checkpoint['amp'].") from None
    if len(saved) != len(scalers) and speaks:
        logger.warning(
            f'amp: {len(saved)} loss scales were saved, and {len(scalers)} are configured (none where mixed precision is not '
            f'enabled), of {len(sessions)} calls of amp.initialize() that live: optimizers=optimizer loads those of one.'
        )
    for index, (scaler, state) in enumerate(zip(scalers, saved)):
        for note in scaler.load_state_dict(state):
            if speaks:
                logger.info(f'amp: loss {index}: {note}')
