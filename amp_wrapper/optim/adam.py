"""``FusedAdam`` and ``FusedAdamW``."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from .. import ops
from ..errors import AmpConfigError
from .fused import FusedOptimizer

# torch 2.6 has two classes instead, and neither the argument nor the key in the groups
_HAS_DECOUPLED = 'decoupled_weight_decay' in inspect.signature(torch.optim.Adam.__init__).parameters


class _AdamSteps(FusedOptimizer):
    """What both have in common."""

    _in_groups = ('lr', 'betas', 'eps', 'weight_decay')
    _in_state = ('step', 'exp_avg', 'exp_avg_sq')
    _moments = ('exp_avg', 'exp_avg_sq', 'max_exp_avg_sq')
    _op, _order = staticmethod(ops.fused_adam), (*_moments, 'step')
    _option, _without_option = 'amsgrad', _in_state
    _decoupled = False

    def _row(self, group: Mapping[str, Any]) -> list[Any]:
        is_decoupled = bool(group.get('decoupled_weight_decay', self._decoupled))
        return [*group['betas'], group['eps'], group['weight_decay'], bool(group['maximize']), is_decoupled]


class FusedAdam(_AdamSteps, torch.optim.Adam):
    """:class:`torch.optim.Adam`, one pass over gradient, weight and state, and no wait for the device.

    A ``torch.optim.Adam`` in every other respect: its groups, its state names, its state dict in both directions, its hooks.
    The compiled ops take the steps of dense float32, float16 and bfloat16 parameters of one device that they serve, where all
    groups have the same ``amsgrad``: those of ``torch.optim.Adam(fused=True)``, with float32 moments of 16-bit parameters, and
    in CUDA graphs whatever ``capturable`` says. All other steps are torch's own, fused where torch can.

    Inside :class:`~amp_wrapper.AmpOptimWrapper` the pass of the compiled ops unscales, clips, skips, and writes the
    16-bit model weights, too.

    Args:
        params: Parameters, or dicts of groups, of any real or complex floating type, on any device.
        lr: Learning rate. A tensor on the parameters' device is read there at every step, also by a captured CUDA graph, which
            keeps a number as it is, and warns; one on the CPU beside parameters elsewhere is read by the host.
        betas: Decay of the two averages. Tensors are read by the host.
        eps: Added to the denominator.
        weight_decay: Added to the gradient as ``weight_decay * weight``.
        amsgrad: Whether the largest second moment so far is divided by.
        foreach: How torch's own steps work that are not fused; as in torch.
        maximize: Whether to go up.
        capturable: Of torch's own steps, as in torch.
        differentiable: True is refused.
        fused: None or True; False is refused. Each step is fused where it can be.
        decoupled_weight_decay: Whether weights decay as in AdamW. With torch 2.6, True is refused.
        state_dtype: 'float32' (None) or 'bfloat16': type of the moments in steps of the compiled ops. In torch's own steps it
            is that of the parameter, and 'bfloat16' an error at the step where that is float32.

    Raises:
        AmpConfigError: ``state_dtype``, ``fused`` or ``differentiable`` that cannot be.
        ValueError: As torch's own, such as a negative ``lr``.

    Examples:
        >>> import torch
        >>> from amp_wrapper import FusedAdam
        >>> weight = torch.nn.Parameter(torch.ones(3))
        >>> optimizer = FusedAdam([weight], lr=0.5)
        >>> weight.sum().backward()
        >>> optimizer.step()
        >>> weight.data
        tensor([0.5000, 0.5000, 0.5000])
    """

    _torch = torch.optim.Adam

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        state_dtype: torch.dtype | str | None = None,
    ) -> None:
        self._check_arguments(state_dtype, fused, differentiable)
        if decoupled_weight_decay and not _HAS_DECOUPLED:
            raise AmpConfigError(['decoupled_weight_decay=True needs torch 2.7. Use FusedAdamW.'])
        options: dict[str, Any] = {'decoupled_weight_decay': decoupled_weight_decay} if _HAS_DECOUPLED else {}
        options.update(foreach=foreach, maximize=maximize, capturable=capturable, fused=fused)
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **options)


class FusedAdamW(_AdamSteps, torch.optim.AdamW):
    """:class:`torch.optim.AdamW`, one pass over gradient, weight and state, and no wait for the device.

    As :class:`FusedAdam`, with weight decay apart from the gradient.

    Args:
        params: As of :class:`FusedAdam`, and so all others.
        lr: Learning rate.
        betas: Decay of the two averages.
        eps: Added to the denominator.
        weight_decay: Weights are multiplied by ``1 - lr * weight_decay``.
        amsgrad: Whether the largest second moment so far is divided by.
        maximize: Whether to go up.
        foreach: Of torch's own steps.
        capturable: Of torch's own steps.
        differentiable: True is refused.
        fused: None or True; False is refused.
        state_dtype: 'float32' (None) or 'bfloat16'.

    Raises:
        AmpConfigError: ``state_dtype``, ``fused`` or ``differentiable`` that cannot be.
        ValueError: As torch's own.

    Examples:
        In a config:

        ```python
        optim_wrapper = dict(
            type='AmpOptimWrapper', opt_level='O2', optimizer=dict(type='FusedAdamW', lr=1e-3, weight_decay=0.05)
        )
        ```
    """

    _torch = torch.optim.AdamW
    _decoupled = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        state_dtype: torch.dtype | str | None = None,
    ) -> None:
        self._check_arguments(state_dtype, fused, differentiable)
        options: dict[str, Any] = dict(foreach=foreach, maximize=maximize, capturable=capturable, fused=fused)
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **options)
