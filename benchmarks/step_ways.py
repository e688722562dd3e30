"""The ways to take an optimizer step, side by side: each is built for a list of shapes, fed with gradients, and stepped."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from amp_wrapper.errors import AmpError

from . import wrapping
from .ops import Shapes

#: Small, so that clipping always has something to do.
MAX_NORM = 1e-4
#: Of float16; bfloat16 needs none.
SCALE = 2.0**16
GROUPS = {
    'half': '16-bit weights, FP32 masters',
    'scaled': 'FP32 weights, scaled gradients',
    'single': 'FP32 training',
}


class Unavailable(Exception):
    """This way cannot be taken here; the text says why."""


@dataclasses.dataclass(frozen=True)
class Case:
    """What every way of a table has in common.

    Attributes:
        optimizer: 'AdamW' or 'SGD' (with momentum 0.9).
        clip: Whether the global norm is clipped.
        dtype: Of the 16-bit weights.
        device: Where.
    """

    optimizer: str
    clip: bool
    dtype: torch.dtype
    device: torch.device

    @property
    def words(self) -> dict[str, Any]:
        """Hyper-parameters of the optimizer."""
        if self.optimizer == 'AdamW':
            return dict(lr=1e-5, weight_decay=1e-2)
        return dict(lr=1e-5, momentum=0.9, weight_decay=1e-4)

    @property
    def is_scaled(self) -> bool:
        """Whether the loss has a scale."""
        return self.dtype is torch.float16


@functools.lru_cache(maxsize=1)
def noise(device: torch.device) -> Tensor:
    """What gradients and weights are filled with."""
    return torch.randn(2**20, generator=torch.Generator().manual_seed(0)).to(device)


def filled(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A new tensor of the same shape with normal numbers, drawn once and repeated."""
    made = torch.empty_like(like, dtype=dtype or like.dtype, requires_grad=False)
    numbers = noise(made.device)
    for part in made.view(-1).split(len(numbers)):
        part.copy_(numbers[: len(part)])
    return made


class Arrive(torch.autograd.Function):
    """A loss whose backward pass brings every weight a new gradient, as that of a model does."""

    @staticmethod
    def forward(ctx: Any, *weights: Tensor) -> Tensor:
        """Zero."""
        ctx.weights = weights
        return torch.zeros((), device=weights[0].device)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        """The gradients."""
        return tuple(map(filled, ctx.weights))


class Owner(nn.Module):
    """Owns parameters, and is cast as any module is."""

    def __init__(self, shapes: Shapes, device: torch.device) -> None:
        super().__init__()
        for index, shape in enumerate(shapes):
            self.register_parameter(f'p{index}', nn.Parameter(filled(torch.empty(shape, device=device)).mul_(0.02)))

    def forward(self) -> Tensor:
        """The loss."""
        return Arrive.apply(*self.parameters())


class Step:
    """A way, built. :meth:`run` is what is timed.

    Args:
        case: What to build.
        shapes: Of the parameters.
    """

    optimizer: Optimizer

    def __init__(self, case: Case, shapes: Shapes) -> None:
        self.case = case
        self.model = Owner(shapes, case.device)

    def prepare(self) -> None:
        """Bring the gradients."""
        self.model().backward()

    def run(self) -> None:
        """Everything between backward and updated weights."""
        raise NotImplementedError

    def finish(self) -> None:
        """Free the gradients."""
        for weight in self.model.parameters():
            weight.grad = None

    def host_tensors(self) -> Iterator[Tensor]:
        """Step counts that torch keeps on the host on every device, so that reading them waits for nothing."""
        for group in self.optimizer.param_groups:
            if not group.get('capturable') and not group.get('fused'):
                for parameter in group['params']:
                    count = self.optimizer.state.get(parameter, {}).get('step')
                    if isinstance(count, Tensor) and not type(self.optimizer).__module__.startswith('amp_wrapper'):
                        yield count

    def clip(self, limit: float = MAX_NORM) -> None:
        """By torch's own function."""
        if self.case.clip:
            clip_grad_norm_(self.model.parameters(), limit)


def torch_optimizer(case: Case, parameters: Any, **words: Any) -> Optimizer:
    """torch's own."""
    return getattr(torch.optim, case.optimizer)(parameters, **case.words, **words)


