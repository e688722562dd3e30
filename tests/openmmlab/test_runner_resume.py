"""Trainings of mmengine's ``Runner`` that stop and go on become the uninterrupted ones; what they save, average and leave."""

from __future__ import annotations

import copy
import gc
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import crash_harness
import numpy as np
import pytest
import torch
import toy
from bits import differences
from mmengine.hooks import CheckpointHook, EMAHook, Hook
from mmengine.model import ExponentialMovingAverage
from mmengine.registry import DATASETS, HOOKS, MODELS
from mmengine.runner import Runner
from pairs import pairs
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

from amp_wrapper import AmpCheckpointError, AmpConfigError, AmpOptimWrapper, ExactResumeHook, FusedAdamW, amp
from amp_wrapper.openmmlab.patches import PATCHES

HOOK = dict(type='amp_wrapper.ExactResumeHook')
STOCK = dict(type='OptimWrapper', optimizer=dict(type='SGD', lr=0.1, momentum=0.9))


def wrapper(level: str = 'O5', **words: Any) -> dict[str, Any]:
    return dict(type='AmpOptimWrapper', opt_level=level, optimizer=dict(type='SGD', lr=0.1, momentum=0.9), **words)


def epochs(number: int, **words: Any) -> dict[str, Any]:
    return dict(train_cfg=dict(by_epoch=True, max_epochs=number, val_interval=1, **words))


def run(folder: Path, *hooks: dict[str, Any], **more: Any) -> tuple[Runner, str]:
    """A training that can be resumed exactly, and what the package says in it."""
    with toy.run_log() as lines:
        runner = toy.run(folder, wrapper(), custom_hooks=[HOOK, *hooks], log_level='INFO', **copy.deepcopy(more))
    return runner, '\n'.join(line for line in lines if line.startswith('amp: '))


def with_hooks(case: dict[str, Any], *hooks: dict[str, Any]) -> dict[str, Any]:
    return {**copy.deepcopy(case), 'custom_hooks': [*case['custom_hooks'], *hooks]}


# -- interrupted trainings --------------------------------------------------------------------------------------------


@HOOKS.register_module()
class DrawsAtEpoch(Hook):
    """A random factor for each epoch, as multi-scale training has it: it decides what the data are."""

    def before_train_epoch(self, runner: Any) -> None:
        factor = 1 + 0.1 * random.random() + 0.1 * np.random.rand() + 0.1 * float(torch.rand(()))
        runner.train_loop.dataloader.dataset.images = toy.ToyData().images * factor


@DATASETS.register_module()
class KeepsLast(toy.ToyData):
    """Mixes each image with the one that was loaded before, as cached mosaics do."""

    last = torch.zeros(())

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        item = super().__getitem__(index)
        item['inputs'] = self.last = item['inputs'] + 0.5 * self.last
        return item


def with_data(case: dict[str, Any], kind: str) -> dict[str, Any]:
    case['train_dataloader']['dataset']['type'] = kind
    return case


def optimized(level: str, optimizer: dict[str, Any], **words: Any) -> dict[str, Any]:
    case = toy.everything(level, max_epochs=2)
    case['optim_wrapper'].update(optimizer=optimizer, **words)
    return case


