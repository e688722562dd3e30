"""The wrappers that are measured, with mmengine and without: an image for GPUs may lack it.

Without it, this package's engine is called as its wrapper calls it, and mmengine's own classes say that they are missing.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from amp_wrapper.engine import Engine, attach, backward, forward_context, take_step
from amp_wrapper.engine.clipping import GradientClip
from amp_wrapper.policy import resolve

HAS_MMENGINE = importlib.util.find_spec('mmengine') is not None


class TorchAmp:
    """``torch.autocast`` and ``torch.amp.GradScaler``, as torch's documentation writes the loop.

    Args:
        optimizer: A torch optimizer over FP32 parameters.
        clip_grad: ``dict(max_norm=...)``, or None.
        dtype: Of autocast; None for FP32 training.
    """

    def __init__(
        self, optimizer: Optimizer, clip_grad: dict[str, Any] | None = None, dtype: torch.dtype | None = torch.float16
    ) -> None:
        self.optimizer, self.clip, self.dtype = optimizer, clip_grad, dtype
        self.device = optimizer.param_groups[0]['params'][0].device.type
        self.scaler = torch.amp.GradScaler(self.device, enabled=dtype is torch.float16)

    @contextmanager
    def optim_context(self, model: nn.Module) -> Iterator[None]:
        """Around the forward pass."""
        with nullcontext() if self.dtype is None else torch.autocast(self.device, self.dtype):
            yield

    def update_params(self, loss: Tensor) -> None:
        """Backward, clip, step, clear."""
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        if self.clip is not None:
            self.scaler.unscale_(self.optimizer)
            clip_grad_norm_([p for group in self.optimizer.param_groups for p in group['params']], **self.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


class EngineWrapper:
    """This package's engine, behind the calls of its mmengine wrapper that the benchmarks make.

    Args:
        optimizer: To be stepped.
        opt_level: 'O0' to 'O5'.
        clip_grad: As of the wrapper.
        **words: For :func:`amp_wrapper.policy.resolve`.
    """

    def __init__(
        self, optimizer: Optimizer, opt_level: str = 'O1', clip_grad: dict[str, Any] | None = None, **words: Any
    ) -> None:
        self.engine = Engine(resolve(opt_level, **words), optimizer)
        self.clip = GradientClip.parse(clip_grad)

    def attach(self, model: nn.Module) -> None:
        """Cast the model."""
        attach(self.engine, model)

    @contextmanager
    def optim_context(self, model: nn.Module) -> Iterator[None]:
        """Around the forward pass."""
        attach(self.engine, model)
        with forward_context(self.engine, model):
            yield

    def backward(self, loss: Tensor) -> None:
        """Of the loss times its scale."""
        backward(self.engine, loss)

    def step(self) -> None:
        """Clip and step."""
        take_step(self.engine, self.clip)

    def zero_grad(self) -> None:
        """Clear."""
        self.engine.zero_grad()

    def update_params(self, loss: Tensor) -> None:
        """Backward, step, clear."""
        self.backward(loss)
        self.step()
        self.zero_grad()


def stock(**words: Any) -> Any:
    """mmengine's own ``AmpOptimWrapper``.

    Raises:
        AssertionError: It is missing, or refuses the device.
    """
    assert HAS_MMENGINE, 'mmengine is not installed'
    from amp_wrapper.openmmlab.optim_wrapper import TorchAmpOptimWrapper

    return TorchAmpOptimWrapper(**words)


def ours(**words: Any) -> Any:
    """This package's wrapper, or its engine where mmengine is missing."""
    if not HAS_MMENGINE:
        return EngineWrapper(**words)
    from amp_wrapper import AmpOptimWrapper

    return AmpOptimWrapper(**words)


def logger() -> logging.Logger:
    """Where the wrappers write."""
    if not HAS_MMENGINE:
        return logging.getLogger('amp_wrapper')
    from mmengine.logging import MMLogger

    return MMLogger.get_current_instance()


def mmengine_version() -> str:
    """For the head of a page."""
    if not HAS_MMENGINE:
        return 'no mmengine (the engine without its wrapper)'
    import mmengine

    return f'mmengine {mmengine.__version__}'
