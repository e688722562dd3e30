"""AmpOptimWrapper: its arguments, clipping, losses of masters, saved states, and whole trainings with a runner."""

from __future__ import annotations

import copy
import dataclasses
import math
import pathlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toy
from bits import differences, differing, same
from mmengine.logging import HistoryBuffer
from mmengine.optim import LinearLR, OptimWrapper
from mmengine.registry import OPTIM_WRAPPERS, DefaultScope
from mmengine.runner.checkpoint import load_state_dict
from mmengine.structures import BaseDataElement
from pairs import pairs
from play import EXACT_LEVELS, Setup, Wrapper, check, fused_sgd, sgd
from torch import Tensor, nn
from torch.optim import SGD, AdamW, NAdam, Optimizer
from toy_training import CAST, LEVELS, MASTERED, Net, Training, momentum

from amp_wrapper import (
    AmpAttachError,
    AmpConfigError,
    AmpOptimWrapper,
    AmpUsageError,
    ApexOptimWrapper,
    FusedSGD,
    OverflowStreakError,
    ops,
)
from amp_wrapper import TorchAmpOptimWrapper as Stock

PLAIN_SGD = dict(type='SGD', lr=0.1, momentum=0.9)


def wrap(model: nn.Module, **words: Any) -> AmpOptimWrapper:
    return AmpOptimWrapper(**{'optimizer': momentum(model.parameters()), **words})


def update(model: nn.Module, wrapper: OptimWrapper, factor: float = 1.0) -> None:
    """One iteration."""
    x = torch.ones(2, 4).cumsum(0) * factor
    with wrapper.optim_context(model):
        loss = model(x).float().square().mean()
    wrapper.update_params(loss)


# -- names and arguments ------------------------------------------------------------------------------------------------


def test_bare_names_are_ours_under_every_scope() -> None:
    names = {'AmpOptimWrapper': AmpOptimWrapper, 'ApexOptimWrapper': ApexOptimWrapper, 'TorchAmpOptimWrapper': Stock}
    for scope in (None, 'mmengine', 'mmdet', 'amp_wrapper'):
        with DefaultScope.overwrite_default_scope(scope):
            assert {name: OPTIM_WRAPPERS.get(name) for name in names} == names, scope
    assert Stock.__module__.startswith('mmengine.')


def test_one_line_names_class_level_and_ops(log: list[str]) -> None:
    wrap(Net(), opt_level='O2', verbosity=0)
    assert log == []
    wrap(Net(), opt_level='O2')
    (line,) = log
    assert all(word in line for word in ('AmpOptimWrapper', 'amp_wrapper', 'O2', 'float16', ops.backend()))


SCALE = dict(init_scale=64.0, growth_factor=1.5, backoff_factor=0.25, growth_interval=7, enabled=True)
CLIP = dict(max_norm=1.0, norm_type='inf', error_if_nonfinite=False)
#: Positional arguments, keyword arguments; the level and the loss scale that they mean.
ACCEPTED: list[tuple[tuple[Any, ...], dict[str, Any], str, float]] = [
    # of mmengine's AmpOptimWrapper
    ((), {}, 'O1', 2.0**16),
    (('dynamic',), {}, 'O1', 2.0**16),
    ((512,), {}, 'O1', 512.0),
    (('128.0',), {}, 'O1', 128.0),
    ((SCALE,), {}, 'O1', 64.0),
    (('dynamic', 'float16'), {}, 'O1', 2.0**16),
    (('dynamic', 'bfloat16', False), {}, 'O4', 2.0**16),
    (('dynamic', 'float32'), {}, 'O1', 2.0**16),
    ((), dict(dtype=torch.bfloat16), 'O4', 1.0),
    ((), dict(accumulative_counts=3, clip_grad=CLIP), 'O1', 2.0**16),
    # of apex
    ((), dict(opt_level='O2', dtype='bf16'), 'O5', 1.0),
    ((), dict(opt_level='O2', keep_batchnorm_fp32='False', loss_scale='256'), 'O2', 256.0),
    ((), dict(opt_level='O3', cast_model_outputs='half'), 'O3', 1.0),
]


