"""What ``amp-wrapper test`` says of a checkpoint that does not fit the model."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mmengine.runner.checkpoint import load_state_dict
from torch import Tensor, nn

from amp_wrapper.openmmlab.testing import _Fit


class Positions(nn.Module):
    """Resizes what it is given, as vision transformers do."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(size))
        self._register_load_state_dict_pre_hook(self._resize)

    def _resize(self, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
        name = f'{prefix}table'
        if name in state and state[name].shape != self.table.shape:
            state[name] = nn.functional.interpolate(state[name][None, None], len(self.table))[0, 0]


def net(size: int = 4, width: int = 3) -> nn.Module:
    linear = nn.utils.parametrizations.weight_norm(nn.Linear(2, width))
    return nn.Sequential(linear, nn.BatchNorm1d(width), Positions(size))


def old_weight_norm(state: dict[str, Tensor]) -> None:
    for index, name in enumerate(('weight_g', 'weight_v')):
        state[f'0.{name}'] = state.pop(f'0.parametrizations.weight.original{index}')


def without_batches(state: dict[str, Tensor]) -> None:
    del state['1.num_batches_tracked']


def batches_in_a_list(state: dict[str, Tensor]) -> None:
    state['1.num_batches_tracked'] = torch.ones(1, dtype=torch.int64)


def of_ddp(state: dict[str, Tensor]) -> None:
    for name in list(state):
        state[f'module.{name}'] = state.pop(name)


def unchanged(state: dict[str, Tensor]) -> None:
    """As it was saved."""


def without_bias(state: dict[str, Tensor]) -> None:
    del state['0.bias']


@pytest.mark.parametrize('wraps', [False, True])
@pytest.mark.parametrize('bare', [False, True])
@pytest.mark.parametrize(
    ('change', 'model', 'others'),
    [
        (unchanged, {}, []),
        (old_weight_norm, {}, []),
        (without_batches, {}, []),
        (batches_in_a_list, {}, []),
        (of_ddp, {}, []),
        (unchanged, {'size': 6}, []),
        (without_bias, {}, ['0.bias']),
        (unchanged, {'width': 5}, ['0.bias', '0.parametrizations.weight.original0', '0.parametrizations.weight.original1',
                                   '1.weight', '1.bias', '1.running_mean', '1.running_var']),
    ],
)  # fmt: skip
def test_what_a_checkpoint_lacks(
    change: Callable[[dict[str, Tensor]], None], model: dict[str, int], others: list[str], bare: bool, wraps: bool
) -> None:
    """Only what mmengine and torch really left as it was; not what modules rename, resize or fill in by themselves."""
    state = dict(net().state_dict())
    change(state)
    own = net(**model)
    runner = SimpleNamespace(model=nn.DataParallel(own) if wraps else own)
    fit = _Fit()
    fit.after_load_checkpoint(runner, state if bare else {'state_dict': state})
    load_state_dict(own, {name.removeprefix('module.'): value for name, value in state.items()}, strict=False)
    fit.before_test(runner)
    assert fit.others == others
    assert fit.count == len(own.state_dict())
