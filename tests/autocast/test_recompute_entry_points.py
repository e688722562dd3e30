"""Every way into torch's checkpointing: the recomputation sees the types of the forward pass, and brings the same gradients."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import pickle
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from command_line import python
from mmengine.runner import turn_on_activation_checkpointing
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils import checkpoint as module
from torch.utils.checkpoint import (
    CheckpointFunction,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from amp_wrapper import AmpOptimWrapper, amp, torch_internals
from amp_wrapper.autocast import regions, state
from amp_wrapper.autocast.patching import patches
from amp_wrapper.policy import LEVELS

AUTOCAST = ('O1', 'O4')
kept = functools.partial(checkpoint, use_reentrant=False)
selective = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])


@pytest.fixture(autouse=True)
def _debug_logs_are_not_formatted(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``debug=True`` logs is no text; pytest would format it as one."""
    monkeypatch.setattr(logging.getLogger('LoggingTensor'), 'disabled', True)


class Block(nn.Module):
    """Writes down the types that it sees: of an op of the tables, of members of the registry, and of its results."""

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
        wide, normed = seen(hidden.softmax(-1)), seen(F.local_response_norm(hidden[None], 2)[0])
        loss = seen(F.mse_loss(hidden, hidden.detach()))
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


def _none(block: nn.Module, x: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        return checkpoint(block, x)


def _contexts() -> tuple[Any, Any]:
    return contextlib.nullcontext(), contextlib.nullcontext()


def _nested(reentrant: bool) -> Callable[..., Tensor]:
    def run(block: nn.Module, x: Tensor) -> Tensor:
        def inner(x: Tensor) -> Tensor:
            return checkpoint(block, x, use_reentrant=reentrant)

        return checkpoint(inner, x, use_reentrant=reentrant)

    return run


def _decorated(**options: Any) -> Callable[..., Tensor]:
    return lambda block, x: checkpoint(**options)(block)(x)


WAYS: dict[str, Callable[..., Tensor]] = {
    'reentrant': lambda block, x: checkpoint(block, x, use_reentrant=True),
    'not reentrant': lambda block, x: checkpoint(block, x, use_reentrant=False),
    'unsaid': _none,
    'kept': kept,
    'by the module': lambda block, x: torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False),
    'by keyword': lambda block, x: checkpoint(function=block, x=x, use_reentrant=False),
    'with keywords': lambda block, x: checkpoint(block, x, factor=1.0, use_reentrant=False),
    'a closure': lambda block, x: checkpoint(lambda y: block(y), x, use_reentrant=False),
    'the method': lambda block, x: checkpoint(block.forward, x, use_reentrant=False),
    'applied': lambda block, x: CheckpointFunction.apply(block, True, x),
    'in a row': lambda block, x: checkpoint_sequential([block, nn.Identity()], 2, x, use_reentrant=False),
    'in a row, reentrant': lambda block, x: checkpoint_sequential([block, nn.Identity()], 2, x, use_reentrant=True),
    'contexts': functools.partial(kept, context_fn=_contexts),
    'selective': functools.partial(kept, context_fn=selective),
    'debug': functools.partial(kept, debug=True),
    'unchecked': functools.partial(kept, determinism_check='none'),
    'nested': _nested(False),
    'nested, reentrant': _nested(True),
}
if 'early_stop' in inspect.signature(checkpoint).parameters:
    WAYS['to the end'] = functools.partial(kept, early_stop=False)
if torch_internals.checkpointed_function() is not None:
    WAYS['a decorator'] = _decorated(use_reentrant=False)
    WAYS['a decorator, reentrant'] = _decorated(use_reentrant=True)
    WAYS['a decorator, contexts'] = _decorated(use_reentrant=False, context_fn=_contexts)
    WAYS['a decorator, selective'] = _decorated(use_reentrant=False, context_fn=selective)
    WAYS['a decorator, debug'] = _decorated(use_reentrant=False, debug=True)


def _wrap(impl: CheckpointImpl, **options: Any) -> Callable[[Net], None]:
    def change(model: Net) -> None:
        wrapper = functools.partial(checkpoint_wrapper, checkpoint_impl=impl, **options)
        apply_activation_checkpointing(model, wrapper, lambda part: isinstance(part, Block))

    return change


def _by_mmengine(model: Net) -> None:
    turn_on_activation_checkpointing(model, [f'blocks.{i}' for i in range(3)])


