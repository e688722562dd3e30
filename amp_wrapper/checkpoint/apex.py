"""Reads and writes loss scales in apex's format: ``{'loss_scaler0': {'loss_scale': float, 'unskipped': int}, ...}``.

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
from .schema import POSITIVE, SWITCH, MapOf, Record, whole

#: Clean steps after which apex doubled a moving scale.
GROWTH_INTERVAL = 2000
_SCALER = Record(
    {'loss_scale': POSITIVE, 'unskipped': whole(bits=31)},
    # keys that apex does not have
    {'dynamic': SWITCH, 'hysteresis_tracker': whole(bits=31)},
    missing='{path}[{first!r}] is missing (found: {found}).',
)


def is_apex(amp: Any) -> bool:
    """Whether ``amp`` is apex's state and not ours, which has a version."""
    # our own states have a key 'loss_scalers', without a number
    numbered = re.compile(r'loss_scaler\d+')
    return isinstance(amp, Mapping) and 'version' not in amp and any(numbered.fullmatch(str(key)) for key in amp)


def read(amp: Any, label: str) -> list[dict[str, Any]]:
    """Validate apex's state and translate it into ``GradScaler``'s keys.

    Args:
        amp: ``apex.amp.state_dict()``; not changed.
        label: The key it lies under, for messages: 'apex_amp' or 'amp'.

    Returns:
        One ``LossScaler`` state per loss, in the order of their numbers.

    Raises:
        AmpCheckpointError: Not apex's form, a hole in the numbering, or an impossible value; names key and value.
    """
    MapOf(expected="a dict of apex's loss scalers").check(amp, label)
    names = [f'loss_scaler{index}' for index in range(max(1, len(amp)))]
    missing = next((name for name in names if name not in amp), None)
    if missing is not None:
        raise AmpCheckpointError(
            f'{label}[{missing!r}] is missing (found: {", ".join(map(str, amp)) or "nothing"}): apex numbers its loss '
            f'scalers from 0 without a hole and saves nothing else. To go on without them, remove the key {label!r}.'
        )
    return [_read_one(amp[name], f'{label}[{name!r}]') for name in names]


def _read_one(state: Any, label: str) -> dict[str, Any]:
    try:
        _SCALER.check(state, label)
    except AmpCheckpointError as error:
        # apex's scale could fall to 0, where its training ended
        raise AmpCheckpointError(f'{error} To go on with the configured scale, write it there.') from None
    scale, unskipped = state['loss_scale'], state['unskipped']
    return {
        'dynamic': scale != 1.0 and unskipped < GROWTH_INTERVAL,
        'scale': float(scale),
        'growth_factor': 2.0,
        'backoff_factor': 0.5,
        'growth_interval': GROWTH_INTERVAL,
        '_growth_tracker': unskipped,
        **{key: state[key] for key in ('dynamic', 'hysteresis_tracker') if key in state},
    }


def write(loss_scalers: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Write loss scales with apex's keys, and the further keys that :func:`read` needs where apex's do not suffice.

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
