"""What one process finds out for ``benchmarks.host``: ``python benchmarks/host_probe.py calls|times LEVEL WAY``, as JSON.

Uses public names of the package alone, so that any tree on PYTHONPATH can be measured; :mod:`benchmarks.host` starts it.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

#: Iterations before what is counted or timed: what is gathered once is there, and a dynamic scale stays as it is.
WARM = 5
TENSORS = 200


# -- counting ----------------------------------------------------------------------------------------------------------


class Counts:
    """Calls of functions whose code lies in a folder, and changes of file.

    A call is every frame of Python that is entered: functions, and comprehensions and generators as Python runs them. A change
    of file is a call of another file than the call before it; the first is one. What lies outside of the folder is not seen.

    Args:
        folder: Of a package.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder.rstrip(os.sep) + os.sep
        self._file = ''
        self.calls = 0
        self.changes = 0
        #: File and function to how often it was called.
        self.table: Counter[tuple[str, str]] = Counter()

    def _see(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != 'call' or not code.co_filename.startswith(self._folder):
            return
        self.calls += 1
        self.changes += code.co_filename != self._file
        self._file = code.co_filename
        name = getattr(code, 'co_qualname', code.co_name)
        self.table[code.co_filename.removeprefix(self._folder), name] += 1

    def of(self, function: Callable[[], object]) -> Counts:
        """Count during one call of ``function``."""
        sys.setprofile(self._see)
        try:
            function()
        finally:
            sys.setprofile(None)
        return self


def network(batchnorm: bool) -> tuple[nn.Module, Tensor]:
    """Six parameters with BatchNorm, four without, and what to feed them with."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 4)]
    return nn.Sequential(
        *(layer for layer in layers if batchnorm or not isinstance(layer, nn.BatchNorm1d))
    ), torch.ones(2, 4)


def wrapped(optimizer: torch.optim.Optimizer, level: str, **words: Any) -> Any:
    """mmengine's wrapper of this package, without a word."""
    from mmengine.logging import MMLogger

    from amp_wrapper import AmpOptimWrapper

    MMLogger.get_current_instance().setLevel(logging.ERROR)
    return AmpOptimWrapper(optimizer=optimizer, opt_level=level, **words)


def calls(level: str, way: str) -> dict[str, Any]:
    """Calls and changes of file of one iteration.

    Args:
        level: 'O0' to 'O5'.
        way: 'wrapper', one ``update_params`` with ``FusedAdamW`` and clipping; 'functional', one iteration from forward to
            ``zero_grad`` with ``torch.optim.AdamW``, or 'fused' with ``FusedAdamW``.
    """
    import amp_wrapper
    from amp_wrapper import FusedAdamW, amp

    model, x = network(batchnorm=way == 'wrapper')
    kind = torch.optim.AdamW if way == 'functional' else FusedAdamW
    optimizer = kind(model.parameters(), lr=1e-3)
    if way == 'wrapper':
        wrapper = wrapped(optimizer, level, clip_grad=dict(max_norm=1.0))

        def forward() -> Tensor:
            with wrapper.optim_context(model):
                return model(x).float().square().mean()

        for _ in range(WARM):
            wrapper.update_params(forward())
        loss = forward()
        function: Callable[[], object] = lambda: wrapper.update_params(loss)  # noqa: E731
    else:
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)

        def function() -> None:
            loss = model(x).float().square().mean()
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(WARM):
            function()
    found = Counts(os.path.dirname(amp_wrapper.__file__)).of(function)
    table = [[file, name, count] for (file, name), count in found.table.most_common()]
    return {'calls': found.calls, 'changes': found.changes, 'table': table}


# -- timing ------------------------------------------------------------------------------------------------------------


class Bring(torch.autograd.Function):
    """A loss whose backward pass is short: every weight gets a new gradient from one operation."""

    @staticmethod
    def forward(ctx: Any, *weights: Tensor) -> Tensor:
        """Zero."""
        ctx.weights = weights
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        """The gradients."""
        return tuple(torch._foreach_mul([weight.detach() for weight in ctx.weights], 0.125))


class Tiny(nn.Module):
    """Many parameters of 16 elements."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        for index in range(TENSORS):
            self.register_parameter(f'p{index}', nn.Parameter(torch.randn(4, 4)))

    def forward(self) -> Tensor:
        """The loss."""
        return Bring.apply(*self.parameters())


class Clock:
    """Time of this thread, in all and inside of backward passes."""

    def __init__(self) -> None:
        self._inside = 0.0
        self._backward = torch.autograd.backward

    def _timed(self, *args: Any, **kwargs: Any) -> Any:
        start = time.thread_time()
        try:
            return self._backward(*args, **kwargs)
        finally:
            self._inside += time.thread_time() - start

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Time what :meth:`torch.Tensor.backward` calls."""
        torch.autograd.backward = self._timed
        try:
            yield
        finally:
            torch.autograd.backward = self._backward

    def of(self, function: Callable[[], object]) -> tuple[float, float]:
        """Seconds of one call: without the backward pass, and with it."""
        self._inside = 0.0
        start = time.thread_time()
        function()
        total = time.thread_time() - start
        return total - self._inside, total


def torch_way() -> Callable[[], Callable[[], object]]:
    """torch's: what makes a step, ready to be timed."""
    model = Tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    scaler = torch.amp.GradScaler('cpu', init_scale=8.0)

    def prepared() -> Callable[[], object]:
        loss = model()

        def step() -> None:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

        return step

    return prepared


def our_way(level: str, way: str) -> Callable[[], Callable[[], object]]:
    """The same with this package."""
    from amp_wrapper import FusedAdamW, amp

    model = Tiny()
    optimizer: torch.optim.Optimizer
    if way == 'torch fused':
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    else:
        optimizer = FusedAdamW(model.parameters(), lr=1e-5)
    if way == 'wrapper':
        wrapper = wrapped(optimizer, level)

        def prepared() -> Callable[[], object]:
            with wrapper.optim_context(model):
                loss = model()
            return lambda: wrapper.update_params(loss)

        return prepared
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)

    def prepared_functional() -> Callable[[], object]:
        loss = model()

        def step() -> None:
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    return prepared_functional


def times(level: str, way: str, rounds: int) -> dict[str, Any]:
    """Medians over rounds in which this package and torch take turns; seconds of this thread.

    Args:
        level: 'O0' to 'O5'.
        way: 'functional' with ``FusedAdamW``, 'torch fused', the same with torch's own, or 'wrapper'.
        rounds: How many.
    """
    torch.set_num_threads(1)
    clock, ways = Clock(), {'torch': torch_way(), 'ours': our_way(level, way)}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    with clock.installed():
        for index in range(WARM + rounds):
            if index == WARM:
                # what was imported is not gone through again by each collection
                gc.collect()
                gc.freeze()
            for name in ways if index % 2 else reversed(ways):
                step = ways[name]()
                found[name].append(clock.of(step))
    medians = {
        name: [statistics.median(seconds[which] for seconds in kept[WARM:]) for which in (0, 1)]
        for name, kept in found.items()
    }
    return {'torch': medians['torch'], 'ours': medians['ours']}


if __name__ == '__main__':
    what, level, way = sys.argv[1:4]
    print(json.dumps(calls(level, way) if what == 'calls' else times(level, way, int(sys.argv[4]))))
