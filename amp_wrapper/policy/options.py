"""The options of a configuration as one table, and how a level and its options become a :class:`Policy`, or one error with
every conflict."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import numbers
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, SupportsIndex, TypeGuard, get_type_hints

import numpy as np
import torch
from typing_extensions import TypedDict, Unpack

from ..errors import AmpConfigError, nearest
from . import lookup
from .fp32_registry import CALLER, FLOAT32, Fp32Op
from .levels import (
    DEFAULT_MAX_LOSS_SCALE,
    IN_BFLOAT16,
    LEVEL_TABLE,
    MEANINGS,
    LossScaleConfig,
    OptLevel,
    Policy,
    parse_dtype,
    spellings,
)
from .nested import HALF_TYPES

_F16, _BF16, _F32, _F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64

# -- what a value may be -----------------------------------------------------------------------------------------------------


def is_number(value: Any) -> bool:
    """Whether ``value`` is a real number and no boolean."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def plain(value: Any) -> Any:
    """A whole number of any kind, such as one of NumPy, as an ``int``, and NumPy's booleans as ``bool``; all else as it is.

    Syncs with a tensor on a GPU.
    """
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    if getattr(value, 'dtype', None) is torch.bool:
        return value
    try:
        return operator.index(value)
    except TypeError:
        return value


def is_whole(value: Any, low: int | None = 0, below: int | None = None) -> TypeGuard[SupportsIndex]:
    """Whether ``value`` is a whole number as of :func:`plain`, no boolean, not less than ``low`` and less than ``below``."""
    number = plain(value)
    if isinstance(number, bool) or not isinstance(number, int):
        return False
    return (low is None or low <= number) and (below is None or number < below)


def is_count(value: Any) -> bool:
    """Whether ``value`` is a whole number of at least 1."""
    return is_whole(value, 1)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_scale(value: Any) -> bool:
    return is_number(value) and bool(torch.finfo(_F32).tiny <= value <= torch.finfo(_F32).max)


def _is_short_count(value: Any) -> bool:
    return is_whole(value, 1, 2**31)


