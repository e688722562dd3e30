"""Every optimizer and odd models go on from what they saved. A run that cannot be resumed is the worst damage."""

from __future__ import annotations

import copy
import io
import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toy
from bits import differences
from mmengine.hooks import EMAHook
from mmengine.registry import MODELS
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler

from amp_wrapper import AmpCheckpointError, AmpOptimWrapper


class Lion(Optimizer):
    """As other libraries write them: no word about foreach, capturable or differentiable."""

    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        super().__init__(params, dict(lr=lr, weight_decay={'a': 1}))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group['params']:
                if p.grad is not None:
                    mean = self.state[p].setdefault('mean', torch.zeros_like(p))
                    p.add_(mean.lerp_(p.grad, 0.1).sign(), alpha=-group['lr'])


class Odd(Lion):
    """Names of torch's with forms of its own, a state that belongs to no parameter, and an attribute that loading needs."""

    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        super().__init__(params, lr)
        self.extra = 1

    def load_state_dict(self, state_dict: Any) -> None:
        assert self.extra == 1
        super().load_state_dict(state_dict)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.state['global'] = {'count': 3}  # type: ignore[index]
        for group in self.param_groups:
            for p in group['params']:
                self.state[p]['exp_avg'] = torch.ones(2, dtype=torch.int8)


class Relative(Optimizer):
    """As Adafactor of transformers and timm: it chooses its own learning rate, and None stands for that."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, dict(lr=None, betas=None, lr_scale=1.0, k=0, eps=(None, 1e-3)))

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group['k'] += 1
            for parameter in group['params']:
                if parameter.grad is not None:
                    # of another shape than torch's state of that name
                    self.state[parameter].update(
                        exp_avg=parameter.grad.mean(-1), RMS=0.5, parts=[parameter.grad.sum()], step=-1
                    )
                    parameter.data.add_(parameter.grad, alpha=-0.01)


def described(params: Any) -> list[dict[str, Any]]:
    """A group for each parameter with what timm and mmengine write beside torch's settings."""
    return [dict(params=[p], lr_scale=0.5, decay_mult=2.0, layer=3, note=None, initial_lr=0.1) for p in params]


t = torch.optim
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    **{
        name: lambda p, name=name: getattr(t, name)(p, lr=0.01)
        for name in ('SGD', 'Adagrad', 'ASGD', 'Rprop', 'Adafactor')
    },
    **{
        name: lambda p, name=name: getattr(t, name)(p, lr=0.01, eps=1e-4)
        for name in ('Adam', 'Adamax', 'NAdam', 'RAdam', 'Adadelta')
    },
    'SGD momentum': lambda p: t.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    'SGD extra keys': lambda p: t.SGD(described(p), lr=0.1, momentum=0.9),
    'Adam tensor lr': lambda p: t.Adam(p, lr=torch.tensor(0.01), eps=1e-4),
    'Adam tensor betas': lambda p: t.Adam(
        p, lr=torch.tensor(0.1), betas=(torch.tensor(0.9), torch.tensor(0.99)), eps=1e-4
    ),
    'Adam amsgrad': lambda p: t.Adam(p, lr=0.01, betas=(0.9, 0.99), eps=1e-4, amsgrad=True),
    'AdamW': lambda p: t.AdamW(p, lr=0.01, eps=1e-4, foreach=False),
    'AdamW fused': lambda p: t.AdamW(p, lr=0.01, eps=1e-4, fused=True),
    'AdamW NumPy numbers': lambda p: t.AdamW(p, lr=np.float64(0.1), weight_decay=np.float32(0.5), eps=1e-4),
    'AdamW named': lambda p: t.AdamW([(f'p{index}', each) for index, each in enumerate(p)], lr=0.01, eps=1e-4),
    'RMSprop': lambda p: t.RMSprop(p, lr=0.01, centered=True, momentum=0.5, eps=1e-4),
    'of others': lambda p: Lion(p, lr=0.01),
    'of others, odd state': lambda p: Odd(p, lr=0.01),
    'of others, chosen rate': lambda p: Relative(p),
}
if hasattr(t, 'Muon'):
    OPTIMIZERS['Muon'] = lambda p: t.Muon([q for q in p if q.dim() == 2], lr=0.01)
#: Need FP32 parameters, or keep nothing that could be compared.
NOT_AT_O3 = ('AdamW fused', 'of others, odd state')


