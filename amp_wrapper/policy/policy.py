"""What one configuration means: the opt levels, and the rules for overriding them.

The table is apex's (O0 to O3) and that of ROCm's apex (O4, O5):

=============================  =======  =======  =======  =======  ========  ========
property                       O0       O1       O2       O3       O4        O5
=============================  =======  =======  =======  =======  ========  ========
``cast_model_type``            float32  None     float16  float16  None      bfloat16
``patch_torch_functions``      False    True     False    False    True      False
``keep_batchnorm_fp32``        None     None     True     False    None      True
``master_weights``             False    None     True     False    None      True
``loss_scale``                 1.0      dynamic  dynamic  1.0      1.0       1.0
=============================  =======  =======  =======  =======  ========  ========
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import torch

from ..errors import AmpConfigError
from . import fp32_registry
from .fp32_registry import Fp32Op
from .loss_scale import DEFAULT_MAX_LOSS_SCALE, LossScaleConfig, resolve_loss_scale
from .nested import HALF_TYPES

#: What ``fp32_ops`` may be: dotted names, objects, dicts with name and output; one or several.
Fp32Names = str | Callable[..., Any] | Mapping[str, str] | Sequence[str | Callable[..., Any] | Mapping[str, str]]

_DTYPE_NAMES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        'float16': torch.float16,
        'fp16': torch.float16,
        'half': torch.float16,
        'bfloat16': torch.bfloat16,
        'bf16': torch.bfloat16,
        'float32': torch.float32,
        'fp32': torch.float32,
        'float': torch.float32,
        'single': torch.float32,
        'float64': torch.float64,
        'fp64': torch.float64,
        'double': torch.float64,
    }
)


@dataclasses.dataclass(frozen=True)
class Policy:
    """One resolved configuration. Immutable; made by :func:`resolve`.

    Attributes:
        opt_level: 'O0' to 'O5', after ``dtype`` had its say.
        enabled: False turns every part of the package into a no-op.
        cast_model_type: The type of the model weights, or None for "no cast, no input or output casts".
        autocast_dtype: The type of :class:`torch.autocast` around the forward pass, or None for no autocast.
        keep_batchnorm_fp32: Whether BatchNorm stays FP32 under a cast.
        master_weights: Whether the optimizer steps FP32 counterparts of 16-bit weights.
        split_masters: Whether these are kept as the 16-bit weight and a 16-bit remainder; ``master_weights`` is True then.
        loss_scale: Start and rule of the loss scale.
        cast_model_outputs: The type of the model's floating outputs, or None: FP32, but as they are in training under
            autocast.
        keep_fp32: Module classes, class names and glob patterns over qualified names that stay FP32.
        fp32_ops: Functions, methods and classes that run in FP32 beside those of the registry.
        num_losses: Number of loss scalers.
        verbosity: 0 silent, 1 overflows and attachment, 2 adds one line a cast.
        skip_nonfinite: Whether gradients are checked under a static scale.
        max_consecutive_skips: Skipped steps in a row that end the training with an error; None for never.
        accumulate_in_fp32: Whether the gradients of 16-bit weights are summed in FP32 over a window.
        from_16bit: Whether trainable weights may be 16-bit before they are cast; their FP32 values begin with the rounded ones.
        restore_buffers_on_skip: Whether a skipped step gives buffers back that its forward passes have changed.
    """

    opt_level: str
    enabled: bool = True
    cast_model_type: torch.dtype | None = None
    autocast_dtype: torch.dtype | None = None
    keep_batchnorm_fp32: bool = False
    master_weights: bool = False
    split_masters: bool = False
    loss_scale: LossScaleConfig = dataclasses.field(default_factory=LossScaleConfig)
    cast_model_outputs: torch.dtype | None = None
    keep_fp32: tuple[str | type, ...] = ()
    fp32_ops: tuple[Fp32Op, ...] = ()
    num_losses: int = 1
    verbosity: int = 1
    skip_nonfinite: bool = True
    max_consecutive_skips: int | None = 50
    accumulate_in_fp32: bool = False
    from_16bit: bool = False
    restore_buffers_on_skip: bool = True

    @property
    def patch_torch_functions(self) -> bool:
        """apex's name for "autocast is on"."""
        return self.autocast_dtype is not None

    @property
    def casts_model(self) -> bool:
        """Whether the weights become 16-bit."""
        return self.enabled and self.cast_model_type in HALF_TYPES

    @property
    def runs_16_bit(self) -> bool:
        """Whether anything in the forward pass is 16-bit: the weights, or what autocast casts."""
        return self.casts_model or (self.enabled and self.autocast_dtype is not None)

    @property
    def sums_in_fp32(self) -> bool:
        """Whether gradients need FP32 sums beside ``.grad``: with several losses they are summed in FP32 anyway."""
        return self.accumulate_in_fp32 and self.casts_model and self.num_losses == 1

    def to_dict(self) -> dict[str, Any]:
        """Every field as plain numbers, strings, lists and dicts, fit for a checkpoint."""
        result: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, LossScaleConfig):
                value = dataclasses.asdict(value)
            elif isinstance(value, torch.dtype):
                value = dtype_name(value)
            elif field.name == 'keep_fp32':
                value = [item if isinstance(item, str) else item.__name__ for item in value]
            elif field.name == 'fp32_ops':
                value = [{'name': op.name, 'output': op.output} for op in value]
            result[field.name] = value
        return result

    def describe(self) -> str:
        """One line for the log, such as ``O2 (float16 weights, FP32 BatchNorm, FP32 masters, ...)``."""
        if not self.enabled:
            return f'{self.opt_level}, enabled=False (does nothing)'
        parts = []
        if self.cast_model_type is None:
            parts.append('FP32 weights')
        else:
            parts.append(f'{dtype_name(self.cast_model_type)} weights')
            if self.casts_model and self.keep_batchnorm_fp32:
                parts.append('FP32 BatchNorm')
        if self.autocast_dtype is not None:
            parts.append(f'autocast to {dtype_name(self.autocast_dtype)}')
        if self.casts_model:
            masters = 'split FP32 masters' if self.split_masters else 'FP32 masters'
            parts.append(masters if self.master_weights else 'no masters')
            if self.accumulate_in_fp32:
                parts.append('sums in FP32')
        scale = self.loss_scale
        if not scale.enabled:
            parts.append('no loss scale')
        else:
            parts.append(f'{"dynamic loss scale from" if scale.dynamic else "loss scale"} {scale.init_scale:g}')
        if self.num_losses > 1:
            parts.append(f'{self.num_losses} losses')
        return f'{self.opt_level} ({", ".join(parts)})'


