"""Which calls of ``amp.initialize`` count: those whose optimizer somebody holds, whatever else is left of the others."""

from __future__ import annotations

import contextlib
import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bits import same
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.checkpoint import checkpoint
from toy_amp import (
    logged,
    scales,
    set_scales,
    unskipped,
)

from amp_wrapper import FusedAdamW, amp
from amp_wrapper.amp import session
from amp_wrapper.errors import AmpAttachError, AmpUsageError
from amp_wrapper.policy import LEVELS, resolve


class Deep(nn.Module):
    """Its graph holds the model: the segment is run again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.bn, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(lambda z: self.bn(self.first(z)).relu(), x, use_reentrant=False)
        return self.last(y)


def make(device: torch.device, level: str, how: type[Optimizer] = SGD, **options: Any) -> tuple[Deep, Optimizer]:
    model = Deep().to(device)
    return amp.initialize(model, how(model.parameters(), lr=0.125), opt_level=level, **{'verbosity': 0, **options})


def train(model: nn.Module, optimizer: Optimizer, device: torch.device) -> dict[str, Any]:
    """One step; everything that a script may keep of it."""
    output = model(torch.ones(3, 4, device=device))
    loss = output.float().square().mean()
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward(retain_graph=True)
    optimizer.step()
    optimizer.zero_grad()
    return {'output': output, 'loss': loss, 'scaled loss': scaled, 'node': loss.grad_fn, 'model': model}


def scale_list(**options: Any) -> list[float]:
    return [entry['loss_scale'] for entry in amp.state_dict(**options).values()]


@pytest.mark.parametrize('how', [SGD, FusedAdamW], ids=lambda how: how.__name__)
@pytest.mark.parametrize('level', LEVELS)
def test_what_is_left_of_a_training_does_not_count(level: str, how: type[Optimizer], device: torch.device) -> None:
    """The cell of a notebook that is run again: ``model, optimizer`` are new, and losses of the first run are still there."""
    for losses in (1, 2):
        for what in ('output', 'loss', 'scaled loss', 'node', 'model', 'everything'):
            model, optimizer = make(device, level, how, num_losses=losses, loss_scale=2.0**5)
            kept: Any = train(model, optimizer, device)
            if what != 'everything':
                kept = kept[what]
            old = weakref.ref(optimizer)
            model, optimizer = make(device, level, how, loss_scale=2.0**3)
            assert scale_list() == [2.0**3], (losses, what)
            amp.load_state_dict({'loss_scaler0': {'loss_scale': 2.0**3, 'unskipped': 0}})
            assert old() is None and scales(optimizer) == [2.0**3], (losses, what)
            del kept, model, optimizer
            gc.collect()


def in_block(model: nn.Module, optimizer: Optimizer) -> None:
    with amp.scale_loss(model(torch.ones(3, 4)).float().sum(), optimizer) as scaled:
        scaled.backward()
        raise ValueError


def in_backward(model: nn.Module, optimizer: Optimizer) -> None:
    loss = model(torch.ones(3, 4)).float().sum()
    loss.register_hook(lambda gradient: 1 / 0)
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()


def in_forward(model: nn.Module, optimizer: Optimizer) -> None:
    model(torch.ones(3, 5))


@pytest.mark.parametrize('fails', [in_block, in_backward, in_forward])
@pytest.mark.parametrize('level', LEVELS)
def test_an_error_that_was_handled_holds_nothing(
    level: str, fails: Callable[[nn.Module, Optimizer], None], device: torch.device
) -> None:
    pair = make(torch.device('cpu'), level, loss_scale=2.0**5)
    old = weakref.ref(pair[1])
    with contextlib.suppress(ValueError, ZeroDivisionError, RuntimeError):
        fails(*pair)
    pair = make(torch.device('cpu'), level, loss_scale=2.0**3)
    assert scale_list() == [2.0**3] and old() is None


def test_an_optimizer_that_somebody_holds_counts(device: torch.device) -> None:
    """The history of a notebook, or the traceback of its last error: the script says which optimizer it means."""
    history: list[Any] = [make(device, 'O2', loss_scale=2.0**5)]
    try:
        with amp.scale_loss(torch.ones(()), history[0][1], loss_id=3):
            pass
    except AmpUsageError as error:
        history.append(error.__traceback__)  # as sys.last_traceback has it
    del history[0]
    model, optimizer = make(device, 'O2', loss_scale='dynamic', verbosity=1)
    set_scales(optimizer, 2.0**3)
    # its frames hold it
    assert scale_list() == [2.0**5, 2.0**3]
    assert scale_list(optimizers=optimizer) == scale_list(optimizers=[optimizer]) == [2.0**3]
    saved = {'loss_scaler0': {'loss_scale': 2.0**4, 'unskipped': 7}}
    with logged() as lines:
        amp.load_state_dict(saved, optimizers=optimizer)
    assert scales(optimizer) == [2.0**4] and lines == []
    with logged() as lines:
        amp.load_state_dict(saved)
    assert scales(optimizer) == [2.0**4] and any('of 2 calls of amp.initialize()' in line for line in lines)
    with pytest.raises(AmpUsageError, match='was not initialised'):
        amp.state_dict(optimizers=SGD(model.parameters(), lr=0.1))
    history.clear()
    assert scale_list() == [2.0**4]


@pytest.mark.parametrize('losses', [1, 2])
@pytest.mark.parametrize(('level', 'to'), list(itertools.product(LEVELS, LEVELS)))
def test_trained_beside_its_restored_copy(level: str, to: str, losses: int, device: torch.device) -> None:
    """A script like apex's own test of checkpoints: for all pairs of levels, models are made, trained and restored one after
    the other under the same names, outputs and losses live on, and both trainings go on side by side."""
    outputs: list[Tensor] = []

    def epoch(model: nn.Module, optimizer: Optimizer, index: int) -> Tensor:
        optimizer.zero_grad()
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(index)).to(device)
        output: Tensor = model(x)
        for loss_id in range(losses):
            with amp.scale_loss(output.float().mean() * (loss_id + 1), optimizer, loss_id=loss_id) as scaled:
                scaled.backward(retain_graph=loss_id + 1 < losses)
            outputs.append(scaled)
        optimizer.step()
        outputs.append(output)
        return output

    for first in (True, False):
        torch.manual_seed(3)
        restored = restored_optimizer = None
        model, optimizer = make(device, level, num_losses=losses)
        for index in range(2):
            epoch(model, optimizer, index)
        state = {'model': model.state_dict(), 'optimizer': optimizer.state_dict(), 'amp': amp.state_dict()}
        # those of the rounds before are gone, though all their outputs are there
        assert list(state['amp']) == [f'loss_scaler{index}' for index in range(losses)]
        assert [entry['loss_scale'] for entry in state['amp'].values()] == scales(optimizer)
        assert [entry['unskipped'] for entry in state['amp'].values()] == unskipped(optimizer)
        restored = Deep().to(device)
        restored_optimizer = SGD(restored.parameters(), lr=0.125)
        if first:
            amp.initialize(restored, restored_optimizer, opt_level=to, num_losses=losses, verbosity=0)
        restored.load_state_dict(state['model'])
        restored_optimizer.load_state_dict(state['optimizer'])
        if not first:
            amp.initialize(restored, restored_optimizer, opt_level=to, num_losses=losses, verbosity=0)
        # apex could not do this in the same script
        amp.load_state_dict(state['amp'], optimizers=restored_optimizer)
        assert amp.state_dict(optimizers=optimizer) == state['amp']
        if resolve(level).loss_scale == resolve(to).loss_scale:
            assert amp.state_dict(optimizers=restored_optimizer) == state['amp']
        assert len(amp.state_dict()) == 2 * losses
        for index in range(2, 4):
            here, there = epoch(model, optimizer, index), epoch(restored, restored_optimizer, index)
            if level == to:
                assert torch.equal(here, there)
                assert same(dict(model.state_dict()), dict(restored.state_dict()))
        del model, optimizer, restored, restored_optimizer


def initialised(model: nn.Module) -> Optimizer:
    optimizer = SGD(model.parameters(), lr=0.125)
    amp.initialize(model, optimizer, opt_level='O0', verbosity=0)
    return optimizer


def wrapped(model: nn.Module) -> Any:
    from amp_wrapper import AmpOptimWrapper

    wrapper = AmpOptimWrapper(opt_level='O0', optimizer=SGD(model.parameters(), lr=0.125))
    wrapper.attach(model)
    return wrapper


def plain(model: nn.Module, x: Tensor) -> None:
    optimizer = SGD(model.parameters(), lr=0.125)
    optimizer.zero_grad()
    model(x.float()).square().mean().backward()
    optimizer.step()


def step(how: Any, model: nn.Module, x: Tensor) -> None:
    # float16 data becomes FP32 for the second as it did for the first
    how.zero_grad()
    if not isinstance(how, Optimizer):
        with how.optim_context(model):
            loss = model(x).square().mean()
        how.update_params(loss)
        return
    with amp.scale_loss(model(x).square().mean(), how) as scaled:
        scaled.backward()
    how.step()


@pytest.mark.parametrize('ways', list(itertools.product((initialised, wrapped), repeat=2)))
def test_one_after_the_other_over_one_model_at_o0(ways: tuple[Any, Any], device: torch.device) -> None:
    """Nothing is cast there: the model is as it was, and trains the bits of plain FP32."""
    torch.manual_seed(1)
    model = Deep().to(device)
    alone = Deep().to(device)
    alone.load_state_dict(model.state_dict())
    x = torch.randn(8, 4, device=device).half()
    hooks = None
    for way in (*ways, *ways):
        step(way(model), model, x)
        plain(alone, x)
        assert same(dict(model.state_dict()), dict(alone.state_dict()))
        found = sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())
        if ways[0] is ways[1]:
            # runs of a cell do not pile them up
            assert hooks in (None, found)
            hooks = found


@pytest.mark.parametrize('second', LEVELS)
@pytest.mark.parametrize('first', LEVELS)
def test_what_casts_no_weights_makes_way(first: str, second: str, device: torch.device) -> None:
    """A run at O0 to compare with, and then one at another level; casts of weights are protected."""
    model = Deep().to(device)
    optimizer = SGD(model.parameters(), lr=0.125)
    amp.initialize(model, optimizer, opt_level=first, verbosity=0)
    del optimizer
    optimizer = SGD(model.parameters(), lr=0.125)
    if resolve(first).casts_model:
        with pytest.raises(AmpAttachError, match='already'):
            amp.initialize(model, optimizer, opt_level=second, verbosity=0)
        return
    amp.initialize(model, optimizer, opt_level=second, verbosity=0)
    fresh = Deep().to(device)
    fresh.load_state_dict(model.state_dict())
    amp.initialize(fresh, SGD(fresh.parameters(), lr=0.125), opt_level=second, verbosity=0)
    assert [p.dtype for p in model.parameters()] == [p.dtype for p in fresh.parameters()]
    x = torch.randn(8, 4, device=device)
    assert torch.equal(model(x), fresh(x))
    assert model(x).dtype is fresh(x).dtype


def test_the_registry_forgets(device: torch.device) -> None:
    kept = [train(*make(device, 'O2'), device) for _ in range(3)]
    gc.collect()
    assert len(session._alive()) == 0 and len(kept) == 3
