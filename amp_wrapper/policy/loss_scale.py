"""How a loss scale starts and moves: the record, and the forms a configuration can give it in."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Mapping
from typing import Any

import torch

from ..errors import nearest

_SMALLEST_SCALE = torch.finfo(torch.float32).tiny
_LARGEST_SCALE = torch.finfo(torch.float32).max
#: apex's ceiling for dynamic loss scales.
DEFAULT_MAX_LOSS_SCALE = 2.0**24
_SCALER_WORDS = (
    'init_scale',
    'growth_factor',
    'backoff_factor',
    'growth_interval',
    'min_scale',
    'max_scale',
    'hysteresis',
    'enabled',
)


@dataclasses.dataclass(frozen=True)
class LossScaleConfig:
    """How one loss scale starts and moves. The rule itself is told in :mod:`amp_wrapper.engine.loss_scale`.

    Attributes:
        dynamic: Whether the scale follows overflows; a static one keeps ``init_scale``.
        init_scale: The first scale, already clamped to floor and ceiling.
        growth_factor: Above 1.
        backoff_factor: Between 0 and 1.
        growth_interval: Clean optimizer steps in a row before the scale grows.
        min_scale: Floor, or None for the smallest normal float32.
        max_scale: Ceiling, or None for the largest float32.
        hysteresis: Overflows since the last clean step that it takes to lower the scale.
        enabled: False for a scaler that does nothing (``GradScaler(enabled=False)``).
    """

    dynamic: bool = True
    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float | None = None
    max_scale: float | None = DEFAULT_MAX_LOSS_SCALE
    hysteresis: int = 1
    enabled: bool = True


def is_number(value: Any) -> bool:
    """Whether ``value`` is a real number and no boolean."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _positive(name: str, value: Any, problems: list[str]) -> float | None:
    if is_number(value) and _SMALLEST_SCALE <= value <= _LARGEST_SCALE:
        return float(value)
    problems.append(
        f'{name}={value!r} must be a positive finite number that float32 can hold ({_SMALLEST_SCALE:.3g} to '
        f'{_LARGEST_SCALE:.3g}).'
    )
    return None


def resolve_loss_scale(value: Any, dynamic: bool, minimum: Any, maximum: Any, problems: list[str]) -> LossScaleConfig:
    """Turn the forms that ``loss_scale`` can take into one record.

    Args:
        value: 'dynamic', a number, a number as a string, a dict in ``GradScaler``'s words, or None.
        dynamic: What None means.
        minimum: ``min_loss_scale``.
        maximum: ``max_loss_scale``.
        problems: Gets a sentence for each conflict.

    Returns:
        The record; of no use where problems were found.
    """
    floor = None if minimum is None else _positive('min_loss_scale', minimum, problems)
    ceiling = None if maximum is None else _positive('max_loss_scale', maximum, problems)
    config = LossScaleConfig(dynamic=True, min_scale=floor, max_scale=ceiling)
    before = len(problems)
    if value is None:
        if not dynamic:
            config = dataclasses.replace(config, dynamic=False, init_scale=1.0)
    elif isinstance(value, Mapping):
        config = _resolve_scaler_dict(value, config, maximum, problems)
    elif isinstance(value, str) and value.strip() == 'dynamic':
        pass
    else:
        number = value
        if isinstance(value, str):
            try:
                number = float(value)
            except ValueError:
                problems.append(
                    f"loss_scale={value!r} must be 'dynamic', a positive number, a dict or None{nearest(value, ['dynamic'])}."
                )
                return config
        elif not is_number(value):
            problems.append(f"loss_scale={value!r} must be 'dynamic', a positive number, a dict or None.")
            return config
        static = _positive('loss_scale', number, problems)
        config = dataclasses.replace(config, dynamic=False, init_scale=static or 1.0)
    if config.min_scale is not None and config.max_scale is not None and config.min_scale > config.max_scale:
        problems.append(
            f'min_loss_scale={config.min_scale:g} is above max_loss_scale={config.max_scale:g}: '
            f'lower the floor or raise the ceiling.'
        )
    if len(problems) == before and config.dynamic:
        first = config.init_scale
        if config.max_scale is not None:
            first = min(first, config.max_scale)
        if config.min_scale is not None:
            first = max(first, config.min_scale)
        config = dataclasses.replace(config, init_scale=first)
    return config


def _resolve_scaler_dict(
    value: Mapping[str, Any], config: LossScaleConfig, maximum: Any, problems: list[str]
) -> LossScaleConfig:
    words = dict(value)
    unknown = [key for key in words if key not in _SCALER_WORDS]
    for key in unknown:
        words.pop(key)
        problems.append(
            f'loss_scale has an unknown key {key!r}{nearest(str(key), _SCALER_WORDS)}: known are {", ".join(_SCALER_WORDS)}.'
        )
    checked: dict[str, Any] = {}
    for key, item in words.items():
        label = f'loss_scale[{key!r}]'
        if key == 'enabled':
            if isinstance(item, bool):
                checked[key] = item
            else:
                problems.append(f'{label}={item!r} must be True or False.')
        elif key in ('growth_interval', 'hysteresis'):
            if isinstance(item, int) and not isinstance(item, bool) and 1 <= item < 2**31:
                checked[key] = item
            else:
                problems.append(f'{label}={item!r} must be a whole number of at least 1.')
        elif key == 'growth_factor':
            if is_number(item) and 1.0 < item < math.inf:
                checked[key] = float(item)
            else:
                problems.append(f'{label}={item!r} must be above 1.0 and finite.')
        elif key == 'backoff_factor':
            if is_number(item) and 0.0 < item < 1.0:
                checked[key] = float(item)
            else:
                problems.append(f'{label}={item!r} must lie between 0.0 and 1.0.')
        elif key in ('min_scale', 'max_scale') and item is None:
            checked[key] = None
        else:
            number = _positive(label, item, problems)
            if number is not None:
                checked[key] = number
    for key, outer, outer_name, default in (
        ('min_scale', config.min_scale, 'min_loss_scale', None),
        ('max_scale', config.max_scale, 'max_loss_scale', DEFAULT_MAX_LOSS_SCALE),
    ):
        if key in checked and outer != default and checked[key] != outer:
            problems.append(
                f'loss_scale[{key!r}]={checked[key]!r} contradicts {outer_name}={outer!r}: write only one of the two.'
            )
    return dataclasses.replace(config, **checked)
