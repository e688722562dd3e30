"""Names in files of models with wrappers inside: plain when written, understood when read, whoever wrote them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from bits import differences
from mmengine.registry import MODELS
from torch import nn

from amp_wrapper.checkpoint import names as model_names

SGD = dict(type='SGD', lr=0.1)


class Inner(nn.Module):
    """A layer whose real name is ``module``, and one beside it of the same kind."""

    def __init__(self, direct: bool) -> None:
        super().__init__()
        self.module = nn.Linear(3, 3)
        if direct:
            self.weight = nn.Parameter(torch.zeros(3, 3))


class Outer(nn.Module):
    def __init__(self, wrapped: bool, direct: bool = False) -> None:
        super().__init__()
        inner = Inner(direct)
        self.enc = nn.DataParallel(inner) if wrapped else inner
        self.head = nn.Sequential(nn.DataParallel(nn.Linear(3, 3)) if wrapped else nn.Linear(3, 3))


@pytest.mark.parametrize('direct', [False, True])
def test_plain_names_and_how_they_are_read(direct: bool) -> None:
    wrapped, bare = Outer(True, direct), Outer(False, direct)
    plain = set(bare.state_dict())
    own = model_names.plain_names(wrapped)
    assert set(own) == set(wrapped.state_dict()) and set(own.values()) == plain
    assert own['enc.module.module.weight'] == 'enc.module.weight'
    assert own['head.0.module.weight'] == 'head.0.weight'
    assert model_names.plain_names(bare) == {key: key for key in plain}
    for model in (wrapped, bare):
        for names in (plain, set(own)):
            read = model_names.reader(model, names)
            assert {read(name) for name in names} == plain, (model is bare, names)
            # a strategy of mmengine adds one in front
            outside = model_names.reader(model, [f'module.{name}' for name in plain])
            assert {outside(f'module.{name}') for name in plain} == plain
    assert model_names.reader(bare, plain)('unknown.module.weight') == 'unknown.module.weight'


@MODELS.register_module()
class NamedToy(toy.ToyModel):
    """The toy with a wrapper inside, and with a real submodule called ``module`` in that wrapper."""

    def __init__(self, wrapped: bool) -> None:
        super().__init__()
        self.fc = nn.Sequential()
        self.fc.module = nn.Linear(4, 3)
        if wrapped:
            self.fc = nn.DataParallel(self.fc)


@pytest.mark.parametrize('average', [False, True])
@pytest.mark.parametrize('first', [False, True])
@pytest.mark.parametrize('second', [False, True])
def test_files_fit_wrapped_and_bare_models(first: bool, second: bool, average: bool, tmp_path: Path) -> None:
    def case(wrapped: bool, epochs: int, **words: Any) -> dict[str, Any]:
        hooks = [dict(type='EMAHook', momentum=0.3)] if average else []
        train_cfg = dict(by_epoch=True, max_epochs=epochs, val_interval=1)
        return dict(model=dict(type='NamedToy', wrapped=wrapped), custom_hooks=hooks, train_cfg=train_cfg, **words)

    wrapper = dict(type='AmpOptimWrapper', opt_level='O2', optimizer=SGD)
    runner = toy.run(tmp_path / 'first', wrapper, **case(first, 1))
    saved = toy.checkpoint(tmp_path / 'first')
    assert 'fc.module.weight' in saved['state_dict'] and 'fc.module.module.weight' not in saved['state_dict']
    path = str(tmp_path / 'first' / 'epoch_1.pth')
    # no further iteration: what is there is what was loaded
    again = toy.run(tmp_path / 'second', wrapper, **case(second, 1, load_from=path, resume=True))
    masters = {k.replace('fc.module.module', 'fc.module'): v for k, v in again.model.state_dict().items()}
    expected = {k.replace('fc.module.module', 'fc.module'): v for k, v in runner.model.state_dict().items()}
    assert differences(masters, expected) == []
    if average:
        means = [
            next(h for h in r.hooks if hasattr(h, 'ema_model')).ema_model.module.state_dict() for r in (runner, again)
        ]
        left, right = ({k.replace('fc.module.module', 'fc.module'): v for k, v in m.items()} for m in means)
        assert differences(left, right) == []
    # weights alone
    torch.manual_seed(5)
    loaded = toy.run(
        tmp_path / 'third',
        dict(type='AmpOptimWrapper', opt_level='O2', optimizer=dict(type='SGD', lr=0.0)),
        **case(second, 1, load_from=path),
    )
    state = {k.replace('fc.module.module', 'fc.module'): v for k, v in loaded.model.state_dict().items()}
    for key in ('fc.module.weight', 'conv.weight'):
        assert state[key].equal(saved['state_dict'][key]), key
