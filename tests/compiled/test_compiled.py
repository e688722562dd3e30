"""``torch.compile`` at every level and in every way: whole graphs, whose training is that of eager code."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from bits import differences
from compiling import BF16, BY_OP, F32, HALF, TRACED, TRACED_WHOLE, WAYS, WHOLE, fresh, initialized, start
from torch import Tensor, nn

from amp_wrapper import AmpOptimWrapper, amp


def is_of(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Asserts a type, if there is one; in a graph, while it is traced."""
    assert dtype is None or x.dtype is dtype, f'{x.dtype}, not {dtype}'
    return x


class Hidden(nn.Sequential):
    """A class of its own: ``compile()`` of torch's own classes compiles nothing in some versions."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Net(nn.Module):
    """Norms with and without statistics and two losses; asserts the types of a level, if one is given.

    Args:
        level: Whose types.
        dropout: Behind the first layer.
    """

    def __init__(self, level: str = '', dropout: float = 0.0) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 16), nn.BatchNorm1d(16)
        self.hidden = Hidden(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.head, self.loss = nn.Linear(16, 5), nn.CrossEntropyLoss()
        self.half, self.wide = HALF.get(level), F32 if level else None
        self.by_op = self.wide if level in BY_OP else self.half
        self.dropout = dropout

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        x = F.dropout(is_of(self.layer(x), self.half), self.dropout, self.training)
        x = F.relu(self.norm(x))
        x = x + is_of(self.hidden(x), self.half)
        scores = is_of(self.head(x), self.half)
        is_of(torch.softmax(scores, -1), self.by_op)
        if labels is None:
            return scores
        return is_of(F.cross_entropy(scores, labels), self.wide) + is_of(self.loss(scores, labels), self.wide)


def batch(model: nn.Module, bad: bool = False) -> tuple[Tensor, Tensor]:
    """Eight inputs and their labels; with NaN in one where ``bad`` is set."""
    x, labels = torch.randn(8, 4), torch.randint(0, 5, (8,))
    if bad:
        x[0, 0] = torch.nan
    device = next(model.parameters()).device
    return x.to(device), labels.to(device)


def backward(loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()


def step(call: Callable[..., Any], optimizer: torch.optim.Optimizer, *batches: tuple[Tensor, ...]) -> float:
    """One optimizer step on some batches; the last loss."""
    for each in batches:
        loss = call(*each) / len(batches)
        backward(loss, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def fill(optimizer: torch.optim.Optimizer, factor: float) -> None:
    with torch.no_grad():
        for master in amp.master_params(optimizer):
            master.mul_(factor)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Weights, buffers, masters and momentum."""
    return copy.deepcopy([model.state_dict(), list(amp.master_params(optimizer)), list(optimizer.state.values())])


# -- one training, of which several things are asked ----------------------------------------------------------------------


#: Whether each batch of a window has NaN: one of them, wherever it comes, skips the step of the window.
WINDOWS = ((False,), (False, True), (True,), (True, False), (False, False), (False,))


@functools.cache
def story(level: str, way: str, device: torch.device) -> SimpleNamespace:
    """What a training, an evaluation, and writes to masters have left."""
    torch.manual_seed(0)
    model = Net(level).to(device)
    by = WHOLE if (level, way) != ('O2', 'function') else functools.partial(WHOLE, backend='inductor')
    left = SimpleNamespace(losses=[], windows=[], graphs=[])
    counters = fresh()
    call, optimizer = start(model, level, way, by, loss_scale=dict(init_scale=128.0))
    torch.manual_seed(1)
    x, labels = batch(model)
    backward(call(x, labels), optimizer)
    left.gradients = [p.grad.clone() for p in amp.master_params(optimizer) if p.grad is not None]
    optimizer.step()
    optimizer.zero_grad()
    for window in WINDOWS:
        left.graphs.append(counters['stats'].get('unique_graphs', 0))
        before = state_of(model, optimizer)
        left.losses.append(step(call, optimizer, *[batch(model, bad) for bad in window]))
        left.windows.append((any(window), differences(before, state_of(model, optimizer))))
    left.weights = {key.replace('_orig_mod.', ''): value.clone() for key, value in model.state_dict().items()}
    model.eval()
    with torch.no_grad():
        left.outputs = [call(x)]
        left.graphs.append(counters['stats'].get('unique_graphs', 0))
        fill(optimizer, 0.5)
        left.outputs += [call(x), model(x)]
    model.train()
    fill(optimizer, 0)
    call(x, labels)
    left.nonzero = [name for name, weight in model.named_parameters() if weight.any()]
    left.breaks = dict(counters['graph_break'])
    return left


_SHORT = [('O0', 'before'), ('O1', 'after'), ('O2', 'function'), ('O4', 'function')]
_SHORT += [('O5', 'parts'), ('O5', 'in place')]
_LONG = [(level, way) for level in HALF for way in WAYS if (level, way) not in _SHORT]
STORIES = pytest.mark.parametrize(
    ('level', 'way'), [*_SHORT, *[pytest.param(*each, marks=pytest.mark.long) for each in _LONG]]
)