ADAMW = dict(type='FusedAdamW', lr=0.02, weight_decay=0.05)
MONITOR = dict(type='amp_wrapper.AmpMonitorHook', interval=4)
STOPPING = dict(type='EarlyStoppingHook', monitor='toy/score', rule='greater', patience=1, min_delta=1000.0)
RESUMED: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    'a hook draws at the beginning of an epoch': (
        with_hooks(toy.everything('O5', max_epochs=3), dict(type='DrawsAtEpoch', priority='NORMAL')),
        dict(iters=14),
    ),
    'a late hook draws at the beginning of an epoch': (
        with_hooks(toy.everything('O5', max_epochs=3, save_each=5), dict(type='DrawsAtEpoch', priority='LOWEST')),
        dict(iters=16),
    ),
    'before a validation that the last file lacks': ({**toy.everything('O5'), **epochs(4, val_begin=3)}, dict(val=21)),
    'before the last validation': (
        {**toy.everything('O5'), 'train_cfg': dict(by_epoch=True, max_epochs=4, val_begin=2, val_interval=2)},
        dict(val=28),
    ),
    'validations become more frequent': (
        {
            **toy.everything('O5'),
            'train_cfg': dict(by_epoch=True, max_epochs=4, val_interval=3, dynamic_intervals=[(3, 1)]),
        },
        dict(val=21),
    ),
    # the last file is saved again with the best score, and early stopping has counted by then
    'early stopping that counts': (toy.everything('O5', max_epochs=6, patience=3, min_delta=1000.0), dict(iters=14)),
    'split masters and 16-bit state': (
        optimized('O5', ADAMW | dict(state_dtype='bfloat16'), master_weights='split'),
        dict(iters=10),
    ),
    "torch's sampler in iterations": (
        toy.everything('O5', by_epoch=False, max_epochs=3, sampler='ToyRandomSampler'),
        dict(iters=16),
    ),
    'a data set that keeps what it drew': (
        with_data(toy.everything('O5', max_epochs=2, save_each=5), 'KeepsLast'),
        dict(iters=6),
    ),
    'with numbers of a monitor': (with_hooks(toy.everything('O2', max_epochs=3), MONITOR), dict(iters=17)),
    'compiled': ({**toy.everything('O2', max_epochs=2), 'compile': dict(backend='eager')}, dict(iters=10)),
}


@pytest.mark.parametrize('name', RESUMED)
def test_resumed_run_is_the_uninterrupted_one(name: str, tmp_path: Path) -> None:
    case, stop = RESUMED[name]
    toy.run(tmp_path / 'whole', **copy.deepcopy(case))
    with pytest.raises(toy.Stop):
        toy.run(tmp_path / 'part', **with_hooks(case, dict(type='StopAt', **stop)))
    toy.run(tmp_path / 'part', resume=True, **copy.deepcopy(case))
    rows = differences(*(crash_harness.result(tmp_path / each) for each in ('whole', 'part')))
    assert rows == []
    saved = toy.checkpoint(tmp_path / 'part')['state_dict']
    assert {value.dtype for value in saved.values() if value.is_floating_point()} == {torch.float32}


@HOOKS.register_module()
class SavesByHand(Hook):
    """Saves without CheckpointHook."""

    def after_train_epoch(self, runner: Any) -> None:
        runner.save_checkpoint(runner.work_dir, f'hand_{runner.epoch + 1}.pth')


def test_files_that_a_hook_saves_resume_exactly(tmp_path: Path) -> None:
    case = with_hooks(toy.everything('O5', max_epochs=3), dict(type='SavesByHand'))
    case['default_hooks']['checkpoint'] = dict(type='CheckpointHook', interval=-1, save_last=False)
    toy.run(tmp_path / 'whole', **copy.deepcopy(case))
    path = str(tmp_path / 'whole' / 'hand_2.pth')
    toy.run(tmp_path / 'part', resume=True, load_from=path, **copy.deepcopy(case))
    left, right = (torch.load(tmp_path / name / 'hand_3.pth', weights_only=True) for name in ('whole', 'part'))
    for key in ('state_dict', 'optimizer'):
        assert differences(left[key], right[key]) == []


@HOOKS.register_module()
class Wastes(Hook):
    """Draws random numbers around validations."""

    priority = 'LOW'

    def after_val(self, runner: Any, *_: Any, **__: Any) -> None:
        torch.rand(5)
        np.random.rand(5)
        random.random()

    after_val_iter = after_val_epoch = after_val