def our_optimizer(case: Case, parameters: Any, **words: Any) -> Optimizer:
    """Ours of the same meaning.

    Raises:
        Unavailable: This version has none.
    """
    try:
        kind = getattr(importlib.import_module('amp_wrapper.optim'), f'Fused{case.optimizer}')
    except (ImportError, AttributeError) as error:
        raise Unavailable(f'this version has no fused optimizer ({error})') from error
    return kind(parameters, **case.words, **words)


class Wrapped(Step):
    """Through a wrapper of mmengine's kind."""

    wrapper: Any

    def prepare(self) -> None:
        self.wrapper.backward(self.model())

    def run(self) -> None:
        self.wrapper.step()

    def finish(self) -> None:
        self.wrapper.zero_grad()


class Ours(Wrapped):
    """This package, through its wrapper.

    Args:
        case: What to build.
        shapes: Of the parameters.
        level: Opt levels for float16 and bfloat16.
        optimizer: Makes the optimizer.
        words: Further ones for the wrapper.
    """

    def __init__(
        self,
        case: Case,
        shapes: Shapes,
        level: tuple[str, str],
        optimizer: Callable[[Case, Any], Optimizer],
        words: dict[str, Any],
    ) -> None:
        super().__init__(case, shapes)
        self.optimizer = optimizer(case, self.model.parameters())
        try:
            with quiet():
                self.wrapper = wrapping.ours(
                    opt_level=level[0 if case.is_scaled else 1],
                    optimizer=self.optimizer,
                    clip_grad=dict(max_norm=MAX_NORM) if case.clip else None,
                    verbosity=0,
                    **words,
                )
                self.wrapper.attach(self.model)
        except AmpError as error:
            raise Unavailable(f'{type(error).__name__}: {str(error).splitlines()[0][:160]}') from error


class Stock(Wrapped):
    """mmengine's own wrapper, with torch's default optimizer or another."""

    def __init__(self, case: Case, shapes: Shapes, **words: Any) -> None:
        super().__init__(case, shapes)
        _need(case.is_scaled, 'measured with float16 only, for it scales the loss')
        self.optimizer = torch_optimizer(case, self.model.parameters(), **words)
        try:
            with quiet():
                self.wrapper = wrapping.stock(
                    optimizer=self.optimizer, clip_grad=dict(max_norm=MAX_NORM) if case.clip else None
                )
        except AssertionError as error:
            raise Unavailable(f"mmengine's constructor refuses this device: {error}") from error


class Scaler(Step):
    """``torch.amp.GradScaler``, as its documentation writes the loop."""

    def __init__(self, case: Case, shapes: Shapes, **words: Any) -> None:
        super().__init__(case, shapes)
        _need(case.is_scaled, 'measured with float16 only, for it scales the loss')
        self.optimizer = torch_optimizer(case, self.model.parameters(), **words)
        self.scaler = torch.amp.GradScaler(case.device.type)

    def prepare(self) -> None:
        self.scaler.scale(self.model()).backward()

    def run(self) -> None:
        if self.case.clip:
            self.scaler.unscale_(self.optimizer)
            self.clip()
        self.scaler.step(self.optimizer)
        self.scaler.update()


class Plain(Step):
    """An optimizer alone, on FP32."""

    def __init__(self, case: Case, shapes: Shapes, optimizer: Callable[[Case, Any], Optimizer]) -> None:
        super().__init__(case, shapes)
        self.optimizer = optimizer(case, self.model.parameters())

    def run(self) -> None:
        self.clip()
        self.optimizer.step()


