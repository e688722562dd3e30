"""``FusedSGD``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from .. import ops
from ..compiler_internals import untraced
from ..torch_internals import fused_sgd
from .algorithm import Algorithm, Columns, Tensors
from .fused import FusedOptimizer
from .tensor_lists import Bucket


class _Sgd(Algorithm):
    """SGD, with momentum or without."""

    kind = ops.SGD
    torch_name = 'SGD'
    moments = ('momentum_buffer',)
    required = ('lr', 'momentum', 'dampening', 'weight_decay')
    options = ('momentum', 'dampening', 'nesterov', 'weight_decay', 'maximize', 'differentiable')
    torch_counts = False

    def names(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return ('step', 'momentum_buffer') if group['momentum'] != 0 else ()

    def row(self, group: Mapping[str, Any]) -> list[Any]:
        numbers = [group['momentum'], group['dampening'], bool(group['nesterov']), group['weight_decay']]
        return [*numbers, bool(group['maximize']), 0]

    def first_step(self, state: Mapping[str, Any]) -> float | None:
        return 0.0 if state.get('momentum_buffer') is None else 1.0

    def kept(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        # whatever was counted before has left no momentum
        return {} if state.get('momentum_buffer') is None else state

    def update(self, bucket: Bucket, gradients: list[Tensor], decision: Tensor) -> None:
        buffers = bucket.columns.get('momentum_buffer', [])
        ops.fused_sgd(gradients, bucket.params, buffers, bucket.partners, bucket.rows, decision)

    def _call_torch(self, columns: Columns, grads: Tensors, group: Mapping[str, Any], skip: Tensor | None) -> None:
        words: dict[str, Any] = {name: float(group[name]) for name in ('momentum', 'weight_decay')}
        words |= {name: bool(group[name]) for name in ('nesterov', 'maximize')}
        params, steps, dampening = columns['params'], columns.get('step', []), float(group['dampening'])
        if steps and dampening != 0:
            # the first gradient is not dampened, and only the device knows which it is
            decay, words['weight_decay'] = words['weight_decay'], 0.0
            kept = 1 - dampening * (torch.stack(steps) > 0)
            grads = list(torch._foreach_add(grads, params, alpha=-decay if words['maximize'] else decay))
            torch._foreach_mul_(grads, list(kept.unbind()))
        # a momentum of zeros becomes the first gradient
        buffers = columns.get('momentum_buffer', [])
        words |= dict(lr=group['lr'], dampening=0.0, is_first_step=False, found_inf=skip)
        fused_sgd(params, grads, buffers, **words)


class FusedSGD(FusedOptimizer, torch.optim.SGD):
    """:class:`torch.optim.SGD`, one pass over gradient, weight and momentum, and no wait for the device.

    A ``torch.optim.SGD`` in every other respect: its groups, its state names, its state dict in both directions, its hooks.
    Each step is that of ``torch.optim.SGD(fused=True)``, without two of its defects: momentum that is begun by a skipped step
    is not taken for momentum, and a parameter may get its first gradient late.

    Beside ``momentum_buffer``, a parameter's state holds ``step``, how many steps it took with momentum: at 0 its momentum is
    not begun. ``state_dict()`` leaves the state of such parameters out, so that torch's own can load it.

    Inside :class:`~amp_wrapper.AmpOptimWrapper` the same pass unscales, clips, skips, and writes the
    16-bit model weights.

    Args:
        params: Parameters, or dicts of groups, of any real or complex floating type, on any device. float64 and complex ones,
            and all where no compiled op serves the device, are stepped by torch's own fused functions.
        lr: Learning rate. A tensor on the parameters' device is read there at every step, also by a captured CUDA graph; one on
            the CPU beside parameters elsewhere is read by the host.
        momentum: Of the running sum of gradients; 0 for none.
        dampening: What is left out of each gradient after the first.
        weight_decay: Added to the gradient as ``weight_decay * weight``.
        nesterov: Whether to look ahead.
        maximize: Whether to go up.
        foreach: Accepted and ignored, as is ``fused``: there is one implementation.
        differentiable: True is refused.
        fused: None or True; False is refused.
        state_dtype: 'float32' (None) or 'bfloat16': type of the momentum of float32 and 16-bit parameters. float64
            and complex ones have momentum of their own type.

    Raises:
        AmpConfigError: ``state_dtype``, ``fused`` or ``differentiable`` that cannot be.
        ValueError: As torch's own, such as a negative ``lr``.
    """

    _algorithm = _Sgd()

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
        self._settle(state_dtype, fused, differentiable)
        options: dict[str, Any] = dict(maximize=maximize, foreach=foreach, fused=fused)
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov, **options)

    def _adopted(self, parameter: Tensor, saved: Mapping[str, Any], label: str) -> dict[str, Any]:
        state = super()._adopted(parameter, saved, label)
        if 'momentum_buffer' not in state:
            return state
        # torch's own counts nothing; what it saves was begun
        step = state.get('step')
        state['step'] = torch.ones((), device=parameter.device) if step is None else step.clamp_(min=1)
        return state

    @untraced
    def state_dict(self) -> dict[str, Any]:
        """As torch's own, without momentum that is not begun. Syncs where there is momentum."""
        # the first of all hooks: the others see what is saved
        handle = self.register_state_dict_post_hook(_leave_out_unbegun, prepend=True)
        try:
            return super().state_dict()
        finally:
            handle.remove()


def _leave_out_unbegun(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    counts: dict[torch.device, list[tuple[Any, Tensor]]] = defaultdict(list)
    for key, state in state_dict['state'].items():
        if isinstance(state, dict) and isinstance(state.get('step'), Tensor):
            counts[state['step'].device].append((key, state['step']))
    unbegun: set[Any] = set()
    for found in counts.values():
        taken = torch.stack([count.detach().reshape(()).float() for _, count in found]).tolist()
        unbegun.update(key for (key, _), count in zip(found, taken) if count == 0)
    kept = {}
    for key, state in state_dict['state'].items():
        if key in unbegun:
            state = {name: value for name, value in state.items() if name not in ('step', 'momentum_buffer')}
            if not state:
                continue
        kept[key] = state
    return {**state_dict, 'state': kept}