def test_validation_draws_nothing_from_the_training(tmp_path: Path) -> None:
    differing = {}
    for exact in (True, False):
        case = toy.everything('O5', by_epoch=False, max_epochs=2)
        case['custom_hooks'] = case['custom_hooks'][: None if exact else -1]
        ends = []
        for hooks in ([], [dict(type='Wastes')]):
            runner = toy.run(tmp_path / f'{exact}{len(hooks)}', **with_hooks(case, *hooks))
            ends.append(copy.deepcopy(runner.model.state_dict()))
        differing[exact] = differences(*ends)
    assert differing[True] == [] and differing[False]


@pytest.mark.parametrize('words', [{}, dict(save_best='toy/score', rule='greater')], ids=['', 'save_best'])
def test_stopped_run_stays_stopped_until_its_settings_change(words: dict[str, Any], tmp_path: Path) -> None:
    """The last file is saved before the validation that stops, and with a new best score after it again."""
    case = {**epochs(6), **saving(**words)}
    assert run(tmp_path, STOPPING, **case)[0].epoch == 2
    assert run(tmp_path, STOPPING, resume=True, **case)[0].epoch == 2
    # what is reached ends it as well
    goal = {**STOPPING, 'stopping_threshold': -100.0}
    for resume in (False, True):
        assert run(tmp_path / 'goal', goal, resume=resume, **case)[0].epoch == 1
    # the second validation without improvement is that of the second epoch, then there is a third
    assert run(tmp_path, {**STOPPING, 'patience': 2}, resume=True, **case)[0].epoch == 3


def test_finished_run_stays_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = toy.everything('O5', by_epoch=False, max_epochs=1)
    case['default_hooks']['checkpoint'] = dict(type='CheckpointHook', interval=1)
    toy.run(tmp_path, **copy.deepcopy(case))
    before = crash_harness.result(tmp_path)
    # no sample is loaded again
    monkeypatch.delattr(toy.ToyData, '__getitem__')
    toy.run(tmp_path, resume=True, **copy.deepcopy(case))
    rows = differences(before, crash_harness.result(tmp_path))
    # such a hook counts this as one more epoch
    assert [row for row in rows if not row.startswith(("['place'][0]", "['files']"))] == []


# -- warnings ---------------------------------------------------------------------------------------------------------


def loader(sampler: str = 'DefaultSampler', batch_size: int = 4, **words: Any) -> dict[str, Any]:
    return dict(train_dataloader={**toy.loader(batch_size, sampler=sampler), **words})


ITERATIONS = dict(train_cfg=dict(by_epoch=False, max_iters=3, val_interval=10))


@pytest.mark.parametrize(
    ('more', 'words'),
    [
        (loader(num_workers=1, persistent_workers=True), 'Write persistent_workers=False'),
        (dict(randomness=dict(seed=None)), 'the config has no seed'),
        (epochs(1), None),
        (ITERATIONS, None),
        ({**loader('ToyRandomSampler'), **ITERATIONS}, None),
    ],
)
def test_what_cannot_be_resumed_exactly_is_warned_of(more: dict[str, Any], words: str | None, tmp_path: Path) -> None:
    _, said = run(tmp_path, **{**epochs(1), **more})
    assert said.count('will not be exact') == (words is not None)
    assert words is None or words in said


def test_changed_config_is_warned_of(tmp_path: Path) -> None:
    run(tmp_path, STOPPING, **epochs(1))
    runner, said = run(tmp_path, resume=True, **loader(batch_size=2), **epochs(2))
    assert runner.iter == 28
    assert 'iteration 7 of the file becomes 14, where epoch 2 begins' in said and '1 early stopping hooks' in said


def test_due_validation_can_be_left_out(tmp_path: Path) -> None:
    with pytest.raises(AmpConfigError, match='revalidate'):
        ExactResumeHook(revalidate='no')  # type: ignore[arg-type]
    run(tmp_path, **epochs(1))
    for hooks, due in ([{**HOOK, 'revalidate': False}], False), ([HOOK], True):
        with toy.run_log() as lines:
            toy.run(tmp_path, wrapper(), custom_hooks=hooks, resume=True, log_level='INFO', **epochs(1))
        assert any('Epoch(val)' in line for line in lines) == due


