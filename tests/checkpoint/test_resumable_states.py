"""Good files are taken: every optimizer, every scheduler, odd models. A run that cannot go on is the worst damage."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from bits import differences
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_wrapper import AmpCheckpointError, AmpOptimWrapper
from amp_wrapper.checkpoint import validate

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    'SGD': lambda p: torch.optim.SGD(p, lr=0.1),
    'SGD momentum': lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    'Adam': lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-4),
    'Adam tensor lr': lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), eps=1e-4),
    'Adam tensor betas': lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.9, 0.99), eps=1e-4, amsgrad=True),
    'AdamW': lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-4, foreach=False),
    'AdamW fused': lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-4, fused=True),
    'Adamax': lambda p: torch.optim.Adamax(p, lr=0.01, eps=1e-4),
    'NAdam': lambda p: torch.optim.NAdam(p, lr=0.01, eps=1e-4),
    'RAdam': lambda p: torch.optim.RAdam(p, lr=0.01, eps=1e-4),
    'RMSprop': lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5, eps=1e-4),
    'Adagrad': lambda p: torch.optim.Adagrad(p, lr=0.01),
    'Adadelta': lambda p: torch.optim.Adadelta(p, eps=1e-4),
    'ASGD': lambda p: torch.optim.ASGD(p, lr=0.01),
    'Rprop': lambda p: torch.optim.Rprop(p, lr=0.01),
    'Adafactor': lambda p: torch.optim.Adafactor(p, lr=0.01),
    'of others': lambda p: Lion(p, lr=0.01),
    'of others, with attributes': lambda p: Lookahead(p, lr=0.01),
    'of others, odd state': lambda p: Odd(p, lr=0.01),
}
if hasattr(torch.optim, 'Muon'):
    OPTIMIZERS['Muon'] = lambda p: torch.optim.Muon([q for q in p if q.dim() == 2], lr=0.01)


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


class Lookahead(Lion):
    """Its ``load_state_dict`` needs what only its constructor makes."""

    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        super().__init__(params, lr)
        self.extra = 1

    def load_state_dict(self, state_dict: Any) -> None:
        assert self.extra == 1
        super().load_state_dict(state_dict)


class Odd(Lion):
    """Names of torch's with forms of its own, and a state that belongs to no parameter."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.state['global'] = {'count': 3}  # type: ignore[index]
        for group in self.param_groups:
            for p in group['params']:
                self.state[p]['exp_avg'] = torch.ones(2, dtype=torch.int8)


