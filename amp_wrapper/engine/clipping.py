"""How gradients are clipped, after unscaling."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from .. import ops, shards
from ..errors import AmpConfigError, nearest
from ..policy.options import is_number

_CLIP_KEYS = {'norm': ('max_norm', 'norm_type', 'error_if_nonfinite', 'foreach'), 'value': ('clip_value', 'foreach')}


@dataclasses.dataclass(frozen=True)
class GradientClip:
    """How gradients are clipped, after unscaling: mmengine's ``clip_grad`` in a typed form.

    Attributes:
        kind: 'norm' or 'value'.
        arguments: Keyword arguments of :func:`torch.nn.utils.clip_grad_norm_` or ``clip_grad_value_``.
    """

    kind: str
    arguments: Mapping[str, Any]

    @classmethod
    def parse(cls, clip_grad: Mapping[str, Any] | None) -> GradientClip | None:
        """Read mmengine's dict without changing it.

        Args:
            clip_grad: ``dict(max_norm=..., norm_type=..., error_if_nonfinite=...)``, or
                ``dict(type='value', clip_value=...)``, or None.

        Raises:
            AmpConfigError: An unknown type or key, or a missing or impossible limit.
        """
        if clip_grad is None:
            return None
        if not isinstance(clip_grad, Mapping) or not clip_grad:
            usual = 'dict(max_norm=1.0) or dict(type="value", clip_value=1.0)'
            raise AmpConfigError([f'clip_grad={clip_grad!r} must be a dict such as {usual}.'])
        words = dict(clip_grad)
        kind = words.pop('type', 'norm')
        if kind not in _CLIP_KEYS:
            raise AmpConfigError([f"clip_grad['type']={kind!r} must be 'norm' or 'value'."])
        known = _CLIP_KEYS[kind]
        problems = [
            f'clip_grad has an unknown key {key!r}{nearest(str(key), known)}: known are {", ".join(known)}.'
            for key in words
            if key not in known
        ]
        limit = known[0]
        value: Any = words.get(limit)
        if limit not in words:
            problems.append(f'clip_grad lacks {limit!r}: write dict(type={kind!r}, {limit}=1.0), say.')
        elif not ((isinstance(value, Tensor) and value.numel() == 1) or (is_number(value) and value >= 0)):
            problems.append(f'clip_grad[{limit!r}]={value!r} must be a number of at least 0.')
        try:
            float(words.get('norm_type', 2.0))
        except (TypeError, ValueError):
            problems.append(f"clip_grad['norm_type']={words['norm_type']!r} must be a number or 'inf'.")
        if problems:
            raise AmpConfigError(problems)
        return cls(kind, words)

    @property
    def norm_type(self) -> float:
        """The order of the norm; infinite for the greatest magnitude."""
        return float(self.arguments.get('norm_type', 2.0))

    @property
    def is_simple(self) -> bool:
        """Whether gradients are clipped by value, by the Euclidean or by the maximum norm, with a limit on the host."""
        limit = self.arguments[_CLIP_KEYS[self.kind][0]]
        is_on_host = not isinstance(limit, Tensor) or limit.device.type == 'cpu'
        return is_on_host and (self.kind == 'value' or float(self.arguments.get('norm_type', 2.0)) in (2.0, math.inf))

    @property
    def not_fused(self) -> str:
        """What to say where a fused step, which raises no error, has to clip so and cannot; '' where it can."""
        if self.is_simple and not self.arguments.get('error_if_nonfinite'):
            return ''
        return (
            f"clip_grad={dict(self.arguments)!r} conflicts with master_weights='split': write master_weights=True, or clip by "
            "value, or by norm_type=2 or 'inf' with a number as limit and without error_if_nonfinite."
        )

    def power(self, gradients: Sequence[Tensor | None], replicas: Sequence[int], found_inf: Tensor | None) -> Tensor:
        """This rank's part of the norm of gradients that are sharded, and whether it is finite, in one pass.

        The ranks' numbers are combined by their sum, or by the largest where :attr:`norm_type` is infinite.

        Args:
            gradients: As they are, this rank's part of which counts; dense, not changed. None for none.
            replicas: Of each: on how many ranks its elements lie.
            found_inf: float32 scalar set to 1.0 where an element is non-finite, in place; None for no check.

        Returns:
            float64 tensor of one element on the device: the square of the norm, or the greatest magnitude.
        """
        there = [(gradient, count) for gradient, count in zip(gradients, replicas) if gradient is not None]
        total = torch.zeros(1, dtype=torch.float64, device=there[0][0].device if there else None)
        for count in sorted({count for _, count in there}):
            norm = self.norm(shards.local([grad for grad, number in there if number == count]), found_inf).double()
            total = torch.maximum(total, norm) if self.norm_type == math.inf else total + norm.square() / count
        return total

    def step_arguments(self) -> dict[str, float]:
        """Return the keyword arguments of :func:`~amp_wrapper.ops.fused_adam` that clip."""
        name = _CLIP_KEYS[self.kind][0]
        return {name: float(self.arguments[name])}

    def norm(self, gradients: Sequence[Tensor], found_inf: Tensor | None) -> Tensor:
        """The norm of gradients as they are, and whether they are finite, in one pass.

        Args:
            gradients: Dense; not changed.
            found_inf: float32 scalar set to 1.0 where an element is non-finite, in place; None for no check.

        Returns:
            float32 scalar on the device.
        """
        norm = ops.multi_tensor_maxnorm if self.norm_type == math.inf else ops.multi_tensor_l2norm
        return norm(gradients, None, found_inf)

    @torch.no_grad()
    def apply(self, parameters: Sequence[Tensor], norm: Tensor | None = None) -> Tensor | None:
        """Clip the gradients of ``parameters`` in place. Collective where they are sharded and ``norm`` is not given.

        Args:
            parameters: FP32 (at O3: 16-bit) tensors; those without a gradient are passed over.
            norm: Their norm, where it is known.

        Returns:
            The norm before clipping, a scalar on the device; None for 'value' and where there is no gradient.
        """
        chosen = [p for p in parameters if p.requires_grad and p.grad is not None]
        if not chosen:
            return None
        if self.kind == 'norm' and norm is None:
            return shards.whole(clip_grad_norm_(chosen, **self.arguments))
        gradients = shards.local([parameter.grad for parameter in chosen if parameter.grad is not None])
        if norm is None:
            limit = float(self.arguments['clip_value'])
            torch._foreach_clamp_min_(gradients, -limit)
            torch._foreach_clamp_max_(gradients, limit)
            return None
        # the coefficient of torch's clip_grad_norm_
        coefficient = (self.arguments['max_norm'] / (norm + 1e-6)).clamp(max=1.0)
        ops.multi_tensor_scale(gradients, gradients, coefficient.float())
        return norm