def _is_optional(test: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or test(value)


def _is_one_of(*allowed: Any) -> Callable[[Any], bool]:
    """A test for "equal to one of ``allowed``, and of its type": 1 is not True."""
    return lambda value: any(type(value) is type(each) and value == each for each in allowed)


def _is_type(*allowed: torch.dtype) -> Callable[[Any], bool]:
    return lambda value: value is None or parse_dtype(value) in allowed


def _is_floating(value: Any) -> bool:
    dtype = parse_dtype(value)
    return dtype is not None and dtype.is_floating_point


def _are_all(test: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: all(map(test, _listed(value)))


def _listed(value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def _same(value: Any) -> Any:
    return value


@dataclasses.dataclass(frozen=True)
class Option:
    """One option.

    Attributes:
        default: Its value where none is given.
        test: Whether a value means something, at some level.
        expected: What an error says after ``name=value``.
        convert: Gives the form that the code works with; called with values that passed.
        per_op: Why O1 and O4, which cast per operation, refuse any value but None; '' where they do not.
    """

    default: Any
    test: Callable[[Any], bool]
    expected: str
    convert: Callable[[Any], Any] = _same
    per_op: str = ''

    def read(self, label: str, value: Any, problems: list[str]) -> Any:
        """The converted value, one of NumPy as Python's own; for one that fails the test, the default, and a sentence in
        ``problems``."""
        if self.test(plain(value)):
            return self.convert(plain(value))
        problems.append(f'{label}={value!r} {self.expected}.')
        return self.default


# -- the table ---------------------------------------------------------------------------------------------------------------

#: What ``fp32_ops`` may be: dotted names, objects, dicts with name and output; one or several.
Fp32Names = str | Callable[..., Any] | Mapping[str, str] | Sequence[str | Callable[..., Any] | Mapping[str, str]]

_TYPE = 'a torch.dtype of these'
_COUNT = 'must be a whole number of at least 1'
_SCALE = 'must be a positive finite number that float32 can hold (1.18e-38 to 3.4e+38)'
_OFF, _ON = Option(False, _is_flag, 'must be True or False'), Option(True, _is_flag, 'must be True or False')
_MAY_BE_ON = Option(None, _is_optional(_is_flag), 'must be True, False or None')
_FLOOR = Option(None, _is_optional(_is_scale), _SCALE, lambda value: None if value is None else float(value))
_CEILING = dataclasses.replace(_FLOOR, default=DEFAULT_MAX_LOSS_SCALE)


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
    cast_model_type: Annotated[
        str | torch.dtype | bool | None,
        Option(
            None,
            lambda value: value is False or _is_type(_F16, _BF16, _F32)(value),
            f"must be {spellings(_F16, _BF16, _F32)}, {_TYPE}, False (no cast) or None (the level's own)",
            lambda value: parse_dtype(value) if value else value,
            per_op='which leaves the model in FP32 and casts per operation',
        ),
    ]
    patch_torch_functions: Annotated[bool | None, _MAY_BE_ON]
    keep_batchnorm_fp32: Annotated[
        bool | str | None,
        Option(
            None,
            _is_one_of(None, True, False, 'True', 'False'),
            "must be True, False, 'True', 'False' or None (the level's own)",
            lambda value: value == 'True' if isinstance(value, str) else value,
            per_op='which never casts BatchNorm',
        ),
    ]
    # a dict has options of its own: LOSS_SCALE_OPTIONS
    loss_scale: Annotated[float | str | Mapping[str, Any] | None, Option(None, lambda value: True, '')]
    cast_model_outputs: Annotated[
        str | torch.dtype | None,
        Option(
            None,
            _is_optional(_is_floating),
            f'must be {spellings(_F16, _BF16, _F32, _F64)}, any floating torch.dtype, or None',
            parse_dtype,
        ),
    ]
    keep_fp32: Annotated[
        str | type | Sequence[str | type] | None,
        Option(
            None,
            _are_all(lambda item: isinstance(item, (str, type)) and bool(item)),
            'must be a list of module classes, class names or glob patterns over qualified names, '
            "such as ['bbox_head.*', 'LayerNorm']",
            _listed,
        ),
    ]
    fp32_ops: Annotated[
        Fp32Names | None,
        Option(
            None,
            _are_all(lambda item: callable(item) or (isinstance(item, (str, Mapping)) and bool(item))),
            "must be a list of dotted names of functions, methods or classes, such as ['mmcv.ops.nms'], "
            "or of dicts such as dict(name='torch.Tensor.sum', output='float32')",
            _listed,
        ),
    ]
    keep_inputs: Annotated[
        str | Sequence[str] | None,
        Option(
            None,
            _are_all(lambda item: isinstance(item, str) and item.isidentifier()),
            "must be a list of names of arguments of forward, such as ['timestep']",
            _listed,
        ),
    ]
    num_losses: Annotated[int, Option(1, is_count, _COUNT)]
    verbosity: Annotated[int, Option(1, _is_one_of(0, 1, 2), 'must be 0 (silent), 1 (overflows) or 2 (every cast too)')]
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

    dtype: Annotated[
        str | torch.dtype | None,
        Option(
            None,
            _is_type(_F16, _BF16, _F32, _F64),
            f'must be {spellings(_F16, _BF16, _F32, _F64)}, {_TYPE}, or None',
            parse_dtype,
        ),
    ]
    master_weights: Annotated[
        bool | Literal['split'] | None,
        Option(
            None,
            _is_one_of(None, True, False, 'split'),
            "must be True, False, 'split' or None (the level's own)",
            per_op='whose weights are FP32 already',
        ),
    ]
    skip_nonfinite: Annotated[bool | None, _MAY_BE_ON]
    max_consecutive_skips: Annotated[int | None, Option(50, _is_optional(is_count), f'{_COUNT}, or None for none')]
    accumulate_in_fp32: Annotated[bool, _OFF]


#: Every option by its name, as :class:`PolicyOptions` has it.
OPTIONS: dict[str, Option] = {
    name: hint.__metadata__[0] for name, hint in get_type_hints(PolicyOptions, include_extras=True).items()
}
#: The keys of a ``loss_scale`` that is a dict: the words of :class:`torch.amp.GradScaler`, and ours.
LOSS_SCALE_OPTIONS: dict[str, Option] = {
    'init_scale': Option(None, _is_scale, _SCALE, float),
    'growth_factor': Option(None, lambda v: is_number(v) and 1.0 < v < math.inf, 'must be above 1.0 and finite', float),
    'backoff_factor': Option(None, lambda v: is_number(v) and 0.0 < v < 1.0, 'must lie between 0.0 and 1.0', float),
    'growth_interval': Option(None, _is_short_count, _COUNT),
    'min_scale': _FLOOR,
    'max_scale': _CEILING,
    'hysteresis': Option(None, _is_short_count, _COUNT),
    'enabled': _ON,
}

#: What the keys of its bounds are called as options.
_BOUNDS = {'min_scale': 'min_loss_scale', 'max_scale': 'max_loss_scale'}

# -- from options to a policy ------------------------------------------------------------------------------------------------


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
    bounds = {key: read[name] if _FLOOR.test(plain(given[name])) else None for key, name in _BOUNDS.items()}
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
    elif not _is_scale(value):
        problems.append(f'loss_scale={value!r} {_SCALE}.')
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
