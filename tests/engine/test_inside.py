"""Whole training steps as ``torch.cuda.graph`` takes them, on a processor without a GPU: captured once, and run again.

A graph shows what the host reads, and which memory has to stay, only on a GPU. So the operations of one step are noted, and
run again on the same memory, for which a few functions inside the package are replaced. No Python of the package runs then: so
whatever a step decides on the host, or reads from it, stays as it was when it was captured, and whatever it allocates has the
same address again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from bits import differing
from op_lists import skip_without_library
from pairs import pairs
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from toy_training import SCALED, Net, Training, batch

from amp_wrapper import FusedAdamW, FusedSGD, ops
from amp_wrapper.engine.flags import Flags, LateRead


def addresses(value: Any) -> list[int]:
    return [tensor.untyped_storage().data_ptr() for tensor in tensors_in(value)]


def tensors_in(*values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def refused(*_: Any) -> Any:
    raise AssertionError('the host reads the device, which no graph can')


class Graph(TorchDispatchMode):
    """The operations of a block, in order."""

    def __init__(self) -> None:
        super().__init__()
        #: With the new tensors that each has made; None for what was there.
        self.calls: list[tuple[Callable[..., Any], Any, Any, list[Tensor | None]]] = []
        self.depth = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            refused()
        return self.note(func, args, kwargs or {})

    def note(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Make a call, and note it, unless another one makes it."""
        self.depth += 1
        try:
            result = function(*args, **kwargs)
        finally:
            self.depth -= 1
        if not self.depth:
            given = addresses((args, kwargs))
            # views, and what was written in place, are there when it runs again
            fresh = [None if place in given else t for t, place in zip(tensors_in(result), addresses(result))]
            self.calls.append((function, args, kwargs, fresh))
        return result

    @torch.no_grad()
    def replay(self) -> None:
        """All of them again, on the same memory. A graph writes to tensors, and does not move their version counters."""
        with ExitStack() as stack:
            for tensor in {id(t): t for _, *values in self.calls for t in tensors_in(values)}.values():
                stack.enter_context(torch.autograd._unsafe_preserve_version_counter(tensor))
            for function, args, kwargs, fresh in self.calls:
                for old, new in zip(fresh, tensors_in(function(*args, **kwargs))):
                    if old is not None:
                        old.copy_(new)


@contextmanager
def captured() -> Iterator[Graph]:
    """Note the operations inside, with what torch.cuda.graph tells the package: that flags have to be lowered in the graph."""

    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: graph.note(function, args, kwargs)

    graph = Graph()
    names = [name for name in ops.__all__ if name.startswith(('multi_tensor', 'fused', 'update'))]
    with (
        mock.patch.multiple(ops, **{name: noted(getattr(ops, name)) for name in names}),
        mock.patch.object(Flags, 'new', lambda self: torch.zeros((), dtype=torch.float32, device=self._device)),
        # on a CPU the numbers are there at once, and nothing shows that they are read
        mock.patch.multiple(LateRead, wait=refused, is_there=property(lambda self: False)),
        graph,
    ):
        yield graph


OPTIMIZERS: dict[str, Any] = {
    'FusedAdamW': lambda p: FusedAdamW(p, lr=0.01),
    'FusedSGD': lambda p: FusedSGD(p, lr=0.01, momentum=0.9),
    'AdamW of torch': lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    'a rate on the device': lambda p: FusedAdamW(p, lr=torch.tensor(0.01)),
}


def play(level: str, door: str, make: Any, clip: float | None, captures: bool) -> dict[str, Tensor]:
    """The state after all batches: the first two steps as they are, the third captured, the others replayed."""
    words: dict[str, Any] = dict(loss_scale=dict(init_scale=256.0, growth_interval=2) if level in SCALED else None)
    if door == 'wrapper':
        words |= dict(skip_nonfinite=True, clip_grad=clip and dict(max_norm=clip))
    torch.manual_seed(0)
    run = Training(level, door, make, Net(), **words)
    x, rate = torch.zeros(8, 4), run.optimizer.param_groups[0]['lr']
    graph: Any = None
    for index in range(9):
        # one overflows in 16-bit, and one has NaN
        x.copy_(batch(index)[0] * {4: 1e30, 6: float('nan')}.get(index, 1.0))
        if isinstance(rate, Tensor):
            # a schedule that writes to where the graph reads
            rate.fill_(0.01 / (1 + index))
        if graph is not None:
            graph.replay()
            continue
        with captured() if captures and index == 2 else torch.enable_grad() as found:
            run.backward(run.forward(x).float().square().mean())
            run.step()
            run.clear()
        graph = found
    return run.bits(buffers=True)


@pairs(level=('O1', 'O2', 'O3', 'O5'), name=OPTIMIZERS, door=('wrapper', 'amp'), clip=(None, 0.05))
def test_replayed_steps_are_those_of_eager_training(level: str, name: str, door: str, clip: float | None) -> None:
    """Bit for bit: dynamic scales, skips, clipping, statistics that are restored, a schedule on the device."""
    if level == 'O3':
        # torch steps no 16-bit weights fused on a CPU
        skip_without_library(torch.device('cpu'))
    eager, replayed = (play(level, door, OPTIMIZERS[name], clip, captures) for captures in (False, True))
    assert differing(eager, replayed) == []
