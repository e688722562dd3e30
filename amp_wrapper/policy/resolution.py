"""Resolves a level and its options to a :class:`Policy`, or to one error with every conflict."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from typing_extensions import Unpack

from ..errors import AmpConfigError, nearest
from . import lookup
from .fp32_registry import CALLER, FLOAT32, Fp32Op
from .levels import DEFAULT_MAX_LOSS_SCALE, IN_BFLOAT16, LEVEL_TABLE, LEVELS, LossScaleConfig, OptLevel, Policy
from .nested import HALF_TYPES
from .options import LOSS_SCALE_OPTIONS, OPTIONS, PolicyOptions

_F16, _BF16, _WIDE = torch.float16, torch.bfloat16, (torch.float32, torch.float64)
#: What ``dtype`` may be at a level, after bfloat16 has made O4 of O1, and O5 of O2.
_DTYPES: dict[OptLevel, tuple[torch.dtype, ...]] = {
    'O0': _WIDE, 'O1': (_F16, *_WIDE), 'O2': (_F16,), 'O3': (_F16, _BF16), 'O4': (_BF16, *_WIDE), 'O5': (_BF16,),
}  # fmt: skip
_CAST_INSTEAD = "write opt_level='O2' (float16) or opt_level='O5' (bfloat16) for a 16-bit model, or leave it out"


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
    problems: list[str] = []
    given: dict[str, Any] = {name: options.get(name, option.default) for name, option in OPTIONS.items()}
    read = SimpleNamespace(**{name: option.read(name, given[name], problems) for name, option in OPTIONS.items()})
    read.scale_words = _read_loss_scale(read.loss_scale, problems)
    read.fp32_ops = _find_functions(read.fp32_ops or (), problems)
    if opt_level in LEVELS:
        level = LEVEL_TABLE[IN_BFLOAT16.get(opt_level, opt_level) if read.dtype is _BF16 else opt_level]
        if level.patch_torch_functions and read.cast_model_type in (False, torch.float32):
            # no cast is what these levels do
            read.cast_model_type = None
        bounds = {'min_scale': read.min_loss_scale, 'max_scale': read.max_loss_scale}
        own = level.loss_scale if read.loss_scale is None else LossScaleConfig()
        read.scale = dataclasses.replace(own, **{**bounds, **read.scale_words})
        texts = {name: f'{name}={value!r}' for name, value in {'opt_level': opt_level, **given}.items()}
        problems += [f'{conflict.format(**texts)}.' for conflict in _conflicts(read, level)]
    else:
        close = nearest(str(opt_level).strip().upper(), LEVELS)
        known = '; '.join(each.describe() for each in LEVEL_TABLE.values())
        problems.append(f'opt_level={opt_level!r} is no opt level{close}. Known are {known}.')
    if problems:
        raise AmpConfigError(problems)
    return _policy(read, level, given)


def _read_loss_scale(value: Any, problems: list[str]) -> dict[str, Any]:
    """Read what ``loss_scale`` says, as fields of :class:`LossScaleConfig`."""
    if not isinstance(value, Mapping):
        return {'dynamic': False, 'init_scale': value} if isinstance(value, float) else {}
    known = LOSS_SCALE_OPTIONS
    for key in value.keys() - known.keys():
        close = nearest(str(key), known)
        problems.append(f'loss_scale has an unknown key {key!r}{close}: known are {", ".join(known)}.')
    return {key: known[key].read(f'loss_scale[{key!r}]', value[key], problems) for key in value if key in known}


def _find_functions(items: Iterable[Any], problems: list[str]) -> tuple[Fp32Op, ...]:
    """Find the members of ``fp32_ops``."""
    found = []
    for item in items:
        words = {'name': '', 'output': CALLER, **(item if isinstance(item, Mapping) else {'name': item})}
        is_meant = len(words) == 2 and words['output'] in (CALLER, FLOAT32)
        op = Fp32Op(lookup.name_of(words['name']), words['output'])
        problem = lookup.problem_of(op.name) if is_meant else "must be dict(name=..., output='caller' or 'float32')"
        problems += [f'fp32_ops={item!r} {problem}.'] if problem else []
        found.append(op)
    return tuple(dict.fromkeys(found))


def _conflicts(read: SimpleNamespace, level: Policy) -> Iterator[str]:
    """Say what a level refuses, and which options contradict each other; ``{option}`` stands for ``option=value``, as given.

    Args:
        read: The options, converted.
        level: Without options, but for ``dtype``, where that means another level.
    """
    dtype, cast, masters, several = read.dtype, read.cast_model_type, read.master_weights, read.num_losses > 1
    per_op, is_half = level.patch_torch_functions, (cast or level.cast_model_type) in HALF_TYPES and cast is not False
    if dtype not in (None, *_DTYPES[level.opt_level]):
        yield "{dtype} conflicts with {opt_level}: write 'O1' or 'O2' for float16, 'O4' or 'O5' for bfloat16, 'O0' for FP32"
    if dtype is not None and cast in HALF_TYPES - {dtype}:
        yield '{cast_model_type} contradicts {dtype}: write only one of the two'
    for name in ('cast_model_type', 'keep_batchnorm_fp32', 'master_weights'):
        if per_op and getattr(read, name) is not None:
            yield f'{{{name}}} conflicts with {{opt_level}}, whose weights stay FP32: {_CAST_INSTEAD}'
    if read.patch_torch_functions and per_op and dtype in _WIDE:
        yield '{patch_torch_functions} contradicts {dtype}, which means no autocast: write only one of the two'
    if read.patch_torch_functions and not per_op:
        yield "{patch_torch_functions} conflicts with {opt_level}, which casts the model: write 'O1' or 'O4', or drop it"
    if masters == 'split' and not per_op and not is_half:
        yield "{master_weights} conflicts with {opt_level}, {cast_model_type}: no weight is 16-bit. Write 'O2' or 'O5'"
    if masters == 'split' and several:
        yield '{master_weights} conflicts with {num_losses}, which needs whole masters: write master_weights=True'
    if read.accumulate_in_fp32 and several and is_half and not (level.master_weights if masters is None else masters):
        yield '{accumulate_in_fp32} conflicts with {num_losses}, {opt_level} without masters: write master_weights=True'
    scale, words, floor, ceiling = read.scale, read.scale_words, read.min_loss_scale, read.max_loss_scale
    low, high, unbound = scale.min_scale or 0.0, scale.max_scale or math.inf, (None, DEFAULT_MAX_LOSS_SCALE)
    if floor not in (None, low) or ceiling not in (*unbound, high):
        yield '{loss_scale} contradicts {min_loss_scale} or {max_loss_scale}: write each bound in one place'
    if low > high:
        yield f'min_loss_scale={low:g} is above max_loss_scale={high:g}: lower the floor or raise the ceiling'
    if not words.get('dynamic', True) and (floor is not None or ceiling not in unbound):
        yield "{loss_scale} conflicts with {min_loss_scale}, {max_loss_scale}: write loss_scale='dynamic', or no bounds"
    elif 'init_scale' in words and scale.dynamic and scale.enabled and not low <= scale.init_scale <= high:
        yield f"loss_scale['init_scale']={scale.init_scale!r} is not between {low:g} and {high:g}: write another scale"


def _policy(read: SimpleNamespace, level: Policy, given: Mapping[str, Any]) -> Policy:
    """Apply options without conflicts to a level."""
    scale = read.scale
    if scale.dynamic:
        first = min(max(scale.init_scale, scale.min_scale or 0.0), scale.max_scale or math.inf)
        scale = dataclasses.replace(scale, init_scale=first)
    own = {name: getattr(level, name, option.default) for name, option in OPTIONS.items()}
    own |= {'dtype': level.cast_model_type or level.autocast_dtype}
    chosen = {n: v for n, v in vars(read).items() if n in OPTIONS and v not in (own[n], OPTIONS[n].default)}
    fields = {field.name: chosen[field.name] for field in dataclasses.fields(level) if field.name in chosen}
    fields['loss_scale'] = scale
    if scale == level.loss_scale:
        chosen = {name: value for name, value in chosen.items() if not name.endswith('loss_scale')}
    if level.patch_torch_functions:
        # as in mmengine's own wrapper, autocast to float32 or float64 is no autocast
        if read.dtype in _WIDE or read.patch_torch_functions is False:
            fields['autocast_dtype'] = None
    elif read.cast_model_type is False:
        fields['cast_model_type'] = None
    elif read.dtype in HALF_TYPES:
        fields['cast_model_type'] = read.dtype
    if read.master_weights == 'split':
        fields |= {'master_weights': True, 'split_masters': True}
    return dataclasses.replace(level, **fields, overrides={name: given[name] for name in chosen})
