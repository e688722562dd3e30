"""Whole trainings with mmengine on several ranks: killed and resumed, sharded, and what is in their files."""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mmengine.runner.runner
import numpy as np
import pytest
import torch
import torch.distributed as dist
import toy
from bits import differences
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.optim import OptimWrapperDict, build_optim_wrapper
from mmengine.registry import HOOKS, MODELS, OPTIM_WRAPPER_CONSTRUCTORS
from mmengine.runner import Runner
from nets import dyadic, mesh_of, same_on_all_ranks, whole
from on_ranks import Group, Here, on_ranks
from pairs import pairs
from torch import Tensor, nn

import amp_wrapper
from amp_wrapper import AmpConfigError, AmpOptimWrapper, CheckpointWriteError, FusedSGD, MMFullyShard
from amp_wrapper.cli import main

# it asks compilers for their versions
mmengine.runner.runner.collect_env = dict

#: What a resume restores.
SAVED = ('state_dict', 'ema_state_dict', 'optimizer', 'param_schedulers')
WRAPPERS: dict[str, dict[str, Any]] = {
    'ddp': dict(type='MMDistributedDataParallel', broadcast_buffers=False),
    'ddp in order': dict(type='MMDistributedDataParallel', broadcast_buffers=False, find_unused_parameters=True),
    'sharded': dict(type='amp_wrapper.MMFullyShard', blocks=['Linear']),
    'sharded and repeated': dict(type='amp_wrapper.MMFullyShard', mesh=(2, 1)),
    'sharded folder': dict(type='amp_wrapper.MMFullyShard', checkpoints='sharded'),
    'sharded, no_sync': dict(type='amp_wrapper.MMFullyShard', no_sync=True, reduce_dtype='float32'),
}


@HOOKS.register_module(force=True)
class KillRankOne(Hook):
    """In the middle of the second epoch."""

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        if dist.get_rank() == 1 and (runner.epoch, batch_idx) == (1, 1):
            os.kill(os.getpid(), signal.SIGKILL)


def config_of(here: Here, wrapper: str, level: str, optimizer: str = 'SGD', **more: Any) -> dict[str, Any]:
    """All that mmengine has: accumulation, clipping, an average, early stopping, the best file, dropout, augmentation."""
    config = toy.everything(level, max_epochs=2)
    config.update(
        launcher='pytorch' if here.world > 1 else 'none',
        model_wrapper_cfg=dict(WRAPPERS[wrapper]),
        randomness=dict(seed=0, deterministic=True, diff_rank_seed=True),
    )
    if here.device.type == 'cpu' and 'ddp' in wrapper:
        config['model_wrapper_cfg']['device_ids'] = None
    if optimizer != 'SGD':
        kind = optimizer.removeprefix('Zero ')
        config['optim_wrapper']['optimizer'] = dict(type=kind, lr=0.01, weight_decay=1e-3)
        if kind != optimizer:
            config['optim_wrapper']['optimizer'] |= dict(type='ZeroRedundancyOptimizer', optimizer_type=kind)
    return {**config, **more}


def run(here: Here, folder: str, wrapper: str, level: str, optimizer: str, how: str = '') -> None:
    """A training that is killed, resumes, or has nothing that DDP and FSDP2 add up in another order ('alike')."""
    config = config_of(here, wrapper, level, optimizer, resume=how == 'resume', log_level='INFO')
    if how == 'kill':
        config['custom_hooks'] = [*config['custom_hooks'], dict(type='KillRankOne')]
    if how == 'alike':
        config['optim_wrapper'].update(accumulative_counts=1, clip_grad=dict(type='value', clip_value=0.02))
    runner = toy.run(here.folder / folder, **config)
    assert runner.epoch == 2
    if here.world > 1:
        assert isinstance(runner.model, MMFullyShard) is ('ddp' not in wrapper)
        same_on_all_ranks(here, whole(list(runner.model.parameters())), 'weights')
    if how == 'resume' and here.rank == 0:
        logs = ''.join(path.read_text() for path in (here.folder / folder).rglob('*.log'))
        assert ('saved by 2 processes' in logs) == (here.world in (1, 3))


