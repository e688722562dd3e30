"""``ApexOptimWrapper``: :class:`AmpOptimWrapper` with the defaults of mmengine's class of that name."""

from __future__ import annotations

from typing import Any

from mmengine.registry import OPTIM_WRAPPERS as ROOT_OPTIM_WRAPPERS

from ..policy import OptLevel
from ..registry import OPTIM_WRAPPERS
from .optim_wrapper import AmpOptimWrapper


@ROOT_OPTIM_WRAPPERS.register_module(force=True)
@OPTIM_WRAPPERS.register_module()
class ApexOptimWrapper(AmpOptimWrapper):
    """mmengine's ``ApexOptimWrapper``, whose apex is gone: the same arguments, on this package.

    Args:
        opt_level: 'O0' to 'O5'.
        loss_scale: As in :class:`AmpOptimWrapper`; 'dynamic' by default at every level, as it was.
        **kwargs: Everything else that :class:`AmpOptimWrapper` takes.
    """

    def __init__(self, opt_level: OptLevel = 'O1', loss_scale: Any = 'dynamic', **kwargs: Any) -> None:
        super().__init__(loss_scale, opt_level=opt_level, **kwargs)
