"""Weights, gradients and torch's own optimizers beside the fused ones; and a small model that trains with them."""

from __future__ import annotations

import contextlib
import copy
import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from bits import bits
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from amp_wrapper import AmpOptimWrapper, FusedAdam, FusedAdamW, FusedSGD, amp

#: What torch's Adam has in its groups from 2.7 on, and ours always.
NEWER = set() if 'decoupled_weight_decay' in torch.optim.Adam([torch.ones(1)]).defaults else {'decoupled_weight_decay'}
THEIRS: dict[Any, Any] = {FusedAdam: torch.optim.Adam, FusedAdamW: torch.optim.AdamW, FusedSGD: torch.optim.SGD}
MOMENTUM = dict(lr=0.1, momentum=0.9)
#: Each kind of state and of update: class and arguments.
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    'adamw': (FusedAdamW, dict(lr=0.01, weight_decay=0.1)),
    'adam': (FusedAdam, dict(lr=0.01, weight_decay=0.1, amsgrad=True, maximize=True)),
    'sgd': (FusedSGD, dict(lr=0.1, weight_decay=0.1)),
    'nesterov': (FusedSGD, dict(**MOMENTUM, nesterov=True)),
    'dampened': (FusedSGD, dict(**MOMENTUM, dampening=0.5, weight_decay=0.1, maximize=True)),
}
#: torch's fused CPU kernels are vectorised in sixteens; their tails are rounded otherwise.
SHAPES = ((16,), (4, 16), (2, 3, 16))


def weights(device: torch.device, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    draw = torch.Generator().manual_seed(0)
    real = dtype if not dtype.is_complex else torch.complex64
    return [nn.Parameter(torch.randn(shape, generator=draw, dtype=real).to(device, dtype)) for shape in SHAPES]


def give(parameters: list[nn.Parameter], seed: int, scale: float = 1.0, bad: float | None = None) -> None:
    """The same gradients for the same seed."""
    draw = torch.Generator().manual_seed(1000 + seed)
    for parameter in parameters:
        real = torch.float32 if not parameter.is_complex() else torch.complex64
        gradient = torch.randn(parameter.shape, generator=draw, dtype=real) * scale
        if bad is not None:
            gradient.view(-1)[0] = bad
        parameter.grad = gradient.to(parameter.device, parameter.dtype)


def advance(*optimizers: torch.optim.Optimizer, seeds: Iterable[int]) -> None:
    """Steps of several optimizers with the same gradients."""
    for seed in seeds:
        for optimizer in optimizers:
            give([parameter for group in optimizer.param_groups for parameter in group['params']], seed)
            optimizer.step()


def snapshot(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All bits of weights and of what would be saved; none of state that is zero, which another optimizer may not have."""
    saved = [value for state in optimizer.state_dict()['state'].values() for value in state.values()]
    return [bits(p).clone() for p in parameters] + [bits(t).clone() for t in saved if bits(t).any()]


class OpCount(TorchDispatchMode):
    """Counts what is computed, and notes the types of the tensors of each fused step of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.types: list[set[torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split('.')[0]
        self.calls[name] += 1
        if name.startswith('_fused_'):
            # the steps of Adam are float32 always
            self.types.append({tensor.dtype for tensors in args[:3] for tensor in tensors})
        return func(*args, **(kwargs or {}))


#: Level, with split masters or without; the way to train; and a kind of optimizer.
TRAININGS = [
    ('O0', 'amp', 'adamw'),
    ('O1', 'wrapper', 'adam'),
    ('O2', 'amp', 'nesterov'),
    ('O2', 'wrapper', 'dampened'),
    ('O2 split', 'wrapper', 'adam'),
    ('O3', 'amp', 'adam'),
    ('O5', 'wrapper', 'adamw'),
    ('O5 split', 'wrapper', 'nesterov'),
]


def build(kind: str, params: Any) -> Any:
    cls, options = KINDS[kind]
    return cls(params, **options)


class Training:
    """A small model, trained through ``amp`` or through the wrapper, which clips its norm."""

    def __init__(
        self, setting: str, door: str, kind: str, device: torch.device, depth: int = 1, ours: bool = True
    ) -> None:
        torch.manual_seed(0)
        level, *split = setting.split()
        layers = [layer for _ in range(depth) for layer in (nn.Linear(16, 16), nn.Tanh())]
        first = nn.Conv1d(1, 4, 1, bias=False)
        self.model: Any = nn.Sequential(first, nn.Flatten(), nn.BatchNorm1d(16), *layers).to(device)
        cls, options = KINDS[kind]
        self.optimizer = (cls if ours else THEIRS[cls])(self.model.parameters(), **options)
        self.door, self.device = door, device
        if door == 'amp':
            amp.initialize(self.model, self.optimizer, opt_level=level, verbosity=0)
            return
        more: dict[str, Any] = dict(master_weights='split') if split else {}
        scale = dict(init_scale=2.0**8, growth_interval=2)
        more |= dict(loss_scale=scale) if level == 'O2' else dict(skip_nonfinite=True)
        clip = dict(max_norm=0.05)
        self.wrapper = AmpOptimWrapper(optimizer=self.optimizer, opt_level=level, clip_grad=clip, verbosity=0, **more)

    def run(self, *indices: int, bad: int = -1, within: Callable[[], Any] = contextlib.nullcontext) -> None:
        """Batches by number; the loss of ``bad`` is infinite. In some, the first weight has no gradient."""
        for index in indices:
            self.model[0].requires_grad_(index % 3 != 1)
            x = torch.randn(8, 1, 4, generator=torch.Generator().manual_seed(index)).to(self.device)
            factor = math.inf if index == bad else 1.0
            if self.door == 'amp':
                with amp.scale_loss(self.model(x).float().square().mean() * factor, self.optimizer) as scaled:
                    scaled.backward()
                with within():
                    self.optimizer.step()
                self.optimizer.zero_grad()
                continue
            with self.wrapper.optim_context(self.model):
                loss = self.model(x).float().square().mean() * factor
            self.wrapper.backward(loss)
            with within():
                self.wrapper.step()
            self.wrapper.zero_grad()

    def saved(self) -> dict[str, Any]:
        steps = self.optimizer if self.door == 'amp' else self.wrapper
        return copy.deepcopy(dict(model=self.model.state_dict(), wrapper=steps.state_dict()))


def agree(one: Any, other: Any, path: str = '', but: tuple[str, ...] = ()) -> None:
    """Equal but for the last places of numbers; names, types, shapes and counts are the same."""
    if isinstance(one, dict):
        assert [key for key in one if key not in but] == [key for key in other if key not in but], path
        for key, value in one.items():
            if key not in but:
                agree(value, other[key], f'{path}.{key}', but)
    elif isinstance(one, Tensor):
        assert (one.dtype, one.shape) == (other.dtype, other.shape), path
        if path.endswith('step') or not one.is_floating_point():
            # an int16 remainder has no last places: it goes round with its weight
            assert one.dtype is torch.int16 or torch.equal(one, other), path
        else:
            half = one.dtype in (torch.float16, torch.bfloat16)
            torch.testing.assert_close(one, other, rtol=2e-2 if half else 1e-3, atol=2e-3 if half else 1e-4, msg=path)
    elif isinstance(one, (list, tuple)):
        agree(dict(enumerate(one)), dict(enumerate(other)), path, but)
