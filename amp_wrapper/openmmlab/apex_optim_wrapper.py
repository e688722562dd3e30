"""``ApexOptimWrapper``: :class:`AmpOptimWrapper` with the arguments of mmengine's class of that name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from mmengine.registry import OPTIM_WRAPPERS as ROOT_OPTIM_WRAPPERS

from ..policy import OPTIONS, OptLevel
from ..policy.levels import DEFAULT_MAX_LOSS_SCALE
from ..registry import OPTIM_WRAPPERS
from .optim_wrapper import AmpOptimWrapper


@ROOT_OPTIM_WRAPPERS.register_module(force=True)
@OPTIM_WRAPPERS.register_module()
class ApexOptimWrapper(AmpOptimWrapper):
    """mmengine's ``ApexOptimWrapper``, whose apex is gone: the same arguments in the same order, on this package.

    Args:
        opt_level: 'O0' to 'O5'.
        loss_scale: As in :class:`AmpOptimWrapper`; 'dynamic' by default at every level, as it was.
        enabled: As in :class:`AmpOptimWrapper`.
        cast_model_type: As in :class:`AmpOptimWrapper`.
        patch_torch_functions: As in :class:`AmpOptimWrapper`.
        keep_batchnorm_fp32: As in :class:`AmpOptimWrapper`.
        master_weights: As in :class:`AmpOptimWrapper`.
        cast_model_outputs: As in :class:`AmpOptimWrapper`.
        num_losses: As in :class:`AmpOptimWrapper`.
        verbosity: As in :class:`AmpOptimWrapper`.
        min_loss_scale: As in :class:`AmpOptimWrapper`.
        max_loss_scale: As in :class:`AmpOptimWrapper`.
        **kwargs: Everything else that :class:`AmpOptimWrapper` takes.
    """

    def __init__(
        self,
        opt_level: OptLevel = 'O1',
        loss_scale: float | str | Mapping[str, Any] | None = 'dynamic',
        enabled: bool = True,
        cast_model_type: str | torch.dtype | bool | None = None,
        patch_torch_functions: bool | None = None,
        keep_batchnorm_fp32: bool | str | None = None,
        master_weights: bool | Literal['split'] | None = None,
        cast_model_outputs: str | torch.dtype | None = None,
        num_losses: int = 1,
        verbosity: int = 1,
        min_loss_scale: float | None = None,
        max_loss_scale: float | None = DEFAULT_MAX_LOSS_SCALE,
        **kwargs: Any,
    ) -> None:
        options: Any = {name: value for name, value in locals().items() if name in OPTIONS}
        super().__init__(opt_level=opt_level, **options, **kwargs)
