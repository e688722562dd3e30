"""Checkpointed segments of models at O1 and O4 run again as they ran, and those of others as they would without us."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from amp_wrapper import amp
from amp_wrapper.autocast import patching, regions, state
from amp_wrapper.autocast.global_autocast import GlobalCasts
from amp_wrapper.autocast.patching import patches
from amp_wrapper.casting.plan import CastPlan
from amp_wrapper.policy import resolve

# made at import, as transformers does: it holds torch's own function
kept = functools.partial(checkpoint, determinism_check='default')


@pytest.fixture(autouse=True)
def everything_runs_again_and_ends() -> Iterator[None]:
    with set_checkpoint_early_stop(False):
        yield
    assert regions.count() == 0
    assert not patches.in_place
    assert not state.is_resumed()
    assert not state.is_suspended()
    assert not torch.is_autocast_enabled('cpu')


@pytest.fixture(params=[True, False], ids=['reentrant', 'saved'])
def run(request: pytest.FixtureRequest) -> Callable[..., Any]:
    return functools.partial(checkpoint, use_reentrant=request.param)


class Net(nn.Module):
    """Checkpoints ``segment(self, hidden)`` in ``around``."""

    def __init__(self, run: Callable[..., Any], around: Callable[[], Any] | None = None) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.run, self.around = run, around
        self.types: list[tuple[torch.dtype, ...]] = []

    def segment(self, x: Tensor) -> Tensor:
        hidden = self.b(x)
        # an op of the tables, a member of the registry, and one that O1 treats otherwise than the registry does
        wide, normed = hidden.softmax(-1), F.local_response_norm(hidden[None], 2)[0]
        loss = F.mse_loss(hidden, hidden.detach())
        self.types.append(tuple(t.dtype for t in (hidden, wide, normed, loss)))
        return wide + normed + loss

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        if self.around is None:
            return self.run(self.segment, hidden)
        with self.around():
            return self.run(self.segment, hidden.float())


def attach(model: nn.Module, level: str = 'O1') -> state.CastSession:
    CastPlan([('', model)], resolve(opt_level=level), covers_forward=True).apply()
    return state.session_opened()


@pytest.mark.parametrize('level', ['O1', 'O4'])
def test_in_a_backward_pass_of_the_script_itself(run: Callable[..., Any], level: str) -> None:
    model = Net(run)
    session = attach(model, level)
    model(torch.randn(2, 4)).sum().backward()
    half = torch.float16 if level == 'O1' else torch.bfloat16
    assert model.types == [(half, torch.float32, torch.float32, torch.float32)] * 2
    assert model.b.weight.grad is not None
    state.session_closed(session)


def test_by_a_reference_that_was_kept() -> None:
    model = Net(functools.partial(kept, use_reentrant=False))
    session = attach(model)
    model(torch.randn(2, 4)).sum().backward()
    assert model.types[0] == model.types[1]
    assert model.types[0][1] is torch.float32
    state.session_closed(session)


def test_in_a_gradient_that_is_taken_before_the_loss() -> None:
    model = Net(functools.partial(checkpoint, use_reentrant=False))
    session = attach(model)
    x = torch.randn(2, 4, requires_grad=True)
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    slope.square().sum().backward()
    assert len(set(model.types)) == 1
    assert model.b.weight.grad is not None
    state.session_closed(session)


@pytest.mark.parametrize('scaled', [True, False])
@pytest.mark.parametrize('around', [amp.disable_casts, functools.partial(torch.autocast, 'cpu', enabled=False)])
def test_where_casts_are_off(run: Callable[..., Any], around: Callable[[], Any], scaled: bool) -> None:
    model = Net(run, around)
    model, optimizer = amp.initialize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level='O1', loss_scale=1.0, verbosity=0
    )
    loss = model(torch.randn(2, 4)).sum()
    if scaled:
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
    else:
        loss.backward()
    assert model.types == [(torch.float32,) * 4] * 2


def test_a_backward_pass_inside_disable_casts(run: Callable[..., Any]) -> None:
    model = Net(run)
    session = attach(model)
    loss = model(torch.randn(2, 4)).sum()
    with amp.disable_casts():
        loss.backward()
        assert state.is_suspended()
    assert model.types[0] == model.types[1]
    state.session_closed(session)


def test_a_registered_function(run: Callable[..., Any]) -> None:
    amp.register_float_function(torch, 'sigmoid')
    types = []

    class Gate(Net):
        def segment(self, x: Tensor) -> Tensor:
            gate = torch.sigmoid(self.b(x))
            types.append(gate.dtype)
            return gate * 2

    model = Gate(run)
    session = attach(model)
    try:
        model(torch.randn(2, 4)).sum().backward()
    finally:
        patches.targets[id(torch), 'sigmoid'].patched.rule = None
    assert types == [torch.float32] * 2
    state.session_closed(session)


def test_on_another_thread_than_the_forward_pass(run: Callable[..., Any]) -> None:
    """As on a GPU, where autograd has threads of its own."""
    model = Net(run)
    casts = GlobalCasts()
    casts.start()
    loss = model(torch.randn(2, 4)).sum()
    casts.stop()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    assert model.types == [(torch.float16, torch.float32, torch.float32, torch.float32)] * 2


def test_segments_of_somebody_else(run: Callable[..., Any]) -> None:
    """Autocast of the user around a model that is none of ours, while one of ours is alive."""
    ours, theirs = Net(run), Net(run)
    session = attach(ours)
    ours(torch.randn(2, 4)).sum().backward()
    with torch.autocast('cpu', torch.bfloat16):
        loss = theirs(torch.randn(2, 4)).float().sum()
    loss.backward()
    assert theirs.types[0][1] is torch.bfloat16
    assert theirs.types[0] == theirs.types[1]
    state.session_closed(session)


def test_autocast_of_another_thread_during_a_backward_pass() -> None:
    x = torch.ones(2, dtype=torch.bfloat16)
    found: list[torch.dtype] = []

    def theirs() -> None:
        with torch.autocast('cpu', torch.bfloat16):
            found.append(x.softmax(0).dtype)

    model = Net(functools.partial(checkpoint, use_reentrant=False))
    plan = CastPlan([('', model)], resolve(opt_level='O4'), covers_forward=True)
    plan.apply()
    assert plan.ops is not None
    out = model(torch.randn(2, 4))

    def look(gradient: Tensor) -> None:
        thread = threading.Thread(target=theirs)
        thread.start()
        thread.join()

    out.register_hook(look)
    with patching.in_backward(plan.ops.keys):
        theirs()
        out.sum().backward()
    assert found == [torch.bfloat16] * 2


def test_an_error_in_a_segment_leaves_nothing_open() -> None:
    class Fails(Net):
        def segment(self, x: Tensor) -> Tensor:
            self.types.append((x.dtype,))
            if len(self.types) > 1:
                raise KeyError
            return self.b(x)

    model = Fails(functools.partial(checkpoint, use_reentrant=False))
    session = attach(model)
    loss = model(torch.randn(2, 4)).sum()
    with pytest.raises(KeyError):
        loss.backward()
    state.session_closed(session)


@pytest.mark.parametrize('around', [None, functools.partial(torch.autocast, 'cpu', torch.bfloat16)])
def test_a_part_that_the_script_checkpoints(run: Callable[..., Any], around: Callable[[], Any] | None) -> None:
    model = Net(run)
    session = attach(model)
    types: list[torch.dtype] = []
    model.a.register_forward_hook(lambda module, args, output: types.append(output.dtype))
    x = torch.randn(2, 4, requires_grad=True)
    with torch.autocast('cpu', enabled=False) if around is None else around():
        loss = run(model.a, x).sum()
    loss.backward()
    assert types == [torch.float32] * 2
    assert x.grad is not None
    state.session_closed(session)


class Written(torch.autograd.Function):
    """Checkpointing by hand, as older code has it."""

    @staticmethod
    def forward(ctx: Any, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(x)
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad(), torch.autocast('cpu', torch.float16):
            out = ctx.function(x)
        torch.autograd.backward(out, gradient)
        return None, x.grad


def test_checkpointing_by_hand() -> None:
    model, values = Net(Written.apply), []
    model.segment = lambda x: (values.append(model.b(x)), values[-1])[1]  # type: ignore[method-assign]
    model.run = lambda function, x: Written.apply(function, x)
    session = attach(model)
    model(torch.randn(2, 4)).sum().backward()
    assert values[0].float().equal(values[1].float())
    assert model.b.weight.grad is not None
    state.session_closed(session)
