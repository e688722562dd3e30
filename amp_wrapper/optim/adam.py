"""``FusedAdam`` and ``FusedAdamW``."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import adam, adamw
from torch.optim.optimizer import ParamsT

from .. import ops
from ..errors import AmpCheckpointError
from .algorithm import Algorithm, Columns, Tensors
from .fused import FusedOptimizer
from .tensor_lists import Bucket

#: torch 2.6 has two classes instead, and neither the argument nor the key in the groups.
_HAS_DECOUPLED = 'decoupled_weight_decay' in inspect.signature(torch.optim.Adam.__init__).parameters
_MOMENTS = ('exp_avg', 'exp_avg_sq')


@dataclasses.dataclass(frozen=True)
class _Adam(Algorithm):
    """Adam and AdamW; ``decoupled_weight_decay`` of a group says which."""

    torch_name: str

    kind = ops.ADAM
    moments = (*_MOMENTS, 'max_exp_avg_sq')
    required = ('lr', 'betas', 'eps', 'weight_decay')
    options = ('betas', 'eps', 'weight_decay', 'maximize', 'decoupled_weight_decay', 'amsgrad', 'differentiable')

    def names(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return ('step', *_MOMENTS, 'max_exp_avg_sq') if group['amsgrad'] else ('step', *_MOMENTS)

    def row(self, group: Mapping[str, Any]) -> list[Any]:
        decoupled = bool(group['decoupled_weight_decay'])
        return [*group['betas'], group['eps'], group['weight_decay'], bool(group['maximize']), decoupled]

    def first_step(self, state: Mapping[str, Any]) -> float | None:
        return None if any(name in state for name in self.moments) else 0.0

    def update(self, bucket: Bucket, gradients: list[Tensor], decision: Tensor) -> None:
        states = bucket.columns
        first, second, largest = states['exp_avg'], states['exp_avg_sq'], states.get('max_exp_avg_sq', [])
        ops.fused_adam(gradients, bucket.params, first, second, largest, bucket.partners, bucket.rows, decision)

    def _call_torch(self, columns: Columns, grads: Tensors, group: Mapping[str, Any], skip: Tensor | None) -> None:
        step: Any = adamw.adamw if group['decoupled_weight_decay'] else adam.adam
        words: dict[str, Any] = {name: float(group[name]) for name in ('weight_decay', 'eps')}
        words |= {name: bool(group[name]) for name in ('amsgrad', 'maximize')}
        words |= zip(('beta1', 'beta2'), map(float, group['betas']))
        moments = [columns.get(name, []) for name in self.moments]
        step(columns['params'], grads, *moments, columns['step'], lr=group['lr'], fused=True, found_inf=skip, **words)


class _AdamSteps(FusedOptimizer):
    """What both have in common."""

    _decoupled = False

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's own. Syncs nothing."""
        self.defaults.setdefault('decoupled_weight_decay', self._decoupled)
        super().add_param_group(param_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault('decoupled_weight_decay', self._decoupled)

    def _adopted(self, parameter: Tensor, saved: Mapping[str, Any], label: str) -> dict[str, Any]:
        missing = [name for name in ('step', *_MOMENTS) if saved.get(name) is None]
        if saved and missing:
            raise AmpCheckpointError(
                f'{label} of the state dict has no {missing[0]!r}, but {", ".join(map(repr, saved))}: state of '
                f'torch.optim.{self._algorithm.torch_name} or {type(self).__name__} is expected.'
            )
        return super()._adopted(parameter, saved, label)


class FusedAdam(_AdamSteps, torch.optim.Adam):
    """:class:`torch.optim.Adam`, one pass over gradient, weight and state, and no wait for the device.

    A ``torch.optim.Adam`` in every other respect: its groups, its state names, its state dict in both directions, its hooks.
    Each step is that of ``torch.optim.Adam(fused=True)``. In addition it takes 16-bit parameters with float32 moments, never
    takes a skipped step for a first one, and runs in CUDA graphs whatever ``capturable`` says.

    Inside :class:`~amp_wrapper.AmpOptimWrapper` the same pass unscales, clips, skips, and writes the
    16-bit model weights.

    Args:
        params: Parameters, or dicts of groups, of any real or complex floating type, on any device. float64 and complex ones,
            and all where no compiled op serves the device, are stepped by torch's own fused functions.
        lr: Learning rate. A tensor on the parameters' device is read there at every step, also by a captured CUDA graph; one on
            the CPU beside parameters elsewhere is read by the host.
        betas: Decay of the two averages. Tensors are read by the host.
        eps: Added to the denominator.
        weight_decay: Added to the gradient as ``weight_decay * weight``.
        amsgrad: Whether the largest second moment so far is divided by.
        foreach: Accepted and ignored, as are ``capturable`` and ``fused``: there is one implementation.
        maximize: Whether to go up.
        capturable: Ignored.
        differentiable: True is refused.
        fused: None or True; False is refused.
        decoupled_weight_decay: Whether weights decay as in AdamW.
        state_dtype: 'float32' (None) or 'bfloat16': type of the moments of float32 and 16-bit parameters. float64
            and complex ones have moments of their own type.

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

    _algorithm = _Adam('Adam')

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
        self._settle(state_dtype, fused, differentiable)
        self._decoupled = bool(decoupled_weight_decay)
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
        foreach: Ignored.
        capturable: Ignored.
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

    _algorithm = _Adam('AdamW')
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
        self._settle(state_dtype, fused, differentiable)
        options: dict[str, Any] = dict(foreach=foreach, maximize=maximize, capturable=capturable, fused=fused)
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **options)
