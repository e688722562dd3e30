"""What a later issue will bring is refused until then: typed, with what to do, and before anything is changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mmengine._strategy import BaseStrategy, SingleDeviceStrategy
from mmengine._strategy.fsdp import FSDPStrategy
from mmengine.optim import OptimWrapper
from torch import nn

from amp_wrapper import AmpAttachError, AmpConfigError, AmpOptimWrapper

SGD = dict(type='SGD', lr=0.1)


def amp(model: nn.Module, level: str) -> AmpOptimWrapper:
    return AmpOptimWrapper(opt_level=level, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


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
        with pytest.raises(AmpAttachError, match='FullyShardStrategy'):
            made.build_optim_wrapper(dict(type='AmpOptimWrapper', optimizer=SGD), model)
        # others are none of our business
        plain = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1))
        assert made.build_optim_wrapper(plain, model) is plain
    single = SingleDeviceStrategy()
    assert single.build_optim_wrapper(wrapper, model) is wrapper


def test_fsdp_strategy_says_so_in_its_own_words() -> None:
    with pytest.raises(AmpConfigError, match=r"use_fsdp=True is for FSDP's first version.*MMFullyShard"):
        AmpOptimWrapper(optimizer=torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1), use_fsdp=True)
