"""Training steps to compare: this package with mmengine's wrapper or with its engine alone, and torch's own AMP."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from amp_wrapper import FusedAdamW, FusedSGD
from amp_wrapper.engine import Engine, attach, backward, forward_context, take_step
from amp_wrapper.engine.clipping import GradientClip
from amp_wrapper.policy import LEVELS, resolve

from .models import Training

HAS_MMENGINE = importlib.util.find_spec('mmengine') is not None
#: Ways of torch alone, and the type of their autocast.
TORCH_TYPES = {'FP32': None, 'torch.amp': torch.float16, 'torch.amp, bfloat16': torch.bfloat16}
#: All ways to train a model.
VARIANTS = (*TORCH_TYPES, *LEVELS)
#: Low enough that no step overflows: a skipped step would be a cheaper one.
SCALE = 8.0


class TorchAmp:
    """``torch.autocast`` and ``torch.amp.GradScaler``, as torch's documentation writes the loop.

    Args:
        optimizer: Over FP32 parameters.
        dtype: Of autocast; None for FP32 training.
        max_norm: Of the gradients; None for no clipping.
        init_scale: First loss scale in float16.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        dtype: torch.dtype | None,
        max_norm: float | None = None,
        init_scale: float = SCALE,
    ) -> None:
        self.optimizer, self.dtype, self.max_norm = optimizer, dtype, max_norm
        self.parameters = [parameter for group in optimizer.param_groups for parameter in group['params']]
        self.device = self.parameters[0].device.type
        self.scaler = torch.amp.GradScaler(self.device, init_scale=init_scale, enabled=dtype is torch.float16)

    def optim_context(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return what surrounds a forward pass."""
        return nullcontext() if self.dtype is None else torch.autocast(self.device, self.dtype)

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of the loss times its scale."""
        self.scaler.scale(loss).backward()

    def step(self) -> None:
        """Clip and step."""
        if self.max_norm is not None:
            self.scaler.unscale_(self.optimizer)
            clip_grad_norm_(self.parameters, self.max_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def zero_grad(self) -> None:
        """Clear the gradients."""
        self.optimizer.zero_grad()


class EngineWrapper:
    """This package's engine, called as its mmengine wrapper calls it, where mmengine is missing."""

    def __init__(self, optimizer: Optimizer, opt_level: str, clip_grad: dict[str, Any] | None, **words: Any) -> None:
        self.engine, self.clip = Engine(resolve(opt_level, **words), optimizer), GradientClip.parse(clip_grad)

    def attach(self, model: nn.Module) -> None:
        """Cast the model."""
        attach(self.engine, model)

    def optim_context(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return what surrounds a forward pass."""
        return forward_context(self.engine, model)

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of the loss times its scale."""
        backward(self.engine, loss)

    def step(self) -> None:
        """Clip and step."""
        take_step(self.engine, self.clip)

    def zero_grad(self) -> None:
        """Clear the gradients."""
        self.engine.zero_grad()


def wrap(optimizer: Optimizer, model: nn.Module, level: str, max_norm: float | None = None, **words: Any) -> Any:
    """Return this package's wrapper, or its engine where mmengine is missing, with the model attached."""
    clip = None if max_norm is None else {'max_norm': max_norm}
    wrapper: Any
    if HAS_MMENGINE:
        from mmengine.logging import MMLogger

        from amp_wrapper import AmpOptimWrapper

        MMLogger.get_current_instance().setLevel(logging.ERROR)
        wrapper = AmpOptimWrapper(optimizer=optimizer, opt_level=level, clip_grad=clip, verbosity=0, **words)
    else:
        wrapper = EngineWrapper(optimizer, level, clip, **words)
    wrapper.attach(model)
    return wrapper


def make_optimizer(name: str, parameters: Iterable[nn.Parameter], **words: Any) -> Optimizer:
    """Make 'FusedAdamW', 'FusedSGD' of this package, or 'AdamW', 'SGD' of torch; SGD has momentum."""
    kinds = {'FusedAdamW': FusedAdamW, 'FusedSGD': FusedSGD, 'AdamW': torch.optim.AdamW, 'SGD': torch.optim.SGD}
    if name.endswith('SGD'):
        words['momentum'] = 0.9
    return kinds[name](parameters, lr=1e-5, **words)


class Loop:
    """Whole training steps of one model in one of :data:`VARIANTS`.

    Args:
        training: Model, inputs, optimizer.
        variant: Levels train with this package's fused optimizer, the others with torch's.
        device: 'cpu' or 'cuda'.
        **words: Further options of a level.
    """

    def __init__(self, training: Training, variant: str, device: str, **words: Any) -> None:
        torch.manual_seed(0)
        self.model = training.build().to(device)
        self.inputs, self.labels = training.batch(device)
        if variant in TORCH_TYPES:
            optimizer = make_optimizer(training.optimizer, self.model.parameters(), fused=True)
            self.wrapper: Any = TorchAmp(optimizer, TORCH_TYPES[variant], 1.0)
        else:
            optimizer = make_optimizer(f'Fused{training.optimizer}', self.model.parameters())
            self.wrapper = wrap(optimizer, self.model, variant, 1.0, **words)

    def step(self) -> None:
        """Forward, backward, clip, step, clear."""
        with self.wrapper.optim_context(self.model):
            loss = F.cross_entropy(self.model(self.inputs).float(), self.labels)
        self.wrapper.backward(loss)
        self.wrapper.step()
        self.wrapper.zero_grad()
