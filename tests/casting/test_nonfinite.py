"""The first module whose output is not finite."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from mmengine.registry import MODELS
from torch import Tensor, nn

from amp_wrapper import AmpOptimWrapper, NonfiniteError, nonfinite_watch

SGD = dict(type='SGD', lr=0.1)


def hooks_of(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_the_innermost_module_is_named(device: torch.device) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 2)), nn.Softmax(-1)).to(device)
    before = hooks_of(model)
    with torch.no_grad():
        model[1][1].weight.fill_(float('inf'))
    with nonfinite_watch(model) as watch:
        model(torch.ones(1, 4, device=device))
        assert watch.first() == '1.1 (Linear)'
        assert watch.first() is None
        model(torch.full((1, 4), float('nan'), device=device))
        assert watch.first() == "the model's input"
    assert hooks_of(model) == before


def test_finite_outputs_are_nobodys_fault_and_exceptions_leave_no_hooks() -> None:
    model = nn.Linear(4, 4)

    def interrupted() -> None:
        with nonfinite_watch(model) as watch:
            model(torch.full((1, 4), 1e30))
            assert watch.first() is None
            raise KeyError

    with pytest.raises(KeyError):
        interrupted()
    assert hooks_of(model) == 0


def test_overflow_of_a_cast_model_is_found() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 2))
    wrapper = AmpOptimWrapper(opt_level='O2', optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    with torch.no_grad():
        model[0].weight.fill_(1.0)
        model[1].weight.fill_(6e4)
    with nonfinite_watch(model) as watch:
        model(torch.full((1, 4), 2.0))
        assert watch.first() is None
        wrapper.attach(model)
        # 8 times 60000 is beyond float16, 4 times 2 is not
        model(torch.full((1, 4), 2.0))
        assert watch.first() == '1 (Linear)'


@MODELS.register_module()
class BadHead(toy.ToyModel):
    """Overflows in float16 and in nothing wider."""

    def extract_feat(self, inputs: Tensor) -> Tensor:
        return self.norm(self.bn(self.conv(inputs * 1e4) * 1e3).mean((2, 3)))


@pytest.mark.parametrize('stop', [False, True])
def test_hook_in_a_config(stop: bool, tmp_path: Path) -> None:
    words: dict[str, Any] = dict(
        model=dict(type='BadHead'),
        custom_hooks=[dict(type='amp_wrapper.NonfiniteHook', stop=stop)],
        train_cfg=dict(by_epoch=False, max_iters=2, val_interval=10),
    )
    wrapper = dict(type='AmpOptimWrapper', opt_level='O2', optimizer=SGD)
    if stop:
        with pytest.raises(NonfiniteError, match=r'iteration 1: .* output of bn \(BatchNorm2d\)'):
            toy.run(tmp_path, wrapper, **words)
        return
    runner = toy.run(tmp_path, wrapper, **words)
    text = next(tmp_path.rglob('*.log')).read_text()
    for iteration in (1, 2):
        assert f'iteration {iteration}: the first non-finite values are in the output of bn (BatchNorm2d)' in text
    assert not any('watch' in repr(hook).lower() for m in runner.model.modules() for hook in m._forward_hooks.values())