@STORIES
def test_training_is_one_graph(level: str, way: str, device: torch.device) -> None:
    """The evaluation is another one. Neither regions nor masters nor the loss scale compile anything anew."""
    found = story(level, way, device)
    *training, evaluation = found.graphs
    assert found.breaks == {} and len(set(training)) == 1
    assert (training[0], evaluation) == (1, 2) or way == 'parts'


@STORIES
def test_losses_gradients_and_weights_follow_eager_training(level: str, way: str, device: torch.device) -> None:
    found, eager = story(level, way, device), story(level, 'eager', device)
    assert set(eager.graphs) == {0}
    bound = 1e-5 if HALF[level] is F32 else 8 * torch.finfo(HALF[level]).eps
    assert found.losses == pytest.approx(eager.losses, rel=bound, nan_ok=True)
    # behind a BatchNorm, the gradient of a bias is 0 but for roundings
    size = float(torch.stack([gradient.norm() for gradient in eager.gradients]).norm())
    for mine, theirs in zip(found.gradients, eager.gradients, strict=True):
        assert (mine - theirs).norm() <= bound * (theirs.norm() + 0.1 * size)
    for name, tensor in eager.weights.items():
        close = torch.allclose(found.weights[name], tensor, rtol=0.1, atol=bound * float(tensor.abs().max()))
        assert close, name


@STORIES
def test_skipped_step_changes_nothing(level: str, way: str, device: torch.device) -> None:
    """Weights, masters, momentum and the statistics of BatchNorm, wherever in the window the NaN comes."""
    for skipped, changed in story(level, way, device).windows:
        assert (changed == []) == skipped, changed


@STORIES
def test_writes_to_masters_are_seen(level: str, way: str, device: torch.device) -> None:
    """SAM, schedulefree and others write to ``optimizer.param_groups`` between two calls; also before an evaluation."""
    found = story(level, way, device)
    before, after, eager = found.outputs
    assert {tensor.dtype for tensor in found.outputs} == {F32} and not torch.equal(before, after)
    assert torch.allclose(after, eager, rtol=0.05, atol=8 * torch.finfo(HALF[level]).eps)
    assert found.nonzero == []


@pytest.mark.parametrize('level', ['O1', 'O2'])
def test_models_of_one_class_share_what_is_done_before_a_graph(level: str, device: torch.device) -> None:
    fresh()
    x, nets = torch.rand(8, 4, device=device), [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2)]
    pairs = [(TRACED(net), initialized(net.to(device), level, loss_scale=1.0), net) for net in nets]
    for bad, (call, optimizer, net) in itertools.product((False, True), pairs):
        before = [buffer.clone() for buffer in net.buffers()]
        backward(call(x * torch.inf if bad else x).sum(), optimizer)
        optimizer.step()
        assert all(map(torch.equal, before, net.buffers())) == bad
    for call, optimizer, _ in pairs:
        fill(optimizer, 0.0)
        assert not call(x).any()


# -- steps of a small model -------------------------------------------------------------------------------------------------


def test_resumed_training_equals_uninterrupted(device: torch.device) -> None:
    """Bit for bit: saved, and resumed in new objects, with a scale that moves and a skipped step."""

    def run(saved: list[Any] | None, numbers: range) -> Any:
        torch.manual_seed(0)
        fresh()
        model = Net('O2', dropout=0.5).to(device)
        call, optimizer = start(model, 'O2', 'function', TRACED_WHOLE)
        for part, state in zip((model, optimizer, amp), saved or ()):
            part.load_state_dict(state)
        for number in numbers:
            torch.manual_seed(100 + number)
            step(call, optimizer, batch(model, bad=number == 1))
        return copy.deepcopy([part.state_dict() for part in (model, optimizer, amp)])

    assert differences(run(run(None, range(3)), range(3, 5)), run(None, range(5))) == []


@pytest.mark.parametrize(('level', 'whole'), [('O4', False), ('O5', True)])
def test_graphs_from_before_casts_are_not_used(level: str, whole: bool, device: torch.device, counters: Any) -> None:
    """Although torch does not look at hooks, and whoever has cleared the counters of torch in between."""
    model, x = nn.Linear(4, 4).to(device), torch.randn(2, 4, device=device)
    call = TRACED(model if whole else lambda x: model(x))
    assert call(x).dtype is F32
    counters.clear()
    initialized(model, level, cast_model_outputs=BF16)
    assert call(x).dtype is BF16 and torch.equal(call(x), model(x))


