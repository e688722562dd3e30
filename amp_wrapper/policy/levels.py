"""What an opt level means: the table of the levels, and the record that a configuration becomes.

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

:func:`amp_wrapper.policy.resolve` applies the overrides of a configuration to it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch

from .fp32_registry import Fp32Op
from .nested import HALF_TYPES

OptLevel = Literal['O0', 'O1', 'O2', 'O3', 'O4', 'O5']
"""The names of the levels, for type checkers."""

_F16, _BF16, _F32 = torch.float16, torch.bfloat16, torch.float32
# beside the names in torch
_SHORT = {'fp16': _F16, 'bf16': _BF16, 'fp32': _F32, 'single': _F32, 'fp64': torch.float64}


def dtype_name(dtype: torch.dtype) -> str:
    """``'float16'`` for ``torch.float16``."""
    return str(dtype).removeprefix('torch.')


def to_dtype(value: Any) -> Any:
    """Make a :class:`torch.dtype` of its name ('half', 'fp16', 'torch.float16'); all else stays as it is."""
    name = value.strip().lower().removeprefix('torch.') if isinstance(value, str) else ''
    found = _SHORT.get(name, getattr(torch, name, None))
    return found if isinstance(found, torch.dtype) else value


#: apex's ceiling for dynamic loss scales.
DEFAULT_MAX_LOSS_SCALE = 2.0**24


@dataclasses.dataclass(frozen=True)
class LossScaleConfig:
    """How one loss scale starts and changes. The rule itself is in :mod:`amp_wrapper.engine.loss_scale`.

    Attributes:
        dynamic: Whether the scale follows overflows; a static one keeps ``init_scale``.
        init_scale: The first scale, within floor and ceiling where it is dynamic.
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


