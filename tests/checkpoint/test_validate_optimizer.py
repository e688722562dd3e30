"""What optimizers, schedulers and models really save is taken; the same places hold damage that is not."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toy
from bits import differences
from mmengine.optim import OptimWrapper
from mmengine.registry import PARAM_SCHEDULERS
from torch import Tensor, nn

from amp_wrapper import AmpCheckpointError, AmpOptimWrapper
from amp_wrapper.checkpoint import validate, validate_optimizer


class Relative(torch.optim.Optimizer):
    """As Adafactor of transformers and timm: it chooses its own learning rate, and None stands for that."""

    def __init__(self, params: Any, lr: float | None = None) -> None:
        defaults = dict(
            lr=lr, betas=None, beta1=None, lr_scale=1.0, train_mode=True, k=0, weight_sum=0.0, eps=(None, 1e-3)
        )
        super().__init__(params, defaults)

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group['k'] += 1
            for parameter in group['params']:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    # of another shape than torch's state of that name
                    state.update(exp_avg=parameter.grad.mean(-1), RMS=0.5, parts=[parameter.grad.sum()], step=-1)
                    parameter.data.add_(parameter.grad, alpha=-0.01)


def wrapper_of(make: Callable[[Any], torch.optim.Optimizer]) -> tuple[nn.Module, AmpOptimWrapper]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    wrapper = AmpOptimWrapper(opt_level='O5', optimizer=make(list(model.named_parameters())))
    wrapper.initialize_count_status(model, 0, 10)
    return model, wrapper


def train(model: nn.Module, wrapper: AmpOptimWrapper, steps: int = 2) -> None:
    for step in range(steps):
        batch = torch.randn(8, 3, generator=torch.Generator().manual_seed(step))
        with wrapper.optim_context(model):
            loss = model(batch).float().square().mean()
        wrapper.update_params(loss)


def plain(named: Any) -> list[nn.Parameter]:
    return [parameter for _, parameter in named]


def described(named: Any) -> list[dict[str, Any]]:
    """A group for each parameter with what timm and mmengine write beside torch's settings."""
    return [dict(params=[p], lr_scale=0.5, decay_mult=2.0, layer=3, note=None, initial_lr=0.1) for p in plain(named)]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    'chosen learning rate': lambda named: Relative(plain(named)),
    'names of parameters': lambda named: torch.optim.AdamW(named, lr=0.1),
    'extra keys': lambda named: torch.optim.SGD(described(named), lr=0.1, momentum=0.9),
    'tensor': lambda named: torch.optim.Adam(plain(named), lr=torch.tensor(0.1)),
    'tensor of one element': lambda named: torch.optim.SGD(plain(named), lr=torch.tensor([0.1])),
    'torchs Adafactor': lambda named: torch.optim.Adafactor(plain(named)),
    'NumPy number': lambda named: torch.optim.AdamW(plain(named), lr=np.float64(0.1), weight_decay=np.float32(0.5)),
    'betas in tensors': lambda named: torch.optim.AdamW(
        plain(named), lr=torch.tensor(0.1), betas=(torch.tensor(0.9), torch.tensor(0.99)), capturable=False
    ),
}  # fmt: skip


@pytest.mark.parametrize('kind', list(OPTIMIZERS))
@pytest.mark.parametrize('steps', [0, 2])
def test_states_of_optimizers_come_back(kind: str, steps: int, tmp_path: Path) -> None:
    if steps and kind == 'tensor of one element':
        weight = nn.Parameter(torch.ones(1))
        weight.grad = torch.ones(1)
        try:
            OPTIMIZERS[kind]([('weight', weight)]).step()
        except TypeError:
            pytest.skip(f'SGD of torch {torch.__version__} steps with no such learning rate')
    model, wrapper = wrapper_of(OPTIMIZERS[kind])
    train(model, wrapper, steps)
    torch.save(wrapper.state_dict(), tmp_path / 'file.pth')
    state = torch.load(tmp_path / 'file.pth', weights_only=True)
    _, again = wrapper_of(OPTIMIZERS[kind])
    again.load_state_dict(state)
    assert differences(again.state_dict()['param_groups'], wrapper.state_dict()['param_groups']) == []
    assert differences(again.state_dict()['state'], wrapper.state_dict()['state']) == []


