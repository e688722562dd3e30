"""What a later issue will bring is refused until then: typed, with what to do, and before anything is changed."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from bits import differences
from mmengine._strategy import BaseStrategy, SingleDeviceStrategy
from mmengine._strategy.fsdp import FSDPStrategy
from mmengine.optim import OptimWrapper
from mmengine.runner import FlexibleRunner
from torch import nn

from amp_wrapper import AmpAttachError, AmpConfigError, AmpOptimWrapper

SGD = dict(type='SGD', lr=0.1)
EAGER = dict(backend='eager')


def amp(model: nn.Module, level: str) -> AmpOptimWrapper:
    return AmpOptimWrapper(opt_level=level, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize('level', ['O1', 'O2', 'O3', 'O4', 'O5'])
def test_compile_in_a_config(level: str, tmp_path: Path) -> None:
    with pytest.raises(AmpConfigError, match=f'torch.compile is not supported yet at {level}.*O0'):
        toy.run(tmp_path, dict(type='AmpOptimWrapper', opt_level=level, optimizer=SGD), compile=EAGER)


def test_compile_without_16_bit_is_left_to_mmengine(tmp_path: Path) -> None:
    # another model of the same class is attached, which wraps methods of the class, and goes away in between
    other = [toy.ToyModel() for _ in range(3)]
    for model in other:
        amp(model, 'O2').attach(model)
    for name, words in dict(plain=dict(), compiled=dict(compile=EAGER)).items():
        ends = []
        for kind in (dict(type='AmpOptimWrapper', opt_level='O0'), dict(type='OptimWrapper')):
            runner = toy.run(tmp_path / f'{name}-{kind["type"]}', dict(kind, optimizer=SGD), **words)
            ends.append(runner.model.state_dict())
        assert differences(*ends) == []
        other.pop()
        gc.collect()


def test_compile_of_the_other_runner(tmp_path: Path) -> None:
    config = toy.toy_config(tmp_path, dict(type='AmpOptimWrapper', opt_level='O2', optimizer=SGD))
    config.strategy = dict(type='SingleDeviceStrategy')
    config.randomness, config.env_cfg = dict(seed=0), {}
    runner = FlexibleRunner.from_cfg(config)
    # a keyword of the class that from_cfg leaves out
    runner._compile = dict(EAGER)
    with pytest.raises(AmpAttachError, match=r'torch\.compile has wrapped'):
        runner.train()


@pytest.mark.parametrize('level', ['O1', 'O2'])
@pytest.mark.parametrize('how', ['whole', 'part', 'in place', 'method'])
def test_compiled_modules(how: str, level: str, device: torch.device) -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(device)
    wrapper = amp(model, level)
    handed: Any = model
    if how == 'whole':
        handed = torch.compile(model, **EAGER)
    elif how == 'part':
        model[0] = torch.compile(model[0], **EAGER)
    elif how == 'in place':
        model.compile(**EAGER)
    else:
        model.forward = torch.compile(model.forward, **EAGER)
    with pytest.raises(AmpAttachError, match=r'torch\.compile has wrapped .*not supported'):
        wrapper.attach(handed)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not wrapper._engine.attached


def test_a_model_that_is_compiled_after_it_was_attached(device: torch.device) -> None:
    model = nn.Linear(4, 4).to(device)
    wrapper = amp(model, 'O2')
    wrapper.attach(model)
    with pytest.raises(AmpAttachError, match=r'torch\.compile has wrapped'):
        with wrapper.optim_context(torch.compile(model, **EAGER)):
            raise RuntimeError('not reached')


class Sharding(BaseStrategy):
    """Stands for DeepSpeedStrategy and ColossalAIStrategy, which need their own packages."""

    def convert_model(self, model: nn.Module) -> nn.Module:
        return model

    def _wrap_model(self, model: nn.Module) -> nn.Module:
        return model

    def _setup_distributed(self, *args: Any, **kwargs: Any) -> None: ...

    def prepare(self, *args: Any, **kwargs: Any) -> None: ...

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None: ...

    def resume(self, *args: Any, **kwargs: Any) -> None: ...

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> None: ...


@pytest.mark.parametrize('strategy', [Sharding, FSDPStrategy])
def test_strategies_that_shard(strategy: type[Any], device: torch.device) -> None:
    made = strategy.__new__(strategy)
    model = nn.Linear(4, 4).to(device)
    wrapper = amp(model, 'O2')
    with pytest.raises(AmpAttachError, match=f'{strategy.__name__} shards or casts the model itself'):
        made.build_optim_wrapper(wrapper, model)
    assert model.weight.dtype == torch.float32
    if strategy is Sharding:
        with pytest.raises(AmpAttachError, match='not supported yet'):
            made.build_optim_wrapper(dict(type='AmpOptimWrapper', optimizer=SGD), model)
        # others are none of our business
        plain = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1))
        assert made.build_optim_wrapper(plain, model) is plain
    single = SingleDeviceStrategy()
    assert single.build_optim_wrapper(wrapper, model) is wrapper


def test_fsdp_strategy_says_so_in_its_own_words() -> None:
    with pytest.raises(AmpConfigError, match='use_fsdp=True: sharded training is not supported yet'):
        AmpOptimWrapper(optimizer=torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1), use_fsdp=True)