@dataclasses.dataclass(frozen=True)
class _Level:
    cast_model_type: torch.dtype | None
    patch: torch.dtype | None
    keep_batchnorm_fp32: bool
    master_weights: bool
    dynamic: bool
    bfloat16: str
    meaning: str


_LEVELS: Mapping[str, _Level] = MappingProxyType(
    {
        'O0': _Level(torch.float32, None, False, False, False, '', 'FP32 training'),
        'O1': _Level(None, torch.float16, False, False, True, 'O4', 'per-op casts to float16'),
        'O2': _Level(torch.float16, None, True, True, True, 'O5', 'float16 model with FP32 masters'),
        'O3': _Level(torch.float16, None, False, False, False, 'O3', 'pure 16-bit'),
        'O4': _Level(None, torch.bfloat16, False, False, False, 'O4', 'per-op casts to bfloat16'),
        'O5': _Level(torch.bfloat16, None, True, True, False, 'O5', 'bfloat16 model with FP32 masters'),
    }
)
LEVELS: tuple[str, ...] = tuple(_LEVELS)


def dtype_name(dtype: torch.dtype) -> str:
    """``'float16'`` for ``torch.float16``."""
    return str(dtype).removeprefix('torch.')


def parse_dtype(value: Any) -> torch.dtype | None:
    """The dtype that ``value`` names, or None if it names none.

    Args:
        value: A :class:`torch.dtype`, or a string such as 'float16', 'fp16', 'half' or 'torch.float16'.
    """
    if isinstance(value, torch.dtype):
        return value
    if isinstance(value, str):
        return _DTYPE_NAMES.get(value.strip().lower().removeprefix('torch.'))
    return None


