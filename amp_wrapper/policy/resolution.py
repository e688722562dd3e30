"""Resolves a level and its options to a :class:`Policy`, or to one error with every conflict."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from typing_extensions import Unpack

from ..errors import AmpConfigError, nearest
from . import lookup
from .fp32_registry import CALLER, FLOAT32, Fp32Op
from .levels import IN_BFLOAT16, LEVEL_TABLE, MEANINGS, LossScaleConfig, OptLevel, Policy
from .nested import HALF_TYPES
from .options import FLOOR, LOSS_SCALE_OPTIONS, OPTIONS, SCALE, PolicyOptions, is_number, is_scale, plain

_F16, _BF16, _F32, _F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
#: What the keys of its bounds are called as options.
_BOUNDS = {'min_scale': 'min_loss_scale', 'max_scale': 'max_loss_scale'}


def resolve(opt_level: OptLevel = 'O1', **options: Unpack[PolicyOptions]) -> Policy:
    """Turn a level and its overrides into a :class:`Policy`.

    Args:
        opt_level: 'O0' to 'O5'.
        **options: See :class:`SharedOptions` and :class:`PolicyOptions`; defaults are in :data:`OPTIONS`.

    Returns:
        The resolved record.

    Raises:
        AmpConfigError: With every conflict of the configuration in one message.
        TypeError: An option that does not exist.
    """
    for name in options:
        if name not in OPTIONS:
            raise TypeError(f'resolve() got an unexpected keyword argument {name!r}{nearest(name, OPTIONS)}')
    given: dict[str, Any] = {name: options.get(name, option.default) for name, option in OPTIONS.items()}
    problems: list[str] = []
    asked_level = _find_level(opt_level, problems)
    read = {name: option.read(name, given[name], problems) for name, option in OPTIONS.items()}
    level = _apply_dtype(asked_level, read['dtype'])
    cast = read['cast_model_type']
    # float32 on a per-op level is what it does anyway: nothing is cast
    model_type = level.cast_model_type if cast is None or _casts_per_op(level) else cast or None
    if level.opt_level:
        problems += _conflicts(asked_level, level, model_type, read, given)
    read['fp32_ops'] = _find_functions(read['fp32_ops'], problems)
    scale = _find_scale(read, given, level.loss_scale, problems)
    if problems:
        raise AmpConfigError(problems)
    fields = {field.name for field in dataclasses.fields(Policy)}
    values = {name: value for name, value in read.items() if name in fields}
    for name in ('keep_batchnorm_fp32', 'master_weights', 'skip_nonfinite'):
        values[name] = getattr(level, name) if read[name] is None else read[name]
    values |= {
        'cast_model_type': model_type,
        'autocast_dtype': None if read['patch_torch_functions'] is False else level.autocast_dtype,
        'master_weights': bool(values['master_weights']),
        'split_masters': read['master_weights'] == 'split',
        'loss_scale': scale,
    }
    policy = dataclasses.replace(level, **values)
    return dataclasses.replace(policy, overrides={**level.overrides, **dict(_overrides(policy, read, given))})


def _overrides(policy: Policy, read: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The options that were given and say something beside the level, in plain form."""
    level = LEVEL_TABLE[policy.opt_level]
    for name, option in OPTIONS.items():
        field = 'loss_scale' if name.endswith('loss_scale') else name
        says_nothing = name == 'dtype' or getattr(policy, field) == getattr(level, field)
        if read[name] == option.default or (says_nothing and read[name] != 'split'):
            continue
        if name == 'fp32_ops':
            yield name, [{'name': op.name, 'output': op.output} for op in policy.fp32_ops]
        elif name != 'loss_scale':
            yield name, list(read[name]) if isinstance(read[name], tuple) else read[name]
        elif isinstance(given[name], Mapping):
            yield name, {key: getattr(policy.loss_scale, key) for key in given[name]}
        else:
            yield name, 'dynamic' if policy.loss_scale.dynamic else policy.loss_scale.init_scale


def _casts_per_op(level: Policy) -> bool:
    return level.cast_model_type is None


def _find_level(value: Any, problems: list[str]) -> Policy:
    """The level's row; for an unknown level that of O0, without a name."""
    if isinstance(value, str) and value in LEVEL_TABLE:
        return LEVEL_TABLE[value]
    text = str(value).strip().upper()
    meant = f'O{text[-1:]}'
    hint = f' (did you mean {meant!r}?)' if meant in LEVEL_TABLE and text in (meant, meant[1], f'0{meant[1]}') else ''
    known = '; '.join(f'{name}: {meaning}' for name, meaning in MEANINGS.items())
    problems.append(f'opt_level={value!r} is no opt level{hint}. Known are {known}.')
    # never returned by resolve: a problem was noted
    return dataclasses.replace(LEVEL_TABLE['O0'], opt_level='')  # type: ignore[arg-type]


