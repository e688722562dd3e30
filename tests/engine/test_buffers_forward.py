"""Buffers and the ways to run a forward pass: nested, interrupted, on threads, with modules that come later."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from toy_buffers import APIS, Around, Counter, Probe, Scripted, batch, changed, snapshot

from amp_wrapper import OverflowStreakError
from amp_wrapper.engine.buffers.copies import LARGE, LargeBuffer
from amp_wrapper.optim import FusedAdamW
from amp_wrapper.policy import LEVELS

# -- ways to run a forward pass --------------------------------------------------------------------------------------


@pytest.mark.parametrize('level', LEVELS)
@pytest.mark.parametrize('api', APIS)
@pytest.mark.parametrize('way', ['siamese', 'part', 'layer', 'reentrant', 'not reentrant', 'no_grad inside'])
def test_ways_to_run(level: str, api: str, way: str, device: torch.device) -> None:
    inner = nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), Probe())
    model = Around(inner).to(device)

    def call(x: Tensor) -> Tensor:
        scale = model.scale.float().sum()
        if way == 'siamese':
            return model(x) + model(x * 2)
        if way == 'part':
            return model.part(x).float().sum() * scale
        if way == 'layer':
            return model.part[1](model.part[0][1](x)).float().sum() * scale
        if way == 'no_grad inside':
            return run_inside(model, x) * scale
        x = x.clone().requires_grad_()
        return checkpoint(model.part, x, use_reentrant=way == 'reentrant').float().sum() * scale

    run = Scripted(api, level, model)
    run.train(batch((4, 3), device), call=call)
    counted = int(model.part[1].count)
    # torch stops a segment that runs again when it has what it needs
    assert counted == (2 if way in ('siamese', 'reentrant') else 1)
    before = snapshot(model)
    run.train(batch((4, 3), device, bad=True), batch((4, 3), device), call=call)
    assert changed(before, model) == []
    run.train(batch((4, 3), device), call=call)
    assert int(model.part[1].count) == 2 * counted


def run_inside(model: Around, x: Tensor) -> Tensor:
    """A teacher that runs without gradients inside of the model's pass."""

    class Teacher(nn.Module):
        def forward(self, outer: Around, x: Tensor) -> Tensor:
            with torch.no_grad():
                return outer.part(x).float().sum()

    original = model.forward
    try:
        model.forward = lambda x: Teacher()(model, x)  # type: ignore[method-assign]
        return model(x)
    finally:
        model.forward = original  # type: ignore[method-assign]