# -- files ------------------------------------------------------------------------------------------------------------


class Renaming(nn.Linear):
    """Reads files in which its weight had another name."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if prefix + 'kernel' in state_dict:
            state_dict[prefix + 'weight'] = state_dict.pop(prefix + 'kernel')
        super()._load_from_state_dict(state_dict, prefix, *args)


class Halving(nn.Linear):
    """Writes into what it loads; a part of it is in no file."""

    def __init__(self, *words: Any) -> None:
        super().__init__(*words)
        self.frozen = nn.Linear(1, 1)
        self.register_state_dict_post_hook(self.leave_out)

    @staticmethod
    def leave_out(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        del state[f'{prefix}frozen.weight']

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        state_dict[f'{prefix}weight'].mul_(0.5)
        super()._load_from_state_dict(state_dict, prefix, *args)


@MODELS.register_module()
class ModelThatLoads(toy.ToyModel):
    def __init__(self, layer: str) -> None:
        super().__init__()
        self.fc = dict(halving=Halving, renaming=Renaming)[layer](4, 3)


def test_modules_load_what_is_in_the_file_once(tmp_path: Path) -> None:
    case = dict(model=dict(type='ModelThatLoads', layer='halving'), **epochs(1))
    toy.run(tmp_path, wrapper(), **case)
    weight = toy.checkpoint(tmp_path)['state_dict']['fc.weight']
    runner = toy.run(tmp_path, wrapper(), resume=True, **case)
    assert torch.equal(runner.model.state_dict()['fc.weight'], weight * 0.5)


def test_model_that_renames_weights_when_it_loads_is_resumed(tmp_path: Path) -> None:
    case = dict(model=dict(type='ModelThatLoads', layer='renaming'), resume=True, **epochs(1))
    toy.run(tmp_path, wrapper(), **case)
    file = toy.checkpoint(tmp_path)
    file['state_dict']['fc.kernel'] = file['state_dict'].pop('fc.weight') + 1
    torch.save(file, tmp_path / 'old.pth')
    del file['state_dict']['conv.weight']
    torch.save(file, tmp_path / 'bad.pth')
    runner = toy.run(tmp_path / 'a', wrapper(), load_from=str(tmp_path / 'old.pth'), **case)
    assert torch.equal(runner.model.state_dict()['fc.weight'], file['state_dict']['fc.kernel'])
    with pytest.raises(AmpCheckpointError, match=r'conv\.weight'):
        toy.run(tmp_path / 'b', wrapper(), load_from=str(tmp_path / 'bad.pth'), **case)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if '.pth' in path.name)


def saving(**words: Any) -> dict[str, Any]:
    return dict(default_hooks=dict(checkpoint=dict(type='CheckpointHook', interval=1, **words)))


def test_files_of_a_stock_run_are_mmengines_own(tmp_path: Path) -> None:
    toy.run(tmp_path, copy.deepcopy(STOCK), **saving(max_keep_ckpts=1))
    assert names_in(tmp_path) == ['epoch_2.pth']
    file = toy.checkpoint(tmp_path)
    assert not [key for key in (*file, *file['optimizer'], *file['message_hub']['runtime_info']) if 'amp' in key]
    runner = toy.run(tmp_path, copy.deepcopy(STOCK), resume=True, **saving(max_keep_ckpts=1), **epochs(3))
    assert runner.iter == 21 and names_in(tmp_path) == ['epoch_3.pth']


def test_patches_change_nothing_for_wrappers_of_mmengine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same run with each patch taken off, one after the other."""
    case = toy.everything('O0', max_epochs=2)
    case.update(optim_wrapper=copy.deepcopy(STOCK), custom_hooks=case['custom_hooks'][:2])
    toy.run(tmp_path / 'patched', **copy.deepcopy(case))
    for number, (target, name, _) in enumerate(PATCHES):
        monkeypatch.setattr(target, name, getattr(target, name).__wrapped__)
        toy.run(tmp_path / f'{number}', **copy.deepcopy(case))
        assert differences(*(crash_harness.result(tmp_path / each) for each in ('patched', f'{number}'))) == [], name


