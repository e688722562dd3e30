"""``amp.state_dict`` and ``amp.load_state_dict``: the loss scales of a script in apex's form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from ..checkpoint import apex
from ..errors import AmpCheckpointError, logger
from .registry import registry


def state_dict(
    destination: dict[str, Any] | None = None, optimizers: Optimizer | Sequence[Optimizer] | None = None
) -> dict[str, Any]:
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
    result.update(apex.write(scalers))
    return result


def load_state_dict(state_dict: Mapping[str, Any], optimizers: Optimizer | Sequence[Optimizer] | None = None) -> None:
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
        saved = apex.read(state_dict, 'state_dict') if state_dict != {} else []
    except AmpCheckpointError as error:
        raise AmpCheckpointError(f"{error} Hand over what amp.state_dict() gave: checkpoint['amp'].") from None
    if len(saved) != len(scalers) and speaks:
        logger.warning(
            f'amp: {len(saved)} loss scales were saved, and {len(scalers)} are configured (none where mixed precision is not '
            f'enabled), of {len(sessions)} calls of amp.initialize() whose optimizers somebody still holds. As many as are '
            f'on both sides are taken; amp.load_state_dict(state, optimizers=optimizer) loads those of one call.'
        )
    for index, (scaler, state) in enumerate(zip(scalers, saved)):
        for note in scaler.load_state_dict(state):
            if speaks:
                logger.info(f'amp: loss {index}: {note}')
