"""transformers: small models from config classes, a loop as its Trainer's, get_scheduler, gradient checkpointing, saving."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import get_scheduler
from transformers.trainer_pt_utils import get_parameter_names
from ways import LEVELS, Recipe, Task, Way, digits, held_out, prepare, trial

PACKAGE = 'transformers'
SMALL = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
TEXT = dict(SMALL, vocab_size=64, max_position_embeddings=32)


def text(index: int, rows: int = 16) -> dict[str, Tensor]:
    """Sequences that count up from a start by a step of two or three, with padding; the label says which."""
    generator = torch.Generator().manual_seed(index)
    start = torch.randint(2, 12, (rows, 1), generator=generator)
    by = torch.randint(2, 4, (rows, 1), generator=generator)
    ids = start + by * torch.arange(16)
    mask = torch.arange(16) < torch.randint(10, 17, (rows, 1), generator=generator)
    return dict(input_ids=torch.where(mask, ids, 0), attention_mask=mask.long(), labels=by[:, 0] - 2)


def language(index: int) -> dict[str, Tensor]:
    """The same, with the sequence itself as what is to be foretold."""
    batch = text(index)
    return dict(batch, labels=torch.where(batch['attention_mask'] > 0, batch['input_ids'], -100))


def pictures(index: int) -> dict[str, Tensor]:
    images, labels = held_out() if index == 1000 else digits(index)
    return dict(pixel_values=images[:64], labels=labels[:64])


def own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss


def task(make: Callable[[], nn.Module], batch: Callable[[int], Any]) -> Task:
    return Task(make, own_loss, batch, lambda: batch(1000))


def bert() -> nn.Module:
    config = transformers.BertConfig(**TEXT, num_labels=2, attn_implementation='eager')
    return transformers.BertForSequenceClassification(config)


def gpt2(**kwargs: Any) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=4, use_cache=False, **kwargs
    )
    return transformers.GPT2LMHeadModel(config)


def gpt2_checkpointed() -> nn.Module:
    model = gpt2()
    model.gradient_checkpointing_enable(dict(use_reentrant=False))
    return model


def llama() -> nn.Module:
    config = transformers.LlamaConfig(**TEXT, num_key_value_heads=2, use_cache=False)
    return transformers.LlamaForCausalLM(config)


def vit() -> nn.Module:
    config = transformers.ViTConfig(
        **SMALL, image_size=8, patch_size=4, hidden_dropout_prob=0.1, num_channels=1, num_labels=10
    )
    return transformers.ViTForImageClassification(config)


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0, use_cache=False
    )
    return transformers.T5ForConditionalGeneration(config)


TASKS = {
    'BERT': task(bert, text),
    'GPT-2': task(gpt2, language),
    'GPT-2, checkpointed': task(gpt2_checkpointed, language),
    'Llama': task(llama, language),
    'ViT': task(vit, pictures),
    'T5': task(t5, language),
}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Groups as the Trainer makes them."""
    decayed = set(get_parameter_names(model, [nn.LayerNorm], ['bias', 'norm']))
    named = list(model.named_parameters())
    return torch.optim.AdamW(
        [
            dict(params=[p for n, p in named if n in decayed], weight_decay=0.01),
            dict(params=[p for n, p in named if n not in decayed], weight_decay=0.0),
        ],
        lr=1e-2 if isinstance(model, transformers.ViTForImageClassification) else 5e-3,
    )


def schedule(name: str) -> Callable[[Any], Any]:
    return lambda optimizer: get_scheduler(name, optimizer, num_warmup_steps=6, num_training_steps=40)


@pytest.mark.parametrize('api', ['functional', 'mmengine'])
@pytest.mark.parametrize('level', LEVELS)
@pytest.mark.parametrize('name', TASKS)
def test_models(name: str, level: str, api: str, row: dict[str, Any]) -> None:
    """Dropout as the configs have it."""
    # warm-up and half of the way down
    kind = {'BERT': 'linear', 'ViT': 'cosine', 'Llama': 'polynomial'}.get(name, 'linear')
    recipe = Recipe(PACKAGE, f'{name}, AdamW, {kind}', adamw, scheduler=schedule(kind), exact=False)
    trial(recipe, level, api, row, TASKS[name])


@pytest.mark.parametrize('level', LEVELS)
@pytest.mark.parametrize('name', TASKS)
def test_saved_as_the_package_does(name: str, level: str, row: dict[str, Any], tmp_path: Any) -> None:
    """``save_pretrained`` in the middle holds the FP32 values, says so in its config, and is loaded by ``from_pretrained``."""
    recipe = Recipe(PACKAGE, f'{name}, save_pretrained', adamw)
    prepare(row, recipe, level, 'functional')
    way = Way(recipe, TASKS[name], level)
    way.train(0, 6)
    values = way.values()
    way.model.save_pretrained(tmp_path)
    loaded = type(way.model).from_pretrained(tmp_path)
    for key, value in values.items():
        if key in loaded.state_dict():
            found = loaded.state_dict()[key]
            assert found.dtype is value.dtype and torch.equal(found, value), key
    config = type(way.model.config).from_pretrained(tmp_path)
    assert config.dtype in (None, torch.float32, 'float32'), config.dtype
    again = type(way.model).from_pretrained(tmp_path, dtype='auto')
    assert next(again.parameters()).dtype is torch.float32
    way.train(6, 8)
    row['verdict'] = 'saves FP32, loads'