# a way to change the model instead, before or after it is cast
CHANGES: dict[str, Callable[[Net], None]] = {
    'wrapper': _wrap(CheckpointImpl.NO_REENTRANT),
    'wrapper, reentrant': _wrap(CheckpointImpl.REENTRANT),
    'wrapper, selective': _wrap(CheckpointImpl.NO_REENTRANT, context_fn=selective),
    'mmengine': _by_mmengine,
}


def _gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def _compared(make: Callable[[bool], tuple[Net, Callable[[Tensor], None]]], device: torch.device) -> None:
    """Train one step without and one with checkpointing.

    Args:
        make: Gets whether to checkpoint; returns a model, and what runs its forward and its backward pass.
        device: Where.
    """
    found = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        model, train = make(checkpointed)
        torch.manual_seed(1)
        train(torch.randn(3, 4, device=device))
        found.append((model.runs(), _gradients(model)))
    (once, expected), (twice, got) = found
    for first, again in zip(once, twice):
        assert len(first) == 1
        assert len(again) >= 2
        # the sine at the end needs all that is written down
        assert all(run == first[0] for run in again)
    assert len(expected) == len(got) == 8
    assert all(torch.equal(a, b) for a, b in zip(expected, got))
    assert regions.count() == 0
    assert not state.is_resumed()
    assert not patches.in_place


@pytest.mark.parametrize('scaled', [True, False], ids=['scaled', 'bare'])
@pytest.mark.parametrize('way', WAYS)
@pytest.mark.parametrize('level', AUTOCAST)
def test_every_way_in_a_script(level: str, way: str, scaled: bool, device: torch.device) -> None:
    def make(checkpointed: bool) -> tuple[Net, Callable[[Tensor], None]]:
        model = Net(WAYS[way] if checkpointed else plain).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=1.0, verbosity=0)

        def train(x: Tensor) -> None:
            loss = model(x).sum()
            if not scaled:
                loss.backward()
                return
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()

        return model, train

    # the determinism of a recomputation to its end is compared as well
    with set_checkpoint_early_stop(way != 'not reentrant'):
        _compared(make, device)


@pytest.mark.parametrize('late', [True, False], ids=['after', 'before'])
@pytest.mark.parametrize('change', CHANGES)
@pytest.mark.parametrize('level', AUTOCAST)
def test_every_wrapper_in_a_script(level: str, change: str, late: bool, device: torch.device) -> None:
    def make(checkpointed: bool) -> tuple[Net, Callable[[Tensor], None]]:
        model = Net(plain).to(device)
        if checkpointed and not late:
            CHANGES[change](model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=1.0, verbosity=0)
        if checkpointed and late:
            CHANGES[change](model)
        return model, lambda x: model(x).sum().backward()

    _compared(make, device)


@pytest.mark.parametrize('way', ['reentrant', 'not reentrant', 'selective', 'debug', 'nested'])
@pytest.mark.parametrize('level', LEVELS)
def test_every_level_of_the_wrapper(level: str, way: str, device: torch.device) -> None:
    """The backward pass is the script's own, and none that the wrapper knows of."""

    def make(checkpointed: bool) -> tuple[Net, Callable[[Tensor], None]]:
        model = Net(WAYS[way] if checkpointed else plain).to(device)
        wrapper = AmpOptimWrapper(
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1), opt_level=level, loss_scale=1.0
        )
        wrapper.initialize_count_status(model, 0, 10)

        def train(x: Tensor) -> None:
            with wrapper.optim_context(model):
                loss = model(x).float().sum()
            loss.backward()

        return model, train

    _compared(make, device)


