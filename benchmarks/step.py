"""Compares optimizer steps: ``python -m benchmarks.step [--models ResNet-50] [--dtype bfloat16] [--device cuda]``.

Timed is everything between the end of the backward pass and updated weights: unscaling, overflow check, clipping, update, copy
into the model, loss scale. Before each step, a backward pass brings every parameter a new gradient. This package, with its own
optimizers and torch's, stands beside ``torch.amp`` and beside torch operations that mean the same as O2.
A second table has ``FusedAdamW`` beside torch's fastest AdamW at the same level, without a compiled library and with it.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from amp_wrapper import ops
from amp_wrapper.ops import loader

from .counting import allocations, counts_of, launches
from .loops import TorchAmp, make_optimizer, wrap
from .machine import in_turns, median, options, parse, publish, ratio, say, table
from .models import MODELS, Shapes, shapes_of

DTYPES = {'float16': torch.float16, 'bfloat16': torch.bfloat16}
#: Small, so that clipping always has something to do.
MAX_NORM = 1e-4
#: Of the loss in float16; bfloat16 needs none.
SCALE = 2.0**16
HEADS = ('way', 'ms', 'time to the first', 'bytes moved per parameter', 'host microseconds', 'operations', 'host reads')
GROUPS = ('16-bit weights with FP32 masters', 'FP32 weights, scaled gradients', 'FP32 training')


@dataclasses.dataclass(frozen=True)
class Case:
    """What all ways of a table have in common.

    Attributes:
        optimizer: 'AdamW' or 'SGD' (with momentum).
        clip: Whether the global norm is clipped.
        dtype: Of the 16-bit weights.
        device: 'cpu' or 'cuda'.
    """

    optimizer: str
    clip: bool
    dtype: torch.dtype
    device: str

    @property
    def max_norm(self) -> float | None:
        """Limit of the global norm."""
        return MAX_NORM if self.clip else None

    @property
    def scale(self) -> float:
        """Scale of the loss."""
        return SCALE if self.dtype is torch.float16 else 1.0


# -- ways to take a step -----------------------------------------------------------------------------------------------


@functools.cache
def noise(device: str) -> Tensor:
    """Return what weights and gradients are filled with."""
    return torch.randn(2**20, generator=torch.Generator().manual_seed(0)).to(device)


def filled(like: Tensor) -> Tensor:
    """Return a new tensor of the same shape and type with normal numbers, drawn once and repeated."""
    made = torch.empty_like(like, requires_grad=False)
    numbers = noise(made.device.type)
    for part in made.view(-1).split(len(numbers)):
        part.copy_(numbers[: len(part)])
    return made


class GradientSource(torch.autograd.Function):
    """A loss whose backward pass brings every weight a new gradient, as that of a model does."""

    @staticmethod
    def forward(ctx: Any, *weights: Tensor) -> Tensor:
        """Return zero."""
        ctx.weights = weights
        return torch.zeros((), device=weights[0].device)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        """Return the gradients."""
        return tuple(map(filled, ctx.weights))


class Owner(nn.Module):
    """A module of nothing but parameters."""

    def __init__(self, shapes: Shapes, device: str) -> None:
        super().__init__()
        for index, shape in enumerate(shapes):
            self.register_parameter(f'p{index}', nn.Parameter(filled(torch.empty(shape, device=device)).mul_(0.02)))

    def forward(self) -> Tensor:
        """Return the loss."""
        loss: Tensor = GradientSource.apply(*self.parameters())
        return loss


class Step:
    """One way, built: :meth:`run` is timed.

    Args:
        case: What to build.
        shapes: Of the parameters.
    """

    optimizer: Optimizer

    def __init__(self, case: Case, shapes: Shapes) -> None:
        self.case, self.model = case, Owner(shapes, case.device)

    def prepare(self) -> None:
        """Bring new gradients."""
        self.model.zero_grad()
        self.model().backward()

    def run(self) -> None:
        """Update the weights."""
        raise NotImplementedError

    def host_counts(self) -> list[int]:
        """Return addresses of the step counts that torch keeps on the host, so that reading them waits for nothing."""
        counts = [state.get('step') for state in self.optimizer.state.values()]
        if type(self.optimizer).__module__.startswith('amp_wrapper'):
            return []
        return [count.data_ptr() for count in counts if isinstance(count, Tensor) and count.device.type == 'cpu']


class Wrapped(Step):
    """A step through a wrapper.

    Args:
        case: What to build.
        shapes: Of the parameters.
        level: Of this package, or '' for ``torch.amp``.
        optimizer: Makes the optimizer.
        **words: Options of the level.
    """

    def __init__(
        self, case: Case, shapes: Shapes, level: str, optimizer: Callable[..., Optimizer], **words: Any
    ) -> None:
        super().__init__(case, shapes)
        self.optimizer = optimizer(self.model.parameters())
        self.wrapper: Any
        if level:
            self.wrapper = wrap(self.optimizer, self.model, level, case.max_norm, **words)
        else:
            self.wrapper = TorchAmp(self.optimizer, torch.float16 if case.scale > 1 else None, case.max_norm)

    def prepare(self) -> None:
        self.wrapper.zero_grad()
        self.wrapper.backward(self.model())

    def run(self) -> None:
        self.wrapper.step()


class Plain(Step):
    """An optimizer alone, on FP32."""

    def __init__(self, case: Case, shapes: Shapes, optimizer: Callable[..., Optimizer]) -> None:
        super().__init__(case, shapes)
        self.optimizer = optimizer(self.model.parameters())

    def run(self) -> None:
        if self.case.clip:
            clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()


class TorchOps(Step):
    """The meaning of O2 by torch's foreach operations and torch's fused optimizer, without a host read.

    Args:
        case: What to build.
        shapes: Of the parameters.
        folded: Whether the fused optimizer divides by scale and clip coefficient; otherwise one operation unscales, one clips.
    """

    def __init__(self, case: Case, shapes: Shapes, folded: bool) -> None:
        super().__init__(case, shapes)
        self.folded = folded
        self.masters = [nn.Parameter(weight.detach()) for weight in self.model.parameters()]
        for weight, master in zip(self.model.parameters(), self.masters):
            weight.data = master.data.to(case.dtype)
            master.grad = torch.empty_like(master)
        self.optimizer = make_optimizer(case.optimizer, self.masters, fused=True)
        self.scale = torch.full((), case.scale, device=case.device)
        self.growth = torch.zeros((), dtype=torch.int32, device=case.device)

    @torch.no_grad()
    def run(self) -> None:
        weights = list(self.model.parameters())
        gradients = [master.grad for master in self.masters]
        found = torch.zeros((), device=self.case.device)
        inverse, divisor = self.scale.reciprocal(), self.scale
        torch._foreach_copy_(gradients, [weight.grad for weight in weights])
        if self.folded:
            norm = torch.nn.utils.get_total_norm(gradients)
            found = (~norm.isfinite()).float()
            if self.case.clip:
                divisor = self.scale / _coefficient(norm * inverse)
        else:
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, inverse)
            if self.case.clip:
                torch._foreach_mul_(gradients, _coefficient(torch.nn.utils.get_total_norm(gradients)))
        self.optimizer.grad_scale = divisor if self.folded else None
        self.optimizer.found_inf = found
        self.optimizer.step()
        torch._foreach_copy_(weights, self.masters)
        if self.case.scale > 1:
            torch._amp_update_scale_(self.scale, self.growth, found, 2.0, 0.5, 2000)


def _coefficient(norm: Tensor) -> Tensor:
    return (MAX_NORM / (norm + 1e-6)).clamp(max=1.0)


def ways(case: Case) -> dict[str, dict[str, Callable[[Shapes], Step]]]:
    """Return what builds each way, by group and name; the first of each group is this package with its own optimizer."""
    half, full = ('O2', 'O1') if case.dtype is torch.float16 else ('O5', 'O4')
    ours = functools.partial(make_optimizer, f'Fused{case.optimizer}')
    fused = functools.partial(make_optimizer, case.optimizer, fused=True)
    foreach = functools.partial(make_optimizer, case.optimizer, foreach=True)

    def wrapped(level: str, optimizer: Callable[..., Optimizer], **words: Any) -> Callable[[Shapes], Step]:
        return functools.partial(Wrapped, case, level=level, optimizer=optimizer, **words)

    compiled: dict[str, Callable[[Shapes], Step]] = {}
    if ops.serves(case.device):
        small = functools.partial(ours, state_dtype='bfloat16')
        compiled[f'this package, {half}, fused, split masters'] = wrapped(half, ours, master_weights='split')
        compiled[f'this package, {half}, fused, 16-bit moments'] = wrapped(half, small)
    groups: Sequence[dict[str, Callable[[Shapes], Step]]] = (
        {
            f'this package, {half}, fused': wrapped(half, ours),
            **compiled,
            f'this package, {half}, torch fused': wrapped(half, fused),
            'torch ops, unscale': functools.partial(TorchOps, case, folded=False),
            'torch ops, folded': functools.partial(TorchOps, case, folded=True),
        },
        {
            f'this package, {full}, fused': wrapped(full, ours),
            f'this package, {full}, torch fused': wrapped(full, fused),
            'torch.amp, fused': wrapped('', fused),
            'torch.amp, foreach': wrapped('', foreach),
        },
        {
            'this package, optimizer alone': functools.partial(Plain, case, optimizer=ours),
            'torch fused': functools.partial(Plain, case, optimizer=fused),
            'torch foreach': functools.partial(Plain, case, optimizer=foreach),
        },
    )
    return dict(zip(GROUPS, groups))


# -- tables ------------------------------------------------------------------------------------------------------------


def start(build: Callable[[Shapes], Step], shapes: Shapes) -> Step:
    """Build a step, with the state that the first one makes, and new gradients."""
    step = build(shapes)
    step.prepare()
    step.run()
    step.prepare()
    return step


def time_steps(steps: dict[str, Step], rounds: int, device: str) -> dict[str, list[float]]:
    """Return the seconds of each step in each round, with new gradients before each."""

    def prepare(name: str) -> None:
        steps[name].prepare()

    return in_turns({name: step.run for name, step in steps.items()}, rounds, device, prepare)


def measure(builds: dict[str, Callable[[Shapes], Step]], shapes: Shapes, rounds: int, device: str) -> list[list[str]]:
    """Return the rows of a group: the first way is what the others are compared with."""
    steps: dict[str, Step] = {}
    held: dict[str, tuple[int, int]] = {}
    for name, build in builds.items():
        resident, _ = allocations(functools.partial(_keep, steps, name, build, shapes), device)
        held[name] = (resident, resident + allocations(steps[name].run, device)[1])
    times = time_steps(steps, rounds, device)
    # nearly nothing is computed there, so the time is that of calls and checks on the host
    hosts = time_steps({name: start(build, [(1,)] * len(shapes)) for name, build in builds.items()}, rounds, device)
    base, count = times[next(iter(builds))], sum(map(_size, shapes))
    rows = []
    for name, step in steps.items():
        step.prepare()
        counts = counts_of(step.run, step.host_counts())
        step.prepare()
        row = [name, median(times[name]), ratio(times[name], base), f'{counts.bytes / count:.1f}']
        row += [median(hosts[name], 1e-6), str(counts.operations), str(counts.reads)]
        row += [f'{part / count:.1f}' for part in held[name]]
        rows.append(row + ([str(launches(step.run))] if device == 'cuda' else []))
    return rows


def _keep(steps: dict[str, Step], name: str, build: Callable[[Shapes], Step], shapes: Shapes) -> None:
    steps[name] = start(build, shapes)


def _size(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()


@contextmanager
def ops_from(setting: str) -> Iterator[None]:
    """Let a value of ``AMP_WRAPPER_OPS`` choose what serves the ops: 'torch' for no library."""
    with mock.patch.dict(os.environ, AMP_WRAPPER_OPS=setting):
        loader.library.cache_clear()
        loader.library()
        yield
    loader.library.cache_clear()


def beside_torch(lists: dict[str, Shapes], rounds: int, device: str) -> list[list[str]]:
    """Return rows that compare ``FusedAdamW`` with torch's faster AdamW at one level, without a library and with it."""
    case, rows = Case('AdamW', False, torch.float16, device), []
    optimizers = {
        'ours': functools.partial(make_optimizer, 'FusedAdamW'),
        'fused': functools.partial(make_optimizer, 'AdamW', fused=True),
        'foreach': functools.partial(make_optimizer, 'AdamW', foreach=True),
    }
    libraries = {'none': 'torch', **({'compiled': ''} if ops.serves(device) else {})}
    for title, shapes in lists.items():
        for level in ('O0', 'O2', 'O5'):
            for library, setting in libraries.items():
                with ops_from(setting):
                    steps: dict[str, Step] = {}
                    for name, optimizer in optimizers.items():
                        steps[name] = start(functools.partial(Wrapped, case, level=level, optimizer=optimizer), shapes)
                    times = time_steps(steps, rounds, device)
                best = min(times['fused'], times['foreach'], key=statistics.median)
                rows.append([title, level, library, median(best), ratio(times['ours'], best)])
                say(' | '.join(rows[-1]))
    return rows


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what this benchmark asks for."""
    parser.add_argument('--models', nargs='+', choices=list(MODELS), default=['ResNet-50'])
    parser.add_argument('--optimizers', nargs='+', choices=('AdamW', 'SGD'), default=['AdamW', 'SGD'])
    parser.add_argument('--dtype', choices=list(DTYPES), default='float16')
    parser.add_argument('--no-clip', action='store_true', help='do not clip the global norm')


def main(words: Sequence[str] | None = None) -> None:
    """Measure, and print the page."""
    parser = options(__doc__, 9)
    add_options(parser)
    args = parse(parser, words)
    lines = [
        'Medians; ratios are medians of the ratios round by round, with their quartiles. Bytes moved are those that the '
        'operations cannot avoid. Host time is that of as many tensors of one element. Memory in bytes per parameter.'
    ]
    heads = [*HEADS, 'bytes held', 'at the peak', *(['launches'] if args.device == 'cuda' else [])]
    # made before memory is counted: it is no part of any way
    noise(args.device)
    for model in ['tiny'] if args.quick else args.models:
        for optimizer in args.optimizers:
            case = Case(optimizer, not args.no_clip, DTYPES[args.dtype], args.device)
            for group, builds in ways(case).items():
                say(f'{model}, {optimizer}, {group}')
                rows = measure(builds, shapes_of(model), args.rounds, args.device)
                lines += ['', f'## {model}, {optimizer}, {args.dtype}: {group}', *table(heads, rows)]
    lists: dict[str, Shapes] = {'200 tiny tensors': [(4, 4)] * 200}
    if not args.quick:
        lists |= {'1,000 small tensors': [(1000,)] * 1000, 'ResNet-50': shapes_of('ResNet-50')}
    rows = beside_torch(lists, args.rounds, args.device)
    heads = ['parameters', 'level', 'library', "torch's AdamW, ms", 'ours to it']
    lines += ["## FusedAdamW beside torch's faster AdamW", *table(heads, rows)]
    publish(args, 'step', 'The optimizer step', lines)


if __name__ == '__main__':
    main()
