"""The options of a configuration as one table: their types, defaults, values and texts."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal, SupportsIndex, TypeGuard, get_type_hints

import numpy as np
import torch
from typing_extensions import TypedDict

from ..errors import nearest
from .levels import DEFAULT_MAX_LOSS_SCALE, dtype_name, parse_dtype

# -- what a value may be, and what it becomes ----------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """Make Python's own of whole numbers and booleans of NumPy; all else stays as it is."""
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    return int(value) if isinstance(value, numbers.Integral) else value


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


def _is_scale(value: Any) -> bool:
    """Whether ``value`` is a positive number that float32 holds with all its digits."""
    return is_number(value) and bool(torch.finfo(torch.float32).tiny <= value <= torch.finfo(torch.float32).max)


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping)


def to_dtype(value: Any) -> Any:
    """Make a type of torch of its names; all else stays as it is."""
    return parse_dtype(value) or plain(value)


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


def _several(kinds: tuple[Any, ...], expected: str) -> Option:
    """An option that is one or several of some kinds."""

    def are_meant(values: tuple[Any, ...]) -> bool:
        return all(isinstance(value, kinds) and value for value in values)

    return Option(None, (None, are_meant), expected, _to_tuple)


# -- the table ---------------------------------------------------------------------------------------------------------------

#: What ``fp32_ops`` may be: dotted names, objects, dicts with name and output; one or several.
Fp32Names = str | Callable[..., Any] | Mapping[str, str] | Sequence[str | Callable[..., Any] | Mapping[str, str]]

_COUNT = 'a whole number of at least 1'
_SCALE = 'a positive finite number that float32 can hold (1.18e-38 to 3.4e+38)'
_ON, _OFF, _MAY_BE_ON = Option(True, (True, False)), Option(False, (True, False)), Option(None, (True, False, None))
_FLOOR = Option(None, (_is_scale, None), f'{_SCALE}, or None', _to_float)
_CEILING = dataclasses.replace(_FLOOR, default=DEFAULT_MAX_LOSS_SCALE)
_SHORT_COUNT = Option(1, (lambda value: is_whole(value, 1, 2**31),), _COUNT)
_DTYPE = Option(None, (torch.float16, torch.bfloat16, torch.float32, torch.float64, None), convert=to_dtype)
_CAST = Option(None, (torch.float16, torch.bfloat16, torch.float32, False, None), convert=to_dtype)
_LOSS_SCALE = Option(None, ('dynamic', _is_scale, _is_mapping, None), f"'dynamic', {_SCALE}, a dict or None", _to_float)
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
    'init_scale': Option(2.0**16, (_is_scale,), _SCALE, _to_float),
    'growth_factor': Option(2.0, (lambda v: is_number(v) and 1.0 < v < math.inf,), 'above 1.0 and finite', _to_float),
    'backoff_factor': Option(0.5, (lambda v: is_number(v) and 0.0 < v < 1.0,), 'between 0.0 and 1.0', _to_float),
    'growth_interval': dataclasses.replace(_SHORT_COUNT, default=2000),
    'min_scale': _FLOOR,
    'max_scale': _CEILING,
    'hysteresis': _SHORT_COUNT,
    'enabled': _ON,
}