def test_stock_file_within_an_epoch_goes_on_from_where_it_stands(tmp_path: Path) -> None:
    """mmengine counts a whole epoch from there, and the position is not taken for one of another number of processes."""
    within = dict(type='CheckpointHook', interval=8, by_epoch=False, save_last=False)
    toy.run(tmp_path, copy.deepcopy(STOCK), default_hooks=dict(checkpoint=within))
    assert toy.run(tmp_path, wrapper('O2'), resume=True).iter == 15


def test_published_file_is_whole(tmp_path: Path) -> None:
    toy.run(tmp_path, wrapper('O2'), **saving(published_keys=['meta', 'state_dict']))
    (path,) = tmp_path.glob('epoch_2-*.pth')
    file = torch.load(path, weights_only=True)
    assert set(file) == {'meta', 'state_dict'} and file['state_dict']['fc.weight'].dtype is torch.float32


def test_resumed_run_deletes_no_files_of_others(tmp_path: Path) -> None:
    """Those of an archive beside it, of the run whose file it takes, and those that were made anew since."""
    case = saving(max_keep_ckpts=1, save_best='toy/score', rule='greater')
    case['default_hooks']['archive'] = dict(type='CheckpointHook', interval=1, out_dir=str(tmp_path / 'archive'))
    toy.run(tmp_path / 'a', wrapper(), **copy.deepcopy(case))
    before = names_in(tmp_path / 'a')
    (tmp_path / 'b').mkdir()
    (tmp_path / 'b' / 'epoch_1.pth').write_text('of another run')
    path = str(tmp_path / 'a' / 'epoch_2.pth')
    toy.run(tmp_path / 'b', wrapper(), resume=True, load_from=path, **epochs(3), **copy.deepcopy(case))
    assert names_in(tmp_path / 'a') == before
    assert (tmp_path / 'b' / 'epoch_1.pth').read_text() == 'of another run'
    assert names_in(tmp_path / 'archive' / 'a') == ['epoch_1.pth', 'epoch_2.pth']
    assert 'epoch_3.pth' in names_in(tmp_path / 'archive' / 'b')


# -- averages of weights ----------------------------------------------------------------------------------------------


@HOOKS.register_module()
class OutsideAverage(Hook):
    """Averages an FP32 copy by mmengine's own classes, and compares what validations see and leave behind."""

    priority = 'ABOVE_NORMAL'

    def __init__(self, average: dict[str, Any]) -> None:
        self.copy = toy.ToyModel()
        self.average = MODELS.build(dict(average, model=self.copy))
        self.before: Any = None
        self.checked = 0

    def after_train_iter(self, runner: Any, *_: Any, **__: Any) -> None:
        self.copy.load_state_dict(runner.model.state_dict())
        self.average.update_parameters(self.copy)

    def state(self, runner: Any) -> Any:
        model = runner.model
        average = next(hook for hook in runner.hooks if isinstance(hook, EMAHook)).ema_model.module
        return copy.deepcopy([dict(model.state_dict()), dict(model.named_parameters()), average.state_dict()])

    def before_val_epoch(self, runner: Any) -> None:
        # EMAHook swaps after this
        self.before = self.state(runner)
        assert differences(self.before[2], self.average.module.state_dict()) == []

    def after_val_iter(self, runner: Any, *_: Any, **__: Any) -> None:
        average = dict(self.average.module.named_parameters())
        for name, parameter in runner.model.named_parameters():
            assert parameter.detach().equal(average[name].to(parameter.dtype)), name

    def after_val(self, runner: Any) -> None:
        assert differences(self.before, self.state(runner)) == []
        self.checked += 1


