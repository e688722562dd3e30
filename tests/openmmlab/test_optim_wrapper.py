"""The mmengine face: registry, accepted arguments, bits against the plain wrapper, evaluation, logging."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from mmengine.config import Config
from mmengine.logging import MessageHub
from mmengine.optim import OptimWrapper, OptimWrapperDict, build_optim_wrapper
from mmengine.registry import OPTIM_WRAPPERS, DefaultScope
from mmengine.runner import Runner
from mmengine.structures import BaseDataElement
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from amp_wrapper import (
    AmpAttachError,
    AmpCheckpointError,
    AmpConfigError,
    AmpOptimWrapper,
    AmpUsageError,
    ApexOptimWrapper,
    OverflowStreakError,
    TorchAmpOptimWrapper,
    ops,
)

SGD = dict(type='SGD', lr=0.1, momentum=0.9)


def wrap(model: nn.Module, **words: Any) -> AmpOptimWrapper:
    words.setdefault('optimizer', torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    return AmpOptimWrapper(**words)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def one_step(model: nn.Module, wrapper: OptimWrapper, batch: Tensor | None = None, factor: float = 1.0) -> Tensor:
    batch = torch.randn(6, 4, generator=torch.Generator().manual_seed(3)) if batch is None else batch
    with wrapper.optim_context(model):
        loss = model(batch.to(next(model.parameters()).device)).float().square().mean() * factor
    wrapper.update_params(loss)
    return loss.detach()


# -- registry ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('scope', [None, 'mmengine', 'mmdet', 'amp_wrapper'])
def test_the_bare_name_is_ours_under_every_scope(scope: str | None) -> None:
    with DefaultScope.overwrite_default_scope(scope):
        assert OPTIM_WRAPPERS.get('AmpOptimWrapper') is AmpOptimWrapper
        assert OPTIM_WRAPPERS.get('ApexOptimWrapper') is ApexOptimWrapper
        assert OPTIM_WRAPPERS.get('TorchAmpOptimWrapper') is TorchAmpOptimWrapper
        assert TorchAmpOptimWrapper.__module__.startswith('mmengine.')


def test_the_scoped_name_needs_no_import() -> None:
    code = (
        'import sys, torch\n'
        'from mmengine.optim import build_optim_wrapper\n'
        "assert 'amp_wrapper' not in sys.modules\n"
        "cfg = dict(type='amp_wrapper.AmpOptimWrapper', opt_level='O2', optimizer=dict(type='SGD', lr=0.1))\n"
        'wrapper = build_optim_wrapper(torch.nn.Linear(2, 2), cfg)\n'
        "assert type(wrapper).__module__ == 'amp_wrapper.openmmlab.optim_wrapper', type(wrapper)\n"
        "assert wrapper.opt_level == 'O2'\n"
    )
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_without_mmengine_the_import_works_and_says_what_is_missing() -> None:
    code = (
        'import importlib.util as u, sys\n'
        'find = u.find_spec\n'
        "u.find_spec = lambda name, *a: None if name.startswith('mm') else find(name, *a)\n"
        'import amp_wrapper\n'
        'from amp_wrapper.engine import AmpEngine\n'
        "assert not any(name.startswith('mmengine') for name in sys.modules)\n"
        'try:\n    amp_wrapper.AmpOptimWrapper\n'
        "except ImportError as error:\n    assert 'pip install mmengine' in str(error)\n"
        'else:\n    raise SystemExit(1)\n'
    )
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_pure_python_config_builds_ours(tmp_path: Path) -> None:
    file = tmp_path / 'pure.py'
    file.write_text(
        'from torch.optim import SGD\nfrom amp_wrapper import AmpOptimWrapper\n'
        "optim_wrapper = dict(type=AmpOptimWrapper, opt_level='O5', optimizer=dict(type=SGD, lr=0.1))\n"
    )
    wrapper = build_optim_wrapper(net(), Config.fromfile(file).optim_wrapper)
    assert type(wrapper) is AmpOptimWrapper
    assert wrapper.opt_level == 'O5'


def test_one_line_names_class_level_and_backend() -> None:
    with toy.captured_log() as lines:
        wrap(net(), opt_level='O2')
    assert len(lines) == 1
    assert all(word in lines[0] for word in ('AmpOptimWrapper', 'amp_wrapper', 'O2', 'float16', ops.backend()))


# -- arguments ---------------------------------------------------------------------------------------------------------

ACCEPTED: list[tuple[tuple[Any, ...], dict[str, Any], str, float]] = [
    ((), {}, 'O1', 2.0**16),
    (('dynamic',), {}, 'O1', 2.0**16),
    ((512.0,), {}, 'O1', 512.0),
    ((512,), {}, 'O1', 512.0),
    (('128.0',), {}, 'O1', 128.0),
    ((dict(init_scale=64.0, growth_factor=1.5, backoff_factor=0.25, growth_interval=7, enabled=True),), {}, 'O1', 64.0),
    (('dynamic', 'float16'), {}, 'O1', 2.0**16),
    (('dynamic', torch.bfloat16), {}, 'O4', 2.0**16),
    (('dynamic', 'bfloat16', False), {}, 'O4', 2.0**16),
    (('dynamic', 'float32'), {}, 'O1', 2.0**16),
    ((), dict(dtype='bfloat16'), 'O4', 1.0),
    ((), dict(opt_level='O2', dtype='bf16'), 'O5', 1.0),
    ((), dict(opt_level='O2', keep_batchnorm_fp32='False', loss_scale='256'), 'O2', 256.0),
    ((), dict(opt_level='O3', cast_model_outputs='half'), 'O3', 1.0),
    (
        (),
        dict(accumulative_counts=3, clip_grad=dict(max_norm=1.0, norm_type='inf', error_if_nonfinite=False)),
        'O1',
        2.0**16,
    ),
]


@pytest.mark.parametrize(('args', 'words', 'level', 'scale'), ACCEPTED, ids=range(len(ACCEPTED)))
def test_what_stock_wrappers_accept(args: tuple[Any, ...], words: dict[str, Any], level: str, scale: float) -> None:
    model = net()
    before = copy.deepcopy((args, words))
    wrapper = AmpOptimWrapper(*args, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), **words)
    assert (wrapper.opt_level, wrapper.loss_scaler.get_scale()) == (level, scale)
    assert (args, words) == before
    for _ in range(3):
        one_step(model, wrapper)


def test_apex_alias_keeps_its_positional_order_and_default() -> None:
    optimizer = torch.optim.SGD(net().parameters(), lr=0.1)
    wrapper = ApexOptimWrapper(
        'O2', 128.0, True, torch.bfloat16, None, 'False', True, torch.float16, 2, 0, 1.0, 512.0, optimizer=optimizer
    )
    resolved = wrapper.policy
    assert (resolved.opt_level, resolved.cast_model_type, resolved.keep_batchnorm_fp32) == ('O2', torch.bfloat16, False)
    assert (resolved.cast_model_outputs, resolved.num_losses, resolved.verbosity) == (torch.float16, 2, 0)
    assert resolved.loss_scale.init_scale == 128.0
    assert ApexOptimWrapper('O3', optimizer=optimizer).policy.loss_scale.dynamic


@pytest.mark.parametrize(
    ('words', 'parts'),
    [
        (dict(opt_level='o2'), ["'o2'", "'O2'"]),
        (dict(opt_levl='O2'), ['opt_levl', "'opt_level'"]),
        (
            dict(opt_level='O1', master_weights=True, keep_batchnorm_fp32=True, num_losses=0),
            ['3 conflicts', 'num_losses=0'],
        ),
        (dict(accumulative_counts=0), ['accumulative_counts=0']),
        (dict(clip_grad=dict(max_nrm=1.0)), ['max_nrm', "'max_norm'"]),
        (dict(clip_grad=dict(type='global', max_norm=1.0)), ["'global'", "'norm' or 'value'"]),
        (dict(clip_grad={}), ['clip_grad={}']),
        (dict(use_fsdp=True), ['use_fsdp=True', 'not supported yet']),
        (dict(optimizer=None), ['optimizer is missing']),
        (dict(loss_scale=True, clip_grad=dict(clip_value=1.0)), ['conflicts', 'loss_scale=True', 'clip_value']),
    ],
)
def test_bad_arguments_come_in_one_typed_error(words: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(AmpConfigError) as error:
        wrap(net(), **words)
    assert all(part in str(error.value) for part in parts), str(error.value)


def test_optimizers_that_cannot_be_wrapped() -> None:
    with pytest.raises(AmpAttachError, match='LBFGS'):
        wrap(net(), optimizer=torch.optim.LBFGS(net().parameters()))
    with pytest.raises(AmpConfigError, match='optimizer='):
        wrap(net(), optimizer='SGD')


def test_callers_clip_grad_is_left_alone() -> None:
    clip = dict(type='value', clip_value=0.5)
    wrap(net(), clip_grad=clip)
    assert clip == dict(type='value', clip_value=0.5)


# -- bits --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('words', [dict(opt_level='O0'), dict(opt_level='O2', enabled=False)], ids=['O0', 'disabled'])
@pytest.mark.parametrize('extra', [{}, dict(clip_grad=dict(max_norm=0.1), accumulative_counts=3)], ids=['bare', 'clip'])
def test_equal_to_the_plain_wrapper_bit_for_bit(words: dict[str, Any], extra: dict[str, Any], tmp_path: Path) -> None:
    plain = toy.run(tmp_path / 'plain', dict(type='OptimWrapper', optimizer=SGD, **copy.deepcopy(extra)))
    ours = toy.run(tmp_path / 'ours', dict(type='AmpOptimWrapper', optimizer=SGD, **words, **copy.deepcopy(extra)))
    left, right = toy.checkpoint(tmp_path / 'plain'), toy.checkpoint(tmp_path / 'ours')
    assert toy.differences(left['state_dict'], right['state_dict']) == []
    for key in ('train/loss', 'val/toy/score', *(['train/grad_norm'] if 'clip_grad' in extra else [])):
        logs = [saved['message_hub']['log_scalars'][key].data[0].tolist() for saved in (left, right)]
        assert logs[0] == logs[1]
    if words.get('enabled') is False:
        assert toy.differences(left['optimizer'], right['optimizer']) == []
    else:
        assert {'loss_scaler', 'amp'} <= right['optimizer'].keys()
        assert toy.differences(left['optimizer']['state'], right['optimizer']['state']) == []
    assert type(plain.optim_wrapper) is OptimWrapper
    assert type(ours.optim_wrapper) is AmpOptimWrapper


@pytest.mark.parametrize('level', toy.LEVELS)
def test_powers_of_two_change_no_bit(level: str) -> None:
    results = []
    # scales between which nothing leaves the range of float16
    for scale in (2.0**8, 2.0**10):
        model = net()
        wrapper = wrap(model, opt_level=level, loss_scale=scale, clip_grad=dict(max_norm=0.5))
        losses = [one_step(model, wrapper) for _ in range(5)]
        results.append((losses, model.state_dict(), wrapper.optimizer.state_dict()['state']))
    assert toy.differences(*results) == []


OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, dict(lr=0.1, momentum=0.9)),
    (torch.optim.SGD, dict(lr=0.1, momentum=0.9, foreach=True)),
    (torch.optim.SGD, dict(lr=0.1, momentum=0.9, fused=True)),
    (torch.optim.Adam, dict(lr=0.02, eps=1e-4, foreach=True)),
    (torch.optim.Adam, dict(lr=0.02, eps=1e-4, fused=True)),
    (torch.optim.AdamW, dict(lr=0.02, eps=1e-4)),
    (torch.optim.AdamW, dict(lr=0.02, eps=1e-4, fused=True)),
    (torch.optim.RMSprop, dict(lr=0.005, eps=1e-3)),
    (torch.optim.RMSprop, dict(lr=0.005, eps=1e-3, foreach=True)),
]


@pytest.mark.parametrize('level', toy.LEVELS)
@pytest.mark.parametrize('number', range(len(OPTIMIZERS)))
def test_every_optimizer_learns_at_every_level(level: str, number: int, device: torch.device) -> None:
    kind, words = OPTIMIZERS[number]
    model = toy.ToyModel().to(device)
    data = toy.ToyData()
    batch = dict(inputs=data.images.to(device), labels=data.labels.to(device))
    optimizer = kind(model.parameters(), **words)
    wrapper = AmpOptimWrapper(opt_level=level, optimizer=optimizer)
    losses = [float(model.train_step(dict(batch), wrapper)['loss']) for _ in range(30)]
    assert losses[-1] < 0.7 * losses[0]
    expected = toy.HALF.get(level, torch.float32)
    assert model.conv.weight.dtype == expected
    assert model.bn.weight.dtype == (expected if level == 'O3' else torch.float32)
    stepped = {p.dtype for p in wrapper.master_params()}
    assert stepped == ({torch.float16} if level == 'O3' else {torch.float32})


# -- a whole life ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('level', toy.LEVELS)
def test_train_validate_test_and_call_parts_directly(level: str, tmp_path: Path) -> None:
    runner = toy.run(
        tmp_path,
        dict(type='AmpOptimWrapper', opt_level=level, optimizer=SGD, clip_grad=dict(max_norm=1.0)),
        test_dataloader=toy.loader(shuffle=False),
        test_evaluator=dict(type='ToyScore'),
        test_cfg=dict(),
    )
    model = runner.model
    assert model.data_preprocessor.mean.dtype == torch.float32
    score = runner.message_hub.get_scalar('val/toy/score').current()
    assert runner.test()['toy/score'] == score
    features = model.extract_feat(torch.randn(2, 1, 6, 6))
    assert features.dtype == toy.HALF.get(level, torch.float32)
    saved = toy.checkpoint(tmp_path)
    kinds = {value.dtype for value in saved['state_dict'].values()}
    assert kinds == {torch.float32, torch.int64}
    plain = toy.ToyModel()
    plain.load_state_dict(saved['state_dict'])


@pytest.mark.parametrize('level', toy.LEVELS)
def test_validation_may_autocast_too(level: str, tmp_path: Path) -> None:
    runner = toy.run(
        tmp_path,
        dict(type='AmpOptimWrapper', opt_level=level, optimizer=SGD),
        val_cfg=dict(fp16=True),
        val_evaluator=dict(type='ToyScore', fp32=False),
    )
    assert runner.message_hub.get_scalar('val/toy/score').current() < 0


def test_data_elements_pass_through_untouched() -> None:
    seen: list[Any] = []

    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 2)

        def forward(self, inputs: Tensor, samples: list[BaseDataElement]) -> Tensor:
            seen.extend(samples)
            return self.fc(inputs)

    model = Detector()
    wrapper = wrap(model, opt_level='O2')
    sample = BaseDataElement(labels=torch.tensor([70001]), boxes=torch.rand(1, 4))
    with wrapper.optim_context(model):
        model(torch.randn(1, 4), samples=[sample])
    assert seen[0] is sample
    assert (sample.labels.item(), sample.labels.dtype, sample.boxes.dtype) == (70001, torch.int64, torch.float32)


def test_parse_losses_and_16_bit_losses_outside_the_context() -> None:
    model = net()
    wrapper = wrap(model, opt_level='O2', cast_model_outputs=torch.float16, loss_scale=2.0**15)
    with wrapper.optim_context(model):
        out = model(torch.randn(6, 4))
    assert out.dtype == torch.float16
    # 2^15 times a loss of about 1000 is infinite in float16
    wrapper.update_params(out.mean() + 1000.0)
    assert wrapper.loss_scaler.counts.tolist() == [1, 0, 0]


def test_several_losses_by_id() -> None:
    model = net()
    wrapper = wrap(model, opt_level='O2', num_losses=2, accumulative_counts=2)
    batch = torch.randn(6, 4)
    with wrapper.optim_context(model):
        out = model(batch)
        first, second = out.square().mean(), out.abs().mean()
    wrapper.update_params(first * float('inf'), loss_id=0)
    with wrapper.optim_context(model):
        second = model(batch).abs().mean()
    wrapper.update_params(second, loss_id=1)
    scales = [scaler.get_scale() for scaler in wrapper.loss_scalers]
    assert scales == [2.0**15, 2.0**16]
    with pytest.raises(AmpUsageError, match='loss_id=2'):
        wrapper.update_params(second, loss_id=2)


def test_scheduler_hooks_into_step_and_base_param_settings_survive() -> None:
    from mmengine.optim import LinearLR

    model = net()
    groups = [dict(params=[p], lr=0.1 * (i + 1)) for i, p in enumerate(model.parameters())]
    wrapper = wrap(model, opt_level='O2', optimizer=torch.optim.SGD(groups, lr=0.1))
    scheduler = LinearLR(wrapper, start_factor=0.5, end=4, by_epoch=False)
    for _ in range(3):
        one_step(model, wrapper)
        scheduler.step()
    saved = wrapper.state_dict()
    other = net()
    groups = [dict(params=[p], lr=0.1 * (i + 1)) for i, p in enumerate(other.parameters())]
    resumed = wrap(other, opt_level='O2', optimizer=torch.optim.SGD(groups, lr=0.1))
    before = copy.deepcopy(saved)
    resumed.load_state_dict(saved)
    assert toy.differences(before, saved) == []
    assert resumed.get_lr() == wrapper.get_lr()
    assert resumed.base_param_settings['lr'] != 0.1
    one_step(other, resumed)


@pytest.mark.parametrize('level', toy.LEVELS)
def test_wrapper_dict_trains_two_networks(level: str) -> None:
    class Gan(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generator = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
            self.discriminator = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
            self.perceptual = nn.Linear(4, 4).requires_grad_(False)

    torch.manual_seed(0)
    model = Gan()
    optimizers = {k: torch.optim.SGD(getattr(model, k).parameters(), lr=0.05) for k in ('generator', 'discriminator')}
    second = 'O0' if level == 'O2' else level
    wrappers = OptimWrapperDict(
        generator=AmpOptimWrapper(opt_level=level, optimizer=optimizers['generator']),
        discriminator=AmpOptimWrapper(opt_level=second, optimizer=optimizers['discriminator']),
    )
    wrappers.initialize_count_status(model, 0, 10)
    # attached before the first forward, not lazily: the generator must not run in FP32 in the discriminator's turn
    assert model.generator[0].weight.dtype == toy.HALF.get(level, torch.float32)
    assert model.discriminator[0].weight.dtype == toy.HALF.get(second, torch.float32)
    assert model.perceptual.weight.dtype == torch.float32
    real, noise = torch.randn(16, 4) + 1, torch.randn(16, 4)
    before = [
        p.detach().clone() for p in (*wrappers['generator'].master_params(), *wrappers['discriminator'].master_params())
    ]
    for _ in range(3):
        with wrappers['discriminator'].optim_context(model):
            fake = model.generator(noise).detach()
            loss = (model.discriminator(fake) - model.discriminator(real)).mean()
        wrappers['discriminator'].update_params(loss)
        with wrappers['generator'].optim_context(model):
            fake = model.generator(noise)
            loss = -model.discriminator(fake).mean() + (model.perceptual(fake.float()) - real).square().mean()
        wrappers['generator'].update_params(loss)
        wrappers['discriminator'].zero_grad()
    after = (*wrappers['generator'].master_params(), *wrappers['discriminator'].master_params())
    assert sum(not a.equal(b) for a, b in zip(before, after)) >= len(before) - 2
    again = wrappers.state_dict()
    wrappers.load_state_dict(again)


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
    assert toy.differences(ends[0], ends[1]) == []
    assert toy.differences(ends[0], ends[2]) == []


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
            assert toy.differences(dict(weights), dict(model.state_dict())) == []
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
    assert toy.differences(before, (model.state_dict(), wrapper.state_dict())) == []


def test_another_kind_of_checkpoint_is_named() -> None:
    state = {'generator': {'state': {}, 'param_groups': []}, 'discriminator': {'state': {}, 'param_groups': []}}
    with pytest.raises(AmpCheckpointError, match='several optimizers'):
        wrap(net()).load_state_dict(state)


# -- overflow ----------------------------------------------------------------------------------------------------------


def test_overflow_that_never_ends_names_parameters() -> None:
    model = net()
    wrapper = wrap(model, opt_level='O2', max_consecutive_skips=4, verbosity=0)
    one_step(model, wrapper)
    before = copy.deepcopy((model.state_dict(), wrapper.optimizer.state_dict()))
    for _ in range(3):
        one_step(model, wrapper, factor=float('nan'))
    with pytest.raises(OverflowStreakError) as error:
        one_step(model, wrapper, factor=float('nan'))
    assert '4 optimizer steps in a row' in str(error.value)
    assert '0.weight' in str(error.value)
    after = model.state_dict(), wrapper.optimizer.state_dict()
    # the batch statistics of BatchNorm belong to the forward pass
    for state in (before[0], after[0]):
        for key in [key for key in state if 'running' in key or 'tracked' in key]:
            del state[key]
    assert toy.differences(before, after) == []


def test_overflow_messages_are_rate_limited_and_can_be_silenced() -> None:
    for verbosity, expected in ((1, 5 + 2), (0, 0)):
        model = net()
        wrapper = wrap(model, opt_level='O2', verbosity=verbosity, max_consecutive_skips=None)
        with toy.captured_log() as lines:
            for _ in range(20):
                one_step(model, wrapper, factor=float('inf'))
        assert len([line for line in lines if 'skipped' in line]) == expected


# -- logging -----------------------------------------------------------------------------------------------------------


class _NoHostRead(TorchDispatchMode):
    """Counts what makes the host wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self.reads += 1
        return func(*args, **(kwargs or {}))


