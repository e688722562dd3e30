"""Which skipped steps a training tells the cause of by default: every fault, and no loss scale that falls."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from mmengine.registry import HOOKS
from torch import Tensor, nn
from toy_amp import logged
from toy_overflow import ScaleGradient, batches, nan_input

from amp_wrapper import amp

SKIPPING = ('O1', 'O2', 'O3', 'O4', 'O5')


class Place(nn.Module):
    """Does something to its input at some steps."""

    def __init__(self, act: Callable[[Tensor], Tensor], at: tuple[int, ...]) -> None:
        super().__init__()
        self.act, self.at, self.step = act, at, -1

    def forward(self, x: Tensor) -> Tensor:
        # a copy runs again the step at which the model stands
        return self.act(x) if self.step in self.at else x


def root_at_zero(x: Tensor) -> Tensor:
    return x + (x * 0).sqrt()


def huge_gradient(x: Tensor) -> Tensor:
    return ScaleGradient.apply(x, 2.0**12)


def train(
    level: str, place: Place, steps: int = 8, spoilt: int | None = None, outside: bool = False, **options: Any
) -> tuple[list[str], int, list[str]]:
    """Causes that ``amp.monitor`` found, skipped steps, and the lines of the log that tell causes."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(4, 8), place, nn.Linear(8, 2))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-3)
    words = {} if not outside else {'cast_model_outputs': 'float16'}
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=1, **words, **options)
    with logged() as lines, amp.monitor(optimizer) as watch:
        for index, x in enumerate(batches(steps)):
            place.step = index
            output = model(nan_input(x) if index == spoilt else x)
            with amp.scale_loss(output.square().mean(), optimizer) as loss:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    told = [line for line in lines if 'why a step was skipped' in line]
    return [each.cause for each in watch.diagnoses], amp.skipped_steps(optimizer), told


@pytest.mark.parametrize('level', SKIPPING)
@pytest.mark.parametrize('fault', ['input', 'gradient_nan'])
def test_the_first_fault_is_told(level: str, fault: str) -> None:
    at, spoilt = ((5,), None) if fault == 'gradient_nan' else ((), 5)
    causes, skips, told = train(level, Place(root_at_zero, at), spoilt=spoilt)
    assert (causes, skips, len(told)) == ([fault], 1, 1)


@pytest.mark.parametrize('level', ['O1', 'O2'])
@pytest.mark.parametrize('outside', [False, True])
def test_a_scale_that_falls_is_not(level: str, outside: bool) -> None:
    """Not at the start, not later; a fault among such steps is."""
    wide = {'init_scale': 2.0**24}
    causes, skips, told = train(
        level, Place(huge_gradient, (6,)), outside=outside, loss_scale=wide, max_loss_scale=None
    )
    assert skips >= 3
    assert (causes, told) == ([], [])
    causes, more, told = train(
        level, Place(huge_gradient, ()), spoilt=1, outside=outside, loss_scale=wide, max_loss_scale=None
    )
    assert causes == ['input'] and more >= 3 and len(told) == 1


@pytest.mark.parametrize(('level', 'options'), [('O1', {}), ('O2', {}), ('O3', {'loss_scale': 2.0**24})])
def test_a_scale_that_cannot_fall_is(level: str, options: dict[str, Any]) -> None:
    floor = {'loss_scale': {'init_scale': 2.0**24}, 'min_loss_scale': 2.0**24, 'max_loss_scale': None}
    causes, skips, _ = train(level, Place(huge_gradient, tuple(range(20))), steps=20, **(options or floor))
    assert skips == 20
    assert causes[0] == 'gradient_scale'


@HOOKS.register_module()
class SpoilsABatch(toy.Hook):
    """NaN in one batch."""

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        if runner.iter == 9:
            data_batch['inputs'].fill_(float('nan'))


@pytest.mark.parametrize('level', SKIPPING)
@pytest.mark.parametrize('spoilt', [True, False])
def test_in_a_runner(level: str, spoilt: bool, tmp_path: Path) -> None:
    wrapper = dict(type='AmpOptimWrapper', opt_level=level, optimizer=dict(type='SGD', lr=0.01))
    if level in ('O1', 'O2'):
        wrapper.update(loss_scale={'init_scale': 2.0**24}, max_loss_scale=None)
    hooks = [dict(type='amp_wrapper.AmpMonitorHook'), *([dict(type='SpoilsABatch')] if spoilt else [])]
    toy.run(tmp_path, wrapper, custom_hooks=hooks)
    reports = [json.loads(path.read_text()) for path in sorted((tmp_path / 'amp_diagnosis').glob('*.json'))]
    assert [(each['cause'], each['iteration']) for each in reports] == ([('input', 10)] if spoilt else [])


@pytest.mark.parametrize('level', ['O1', 'O2'])
def test_a_dynamic_scale_that_falls_at_the_start_is_calm(level: str, log: list[str]) -> None:
    """A line that is no warning; a skip after a step that was taken, and one at a static scale, are warnings."""
    for scale, factors in (('dynamic', [torch.inf, torch.inf, 0.01, torch.inf]), (8.0, [torch.inf])):
        model = nn.Linear(2, 2)
        model, optimizer = amp.initialize(
            model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=level, loss_scale=scale
        )
        for factor in factors:
            optimizer.zero_grad()
            with amp.scale_loss(model(torch.ones(1, 2)).sum() * factor, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
    said = [line for line in log if 'optimizer step skipped' in line]
    assert [line.split()[0] for line in said] == ['INFO', 'INFO', 'WARNING', 'WARNING']
    assert ['as is usual' in line for line in said] == [True, True, False, False]
