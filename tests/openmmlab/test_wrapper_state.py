"""Saving and loading with AmpOptimWrapper: before and after attaching, at other levels, files of others, damage."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from bits import differences
from mmengine.optim import OptimWrapper
from torch import nn
from toy_wrapper import SGD, net, one_step, turn, two_wrappers, wrap

from amp_wrapper import (
    AmpAttachError,
    AmpCheckpointError,
    AmpUsageError,
)

# -- attachment and loading in every order ------------------------------------------------------------------------------


@pytest.mark.parametrize('level', ['O2', 'O3', 'O5'])
def test_attached_before_or_after_loading_gives_the_same_bits(level: str) -> None:
    source = net()
    trained = wrap(source, opt_level=level)
    for _ in range(3):
        one_step(source, trained)
    weights, state = copy.deepcopy(source.state_dict()), copy.deepcopy(trained.state_dict())
    ends = []
    for order in ('load attach', 'attach load', 'weights attach state'):
        torch.manual_seed(9)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
        wrapper = wrap(model, opt_level=level)
        for word in order.split():
            if word == 'attach':
                wrapper.initialize_count_status(model, 3, 10)
            if word in ('load', 'weights'):
                model.load_state_dict(weights)
            if word in ('load', 'state'):
                wrapper.load_state_dict(state)
        losses = [one_step(model, wrapper) for _ in range(3)]
        ends.append((losses, model.state_dict(), wrapper.state_dict()))
    assert differences(ends[0], ends[1]) == []
    assert differences(ends[0], ends[2]) == []


def test_optimizer_state_is_not_rounded_by_loading() -> None:
    model = net()
    wrapper = wrap(model, opt_level='O2', optimizer=torch.optim.Adam(model.parameters(), lr=1e-3))
    one_step(model, wrapper)
    state = copy.deepcopy(wrapper.state_dict())
    for entry in state['state'].values():
        entry['exp_avg_sq'].fill_(1e-12)  # 0 in float16
    other = net()
    resumed = wrap(other, opt_level='O2', optimizer=torch.optim.Adam(other.parameters(), lr=1e-3))
    resumed.initialize_count_status(other, 0, 10)
    resumed.load_state_dict(state)
    for entry in resumed.optimizer.state.values():
        assert entry['exp_avg_sq'].dtype == torch.float32
        assert bool((entry['exp_avg_sq'] == 1e-12).all())


def test_a_model_is_attached_once() -> None:
    model = net()
    wrap(model, opt_level='O2').attach(model)
    with pytest.raises(AmpAttachError, match='another wrapper'):
        wrap(model, opt_level='O2').attach(model)
    half = net().half()
    with pytest.raises(AmpAttachError, match=r'16-bit already: 0\.weight \(float16\)'):
        wrap(half, opt_level='O2').attach(half)


def test_backward_without_a_model_says_how() -> None:
    model = net()
    with pytest.raises(AmpUsageError, match='optim_context'):
        wrap(model, opt_level='O2').update_params(model(torch.randn(6, 4)).sum())


# -- levels across checkpoints -----------------------------------------------------------------------------------------


def _lines(source: str, target: str) -> list[str]:
    """What the log says, in full, for each of the 36 pairs."""
    kept, converted, dropped = [], [], []
    if target == 'O3' != source:
        converted = ['weights to float16', 'optimizer state to float16']
    else:
        kept = ['weights']
        (converted if source == 'O3' != target else kept).append(
            'optimizer state from float16 to float32' if source == 'O3' != target else 'optimizer state'
        )
    dynamic = ('O1', 'O2')
    if source in dynamic and target in dynamic:
        kept.append('loss scale 65536')
    elif source in dynamic:
        dropped.append('the saved loss scale 65536 is not used: the configured one is 1')
    elif target in dynamic:
        dropped.append('the saved loss scale 1 was static: the dynamic one starts at 65536')
    rows = dict(kept=kept, converted=converted, dropped=dropped)
    return [
        f'amp: saved at {source}, resumed at {target}: {verb}: {", ".join(words)}'
        for verb, words in rows.items()
        if words
    ]


@pytest.mark.parametrize('source', toy.LEVELS)
def test_resume_at_another_level_keeps_weights_and_state(source: str) -> None:
    origin = net()
    trained = wrap(origin, opt_level=source)
    for _ in range(2):
        one_step(origin, trained)
    weights, state = origin.state_dict(), trained.state_dict()
    for target in toy.LEVELS:
        model = net()
        model.load_state_dict(weights)
        wrapper = wrap(model, opt_level=target)
        with toy.captured_log() as lines:
            wrapper.load_state_dict(state)
        wrapper.attach(model)
        assert lines == _lines(source, target)
        if target not in ('O3',):
            assert differences(dict(weights), dict(model.state_dict())) == []
        one_step(model, wrapper)


def test_stock_and_plain_checkpoints() -> None:
    model = net()
    plain = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    one_step(model, plain)
    state = plain.state_dict()
    state['loss_scaler'] = torch.amp.GradScaler('cpu', init_scale=2.0**12, growth_interval=2000).state_dict()
    state['loss_scaler'].update(scale=2.0**12, _growth_tracker=17)
    other = net()
    wrapper = wrap(other)
    wrapper.load_state_dict(state)
    assert (wrapper.loss_scaler.get_scale(), wrapper.loss_scaler.state_dict()['_growth_tracker']) == (2.0**12, 17)
    del state['loss_scaler']
    with toy.captured_log() as lines:
        wrap(net()).load_state_dict(state)
    assert lines[-1].endswith('resumed at O1: new: loss scale 65536, which the checkpoint does not hold')


def test_stock_shaped_configuration_saves_a_stock_shaped_dict() -> None:
    model = net()
    wrapper = wrap(model)
    one_step(model, wrapper)
    state = wrapper.state_dict()
    assert state.keys() == {'state', 'param_groups', 'loss_scaler'}
    scaler = torch.amp.GradScaler('cpu')
    scaler.load_state_dict(state['loss_scaler'])
    assert scaler.state_dict()['scale'] == 2.0**16


@pytest.mark.parametrize(
    ('damage', 'words'),
    [
        (lambda s: s.pop('state'), "'state'"),
        (lambda s: s['loss_scaler'].update(scale=float('nan')), "'scale'"),
        (lambda s: s['amp'].update(version=99), 'newer amp_wrapper'),
        (lambda s: s['param_groups'].append(dict(s['param_groups'][0], params=[9])), '2 parameter groups'),
        (lambda s: s['param_groups'].append(dict(s['param_groups'][0])), 'must number every parameter once'),
        (lambda s: s['param_groups'][0]['params'].pop(), 'the model has changed'),
        (lambda s: s.update(apex_amp={}), 'apex'),
    ],
)
def test_damaged_state_changes_nothing(damage: Any, words: str) -> None:
    model = net()
    wrapper = wrap(model, opt_level='O2')
    one_step(model, wrapper)
    before = copy.deepcopy((model.state_dict(), wrapper.state_dict()))
    state = copy.deepcopy(wrapper.state_dict())
    damage(state)
    with pytest.raises(AmpCheckpointError) as error:
        wrapper.load_state_dict(state)
    assert words in str(error.value)
    assert differences(before, (model.state_dict(), wrapper.state_dict())) == []


def test_another_kind_of_checkpoint_is_named() -> None:
    state = {'generator': {'state': {}, 'param_groups': []}, 'discriminator': {'state': {}, 'param_groups': []}}
    with pytest.raises(AmpCheckpointError, match='several optimizers'):
        wrap(net()).load_state_dict(state)


# -- checkpoints under weights_only ------------------------------------------------------------------------------------


def test_only_what_history_buffers_need_may_be_unpickled(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return getattr, (torch.Tensor, '__init__')

    torch.save(dict(x=Evil()), tmp_path / 'evil.pth')
    with pytest.raises(Exception, match='HistoryBuffer'):
        torch.load(tmp_path / 'evil.pth', weights_only=True)


def test_wrapper_dict_resumes_during_accumulation() -> None:
    whole, whole_wrappers = two_wrappers(2)
    parts, parts_wrappers = two_wrappers(2)
    for index in range(3):
        turn(whole, whole_wrappers, index)
        turn(parts, parts_wrappers, index)
    saved = copy.deepcopy((parts.state_dict(), parts_wrappers.state_dict()))
    resumed, resumed_wrappers = two_wrappers(2)
    resumed.load_state_dict(saved[0])
    resumed_wrappers.load_state_dict(saved[1])
    resumed_wrappers.initialize_count_status(resumed, 3, 6)
    assert resumed_wrappers['g'].inner_count == 3
    for index in range(3, 6):
        turn(whole, whole_wrappers, index)
        turn(resumed, resumed_wrappers, index)
    assert differences(dict(whole.state_dict()), dict(resumed.state_dict())) == []


def test_loading_forgets_gradients_accumulated_before() -> None:
    model = net()
    wrapper = wrap(model, opt_level='O2', accumulative_counts=2)
    one_step(model, wrapper)
    inside = copy.deepcopy(wrapper.state_dict())
    one_step(model, wrapper)
    outside = copy.deepcopy(wrapper.state_dict())
    assert inside['amp'].get('window') and not outside['amp'].get('window')
    for attached in (True, False):
        other = net()
        resumed = wrap(other, opt_level='O2', accumulative_counts=2)
        if attached:
            resumed.attach(other)
        resumed.load_state_dict(inside)
        resumed.load_state_dict(outside)
        resumed.attach(other)
        assert all(p.grad is None for p in other.parameters())


@pytest.mark.parametrize('level', ['O0', 'O2'])
def test_flexible_runner_resumes_with_ema(level: str, tmp_path: Path) -> None:
    from mmengine.runner import FlexibleRunner

    def train(folder: Path, epochs: int, **words: Any) -> None:
        wrapper = dict(type='AmpOptimWrapper', opt_level=level, optimizer=dict(SGD), accumulative_counts=2)
        config = toy.toy_config(folder, wrapper, **words)
        config.train_cfg.max_epochs = epochs
        config.custom_hooks = [dict(type='EMAHook', momentum=0.1)]
        config.strategy = dict(type='SingleDeviceStrategy')
        config.randomness = dict(seed=0)
        config.env_cfg = {}
        FlexibleRunner.from_cfg(config).train()

    ordered = {**toy.loader(shuffle=False)}
    train(tmp_path / 'whole', 4, train_dataloader=ordered)
    train(
        tmp_path / 'parts', 4, train_dataloader=ordered, resume=True, load_from=str(tmp_path / 'whole' / 'epoch_2.pth')
    )
    left, right = toy.checkpoint(tmp_path / 'whole'), toy.checkpoint(tmp_path / 'parts')
    assert differences(left['state_dict'], right['state_dict']) == []
    assert differences(left['ema_state_dict'], right['ema_state_dict']) == []
