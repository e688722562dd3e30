"""How a loss scale starts and changes: the record, and the forms a configuration can give it in."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from ..errors import nearest
from .options import Option, is_flag, is_number, is_whole, optional

_SMALLEST_SCALE = torch.finfo(torch.float32).tiny
_LARGEST_SCALE = torch.finfo(torch.float32).max
#: apex's ceiling for dynamic loss scales.
DEFAULT_MAX_LOSS_SCALE = 2.0**24


@dataclasses.dataclass(frozen=True)
class LossScaleConfig:
    """How one loss scale starts and changes. The rule itself is in :mod:`amp_wrapper.engine.loss_scale`.

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


def _is_scale(value: Any) -> bool:
    return is_number(value) and bool(_SMALLEST_SCALE <= value <= _LARGEST_SCALE)


def _float(value: Any) -> float | None:
    return None if value is None else float(value)


_SCALE = f'must be a positive finite number that float32 can hold ({_SMALLEST_SCALE:.3g} to {_LARGEST_SCALE:.3g})'
_COUNT = 'must be a whole number of at least 1'
_BOUND = Option(None, optional(_is_scale), _SCALE, _float)
#: The bounds of a dynamic scale, as arguments of their own.
BOUNDS: Mapping[str, Option] = MappingProxyType(
    {'min_loss_scale': _BOUND, 'max_loss_scale': dataclasses.replace(_BOUND, default=DEFAULT_MAX_LOSS_SCALE)}
)
#: The keys of a ``loss_scale`` that is a dict: the words of :class:`torch.amp.GradScaler`, and ours.
_WORDS: Mapping[str, Option] = MappingProxyType(
    {
        'init_scale': Option(2.0**16, _is_scale, _SCALE, float),
        'growth_factor': Option(
            2.0, lambda value: is_number(value) and 1.0 < value < math.inf, 'must be above 1.0 and finite', float
        ),
        'backoff_factor': Option(
            0.5, lambda value: is_number(value) and 0.0 < value < 1.0, 'must lie between 0.0 and 1.0', float
        ),
        'growth_interval': Option(2000, lambda value: is_whole(value, 1, 2**31), _COUNT),
        'min_scale': _BOUND,
        'max_scale': BOUNDS['max_loss_scale'],
        'hysteresis': Option(1, lambda value: is_whole(value, 1, 2**31), _COUNT),
        'enabled': Option(True, is_flag, 'must be True or False'),
    }
)


def resolve_loss_scale(
    value: Any, level: LossScaleConfig, minimum: float | None, maximum: float | None, problems: list[str]
) -> LossScaleConfig:
    """Turn the forms that ``loss_scale`` can take into one record.

    Args:
        value: 'dynamic', a number, a number as a string, a dict in ``GradScaler``'s words, or None.
        level: What None means.
        minimum: ``min_loss_scale``.
        maximum: ``max_loss_scale``.
        problems: Gets a sentence for each conflict.

    Returns:
        The record; of no use where problems were found.
    """
    config = LossScaleConfig(min_scale=minimum, max_scale=maximum)
    if value is None:
        config = dataclasses.replace(config, dynamic=level.dynamic, init_scale=level.init_scale)
    elif isinstance(value, Mapping):
        config = dataclasses.replace(config, **_read_words(value, config, problems))
    elif not isinstance(value, str) or value.strip() != 'dynamic':
        config = dataclasses.replace(config, dynamic=False, init_scale=_read_static(value, problems))
    floor, ceiling = config.min_scale, config.max_scale
    if floor is not None and ceiling is not None and floor > ceiling:
        problems.append(
            f'min_loss_scale={floor:g} is above max_loss_scale={ceiling:g}: lower the floor or raise the ceiling.'
        )
    if not config.dynamic:
        return config
    first = config.init_scale if ceiling is None else min(config.init_scale, ceiling)
    return dataclasses.replace(config, init_scale=first if floor is None else max(first, floor))


def loss_scale_options(config: LossScaleConfig) -> dict[str, Any]:
    """The options from which :func:`resolve_loss_scale` makes a record, at any level.

    Args:
        config: Any.
    """
    words = {name: getattr(config, name) for name in _WORDS}
    bounds = {'min_loss_scale': words.pop('min_scale'), 'max_loss_scale': words.pop('max_scale')}
    given: dict[str, Any] = {name: value for name, value in bounds.items() if value != BOUNDS[name].default}
    others = {name: value for name, value in words.items() if value != _WORDS[name].default}
    if not config.dynamic:
        return {'loss_scale': config.init_scale, **given}
    return {'loss_scale': others or 'dynamic', **given}


def _read_static(value: Any, problems: list[str]) -> float:
    close = ''
    if isinstance(value, str):
        close = nearest(value, ['dynamic'])
        with contextlib.suppress(ValueError):
            value = float(value)
    if not is_number(value):
        problems.append(f"loss_scale={value!r} must be 'dynamic', a positive number, a dict or None{close}.")
    elif not _is_scale(value):
        problems.append(f'loss_scale={value!r} {_SCALE}.')
    else:
        return float(value)
    return 1.0


def _read_words(value: Mapping[str, Any], outer: LossScaleConfig, problems: list[str]) -> dict[str, Any]:
    read: dict[str, Any] = {}
    for key, item in value.items():
        option = _WORDS.get(key)
        if option is None:
            close = nearest(str(key), _WORDS)
            problems.append(f'loss_scale has an unknown key {key!r}{close}: known are {", ".join(_WORDS)}.')
            continue
        read[key] = option.read(f'loss_scale[{key!r}]', item, problems)
        name = key.replace('_', '_loss_', 1)
        if name not in BOUNDS or not option.test(item):
            continue
        bound = getattr(outer, key)
        if bound not in (BOUNDS[name].default, read[key]):
            problems.append(
                f'loss_scale[{key!r}]={read[key]!r} contradicts {name}={bound!r}: write only one of the two.'
            )
    return read
