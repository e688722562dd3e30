"""Checkpointed segments run again as they ran: by every way into torch's checkpointing, with the same types and gradients."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from bits import same_bits
from forwards import DOORS, prepared
from mmengine.runner import turn_on_activation_checkpointing
from pairs import pairs
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrapping
from torch.utils.checkpoint import (
    CheckpointFunction,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from amp_wrapper import amp

F32 = torch.float32
# made at import, as transformers does: it holds torch's own function
kept = functools.partial(checkpoint, use_reentrant=False)
selective = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])


class Block(nn.Module):
    """Writes down the types that it sees: of an op of the tables, of members of the registry, of unlike operands."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        # one list for each run, which may be cut short
        self.runs: list[list[torch.dtype]] = []

    def forward(self, x: Tensor, factor: float = 1.0) -> Tensor:
        run: list[torch.dtype] = []
        self.runs.append(run)

        def seen(tensor: Tensor) -> Tensor:
            run.append(tensor.dtype)
            return tensor

        hidden = seen(F.dropout(self.linear(seen(x)), 0.3) * factor)
        hidden = seen(hidden @ torch.eye(4))
        wide, normed = seen(hidden.softmax(-1)), seen(F.local_response_norm(hidden[None], 2)[0])
        loss = seen(F.mse_loss(hidden, hidden.detach()))
        # the sine at the end needs all that is written down
        return (wide + normed + loss).sin()


class Net(nn.Module):
    """Runs three blocks by a function that is handed a block and what it is called with."""

    def __init__(self, run: Callable[..., Tensor]) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Linear(4, 4), nn.Sequential(Block(), Block(), Block())
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = self.run(block, x)
        return x

    def runs(self) -> list[list[list[torch.dtype]]]:
        """Of each block, in order."""
        return [part.runs for part in self.modules() if isinstance(part, Block)]


def plain(block: nn.Module, x: Tensor) -> Tensor:
    return block(x)


OPTIONS: dict[str, dict[str, Any]] = {
    'not reentrant': {'use_reentrant': False},
    'reentrant': {'use_reentrant': True},
    'selective': {'use_reentrant': False, 'context_fn': selective},
}
if 'early_stop' in inspect.signature(checkpoint).parameters:
    OPTIONS['to the end'] = {'use_reentrant': False, 'early_stop': False}
WAYS: dict[str, Callable[..., Tensor]] = {
    **{name: functools.partial(checkpoint, **options) for name, options in OPTIONS.items()},
    'unsaid': lambda block, x: checkpoint(block, x),
    'by the module': lambda block, x: torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False),
    'with keywords': lambda block, x: kept(block, x, factor=1.0),
    'applied': lambda block, x: CheckpointFunction.apply(block, True, x),
    'in a row, reentrant': lambda block, x: checkpoint_sequential([block, nn.Identity()], 2, x, use_reentrant=True),
    'nested': lambda block, x: kept(lambda y: kept(block, y), x),
}
with contextlib.suppress(TypeError):
    checkpoint(use_reentrant=False)(torch.sin)
    WAYS['a decorator'] = lambda block, x: checkpoint(use_reentrant=False)(block)(x)


def _wrap(impl: wrapping.CheckpointImpl, **options: Any) -> Callable[[Net], None]:
    wrapper = functools.partial(wrapping.checkpoint_wrapper, checkpoint_impl=impl, **options)
    return lambda model: wrapping.apply_activation_checkpointing(model, wrapper, lambda part: isinstance(part, Block))


#: A way to change the model instead, before or after it is cast.
CHANGES: dict[str, Callable[[Net], None]] = {
    'wrapper': _wrap(wrapping.CheckpointImpl.NO_REENTRANT),
    'wrapper, reentrant': _wrap(wrapping.CheckpointImpl.REENTRANT),
    'mmengine': lambda model: turn_on_activation_checkpointing(model, [f'blocks.{i}' for i in range(3)]),
}


def on_another_thread(loss: Tensor) -> None:
    """As on a GPU, where autograd has threads of its own."""
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()


