"""Gradients that are summed over the micro-batches of a window in FP32, beside 16-bit weights."""

from __future__ import annotations

from collections.abc import Container, Iterable

import torch
from torch import Tensor, nn

from ... import ops
from ...policy.nested import HALF_TYPES


class Fp32Sums:
    """FP32 sums of 16-bit gradients.

    After each backward pass the gradient of every 16-bit weight is added to its sum and freed, so that a window costs
    4 bytes per weight between two backward passes, where ``.grad`` would cost 2. Sums are still multiplied by the loss
    scale. FP32 weights need none: their ``.grad`` is a sum in FP32 already.
    """

    def __init__(self) -> None:
        self._sums: dict[int, tuple[nn.Parameter, Tensor]] = {}

    def __len__(self) -> int:
        return len(self._sums)

    def __contains__(self, weight: object) -> bool:
        return id(weight) in self._sums

    def get(self, weight: Tensor) -> Tensor | None:
        """The sum of ``weight``: float32, of its shape; a live tensor. None without one."""
        found = self._sums.get(id(weight))
        return None if found is None else found[1]

    def put(self, weight: nn.Parameter, gradient: Tensor) -> None:
        """Let ``gradient`` (any floating type) be the sum of ``weight``."""
        self._sums[id(weight)] = (weight, gradient.to(weight.device, torch.float32, copy=True))

    @torch.no_grad()
    def take(self, weights: Iterable[nn.Parameter]) -> None:
        """Move gradients into the sums.

        Args:
            weights: Those that are not 16-bit, or have no gradient, are passed over.
        """
        for weight in weights:
            gradient = weight.grad
            if gradient is None or weight.dtype not in HALF_TYPES:
                continue
            before, wide = self.get(weight), gradient.float()
            if before is None or before.is_sparse != wide.is_sparse:
                total = ops.add_gradients(before, wide)
                assert total is not None
            else:
                total = before.add_(wide)
            self._sums[id(weight)] = (weight, total)
            weight.grad = None

    @torch.no_grad()
    def give_back(self, ids: Container[int]) -> None:
        """Put sums, rounded, where DDP looks for gradients: what stayed here would stay on its rank.

        Args:
            ids: The weights, by id, whose gradients are about to be averaged.
        """
        for key in [key for key in self._sums if key in ids]:
            weight, total = self._sums.pop(key)
            weight.grad = ops.add_gradients(total.to(weight.dtype), weight.grad)

    def clear(self) -> None:
        """Forget every sum."""
        self._sums.clear()
