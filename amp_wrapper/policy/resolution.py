"""Resolves a level and the overrides of a configuration to a :class:`Policy`, or to one error with every conflict."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import torch
from typing_extensions import TypedDict, Unpack

from ..errors import AmpConfigError
from . import lookup
from .fp32_registry import CALLER, FLOAT32, Fp32Op
from .loss_scale import BOUNDS, loss_scale_options, resolve_loss_scale
from .nested import HALF_TYPES
from .options import Option, is_count, is_flag, one_of, optional
from .policy import IN_BFLOAT16, LEVEL_TABLE, MEANINGS, OptLevel, Policy, parse_dtype, spellings

#: What ``fp32_ops`` may be: dotted names, objects, dicts with name and output; one or several.
Fp32Names = str | Callable[..., Any] | Mapping[str, str] | Sequence[str | Callable[..., Any] | Mapping[str, str]]


class SharedOptions(TypedDict, total=False):
    """The options that every integration takes, beside the level.

    Attributes:
        enabled: False makes everything a no-op; the rest is still checked.
        cast_model_type: float32, float16, bfloat16, or False for no cast at all.
        patch_torch_functions: Whether :class:`torch.autocast` runs (O1, O4).
        keep_batchnorm_fp32: True, False, 'True' or 'False'.
        loss_scale: 'dynamic', a positive finite number (also as a string), a dict in ``GradScaler``'s words
            (``init_scale``, ``growth_factor``, ``backoff_factor``, ``growth_interval``, ``enabled``, and ours:
            ``min_scale``, ``max_scale``, ``hysteresis``), or None for the level's own.
        cast_model_outputs: The dtype of the model's floating outputs.
        keep_fp32: Module classes, class names, or glob patterns over qualified names that stay FP32.
        fp32_ops: Functions, methods, autograd Functions and module classes that run in FP32 beside those of
            :data:`amp_wrapper.policy.fp32_registry.FP32_OPS`: dotted names, or the objects themselves. Results return to the
            caller's dtype, unless a dict says otherwise: ``dict(name='torch.Tensor.sum', output='float32')``.
        keep_inputs: Names of arguments of ``forward``, of the model or of a module below it, whose floating tensors are not
            cast: time steps, coordinates, positions.
        num_losses: Number of losses with a scale of their own.
        verbosity: 0, 1 or 2.
        min_loss_scale: Floor of a dynamic scale.
        max_loss_scale: Ceiling of a dynamic scale; None for none.
        from_16bit: Whether trainable weights that are 16-bit already are taken.
        restore_buffers_on_skip: Whether a skipped step restores buffers (BatchNorm's statistics, counters) that its forward
            passes have changed.
    """

    enabled: bool
    cast_model_type: str | torch.dtype | bool | None
    patch_torch_functions: bool | None
    keep_batchnorm_fp32: bool | str | None
    loss_scale: float | str | Mapping[str, Any] | None
    cast_model_outputs: str | torch.dtype | None
    keep_fp32: str | type | Sequence[str | type] | None
    fp32_ops: Fp32Names | None
    keep_inputs: str | Sequence[str] | None
    num_losses: int
    verbosity: int
    min_loss_scale: float | None
    max_loss_scale: float | None
    from_16bit: bool
    restore_buffers_on_skip: bool


class PolicyOptions(SharedOptions, total=False):
    """The options of :func:`resolve`, beside the level.

    Attributes:
        dtype: 'bfloat16' turns O1 into O4, O2 into O5 and O3 into pure bfloat16. 'float32' or 'float64' at O1 and O4
            mean "no autocast", as in mmengine's own wrapper.
        master_weights: Whether to keep FP32 masters of 16-bit weights. ``'split'`` keeps each as the weight and a 16-bit
            remainder, for this package's fused optimizers.
        skip_nonfinite: Whether a static scale checks gradients and skips non-finite steps. None: at every level but O0.
        max_consecutive_skips: Limit of skipped steps in a row; None for none.
        accumulate_in_fp32: Whether the gradients of 16-bit weights are summed in FP32 during accumulation.
    """

    dtype: str | torch.dtype | None
    master_weights: bool | Literal['split'] | None
    skip_nonfinite: bool | None
    max_consecutive_skips: int | None
    accumulate_in_fp32: bool


def _is_floating(value: Any) -> bool:
    dtype = parse_dtype(value)
    return dtype is not None and dtype.is_floating_point


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _are_modules(value: Any) -> bool:
    return all(isinstance(item, (str, type)) and item for item in _listed(value))


def _are_functions(value: Any) -> bool:
    return all((isinstance(item, (str, Mapping)) and item) or callable(item) for item in _listed(value))


_FLAG = 'must be True or False'
_COUNT = 'must be a whole number of at least 1'
_F16, _BF16, _F32, _F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64

#: Every option: default, test, what an error says, conversion, and why O1 and O4 refuse it. The types that type checkers
#: know are :class:`PolicyOptions`.
OPTIONS: Mapping[str, Option] = MappingProxyType(
    {
        'enabled': Option(True, is_flag, _FLAG),
        'dtype': Option(
            None,
            lambda value: value is None or parse_dtype(value) in (_F16, _BF16, _F32, _F64),
            f'must be {spellings(_F16, _BF16, _F32, _F64)}, a torch.dtype of these, or None',
            parse_dtype,
        ),
        'cast_model_type': Option(
            None,
            lambda value: value is None or value is False or parse_dtype(value) in (_F16, _BF16, _F32),
            f"must be {spellings(_F16, _BF16, _F32)}, a torch.dtype of these, False (no cast) or None (the level's own)",
            lambda value: parse_dtype(value) if value else value,
            per_op='which leaves the model in FP32 and casts per operation',
        ),
        'patch_torch_functions': Option(None, optional(is_flag), 'must be True, False or None'),
        'keep_batchnorm_fp32': Option(
            None,
            one_of(None, True, False, 'True', 'False'),
            "must be True, False, 'True', 'False' or None (the level's own)",
            lambda value: value == 'True' if isinstance(value, str) else value,
            per_op='which never casts BatchNorm',
        ),
        'master_weights': Option(
            None,
            one_of(None, True, False, 'split'),
            "must be True, False, 'split' or None (the level's own)",
            per_op='whose weights are FP32 already',
        ),
        # a dict of options of its own: see resolve_loss_scale
        'loss_scale': Option(None, lambda value: True, ''),
        **BOUNDS,
        'cast_model_outputs': Option(
            None,
            optional(_is_floating),
            f'must be {spellings(_F16, _BF16, _F32, _F64)}, any floating torch.dtype, or None',
            parse_dtype,
        ),
        'keep_fp32': Option(
            None,
            _are_modules,
            'must be a list of module classes, class names or glob patterns over qualified names, '
            "such as ['bbox_head.*', 'LayerNorm']",
            lambda value: tuple(_listed(value)),
        ),
        'fp32_ops': Option(
            None,
            _are_functions,
            "must be a list of dotted names of functions, methods or classes, such as ['mmcv.ops.nms'], "
            "or of dicts such as dict(name='torch.Tensor.sum', output='float32')",
        ),
        'keep_inputs': Option(
            None,
            lambda value: all(isinstance(item, str) and item.isidentifier() for item in _listed(value)),
            "must be a list of names of arguments of forward, such as ['timestep']",
            lambda value: tuple(_listed(value)),
        ),
        'num_losses': Option(1, is_count, _COUNT),
        'verbosity': Option(1, one_of(0, 1, 2), 'must be 0 (silent), 1 (overflows) or 2 (every cast too)'),
        'skip_nonfinite': Option(None, optional(is_flag), _FLAG),
        'max_consecutive_skips': Option(50, optional(is_count), f'{_COUNT}, or None for none'),
        'accumulate_in_fp32': Option(False, is_flag, _FLAG),
        'from_16bit': Option(False, is_flag, _FLAG),
        'restore_buffers_on_skip': Option(True, is_flag, _FLAG),
    }
)


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
    given: dict[str, Any] = {name: option.default for name, option in OPTIONS.items()}
    for name, value in options.items():
        if name not in given:
            raise TypeError(f'resolve() got an unexpected keyword argument {name!r}')
        given[name] = value
    problems: list[str] = []
    level = _find_level(opt_level, problems)
    read = {name: option.read(name, given[name], problems) for name, option in OPTIONS.items()}
    if level.opt_level:
        level = _with_dtype(level, read['dtype'], given['dtype'], problems)
        _check_level(level, read, given, problems)
    cast = read['cast_model_type']
    # float32 on a per-op level is what it does anyway: nothing is cast
    model_type = level.cast_model_type if cast is None or _casts_per_op(level) else cast or None
    _check_masters(level, model_type, read, given, problems)
    fp32_ops = _find_functions(_listed(read['fp32_ops']), problems)
    floor, ceiling = (read[name] if option.test(given[name]) else None for name, option in BOUNDS.items())
    scale = resolve_loss_scale(given['loss_scale'], level.loss_scale, floor, ceiling, problems)
    if problems:
        raise AmpConfigError(problems)
    fields = {field.name for field in dataclasses.fields(Policy)}
    values = {name: value for name, value in read.items() if name in fields}
    for name in ('keep_batchnorm_fp32', 'master_weights', 'skip_nonfinite'):
        if read[name] is None:
            values[name] = getattr(level, name)
    values |= {
        'cast_model_type': model_type,
        'autocast_dtype': None if read['patch_torch_functions'] is False else level.autocast_dtype,
        'master_weights': bool(values['master_weights']),
        'split_masters': read['master_weights'] == 'split',
        'loss_scale': scale,
        'fp32_ops': fp32_ops,
    }
    return dataclasses.replace(level, **values)


# options that a configuration holds in the form in which they may be given
_AS_THEY_ARE = tuple(
    name
    for name in OPTIONS
    if name not in ('dtype', 'patch_torch_functions', 'loss_scale', *BOUNDS, 'keep_fp32', 'fp32_ops', 'keep_inputs')
)


def overrides_of(policy: Policy) -> dict[str, Any]:
    """The options with which :func:`resolve` makes a configuration of its level: only what differs from the level itself.

    Args:
        policy: Any.
    """
    level = LEVEL_TABLE[policy.opt_level]
    found: dict[str, Any] = {}
    for name in _AS_THEY_ARE:
        if getattr(policy, name) != getattr(level, name):
            found[name] = getattr(policy, name)
    if found.get('cast_model_type', False) is None:
        found['cast_model_type'] = False
    if policy.split_masters:
        found['master_weights'] = 'split'
    if policy.autocast_dtype is None and level.autocast_dtype is not None:
        found['patch_torch_functions'] = False
    if policy.loss_scale != level.loss_scale:
        found |= loss_scale_options(policy.loss_scale)
    if policy.keep_fp32:
        found['keep_fp32'] = list(policy.keep_fp32)
    if policy.keep_inputs:
        found['keep_inputs'] = list(policy.keep_inputs)
    if policy.fp32_ops:
        found['fp32_ops'] = [{'name': op.name, 'output': op.output} for op in policy.fp32_ops]
    return found


def _casts_per_op(level: Policy) -> bool:
    return level.cast_model_type is None


def _find_level(value: Any, problems: list[str]) -> Policy:
    """The row of a level. Where there is none, that of the level which was probably meant, so that one run shows every
    conflict; or O0, without a name."""
    if isinstance(value, str) and value in LEVEL_TABLE:
        return LEVEL_TABLE[value]
    text = str(value).strip() if isinstance(value, (str, int)) and not isinstance(value, bool) else ''
    meant, hint = f'O{text[-1:]}', ''
    if meant in LEVEL_TABLE and text == f'0{text[-1]}':
        hint = f" Write '{meant}' with the letter O, not the digit zero."
    elif meant in LEVEL_TABLE and text.upper().removeprefix('O') == text[-1]:
        hint = f" Write '{meant}' (capital letter O, no spaces)."
    known = '; '.join(f'{name}: {meaning}' for name, meaning in MEANINGS.items())
    problems.append(f'opt_level={value!r} is no opt level.{hint} Known are {known}.')
    # the name of no level: the error is raised before anybody gets the record
    return LEVEL_TABLE[meant] if hint else dataclasses.replace(LEVEL_TABLE['O0'], opt_level='')  # type: ignore[arg-type]


def _with_dtype(level: Policy, dtype: torch.dtype | None, given: Any, problems: list[str]) -> Policy:
    """The level that ``dtype`` makes of a level."""
    name = level.opt_level
    conflict = f'dtype={given!r} conflicts with opt_level={name!r}'
    if dtype is None:
        return level
    if dtype not in HALF_TYPES:
        if _casts_per_op(level):
            # as in mmengine's own wrapper: autocast to float32 or float64 is no autocast
            return dataclasses.replace(level, autocast_dtype=None)
        if name != 'O0':
            problems.append(f"{conflict}, which needs a 16-bit type: write opt_level='O0' for FP32.")
    elif name == 'O0':
        levels = "'O4' or 'O5' for bfloat16" if dtype is _BF16 else "'O1' or 'O2' for float16"
        problems.append(f'{conflict} (FP32): write {levels}.')
    elif dtype is _BF16:
        if name == 'O3':
            return dataclasses.replace(level, cast_model_type=_BF16)
        return LEVEL_TABLE[IN_BFLOAT16.get(name, name)]
    elif name in IN_BFLOAT16.values():
        same = 'O1' if name == 'O4' else 'O2'
        problems.append(f"{conflict}, a bfloat16 level: write opt_level='{same}'.")
    return level


def _check_level(level: Policy, read: Mapping[str, Any], given: Mapping[str, Any], problems: list[str]) -> None:
    """Options that a level refuses, and options that contradict each other."""
    name, dtype, cast, patch = level.opt_level, read['dtype'], read['cast_model_type'], read['patch_torch_functions']
    if not _casts_per_op(level):
        if patch:
            problems.append(
                f'patch_torch_functions=True conflicts with opt_level={name!r}, which casts the model: '
                f"write opt_level='O1' (float16) or 'O4' (bfloat16) for per-op casts, or leave it out."
            )
        if dtype is not None and cast in HALF_TYPES and cast is not level.cast_model_type:
            problems.append(
                f'cast_model_type={given["cast_model_type"]!r} contradicts dtype={given["dtype"]!r}: write only one of the two.'
            )
        return
    other = f"write opt_level='{'O5' if name == 'O4' else 'O2'}' for a 16-bit model, or leave it out"
    for key, option in OPTIONS.items():
        # no cast is what these levels do
        if option.per_op and read[key] is not None and (key != 'cast_model_type' or cast in HALF_TYPES):
            problems.append(f'{key}={given[key]!r} conflicts with opt_level={name!r}, {option.per_op}: {other}.')
    if patch and level.autocast_dtype is None:
        problems.append(
            f'patch_torch_functions=True contradicts dtype={given["dtype"]!r}, which means no autocast: drop one of the two.'
        )


def _check_masters(
    level: Policy,
    model_type: torch.dtype | None,
    read: Mapping[str, Any],
    given: Mapping[str, Any],
    problems: list[str],
) -> None:
    """Refuse ``master_weights`` and ``accumulate_in_fp32`` where the number of losses or the model's type rules them out."""
    masters, losses = read['master_weights'], read['num_losses']
    if masters == 'split':
        if level.opt_level and not _casts_per_op(level) and model_type not in HALF_TYPES:
            cast = '' if read['cast_model_type'] is None else f' and cast_model_type={given["cast_model_type"]!r}'
            problems.append(
                f"master_weights='split' conflicts with opt_level={level.opt_level!r}{cast}, where no weight is 16-bit: there "
                f"is nothing to split. Write opt_level='O2' or 'O5', or leave it out."
            )
        if losses > 1:
            problems.append(
                f"master_weights='split' conflicts with num_losses={losses}: several losses are unscaled as they arrive and "
                f'meet in the FP32 gradients of masters, which split ones do not have. Write master_weights=True, or use one '
                f'loss.'
            )
    elif losses > 1 and read['accumulate_in_fp32'] and model_type in HALF_TYPES:
        has_masters = level.master_weights if masters is None else masters
        if not has_masters:
            problems.append(
                f'accumulate_in_fp32=True conflicts with num_losses={losses} at {level.opt_level!r} without masters, where '
                f'several losses meet in 16-bit gradients: use master_weights=True, or one loss.'
            )


def _find_functions(items: list[Any], problems: list[str]) -> tuple[Fp32Op, ...]:
    """The members of ``fp32_ops``."""
    found = []
    for item in items:
        words = dict(item) if isinstance(item, Mapping) else {'name': item}
        output = words.get('output', CALLER)
        if not words.keys() <= {'name', 'output'} or 'name' not in words or output not in (CALLER, FLOAT32):
            problems.append(f"fp32_ops={words!r} must be dict(name=..., output='caller' or 'float32').")
            continue
        name = words['name'] if isinstance(words['name'], str) else _name_of(words['name'], problems)
        if name is not None:
            found.append(Fp32Op(name, output))
    problems += lookup.problems_of(tuple(dict.fromkeys(op.name for op in found)))
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