class Net(nn.Module):
    """Frozen parameters and unused ones among the others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.unused, self.frozen, self.two = (nn.Linear(4, 4) for _ in range(4))
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.frozen(self.one(x)).tanh()).square().mean()


def train(model: nn.Module, wrapper: AmpOptimWrapper, steps: int = 1) -> None:
    for index in range(steps):
        with wrapper.optim_context(model):
            loss = model(torch.linspace(-1, 1, 8).reshape(2, 4) + index)
        wrapper.update_params(loss)


def wrapped(level: str, make: Callable[[Any], Optimizer]) -> tuple[Net, AmpOptimWrapper]:
    model = Net()
    return model, AmpOptimWrapper(opt_level=level, optimizer=make(list(model.parameters())), loss_scale=1.0)


def load(model: nn.Module, wrapper: AmpOptimWrapper, again: nn.Module, other: AmpOptimWrapper) -> None:
    """Through a file, into a model and a wrapper that begin."""
    file = io.BytesIO()
    torch.save((model.state_dict(), wrapper.state_dict()), file)
    weights, state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    again.load_state_dict(weights)
    other.load_state_dict(state)


@pytest.mark.parametrize('level', ['O0', 'O2', 'O3', 'O5'])
def test_every_optimizer_goes_on(level: str) -> None:
    found = []
    for name, make in OPTIMIZERS.items():
        if level == 'O3' and name in NOT_AT_O3:
            continue
        (model, wrapper), (again, other) = (wrapped(level, make) for _ in range(2))
        train(model, wrapper, 2)
        load(model, wrapper, again, other)
        for each, its_wrapper in ((model, wrapper), (again, other)):
            train(each, its_wrapper, 2)
        found += differences(dict(model.state_dict()), dict(again.state_dict()), name)
        ends = [{key: each.state_dict()[key] for key in ('state', 'param_groups')} for each in (wrapper, other)]
        found += differences(*ends, name)
    assert found == []


TORCH: dict[str, Callable[[Any], Any]] = {
    'ChainedScheduler': lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)], optimizer=o
    ),
    'CosineAnnealingWarmRestarts': lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2, 2),
    'CyclicLR': lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2, cycle_momentum=True),
    # below 0 at the end, as linear decays are that last too long
    'LambdaLR': lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 - step / 5),
    'OneCycleLR': lambda o: lr_scheduler.OneCycleLR(o, 0.3, total_steps=10),
    'ReduceLROnPlateau': lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, min_lr=1e-4),
    'SWALR': lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=0.01, anneal_epochs=2),
    'SequentialLR': lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1), lr_scheduler.CosineAnnealingLR(o, 4)], [2]
    ),
}


def test_rates_of_torchs_schedulers_go_on() -> None:
    def steps(model: nn.Module, wrapper: AmpOptimWrapper, schedule: Any, count: int) -> list[Any]:
        """What each step leaves in the groups."""
        groups = []
        for _ in range(count):
            train(model, wrapper)
            schedule.step(*([1.0] if isinstance(schedule, lr_scheduler.ReduceLROnPlateau) else []))
            groups.append([dict(group, params=None) for group in wrapper.optimizer.param_groups])
        return groups

    found = []
    for (index, name), point in itertools.product(enumerate(TORCH), (0, 3)):
        make = OPTIMIZERS['AdamW' if name in ('OneCycleLR', 'SWALR') else 'SGD extra keys']
        (model, wrapper), (again, other) = (wrapped(('O2', 'O4')[index % 2], make) for _ in range(2))
        schedule, later = (TORCH[name](each.optimizer) for each in (wrapper, other))
        steps(model, wrapper, schedule, point)
        load(model, wrapper, again, other)
        # what a scheduler saves is its own affair
        later.load_state_dict(copy.deepcopy(schedule.state_dict()))
        ends = steps(model, wrapper, schedule, 3), steps(again, other, later, 3)
        found += differences(*ends, name)
        found += differences(dict(model.state_dict()), dict(again.state_dict()), name)
    assert found == []


def test_files_of_older_torch_lack_settings() -> None:
    for key in ('decoupled_weight_decay', 'capturable', 'fused', 'foreach', 'maximize', 'differentiable'):
        model, wrapper = wrapped('O5', lambda p: t.AdamW([dict(params=[each]) for each in p], lr=0.01))
        train(model, wrapper)
        state = copy.deepcopy(wrapper.state_dict())
        for group in [*state['param_groups'], state['base_param_settings']]:
            group.pop(key, None)
        wrapper.load_state_dict(state)
        train(model, wrapper)
        # the step after the load is the second, not a first one again
        stepped = [int(entry['step']) for entry in wrapper.optimizer.state.values()]
        assert stepped and set(stepped) == {2}, key


def test_what_schedules_leave_in_groups_and_state_is_taken() -> None:
    """A linear decay that lasts too long goes below 0; NumPy's functions give NumPy's numbers."""
    model, wrapper = wrapped('O5', lambda p: t.SGD(p, lr=0.1, momentum=0.9))
    train(model, wrapper)
    for value in (-0.01, 0, np.float32(0.5), np.array(0.5), torch.tensor(-1e-20), 2**40):
        state = copy.deepcopy(wrapper.state_dict())
        state['param_groups'][0].update(lr=value, momentum=value, weight_decay=value)
        wrapper.load_state_dict(state)
        assert float(wrapper.optimizer.param_groups[0]['lr']) == float(value)
    # where momentum has sunk to 0, a parameter that comes into use has no buffer, and needs none
    state = copy.deepcopy(wrapper.state_dict())
    del state['state'][1]['momentum_buffer']
    state['param_groups'][0]['momentum'] = 0.0
    wrapper.load_state_dict(state)
    train(model, wrapper)


def test_state_of_another_optimizer_is_refused() -> None:
    (model, wrapper), (_, other) = wrapped('O5', OPTIMIZERS['SGD momentum']), wrapped('O5', OPTIMIZERS['Adam'])
    train(model, wrapper)
    with pytest.raises(AmpCheckpointError, match='it was not saved by'):
        other.load_state_dict(wrapper.state_dict())


# -- models -----------------------------------------------------------------------------------------------------------

WRAPPER = dict(type='AmpOptimWrapper', opt_level='O5', optimizer=dict(type='SGD', lr=0.1))


@MODELS.register_module()
class OddModel(toy.ToyModel):
    """A list whose name begins as that of a wrapped model, and buffers of several forms."""

    def __init__(self) -> None:
        super().__init__()
        self.module_list = nn.ModuleList([nn.Linear(3, 3)])
        self.register_buffer('adjacency', torch.eye(3))
        self.register_buffer('expanded', torch.ones(1).expand(4))
        self.register_buffer('number', torch.tensor(1.0))

    def forward(self, inputs: Tensor, labels: Tensor | None = None, mode: str = 'tensor') -> Any:
        result = super().forward(inputs, labels, mode)
        if mode == 'loss':
            result['extra_loss'] = self.module_list[0](torch.ones(1, 3)).square().mean()
        return result


def test_names_and_forms_of_weights_that_torch_or_mmengine_converts(tmp_path: Path) -> None:
    """mmengine takes the seven letters ``module_`` from ``module_list.0.weight``, and the weight is lost.

    torch converts buffers of another type, a number in a list of one, and BatchNorms from before they counted batches.
    """
    case = dict(model=dict(type='OddModel'), train_dataloader=toy.loader(length=4))
    toy.run(tmp_path, dict(WRAPPER), **case)
    runner = toy.run(tmp_path, dict(WRAPPER), resume=True, **case)
    file = toy.checkpoint(tmp_path)
    assert differences(dict(runner.model.state_dict()), dict(file['state_dict'])) == []
    state = dict(file['state_dict'])
    del state['bn.num_batches_tracked']
    state.update(adjacency=state['adjacency'].double(), number=torch.ones(1))
    torch.save({**file, 'state_dict': state}, tmp_path / 'old.pth')
    runner = toy.run(tmp_path / 'b', dict(WRAPPER), resume=True, load_from=str(tmp_path / 'old.pth'), **case)
    assert differences(runner.model.state_dict()['conv.weight'], state['conv.weight']) == []


@MODELS.register_module()
class NamedToy(toy.ToyModel):
    """The toy with a wrapper inside, and with a real submodule called ``module`` in that wrapper."""

    def __init__(self, wrapped: bool) -> None:
        super().__init__()
        self.fc = nn.Sequential()
        self.fc.module = nn.Linear(4, 3)
        if wrapped:
            self.fc = nn.DataParallel(self.fc)


def plain(state: dict[str, Any]) -> dict[str, Any]:
    return {key.replace('fc.module.module', 'fc.module'): value for key, value in state.items()}


@pytest.mark.parametrize(('first', 'second'), [(False, True), (True, False), (True, True)])
def test_files_fit_models_with_and_without_wrappers_inside(first: bool, second: bool, tmp_path: Path) -> None:
    """One DDP for each child is usual in GANs. Names in files are plain."""

    def run(folder: str, wrapper: dict[str, Any], wrapped: bool, **words: Any) -> Any:
        hooks, train_cfg = [dict(type='EMAHook', momentum=0.3)], dict(by_epoch=True, max_epochs=1, val_interval=1)
        model = dict(type='NamedToy', wrapped=wrapped)
        words |= dict(model=model, custom_hooks=hooks, train_cfg=train_cfg, train_dataloader=toy.loader(length=4))
        return toy.run(tmp_path / folder, wrapper, **words)

    wrapper = {**WRAPPER, 'opt_level': 'O2'}
    runner = run('first', wrapper, first)
    saved = toy.checkpoint(tmp_path / 'first')
    assert 'fc.module.weight' in saved['state_dict'] and 'fc.module.module.weight' not in saved['state_dict']
    path = str(tmp_path / 'first' / 'epoch_1.pth')
    # no further iteration: what is there is what was loaded
    again = run('second', wrapper, second, load_from=path, resume=True)
    assert differences(plain(again.model.state_dict()), plain(runner.model.state_dict())) == []
    means = [hook.ema_model.module for each in (runner, again) for hook in each.hooks if isinstance(hook, EMAHook)]
    assert differences(*(plain(mean.state_dict()) for mean in means)) == []
    # weights alone
    still = {**wrapper, 'optimizer': dict(type='SGD', lr=0.0)}
    loaded = plain(run('third', still, second, load_from=path).model.state_dict())
    assert differences(loaded['fc.module.weight'], saved['state_dict']['fc.module.weight']) == []
