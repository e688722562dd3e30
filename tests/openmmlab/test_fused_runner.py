"""Fused optimizers and split masters in whole mmengine runs: configs, resuming, averages, logs, several wrappers."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import toy
from bits import differences
from mmengine._strategy import deepspeed
from mmengine.logging import MessageHub
from mmengine.optim import build_optim_wrapper
from mmengine.registry import OPTIMIZERS
from ops_models import NoHostRead
from torch import nn

import amp_wrapper
from amp_wrapper import AmpConfigError, AmpOptimWrapper, AmpUsageError, FusedAdamW, FusedSGD, OverflowStreakError

ADAMW = dict(type='FusedAdamW', lr=0.02, weight_decay=0.05)


@pytest.mark.parametrize(
    ('level', 'words', 'optimizer'),
    [
        ('O2', {}, dict(type='amp_wrapper.FusedSGD', lr=0.2, momentum=0.9, weight_decay=1e-3)),
        ('O2', dict(master_weights='split'), ADAMW),
        ('O5', dict(master_weights='split', on_skip='hold'), ADAMW | dict(state_dtype='bfloat16')),
    ],
    ids=['sgd', 'split', 'split, 16-bit state'],
)
def test_whole_runs_resume_bit_for_bit(
    level: str, words: dict[str, Any], optimizer: dict[str, Any], tmp_path: Path
) -> None:
    """With accumulation, clipping, a scale that moves, schedules, validation and an average."""
    case = toy.everything(level, max_epochs=3)
    case['optim_wrapper'].update(optimizer=optimizer, **words)
    whole = toy.run(tmp_path / 'whole', **case)
    assert isinstance(whole.optim_wrapper.optimizer, (FusedAdamW, FusedSGD))
    with pytest.raises(toy.Stop):
        toy.run(tmp_path / 'part', **{**case, 'custom_hooks': [*case['custom_hooks'], dict(type='StopAt', iters=10)]})
    toy.run(tmp_path / 'part', **{**case, 'resume': True})
    left, right = (toy.checkpoint(tmp_path / name) for name in ('whole', 'part'))
    for key in ('state_dict', 'ema_state_dict', 'optimizer', 'param_schedulers'):
        assert differences(left[key], right[key]) == []
    # any level reads it: the weights are the FP32 masters
    assert all(value.dtype == torch.float32 for value in left['state_dict'].values() if value.is_floating_point())
    assert not torch.equal(left['state_dict']['fc.weight'], left['state_dict']['fc.weight'].bfloat16().float())


@pytest.mark.parametrize('overrides', [{}, dict(master_weights='split')], ids=['masters', 'split'])
def test_the_curve_is_that_of_torchs_optimizer(overrides: dict[str, Any], tmp_path: Path) -> None:
    """float16 weights are rounded alike with split masters, so the losses agree until a rounding tips over."""
    losses = []
    for name, optimizer in (('ours', ADAMW), ('torch', ADAMW | dict(type='AdamW'))):
        words = dict(type='AmpOptimWrapper', opt_level='O2', loss_scale=256.0, optimizer=optimizer)
        toy.run(tmp_path / name, words | (overrides if name == 'ours' else {}))
        losses.append(MessageHub.get_current_instance().get_scalar('train/loss').data[0])
    ours, theirs = (torch.tensor(values) for values in losses)
    assert len(ours) == 14 and ours[-1] < ours[0]
    torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=0)


def test_nothing_is_read_between_two_log_lines() -> None:
    MessageHub.get_instance('nothing_is_read')
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    wrapper = AmpOptimWrapper(
        opt_level='O2',
        loss_scale=dict(init_scale=1024.0),
        optimizer=FusedAdamW(model.parameters(), lr=0.01),
        clip_grad=dict(max_norm=1.0),
    )
    wrapper.attach(model)
    lines: list[str] = []
    for index in range(4):
        with wrapper.optim_context(model):
            loss = model(torch.ones(2, 4)).square().mean() * (float('inf') if index == 2 else 1.0)
        # the first number of each name is waited for
        with NoHostRead() if index else nullcontext(), toy.captured_log() as said:
            wrapper.update_params(loss)
        lines += said
    assert [line for line in lines if 'skipped' in line] == []
    log = wrapper.device_log
    assert log.transfers == 0
    with toy.captured_log() as said:
        norms = wrapper.message_hub.get_scalar('train/grad_norm').data[0]
    assert log.transfers == 1 and len(norms) == 3
    assert [line for line in said if '(1 so far, 1 in a row); loss scale now 512' in line]
    assert wrapper.message_hub.get_scalar('train/amp_skipped').data[0].tolist() == [1.0, 1.0]
    assert wrapper.message_hub.get_scalar('train/amp_scale').data[0].tolist() == [1024.0] * 2 + [512.0] * 2
    assert not wrapper.step_was_skipped()


def test_a_collapse_ends_the_run(tmp_path: Path) -> None:
    words = dict(type='AmpOptimWrapper', opt_level='O2', optimizer=ADAMW, max_consecutive_skips=5, verbosity=0)
    poisoned = dict(type='PoisonedModel', poisoned=tuple(range(3, 40)))
    hooks = dict(logger=dict(type='LoggerHook', interval=2))
    with pytest.raises(OverflowStreakError, match=r'steps in a row had non-finite gradients .*fc\.weight'):
        toy.run(tmp_path, words, model=poisoned, default_hooks=hooks)
    last = MessageHub.get_current_instance().get_info('iter')
    # skips begin at the third iteration, and the log is read every second
    assert 6 <= last <= 8


def test_names_in_configs() -> None:
    model = nn.Linear(3, 2)
    for name in ('FusedAdamW', 'FusedAdam', 'FusedSGD'):
        for prefix in ('', 'amp_wrapper.'):
            config = dict(type='AmpOptimWrapper', opt_level='O5', optimizer=dict(type=prefix + name, lr=0.1))
            wrapper = build_optim_wrapper(model, config | dict(paramwise_cfg=dict(bias_lr_mult=2.0)))
            assert type(wrapper.optimizer) is getattr(amp_wrapper, name)
            assert [group['lr'] for group in wrapper.optimizer.param_groups] == [0.1, 0.2]


def test_what_split_masters_cannot_do_is_said_when_the_wrapper_is_built() -> None:
    model = nn.Linear(3, 2)
    ours = FusedAdamW(model.parameters(), lr=0.1)
    with pytest.raises(AmpConfigError, match='norm_type=2') as error:
        AmpOptimWrapper(
            opt_level='O2',
            master_weights='split',
            num_losses=2,
            optimizer=ours,
            clip_grad=dict(max_norm=1.0, norm_type=1),
        )
    assert len(error.value.problems) == 2
    with pytest.raises(amp_wrapper.AmpAttachError, match="master_weights='split' with AdamW"):
        AmpOptimWrapper(
            opt_level='O2', master_weights='split', optimizer=torch.optim.AdamW(model.parameters(), fused=True)
        )


def test_the_strategy_of_deepspeed_has_its_own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """mmengine registers DeepSpeed's FusedAdam without ``force``."""
    names = {
        'deepspeed.ops.adam': ('DeepSpeedCPUAdam', 'FusedAdam'),
        'deepspeed.ops.lamb': ('FusedLamb',),
        'deepspeed.runtime.fp16.onebit': ('OnebitAdam', 'OnebitLamb', 'ZeroOneAdam'),
    }
    parts = ['deepspeed', 'deepspeed.ops', 'deepspeed.runtime', 'deepspeed.runtime.fp16', *names]
    for part in parts:
        module = ModuleType(part)
        for name in names.get(part, ()):
            setattr(module, name, type(name, (torch.optim.Adam,), {}))
        monkeypatch.setitem(sys.modules, part, module)
    before = dict(OPTIMIZERS.module_dict)
    try:
        assert 'FusedAdam' in deepspeed.register_deepspeed_optimizers()
        assert OPTIMIZERS.get('FusedAdam').__module__ != 'amp_wrapper.optim.adam'
        assert OPTIMIZERS.get('amp_wrapper.FusedAdam') is amp_wrapper.FusedAdam
    finally:
        OPTIMIZERS.module_dict.clear()
        OPTIMIZERS.module_dict.update(before)
    # without DeepSpeed the name stays ours
    monkeypatch.setitem(sys.modules, 'deepspeed', None)
    assert deepspeed.register_deepspeed_optimizers() == []
    assert OPTIMIZERS.get('FusedAdam') is amp_wrapper.FusedAdam


