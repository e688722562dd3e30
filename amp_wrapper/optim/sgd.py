"""``FusedSGD``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from .. import ops
from ..shards import any_sharded
from .fused import FusedOptimizer


class FusedSGD(FusedOptimizer, torch.optim.SGD):
    """:class:`torch.optim.SGD`, one pass over gradient, weight and momentum, and no wait for the device.

    A ``torch.optim.SGD`` in every other respect: its groups, its state names, its state dict in both directions, its hooks.
    The compiled ops take the steps of dense float32, float16 and bfloat16 parameters of one device that they serve, where all
    groups have momentum or none has, and without dampening: those of ``torch.optim.SGD(fused=True)``. All other steps are
    torch's own, fused where torch can. In both, a skipped first step begins no momentum, which torch's fused SGD takes from
    memory that nobody wrote, and a parameter may get its first gradient late.

    Inside :class:`~amp_wrapper.AmpOptimWrapper` the pass of the compiled ops unscales, clips, skips, and writes the
    16-bit model weights, too.

    Args:
        params: Parameters, or dicts of groups, of any real or complex floating type, on any device.
        lr: Learning rate. A tensor on the parameters' device is read there at every step, also by a captured CUDA graph, which
            keeps a number as it is, and warns; one on the CPU beside parameters elsewhere is read by the host.
        momentum: Of the running sum of gradients; 0 for none.
        dampening: What is left out of each gradient after the first; above 0, torch's own steps are taken.
        weight_decay: Added to the gradient as ``weight_decay * weight``.
        nesterov: Whether to look ahead.
        maximize: Whether to go up.
        foreach: How torch's own steps work that are not fused; as in torch.
        differentiable: True is refused.
        fused: None or True; False is refused. Each step is fused where it can be.
        state_dtype: 'float32' (None) or 'bfloat16': type of the momentum in steps of the compiled ops. In torch's own steps it
            is that of the parameter, and 'bfloat16' an error at the step where that is float32.

    Raises:
        AmpConfigError: ``state_dtype``, ``fused`` or ``differentiable`` that cannot be.
        ValueError: As torch's own, such as a negative ``lr``.
    """

    _torch = torch.optim.SGD
    _in_groups = ('lr', 'momentum', 'dampening', 'weight_decay')
    _moments = _order = ('momentum_buffer',)
    _op, _option = staticmethod(ops.fused_sgd), 'momentum'

    def _row(self, group: Mapping[str, Any]) -> list[Any]:
        return [group['momentum'], 0, bool(group['nesterov']), group['weight_decay'], bool(group['maximize']), 0]

    def _knows(self, group: Mapping[str, Any]) -> bool:
        # the first gradient is not dampened, so a momentum of zeros is not one that has not begun
        return super()._knows(group) and (group['momentum'] == 0 or group['dampening'] == 0)

    def _torch_fuses(self, group: Mapping[str, Any], is_plain: bool = False) -> bool:
        # torch has no fused step of sharded parameters
        return super()._torch_fuses(group, is_plain) and not any_sharded(group['params'])

    def _begin(self, group: Mapping[str, Any]) -> None:
        # torch's begins all of a group or none, and leaves memory that nobody wrote where it skips the first step
        for parameter in group['params'] if group['momentum'] != 0 else ():
            if parameter.grad is not None and self.state[parameter].get('momentum_buffer') is None:
                self.state[parameter]['momentum_buffer'] = torch.zeros_like(parameter, requires_grad=False)

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | Tensor = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        state_dtype: torch.dtype | str | None = None,
    ) -> None:
        self._check_arguments(state_dtype, fused, differentiable)
        options: dict[str, Any] = dict(maximize=maximize, foreach=foreach, fused=fused)
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov, **options)
