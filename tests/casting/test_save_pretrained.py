"""The config that ``save_pretrained`` writes beside a file says which type the file has."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from amp_wrapper import AmpOptimWrapper, amp
from amp_wrapper.casting import save_pretrained as module
from amp_wrapper.policy import LEVELS, resolve


class Config:
    """As transformers' own: its attributes are the file."""

    def __init__(self, name: str) -> None:
        setattr(self, name, None)

    def save_pretrained(self, folder: str) -> None:
        Path(folder, 'config.json').write_text(json.dumps(vars(self)))


class PreTrainedModel(nn.Module):
    """The order of transformers: the type from the parameters, the config, then the state dict."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.config = Config(name)
        self.fc = nn.Linear(2, 2)

    def save_pretrained(self, folder: str, is_main_process: bool = True, state_dict: Any = None) -> None:
        name = next(iter(vars(self.config)))
        setattr(self.config, name, str(next(self.parameters()).dtype).removeprefix('torch.'))
        self.config.save_pretrained(folder)
        torch.save(self.state_dict() if state_dict is None else state_dict, Path(folder, 'model'))


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> type[PreTrainedModel]:
    made = type('PreTrainedModel', (PreTrainedModel,), {'save_pretrained': PreTrainedModel.save_pretrained})
    stand_in: Any = ModuleType('transformers.modeling_utils')
    stand_in.PreTrainedModel = made
    monkeypatch.setitem(sys.modules, 'transformers.modeling_utils', stand_in)
    monkeypatch.setattr(module, '_wrapped', set())
    return made


def saved(folder: Path) -> tuple[str, set[torch.dtype]]:
    config = json.loads((folder / 'config.json').read_text())
    state: dict[str, Tensor] = torch.load(folder / 'model', weights_only=True)
    return next(iter(config.values())), {value.dtype for value in state.values()}


@pytest.mark.parametrize('name', ['dtype', 'torch_dtype'])
@pytest.mark.parametrize('api', ['amp', 'wrapper'])
@pytest.mark.parametrize('level', LEVELS)
def test_the_config_says_what_the_file_holds(
    level: str, api: str, name: str, base: type[PreTrainedModel], tmp_path: Path, device: torch.device
) -> None:
    net = base(name).to(device)
    # inside of another module, as in a detector
    optimizer = SGD(net.parameters(), lr=0.1)
    if api == 'amp':
        amp.initialize(nn.Sequential(net), optimizer, opt_level=level, verbosity=0)
    else:
        AmpOptimWrapper(opt_level=level, optimizer=optimizer, verbosity=0).attach(net)
    net.save_pretrained(str(tmp_path))
    assert saved(tmp_path) == ('float32', {torch.float32})
    assert 'save_pretrained' not in vars(net.config)
    state = {key: value.bfloat16() for key, value in net.state_dict().items()}
    net.save_pretrained(str(tmp_path), state_dict=state)
    told, types = saved(tmp_path)
    assert types == {torch.bfloat16}
    # of a model that is not cast, transformers says what it says
    assert told == ('bfloat16' if resolve(level).casts_model else 'float32')


def test_other_models_are_left_alone(base: type[PreTrainedModel], tmp_path: Path) -> None:
    before = base.save_pretrained
    amp.initialize(nn.Linear(2, 2), opt_level='O5', verbosity=0)
    assert base.save_pretrained is before
    amp.initialize(base('dtype'), opt_level='O5', verbosity=0)
    amp.initialize(base('dtype'), opt_level='O5', verbosity=0)
    assert base.save_pretrained.__wrapped__ is before  # type: ignore[attr-defined]
    plain = base('dtype').bfloat16()
    plain.save_pretrained(str(tmp_path))
    assert saved(tmp_path) == ('bfloat16', {torch.bfloat16})


def test_an_error_while_saving_leaves_nothing(base: type[PreTrainedModel]) -> None:
    net = base('dtype')
    amp.initialize(net, opt_level='O5', verbosity=0)
    with pytest.raises(FileNotFoundError):
        net.save_pretrained('/nowhere/at/all')
    assert 'save_pretrained' not in vars(net.config)


@pytest.mark.parametrize('tied', [False, True])
@pytest.mark.parametrize('level', ['O2', 'O5'])
def test_transformers_itself(level: str, tied: bool, tmp_path: Path) -> None:
    transformers = pytest.importorskip('transformers')
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=50,
        num_key_value_heads=2, tie_word_embeddings=tied,
    )  # fmt: skip
    net = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    amp.initialize(net, optimizer, opt_level=level, verbosity=0, loss_scale=128.0)
    tokens = torch.randint(0, 50, (2, 8))
    with amp.scale_loss(net(tokens, labels=tokens).loss, optimizer) as loss:
        loss.backward()
    optimizer.step()
    net.save_pretrained(tmp_path)
    words = json.loads((tmp_path / 'config.json').read_text())
    assert words.get('dtype', words.get('torch_dtype')) == 'float32'
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert {p.dtype for p in again.parameters()} == {torch.float32}
    state = net.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in again.state_dict().items())