def resolve(
    opt_level: str = 'O1',
    *,
    enabled: bool = True,
    dtype: str | torch.dtype | None = None,
    cast_model_type: str | torch.dtype | bool | None = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | Literal['split'] | None = None,
    loss_scale: float | str | Mapping[str, Any] | None = None,
    cast_model_outputs: str | torch.dtype | None = None,
    keep_fp32: str | type | Sequence[str | type] | None = None,
    fp32_ops: Fp32Names | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float | None = DEFAULT_MAX_LOSS_SCALE,
    skip_nonfinite: bool | None = None,
    max_consecutive_skips: int | None = 50,
    accumulate_in_fp32: bool = False,
    from_16bit: bool = False,
    restore_buffers_on_skip: bool = True,
) -> Policy:
    """Turn a level and its overrides into a :class:`Policy`.

    Args:
        opt_level: 'O0' to 'O5'.
        enabled: False makes everything a no-op; the rest is still checked.
        dtype: 'bfloat16' turns O1 into O4, O2 into O5 and O3 into pure bfloat16. 'float32' or 'float64' at O1 and O4
            mean "no autocast", as in mmengine's own wrapper.
        cast_model_type: float32, float16, bfloat16, or False for no cast at all.
        patch_torch_functions: Whether :class:`torch.autocast` runs (O1, O4).
        keep_batchnorm_fp32: True, False, 'True' or 'False'.
        master_weights: Whether to keep FP32 masters of 16-bit weights. ``'split'`` keeps each as the weight and a 16-bit
            remainder, for this package's fused optimizers.
        loss_scale: 'dynamic', a positive finite number (also as a string), a dict in ``GradScaler``'s words
            (``init_scale``, ``growth_factor``, ``backoff_factor``, ``growth_interval``, ``enabled``, and ours:
            ``min_scale``, ``max_scale``, ``hysteresis``), or None for the level's own.
        cast_model_outputs: The dtype of the model's floating outputs.
        keep_fp32: Module classes, class names, or glob patterns over qualified names that stay FP32.
        fp32_ops: Functions, methods, autograd Functions and module classes that run in FP32 beside those of
            :data:`amp_wrapper.policy.fp32_registry.FP32_OPS`: dotted names, or the objects themselves. Results return to the
            caller's type, unless a dict says otherwise: ``dict(name='torch.Tensor.sum', output='float32')``.
        num_losses: Number of losses with a scale of their own.
        verbosity: 0, 1 or 2.
        min_loss_scale: Floor of a dynamic scale.
        max_loss_scale: Ceiling of a dynamic scale; None for none.
        skip_nonfinite: Whether a static scale checks gradients and skips non-finite steps. None: at every level but O0.
        max_consecutive_skips: Limit of skipped steps in a row; None for none.
        accumulate_in_fp32: Whether the gradients of 16-bit weights are summed in FP32 over an accumulation window.
        from_16bit: Whether trainable weights that are 16-bit already are taken.
        restore_buffers_on_skip: Whether a skipped step gives buffers (BatchNorm's statistics, counters) back that its forward
            passes have changed.

    Returns:
        The resolved record.

    Raises:
        AmpConfigError: With every conflict of the configuration in one message.
    """
    problems: list[str] = []
    level_name, level = _resolve_level(opt_level, problems)

    cast, cast_given = _resolve_cast_type(cast_model_type, problems)
    if patch_torch_functions is not None and not isinstance(patch_torch_functions, bool):
        problems.append(f'patch_torch_functions={patch_torch_functions!r} must be True, False or None.')
    split = isinstance(master_weights, str) and master_weights == 'split'
    if master_weights is not None and not isinstance(master_weights, bool) and not split:
        problems.append(f"master_weights={master_weights!r} must be True, False, 'split' or None (the level's own).")
    keep_bn = _resolve_keep_batchnorm(keep_batchnorm_fp32, problems)

    autocast = level.patch
    model_type = level.cast_model_type
    if dtype is not None and level_name:
        level_name, level, autocast, model_type = _apply_dtype(dtype, level_name, level, problems)
    per_op = level.cast_model_type is None
    known = level_name != ''
    other = f"write opt_level='{'O5' if level_name == 'O4' else 'O2'}' for a 16-bit model, or leave it out"
    if per_op:
        if cast in HALF_TYPES:
            problems.append(
                f'cast_model_type={cast_model_type!r} conflicts with opt_level={level_name!r}, which leaves the model '
                f'in FP32 and casts per operation: {other}.'
            )
        if keep_bn is not None:
            problems.append(
                f'keep_batchnorm_fp32={keep_batchnorm_fp32!r} conflicts with opt_level={level_name!r}, which never '
                f'casts BatchNorm: {other}.'
            )
        if isinstance(master_weights, bool) or split:
            problems.append(
                f'master_weights={master_weights!r} conflicts with opt_level={level_name!r}, whose weights are FP32 '
                f'already: {other}.'
            )
    elif known and patch_torch_functions is True:
        problems.append(
            f'patch_torch_functions=True conflicts with opt_level={level_name!r}, which casts the model: '
            f"write opt_level='O1' (float16) or 'O4' (bfloat16) for per-op casts, or leave it out."
        )
    if known and per_op and patch_torch_functions is True and autocast is None:
        problems.append(
            f'patch_torch_functions=True contradicts dtype={dtype!r}, which means no autocast: drop one of the two.'
        )
    if patch_torch_functions is False:
        autocast = None
    if cast_given:
        if dtype is not None and not per_op and cast in HALF_TYPES and cast is not model_type:
            problems.append(
                f'cast_model_type={cast_model_type!r} contradicts dtype={dtype!r}: write only one of the two.'
            )
        # float32 on a per-op level is what it does anyway: nothing is cast
        model_type = None if per_op else cast
    if split and known and not per_op and model_type not in HALF_TYPES:
        where = f'opt_level={level_name!r}' + (f' and cast_model_type={cast_model_type!r}' if cast_given else '')
        problems.append(
            f"master_weights='split' conflicts with {where}, where no weight is 16-bit: there is nothing to split. Write "
            f"opt_level='O2' or 'O5', or leave it out."
        )

    outputs = None
    if cast_model_outputs is not None:
        outputs = parse_dtype(cast_model_outputs)
        if outputs is None or not outputs.is_floating_point:
            problems.append(f"cast_model_outputs={cast_model_outputs!r} is no floating dtype: write 'float32', say.")
    kept = _resolve_keep_fp32(keep_fp32, problems)
    wide = _resolve_fp32_ops(fp32_ops, problems)
    for name, flag in (
        ('enabled', enabled),
        ('skip_nonfinite', skip_nonfinite),
        ('accumulate_in_fp32', accumulate_in_fp32),
        ('from_16bit', from_16bit),
        ('restore_buffers_on_skip', restore_buffers_on_skip),
    ):
        if not isinstance(flag, bool) and not (flag is None and name == 'skip_nonfinite'):
            problems.append(f'{name}={flag!r} must be True or False.')
    if not isinstance(num_losses, int) or isinstance(num_losses, bool) or num_losses < 1:
        problems.append(f'num_losses={num_losses!r} must be a whole number of at least 1.')
    elif num_losses > 1 and split:
        problems.append(
            f"master_weights='split' conflicts with num_losses={num_losses}: several losses are unscaled as they arrive and "
            f'meet in the FP32 gradients of masters, which split ones do not have. Write master_weights=True, or use one loss.'
        )
    elif num_losses > 1 and accumulate_in_fp32 is True:
        masters = level.master_weights if master_weights is None else master_weights
        if model_type in HALF_TYPES and masters is False:
            problems.append(
                f'accumulate_in_fp32=True conflicts with num_losses={num_losses} at {level_name!r} without masters, where '
                f'several losses meet in 16-bit gradients: use master_weights=True, or one loss.'
            )
    if not isinstance(verbosity, int) or isinstance(verbosity, bool) or verbosity not in (0, 1, 2):
        problems.append(f'verbosity={verbosity!r} must be 0 (silent), 1 (overflows) or 2 (every cast too).')
    if max_consecutive_skips is not None and (
        not isinstance(max_consecutive_skips, int)
        or isinstance(max_consecutive_skips, bool)
        or max_consecutive_skips < 1
    ):
        problems.append(
            f'max_consecutive_skips={max_consecutive_skips!r} must be a whole number of at least 1, or None for none.'
        )
    scale = resolve_loss_scale(loss_scale, level.dynamic, min_loss_scale, max_loss_scale, problems)
    if problems:
        raise AmpConfigError(problems)
    return Policy(
        opt_level=level_name,
        enabled=enabled,
        cast_model_type=model_type,
        autocast_dtype=autocast,
        keep_batchnorm_fp32=level.keep_batchnorm_fp32 if keep_bn is None else keep_bn,
        master_weights=level.master_weights if master_weights is None else bool(master_weights),
        split_masters=split,
        loss_scale=scale,
        cast_model_outputs=outputs,
        keep_fp32=kept,
        fp32_ops=wide,
        num_losses=num_losses,
        verbosity=verbosity,
        skip_nonfinite=level_name != 'O0' if skip_nonfinite is None else skip_nonfinite,
        max_consecutive_skips=max_consecutive_skips,
        accumulate_in_fp32=accumulate_in_fp32,
        from_16bit=from_16bit,
        restore_buffers_on_skip=restore_buffers_on_skip,
    )