def without_casts(loss: Tensor) -> None:
    with amp.disable_casts():
        loss.backward()


def trained(
    run: Callable[..., Tensor],
    level: str,
    backward: Callable[[Tensor], None] = Tensor.backward,
    door: str = 'amp',
    before: Callable[[Net], None] = Net.train,
    after: Callable[[Net], None] = Net.train,
) -> tuple[Any, list[Tensor]]:
    """The types of all runs, and the gradients of the weights as they come, in one training step.

    Args:
        before: Called with the model before it is cast.
        after: Called with the model after it is cast.
    """
    torch.manual_seed(0)
    model = Net(run)
    before(model)
    call = prepared(model, level, door)
    after(model)
    gradients: list[Tensor] = []
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradients.append(gradient.clone()))
    torch.manual_seed(1)
    backward(call(torch.randn(3, 4)).float().sum())
    return model.runs(), gradients


@functools.cache
def once(level: str, backward: Any = Tensor.backward, door: str = 'amp') -> tuple[Any, list[Tensor]]:
    """Without checkpointing."""
    return trained(plain, level, backward, door)


def check_alike(expected: Any, found: Any) -> None:
    """What was checkpointed saw the same types again, and has the same gradients."""
    for first, again in zip(expected[0], found[0], strict=True):
        assert len(first) == 1 and len(again) >= 2
        assert all(run == first[0] for run in again)
    assert len(expected[1]) == 8 and all(same_bits(a, b) for a, b in zip(expected[1], found[1], strict=True))
    assert not torch.is_autocast_enabled('cpu')


@pytest.mark.filterwarnings('ignore:torch.utils.checkpoint')
@pytest.mark.parametrize('way', WAYS)
def test_every_way(way: str) -> None:
    for level, backward in (('O1', Tensor.backward), ('O4', on_another_thread), ('O1', without_casts)):
        # a recomputation to its end is compared as well
        with set_checkpoint_early_stop(way != 'not reentrant'):
            check_alike(once(level, backward), trained(WAYS[way], level, backward))


@pytest.mark.filterwarnings('ignore:torch.utils.checkpoint')
@pytest.mark.parametrize('change', CHANGES)
def test_every_wrapper(change: str) -> None:
    check_alike(once('O1'), trained(plain, 'O1', before=CHANGES[change]))
    check_alike(once('O4'), trained(plain, 'O4', after=CHANGES[change]))


@pairs(level=['O0', 'O1', 'O2', 'O5'], way=['reentrant', 'not reentrant', 'selective'], door=DOORS)
def test_every_level(level: str, way: str, door: str) -> None:
    check_alike(once(level, door=door), trained(WAYS[way], level, door=door))


@pytest.mark.parametrize('way', ['reentrant', 'not reentrant'])
def test_where_casts_are_off(way: str) -> None:
    for around in (amp.disable_casts, functools.partial(torch.autocast, 'cpu', enabled=False)):

        def within(block: nn.Module, x: Tensor, run: Callable[..., Tensor], around: Any = around) -> Tensor:
            with around():
                return run(block, x.float())

        first, second = (trained(functools.partial(within, run=run), 'O1') for run in (plain, WAYS[way]))
        check_alike(first, second)
        assert set(first[0][0][0]) == {F32}


def test_gradient_that_is_taken_before_the_loss() -> None:
    model = amp.initialize(Net(kept), opt_level='O1', verbosity=0)
    x = torch.randn(2, 4, requires_grad=True)
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    slope.square().sum().backward()
    assert all(run == runs[0] for runs in model.runs() for run in runs)
    assert model.blocks[0].linear.weight.grad is not None


@pytest.mark.parametrize('way', ['reentrant', 'not reentrant'])
def test_part_that_is_called_alone_opens_its_casts_both_times(way: str) -> None:
    model = amp.initialize(Net(plain), opt_level='O4', verbosity=0)
    without_casts(WAYS[way](model.blocks[0], torch.randn(3, 4, requires_grad=True)).sum())
    first, again = model.runs()[0]
    assert first == again and first[1] is torch.bfloat16