class Net(nn.Module):
    """Frozen parameters and unused ones among the others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.unused, self.frozen, self.two = (nn.Linear(4, 4) for _ in range(4))
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.frozen(self.one(x)).tanh()).square().mean()


def train(model: nn.Module, wrapper: AmpOptimWrapper, steps: int) -> None:
    for index in range(steps):
        with wrapper.optim_context(model):
            loss = model(torch.linspace(-1, 1, 8).reshape(2, 4) + index)
        wrapper.update_params(loss)


@pytest.mark.parametrize('name', OPTIMIZERS)
@pytest.mark.parametrize('level', ['O0', 'O2', 'O3', 'O5'])
def test_every_optimizer_goes_on(level: str, name: str) -> None:
    if level == 'O3' and name in ('AdamW fused', 'of others, odd state'):
        pytest.skip('needs FP32 parameters, or keeps nothing that could be compared')
    first = Net()
    wrapper = AmpOptimWrapper(opt_level=level, optimizer=OPTIMIZERS[name](list(first.parameters())), loss_scale=1.0)
    train(first, wrapper, 2)
    defaults = copy.deepcopy(wrapper.optimizer.defaults)
    file = io.BytesIO()
    torch.save((first.state_dict(), wrapper.state_dict()), file)
    train(first, wrapper, 2)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)

    second = Net()
    second.load_state_dict(weights)
    again = AmpOptimWrapper(opt_level=level, optimizer=OPTIMIZERS[name](list(second.parameters())), loss_scale=1.0)
    again.check_state_dict(state)
    # judging leaves no trace
    assert again.optimizer.defaults.keys() <= defaults.keys()
    again.load_state_dict(state)
    train(second, again, 2)
    assert differences(dict(first.state_dict()), dict(second.state_dict())) == []


@pytest.mark.parametrize(
    'key', ['decoupled_weight_decay', 'capturable', 'fused', 'foreach', 'maximize', 'differentiable']
)
def test_files_of_older_torch_lack_settings(key: str) -> None:
    model = Net()
    groups = [dict(params=[p]) for p in model.parameters()]
    wrapper = AmpOptimWrapper(opt_level='O5', optimizer=torch.optim.AdamW(groups, lr=0.01))
    train(model, wrapper, 1)
    state = copy.deepcopy(wrapper.state_dict())
    for group in [*state['param_groups'], state['base_param_settings']]:
        group.pop(key, None)
    wrapper.load_state_dict(state)
    train(model, wrapper, 1)
    # the step after the load is the second, not a first one again
    stepped = [entry['step'] for entry in wrapper.optimizer.state.values()]
    assert stepped and all(int(count) == 2 for count in stepped)


def test_schedulers_of_older_mmengine_lack_words(tmp_path: Path) -> None:
    wrapper = dict(type='AmpOptimWrapper', opt_level='O5', optimizer=dict(type='SGD', lr=0.1))
    case = dict(param_scheduler=[dict(type='CosineAnnealingLR', T_max=4)])
    toy.run(tmp_path, copy.deepcopy(wrapper), **case)
    file = torch.load(tmp_path / 'epoch_2.pth', weights_only=True)
    del file['param_schedulers'][0]['verbose'], file['param_schedulers'][0]['eta_min_ratio']
    torch.save(file, tmp_path / 'old.pth')
    longer = dict(train_cfg=dict(by_epoch=True, max_epochs=3, val_interval=1))
    runner = toy.run(tmp_path / 'b', wrapper, resume=True, load_from=str(tmp_path / 'old.pth'), **case, **longer)
    assert runner.epoch == 3


def test_models_may_differ_in_what_torch_converts() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    model.register_buffer('prototypes', None)
    model.register_buffer('index', torch.arange(3))
    model.register_buffer('number', torch.tensor(1.0))
    state = dict(model.state_dict(), prototypes=torch.ones(2), number=torch.ones(1))
    state['index'] = state['index'].int()
    del state['0.num_batches_tracked']
    validate.check_model(state, model)
    validate.check_model({f'module.{key}': value for key, value in state.items()}, model)
    for odd in (torch.ones(2, 2).to_sparse(), torch.ones(2, 2, device='meta'), torch.ones(1).expand(2, 2)):
        with pytest.raises(AmpCheckpointError, match='is no plain tensor'):
            validate.check_model({**state, '1.weight': odd}, model)


@pytest.mark.parametrize('train_with', [toy.run, toy.run_flexible])
def test_a_name_that_begins_like_a_wrappers_is_loaded(tmp_path: Path, train_with: Callable[..., Any]) -> None:
    """mmengine takes the seven letters ``module_`` from ``module_list.0.weight``, and the weight is lost."""

    @toy.MODELS.register_module(force=True)
    class ListModel(toy.ToyModel):
        def __init__(self) -> None:
            super().__init__()
            self.module_list = nn.ModuleList([nn.Linear(3, 3)])

        def forward(self, inputs: Tensor, labels: Tensor | None = None, mode: str = 'tensor') -> Any:
            result = super().forward(inputs, labels, mode)
            if mode == 'loss':
                result['extra_loss'] = self.module_list[0](torch.ones(1, 3)).square().mean()
            return result

    wrapper = dict(type='AmpOptimWrapper', opt_level='O5', optimizer=dict(type='SGD', lr=0.1))
    case = dict(model=dict(type='ListModel'))
    train_with(tmp_path, copy.deepcopy(wrapper), **case)
    runner = train_with(tmp_path, wrapper, resume=True, **case)
    saved = torch.load(tmp_path / 'epoch_2.pth', weights_only=True)['state_dict']
    assert torch.equal(runner.model.state_dict()['module_list.0.weight'], saved['module_list.0.weight'])


def test_a_file_that_cannot_be_read_back_is_told_when_it_is_saved(tmp_path: Path) -> None:
    from amp_wrapper.openmmlab.patches import saving

    class Secret:
        pass

    saving._warned = False
    wrapper = dict(type='AmpOptimWrapper', opt_level='O5', optimizer=dict(type='SGD', lr=0.1))
    toy.ToyData.METAINFO['secret'] = Path  # type: ignore[assignment]
    try:
        with toy.run_log() as lines:
            toy.run(tmp_path, wrapper)
    finally:
        del toy.ToyData.METAINFO['secret']
        saving._warned = False
    said = [line for line in lines if 'cannot be resumed from' in line]
    assert len(said) == 1 and 'asks for code to run' in said[0]
