"""Files hold FP32 values under plain names, and loads take them up unrounded; what only split masters have."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from bits import differences, same_bits
from mmengine.hooks import EMAHook
from mmengine.model import ExponentialMovingAverage
from mmengine.runner.checkpoint import load_state_dict
from pairs import pairs
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from toy_training import CAST, LEVELS, MASTERED, Training

from amp_wrapper import AmpAttachError, AmpOptimWrapper, FusedSGD, amp

F32 = torch.float32
DOORS = ('amp', 'wrapper')


def network() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), weight_norm(nn.Linear(4, 3)))
    model[0].register_buffer('mean', torch.tensor([0.1, 0.2]))
    return model


@pairs(level=LEVELS, door=DOORS, prefix=('', 'model.'))
def test_state_dict_is_that_of_the_fp32_model(level: str, door: str, prefix: str) -> None:
    model = network()
    before = copy.deepcopy(model.state_dict(prefix=prefix))
    Training(level, door, model=model)
    saved, variables = model.state_dict(prefix=prefix), model.state_dict(keep_vars=True)
    assert list(saved) == list(before) and not any(value.requires_grad for value in saved.values())
    for name, value in before.items():
        # buffers have no masters, and at O3 weights have none; what a weight is computed from stays FP32
        is_rounded = value.dtype is F32 and level in CAST and ('0.mean' in name or level == 'O3')
        is_rounded = is_rounded and 'original' not in name
        assert same_bits(saved[name], value.to(CAST[level]).float() if is_rounded else value), name
    assert all(variables[name] is p for name, p in (*model.named_parameters(), *model.named_buffers()))


LOADERS: dict[str, Any] = {
    'load': lambda module, state: module.load_state_dict(state),
    'assign': lambda module, state: module.load_state_dict(state, assign=True),
    'mmengine': lambda module, state: load_state_dict(module, state, strict=True),
}


@pairs(level=CAST, loader=LOADERS, where=('', '0', '1'), source=(F32, torch.float16))
def test_load_reaches_the_fp32_values(level: str, loader: str, where: str, source: torch.dtype) -> None:
    model = network()
    Training(level, model=model)
    module, objects = model.get_submodule(where), list(model.parameters())
    tensors = dict((*module.named_parameters(), *module.named_buffers()))
    types = {name: tensor.dtype for name, tensor in tensors.items()}
    state = {
        name: torch.randn_like(value).to(source) if value.is_floating_point() else value + 3
        for name, value in module.state_dict().items()
    }
    given = copy.deepcopy(state)
    LOADERS[loader](module, state)
    assert all(now is then for now, then in zip(model.parameters(), objects, strict=True))
    saved = module.state_dict()
    for name, value in given.items():
        assert tensors[name].dtype is types[name] and torch.equal(tensors[name], value.to(types[name]))
        is_rounded = level == 'O3' or not isinstance(tensors[name], nn.Parameter)
        assert same_bits(saved[name], value.to(types[name] if is_rounded else F32).to(saved[name].dtype)), name
    for parameter in objects:
        parameter.data.fill_(9.0)
    assert differences(state, given) == []


class Transposed(nn.Linear):
    """Reads weights of another layout."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        state_dict = {**state_dict, f'{prefix}weight': state_dict[f'{prefix}weight'].t()}
        super()._load_from_state_dict(state_dict, prefix, *args)


@pytest.mark.parametrize('level', MASTERED)
def test_loader_of_its_own_wins_over_an_earlier_edit_of_the_master(level: str) -> None:
    model = nn.Sequential(Transposed(2, 2))
    model, optimizer = amp.initialize(model, FusedSGD(model.parameters(), lr=0.1), opt_level=level, verbosity=0)
    given = {'0.weight': torch.tensor([[1.0, 2.0], [3.0, 4.0]]), '0.bias': torch.zeros(2)}
    with torch.no_grad():
        next(amp.master_params(optimizer)).mul_(0.5)
    model.load_state_dict(given)
    assert torch.equal(model.state_dict()['0.weight'], given['0.weight'].t())


@pytest.mark.parametrize('level', MASTERED)
def test_hidden_edit_is_saved_with_one_warning(level: str, log: list[str]) -> None:
    run = Training(level, model=network(), verbosity=1)
    weight, exact = run.model[0].weight, run.model.state_dict()['0.weight'].clone()
    weight.data.clamp_(-0.1, 0.1)
    expected = torch.where(weight == exact.to(weight.dtype), exact, weight.float())
    for _ in range(2):
        assert torch.equal(run.model.state_dict()['0.weight'], expected)
    (line,) = [line for line in log if line.startswith('WARNING')]
    assert '0.weight was changed' in line and 'too small for 16-bit' in line and 'keep_fp32' in line


# -- models of Hugging Face --------------------------------------------------------------------------------------------------


class Config:
    """As that of transformers: its attributes are the file."""

    def save_pretrained(self, folder: str) -> None:
        Path(folder, 'config.json').write_text(json.dumps(vars(self)))