@pytest.mark.parametrize('way', ['reentrant', 'not reentrant', 'selective'])
def test_in_threads(way: str, device: torch.device) -> None:
    """Two models of two levels on two threads, each with a backward pass on a third."""
    if way == 'selective' and torch_internals.VERSION < (2, 11):
        pytest.skip('before torch 2.11, torch.compile compiles nothing more after this, without this package too')
    models = {level: Net(WAYS[way]).to(device) for level in AUTOCAST}
    for level, model in models.items():
        amp.initialize(model, opt_level=level, verbosity=0)
    start, failed = threading.Barrier(2), []

    def train(model: Net) -> None:
        try:
            for _ in range(5):
                start.wait()
                loss = model(torch.randn(3, 4, device=device)).sum()
                backward = threading.Thread(target=loss.backward)
                backward.start()
                backward.join()
        except BaseException as error:
            start.abort()
            failed.append(error)

    threads = [threading.Thread(target=train, args=(model,)) for model in models.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    for level, half in zip(AUTOCAST, (torch.float16, torch.bfloat16)):
        for runs in models[level].runs():
            assert len(runs) == 10
            assert all(run[1:] == [half, *[torch.float32] * 3] for run in runs)


def test_casts_that_the_contexts_of_a_script_suspend(device: torch.device) -> None:
    """What a ``context_fn`` opens counts, and is not opened twice."""
    model = Net(functools.partial(kept, context_fn=lambda: (amp.disable_casts(), amp.disable_casts()))).to(device)
    amp.initialize(model, opt_level='O1', verbosity=0)
    model.blocks[0].linear.register_forward_pre_hook(lambda part, args: (args[0].float(),))
    model(torch.randn(3, 4, device=device)).sum().backward()
    for first, again in model.runs():
        assert first == again
        assert first[1] is torch.float32


def test_a_decorated_function_outside_of_any_model(device: torch.device) -> None:
    """Suspended in one of the two runs only."""
    alive = amp.initialize(nn.Linear(1, 1).to(device), opt_level='O1', verbosity=0)
    seen: list[torch.dtype] = []

    @amp.half_function
    def product(x: Tensor) -> Tensor:
        seen.append(x.dtype)
        return x @ x

    x = torch.randn(3, 3, device=device, requires_grad=True)
    with amp.disable_casts():
        loss = kept(product, x).float().sum()
    loss.backward()
    assert seen == [torch.float32] * 2
    loss = kept(product, x).float().sum()
    with amp.disable_casts():
        loss.backward()
    assert seen[2:] == [torch.float16] * 2
    assert alive is not None


def test_a_part_that_is_called_alone_in_a_backward_pass_without_casts(device: torch.device) -> None:
    """Nothing was open around the segment: the part opens its own casts, both times."""
    model = Net(plain).to(device)
    amp.initialize(model, opt_level='O4', verbosity=0)
    loss = kept(model.blocks[0], torch.randn(3, 4, device=device, requires_grad=True)).sum()
    with amp.disable_casts():
        loss.backward()
    first, again = model.runs()[0]
    assert first == again
    assert first[1] is torch.bfloat16


BEFORE = """
import functools
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts
kept = functools.partial(checkpoint, use_reentrant=False)
import torch
ways = [kept, functools.partial(checkpoint, use_reentrant=True), functools.partial(kept, debug=True)]
ways.append(functools.partial(kept, context_fn=lambda: create_selective_checkpoint_contexts([torch.ops.aten.mul.Tensor])))
seen = []
def segment(x):
    seen.append(x.exp().dtype)
    return x.exp() * 2
try:
    decorated = checkpoint(use_reentrant=False)(segment)
except TypeError:
    pass
else:
    ways.append(lambda function, x: decorated(x))

from amp_wrapper import amp

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
    def forward(self, x):
        x = self.linear(x)
        for way in ways:
            x = way(segment, x).to(torch.bfloat16)
        return x

model = amp.initialize(Net(), opt_level='O4', verbosity=0)
model(torch.ones(1, 2)).sum().backward()
assert len(seen) == 2 * len(ways), seen
assert set(seen) == {torch.float32}, seen
"""


def test_names_and_decorated_functions_from_before_the_import() -> None:
    done = python('-c', BEFORE)
    assert done.returncode == 0, done.stderr


def test_the_function_stays_what_it_was() -> None:
    assert pickle.loads(pickle.dumps(checkpoint)) is checkpoint is module.checkpoint
    parameters = inspect.signature(checkpoint).parameters
    assert {'function', 'args', 'use_reentrant', 'context_fn', 'determinism_check', 'debug', 'kwargs'} <= set(
        parameters
    )
    assert '_amp_wrapper_run' not in parameters
    assert inspect.unwrap(checkpoint).__code__.co_name == 'checkpoint'


@pytest.mark.parametrize('reentrant', [True, False])
def test_errors_are_those_of_torch(reentrant: bool) -> None:
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(TypeError):
        checkpoint(5, x, use_reentrant=reentrant)
    if reentrant:
        with pytest.raises(ValueError, match='Unexpected keyword'):
            checkpoint(torch.exp, x, use_reentrant=True, other=1)
        with pytest.raises(ValueError, match='use_reentrant=False'):
            checkpoint(torch.exp, x, use_reentrant=True, context_fn=_contexts)
    else:
        with pytest.raises(ValueError, match='determinism_check'):
            checkpoint(torch.exp, x, use_reentrant=False, determinism_check='always')