def test_a_learning_rate_that_is_chosen_here_only_or_there_only_is_told_apart() -> None:
    _, wrapper = wrapper_of(lambda named: Relative(plain(named), lr=0.1))
    state = copy.deepcopy(wrapper.state_dict())
    for wrong in (None, '0.1', [0.1], math.nan):
        state['param_groups'][0]['lr'] = wrong
        with pytest.raises(AmpCheckpointError, match=r"'param_groups'\[0\]\['lr'\]=.* must be a number"):
            wrapper.check_state_dict(state)


@pytest.mark.parametrize('value', [-0.01, 0, np.float32(0.5), np.array(0.5), torch.tensor(-1e-20), 2**40])
def test_learning_rates_of_any_schedule(value: Any) -> None:
    """A linear decay that lasts too long goes below 0; NumPy's functions give NumPy's numbers."""
    model, wrapper = wrapper_of(lambda named: torch.optim.SGD(plain(named), lr=0.1, momentum=0.9))
    train(model, wrapper)
    state = copy.deepcopy(wrapper.state_dict())
    for key in ('lr', 'momentum', 'weight_decay'):
        state['param_groups'][0][key] = value
    wrapper.check_state_dict(state)


def test_a_state_that_a_schedule_turned_off() -> None:
    """Momentum of RMSprop that sank to 0: a parameter that comes into use afterwards has no buffer, and needs none."""
    model, wrapper = wrapper_of(lambda named: torch.optim.RMSprop(plain(named), lr=0.1, momentum=0.9))
    train(model, wrapper)
    state = copy.deepcopy(wrapper.state_dict())
    del state['state'][1]['momentum_buffer']
    with pytest.raises(AmpCheckpointError, match=r"'state'\[1\] lacks 'momentum_buffer'"):
        wrapper.check_state_dict(state)
    state['param_groups'][0]['momentum'] = 0.0
    wrapper.check_state_dict(state)


# -- schedulers: what a score, a bound or a range may be -----------------------------------------------------------------


def built(**words: Any) -> Any:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
    return PARAM_SCHEDULERS.build(dict(words, optimizer=OptimWrapper(optimizer)))


PLATEAU = dict(type='ReduceOnPlateauLR', monitor='loss')
TAKEN: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (PLATEAU, dict(best=math.inf)),
    (PLATEAU, dict(best=-math.inf, last_step=-1)),
    (PLATEAU, dict(best=np.float32(0.5), patience=math.inf)),
    (PLATEAU, dict(best=torch.tensor(0.5), min_values=[0.0])),
    (dict(type='CosineAnnealingLR', T_max=5), dict(eta_min=None, eta_min_ratio=0.1)),
    (dict(type='CosineAnnealingLR', T_max=5), dict(last_step=-1, begin=0.5, end=math.inf, T_max=2.5)),
    (dict(type='CosineAnnealingLR', eta_min_ratio=0.1, T_max=5), dict(eta_min=0.0, eta_min_ratio=None)),
    (dict(type='LinearLR', begin=3, end=5), dict(_last_value=[np.float64(0.1)], base_values=[torch.tensor(0.1)])),
    (dict(type='StepLR', step_size=2), dict(last_step=np.int64(3), _global_step=np.int64(3), begin=-1)),
    (dict(type='StepLR', step_size=2, verbose=None), dict(verbose=False)),
    (dict(type='PolyLR', end=10**10), dict(end=10**12, total_iters=10**12 - 1)),
]
DAMAGED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (PLATEAU, dict(best='high'), 'a number'),
    (PLATEAU, dict(best=math.nan), 'a number'),
    (PLATEAU, dict(rule=1), 'a name'),
    (PLATEAU, dict(min_values=0.0), 'a list'),
    (PLATEAU, dict(factor=math.inf), 'a number'),
    (dict(type='MultiStepLR', milestones=[1]), dict(milestones=[1]), 'a dict'),
    (dict(type='OneCycleLR', eta_max=0.1, total_steps=9), dict(anneal_func='cos'), 'a function'),
    (dict(type='CosineAnnealingLR', T_max=5), dict(eta_min_ratio='x'), 'a number or None'),
    (dict(type='CosineAnnealingLR', T_max=5), dict(T_max=0), 'a number other than 0'),
    (dict(type='StepLR', step_size=2), dict(last_step=-2), 'a whole number of at least -1'),
    (dict(type='StepLR', step_size=2), dict(last_step=math.inf), 'a whole number of at least -1'),
    (dict(type='StepLR', step_size=2), dict(last_step=True), 'a whole number of at least -1'),
    (dict(type='StepLR', step_size=2), dict(begin='0'), 'a number'),
    (dict(type='StepLR', step_size=2), dict(end=10**400), 'a number'),
    (dict(type='StepLR', step_size=2), dict(base_values=[None]), 'a list of 1 numbers'),
]


