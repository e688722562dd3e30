"""The options of a configuration as one table: their types, defaults, tests and texts."""

from __future__ import annotations

import dataclasses
import math
import numbers
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, SupportsIndex, TypeGuard, get_type_hints

import numpy as np
import torch
from typing_extensions import TypedDict

from .levels import DEFAULT_MAX_LOSS_SCALE, parse_dtype, spellings

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


def is_scale(value: Any) -> bool:
    """Whether ``value`` is a positive number that float32 holds with all its digits."""
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
SCALE = 'must be a positive finite number that float32 can hold (1.18e-38 to 3.4e+38)'
_OFF, _ON = Option(False, _is_flag, 'must be True or False'), Option(True, _is_flag, 'must be True or False')
_MAY_BE_ON = Option(None, _is_optional(_is_flag), 'must be True, False or None')
FLOOR = Option(None, _is_optional(is_scale), SCALE, lambda value: None if value is None else float(value))
_CEILING = dataclasses.replace(FLOOR, default=DEFAULT_MAX_LOSS_SCALE)


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
    min_loss_scale: Annotated[float | None, FLOOR]
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
    'init_scale': Option(None, is_scale, SCALE, float),
    'growth_factor': Option(None, lambda v: is_number(v) and 1.0 < v < math.inf, 'must be above 1.0 and finite', float),
    'backoff_factor': Option(None, lambda v: is_number(v) and 0.0 < v < 1.0, 'must lie between 0.0 and 1.0', float),
    'growth_interval': Option(None, _is_short_count, _COUNT),
    'min_scale': FLOOR,
    'max_scale': _CEILING,
    'hysteresis': Option(None, _is_short_count, _COUNT),
    'enabled': _ON,
}