def saved(folder: Path) -> dict[str, Any]:
    """What a run has saved at its end; of a folder of shards, its weights."""
    path = folder / 'epoch_2.pth'
    if path.is_file():
        return toy.checkpoint(folder)
    assert main(['convert', str(path), str(folder / 'one.pth'), '--to', 'fp32']) == 0
    return torch.load(folder / 'one.pth', weights_only=True)


@pytest.mark.parametrize(
    ('wrapper', 'level', 'optimizer', 'others'),
    [
        ('ddp', 'O2', 'SGD', {'ddp': 1, 'of three': 3}),
        ('ddp in order', 'O5', 'SGD', {}),
        ('sharded', 'O5', 'FusedAdamW', {'ddp': 2, 'sharded': 1}),
        ('sharded folder', 'O2', 'FusedAdamW', {'ddp': 2}),
        pytest.param('sharded, no_sync', 'O2', 'AdamW', {'ddp': 2}, marks=pytest.mark.long),
        pytest.param('ddp', 'O5', 'Zero AdamW', {}, marks=pytest.mark.long),
    ],
)
def test_killed_run_resumes_exactly(
    ranks_of: Callable[[int], Group], tmp_path: Path, wrapper: str, level: str, optimizer: str, others: dict[str, int]
) -> None:
    """In new processes, as many. On other numbers, and wrapped otherwise, it goes on."""
    # sums of more than two gradients are rounded in their order
    two = ranks_of(4 if 'order' in wrapper else 2)
    words = dict(wrapper=wrapper, level=level, optimizer=optimizer)
    two.run(tmp_path, run, folder='whole', **words)
    answers = two.answers(tmp_path, run, folder='part', how='kill', **words)
    # the one that is left alone ends with an error of its own
    assert answers[1] == 'killed' and 'Traceback' in answers[0]
    for number in range(len(others)):
        shutil.copytree(tmp_path / 'part', tmp_path / f'{number}')
    two.run(tmp_path, run, folder='part', how='resume', **words)
    expected, found = saved(tmp_path / 'whole'), saved(tmp_path / 'part')
    for part in SAVED if wrapper != 'sharded folder' else SAVED[:1]:
        assert differences(found[part], expected[part]) == [], part
    for number, (other, world) in enumerate(others.items()):
        words['wrapper'] = other if other in WRAPPERS else 'ddp'
        ranks_of(world).run(tmp_path, run, folder=f'{number}', how='resume', **words)
        state = toy.checkpoint(tmp_path / f'{number}')['state_dict']
        assert {k: v.shape for k, v in state.items()} == {k: v.shape for k, v in expected['state_dict'].items()}
        assert all(bool(value.isfinite().all()) for value in state.values())


@pytest.mark.parametrize(
    ('wrapper', 'level'), [('sharded', 'O5'), ('sharded', 'O2'), ('sharded and repeated', 'O1'), ('zero', 'O2')]
)
@on_ranks()
def test_sharded_run_writes_the_file_of_ddp(here: Here, wrapper: str, level: str) -> None:
    """Weights, averages, moments, schedules, and the best file, bit for bit."""
    optimizer = 'AdamW' if wrapper == 'zero' else 'FusedAdamW'
    run(here, 'ddp', 'ddp', level, optimizer, 'alike')
    if wrapper == 'zero':
        run(here, 'other', 'ddp', level, f'Zero {optimizer}', 'alike')
    else:
        run(here, 'other', wrapper, level, optimizer, 'alike')
    found, expected = (toy.checkpoint(here.folder / name) for name in ('other', 'ddp'))
    assert found.keys() == expected.keys()
    for part in SAVED:
        left, right = (each[part] for each in (found, expected))
        if wrapper == 'zero' and part == 'optimizer':
            left, right = left['state'], right['state']
        assert differences(left, right) == [], part
    best = [sorted(path.name for path in (here.folder / name).glob('best*')) for name in ('other', 'ddp')]
    assert best[0] == best[1] != []