def test_log_values_come_over_when_they_are_read() -> None:
    MessageHub.get_instance('deferred')
    model = net()
    wrapper = wrap(model, opt_level='O2', clip_grad=dict(max_norm=1.0))
    log = wrapper._log
    for _ in range(6):
        one_step(model, wrapper)
    one_step(model, wrapper, factor=float('inf'))
    assert log.transfers == 0
    hub = wrapper.message_hub
    assert len(hub.get_scalar('train/grad_norm').data[0]) == 6
    assert log.transfers == 1
    assert hub.get_scalar('train/amp_scale').data[0].tolist() == [2.0**16] * 6 + [2.0**15]
    assert hub.get_scalar('train/amp_skipped').current() == 1.0
    assert log.transfers == 1


def test_deferred_buffers_are_saved_as_mmengines_own(tmp_path: Path) -> None:
    toy.run(tmp_path, dict(type='AmpOptimWrapper', opt_level='O2', optimizer=SGD, clip_grad=dict(max_norm=1.0)))
    data = (tmp_path / 'epoch_2.pth').read_bytes()
    assert b'amp_wrapper' not in data
    saved = toy.checkpoint(tmp_path)['message_hub']['log_scalars']['train/grad_norm']
    assert type(saved).__module__ == 'mmengine.logging.history_buffer'
    skipped = toy.checkpoint(tmp_path)['message_hub']['log_scalars']['train/amp_skipped'].current()
    # a skipped step logs no norm: it would be infinite
    assert len(saved.data[0]) == 14 - skipped
    assert bool(torch.tensor(saved.data[0]).isfinite().all())