@dataclasses.dataclass(frozen=True)
class Policy:
    """One resolved configuration. Immutable; made by :func:`amp_wrapper.policy.resolve`.

    Attributes:
        opt_level: 'O0' to 'O5', after ``dtype`` was applied.
        enabled: False turns every part of the package into a no-op.
        cast_model_type: The dtype of the model weights, or None for "no cast, no input or output casts".
        autocast_dtype: The dtype of :class:`torch.autocast` around the forward pass, or None for no autocast.
        keep_batchnorm_fp32: Whether BatchNorm stays FP32 under a cast.
        master_weights: Whether the optimizer steps FP32 masters of 16-bit weights.
        split_masters: Whether a master is kept as the 16-bit weight and a 16-bit remainder; ``master_weights`` is True then.
        loss_scale: Initial value and update rule of the loss scale.
        cast_model_outputs: The dtype of the model's floating outputs, or None: FP32, but as they are in training under
            autocast.
        keep_fp32: Module classes, class names and glob patterns over qualified names that stay FP32.
        fp32_ops: Functions, methods and classes that run in FP32 beside those of the registry.
        keep_inputs: Names of arguments of forward methods whose floating tensors are not cast.
        num_losses: Number of loss scalers.
        verbosity: 0 silent, 1 overflows and attachment, 2 adds one line a cast.
        skip_nonfinite: Whether gradients are checked under a static scale.
        max_consecutive_skips: Skipped steps in a row that end the training with an error; None for never.
        accumulate_in_fp32: Whether the gradients of 16-bit weights are summed in FP32 during accumulation.
        from_16bit: Whether trainable weights may be 16-bit before they are cast; their FP32 values start as the rounded ones.
        restore_buffers_on_skip: Whether a skipped step restores buffers that its forward passes have changed.
        overrides: The options that were given and say something beside the level, in plain form:
            ``resolve(opt_level, **overrides)`` makes this policy again.
    """

    opt_level: OptLevel
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
    keep_inputs: tuple[str, ...] = ()
    num_losses: int = 1
    verbosity: int = 1
    skip_nonfinite: bool = True
    max_consecutive_skips: int | None = 50
    accumulate_in_fp32: bool = False
    from_16bit: bool = False
    restore_buffers_on_skip: bool = True
    overrides: Mapping[str, Any] = dataclasses.field(default_factory=dict, compare=False, repr=False)

    @property
    def patch_torch_functions(self) -> bool:
        """apex's name for "autocast is on"."""
        return self.autocast_dtype is not None

    @property
    def casts_model(self) -> bool:
        """Whether the weights become 16-bit."""
        return self.enabled and self.cast_model_type in HALF_TYPES

    @property
    def keeps_types(self) -> bool:
        """Whether weights stay what they are and nothing autocasts: ``cast_model_type=False`` at O0, O2, O3 and O5."""
        return self.enabled and self.cast_model_type is None and self.autocast_dtype is None

    @property
    def runs_16_bit(self) -> bool:
        """Whether anything in the forward pass is 16-bit: the weights, or what autocast casts."""
        return self.casts_model or (self.enabled and self.autocast_dtype is not None)

    @property
    def half_type(self) -> torch.dtype | None:
        """The 16-bit type that the forward pass computes in; None without one."""
        dtype = self.cast_model_type if self.casts_model else self.autocast_dtype
        return dtype if self.enabled and dtype in HALF_TYPES else None

    def to_dict(self) -> dict[str, Any]:
        """Give every field as plain numbers, strings, lists and dicts, fit for a checkpoint."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.compare}
        # files of 0.2.0 do not have it
        inputs = list(fields.pop('keep_inputs'))
        dtypes = {name: dtype_name(value) for name, value in fields.items() if isinstance(value, torch.dtype)}
        return {
            **fields,
            **dtypes,
            'loss_scale': dataclasses.asdict(self.loss_scale),
            'keep_fp32': [item if isinstance(item, str) else item.__name__ for item in self.keep_fp32],
            'fp32_ops': [{'name': op.name, 'output': op.output} for op in self.fp32_ops],
            **({'keep_inputs': inputs} if inputs else {}),
        }

    def describe(self) -> str:
        """Describe it in one line for the log, such as ``O2 (float16 weights, FP32 BatchNorm, FP32 masters, ...)``."""
        if not self.enabled:
            return f'{self.opt_level}, enabled=False (does nothing)'
        scale, cast = self.loss_scale, self.casts_model
        masters = f'{"split " if self.split_masters else ""}FP32 masters' if self.master_weights else 'no masters'
        kind = 'dynamic loss scale from' if scale.dynamic else 'loss scale'
        parts = {
            f'{dtype_name(self.cast_model_type or _F32)} weights': True,
            'FP32 BatchNorm': cast and self.keep_batchnorm_fp32,
            f'autocast to {dtype_name(self.autocast_dtype or _F32)}': self.autocast_dtype is not None,
            masters: cast,
            'sums in FP32': cast and self.accumulate_in_fp32,
            f'{kind} {scale.init_scale:g}' if scale.enabled else 'no loss scale': True,
            f'{self.num_losses} losses': self.num_losses > 1,
        }
        return f'{self.opt_level} ({", ".join(text for text, holds in parts.items() if holds)})'


_SCALE_1 = LossScaleConfig(dynamic=False, init_scale=1.0)

#: The levels as they are without overrides, by name.
LEVEL_TABLE: dict[str, Policy] = {
    'O0': Policy('O0', cast_model_type=_F32, loss_scale=_SCALE_1, skip_nonfinite=False),
    'O1': Policy('O1', autocast_dtype=_F16),
    'O2': Policy('O2', cast_model_type=_F16, keep_batchnorm_fp32=True, master_weights=True),
    'O3': Policy('O3', cast_model_type=_F16, loss_scale=_SCALE_1),
    'O4': Policy('O4', autocast_dtype=_BF16, loss_scale=_SCALE_1),
    'O5': Policy('O5', cast_model_type=_BF16, keep_batchnorm_fp32=True, master_weights=True, loss_scale=_SCALE_1),
}
#: Their names.
LEVELS: tuple[OptLevel, ...] = get_args(OptLevel)
#: The bfloat16 level of a float16 level, where there is one.
IN_BFLOAT16: dict[OptLevel, OptLevel] = {'O1': 'O4', 'O2': 'O5'}