def test_arguments_of_stock_wrappers_are_taken() -> None:
    """And left alone: mmengine pops from the dict that it is given."""
    wrong = []
    for args, words, level, scale in ACCEPTED:
        model, before = Net(), copy.deepcopy((args, words))
        wrapper = AmpOptimWrapper(*args, optimizer=momentum(model.parameters()), **words)
        found = wrapper.opt_level, wrapper.loss_scaler.get_scale()
        for _ in range(3):
            update(model, wrapper)
        if found != (level, scale) or (args, words) != before:
            wrong.append((args, words, found))
    assert wrong == []


def test_apex_wrapper_has_a_dynamic_scale_at_every_level() -> None:
    def made(**words: Any) -> ApexOptimWrapper:
        return ApexOptimWrapper(optimizer=momentum(Net().parameters()), **words)

    assert (made().opt_level, made().loss_scaler.get_scale()) == ('O1', 2.0**16)
    assert made(opt_level='O3').loss_scaler.get_scale() == 2.0**16
    found = made(opt_level='O2', loss_scale=128.0, cast_model_type=torch.bfloat16, num_losses=2, verbosity=0)
    assert found.policy.cast_model_type is torch.bfloat16
    assert [scaler.get_scale() for scaler in found.loss_scalers] == [128.0, 128.0]


#: Arguments, and what the error has to name.
REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    (dict(opt_level='o2'), ["'o2'", "'O2'"]),
    (dict(opt_levl='O2'), ['opt_levl', "'opt_level'"]),
    (dict(opt_level='O1', master_weights=True, num_losses=0), ['master_weights=True conflicts', 'num_losses=0']),
    (dict(accumulative_counts=0), ['accumulative_counts=0']),
    (dict(clip_grad=dict(max_nrm=1.0)), ['max_nrm', "'max_norm'"]),
    (dict(clip_grad=dict(type='global', max_norm=1.0)), ["'global'", "'value'"]),
    (dict(clip_grad={}), ['clip_grad={}']),
    (dict(clip_grad=1.0), ['clip_grad=1.0']),
    (dict(clip_grad=dict(max_norm=math.nan)), ["['max_norm']=nan"]),
    (dict(clip_grad=dict(type='value', clip_value=-0.1)), ["['clip_value']=-0.1"]),
    (dict(loss_scale=True, clip_grad=dict(clip_value=1.0)), ['loss_scale=True', 'clip_value']),
    (dict(opt_level='O2', master_weights='split', clip_grad=dict(max_norm=1.0, norm_type=1.0)), ['norm_type']),
    (dict(use_fsdp=True), ['use_fsdp=True', 'MMFullyShard']),
    (dict(optimizer=None), ['optimizer is missing']),
    (dict(optimizer='SGD'), ['optimizer=']),
]


def test_bad_arguments_come_in_one_error() -> None:
    wrong = []
    for words, parts in REFUSED:
        with pytest.raises(AmpConfigError) as error:
            wrap(Net(), **words)
        if not all(part in str(error.value) for part in parts):
            wrong.append((words, str(error.value)))
    assert wrong == []


def test_models_and_optimizers_that_cannot_be_taken() -> None:
    model = Net()
    with pytest.raises(AmpAttachError, match='LBFGS'):
        wrap(model, optimizer=torch.optim.LBFGS(model.parameters()))
    first, second = wrap(model, opt_level='O2'), wrap(model, opt_level='O2')
    first.attach(model)
    with pytest.raises(AmpAttachError, match='already carries casts'):
        second.attach(model)
    assert copy.deepcopy(second).opt_level == 'O2'
    with pytest.raises(AmpUsageError, match='an attached wrapper cannot be copied'):
        copy.deepcopy((model, first))
    first.optimizer.add_param_group(dict(params=[model.fc.weight]))
    with pytest.raises(AmpUsageError, match=r'fc\.weight has a master in the optimizer already'):
        update(model, first)


# -- clipping -----------------------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    'SGD': momentum,
    'FusedSGD': lambda p: FusedSGD(p, lr=0.125, momentum=0.5),
}
CLIPPED = pairs(level=('O0', 'O2', 'O4', 'O5'), name=OPTIMIZERS)


def clipped(level: str, name: str, **clip: Any) -> Training:
    return Training(level, make=OPTIMIZERS[name], loss_scale=None if level == 'O0' else 8.0, clip_grad=clip)