def _resolve_level(value: Any, problems: list[str]) -> tuple[str, _Level]:
    if isinstance(value, str) and value in _LEVELS:
        return value, _LEVELS[value]
    hint = ''
    text = str(value).strip() if isinstance(value, (str, int)) and not isinstance(value, bool) else ''
    digit = text[-1:]
    if digit in '012345' and digit:
        if text.startswith('0') and len(text) == 2:
            hint = f" Write 'O{digit}' with the letter O, not the digit zero."
        elif text.lower().removeprefix('o') == digit:
            hint = f" Write 'O{digit}' (capital letter O, no spaces)."
    known = '; '.join(f'{name}: {level.meaning}' for name, level in _LEVELS.items())
    problems.append(f'opt_level={value!r} is no opt level.{hint} Known are {known}.')
    # the rest is judged for the level that was probably meant, so that one run shows every conflict
    meant = f'O{digit}' if hint else ''
    return meant, _LEVELS.get(meant, _LEVELS['O0'])


def _resolve_cast_type(value: Any, problems: list[str]) -> tuple[torch.dtype | None, bool]:
    if value is None:
        return None, False
    if value is False:
        return None, True
    dtype = parse_dtype(value)
    if dtype is torch.float32 or dtype in HALF_TYPES:
        return dtype, True
    problems.append(
        f"cast_model_type={value!r} must be 'float16', 'bfloat16', 'float32', False (no cast) or None (the level's own)."
    )
    return None, False


