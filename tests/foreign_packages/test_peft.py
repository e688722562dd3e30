"""peft: LoRA and its kin over a frozen base that is 16-bit, as large models are loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from test_transformers import language as counted
from test_transformers import llama, own_loss
from torch import nn
from torch.optim import lr_scheduler
from ways import CAST, LEVELS, Recipe, Task, Way, prepare, trial

from amp_wrapper.errors import AmpAttachError

PACKAGE = 'peft'
CONFIGS: dict[str, Callable[[], peft.PeftConfig]] = {
    'LoRA': lambda: peft.LoraConfig(
        r=4, lora_alpha=8, lora_dropout=0.1, target_modules=['q_proj', 'v_proj', 'down_proj']
    ),
    'DoRA': lambda: peft.LoraConfig(r=4, lora_alpha=8, use_dora=True, target_modules=['q_proj', 'v_proj', 'down_proj']),
    'LoRA, norms and head trained': lambda: peft.LoraConfig(
        r=4, target_modules=['q_proj', 'v_proj'], modules_to_save=['lm_head', 'norm']
    ),
    'IA3': lambda: peft.IA3Config(target_modules=['k_proj', 'v_proj', 'down_proj'], feedforward_modules=['down_proj']),
    'VeRA': lambda: peft.VeraConfig(r=8, target_modules=['q_proj', 'o_proj']),
    'prompts': lambda: peft.PromptTuningConfig(task_type='CAUSAL_LM', num_virtual_tokens=4),
}
BASES = {'FP32': torch.float32, 'bf16': torch.bfloat16}


_base: dict[str, torch.Tensor] = {}


def language(index: int) -> dict[str, torch.Tensor]:
    """What the adapters learn: the sequences of the base backwards."""
    batch = counted(index)
    return {key: value.flip(1) if value.ndim == 2 else value for key, value in batch.items()}


def pretrained() -> nn.Module:
    """A base that has learned to count, the same each time."""
    random = torch.get_rng_state()
    torch.manual_seed(0)
    model = llama()
    if not _base:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for index in range(100):
            optimizer.zero_grad()
            own_loss(model, counted(index)).backward()
            optimizer.step()
        _base.update(model.state_dict())
    model.load_state_dict(_base)
    torch.set_rng_state(random)
    return model


def build(name: str, base: str) -> nn.Module:
    model = pretrained().to(BASES[base])
    return peft.get_peft_model(model, CONFIGS[name]())


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


TRIALS = [
    (name, base, api)
    for name in CONFIGS
    for base in BASES
    for api in ('functional', 'mmengine')
    if api == 'functional' or name == 'LoRA'
]


@pytest.mark.parametrize('level', LEVELS)
@pytest.mark.parametrize('name,base,api', TRIALS)
def test_trains(name: str, base: str, level: str, api: str, row: dict[str, Any]) -> None:
    """The frozen base keeps its bits; the adapters, FP32 by peft's own doing, train, and have masters where they are cast."""
    task = Task(lambda: build(name, base), own_loss, language, lambda: language(1000))
    rate = 0.1 if name in ('IA3', 'VeRA', 'prompts') else 0.02
    recipe = Recipe(
        PACKAGE,
        f'{name}, {base} base',
        lambda m: torch.optim.AdamW(trained(m), lr=rate),
        scheduler=lambda o: lr_scheduler.LinearLR(o, 0.2, total_iters=8),
        exact=False,
    )
    if 'head' in name and base == 'bf16':
        # peft leaves these copies 16-bit, and they are trained: their FP32 values are lost
        prepare(row, recipe, level, api)
        with pytest.raises(AmpAttachError, match='from_16bit') as error:
            Way(recipe, task, level, api).train(0, 1)
        row.update(verdict='refused', remedy=str(error.value))
        return
    if name in ('VeRA', 'prompts') and base == 'bf16' and level == 'O1':
        # two 16-bit types meet in torch.cat: autocast refuses it, with or without this package; O4 is for such a base
        prepare(row, recipe, level, api)
        with pytest.raises(RuntimeError, match='autocast'), torch.autocast('cpu', torch.float16):
            own_loss(build(name, base), language(0))
        with pytest.raises(RuntimeError, match='autocast'):
            Way(recipe, task, level, api).train(0, 1)
        row.update(verdict='fails, as under torch.autocast')
        return
    trial(recipe, level, api, row, task)


@pytest.mark.parametrize('level', LEVELS)
def test_saved_and_merged_as_the_package_does(level: str, row: dict[str, Any], tmp_path: Any) -> None:
    """``save_pretrained`` holds the adapters in FP32; a new base takes them up."""
    task = Task(lambda: build('LoRA', 'bf16'), own_loss, language, lambda: language(1000))
    recipe = Recipe(PACKAGE, 'LoRA, bf16 base, save_pretrained', lambda m: torch.optim.AdamW(trained(m), lr=0.02))
    prepare(row, recipe, level, 'functional')
    way = Way(recipe, task, level)
    base = {key: value.clone() for key, value in way.model.state_dict().items() if 'lora' not in key}
    way.train(0, 8)
    assert all(torch.equal(way.model.state_dict()[key], value) for key, value in base.items())
    adapters = {key: value.clone() for key, value in way.values().items() if 'lora' in key}
    assert adapters and all(value.dtype is torch.float32 for value in adapters.values())
    way.model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(pretrained().to(torch.bfloat16), tmp_path)
    for key, value in adapters.items():
        assert torch.equal(loaded.state_dict()[key], value), key
    loaded.eval(), way.model.eval()
    with torch.no_grad():
        theirs, ours = own_loss(loaded, language(1000)), own_loss(way.model, language(1000))
    assert abs(float(theirs) - float(ours)) < 0.05
    row['verdict'] = 'saves FP32 adapters, loads'


@pytest.mark.parametrize('level', sorted(CAST))
def test_masters_of_adapters_alone(level: str, row: dict[str, Any]) -> None:
    """A frozen base has no masters and costs none."""
    task = Task(lambda: build('LoRA', 'bf16'), own_loss, language, lambda: language(1000))
    recipe = Recipe(PACKAGE, 'LoRA, bf16 base, memory', lambda m: torch.optim.AdamW(trained(m), lr=0.02))
    prepare(row, recipe, level, 'functional')
    way = Way(recipe, task, level)
    names = [name for name, parameter in way.model.named_parameters() if parameter.requires_grad]
    assert names and all('lora' in name for name in names)
    assert len(way.stepped()) == len(names)
    way.train(0, 2)
    row['verdict'] = 'masters of the adapters alone'