@pytest.mark.parametrize(('words', 'reads'), [(dict(opt_level='O2'), 4), (dict(opt_level='O0'), 0)])
def test_host_reads_of_a_step(words: dict[str, Any], reads: int) -> None:
    """One transfer where gradients are checked (``tolist`` of four numbers), none at O0."""
    model = net()
    wrapper = wrap(model, **words)
    one_step(model, wrapper)
    with wrapper.optim_context(model):
        loss = model(torch.randn(6, 4)).square().mean()
    wrapper.backward(loss)
    with _NoHostRead() as counted:
        wrapper.step()
        wrapper.zero_grad()
    assert counted.reads <= reads


# -- checkpoints under weights_only ------------------------------------------------------------------------------------


def test_only_what_history_buffers_need_may_be_unpickled(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return getattr, (torch.Tensor, '__init__')

    torch.save(dict(x=Evil()), tmp_path / 'evil.pth')
    with pytest.raises(Exception, match='HistoryBuffer'):
        torch.load(tmp_path / 'evil.pth', weights_only=True)


def test_detach_gives_everything_back() -> None:
    model = net()
    wrapper = wrap(model, opt_level='O2')
    for _ in range(3):
        one_step(model, wrapper)
    masters = [p.detach().clone() for p in wrapper.master_params()]
    wrapper.detach()
    assert toy.differences(masters, [p.detach() for p in model.parameters()]) == []
    assert [id(p) for g in wrapper.optimizer.param_groups for p in g['params']] == [id(p) for p in model.parameters()]
    assert model(torch.randn(6, 4)).dtype == torch.float32


def test_runner_sees_the_error_before_any_work(tmp_path: Path) -> None:
    config = toy.toy_config(
        tmp_path, dict(type='AmpOptimWrapper', opt_level='O2', patch_torch_functions=True, optimizer=SGD)
    )
    runner = Runner.from_cfg(config)
    # mmengine keeps the type in the chain when a registry build fails
    with pytest.raises(Exception, match='patch_torch_functions=True conflicts'):
        runner.train()
    assert not list(tmp_path.glob('*.pth'))


# -- what reviewers broke ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize('level', toy.LEVELS)
def test_a_weight_unfrozen_later_is_clipped(level: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    wrapper = wrap(
        model,
        opt_level=level,
        loss_scale=1.0,
        clip_grad=dict(max_norm=1e-2),
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
    )
    batch = torch.randn(8, 4) * 10
    one_step(model, wrapper, batch)
    model[0].requires_grad_(True)
    before = model.state_dict()['0.weight'].clone()
    one_step(model, wrapper, batch)
    moved = (model.state_dict()['0.weight'] - before).norm()
    assert 0 < moved < 1.2e-2


def edited(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        model[0].weight.fill_(value)


class Doubling(nn.Linear):
    """Changes its weight after loading it."""

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self.weight.data.mul_(2)


class OwnLoader(nn.Linear):
    """Loads its weight by itself."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self.weight.data.copy_(state_dict[prefix + 'weight'])


@pytest.mark.parametrize('loads', ['torch', 'mmengine'])
def test_a_partial_load_leaves_other_edits_alone(loads: str) -> None:
    from mmengine.runner.checkpoint import load_state_dict

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    wrapper = wrap(model, opt_level='O2')
    one_step(model, wrapper)
    edited(model, 3.0)
    part = {'1.bias': torch.zeros(2)}
    model.load_state_dict(part, strict=False) if loads == 'torch' else load_state_dict(model, part)
    assert bool((model.state_dict()['0.weight'] == 3.0).all())
    assert bool((model[0].weight == 3.0).all())


@pytest.mark.parametrize(('kind', 'expected'), [(Doubling, 2.0), (OwnLoader, 1.0)])
def test_modules_that_load_in_their_own_way_win(kind: type[nn.Linear], expected: float) -> None:
    model = nn.Sequential(kind(4, 4), nn.Linear(4, 2))
    wrapper = wrap(model, opt_level='O2', optimizer=torch.optim.SGD(model.parameters(), lr=0.0))
    one_step(model, wrapper)
    state = {**model.state_dict(), '0.weight': torch.ones(4, 4)}
    model.load_state_dict(state)
    one_step(model, wrapper)
    assert bool((model.state_dict()['0.weight'] == expected).all())
    assert bool((model[0].weight == expected).all())


@pytest.mark.parametrize('level', toy.LEVELS)
def test_predictions_inside_data_elements_are_fp32(level: str) -> None:
    class Predictor(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 2)

        def forward(self, inputs: Tensor) -> list[BaseDataElement]:
            inner = BaseDataElement(boxes=self.fc(inputs))
            return [BaseDataElement(scores=self.fc(inputs), pred=inner, labels=torch.tensor([70001]))]

    model = Predictor()
    wrapper = wrap(model, opt_level=level)
    wrapper.attach(model)
    (sample,) = model(torch.randn(1, 4))
    assert (sample.scores.dtype, sample.pred.boxes.dtype) == (torch.float32, torch.float32)
    assert (sample.labels.item(), sample.labels.dtype) == (70001, torch.int64)
    sample.scores.detach().numpy()


@pytest.mark.parametrize('level', ['O0', 'O1', 'O4', 'O2'])
def test_frozen_16_bit_parts_beside_fp32_ones(level: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].bfloat16().requires_grad_(False)
    wrapper = wrap(model, opt_level=level, optimizer=torch.optim.SGD(model[1].parameters(), lr=0.1))
    wrapper.attach(model)
    assert model[0].weight.dtype == (torch.float16 if level == 'O2' else torch.bfloat16)
    trainable = nn.Linear(4, 2).half()
    with pytest.raises(AmpAttachError, match='16-bit already'):
        wrap(trainable, opt_level=level).attach(trainable)


def two_wrappers(counts: int = 1) -> tuple[nn.Module, OptimWrapperDict]:
    torch.manual_seed(0)
    model = nn.ModuleDict(dict(g=nn.Linear(4, 4), d=nn.Linear(4, 1)))
    words = dict(opt_level='O2', accumulative_counts=counts, loss_scale=64.0)
    return model, OptimWrapperDict(**{k: wrap(model[k], **words) for k in ('g', 'd')})


def turn(model: nn.Module, wrappers: OptimWrapperDict, index: int) -> None:
    batch = torch.randn(3, 4, generator=torch.Generator().manual_seed(index))
    for key in ('d', 'g'):
        with wrappers[key].optim_context(model):
            loss = model['d'](model['g'](batch)).square().mean()
        grads = [p.grad for p in model['g' if key == 'd' else 'd'].parameters()]
        wrappers[key].update_params(loss)
        for p, grad in zip(model['g' if key == 'd' else 'd'].parameters(), grads):
            p.grad = grad


def test_wrapper_dict_resumes_inside_a_window() -> None:
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
    assert toy.differences(dict(whole.state_dict()), dict(resumed.state_dict())) == []


def test_members_attach_together_without_a_runner() -> None:
    model, wrappers = two_wrappers()
    model['d'].requires_grad_(False)
    with wrappers['g'].optim_context(model):
        assert model['d'].weight.dtype == model['g'].weight.dtype == torch.float16
    model['d'].requires_grad_(True)
    turn(model, wrappers, 0)
    assert [len(list(wrappers[key].master_params())) for key in ('g', 'd')] == [2, 2]


def test_optimizers_whose_eps_is_no_number_attach_at_o3() -> None:
    model = nn.Linear(4, 4)
    wrapper = wrap(model, opt_level='O3', optimizer=torch.optim.Adafactor(model.parameters()))
    wrapper.attach(model)
    assert model.weight.dtype == torch.float16
    other = nn.Linear(4, 4)
    with toy.captured_log() as lines:
        wrap(other, opt_level='O3', optimizer=torch.optim.Adam(other.parameters())).attach(other)
    assert any('eps=1e-08 is 0' in line for line in lines)


@pytest.mark.parametrize('reentrant', [False, True])
@pytest.mark.parametrize('level', toy.LEVELS)
def test_recomputed_segments_see_the_same_casts(level: str, reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    class Block(nn.Module):
        def __init__(self, recompute: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.head = nn.Linear(4, 4)
            self.body = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Tanh(), nn.MSELoss())
            self.recompute = recompute

        def forward(self, x: Tensor) -> Tensor:
            def part(y: Tensor) -> Tensor:
                return self.body[3](self.body[:3](y), torch.zeros_like(y))

            y = self.head(x)
            return checkpoint(part, y, use_reentrant=reentrant) if self.recompute else part(y)

    ends = []
    for recompute in (True, False):
        model = Block(recompute)
        wrapper = wrap(model, opt_level=level)
        for _ in range(2):
            one_step(model, wrapper)
        ends.append(model.state_dict())
    assert toy.differences(*ends) == []


@pytest.mark.parametrize('attached', [False, True])
def test_scalar_state_keeps_its_type_at_o3(attached: bool) -> None:
    model = nn.Linear(4, 4)
    wrapper = wrap(model, opt_level='O3', optimizer=torch.optim.NAdam(model.parameters(), eps=1e-3))
    for _ in range(2):
        one_step(model, wrapper)
    other = nn.Linear(4, 4)
    resumed = wrap(other, opt_level='O3', optimizer=torch.optim.NAdam(other.parameters(), eps=1e-3))
    if attached:
        resumed.attach(other)
    resumed.load_state_dict(wrapper.state_dict())
    resumed.attach(other)
    assert toy.differences(wrapper.optimizer.state_dict()['state'], resumed.optimizer.state_dict()['state']) == []


def test_loading_forgets_an_earlier_window() -> None:
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


def test_the_clip_limit_may_change_between_steps() -> None:
    model = nn.Linear(4, 2)
    wrapper = wrap(
        model,
        opt_level='O2',
        loss_scale=1.0,
        clip_grad=dict(max_norm=1e3),
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
    )
    one_step(model, wrapper)
    wrapper.clip_grad_kwargs['max_norm'] = 1e-3
    before = model.state_dict()['weight'].clone()
    one_step(model, wrapper)
    assert (model.state_dict()['weight'] - before).norm() < 1.1e-3


def test_a_weight_is_added_to_the_optimizer_once() -> None:
    model = nn.Linear(4, 2)
    wrapper = wrap(model, opt_level='O2')
    wrapper.attach(model)
    wrapper.optimizer.add_param_group(dict(params=[model.weight]))
    with pytest.raises(AmpUsageError, match='weight was added to the optimizer a second time'):
        one_step(model, wrapper)


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
    assert toy.differences(left['state_dict'], right['state_dict']) == []
    assert toy.differences(left['ema_state_dict'], right['ema_state_dict']) == []