def _apply_dtype(level: Policy, dtype: torch.dtype | None) -> Policy:
    """The level that ``dtype`` makes of a level."""
    name = level.opt_level
    if dtype is _BF16 and name == 'O3':
        return dataclasses.replace(level, cast_model_type=_BF16, overrides={'cast_model_type': _BF16})
    if dtype is _BF16 and name in IN_BFLOAT16:
        return LEVEL_TABLE[IN_BFLOAT16[name]]
    if dtype in (_F32, _F64) and _casts_per_op(level):
        # as in mmengine's own wrapper: autocast to float32 or float64 is no autocast
        return dataclasses.replace(level, autocast_dtype=None, overrides={'patch_torch_functions': False})
    return level


def _conflicts(
    asked_level: Policy,
    level: Policy,
    model_type: torch.dtype | None,
    read: Mapping[str, Any],
    given: Mapping[str, Any],
) -> Iterator[str]:
    """Options that a level refuses, and options that contradict each other.

    Args:
        asked_level: The level that was asked for.
        level: What ``dtype`` has made of it.
        model_type: Of the weights.
        read: The options, converted.
        given: The options as they were given.
    """
    name, dtype, cast, losses = level.opt_level, read['dtype'], read['cast_model_type'], read['num_losses']
    at = f'conflicts with opt_level={name!r}'
    of_dtype = f'dtype={given["dtype"]!r} conflicts with opt_level={asked_level.opt_level!r}'
    if asked_level.opt_level == 'O0' and dtype in HALF_TYPES:
        levels = "'O4' or 'O5' for bfloat16" if dtype is _BF16 else "'O1' or 'O2' for float16"
        yield f'{of_dtype} (FP32): write {levels}.'
    elif asked_level.opt_level in IN_BFLOAT16.values() and dtype is _F16:
        same = 'O1' if asked_level.opt_level == 'O4' else 'O2'
        yield f"{of_dtype}, a bfloat16 level: write opt_level='{same}'."
    elif asked_level.casts_model and dtype in (_F32, _F64):
        yield f"{of_dtype}, which needs a 16-bit type: write opt_level='O0' for FP32."
    if _casts_per_op(level):
        casting = 'O5' if name == 'O4' else 'O2'
        other = f"write opt_level='{casting}' for a 16-bit model, or leave it out"
        for key, option in OPTIONS.items():
            # no cast is what these levels do
            if option.per_op and read[key] is not None and (key != 'cast_model_type' or cast in HALF_TYPES):
                yield f'{key}={given[key]!r} {at}, {option.per_op}: {other}.'
        if read['patch_torch_functions'] and level.autocast_dtype is None:
            yield (
                f'patch_torch_functions=True contradicts dtype={given["dtype"]!r}, which means no autocast: drop one of '
                f'the two.'
            )
    else:
        if read['patch_torch_functions']:
            yield (
                f"patch_torch_functions=True {at}, which casts the model: write opt_level='O1' (float16) or 'O4' (bfloat16) "
                f'for per-op casts, or leave it out.'
            )
        if dtype is not None and cast in HALF_TYPES and cast is not level.cast_model_type:
            yield (
                f'cast_model_type={given["cast_model_type"]!r} contradicts dtype={given["dtype"]!r}: write only one of the two.'
            )
        if read['master_weights'] == 'split' and model_type not in HALF_TYPES:
            beside = '' if cast is None else f' and cast_model_type={given["cast_model_type"]!r}'
            yield (
                f"master_weights='split' {at}{beside}, where no weight is 16-bit: there is nothing to split. "
                f"Write opt_level='O2' or 'O5', or leave it out."
            )
    if losses > 1 and read['master_weights'] == 'split':
        yield (
            f"master_weights='split' conflicts with num_losses={losses}: several losses are unscaled as they arrive and meet "
            f'in the FP32 gradients of masters, which split ones do not have. Write master_weights=True, or use one loss.'
        )
    has_masters = level.master_weights if read['master_weights'] is None else read['master_weights']
    if losses > 1 and read['accumulate_in_fp32'] and model_type in HALF_TYPES and not has_masters:
        yield (
            f'accumulate_in_fp32=True conflicts with num_losses={losses} at {name!r} without masters, where several losses '
            f'meet in 16-bit gradients: use master_weights=True, or one loss.'
        )