AVERAGES = {
    'ExponentialMovingAverage': dict(momentum=0.0002),
    'MomentumAnnealingEMA': dict(momentum=0.0002, gamma=3, interval=2),
    'StochasticWeightAverage': dict(interval=3),
}


@pairs(level=[*toy.LEVELS, 'stock'], kind=AVERAGES, buffers=[False, True])
def test_average_is_that_of_an_fp32_model(level: str, kind: str, buffers: bool, tmp_path: Path) -> None:
    words = dict(AVERAGES[kind], update_buffers=buffers)
    hooks = [
        dict(type='EMAHook', ema_type=kind, **words),
        dict(type='OutsideAverage', average=dict(type=kind, **words)),
    ]
    scale = dict(loss_scale=64.0) if level in ('O1', 'O2') else {}
    config = copy.deepcopy(STOCK) if level == 'stock' else wrapper(level, **scale)
    runner = toy.run(tmp_path, config, custom_hooks=hooks)
    outside = next(hook for hook in runner.hooks if isinstance(hook, OutsideAverage))
    assert outside.checked == 2
    # the file holds the average as the model, ready to deploy, and the weights in the place of the average
    saved, now = toy.checkpoint(tmp_path), runner.model.state_dict()
    for name, value in outside.average.module.named_parameters():
        assert differences(saved['state_dict'][name], value.detach()) == []
        assert differences(saved['ema_state_dict'][f'module.{name}'], now[name]) == []


@HOOKS.register_module()
class WritesWeights(Hook):
    """Writes to a weight before a validation, past autograd."""

    priority = 'HIGH'

    def before_val_epoch(self, runner: Any) -> None:
        runner.model.fc.weight.data.fill_(3.0)

    def after_val(self, runner: Any) -> None:
        self.after = [runner.model.fc.weight.detach().clone(), runner.model.state_dict()['fc.weight'].clone()]


@pytest.mark.parametrize('level', ['O2', 'O5'])
def test_weight_written_before_validation_survives_the_swap(level: str, tmp_path: Path) -> None:
    hooks = [dict(type='WritesWeights'), dict(type='EMAHook')]
    runner = toy.run(tmp_path, wrapper(level), custom_hooks=hooks, **epochs(1))
    written = next(hook for hook in runner.hooks if isinstance(hook, WritesWeights))
    assert all(bool((value == 3.0).all()) for value in written.after)


@pytest.mark.parametrize('level', ['O2', 'stock'])
def test_run_without_an_average_is_resumed_with_one(level: str, tmp_path: Path) -> None:
    """The average begins with the weights of the file, as in mmengine."""
    config = copy.deepcopy(STOCK) if level == 'stock' else wrapper(level)
    toy.run(tmp_path, config, **epochs(1))
    weights = toy.checkpoint(tmp_path, 'epoch_1.pth')['state_dict']
    runner = toy.run(tmp_path, config, custom_hooks=[dict(type='EMAHook', begin_epoch=1)], resume=True, **epochs(1))
    average = next(hook for hook in runner.hooks if isinstance(hook, EMAHook)).ema_model.module
    assert differences(dict(average.state_dict()), weights) == []


def test_edit_that_no_step_has_seen_counts_in_the_average() -> None:
    model = nn.Linear(4, 4)
    AmpOptimWrapper(opt_level='O2', optimizer=SGD(model.parameters(), lr=0.1)).attach(model)
    average = ExponentialMovingAverage(model, momentum=0.5)
    for value, mean in (5.0, 5.0), (7.0, 6.0):
        model.weight.data.fill_(value)
        average.update_parameters(model)
        assert average.module.weight.dtype is torch.float32 and bool((average.module.weight == mean).all())