class PreTrained(nn.Linear):
    """The order of transformers: the type from the parameters, the config, then the state dict."""

    def __init__(self, name: str) -> None:
        super().__init__(2, 2)
        self.config, self.name = Config(), name
        setattr(self.config, name, None)

    def save_pretrained(self, folder: str, is_main_process: bool = True, state_dict: Any = None) -> None:
        setattr(self.config, self.name, str(self.weight.dtype).removeprefix('torch.'))
        self.config.save_pretrained(folder)
        torch.save(self.state_dict() if state_dict is None else state_dict, Path(folder, 'model'))


@pairs(level=LEVELS, door=DOORS, name=('dtype', 'torch_dtype'))
def test_config_that_save_pretrained_writes_has_the_type_of_the_file(
    level: str, door: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base: Any = type('PreTrainedModel', (PreTrained,), {'save_pretrained': PreTrained.save_pretrained})
    library: Any = ModuleType('transformers.modeling_utils')
    library.PreTrainedModel = base
    monkeypatch.setitem(sys.modules, 'transformers.modeling_utils', library)

    def saved(model: Any, **words: Any) -> list[Any]:
        model.save_pretrained(str(tmp_path), **words)
        state: dict[str, Tensor] = torch.load(tmp_path / 'model', weights_only=True)
        return [json.loads((tmp_path / 'config.json').read_text())[name], *{value.dtype for value in state.values()}]

    model = base(name)
    # inside of another module, as in a detector
    Training(level, door, model=nn.Sequential(model))
    assert saved(model) == ['float32', F32]
    assert saved(model, state_dict=dict(model.state_dict())) == ['float32', F32]
    assert saved(base(name).bfloat16()) == ['bfloat16', torch.bfloat16]


# -- split masters -----------------------------------------------------------------------------------------------------------


def split(model: nn.Module, level: str) -> AmpOptimWrapper:
    optimizer = FusedSGD(model.parameters(), lr=0.5, momentum=0.5)
    return AmpOptimWrapper(opt_level=level, optimizer=optimizer, master_weights='split', loss_scale=1.0, verbosity=0)


@pytest.mark.parametrize('level', MASTERED)
def test_split_values_are_saved_detached_and_averaged_exactly(level: str) -> None:
    # ties of bfloat16 and numbers around them, and the ends of what a remainder of float16 holds
    values = torch.tensor([1.0, 1 + 2.0**-8, 1 + 2.0**-8 + 2.0**-23, 2.0**-16, 65519.996, torch.inf, 1 / 3, 0.0])
    values = torch.cat([values, -values, torch.rand(1000)])
    model = nn.Sequential(nn.Linear(1, 1))
    weight = model[0].weight = nn.Parameter(values.clone())
    wrapper = split(model, level)
    for _ in range(2):
        wrapper.attach(model)
        model.share_memory()
        assert weight.dtype is CAST[level] and wrapper.optimizer.param_groups[0]['params'][0] is weight
        for found in (model.state_dict()['0.weight'], copy.deepcopy(model)[0].weight):
            assert same_bits(found.detach(), values)
        assert same_bits(ExponentialMovingAverage(model).module[0].weight.detach(), values)
        wrapper.detach()
        assert model[0].weight is weight and same_bits(weight.detach(), values)
    wrapper.attach(model)
    # a tie is rounded away from zero in bfloat16, to even in float16
    ties = torch.tensor([1.0 + 2.0**-8, -1.0 - 2.0**-8]).repeat(len(values))[: len(values)]
    model.load_state_dict({'0.weight': ties}, strict=False)
    assert same_bits(model.state_dict()['0.weight'], ties)
    assert level == 'O2' or weight[:2].tolist() == [1 + 2.0**-7, -1 - 2.0**-7]


@pytest.mark.parametrize('level', MASTERED)
def test_validation_with_an_average_restores_every_bit_of_split_weights(level: str) -> None:
    hook, model = EMAHook(), network()
    split(model, level).attach(model)
    hook.src_model, hook.ema_model = model, ExponentialMovingAverage(model)
    with torch.no_grad():
        # float16 remainders hold neither
        hook.ema_model.module[0].weight[0, :2] = torch.tensor([1e-12, 1e30])
    states = []
    for _ in range(3):
        states.append(
            copy.deepcopy([model.state_dict(), dict(model.state_dict(keep_vars=True)), hook.ema_model.state_dict()])
        )
        hook._swap_ema_parameters()
    assert differences(states[0], states[2]) == [] != differences(states[0], states[1])
    assert same_bits(states[1][2]['module.0.weight'], states[0][0]['0.weight'])


def test_split_masters_are_refused_with_optimizers_that_do_not_step_both_halves() -> None:
    adam = torch.optim.AdamW(nn.Linear(1, 1).parameters())
    with pytest.raises(AmpAttachError, match='with AdamW: take FusedAdam'):
        AmpOptimWrapper(opt_level='O2', master_weights='split', optimizer=adam)
