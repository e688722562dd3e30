"""What the casts cost on the host: ``python -m benchmarks.hooks [--write]``.

A cast module that finds nothing to cast, torch's own price for having a hook, whole forward passes of many small modules
with and without the package, and the FP32 registry: beginning and ending a region, and a member inside and outside of one.
One run, one thread, medians.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from amp_wrapper import amp
from amp_wrapper.casting import cast_module, functions, region, rule
from amp_wrapper.engine import Engine, attach, forward_context
from amp_wrapper.policy import resolve

from .pages import add_write, processor


def microseconds(function: Callable[[], Any], calls: int = 2000, rounds: int = 15) -> float:
    """Median over rounds of the mean time of a call: the thread's own, so that a busy machine disturbs less."""
    times = []
    for _ in range(rounds):
        start = time.thread_time()
        for _ in range(calls):
            function()
        times.append((time.thread_time() - start) / calls * 1e6)
    return statistics.median(times)


class Nothing(nn.Module):
    """A module that does nothing, so that only the machinery around it is timed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def ignore(module: nn.Module, args: Any, kwargs: Any) -> None:
    """The cheapest hook there can be."""


def layers(width: int = 8, depth: int = 100) -> nn.Sequential:
    """Many small modules: the host is what limits them."""
    blocks = [nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.ReLU()) for _ in range(depth)]
    return nn.Sequential(*blocks)


class Fp32Norm(nn.LayerNorm):
    """Casts as autocast does on a GPU, and O1 and O4 everywhere: on a CPU autocast leaves the norm in 16-bit."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.float())


def compare(ways: dict[str, Callable[[], Any]], calls: int = 5, rounds: int = 25) -> dict[str, float]:
    """Median microseconds of the thread's own time, in rounds that take turns: a busy machine slows all of them alike."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        way()
    for _ in range(rounds):
        for name, way in ways.items():
            start = time.thread_time()
            for _ in range(calls):
                way()
            times[name].append((time.thread_time() - start) / calls * 1e6)
    return {name: statistics.median(found) for name, found in times.items()}


def forwards() -> list[tuple[str, float, str]]:
    """Rows of a forward of many small modules under casts of ops, beside torch.autocast."""
    x = torch.ones(4, 8)

    def under(model: nn.Module, context: Callable[[], Any]) -> Callable[[], Any]:
        def call() -> None:
            with context():
                model(x)

        return call

    def autocast() -> Any:
        return torch.autocast('cpu', dtype=torch.bfloat16)

    norms = layers()
    for block in norms:
        block[1] = Fp32Norm(8)
    wrapped = layers()
    engine = Engine(resolve('O4'), None)
    attach(engine, wrapped)
    peers = {'torch.autocast': under(layers(), autocast)}
    # first, as in a process that knows the wrapper alone
    wrapper = compare({**peers, "O4, mmengine's wrapper": under(wrapped, lambda: forward_context(engine, wrapped))})
    functional = amp.initialize(layers(), opt_level='O4', verbosity=0)
    loud = amp.initialize(layers(), opt_level='O4', verbosity=0)
    for module in loud.modules():
        # a second hook, so that torch goes the slower way through every module
        module.register_forward_pre_hook(ignore, with_kwargs=True)
    rows = [(f'300 modules, {name}', value, '') for name, value in wrapper.items()]
    rows[1] = (*rows[1][:2], f'{rows[1][1] / rows[0][1]:.2f} of torch.autocast')
    found = compare(
        {
            **peers,
            'torch.autocast, norms in FP32': under(norms, autocast),
            'O4, functional': lambda: functional(x),
            'O4, functional, with a hook of somebody else on each module': lambda: loud(x),
        }
    )
    base, same = found['torch.autocast'], found['torch.autocast, norms in FP32']
    for name, value in found.items():
        share = f'{value / base:.2f} of torch.autocast, {value / same:.2f} of it with norms in FP32'
        rows.append((f'300 modules, {name}', value, share if name.startswith('O4') else ''))
    return rows


def measure() -> list[tuple[str, float, str]]:
    """Rows of (what, microseconds, note)."""
    torch.set_num_threads(1)
    half = torch.ones(4, dtype=torch.bfloat16)
    bare, empty, ours = Nothing(), Nothing(), Nothing()
    empty.register_forward_pre_hook(ignore, with_kwargs=True)
    cast_module.put(ours, rule.Rule(inputs=torch.bfloat16))
    rows = [
        ('module call', microseconds(lambda: bare(half)), ''),
        ('module call with a hook that does nothing', microseconds(lambda: empty(half)), "torch's own price of a hook"),
        ('call of a cast module, nothing to cast', microseconds(lambda: ours(half)), ''),
    ]
    x = torch.ones(4, 8)
    plain = layers()
    rows.append(('300 modules, FP32, no package', microseconds(lambda: plain(x), 20), ''))
    for level in ('O0', 'O4', 'O5'):
        model = layers()
        attach(Engine(resolve(level), None), model)
        label = '300 modules, O4, no autocast around it' if level == 'O4' else f'300 modules, {level}'
        rows.append((label, microseconds(lambda model=model: model(x), 20), ''))
    half_model = layers().bfloat16()
    wide = x.bfloat16()
    rows.append(('300 modules, bfloat16, no package', microseconds(lambda: half_model(wide), 20), ''))

    functions.install()

    def whole_region() -> None:
        with region.spare(region.OPERANDS), region.operands(region.OPERANDS):
            pass

    whole_region()
    loss = torch.nn.functional.mse_loss
    rows.append(('begin and end a region', microseconds(whole_region), 'once a forward pass; target: below 5'))
    rows.append(('mse_loss in FP32, no region open', microseconds(lambda: loss(x, x)), 'nothing of ours is called'))
    rows.append(('relu', microseconds(lambda: torch.relu(x)), ''))
    with region.spare(region.OPERANDS), region.operands(region.OPERANDS):
        rows.append(('mse_loss in FP32 in a region', microseconds(lambda: loss(x, x)), 'a member'))
        rows.append(('mse_loss of bfloat16 in a region', microseconds(lambda: loss(wide, wide)), 'with casts'))
        rows.append(('relu in a region', microseconds(lambda: torch.relu(x)), 'no member: not touched'))
    return rows + forwards()


def table(rows: list[tuple[str, float, str]]) -> str:
    """Markdown, with where and when."""
    lines = [
        '# Cost of the casts on the host',
        '',
        f'{datetime.date.today()}, {processor()}, Python {platform.python_version()}, torch {torch.__version__}, '
        f'one thread; thread time; medians of 15 rounds in one run of `python -m benchmarks.hooks`. '
        'The last six rows: medians of 25 rounds in which they take turns.',
        '',
        '| what | microseconds | |',
        '| --- | --- | --- |',
    ]
    lines += [f'| {what} | {value:.2f} | {note} |' for what, value, note in rows]
    return '\n'.join(lines) + '\n'


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_write(parser, 'hooks_cpu.md')
    args = parser.parse_args()
    text = table(measure())
    print(text)
    if args.write is not None:
        args.write.write_text(text)


if __name__ == '__main__':
    main()