def _find_scale(
    read: Mapping[str, Any], given: Mapping[str, Any], level: LossScaleConfig, problems: list[str]
) -> LossScaleConfig:
    """What the forms of ``loss_scale`` and its bounds mean; of no use where problems were found."""
    value, before = given['loss_scale'], len(problems)
    bounds = {key: read[name] if FLOOR.test(plain(given[name])) else None for key, name in _BOUNDS.items()}
    words: dict[str, Any] = {}
    if value is None:
        words = {'dynamic': level.dynamic, 'init_scale': level.init_scale}
    elif isinstance(value, Mapping):
        words = _read_words(value, bounds, problems)
    elif not isinstance(value, str) or value.strip() != 'dynamic':
        words = {'dynamic': False, 'init_scale': _read_static(value, problems)}
    config = LossScaleConfig(**{**bounds, **words})
    low, high = config.min_scale or 0.0, math.inf if config.max_scale is None else config.max_scale
    if low > high:
        problems.append(
            f'min_loss_scale={low:g} is above max_loss_scale={high:g}: lower the floor or raise the ceiling.'
        )
    if len(problems) > before:
        return config
    if not config.dynamic:
        beside = [
            f'{name}={read[name]:g}' for name in _BOUNDS.values() if read[name] not in (None, OPTIONS[name].default)
        ]
        if value is not None and beside:
            problems.append(
                f'loss_scale={value!r} conflicts with {" and ".join(beside)}: a number is the scale always, and only a scale '
                f"that moves has bounds. Leave the bounds out, or write loss_scale='dynamic'."
            )
        return config
    if config.enabled and isinstance(value, Mapping) and 'init_scale' in value and not low <= config.init_scale <= high:
        problems.append(
            f"loss_scale['init_scale']={value['init_scale']!r} is not between the floor {config.min_scale} and the ceiling "
            f'{config.max_scale}: write a scale within them, or other bounds (min_loss_scale, max_loss_scale; None for none).'
        )
    return dataclasses.replace(config, init_scale=min(max(config.init_scale, low), high))


def _read_static(value: Any, problems: list[str]) -> float:
    close = ''
    if isinstance(value, str):
        close = nearest(value, ['dynamic'])
        with contextlib.suppress(ValueError):
            value = float(value)
    if not is_number(value):
        problems.append(f"loss_scale={value!r} must be 'dynamic', a positive number, a dict or None{close}.")
    elif not is_scale(value):
        problems.append(f'loss_scale={value!r} {SCALE}.')
    else:
        return float(value)
    return 1.0


def _read_words(value: Mapping[str, Any], bounds: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    read: dict[str, Any] = {}
    for key, item in value.items():
        if key not in LOSS_SCALE_OPTIONS:
            known = ', '.join(LOSS_SCALE_OPTIONS)
            problems.append(
                f'loss_scale has an unknown key {key!r}{nearest(str(key), LOSS_SCALE_OPTIONS)}: known are {known}.'
            )
            continue
        option, before = LOSS_SCALE_OPTIONS[key], len(problems)
        found = option.read(f'loss_scale[{key!r}]', item, problems)
        if len(problems) == before:
            read[key] = found
            if bounds.get(key) not in (None, option.default, found):
                problems.append(
                    f'loss_scale[{key!r}]={found!r} contradicts {_BOUNDS[key]}={bounds[key]!r}: write only one of the two.'
                )
    return read


def _find_functions(items: Sequence[Any], problems: list[str]) -> tuple[Fp32Op, ...]:
    """The members of ``fp32_ops``."""
    found = []
    for item in items or ():
        words = dict(item) if isinstance(item, Mapping) else {'name': item}
        output = words.get('output', CALLER)
        if not words.keys() <= {'name', 'output'} or 'name' not in words or output not in (CALLER, FLOAT32):
            problems.append(f"fp32_ops={words!r} must be dict(name=..., output='caller' or 'float32').")
            continue
        name = words['name'] if isinstance(words['name'], str) else _name_of(words['name'], problems)
        if name is not None:
            found.append(Fp32Op(name, output))
    wrong = {op.name: lookup.problem_of(op.name) for op in found}
    problems += [f'fp32_ops={name!r} {problem}.' for name, problem in wrong.items() if problem]
    return tuple(dict.fromkeys(found))


def _name_of(item: Any, problems: list[str]) -> str | None:
    """The dotted name under which an object is found."""
    # builtins of torch name a private class, or no module
    names = [f'{getattr(item, "__module__", None)}.{getattr(item, "__qualname__", None)}']
    names += [f'{module}.{getattr(item, "__name__", None)}' for module in ('torch', 'torch.nn.functional')]
    for name in names:
        if lookup.find(name, load=False) is item:
            return name
    problems.append(f'fp32_ops={item!r} is not found as {names[0]!r}: hand over its dotted name instead.')
    return None