@CLIPPED
def test_changed_clipping_counts_from_the_next_step(level: str, name: str) -> None:
    """Hooks change ``clip_grad_kwargs`` in place, and so do schedules of the limit."""
    for change in (dict(max_norm=5.0), dict(norm_type=1.0), dict(norm_type='inf')):
        runs = [clipped(level, name, max_norm=0.01) for _ in range(3)]
        for run in runs:
            run.train(0)
        runs[0].wrapper.clip_grad_kwargs.update(change)
        runs[1].wrapper.clip_grad_kwargs = {**runs[1].wrapper.clip_grad_kwargs, **change}
        for run in runs:
            run.train(1)
        changed, replaced, unchanged = (run.bits() for run in runs)
        assert same(changed, replaced) and 'master 0' in differing(changed, unchanged), change


@CLIPPED
def test_training_goes_on_after_nonfinite_norms_raised(level: str, name: str) -> None:
    """Also where the option is turned on later, and where the very first step raises; nothing is written then."""
    run, fresh = (clipped(level, name, max_norm=1.0, error_if_nonfinite=on) for on in (False, True))
    run.wrapper.clip_grad_kwargs['error_if_nonfinite'] = True
    for index in range(3):
        before = run.bits()
        run.backward(run.loss(index) * math.nan)
        with pytest.raises(RuntimeError, match='non-finite'):
            run.step()
        run.clear()
        assert differing(before, run.bits()) == []
        for each in (run, fresh):
            each.train(index)
    assert differing(run.bits(), fresh.bits()) == []


