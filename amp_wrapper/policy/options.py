"""The options of a configuration as one table, and how a level and its options become a :class:`Policy`."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Annotated, Any, Literal, SupportsIndex, TypeGuard, get_type_hints

import numpy as np
import torch
from typing_extensions import TypedDict, Unpack

from ..errors import AmpConfigError, nearest
from . import lookup
from .fp32_registry import CALLER, FLOAT32, Fp32Op
from .levels import IN_BFLOAT16, LEVEL_TABLE, LEVELS, LossScaleConfig, OptLevel, Policy, dtype_name, to_dtype
from .nested import HALF_TYPES

# -- what a value may be, and what it becomes ----------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """Make Python's own of numbers and booleans of NumPy; all else stays as it is."""
    return value.item() if isinstance(value, np.generic) else value


def is_number(value: Any) -> bool:
    """Whether ``value`` is a real number and no boolean."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def is_whole(value: Any, low: int | None = 0, below: int | None = None) -> TypeGuard[SupportsIndex]:
    """Whether ``value`` is a whole number as of :func:`plain`, no boolean, not less than ``low`` and less than ``below``."""
    number = plain(value)
    return type(number) is int and (low is None or low <= number) and (below is None or number < below)


def is_count(value: Any) -> bool:
    """Whether ``value`` is a whole number of at least 1."""
    return is_whole(value, 1)


def is_scale(value: Any) -> bool:
    """Whether ``value`` is a positive number that float32 holds with all its digits."""
    return is_number(value) and bool(torch.finfo(torch.float32).tiny <= value <= torch.finfo(torch.float32).max)


def _to_flag(value: Any) -> Any:
    return {'True': True, 'False': False}.get(value, value) if isinstance(value, str) else plain(value)


def _to_float(value: Any) -> Any:
    with suppress(ValueError):
        return float(value) if is_number(value) or isinstance(value, str) else value
    return value


def _to_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, (list, tuple)) else None if value is None else (value,)


@dataclasses.dataclass(frozen=True)
class Option:
    """One option.

    Attributes:
        default: Its value where none is given.
        allowed: Values, and tests of values, that mean something at some level, after ``convert``.
        expected: What it must be, in an error; the allowed values by default.
        convert: Makes the form that the code works with; what has none stays as it is.
    """

    default: Any
    allowed: tuple[Any, ...]
    expected: str = ''
    convert: Callable[[Any], Any] = plain

    def read(self, label: str, value: Any, problems: list[str]) -> Any:
        """Convert a value. One that is not allowed adds a sentence to ``problems``, and the default is returned."""
        found = self.convert(value)
        # 1 is not True
        if any(each(found) if callable(each) else (type(found), found) == (type(each), each) for each in self.allowed):
            return found
        values = (repr(dtype_name(each) if isinstance(each, torch.dtype) else each) for each in self.allowed)
        close = nearest(str(value), [each for each in self.allowed if isinstance(each, str)])
        problems.append(f'{label}={value!r} must be {self.expected or " or ".join(values)}{close}.')
        return self.default


def read_words(name: str, words: Mapping[str, Any], table: Mapping[str, Option], problems: list[str]) -> dict[str, Any]:
    """Convert the values of an option that is a dict, by the table of its keys. What is wrong adds to ``problems``."""
    for key in (key for key in words if key not in table):
        problems.append(f'{name} has an unknown key {key!r}{nearest(str(key), table)}: known are {", ".join(table)}.')
    return {key: table[key].read(f'{name}[{key!r}]', words[key], problems) for key in words if key in table}


def read_options(table: Mapping[str, Option], given: Mapping[str, Any]) -> dict[str, Any]:
    """Check arguments by a table.

    Raises:
        AmpConfigError: All that are wrong, in one message.
    """
    problems: list[str] = []
    found = {name: option.read(name, given[name], problems) for name, option in table.items()}
    if problems:
        raise AmpConfigError(problems)
    return found


def _several(kinds: tuple[Any, ...], expected: str) -> Option:
    """An option that is one or several of some kinds."""

    are_meant = (None, lambda values: all(isinstance(value, kinds) and value for value in values))
    return Option(None, are_meant, expected, _to_tuple)


# -- the table ---------------------------------------------------------------------------------------------------------------

#: What ``fp32_ops`` may be: dotted names, objects, dicts with name and output; one or several.
Fp32Names = str | Callable[..., Any] | Mapping[str, str] | Sequence[str | Callable[..., Any] | Mapping[str, str]]

_COUNT = 'a whole number of at least 1'
_SCALE = 'a positive finite number that float32 can hold (1.18e-38 to 3.4e+38)'
_ON, _OFF, _MAY_BE_ON = Option(True, (True, False)), Option(False, (True, False)), Option(None, (True, False, None))
_FLOOR = Option(None, (is_scale, None), f'{_SCALE}, or None', _to_float)
_CEILING = dataclasses.replace(_FLOOR, default=LossScaleConfig.max_scale)
_SHORT_COUNT = Option(1, (lambda value: is_whole(value, 1, 2**31),), _COUNT)
_DTYPE = Option(None, (torch.float16, torch.bfloat16, torch.float32, torch.float64, None), convert=to_dtype)
_CAST = Option(None, (torch.float16, torch.bfloat16, torch.float32, False, None), convert=to_dtype)
_SCALES = ('dynamic', None, is_scale, lambda value: isinstance(value, Mapping))
_LOSS_SCALE = Option(None, _SCALES, f"'dynamic', {_SCALE}, a dict or None", _to_float)
_MODULES = _several((str, type), "module classes, their names or patterns of names, such as ['bbox_head.*', 'GRU']")
_FUNCTIONS = _several((str, Callable, Mapping), 'functions, classes, their dotted names, or dicts of name and output')


class SharedOptions(TypedDict, total=False):
    """The options that every integration takes, beside the level.

    Attributes:
        enabled (bool): False makes everything a no-op; the rest is still checked.
        cast_model_type (str | torch.dtype | bool | None): float32, float16, bfloat16, or False for no cast at all.
        patch_torch_functions (bool | None): Whether :class:`torch.autocast` runs (O1, O4).
        keep_batchnorm_fp32 (bool | str | None): True, False, 'True' or 'False'.
        loss_scale (float | str | Mapping[str, Any] | None): 'dynamic', a positive finite number (also as a string), a dict in
            ``GradScaler``'s words (``init_scale``, ``growth_factor``, ``backoff_factor``, ``growth_interval``, ``enabled``,
            and ours: ``min_scale``, ``max_scale``, ``hysteresis``), or None for the level's own.
        cast_model_outputs (str | torch.dtype | None): The dtype of the model's floating outputs.
        keep_fp32 (str | type | Sequence[str | type] | None): Module classes, class names, or glob patterns over qualified
            names that stay FP32.
        fp32_ops (Fp32Names | None): Functions, methods, autograd Functions and module classes that run in FP32 beside those
            of :data:`amp_wrapper.policy.fp32_registry.FP32_OPS`: dotted names, or the objects themselves. Results return to
            the caller's dtype, unless a dict says otherwise: ``dict(name='torch.Tensor.sum', output='float32')``.
        keep_inputs (str | Sequence[str] | None): Names of arguments of ``forward``, of the model or of a module below it,
            whose floating tensors are not cast: time steps, coordinates, positions.
        num_losses (int): Number of losses with a scale of their own.
        verbosity (int): 0, 1 or 2.
        min_loss_scale (float | None): Floor of a dynamic scale.
        max_loss_scale (float | None): Ceiling of a dynamic scale; None for none.
        from_16bit (bool): Whether trainable weights that are 16-bit already are taken.
        restore_buffers_on_skip (bool): Whether a skipped step restores buffers (BatchNorm's statistics, counters) that its
            forward passes have changed.
    """

    enabled: Annotated[bool, _ON]
    cast_model_type: Annotated[str | torch.dtype | bool | None, _CAST]
    patch_torch_functions: Annotated[bool | None, _MAY_BE_ON]
    keep_batchnorm_fp32: Annotated[bool | str | None, Option(None, (True, False, None), convert=_to_flag)]
    loss_scale: Annotated[float | str | Mapping[str, Any] | None, _LOSS_SCALE]
    cast_model_outputs: Annotated[str | torch.dtype | None, _DTYPE]
    keep_fp32: Annotated[str | type | Sequence[str | type] | None, _MODULES]
    fp32_ops: Annotated[Fp32Names | None, _FUNCTIONS]
    keep_inputs: Annotated[str | Sequence[str] | None, _several((str,), 'names of arguments of forward')]
    num_losses: Annotated[int, Option(1, (is_count,), _COUNT)]
    verbosity: Annotated[int, Option(1, (0, 1, 2), '0 (silent), 1 (overflows) or 2 (every cast too)')]
    min_loss_scale: Annotated[float | None, _FLOOR]
    max_loss_scale: Annotated[float | None, _CEILING]
    from_16bit: Annotated[bool, _OFF]
    restore_buffers_on_skip: Annotated[bool, _ON]


class PolicyOptions(SharedOptions, total=False):
    """The options of :func:`resolve`, beside the level.

    Attributes:
        dtype (str | torch.dtype | None): 'bfloat16' turns O1 into O4, O2 into O5 and O3 into pure bfloat16. 'float32' or
            'float64' at O1 and O4 mean "no autocast", as in mmengine's own wrapper.
        master_weights (bool | Literal['split'] | None): Whether to keep FP32 masters of 16-bit weights. ``'split'`` keeps
            each as the weight and a 16-bit remainder, for this package's fused optimizers.
        skip_nonfinite (bool | None): Whether a static scale checks gradients and skips non-finite steps. None: at every level
            but O0.
        max_consecutive_skips (int | None): Limit of skipped steps in a row; None for none.
        accumulate_in_fp32 (bool): Whether the gradients of 16-bit weights are summed in FP32 during accumulation.
    """

    dtype: Annotated[str | torch.dtype | None, _DTYPE]
    master_weights: Annotated[bool | Literal['split'] | None, Option(None, (True, False, 'split', None))]
    skip_nonfinite: Annotated[bool | None, _MAY_BE_ON]
    max_consecutive_skips: Annotated[int | None, Option(50, (is_count, None), f'{_COUNT}, or None')]
    accumulate_in_fp32: Annotated[bool, _OFF]


#: Every option by its name, as :class:`PolicyOptions` has it.
OPTIONS: dict[str, Option] = {
    name: hint.__metadata__[0] for name, hint in get_type_hints(PolicyOptions, include_extras=True).items()
}
#: The keys of a ``loss_scale`` that is a dict: the words of :class:`torch.amp.GradScaler`, and ours.
LOSS_SCALE_OPTIONS: dict[str, Option] = {
    'init_scale': Option(2.0**16, (is_scale,), _SCALE, _to_float),
    'growth_factor': Option(2.0, (lambda v: is_number(v) and 1.0 < v < math.inf,), 'above 1.0 and finite', _to_float),
    'backoff_factor': Option(0.5, (lambda v: is_number(v) and 0.0 < v < 1.0,), 'between 0.0 and 1.0', _to_float),
    'growth_interval': dataclasses.replace(_SHORT_COUNT, default=2000),
    'min_scale': _FLOOR,
    'max_scale': _CEILING,
    'hysteresis': _SHORT_COUNT,
    'enabled': _ON,
}

# -- a level and its options -------------------------------------------------------------------------------------------------

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
        AmpConfigError: An option that does not exist; every conflict of the configuration, in one message.
    """
    for name in options:
        if name not in OPTIONS:
            raise AmpConfigError([f'{name}=... is no option{nearest(name, OPTIONS)}.'])
    problems: list[str] = []
    given: dict[str, Any] = {name: options.get(name, option.default) for name, option in OPTIONS.items()}
    read = SimpleNamespace(**{name: option.read(name, given[name], problems) for name, option in OPTIONS.items()})
    read.fp32_ops = _find_functions(read.fp32_ops or (), problems)
    if opt_level not in LEVELS:
        close = nearest(str(opt_level).strip().upper(), LEVELS)
        known = '; '.join(each.describe() for each in LEVEL_TABLE.values())
        raise AmpConfigError([*problems, f'opt_level={opt_level!r} is no opt level{close}. Known are {known}.'])
    level = LEVEL_TABLE[IN_BFLOAT16.get(opt_level, opt_level) if read.dtype is _BF16 else opt_level]
    if level.patch_torch_functions and read.cast_model_type in (False, torch.float32):
        # no cast is what these levels do
        read.cast_model_type = None
    scale = _loss_scale(read, level.loss_scale, problems)
    texts = {name: f'{name}={value!r}' for name, value in {'opt_level': opt_level, **given}.items()}
    problems += [f'{conflict.format(**texts)}.' for conflict in _conflicts(read, level)]
    if problems:
        raise AmpConfigError(problems)
    return _policy(read, level, scale, given)


def _find_functions(items: Iterable[Any], problems: list[str]) -> tuple[Fp32Op, ...]:
    """Find the members of ``fp32_ops``."""
    found = []
    for item in items:
        words = {'name': '', 'output': CALLER, **(item if isinstance(item, Mapping) else {'name': item})}
        is_meant = len(words) == 2 and words['output'] in (CALLER, FLOAT32)
        op = Fp32Op(lookup.name_of(words['name']), output=words['output'])
        problem = lookup.problem_of(op.name) if is_meant else "must be dict(name=..., output='caller' or 'float32')"
        problems += [f'fp32_ops={item!r} {problem}.'] if problem else []
        found.append(op)
    return tuple(dict.fromkeys(found))


def _loss_scale(read: SimpleNamespace, own: LossScaleConfig, problems: list[str]) -> LossScaleConfig:
    """Read a loss scale and its bounds. What is wrong, or what the bounds would change, adds to ``problems``."""
    value, floor, ceiling = read.loss_scale, read.min_loss_scale, read.max_loss_scale
    words = {'dynamic': False, 'init_scale': value} if isinstance(value, float) else {}
    if isinstance(value, Mapping):
        words = read_words('loss_scale', value, LOSS_SCALE_OPTIONS, problems)
    own = own if value is None else LossScaleConfig()
    scale = dataclasses.replace(own, **{'min_scale': floor, 'max_scale': ceiling, **words})
    low, high = scale.min_scale or 0.0, scale.max_scale or math.inf
    first = min(max(scale.init_scale, low), high) if scale.dynamic else scale.init_scale
    has_bounds = floor is not None or ceiling not in (None, LossScaleConfig.max_scale)
    if low > high:
        problems.append(f'min_loss_scale={low:g} is above max_loss_scale={high:g}: change one of them.')
    elif has_bounds and not words.keys().isdisjoint(('dynamic', 'min_scale', 'max_scale')):
        beside = f'min_loss_scale={floor!r}, max_loss_scale={ceiling!r}'
        problems.append(f"loss_scale={value!r} conflicts with {beside}: write 'dynamic', or no bounds beside it.")
    elif 'init_scale' in words and scale.enabled and first != scale.init_scale:
        problems.append(f"loss_scale['init_scale']={scale.init_scale!r} is not between {low:g} and {high:g}.")
    return dataclasses.replace(scale, init_scale=first)


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
    if read.accumulate_in_fp32 and is_half and (level.master_weights if masters is None else masters) is not True:
        yield '{accumulate_in_fp32} conflicts with {opt_level} without whole masters, for the sums: write master_weights=True'


def _policy(read: SimpleNamespace, level: Policy, scale: LossScaleConfig, given: Mapping[str, Any]) -> Policy:
    """Apply options without conflicts to a level."""
    if read.dtype is (level.cast_model_type or level.autocast_dtype):
        read.dtype = None
    own = {name: getattr(level, name, option.default) for name, option in OPTIONS.items()}
    chosen = {name: value for name, value in vars(read).items() if value not in (own[name], OPTIONS[name].default)}
    if scale == level.loss_scale:
        chosen = {name: value for name, value in chosen.items() if not name.endswith('loss_scale')}
    fields = {name: value for name, value in chosen.items() if name in vars(level)} | {'loss_scale': scale}
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