class TorchOps(Step):
    """What O2 means, by torch's foreach operations and torch's fused optimizer, without any host read.

    A gradient is copied to FP32, unscaled, checked, clipped; the masters are stepped, skipped on the device where the check
    failed, and copied into the weights; the scale moves.

    Args:
        case: What to build.
        shapes: Of the parameters.
        plan: 'unscale': one operation for each of these. 'one multiplication': the norm of the scaled gradients is the check
            and gives the coefficient, which is multiplied with the inverse scale first. 'folded': the fused optimizer divides
            by both. 'folded, 16-bit norm': and the norm is that of the 16-bit gradients.
    """

    def __init__(self, case: Case, shapes: Shapes, plan: str) -> None:
        super().__init__(case, shapes)
        self.plan = plan
        self.masters = [nn.Parameter(weight.detach()) for weight in self.model.parameters()]
        for weight, master in zip(self.model.parameters(), self.masters):
            weight.data = master.data.to(case.dtype)
        for master in self.masters:
            master.grad = torch.empty_like(master)
        self.optimizer = torch_optimizer(case, self.masters, fused=True)
        device = case.device
        self.scale = torch.full((), SCALE if case.is_scaled else 1.0, device=device)
        self.growth = torch.zeros((), dtype=torch.int32, device=device)

    @torch.no_grad()
    def run(self) -> None:
        weights = list(self.model.parameters())
        gradients = [weight.grad for weight in weights]
        targets = [master.grad for master in self.masters]
        found = torch.zeros((), device=self.case.device)
        inverse, divisor = self.scale.reciprocal(), None
        torch._foreach_copy_(targets, gradients)
        if self.plan == 'unscale':
            torch._amp_foreach_non_finite_check_and_unscale_(targets, found, inverse)
            if self.case.clip:
                torch._foreach_mul_(targets, self._coefficient(_norm(targets)))
        elif self.plan == 'one multiplication':
            norm = _norm(targets)
            found = (~norm.isfinite()).float()
            factor = inverse
            if self.case.clip:
                factor = factor * self._coefficient(norm * factor)
            if self.case.clip or self.case.is_scaled:
                torch._foreach_mul_(targets, factor)
        else:
            norm = _norm(gradients if self.plan.endswith('16-bit norm') else targets)
            found = (~norm.isfinite()).float()
            if self.case.clip:
                divisor = self.scale / self._coefficient(norm * inverse)
            elif self.case.is_scaled:
                divisor = self.scale
        self.optimizer.grad_scale, self.optimizer.found_inf = divisor, found
        self.optimizer.step()
        torch._foreach_copy_(weights, self.masters)
        if self.case.is_scaled:
            torch._amp_update_scale_(self.scale, self.growth, found, 2.0, 0.5, 2000)

    @staticmethod
    def _coefficient(norm: Tensor) -> Tensor:
        return (MAX_NORM / (norm + 1e-6)).clamp(max=1.0)


def _norm(tensors: list[Tensor]) -> Tensor:
    # float32, for squares of float16 overflow
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float32)))


class Peer(Step):
    """apex's or TransformerEngine's fused optimizer with FP32 masters, which takes the scale from a ``GradScaler``."""

    def __init__(self, case: Case, shapes: Shapes, module: str, **words: Any) -> None:
        super().__init__(case, shapes)
        kind = _peer(module, case.optimizer)
        _need(
            case.optimizer == 'AdamW',
            'its SGD keeps masters only through apex.amp, which is gone'
            if module.startswith('apex')
            else 'its SGD keeps no masters',
        )
        for weight in self.model.parameters():
            weight.data = weight.data.to(case.dtype)
        self.optimizer = kind(self.model.parameters(), **case.words, master_weights=True, capturable=True, **words)
        self.scaler = torch.amp.GradScaler(case.device.type, enabled=case.is_scaled)

    def prepare(self) -> None:
        self.scaler.scale(self.model()).backward()

    def run(self) -> None:
        # neither clips: the scaled gradients are clipped by torch, in their own type
        self.clip(MAX_NORM * (SCALE if self.case.is_scaled else 1.0))
        if self.case.is_scaled:
            self.optimizer.step(grad_scaler=self.scaler)
            self.scaler.update()
        else:
            self.optimizer.step()


def _peer(module: str, optimizer: str) -> Any:
    try:
        return getattr(importlib.import_module(module), 'FusedAdam' if optimizer == 'AdamW' else 'FusedSGD')
    except (ImportError, AttributeError) as error:
        raise Unavailable(f'not installed ({error})') from error


def _peer_optimizer(module: str) -> Callable[[Case, Any], Optimizer]:
    return lambda case, parameters: _peer(module, case.optimizer)(parameters, **case.words)