@pytest.mark.parametrize('level', LEVELS)
def test_weight_that_trains_later_is_clipped(level: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    wrapper = wrap(
        model, opt_level=level, loss_scale=1.0, clip_grad=dict(max_norm=1e-2), optimizer=SGD(model.parameters(), lr=1.0)
    )
    update(model, wrapper, 10.0)
    model[0].requires_grad_(True)
    before = model.state_dict()['0.weight'].clone()
    update(model, wrapper, 10.0)
    assert 0 < (model.state_dict()['0.weight'] - before).norm() < 1.2e-2


@pytest.mark.parametrize('kind', [OptimWrapper, AmpOptimWrapper])
def test_gradient_of_a_frozen_weight_has_no_part_in_the_norm(kind: Any) -> None:
    """As with mmengine's own wrapper: one that was left there, of a weight that stands still now."""
    model = nn.Linear(2, 1)
    words = dict(opt_level='O0') if kind is AmpOptimWrapper else {}
    wrapper = kind(optimizer=SGD(model.parameters(), lr=1.0), clip_grad=dict(max_norm=1.0), **words)
    model.bias.requires_grad_(False).grad = torch.tensor([100.0])
    before = model.weight.detach().clone()
    with wrapper.optim_context(model):
        loss = model(torch.tensor([[0.75, 0.0]])).sum()
    wrapper.update_params(loss)
    assert torch.equal(before - model.weight, torch.tensor([[0.75, 0.0]]))


# -- losses that contain masters ------------------------------------------------------------------------------------------

BOTH, STEP = (0, 1), ('step',)
PENALTIES = {
    'masters alone': [('penalty',), STEP, ('penalty',), STEP, ('backward', BOTH), STEP],
    'model and masters': [('penalty', BOTH), STEP, ('penalty', BOTH, 1), STEP],
    'one after the other': [('backward', BOTH, 1), ('penalty',), ('penalty', BOTH, 2), ('backward', (0,), 3), STEP],
    'cleared to zeros': [('penalty',), ('clear', False), ('penalty', (1,)), STEP, ('backward', (0,)), STEP],
    'an overflow at a master': [('penalty', BOTH, 0, True), STEP, ('penalty', BOTH, 1), STEP],
    'an overflow in the model': [('penalty',), ('backward', (0,), 1, 0), STEP, ('penalty', (0,), 2), STEP],
    'a file': [('penalty', BOTH), STEP, ('save_and_load',), ('penalty', BOTH, 1), STEP],
}


@pairs(
    script=PENALTIES,
    level=EXACT_LEVELS,
    optimizer=(sgd, fused_sgd),
    clip=(None, 1.0),
    words=({}, dict(accumulate_in_fp32=True), dict(losses=2)),
)
def test_losses_that_contain_masters(script: str, level: str, optimizer: Any, clip: Any, words: dict[str, Any]) -> None:
    """Gradients of masters are unscaled once, and added to those that come through the model."""
    setup = Setup(level, optimizer, clip=clip, losses=words.get('losses', 1))
    options = {name: value for name, value in words.items() if name != 'losses'}
    check(PENALTIES[script], Wrapper, dataclasses.replace(setup, options=options))


def test_waiting_gradients_of_masters_are_saved_unrounded() -> None:
    """1/3 has no 16-bit number."""
    for level in MASTERED:
        whole, part = (Training(level, loss_scale=8.0, accumulative_counts=2) for _ in range(2))
        for run in (whole, part):
            run.wrapper.update_params(run.masters()[0].sum() / 3)
        saved = copy.deepcopy(part.wrapper.state_dict())
        part = Training(level, loss_scale=8.0, accumulative_counts=2)
        part.wrapper.load_state_dict(saved)
        for run in (whole, part):
            run.wrapper.update_params(run.loss())
        assert differing(whole.bits(), part.bits()) == []


def test_overflow_at_a_master_is_named_in_the_error_of_a_streak() -> None:
    for name in OPTIMIZERS:
        run = Training('O2', make=OPTIMIZERS[name], max_consecutive_skips=1)
        run.backward(run.loss() + run.masters()[0].sum() * math.inf)
        with pytest.raises(OverflowStreakError, match=r'Non-finite now: fc\.weight\.'):
            run.step()


# -- saved states -------------------------------------------------------------------------------------------------------


@pairs(level=CAST, make=(momentum, lambda p: AdamW(p, lr=1e-3), lambda p: NAdam(p, eps=1e-3)))
def test_resuming_before_or_after_attaching(level: str, make: Callable[[Any], Optimizer]) -> None:
    """The same bits as without an interruption: state is not rounded on its way, and numbers keep their type."""
    whole = Training(level, make=make)
    whole.train(0, 1, 2)
    weights, state = copy.deepcopy((dict(whole.model.state_dict()), whole.wrapper.state_dict()))
    runs = [whole]
    for order in ('weights state attach', 'attach weights state', 'weights attach state'):
        run = Training(level, make=make, attach=False)
        acts: dict[str, Callable[[], Any]] = dict(
            attach=lambda run=run: run.wrapper.initialize_count_status(run.model, 3, 10),
            weights=lambda run=run: run.model.load_state_dict(weights),
            state=lambda run=run: run.wrapper.load_state_dict(state),
        )
        for word in order.split():
            acts[word]()
        runs.append(run)
    for run in runs:
        run.train(3, 4, 5)
    for run in runs[1:]:
        assert differing(whole.bits(buffers=True), run.bits(buffers=True)) == []
        assert differences(whole.wrapper.state_dict(), run.wrapper.state_dict()) == []


def test_schedules_and_rates_are_saved() -> None:
    """mmengine's ``base_param_settings`` hold the rates of several groups."""

    def made() -> Training:
        return Training('O2', make=lambda p: SGD([dict(params=[q], lr=0.1 * i) for i, q in enumerate(p, 1)], lr=0.1))

    run, resumed = made(), made()
    scheduler = LinearLR(run.wrapper, start_factor=0.5, end=4, by_epoch=False)
    for index in range(3):
        run.train(index)
        scheduler.step()
    saved = run.wrapper.state_dict()
    before = copy.deepcopy(saved)
    resumed.wrapper.load_state_dict(saved)
    assert differences(before, saved) == []
    assert resumed.wrapper.get_lr() == run.wrapper.get_lr()
    assert resumed.wrapper.base_param_settings['lr'] != 0.1
    resumed.train(3)


def test_loading_forgets_gradients_that_waited() -> None:
    run = Training('O2', accumulative_counts=2)
    states = []
    for index in range(2):
        run.wrapper.update_params(run.loss(index))
        states.append(copy.deepcopy(run.wrapper.state_dict()))
    for attached in (True, False):
        other = Training('O2', attach=attached, accumulative_counts=2)
        for state, waits in zip(states, (True, False)):
            other.wrapper.load_state_dict(state)
            assert ('window' in other.wrapper.state_dict()['amp']) is waits or not attached
        other.wrapper.attach(other.model)
        assert 'window' not in other.wrapper.state_dict()['amp'] and all(
            p.grad is None for p in (*other.model.parameters(), *other.masters())
        )


class Doubling(nn.Linear):
    """Changes its weight after loading it."""

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self.weight.data.mul_(2)


class OwnLoader(nn.Linear):
    """Loads its weight by itself."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self.weight.data.copy_(state_dict[prefix + 'weight'])


@pairs(level=MASTERED, load=(nn.Module.load_state_dict, load_state_dict), kind=(nn.Linear, Doubling, OwnLoader))
def test_loads_of_torch_and_mmengine(level: str, load: Callable[..., Any], kind: type[nn.Linear]) -> None:
    """A partial one leaves edits of other weights alone; modules that load in their own way are followed."""
    model = nn.Sequential(kind(4, 4), nn.Linear(4, 2))
    wrapper = wrap(model, opt_level=level, optimizer=SGD(model.parameters(), lr=0.0))
    update(model, wrapper)
    with torch.no_grad():
        model[1].weight.fill_(3.0)
    load(model, {'0.weight': torch.full((4, 4), 1 / 3), '0.bias': torch.ones(4)}, strict=False)
    for _ in range(2):
        saved = model.state_dict()
        assert saved['1.weight'].unique().tolist() == [3.0]
        wanted = torch.tensor(1 / 3)
        if kind is Doubling:
            # what is written to a weight is rounded to its type
            wanted = wanted.to(model[0].weight.dtype).float() * 2
        assert saved['0.weight'].unique().tolist() == [wanted.item()]
        update(model, wrapper)


class Unpickled:
    """Asks for an attribute when it is loaded."""

    def __reduce__(self) -> Any:
        return getattr, (torch.Tensor, '__init__')


def test_only_attributes_of_history_buffers_may_be_unpickled(tmp_path: Path) -> None:
    torch.save(dict(x=Unpickled()), tmp_path / 'a.pth')
    with pytest.raises(Exception, match='HistoryBuffer'):
        torch.load(tmp_path / 'a.pth', weights_only=True)


@pytest.mark.parametrize('module', ['pathlib', 'pathlib._local'])
def test_classes_in_runner_files_may_be_unpickled(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.13 pickles paths under another module; onedl-mmengine allows classes, and takes them out after reading."""
    history = HistoryBuffer()
    history.update(1.0)
    content = dict(history=history, array=np.zeros(2), number=np.float64(1), part=slice(1), place=tmp_path)
    with monkeypatch.context() as other_python:
        other_python.setitem(sys.modules, module, pathlib)
        other_python.setattr(type(tmp_path), '__module__', module)
        torch.save(content, tmp_path / 'a.pth')
    for _ in range(2):
        with torch.serialization.safe_globals([HistoryBuffer, np.ndarray, np.dtype, slice, getattr]):
            pass
        read = torch.load(tmp_path / 'a.pth', weights_only=True)
        assert (read['history'].current(), read['place']) == (1.0, tmp_path)


# -- trainings with a runner ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize('words', [dict(opt_level='O0'), dict(opt_level='O2', enabled=False)], ids=['O0', 'disabled'])
def test_as_the_plain_wrapper_bit_for_bit(words: dict[str, Any], tmp_path: Path) -> None:
    common = dict(optimizer=PLAIN_SGD, accumulative_counts=3)
    ends = []
    for folder, wrapper in (('plain', dict(type='OptimWrapper')), ('ours', dict(type='AmpOptimWrapper', **words))):
        runner = toy.run(tmp_path / folder, {**wrapper, **common, 'clip_grad': dict(max_norm=0.1)})
        assert type(runner.optim_wrapper).__name__ == wrapper['type']
        ends.append(toy.checkpoint(tmp_path / folder))
    plain, ours = ends
    assert differences(plain['state_dict'], ours['state_dict']) == []
    for key in ('train/loss', 'val/toy/score', 'train/grad_norm'):
        logs = [saved['message_hub']['log_scalars'][key].data[0].tolist() for saved in ends]
        assert logs[0] == logs[1]
    if words['opt_level'] == 'O0':
        ours['optimizer'] = {k: v for k, v in ours['optimizer'].items() if k not in ('loss_scaler', 'amp')}
    assert differences(plain['optimizer'], ours['optimizer']) == []


@pairs(level=LEVELS, run=(toy.run, toy.run_flexible))
def test_train_validate_and_test(level: str, run: Callable[..., Any], tmp_path: Path) -> None:
    parts: Any = dict(test_dataloader=toy.loader(shuffle=False), test_evaluator=dict(type='ToyScore'), test_cfg={})
    wrapper = dict(type='AmpOptimWrapper', opt_level=level, optimizer=PLAIN_SGD, clip_grad=dict(max_norm=1.0))
    # scales that fit from the first step on
    wrapper |= dict(loss_scale=8.0) if level in ('O1', 'O2') else {}
    runner = run(tmp_path, wrapper, **parts)
    model = runner.model
    cast = CAST.get(level, torch.float32)
    assert model.conv.weight.dtype is cast
    assert model.bn.weight.dtype is (cast if level == 'O3' else torch.float32)
    assert {p.dtype for p in runner.optim_wrapper.master_params()} == {cast if level == 'O3' else torch.float32}
    losses = runner.message_hub.get_scalar('train/loss').data[0]
    assert losses[-4:].mean() < 0.9 * losses[:4].mean()
    assert runner.test()['toy/score'] == runner.message_hub.get_scalar('val/toy/score').current()
    assert model.extract_feat(torch.randn(2, 1, 6, 6)).dtype is cast
    saved = toy.checkpoint(tmp_path)['state_dict']
    assert {value.dtype for value in saved.values()} == {torch.float32, torch.int64}
    toy.ToyModel().load_state_dict(saved)


def test_data_preprocessors_stay_fp32() -> None:
    for level in CAST:
        model = toy.ToyModel()
        model.data_preprocessor.blur = nn.Conv2d(1, 1, 3).requires_grad_(False)
        wrap(model, opt_level=level).attach(model)
        assert model.data_preprocessor.blur.weight.dtype is model.data_preprocessor.mean.dtype is torch.float32, level


@pytest.mark.parametrize('level', ['O0', 'O1', 'O2', 'O5'])
def test_validation_may_autocast(level: str, tmp_path: Path) -> None:
    wrapper = dict(type='AmpOptimWrapper', opt_level=level, optimizer=PLAIN_SGD)
    score = dict(type='ToyScore', fp32=False)
    train_cfg = dict(by_epoch=True, max_epochs=1, val_interval=1)
    runner = toy.run(tmp_path, wrapper, val_cfg=dict(fp16=True), val_evaluator=score, train_cfg=train_cfg)
    assert runner.message_hub.get_scalar('val/toy/score').current() < 0
    weights = {'O2': torch.float16, 'O5': torch.bfloat16}.get(level, torch.float32)
    # a weight, one of BatchNorm, and what a linear layer gave under the autocast of CPUs
    assert runner.model.seen == [weights, torch.float32, torch.bfloat16]


class Predictor(nn.Module):
    """As detectors: data samples go in, and predictions inside of others come out."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 2)
        self.seen: list[Any] = []

    def forward(self, inputs: Tensor, samples: list[BaseDataElement]) -> list[BaseDataElement]:
        self.seen = samples
        inner = BaseDataElement(boxes=self.fc(inputs))
        return [BaseDataElement(scores=self.fc(inputs), pred=inner, labels=torch.tensor([70001]))]


def test_data_samples_go_in_untouched_and_come_out_in_fp32() -> None:
    for level in LEVELS:
        model = Predictor()
        wrapper = wrap(model, opt_level=level)
        sample = BaseDataElement(labels=torch.tensor([70001]), boxes=torch.rand(1, 4))
        with wrapper.optim_context(model):
            (found,) = model(torch.randn(1, 4), samples=[sample])
        assert model.seen[0] is sample
        assert (sample.labels.tolist(), sample.labels.dtype, sample.boxes.dtype) == (
            [70001],
            torch.int64,
            torch.float32,
        )
        # O1 and O4 autocast inside of the context, where nothing is an output of the model
        (found,) = model(torch.randn(1, 4), samples=[])
        assert (found.scores.dtype, found.pred.boxes.dtype) == (torch.float32, torch.float32), level
        assert (found.labels.tolist(), found.labels.dtype) == ([70001], torch.int64)