@on_ranks()
def test_validation_before_and_test_after_a_sharded_training(here: Here) -> None:
    """Scores are those of DDP."""
    scores = {}
    for wrapper in ('ddp', 'sharded', 'sharded and repeated'):
        config = config_of(here, wrapper, 'O5', train_cfg=dict(by_epoch=True, max_epochs=1, val_interval=1))
        config['optim_wrapper']['accumulative_counts'] = 1
        config['custom_hooks'] = []
        config['default_hooks']['checkpoint'] = dict(type='CheckpointHook', interval=1)
        config['test_dataloader'], config['test_cfg'] = config['val_dataloader'], {}
        config['test_evaluator'] = dict(type='ToyScore')
        torch.manual_seed(0)
        runner = Runner.from_cfg(toy.toy_config(here.folder / wrapper, **config))
        before = runner.val()
        runner.train()
        scores[wrapper] = [before, runner.val(), runner.test()]
    assert scores['sharded'] == scores['ddp'] == scores['sharded and repeated']


@HOOKS.register_module(force=True)
class LoadsOnRankZero(Hook):
    """As an evaluation that one rank makes."""

    def after_train(self, runner: Any) -> None:
        dist.barrier()
        if runner.rank == 0:
            runner.load_checkpoint(str(Path(runner.work_dir) / 'epoch_1.pth'))
        dist.barrier()


@on_ranks()
def test_one_rank_alone_loads_a_file(here: Here) -> None:
    """A plain one, in a run that is not sharded."""
    config = config_of(here, 'ddp', 'O2', train_cfg=dict(by_epoch=True, max_epochs=1))
    config['custom_hooks'] = [dict(type='LoadsOnRankZero')]
    toy.run(here.folder / 'run', **config)


@on_ranks()
def test_folder_of_shards_is_compared_with_its_checksums_and_replaces_no_other(here: Here) -> None:
    config = config_of(here, 'sharded folder', 'O5', train_cfg=dict(by_epoch=True, max_epochs=1))
    config['default_hooks']['checkpoint'] = dict(type='CheckpointHook', interval=1)
    toy.run(here.folder / 'run', **config)
    folder, notes = here.folder / 'run' / 'epoch_1.pth', here.folder / 'notes' / 'epoch_1.pth' / 'notes.txt'
    if here.rank == 0:
        notes.parent.mkdir(parents=True)
        notes.write_text('x')
        for path in [path for path in folder.rglob('*') if path.is_file()]:
            content = path.read_bytes()
            path.write_bytes(content[:-2] + bytes([content[-2] ^ 1, content[-1]]))
            assert main(['convert', str(folder), '--inspect']) == 1, path
            path.write_bytes(content)
        assert main(['convert', str(folder), '--inspect']) == 0
    dist.barrier()
    with pytest.raises(CheckpointWriteError, match='is a folder, and no checkpoint'):
        toy.run(here.folder / 'notes', **config)
    assert notes.read_text() == 'x'


@HOOKS.register_module(force=True)
class Draws(Hook):
    """Notes a number of each generator in each iteration."""

    def __init__(self) -> None:
        self.drawn: list[tuple[float, float, float]] = []

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        self.drawn.append((random.random(), float(np.random.rand()), float(torch.rand(()))))


@on_ranks()
def test_each_rank_draws_random_numbers_of_its_own(here: Here) -> None:
    config = config_of(here, 'ddp', 'O2', train_cfg=dict(by_epoch=True, max_epochs=1), randomness=dict(seed=0))
    config['custom_hooks'] = [dict(type='Draws'), dict(type='amp_wrapper.ExactResumeHook')]
    (hook,) = (hook for hook in toy.run(here.folder / 'run', **config).hooks if isinstance(hook, Draws))
    found: list[Any] = [None] * here.world
    dist.all_gather_object(found, hook.drawn)
    numbers = [number for rank in found for row in rank for number in row]
    assert len(set(numbers)) == len(numbers) > 20


