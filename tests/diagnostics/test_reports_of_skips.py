"""What is told of a training: which skipped steps are reported, and its numbers; and that it stays the same."""

from __future__ import annotations

import copy
import html
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from bits import differences
from forwards import CAST, HALF
from mmengine.logging import MessageHub
from mmengine.model import BaseModel
from mmengine.registry import MODELS
from op_lists import NoHostRead
from pairs import pairs
from planted_overflows import Act, Deep, Fault, ScaleGradient, batches, examine, nan_input, root_at_zero, square
from torch import Tensor, nn

from amp_wrapper import FusedAdamW, amp


def train(
    level: str, act: Act, at: range | tuple[int, ...], steps: int, spoilt: int | None = None, **options: Any
) -> tuple[list[str], int, list[str]]:
    """Train with something that acts at some steps: causes that were found, skipped steps, all reports in the log."""
    torch.manual_seed(0)
    place = Fault(act)
    model = nn.Sequential(nn.Linear(4, 8), place, nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def choose(index: int, model: nn.Module, optimizer: Any) -> None:
        # a copy runs again the step at which the model stands
        place.act = act if index in at else Tensor.contiguous

    inputs = [nan_input(x) if index == spoilt else x for index, x in enumerate(batches(steps))]
    words: Any = dict(optimizer=optimizer, before=choose, verbosity=1)
    found = examine(model, level, inputs, lambda output: output.square().mean(), **words, **options)
    return [each.cause for each in found], amp.skipped_steps(optimizer), [each.text for each in found]


def large_gradient(x: Tensor) -> Tensor:
    return ScaleGradient.apply(x, 2.0**12)


@pairs(level=['O1', 'O2', 'O5'], fault=['input', 'gradient_nan'])
def test_first_fault_is_reported(level: str, fault: str, log: list[str]) -> None:
    act, at, spoilt = (root_at_zero, (5,), None) if fault == 'gradient_nan' else (Tensor.contiguous, (), 5)
    causes, skips, texts = train(level, act, at, 8, spoilt)
    assert (causes, skips) == ([fault], 1)
    (told,) = [line for line in log if 'why a step was skipped' in line]
    assert texts[0] in told


@pytest.mark.parametrize(('level', 'outputs'), [('O1', {}), ('O2', {'cast_model_outputs': 'float16'})])
def test_dynamic_scale_that_falls_is_not_reported(level: str, outputs: dict[str, Any]) -> None:
    """Neither at the start, nor later; a fault among such steps is."""
    options = {'loss_scale': {'init_scale': 2.0**24}, 'max_loss_scale': None, **outputs}
    causes, skips, _ = train(level, large_gradient, (6,), 8, **options)
    assert skips >= 3 and causes == []
    causes, skips, _ = train(level, large_gradient, (), 8, spoilt=1, **options)
    assert skips >= 3 and causes == ['input']


@pytest.mark.parametrize('level', ['O1', 'O2'])
def test_dynamic_scale_that_falls_where_a_script_calls_parts_is_not_reported(level: str) -> None:
    """What came back through the second part says nothing about the first."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    optimizer, scale = torch.optim.SGD(model.parameters(), lr=1e-4), {'init_scale': 2.0**22}
    words: Any = {'optimizer': optimizer, 'call': lambda x: model[1](model[0](x)), 'loss_scale': scale}
    assert examine(model, level, 9 * batches(1), **words) == []
    assert amp.skipped_steps(optimizer) > 2


@pytest.mark.parametrize(('level', 'static'), [('O1', False), ('O3', True)])
def test_scale_that_cannot_fall_is_reported(level: str, static: bool) -> None:
    floor = {'loss_scale': {'init_scale': 2.0**24}, 'min_loss_scale': 2.0**24, 'max_loss_scale': None}
    causes, skips, _ = train(level, large_gradient, range(20), 20, **({'loss_scale': 2.0**24} if static else floor))
    assert skips == 20
    assert causes == ['gradient_scale'] * 5


@pytest.mark.parametrize('level', ['O1', 'O2'])
def test_dynamic_scale_that_falls_at_the_start_is_no_warning(level: str, log: list[str]) -> None:
    """A skip after a step that was taken, and one at a static scale, are."""
    for scale, factors in (('dynamic', [torch.inf, torch.inf, 0.01, torch.inf]), (8.0, [torch.inf])):
        left = iter(factors)
        loss_fn = lambda y, left=left: y.sum() * next(left)  # noqa: E731
        examine(nn.Linear(2, 2), level, [torch.ones(1, 2)] * len(factors), loss_fn, loss_scale=scale, verbosity=1)
    said = [line.split()[0] for line in log if 'optimizer step skipped' in line]
    assert said == ['INFO', 'INFO', 'WARNING', 'WARNING']


# -- in a runner of mmengine -----------------------------------------------------------------------------------------


@MODELS.register_module()
class ConstantGradient(BaseModel):
    """Its gradient is 3 for each weight."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(36, 1, bias=False)

    def forward(self, inputs: Tensor, labels: Tensor | None = None, mode: str = 'tensor') -> Any:
        # Python makes no copy of a generator
        MessageHub.get_current_instance().update_info('generator', (x for x in ()), resumed=False)
        return {'loss': self.fc(torch.ones_like(inputs.flatten(1))).float().mean() * 3}


@pytest.mark.parametrize('level', ['O2', 'O3'])
def test_sum_of_gradients_that_are_finite(level: str, tmp_path: Path) -> None:
    """45,000 and 45,000 are more than the 65,504 of float16."""
    optimizer = dict(type='SGD', lr=0.01)
    wrapper = dict(type='AmpOptimWrapper', opt_level=level, optimizer=optimizer, accumulative_counts=2, loss_scale=3e4)
    words: Any = dict(val_cfg=None, val_dataloader=None, val_evaluator=None, model=dict(type='ConstantGradient'))
    toy.run(tmp_path, wrapper, custom_hooks=[dict(type='amp_wrapper.AmpMonitorHook')], **words)
    found = json.loads(min((tmp_path / 'amp_diagnosis').glob('*.json')).read_text())
    assert found['cause'] in ('gradient_sum', 'gradient_range') and 'sum' in found['text']
    assert found['parameters'] == ['fc.weight']


# -- reports ---------------------------------------------------------------------------------------------------------


def test_page_and_json_have_the_diagnosis_and_load_nothing(tmp_path: Path) -> None:
    """The loss is outside of the model, and its gradient at outputs that were infinite is none of finite ones."""
    model = Deep()
    model.blocks[1].place = Fault(lambda x: x * 1e5 * 1e5)
    (found,) = examine(model, 'O2', batches(1), lambda output: output.square().mean(), folder=tmp_path)
    assert [remedy.setting for remedy in found.remedies if remedy.forward_only]
    assert 'its forward pass is finite; the loss, outside of the model, was not tried' in found.text
    data = json.loads((tmp_path / 'amp_diagnosis/iter_1.json').read_text())
    assert (data['cause'], data['module'], data['text']) == (found.cause, found.module, found.text)
    assert (data['iteration'], data['rank'], data['level'][:2], data['scales']) == (1, 0, 'O2', [65536.0])
    page = html.unescape((tmp_path / 'amp_diagnosis/iter_1.html').read_text())
    settings = [remedy.setting for remedy in found.remedies]
    for part in (found.text, 'blocks.1.place', 'finite in its forward pass', *settings):
        assert part in page
    assert not [word for word in ('http', 'src=', 'url(') if word in page]


# -- the training itself ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(('level', 'kind'), [('O1', FusedAdamW), ('O2', torch.optim.AdamW), ('O5', FusedAdamW)])
def test_training_is_the_same_bit_for_bit(level: str, kind: Any, tmp_path: Path) -> None:
    """Also what a hook collects for the loss: that of the copy must never get there."""

    class Collector(list[Tensor]):
        def __call__(self, module: nn.Module, args: Any, output: Tensor) -> None:
            self.append(output)

    runs = []
    for watched in (False, True):
        torch.manual_seed(0)
        model: Any = Deep()
        model.blocks[0].place = nn.Dropout(0.3)
        collectors = [Collector() for _ in range(3)]
        model.blocks[0].register_forward_hook(lambda module, args, output, to=collectors[0]: to.append(output))
        model.blocks[1].register_forward_hook(collectors[1].__call__)
        model.blocks[2].register_forward_hook(collectors[2])
        optimizer: Any = kind(model.parameters(), lr=0.01, eps=1e-4)
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        words: Any = dict(interval=1) if watched else dict(diagnose_overflow=False)
        watch = amp.monitor(optimizer, folder=tmp_path if watched else None, **words)
        for index, x in enumerate(batches(5)):
            optimizer.zero_grad()
            loss = square(model(nan_input(x) if index in (1, 2) else x))
            loss = loss + sum(square(each.pop()) for each in collectors)
            assert not any(collectors)
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
        assert [each.cause for each in watch.diagnoses] == ['input'] * 2 * watched
        watch.close()
        runs.append([model.state_dict(), optimizer.state_dict(), amp.state_dict(), torch.randn(3)])
    assert differences(runs[0], runs[1]) == []


# -- compiled models -------------------------------------------------------------------------------------------------


class Layer(nn.Linear):
    """torch compiles no module of its own alone."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias).relu()


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return square(model(x))


def test_copies_of_compiled_models_run_as_they_were_written() -> None:
    """Nothing is compiled for them, their results say so, and the model goes on with the graphs that it has."""
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    plain: Any = nn.Sequential(Layer(4, 32), Layer(32, 32), Layer(32, 2))
    parts = copy.deepcopy(plain)
    for module in parts:
        module.compile(backend=backend)
    for model in (plain, torch.compile(copy.deepcopy(plain), backend=backend), parts):
        x, before = torch.randn(6, 4), len(graphs)
        wanted = loss_fn(model, x).detach()
        made = len(graphs)
        is_compiled = model is not plain
        assert (made > before) == is_compiled
        suggested = amp.suggest_level(model, loss_fn, batches(4), levels=['O0', 'O5'], steps=4, progress=False)
        report = amp.report(model, x, loss_fn=loss_fn, opt_level='O2')
        assert report.data['compiled'] == is_compiled
        assert ['without torch.compile' in str(each) for each in (suggested, report)] == [is_compiled] * 2
        assert len(graphs) == made and torch.equal(loss_fn(model, x).detach(), wanted) and len(graphs) == made


# -- numbers, against the same ones computed plainly in float64 -------------------------------------


def start(level: str, device: torch.device, kind: Any = torch.optim.SGD, **options: Any) -> Any:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 3)).to(device)
    return amp.initialize(model, kind(model.parameters(), lr=1e-3), opt_level=level, verbosity=0, **options)


def pass_backward(model: nn.Module, optimizer: Any, step: int, factor: float = 1.0) -> None:
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step)).to(next(model.parameters()).device)
    optimizer.zero_grad()
    with amp.scale_loss(model(x).float().square().mean() * 1e-3 * factor, optimizer) as scaled:
        scaled.backward()


@pytest.mark.parametrize('level', ['O0', 'O1', 'O2', 'O5'])
def test_measured_numbers(level: str, device: torch.device) -> None:
    model, optimizer = start(level, device)
    with amp.monitor(optimizer, 1) as watch:
        for step in range(3):
            # the smaller ones are subnormal in float16 with the loss scale
            pass_backward(model, optimizer, step, 3e-5)
            scale = amp.loss_scale(optimizer)
            # of the weights that compute in float16
            weights, masters = model.parameters(), amp.master_params(optimizer)
            chosen = [m.grad for p, m in zip(weights, masters) if level not in CAST or p.dtype is HALF[level]]
            if step == 2:
                # by code that comes after the check
                chosen[0].view(-1)[0] = math.inf
            optimizer.step()
            numbers = watch.read()
            assert (numbers['amp_scale'], numbers['amp_skipped']) == (scale, 0)
            if level in ('O0', 'O5'):
                assert len(numbers) == 2
                continue
            sizes = torch.cat([each.double().abs().flatten() for each in chosen]) * scale
            sizes = sizes[sizes.isfinite() & (sizes > 0)]
            assert numbers['amp_grad_peak'] == pytest.approx(math.log2(float(sizes.max()) / 65504), rel=1e-6)
            assert 0 < numbers['amp_grad_subnormal'] == float((sizes < 2.0**-14).double().mean()) < 1


def test_measuring_does_not_read_the_device(device: torch.device) -> None:
    model, optimizer = start('O2', device, FusedAdamW, loss_scale=128.0)
    with amp.monitor(optimizer, 1, diagnose_overflow=False):
        pass_backward(model, optimizer, 0)
        optimizer.step()
        pass_backward(model, optimizer, 1)
        with NoHostRead():
            optimizer.step()
