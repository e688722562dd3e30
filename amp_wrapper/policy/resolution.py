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
from .levels import IN_BFLOAT16, LEVEL_TABLE, LEVELS, MEANINGS, LossScaleConfig, OptLevel, Policy
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
    if isinstance(read.loss_scale, Mapping):
        read.loss_scale = _read_loss_scale(read.loss_scale, problems)
    if read.fp32_ops is not None:
        read.fp32_ops = _find_functions(read.fp32_ops, problems)
    if opt_level in LEVELS:
        level = LEVEL_TABLE[IN_BFLOAT16.get(opt_level, opt_level) if read.dtype is _BF16 else opt_level]
        texts = {name: f'{name}={value!r}' for name, value in {'opt_level': opt_level, **given}.items()}
        problems += [f'{conflict.format(**texts)}.' for conflict in _conflicts(read, level)]
    else:
        close = nearest(str(opt_level).strip().upper(), LEVELS)
        known = '; '.join(f'{name}: {meaning}' for name, meaning in MEANINGS.items())
        problems.append(f'opt_level={opt_level!r} is no opt level{close}. Known are {known}.')
    if problems:
        raise AmpConfigError(problems)
    return _policy(read, level)


def _read_loss_scale(words: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    known = LOSS_SCALE_OPTIONS
    for key in (key for key in words if key not in known):
        close = nearest(str(key), known)
        problems.append(f'loss_scale has an unknown key {key!r}{close}: known are {", ".join(known)}.')
    return {key: known[key].read(f'loss_scale[{key!r}]', words[key], problems) for key in words if key in known}


def _find_functions(items: Iterable[Any], problems: list[str]) -> tuple[Fp32Op, ...]:
    """Find the members of ``fp32_ops``."""
    found = []
    for item in items:
        words = {'output': CALLER, **(item if isinstance(item, Mapping) else {'name': item})}
        if words.keys() != {'name', 'output'} or words['output'] not in (CALLER, FLOAT32):
            problems.append(f"fp32_ops={item!r} must be dict(name=..., output='caller' or 'float32').")
            continue
        op = Fp32Op(lookup.name_of(words['name']), words['output'])
        problem = lookup.problem_of(op.name)
        problems += [f'fp32_ops={words["name"]!r} {problem}.'] if problem else []
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
    if per_op and cast in HALF_TYPES:
        yield f'{{cast_model_type}} conflicts with {{opt_level}}, which leaves the model in FP32: {_CAST_INSTEAD}'
    if per_op and read.keep_batchnorm_fp32 is not None:
        yield f'{{keep_batchnorm_fp32}} conflicts with {{opt_level}}, which never casts BatchNorm: {_CAST_INSTEAD}'
    if per_op and masters is not None:
        yield f'{{master_weights}} conflicts with {{opt_level}}, whose weights are FP32 already: {_CAST_INSTEAD}'
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
    scale, words, unbound = _loss_scale(read, level), read.loss_scale, (None, OPTIONS['max_loss_scale'].default)
    low, high = scale.min_scale or 0.0, scale.max_scale or math.inf
    floor, ceiling = read.min_loss_scale, read.max_loss_scale
    if floor not in (None, low) or ceiling not in (*unbound, high):
        yield '{loss_scale} contradicts {min_loss_scale} or {max_loss_scale}: write each bound in one place'
    if low > high:
        yield f'min_loss_scale={low:g} is above max_loss_scale={high:g}: lower the floor or raise the ceiling'
    if isinstance(words, float) and (floor is not None or ceiling not in unbound):
        yield "{loss_scale} conflicts with {min_loss_scale}, {max_loss_scale}: write loss_scale='dynamic', or no bounds"
    if isinstance(words, dict) and 'init_scale' in words and scale.enabled and not low <= scale.init_scale <= high:
        yield f"loss_scale['init_scale']={scale.init_scale!r} is not between {low:g} and {high:g}: write another scale"


def _loss_scale(read: SimpleNamespace, level: Policy) -> LossScaleConfig:
    """Make the loss scale, which starts where it is asked to, within its bounds or not."""
    words: dict[str, Any] = {'min_scale': read.min_loss_scale, 'max_scale': read.max_loss_scale}
    if read.loss_scale is None:
        words |= {'dynamic': level.loss_scale.dynamic, 'init_scale': level.loss_scale.init_scale}
    elif isinstance(read.loss_scale, float):
        words |= {'dynamic': False, 'init_scale': read.loss_scale}
    elif isinstance(read.loss_scale, dict):
        words |= read.loss_scale
    return LossScaleConfig(**words)


def _policy(read: SimpleNamespace, level: Policy) -> Policy:
    """Apply options without conflicts to a level."""
    dtype, read.dtype = read.dtype, None
    if level.patch_torch_functions:
        # no cast is what these levels do. And, as in mmengine's own wrapper, autocast to float32 or float64 is no autocast
        read.cast_model_type = None
        read.patch_torch_functions = False if dtype in _WIDE else read.patch_torch_functions
    elif dtype in HALF_TYPES and read.cast_model_type is None:
        read.cast_model_type = dtype
    own = {name: getattr(level, name, option.default) for name, option in OPTIONS.items()}
    chosen = {name: value for name, value in vars(read).items() if value not in (own[name], OPTIONS[name].default)}
    fields = {field.name: chosen[field.name] for field in dataclasses.fields(level) if field.name in chosen}
    if read.cast_model_type is False:
        fields['cast_model_type'] = None
    if read.patch_torch_functions is False:
        fields['autocast_dtype'] = None
    if read.master_weights == 'split':
        fields |= {'master_weights': True, 'split_masters': True}
    scale = _loss_scale(read, level)
    if scale.dynamic:
        first = min(max(scale.init_scale, scale.min_scale or 0.0), scale.max_scale or math.inf)
        scale = dataclasses.replace(scale, init_scale=first)
    policy = dataclasses.replace(level, **{**fields, 'loss_scale': scale})
    overrides = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in chosen.items()
        if scale != level.loss_scale or not name.endswith('loss_scale')
    }
    if policy.fp32_ops:
        overrides['fp32_ops'] = policy.to_dict()['fp32_ops']
    return dataclasses.replace(policy, overrides=overrides)