def _resolve_keep_batchnorm(value: Any, problems: list[str]) -> bool | None:
    if value is None or isinstance(value, bool):
        return value
    if value in ('True', 'False'):
        return bool(value == 'True')
    problems.append(f"keep_batchnorm_fp32={value!r} must be True, False, 'True', 'False' or None (the level's own).")
    return None


def _apply_dtype(
    value: Any, name: str, level: _Level, problems: list[str]
) -> tuple[str, _Level, torch.dtype | None, torch.dtype | None]:
    autocast, model_type = level.patch, level.cast_model_type
    dtype = parse_dtype(value)
    if dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        problems.append(f"dtype={value!r} must be 'float16', 'bfloat16', 'float32', 'float64' or None.")
    elif dtype is torch.bfloat16:
        if name == 'O0':
            problems.append(f"dtype={value!r} conflicts with opt_level='O0' (FP32): write 'O4' or 'O5' for bfloat16.")
        else:
            name = level.bfloat16
            level = _LEVELS[name]
            autocast = level.patch
            model_type = None if level.cast_model_type is None else torch.bfloat16
    elif dtype is torch.float16:
        if name == 'O0':
            problems.append(f"dtype={value!r} conflicts with opt_level='O0' (FP32): write 'O1' or 'O2' for float16.")
        elif name in ('O4', 'O5'):
            same = 'O1' if name == 'O4' else 'O2'
            problems.append(
                f"dtype={value!r} conflicts with opt_level={name!r}, a bfloat16 level: write opt_level='{same}'."
            )
    elif level.cast_model_type is None:
        # as in mmengine's own wrapper: autocast to float32 or float64 is no autocast
        autocast = None
    elif name != 'O0':
        problems.append(
            f"dtype={value!r} conflicts with opt_level={name!r}, which needs a 16-bit type: write opt_level='O0' for FP32."
        )
    return name, level, autocast, model_type


