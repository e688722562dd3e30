"""Functions that run in FP32 whatever the opt level: fragile losses that 16-bit numbers would break.

A float16 sum of 100,000 terms of 0.9 is infinite, and mmengine models compute their losses inside ``forward``. While a
cast model runs its forward pass, a torch function mode sees every call and casts 16-bit inputs of the functions listed
here up to FP32; the result stays FP32. The mode recognises functions by identity, so it does not matter how a model
imported them.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from .nested import HALF_TYPES, cast_tensors

#: Functional losses of torch. Loss *modules* are kept FP32 by :mod:`amp_wrapper.casting`.
FP32_FUNCTIONS: frozenset[Any] = frozenset(
    {
        F.binary_cross_entropy,
        F.binary_cross_entropy_with_logits,
        F.cosine_embedding_loss,
        F.cross_entropy,
        F.ctc_loss,
        F.gaussian_nll_loss,
        F.hinge_embedding_loss,
        F.huber_loss,
        F.kl_div,
        F.l1_loss,
        F.margin_ranking_loss,
        F.mse_loss,
        F.multi_margin_loss,
        F.multilabel_margin_loss,
        F.multilabel_soft_margin_loss,
        F.nll_loss,
        F.poisson_nll_loss,
        F.smooth_l1_loss,
        F.soft_margin_loss,
        F.triplet_margin_loss,
        F.triplet_margin_with_distance_loss,
        # their namesakes in torch itself are other objects
        torch.binary_cross_entropy_with_logits,
        torch.cosine_embedding_loss,
        torch.ctc_loss,
        torch.hinge_embedding_loss,
        torch.kl_div,
        torch.margin_ranking_loss,
        torch.poisson_nll_loss,
        torch.triplet_margin_loss,
    }
)


class Fp32OpsMode(TorchFunctionMode):
    """Casts 16-bit inputs of :data:`FP32_FUNCTIONS` to FP32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in FP32_FUNCTIONS:
            args = cast_tensors(args, torch.float32, HALF_TYPES)
            kwargs = cast_tensors(kwargs, torch.float32, HALF_TYPES)
        return func(*args, **kwargs) if kwargs else func(*args)


class _Depth(threading.local):
    """How many cast models are in their forward pass on this thread; one mode serves them all."""

    count = 0
    mode: Fp32OpsMode | None = None


_depth = _Depth()


def enter() -> None:
    """A cast model's forward pass begins on this thread."""
    if _depth.count == 0:
        mode = Fp32OpsMode()
        mode.__enter__()  # type: ignore[no-untyped-call]
        _depth.mode = mode
    _depth.count += 1


def leave() -> None:
    """A cast model's forward pass ends on this thread, by returning or by an exception."""
    if _depth.count > 0:
        _depth.count -= 1
        if _depth.count == 0 and _depth.mode is not None:
            _depth.mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            _depth.mode = None


def depth() -> int:
    """The number of forward passes under way on this thread."""
    return _depth.count


def unwind(to: int) -> None:
    """Leave down to ``to`` passes; for exceptions such as KeyboardInterrupt, after which torch runs no hooks."""
    while _depth.count > to:
        leave()