class Versioned(nn.Linear):
    """In its first version, weights were stored with the other sign."""

    _version = 2

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any) -> None:
        if local_metadata.get('version', 1) < 2:
            state_dict[f'{prefix}weight'] = -state_dict[f'{prefix}weight']
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


@MODELS.register_module(force=True)
class VersionedToy(toy.ToyModel):
    def __init__(self, **words: Any) -> None:
        super().__init__(**words)
        self.fc = Versioned(self.fc.in_features, self.fc.out_features)


@on_ranks()
def test_modules_of_a_sharded_run_know_the_version_of_a_file(here: Here) -> None:
    config = config_of(here, 'sharded and repeated', 'O5', model=dict(type='VersionedToy'))
    runners = [toy.run(here.folder / 'run', **config, resume=resumes) for resumes in (False, True)]
    # nothing was left to train
    assert torch.equal(*(runner.model.state_dict()['module.fc.weight'].full_tensor() for runner in runners))


@on_ranks()
def test_configs_that_cannot_shard_end_before_the_training(here: Here) -> None:
    for words, text in ((dict(mesh=(3,)), 'product 2, the ranks'), (dict(blocks=['Linaer']), "'Linear'")):
        config = config_of(here, 'sharded', 'O5')
        config['model_wrapper_cfg'] = dict(type='amp_wrapper.MMFullyShard', **words)
        with pytest.raises(AmpConfigError, match=text):
            toy.run(here.folder / 'run', **config)
    assert not list((here.folder / 'run').glob('*.pth'))