# -- memory -----------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Buffers, random numbers, layers that run again in the backward pass, and functions that autocast knows."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
        self.again = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.ReLU())
        self.norm, self.rnn, self.fc = nn.LayerNorm(4), nn.GRU(4, 4), nn.Linear(4, 3)

    def forward(self, images: Tensor) -> Tensor:
        x = self.bn(self.conv(images)).mean((2, 3))
        x = checkpoint(self.again, x, use_reentrant=False) + checkpoint(self.again, x, use_reentrant=True)
        states, _ = self.rnn(self.norm(x)[None])
        return self.fc(states[0])


def loss_of(net: nn.Module, index: int) -> Tensor:
    images = torch.randn(6, 1, 5, 5)
    if index % 3 == 2:
        # an overflow where losses are scaled
        images[0, 0, 0, 0] = float('inf')
    return nn.functional.cross_entropy(net(images), torch.arange(6) % 3)


@contextmanager
def uncollected() -> Iterator[list[Tensor]]:
    """Fills the list with the tensors that only a search for cycles would have freed."""
    found: list[Tensor] = []
    gc.collect()
    gc.disable()
    try:
        yield found
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found += [thing for thing in gc.garbage if isinstance(thing, Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def functional_step(level: str, clips: bool) -> Callable[[int], None]:
    net = Net()
    optimizer = FusedAdamW(net.parameters(), lr=0.01) if clips else SGD(net.parameters(), lr=0.01, momentum=0.9)
    amp.initialize(net, optimizer, opt_level=level, verbosity=0)

    def step(index: int) -> None:
        optimizer.zero_grad()
        for part in range(2):
            with amp.scale_loss(loss_of(net, index + part), optimizer, delay_unscale=not part) as scaled:
                scaled.backward()
        if clips:
            clip_grad_norm_(amp.master_params(optimizer), 1.0)
        optimizer.step()

    return step


@pairs(level=['O1', 'O2', 'O5'], clips=[True, False], sessions=[1, 2])
def test_steps_leave_no_tensor_to_the_garbage_collector(level: str, clips: bool, sessions: int) -> None:
    """One that waited for it would take memory meanwhile."""
    steps = [functional_step(level, clips) for _ in range(sessions)]
    for index in range(3):
        steps[0](index)
    with uncollected() as found:
        for index in range(3, 9):
            steps[0](index)
    assert [tuple(tensor.shape) for tensor in found] == []


def test_copies_that_are_tried_leave_no_tensor_to_the_garbage_collector() -> None:
    net, batch = Net(), (torch.randn(6, 1, 5, 5),)
    with uncollected() as found:
        for level in ('O1', 'O2'):
            amp.report(net, batch, opt_level=level)
    assert [tuple(tensor.shape) for tensor in found] == []


@HOOKS.register_module()
class Uncollected(Hook):
    """Looks at what iterations leave behind, with validation and saving between them."""

    found: list[Tensor]

    def __init__(self) -> None:
        self.stack = ExitStack()

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        if runner.iter == 5:
            self.found = self.stack.enter_context(uncollected())
        if runner.iter == 15:
            self.stack.close()

    def after_run(self, runner: Any) -> None:
        self.stack.close()


@pytest.mark.xfail(
    torch.__version__.startswith('2.6.'), reason='two numbers of each step that was run again wait there'
)
def test_runner_leaves_no_tensor_to_the_garbage_collector(tmp_path: Path) -> None:
    """The scale of O2 begins too large, so that copies of the model are run to see why steps overflow."""
    case = with_hooks(toy.everything('O2', max_epochs=3), MONITOR, dict(type='Uncollected'))
    runner = toy.run(tmp_path, **case)
    assert 'train/amp_skipped' in runner.message_hub.log_scalars
    (hook,) = (hook for hook in runner.hooks if isinstance(hook, Uncollected))
    assert [tuple(tensor.shape) for tensor in hook.found] == []
    assert any(isinstance(each, CheckpointHook) for each in runner.hooks)
