"""Single sentences of the pages ``docs/recipes_*.md``: what is refused, what is read, what is saved."""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import timm.models
import timm.utils
import timm.utils.cuda
import torch
from accelerate.state import AcceleratorState, GradientState
from bits import same
from recipe_runs import pictures, recipe, seed
from torch.utils.data import DataLoader
from transformers import Trainer

from amp_wrapper import AmpAttachError, amp


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    logging.getLogger('lightning.pytorch').setLevel(logging.ERROR)
    seed(0)
    gc.collect()
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def test_timms_own_saver_carries_the_loss_scale(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = recipe('timm')
    monkeypatch.setattr(timm.utils.cuda, 'amp', amp)
    scaler = timm.utils.ApexScaler()
    images, labels = pictures(8, 32).tensors

    def build() -> Any:
        return page.build(page.make_model(), 'O2', epochs=2, steps=2, loss_scale={'init_scale': 512.0})

    run = build()
    for factor in (1.0, math.inf):
        loss = torch.nn.functional.cross_entropy(run.model(images * factor), labels)
        scaler(loss, run.optimizer, clip_grad=1.0)
        run.optimizer.zero_grad()
    assert amp.loss_scale(run.optimizer) == 256
    saver = timm.utils.CheckpointSaver(run.model, run.optimizer, amp_scaler=scaler, checkpoint_dir=str(tmp_path))
    saver.save_checkpoint(0, metric=0.5)
    weights, optimizer = run.model.state_dict(), run.optimizer.state_dict()
    del run, saver, loss
    gc.collect()

    again = build()
    assert amp.loss_scale(again.optimizer) == 512
    timm.models.resume_checkpoint(again.model, str(tmp_path / 'last.pth.tar'), again.optimizer, loss_scaler=scaler)
    assert amp.loss_scale(again.optimizer) == 256
    assert same(again.model.state_dict(), weights) and same(again.optimizer.state_dict(), optimizer)


def trained(model: Any, folder: str, kind: Any = None, resume: str | None = None, **options: Any) -> Any:
    page = recipe('trainer')
    more = {'opt_level': 'O5', 'amp_options': {'verbosity': 0, **options}} if kind is None else {}
    trainer = (kind or page.AmpTrainer)(
        model=model,
        args=page.arguments(folder, eval_strategy='no'),
        train_dataset=page.sequences(48),
        **more,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def test_the_trainer_reads_checkpoints_of_a_plain_one() -> None:
    page = recipe('trainer')
    trained(page.make_model(), 'plain', Trainer)
    resumed = trained(page.make_model(), 'resumed', resume='plain/checkpoint-3')
    assert resumed.state.global_step == 6 and resumed.model.dtype is torch.bfloat16
    # of a run with fp16=True
    torch.save(torch.amp.GradScaler('cpu').state_dict(), 'plain/checkpoint-3/scaler.pt')
    with pytest.raises(AttributeError, match='load_state_dict'):
        trained(page.make_model(), 'resumed', resume='plain/checkpoint-3')
    Path('plain/checkpoint-3/scaler.pt').unlink()
    trained(page.make_model(), 'resumed', resume='plain/checkpoint-3')


def test_16bit_models_of_the_hub() -> None:
    page = recipe('trainer')
    page.make_model().to(torch.bfloat16).save_pretrained('published')
    rounded = page.GPT2LMHeadModel.from_pretrained('published')
    assert rounded.dtype is torch.bfloat16
    with pytest.raises(AmpAttachError, match='from_16bit=True'):
        trained(rounded, 'refused')
    trained(page.GPT2LMHeadModel.from_pretrained('published'), 'taken', from_16bit=True)
    trained(page.GPT2LMHeadModel.from_pretrained('published', dtype=torch.float32), 'loaded')


def test_the_trainer_refuses_its_own_mixed_precision() -> None:
    page = recipe('trainer')
    with pytest.raises(ValueError, match='opt_level takes their place'):
        page.AmpTrainer(model=page.make_model(), args=page.arguments('refused', bf16=True, eval_strategy='no'))


def test_the_plugin_refuses_wrapped_models_and_second_fits() -> None:
    page = recipe('lightning')
    loader = DataLoader(pictures(32, 0), batch_size=16)
    plugin = page.AmpPrecision('O5', verbosity=0)
    model = page.Classifier()
    with pytest.raises(ValueError, match='AmpDDPStrategy'):
        plugin.connect(torch.nn.Sequential(model), [model.configure_optimizers()['optimizer']], [])
    page.make_trainer(plugin, 'first', 1).fit(model, loader)
    with pytest.raises(AmpAttachError, match='build the model again'):
        page.make_trainer(page.AmpPrecision('O5', verbosity=0), 'second', 1).fit(model, loader)


def test_masters_of_one_group_leave_the_classifier_out() -> None:
    """For clipping with AGC: ``param_groups`` hold masters."""
    page = recipe('timm')
    model = page.make_model()
    head = list(model.get_classifier().parameters())
    body = [parameter for parameter in model.parameters() if all(parameter is not other for other in head)]
    optimizer = torch.optim.SGD([{'params': body}, {'params': head}], lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level='O2', verbosity=0)
    kept = {id(parameter) for parameter in amp.master_params(optimizer)}
    assert {id(parameter) for parameter in optimizer.param_groups[0]['params']} < kept
    assert all(parameter.dtype is torch.float32 for parameter in optimizer.param_groups[0]['params'])


@pytest.mark.parametrize('mode', ['norm', 'value', 'agc'])
def test_timms_clipping_of_masters_is_that_of_parameters(mode: str) -> None:
    page = recipe('timm')
    run = page.build(page.make_model(), 'O2', epochs=2, steps=2, loss_scale=128.0)
    images, labels = pictures(8, 32).tensors
    with amp.scale_loss(torch.nn.functional.cross_entropy(run.model(images), labels), run.optimizer) as scaled_loss:
        scaled_loss.backward()
    masters = list(amp.master_params(run.optimizer))
    plain = [torch.nn.Parameter(master.detach().clone()) for master in masters]
    for parameter, master in zip(plain, masters):
        parameter.grad = master.grad.clone()
    timm.utils.dispatch_clip_grad(plain, 1e-3, mode=mode)
    unclipped = [master.grad.clone() for master in masters]
    timm.utils.dispatch_clip_grad(amp.master_params(run.optimizer), 1e-3, mode=mode)
    found = [master.grad for master in masters]
    assert same(found, [parameter.grad for parameter in plain]) and not same(found, unclipped)