def _resolve_keep_fp32(value: Any, problems: list[str]) -> tuple[str | type, ...]:
    if value is None:
        return ()
    items = [value] if isinstance(value, (str, type)) else value
    if not isinstance(items, (list, tuple)) or not all(isinstance(item, (str, type)) and item for item in items):
        problems.append(
            f'keep_fp32={value!r} must be a list of module classes, class names or glob patterns over qualified names, '
            f"such as ['bbox_head.*', 'LayerNorm']."
        )
        return ()
    return tuple(items)


def _resolve_fp32_ops(value: Any, problems: list[str]) -> tuple[Fp32Op, ...]:
    if value is None:
        return ()
    items = [value] if isinstance(value, (str, Mapping)) or callable(value) else value
    if not isinstance(items, (list, tuple)) or not all(
        (isinstance(item, (str, Mapping)) and item) or callable(item) for item in items
    ):
        problems.append(
            f"fp32_ops={value!r} must be a list of dotted names of functions, methods or classes, such as ['mmcv.ops.nms'], "
            f"or of dicts such as dict(name='torch.Tensor.sum', output='float32')."
        )
        return ()
    found = []
    for item in items:
        words = dict(item) if isinstance(item, Mapping) else {'name': item}
        output = words.get('output', fp32_registry.CALLER)
        if not words.keys() <= {'name', 'output'} or 'name' not in words or output not in ('caller', 'float32'):
            problems.append(f"fp32_ops={dict(item)!r} must be dict(name=..., output='caller' or 'float32').")
            continue
        name = words['name'] if isinstance(words['name'], str) else _dotted_name(words['name'], problems)
        if name is not None:
            found.append(Fp32Op(name, output))
    problems += fp32_registry.problems_of(tuple(dict.fromkeys(op.name for op in found)))
    return tuple(dict.fromkeys(found))


def _dotted_name(item: Any, problems: list[str]) -> str | None:
    # builtins of torch name a private class, or no module
    places = [f'{getattr(item, "__module__", None)}.{getattr(item, "__qualname__", None)}']
    places += [f'{place}.{getattr(item, "__name__", None)}' for place in ('torch', 'torch.nn.functional')]
    for place in places:
        if fp32_registry.find(place, load=False) is item:
            return place
    problems.append(f'fp32_ops={item!r} is not found as {places[0]!r}: hand over its dotted name instead.')
    return None