def test_compiled_optimizer_step_runs_as_it_is(device: torch.device) -> None:
    """``torch.compile(optimizer.step)``; of a whole training step the forward pass alone is compiled."""
    left, counts = [], []
    for compiled in ('nothing', 'step', 'training'):
        torch.manual_seed(0)
        counters, model = fresh(), nn.Linear(4, 4).to(device)
        optimizer = initialized(model, 'O5')
        take = TRACED(optimizer.step) if compiled == 'step' else optimizer.step

        def train(x: Tensor, model: Any = model, optimizer: Any = optimizer, take: Any = take) -> None:
            backward(model(x).pow(2).sum(), optimizer)
            take()
            optimizer.zero_grad()

        call = TRACED(train) if compiled == 'training' else train
        for _ in range(3):
            call(torch.ones(2, 4, device=device))
        left.append(model.state_dict())
        counts.append(counters['stats'].get('unique_graphs', 0))
    assert differences(left[1:], left[:1] * 2) == []
    # torch 2.6 cannot be kept from compiling what a skipped frame calls: small graphs of the engine's own
    is_coarse = hasattr(torch._C._dynamo.eval_frame, 'skip_code')
    assert [min(count, 1) if is_coarse else count for count in counts] == [0, 0, 1]


@pytest.mark.parametrize('way', ['after', 'function'])
def test_backward_pass_of_a_module_in_fp32(way: str, device: torch.device) -> None:
    """Its products are in FP32, as in eager training, although torch makes the graph under the autocast of the level."""
    if not hasattr(torch._functorch.config, 'backward_pass_autocast') and way != 'function':
        pytest.skip('this torch makes the backward pass under the autocast of the forward pass')
    model = Net().to(device)
    call, optimizer = start(model, 'O1', way, loss_scale=1.0, keep_fp32=['head'])
    backward(call(*batch(model)), optimizer)
    gradient = model.head.weight.grad
    assert gradient.dtype is F32 and not torch.equal(gradient, gradient.half().float())


def test_backward_pass_of_a_module_in_fp32_in_the_context_of_the_wrapper(device: torch.device) -> None:
    """There autocast is on around the graph, too."""
    if not hasattr(torch._functorch.config, 'backward_pass_autocast'):
        pytest.skip('this torch makes the backward pass under the autocast of the forward pass')
    model = Net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapper = AmpOptimWrapper(opt_level='O1', optimizer=optimizer, loss_scale=1.0, keep_fp32=['head'])
    wrapper.attach(model)
    with wrapper.optim_context(model):
        loss = torch.compile(model, backend='aot_eager')(batch(model)[0]).float().square().mean()
    wrapper.backward(loss)
    gradient = model.head.weight.grad
    assert not torch.equal(gradient, gradient.half().float())


#: Calls of a model by its parts: a skipped step restores the statistics, and weights follow their masters, all the same.
CALLS: dict[str, Callable[[Any], Callable[..., Any]]] = {
    'function of parts': lambda m: TRACED(lambda x: m.head(m.norm(m.layer(x)))),
    'forward itself': lambda m: TRACED(lambda x: m.forward(x)),
    'compiled part': lambda m: (lambda norm: lambda x: m.head(norm(m.layer(x))))(TRACED(m.norm)),
    'compiled anew': lambda m: lambda x: TRACED(lambda x: m(x).float())(x),
}


@pytest.mark.parametrize(('level', 'call'), [*zip(('O4', 'O4', 'O2', 'O4'), CALLS)])
def test_parts_that_are_called_by_themselves(level: str, call: str, device: torch.device) -> None:
    model = Net().to(device)
    optimizer = initialized(model, level, loss_scale=8.0)
    run = CALLS[call](model)
    for bad in (False, True, False):
        before = copy.deepcopy(model.state_dict())
        step(lambda x, _: run(x).float().sum(), optimizer, batch(model, bad))
        assert (differences(before, model.state_dict()) == []) == bad
    fill(optimizer, 0)
    assert not run(batch(model)[0]).any()


def test_function_around_models_of_two_optimizers(device: torch.device) -> None:
    """Their hooks are put on anew as the second optimizer comes; not while a graph goes through them."""
    models = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(device) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    amp.initialize(models, optimizers, opt_level='O5', num_losses=2, verbosity=0)
    x = torch.randn(8, 4, device=device)
    loss_of = TRACED_WHOLE(lambda x: models[1](x).mean() - models[1](models[0](x).detach()).mean())
    for _ in range(3):
        with amp.scale_loss(loss_of(x), optimizers[1], loss_id=1) as scaled:
            scaled.backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
    assert torch.isfinite(loss_of(x))


def test_keep_fp32_names_modules_that_were_compiled_before(device: torch.device) -> None:
    model = Net().to(device)
    model.layer = TRACED(model.layer)
    optimizer = initialized(model, 'O5', keep_fp32=['layer'])
    types = {name: weight.dtype for name, weight in model.named_parameters()}
    assert types['layer._orig_mod.weight'] is F32 and types['head.weight'] is BF16
    step(model, optimizer, batch(model))