class Twice(nn.Module):
    """Calls itself once, and writes after that."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer('count', torch.tensor(0))

    def forward(self, x: Tensor, again: bool = True) -> Tensor:
        result = self(x, again=False) * math.inf if again else x * self.scale.float()
        self.count += 1
        return result


def test_a_part_that_calls_itself(device: torch.device) -> None:
    """The call ends with the outermost: what is written after an inner one belongs to it, too."""
    model = nn.Sequential(nn.Sequential(Twice())).to(device)
    run = Scripted('wrapper', 'O1', model)
    before = snapshot(model)
    run.train(batch((4, 3), device), call=model[0][0])
    assert changed(before, model) == []
    # nothing is open that would hide a write of somebody else
    run.backward(run.forward(batch((4, 3), device), model[0][0]).sum())
    model[0][0].count.fill_(5)
    run.step()
    assert model[0][0].count == 5


def test_gradients_inside_of_a_call_without(device: torch.device) -> None:
    """As where a part is trained through a model that runs under no_grad: the step gives back what it did."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Around(Counter())

        def forward(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                return self.part(x)

    model = Outer().to(device)
    run = Scripted('wrapper', 'O1', model)
    for bad in (False, True, False):
        with torch.no_grad():
            loss = run.forward(batch((4, 3), device, bad))
        run.backward(loss)
        before = int(model.part.part.count) - 1
        run.step()
        assert model.part.part.count == before + (not bad)


class Interrupted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.raises: type[BaseException] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.raises is not None:
            raise self.raises
        return x


@pytest.mark.parametrize('kind', [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize('level', LEVELS)
def test_a_pass_that_ended_early(level: str, kind: type[BaseException], device: torch.device) -> None:
    model = Around(nn.Sequential(nn.BatchNorm1d(3), Interrupted())).to(device)
    run = Scripted('wrapper', level, model)
    run.train(batch((4, 3), device))
    before = snapshot(model)
    model.part[1].raises = kind
    with pytest.raises(kind):
        run.forward(batch((4, 3), device, bad=True))
    model.part[1].raises = None
    run.train(batch((4, 3), device, bad=True))
    assert changed(before, model) == []
    model.part[0].reset_running_stats()
    run.train(batch((4, 3), device, bad=True))
    assert model.part[0].num_batches_tracked == 0


@pytest.mark.parametrize('level', ['O0', 'O1', 'O2'])
def test_dataparallel_replicas_and_threads(level: str, device: torch.device) -> None:
    """Several passes at once, as DataParallel has them, are one."""
    import threading

    model = Around(nn.BatchNorm1d(3)).to(device)
    run = Scripted('wrapper', level, model)
    run.train(batch((4, 3), device))
    before = snapshot(model)
    first, second = threading.Event(), threading.Event()

    class Gate(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            # the first one is inside while the second one begins and ends
            if threading.current_thread().name == 'outer':
                first.set()
                second.wait(10)
            return x

    part = model.part
    model.part = nn.Sequential(part, Gate(), part)
    thread = threading.Thread(target=lambda: model(batch((4, 3), device, bad=True)), name='outer')
    thread.start()
    first.wait(10)
    model(batch((4, 3), device))
    second.set()
    thread.join()
    model.part = part
    run.train(batch((4, 3), device, bad=True))
    assert changed(before, model) == []


@pytest.mark.parametrize('level', LEVELS)
def test_a_graph_that_waits_for_its_backward_pass(level: str, device: torch.device) -> None:
    """It holds the buffers, and a step in between may not spoil it."""
    # the step changes no weight that the graph holds
    model = Around(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3).requires_grad_(False))).to(device)
    run = Scripted('wrapper', level, model)
    first, second = run.forward(batch((4, 3), device)), run.forward(batch((4, 3), device, seed=1))
    run.backward(first)
    run.step()
    run.backward(second)
    run.step()
    assert model.part[1].num_batches_tracked == 2


# -- buffers that come and go ----------------------------------------------------------------------------------------


@pytest.mark.parametrize('level', LEVELS)
def test_buffers_that_come_later(level: str, device: torch.device) -> None:
    model = Around(nn.Sequential(nn.BatchNorm1d(3), nn.Identity())).to(device)
    run = Scripted('wrapper', level, model)
    run.train(batch((4, 3), device))
    # a counter, a statistic in the place of None, a loss with a weight
    model.part[1].register_buffer('late', torch.tensor([5], device=device))
    model.part[1].register_forward_hook(lambda module, args, output: [module.late.add_(1), None][1])
    model.register_buffer('empty', None)
    run.train(batch((4, 3), device))
    model.empty = torch.zeros(2, device=device)
    model.register_forward_hook(lambda module, args, output: [module.empty.add_(1), None][1])
    model.loss = Weighted().to(device)
    run.train(batch((4, 3), device))
    before = snapshot(model)
    assert model.part[1].late == 7 and before['empty'].tolist() == [1, 1]
    run.train(batch((4, 3), device, bad=True), call=lambda x: model.loss(model(x)))
    assert changed(before, model) == []
    run.train(batch((4, 3), device), call=lambda x: model.loss(model(x)))
    assert model.loss.seen == 1 and model.part[1].late == 8


@pytest.mark.parametrize('level', LEVELS)
def test_a_loss_that_comes_later(level: str, device: torch.device) -> None:
    model = Around(nn.BatchNorm1d(3)).to(device)
    run = Scripted('wrapper', level, model)
    run.train(batch((4, 3), device))
    model.loss = Weighted().to(device)
    run.train(batch((4, 3), device, bad=True), call=lambda x: model.loss(model(x)))
    assert model.loss.seen == 0


class Weighted(nn.modules.loss._Loss):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer('seen', torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return x


@pytest.mark.parametrize('change', ['shape', 'dtype', 'none', 'inference'])
def test_a_buffer_that_became_another_kind_is_left_alone(change: str, device: torch.device) -> None:
    model = Around(Becoming(change)).to(device)
    run = Scripted('wrapper', 'O2', model)
    run.train(batch((4, 3), device, bad=True))
    # the others return
    assert model.part.count == 0
    found = model.part.value
    assert {'shape': lambda: found.shape == (5,), 'dtype': lambda: found.dtype is torch.int32}.get(
        change, lambda: found is None or found.is_inference()
    )()
    run.train(batch((4, 3), device))
    assert model.part.count == 1


class Becoming(nn.Module):
    def __init__(self, change: str) -> None:
        super().__init__()
        self.change = change
        self.register_buffer('value', torch.zeros(3))
        self.register_buffer('count', torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        if self.change == 'shape':
            self.value = torch.zeros(5, device=x.device)
        elif self.change == 'dtype':
            self.value = torch.zeros(3, device=x.device, dtype=torch.int32)
        elif self.change == 'none':
            self.value = None
        else:
            with torch.inference_mode():
                self.value = torch.zeros(3, device=x.device)
        return x


def test_large_constants_are_not_kept_twice(device: torch.device) -> None:
    model = Around(nn.Sequential(Table(), Probe())).to(device)
    run = Scripted('wrapper', 'O1', model)
    run.train(batch((4, 3), device))
    snapshots = run.wrapper._engine.parts.buffers
    assert snapshots is not None
    copies = {name: snapshots.tracked._copies[place] for place, name in enumerate(snapshots.tracked.names)}
    large = {name: part for name, (part, _) in copies.items() if isinstance(part, LargeBuffer)}
    assert set(large) == {'part.0.table', 'part.1.large'}
    kept = {name for name, part in large.items() if part.copies[0] is not None}
    assert kept == {'part.1.large'}
    before = snapshot(model)
    run.train(batch((4, 3), device, bad=True))
    assert changed(before, model) == []
    # a table that begins to move is followed from the next step on
    model.part[0].moves = True
    run.train(batch((4, 3), device))
    before = snapshot(model)
    run.train(batch((4, 3), device, bad=True))
    assert changed(before, model) == []


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer('table', torch.arange(LARGE, dtype=torch.int64))
        self.moves = False

    def forward(self, x: Tensor) -> Tensor:
        if self.moves:
            self.table += 1
        return x


@pytest.mark.parametrize('level', LEVELS)
def test_errors_leave_nothing_behind(level: str, device: torch.device) -> None:
    model = Around(nn.BatchNorm1d(3)).to(device)
    run = Scripted('wrapper', level, model, max_consecutive_skips=2)
    before = snapshot(model)
    run.train(batch((4, 3), device, bad=True))
    with pytest.raises(OverflowStreakError):
        run.train(batch((4, 3), device, bad=True))
    assert changed(before, model) == []
    for kind in (torch.optim.SGD, FusedAdamW):
        model = Around(nn.BatchNorm1d(3)).to(device)
        clip = dict(max_norm=1.0, error_if_nonfinite=True)
        run = Scripted('wrapper', level, model, kind, loss_scale=1.0, clip_grad=clip)
        before = snapshot(model)
        with pytest.raises(RuntimeError, match='non-finite'):
            run.train(batch((4, 3), device, bad=True))
        assert changed(before, model) == []


@pytest.mark.parametrize('api', APIS)
def test_compiled(api: str, device: torch.device) -> None:
    model = Around(nn.Sequential(nn.BatchNorm1d(3), Counter())).to(device)
    run = Scripted(api, 'O0', model)
    compiled = torch.compile(model, backend='aot_eager')
    try:
        run.train(batch((4, 3), device), call=compiled)
        before = snapshot(model)
        assert model.part[1].count == 1
        run.train(batch((4, 3), device, bad=True), call=compiled)
        assert changed(before, model) == []
        run.train(batch((4, 3), device), call=compiled)
        assert model.part[1].count == 2
    finally:
        torch.compiler.reset()


def test_functional_calls_are_left_alone(device: torch.device) -> None:
    """Stand-ins of buffers come and go with the call; transforms of torch.func see nothing of this."""
    model = Around(nn.BatchNorm1d(3)).to(device)
    run = Scripted('wrapper', 'O1', model)
    run.train(batch((4, 3), device))
    before = snapshot(model)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    torch.func.functional_call(model, (parameters, buffers), (batch((4, 3), device),))
    model.eval()
    stacked = {name: torch.stack([value, value]) for name, value in parameters.items()}
    both = torch.func.vmap(
        lambda p: torch.func.functional_call(model, (p, buffers), (batch((4, 3), device),)), randomness='same'
    )
    assert both(stacked).shape == (2,)
    model.train()
    run.train(batch((4, 3), device, bad=True))
    assert changed(before, model) == []
