"""Saved loss scales: checks of what every one has to be, and apex's form of them.

apex writes ``{'loss_scaler0': {'loss_scale': float, 'unskipped': int}, ...}``.

apex saved neither the level nor the rule of the scale. The rule never differed: growth 2, backoff 0.5, interval 2000. Whether
a scale was dynamic has to be found out from its values: a counter of 2000 or more is that of a static scale, since a dynamic
one starts again at 0 there; and 1.0 is the static scale of apex's O0 and O3. Every other scale is taken for a dynamic one.
Where the resumed configuration is static, it keeps its own scale.

apex reads two keys of each scaler and ignores others. So ``amp.state_dict()`` adds a third where the two do not suffice:
``dynamic`` for a dynamic scale that looks like a static one, ``hysteresis_tracker`` where hysteresis is in use.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import AmpCheckpointError
from ..policy.options import is_scale, is_whole

#: Clean steps after which apex doubled a moving scale.
GROWTH_INTERVAL = 2000


def as_dict(value: Any, name: str) -> Mapping[Any, Any]:
    """Return a value that has to be a dict.

    Args:
        value: Of a file.
        name: How the error calls it.

    Raises:
        AmpCheckpointError: It is none.
    """
    if not isinstance(value, Mapping):
        raise AmpCheckpointError(f'{name} must be a dict, but is {type(value).__name__}: the file is damaged.')
    return value


def check_scaler_state(state: Any, label: str = 'loss_scaler') -> None:
    """Check the saved state of a loss scaler without applying it.

    Args:
        state: Of our scaler or of ``GradScaler``; empty for a disabled one.
        label: How messages call it.

    Raises:
        AmpCheckpointError: Names the key, the value and what was expected.
    """
    if as_dict(state, label):
        check_scale(state, 'scale', '_growth_tracker', label)


def check_scale(state: Any, scale: str, counter: str, label: str) -> None:
    """Check a saved loss scale, and the counter of steps beside it.

    Args:
        state: Of a loss scaler.
        scale: The key of the scale.
        counter: The key of the counter.
        label: How messages call the state.

    Raises:
        AmpCheckpointError: One is missing or impossible.
    """
    state = as_dict(state, label)
    if not is_scale(state.get(scale)):
        raise AmpCheckpointError(f'{label}[{scale!r}]={state.get(scale)!r} must be a positive float32 number.')
    if not is_whole(state.get(counter), 0, 2**31):
        raise AmpCheckpointError(f'{label}[{counter!r}]={state.get(counter)!r} must be a whole number below 2**31.')


def is_apex(amp: Any) -> bool:
    """Return whether ``amp`` is apex's state and not ours, which has a version."""
    is_dict = isinstance(amp, Mapping)
    # our own states have a key 'loss_scalers', without a number
    return is_dict and 'version' not in amp and any(re.fullmatch(r'loss_scaler\d+', str(key)) for key in amp)


def read_apex(amp: Any, label: str) -> list[dict[str, Any]]:
    """Translate apex's state into ``GradScaler``'s keys.

    Args:
        amp: ``apex.amp.state_dict()``; not changed.
        label: The key it lies under, for messages: 'apex_amp' or 'amp'.

    Returns:
        One ``LossScaler`` state per loss, in the order of their numbers.

    Raises:
        AmpCheckpointError: Not apex's form, a hole in the numbering, or an impossible value; names key and value.
    """
    names = [f'loss_scaler{index}' for index in range(max(1, len(as_dict(amp, label))))]
    if missing := [name for name in names if name not in amp]:
        raise AmpCheckpointError(
            f'{label}[{missing[0]!r}] is missing (found: {", ".join(map(str, amp)) or "nothing"}): apex numbers its loss '
            f'scalers from 0 without a hole and saves nothing else. To go on without them, remove the key {label!r}.'
        )
    for name in names:
        check_scale(amp[name], 'loss_scale', 'unskipped', f'{label}[{name!r}]')
    return [_read_one(amp[name]) for name in names]


def _read_one(state: Mapping[str, Any]) -> dict[str, Any]:
    scale, unskipped = state['loss_scale'], state['unskipped']
    return {
        'dynamic': scale != 1.0 and unskipped < GROWTH_INTERVAL,
        'scale': float(scale),
        '_growth_tracker': unskipped,
        **{key: state[key] for key in ('dynamic', 'hysteresis_tracker') if key in state},
    }


def write_apex(loss_scalers: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Write loss scales with apex's keys, and the further keys that :func:`read_apex` needs where apex's do not suffice.

    Args:
        loss_scalers: ``LossScaler`` states, one per loss, none of them empty.

    Returns:
        A new dict of plain numbers.
    """
    return {f'loss_scaler{index}': _write_one(state) for index, state in enumerate(loss_scalers)}


def _write_one(state: Mapping[str, Any]) -> dict[str, Any]:
    written: dict[str, Any] = {'loss_scale': float(state['scale']), 'unskipped': int(state['_growth_tracker'])}
    if state['dynamic'] and (written['loss_scale'] == 1.0 or written['unskipped'] >= GROWTH_INTERVAL):
        written['dynamic'] = True
    if 'hysteresis_tracker' in state:
        written['hysteresis_tracker'] = state['hysteresis_tracker']
    return written