@pytest.mark.parametrize(('words', 'values'), TAKEN)
def test_values_that_schedulers_have(words: dict[str, Any], values: dict[str, Any]) -> None:
    scheduler = built(**words)
    assert set(values) <= set(scheduler.state_dict())
    validate_optimizer.check_schedulers([dict(scheduler.state_dict(), **values)], [scheduler])


@pytest.mark.parametrize(('words', 'values', 'expected'), DAMAGED)
def test_values_that_no_scheduler_has(words: dict[str, Any], values: dict[str, Any], expected: str) -> None:
    scheduler, (key,) = built(**words), values
    with pytest.raises(AmpCheckpointError, match=rf"param_schedulers\[0\]\['{key}'\]=.* must be {expected}\.$"):
        validate_optimizer.check_schedulers([dict(scheduler.state_dict(), **values)], [scheduler])


# -- models ------------------------------------------------------------------------------------------------------------


def test_buffers_are_saved_as_the_model_has_them() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer('adjacency', torch.eye(3).to_sparse())
    model.register_buffer('expanded', torch.ones(1).expand(4))
    validate.check_model(model.state_dict(), model)
    with pytest.raises(AmpCheckpointError, match='is no plain tensor'):
        validate.check_model(dict(model.state_dict(), weight=torch.eye(2).to_sparse()), model)


class Lean(nn.Module):
    """Saves only what is trained, under a signature of its own: mmengine writes all of it, scripts a part."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.head = nn.Linear(2, 2), nn.Linear(2, 2)

    def state_dict(self) -> dict[str, Tensor]:  # type: ignore[override]
        return {f'head.{key}': value for key, value in self.head.state_dict().items()}


class Trimmed(nn.Linear):
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        del destination[prefix + 'bias']


def test_models_that_save_in_their_own_way_are_left_to_themselves() -> None:
    lean = Lean()
    validate.check_model(nn.Module.state_dict(lean), lean)
    validate.check_model(lean.state_dict(), lean)
    mixed = nn.Sequential(Trimmed(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))

    def trim(module: nn.Module, state: dict[str, Tensor], prefix: str, _: Any) -> None:
        del state[prefix + 'bias']

    mixed[1].register_state_dict_post_hook(trim)
    whole = dict(mixed.state_dict())
    # as a file of a writer that knows of neither
    validate.check_model({**whole, '0.bias': torch.zeros(2), '1.bias': torch.zeros(2)}, mixed)
    del whole['2.bias']
    with pytest.raises(AmpCheckpointError, match=r"lacks '2\.bias'"):
        validate.check_model(whole, mixed)


def test_a_file_without_optimizer_where_none_is_wanted(tmp_path: Path) -> None:
    ours = dict(type='AmpOptimWrapper', opt_level='O5', optimizer=dict(type='SGD', lr=0.1))
    hooks = dict(checkpoint=dict(type='CheckpointHook', interval=1, save_optimizer=False))
    runner = toy.run(tmp_path, copy.deepcopy(ours), default_hooks=hooks)
    path = str(tmp_path / 'epoch_1.pth')
    with pytest.raises(AmpCheckpointError, match="no key 'optimizer'"):
        runner.resume(path)
    runner.resume(path, resume_optimizer=False)
    assert runner.epoch == 1