@MODELS.register_module(force=True)
class TwoNetworks(BaseModel):
    """A generator and a discriminator, without much sense."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(36, 8), nn.BatchNorm1d(8), nn.Linear(8, 36))
        self.discriminator = nn.Sequential(nn.Linear(36, 8), nn.Tanh(), nn.Linear(8, 1))

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        wrappers, real = optim_wrapper, data['inputs'].flatten(1)
        with wrappers['discriminator'].optim_context(self.discriminator):
            loss = self.discriminator(real).mean() - self.discriminator(self.generator(real).detach()).mean()
        wrappers['discriminator'].update_params(loss)
        self.discriminator.requires_grad_(False)
        with wrappers['generator'].optim_context(self.generator):
            loss = self.discriminator(self.generator(real + torch.rand_like(real))).mean()
        wrappers['generator'].update_params(loss)
        self.discriminator.requires_grad_(True)
        return dict(loss=loss.detach())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


@OPTIM_WRAPPER_CONSTRUCTORS.register_module(force=True)
class OneForEach:
    def __init__(self, optim_wrapper_cfg: dict[str, Any], paramwise_cfg: Any = None) -> None:
        self.configs = optim_wrapper_cfg

    def __call__(self, model: Any) -> OptimWrapperDict:
        children = dict(getattr(model, 'module', model).named_children())
        return OptimWrapperDict(**{key: build_optim_wrapper(children[key], cfg) for key, cfg in self.configs.items()})


def run_two(here: Here, folder: str, epochs: int, resume: bool) -> None:
    """Both networks in DDPs of their own; the file has plain names, and the average in place of the weights."""
    wrapper = dict(type='AmpOptimWrapper', optimizer=dict(type='Adam', lr=0.01))
    levels = dict(generator='O2', discriminator='O5')
    wrappers = {name: dict(wrapper, opt_level=level) for name, level in levels.items()}
    config = config_of(here, 'ddp', 'O2', model=dict(type='TwoNetworks'), resume=resume)
    config.update(dict.fromkeys(('val_dataloader', 'val_evaluator', 'val_cfg', 'param_scheduler')))
    config['model_wrapper_cfg']['type'] = 'MMSeparateDistributedDataParallel'
    config['optim_wrapper'] = dict(constructor='OneForEach', **wrappers)
    config['train_cfg'] = dict(by_epoch=True, max_epochs=epochs)
    config['default_hooks'] = dict(checkpoint=dict(type='CheckpointHook', interval=1))
    config['custom_hooks'] = [dict(type='EMAHook', momentum=0.1), dict(type='amp_wrapper.ExactResumeHook')]
    runner = toy.run(here.folder / folder, **config)
    same_on_all_ranks(here, runner.model.parameters(), 'weights')
    if here.rank == 0:
        saved = toy.checkpoint(here.folder / folder)
        model = TwoNetworks().state_dict()
        assert saved['state_dict'].keys() == model.keys()
        assert {name.removeprefix('module.') for name in saved['ema_state_dict']} - {'steps'} == model.keys()


def test_files_of_a_model_with_a_ddp_for_each_child(ranks_of: Callable[[int], Group], tmp_path: Path) -> None:
    """They resume exactly, and on one process."""
    two = ranks_of(2)
    two.run(tmp_path, run_two, folder='whole', epochs=2, resume=False)
    two.run(tmp_path, run_two, folder='part', epochs=1, resume=False)
    shutil.copytree(tmp_path / 'part', tmp_path / 'one')
    (tmp_path / 'one' / 'last_checkpoint').write_text(str(tmp_path / 'one' / 'epoch_1.pth'))
    two.run(tmp_path, run_two, folder='part', epochs=2, resume=True)
    ranks_of(1).run(tmp_path, run_two, folder='one', epochs=2, resume=True)
    expected, found, one = (toy.checkpoint(tmp_path / name) for name in ('whole', 'part', 'one'))
    for part in ('state_dict', 'ema_state_dict', 'optimizer'):
        assert differences(found[part], expected[part]) == [], part
    # other data, and still near: random weights would not be
    for name, value in expected['state_dict'].items():
        if 'running' not in name and value.is_floating_point():
            torch.testing.assert_close(one['state_dict'][name], value, rtol=0, atol=0.15, msg=name)


def accumulate(here: Here, level: str, losses: int, sharded: bool) -> None:
    """One process saves inside an accumulation, and goes on; or two ranks do so with shards, from there."""
    torch.manual_seed(0)
    net = nn.Linear(2, 3).to(here.device)
    if sharded:
        amp_wrapper.fully_shard(net, level, mesh=mesh_of(here))
    words = dict(opt_level=level, accumulative_counts=2, num_losses=losses, loss_scale=8.0, verbosity=0)
    wrapper = AmpOptimWrapper(optimizer=FusedSGD(net.parameters(), lr=0.25, momentum=0.5), **words)
    if sharded:
        wrapper.load_state_dict(torch.load(here.folder / 'saved', weights_only=True))
    wrapper.initialize_count_status(net, int(sharded), 100)
    for index in (1,) if sharded else (0, 1):
        with wrapper.optim_context(net):
            loss = net(dyadic(here, index, rank=0)).sum()
        wrapper.update_params(loss)
        if index == 0:
            torch.save(wrapper.state_dict(), here.folder / 'saved')
    found = whole(dict(net.state_dict()))
    if sharded:
        assert differences(found, dict(torch.load(here.folder / 'expected', weights_only=True))) == []
    else:
        torch.save(found, here.folder / 'expected')


@pairs(level=('O0', 'O2', 'O5'), losses=(1, 2))
def test_an_open_accumulation_of_one_process_goes_on_sharded(
    ranks_of: Callable[[int], Group], tmp_path: Path, level: str, losses: int
) -> None:
    for world in (1, 2):
        ranks_of(world).run(tmp_path, accumulate, level=level, losses=losses, sharded=world == 2)