def _need(condition: bool, reason: str) -> None:
    if not condition:
        raise Unavailable(reason)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No line about each wrapper that is built."""
    logger = wrapping.logger()
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


@dataclasses.dataclass(frozen=True)
class Way:
    """One row.

    Attributes:
        name: Of the row.
        group: Key of :data:`GROUPS`; ratios are within a group.
        build: Makes it, or raises :class:`Unavailable`.
        foreign: Whether another package does it, whose errors are no reason to end a run.
    """

    name: str
    group: str
    build: Callable[[Case, Shapes], Step]
    foreign: bool = False


def _ours(
    name: str,
    group: str,
    optimizer: Callable[..., Optimizer],
    words: dict[str, Any] | None = None,
    **optimizer_words: Any,
) -> Way:
    level = ('O2', 'O5') if group == 'half' else ('O1', 'O4')
    make = functools.partial(optimizer, **optimizer_words)
    return Way(name, group, lambda case, shapes: Ours(case, shapes, level, make, words or {}))


def ways(case: Case) -> list[Way]:
    """Every way, the fused one of this package first in each group."""
    half, scaled = ('O2', 'O1') if case.is_scaled else ('O5', 'O4')
    split = dict(master_weights='split')
    apex, engine = 'apex.optimizers', 'transformer_engine.pytorch.optimizers'
    return [
        _ours(f'this package, {half}, fused', 'half', our_optimizer),
        _ours(f'this package, {half}, fused, 16-bit moments', 'half', our_optimizer, state_dtype='bfloat16'),
        _ours(f'this package, {half}, fused, split masters', 'half', our_optimizer, split),
        _ours(
            f'this package, {half}, fused, split masters, 16-bit moments',
            'half',
            our_optimizer,
            split,
            state_dtype='bfloat16',
        ),
        _ours(f'this package, {half}, torch fused', 'half', torch_optimizer, fused=True),
        _ours(f'this package, {half}, torch foreach', 'half', torch_optimizer, foreach=True),
        *(
            Way(f'torch ops, {plan}', 'half', lambda case, shapes, plan=plan: TorchOps(case, shapes, plan))
            for plan in ('unscale', 'one multiplication', 'folded', 'folded, 16-bit norm')
        ),
        Way('apex, FP32 masters', 'half', lambda case, shapes: Peer(case, shapes, apex), True),
        Way('TransformerEngine, FP32 masters', 'half', lambda case, shapes: Peer(case, shapes, engine), True),
        Way(
            'TransformerEngine, remainders',
            'half',
            lambda case, shapes: Peer(case, shapes, engine, store_param_remainders=True),
            True,
        ),
        _ours(f'this package, {scaled}, fused', 'scaled', our_optimizer),
        _ours(f'this package, {scaled}, torch fused', 'scaled', torch_optimizer, fused=True),
        _ours(f'this package, {scaled}, torch foreach', 'scaled', torch_optimizer, foreach=True),
        Way("mmengine's AmpOptimWrapper, foreach", 'scaled', lambda c, shapes: Stock(c, shapes, foreach=True)),
        Way("mmengine's AmpOptimWrapper, fused", 'scaled', lambda c, shapes: Stock(c, shapes, fused=True)),
        Way('torch.amp, foreach', 'scaled', lambda case, shapes: Scaler(case, shapes, foreach=True)),
        Way('torch.amp, fused', 'scaled', lambda case, shapes: Scaler(case, shapes, fused=True)),
        Way('this package, optimizer alone', 'single', lambda c, shapes: Plain(c, shapes, our_optimizer)),
        Way(
            'torch fused',
            'single',
            lambda c, shapes: Plain(c, shapes, functools.partial(torch_optimizer, fused=True)),
        ),
        Way(
            'torch foreach',
            'single',
            lambda c, shapes: Plain(c, shapes, functools.partial(torch_optimizer, foreach=True)),
        ),
        Way('apex', 'single', lambda c, shapes: Plain(c, shapes, _peer_optimizer(apex)), True),
        Way('TransformerEngine', 'single', lambda c, shapes: Plain(c, shapes, _peer_optimizer(engine)), True),
    ]


#: Of the rows named so, the fastest is the best sequence of torch operations.
BEST_OF = 'torch ops, '