def test_what_hooks_raise_is_left_alone_and_hooks_before_a_split_step_are_refused() -> None:
    model = nn.Linear(3, 2)
    wrapper = AmpOptimWrapper(opt_level='O2', master_weights='split', optimizer=FusedSGD(model.parameters(), lr=0.1))

    def backward() -> None:
        with wrapper.optim_context(model):
            loss = model(torch.ones(1, 3)).sum()
        wrapper.backward(loss)

    def fail(*_: Any) -> None:
        raise ValueError('mine')

    handle = wrapper.optimizer.register_step_post_hook(fail)
    backward()
    with pytest.raises(ValueError, match=r'^mine$'):
        wrapper.step()
    handle.remove()
    handle = wrapper.optimizer.register_step_pre_hook(fail)
    wrapper.zero_grad()
    backward()
    with pytest.raises(AmpUsageError, match='register_step_pre_hook'):
        wrapper.step()
    handle.remove()
    wrapper.step()


def test_a_first_step_that_is_skipped_leaves_no_empty_norm_in_the_log(tmp_path: Path) -> None:
    words = dict(type='AmpOptimWrapper', opt_level='O5', loss_scale=1.0, optimizer=ADAMW, clip_grad=dict(max_norm=1.0))
    model = dict(type='PoisonedModel', poisoned=(1, 3))
    custom = [dict(data_src='grad_norm', method_name='max', window_size='global', log_name='gn')]
    with toy.run_log() as lines:
        toy.run(
            tmp_path,
            words,
            model=model,
            log_level='INFO',
            default_hooks=dict(logger=dict(type='LoggerHook', interval=1)),
            log_processor=dict(custom_cfg=custom),
        )
    norms = MessageHub.get_current_instance().get_scalar('train/grad_norm').data[0]
    assert len(norms) == 12 and bool(torch.tensor(norms).isfinite().all())
    said = [line for line in lines if 'optimizer step skipped' in line]
    # nothing is scaled, so the scale is 1 for good
    assert len(said) == 2 and all(line.endswith('loss scale now 1') for line in said)
