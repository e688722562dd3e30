"""Cases of saving shards that went wrong once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from bits import differences

from amp_wrapper import AmpConfigError, CheckpointWriteError, fsdp_internals
from amp_wrapper.checkpoint import folder, sharded
from amp_wrapper.checkpoint.newest import find_newest
from amp_wrapper.openmmlab import shard_files
from amp_wrapper.openmmlab.patches import saving
from scenarios.common import Here, scenario
from scenarios.fsdp_runs import settings
from scenarios.fsdp_saving import KINDS, content, run_of


@scenario
def fsdp_versions_of_modules(here: Here) -> None:
    """Modules that convert old files by their version are told the version of a file, whole or not."""
    import toy
    from mmengine.hooks import Hook
    from mmengine.registry import HOOKS, MODELS
    from torch import nn

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

    seen: dict[str, Any] = {}

    @HOOKS.register_module(force=True)
    class Looks(Hook):
        priority = 'LOWEST'

        def before_train(self, runner: Any) -> None:
            fsdp_internals.reshard(runner.model.module)
            seen['loaded'] = runner.model.module.fc.weight.detach().full_tensor()

    for kind in KINDS:
        for averages in (True, False) if kind == 'sharded' else (kind == 'whole',):
            case = settings(here, 'fsdp', 'O5', epochs=1)
            case['model_wrapper_cfg'] = dict(type='amp_wrapper.MMFullyShard', checkpoints=kind)
            case['model'] = dict(type='VersionedToy')
            case['custom_hooks'] = [dict(type='EMAHook', momentum=0.1)] if averages else []
            case['default_hooks']['checkpoint'] = dict(type='CheckpointHook')
            name = f'{kind}_{averages}'
            runner = toy.run(here.folder / name, **case)
            fsdp_internals.reshard(runner.model.module)
            expected = runner.model.module.fc.weight.detach().full_tensor()
            dist.barrier()
            case['resume'] = True
            case['custom_hooks'] = [*case['custom_hooks'], dict(type='Looks')]
            toy.run(here.folder / name, **case)
            assert torch.equal(seen['loaded'], expected), name


@scenario
def fsdp_failed_saving_deletes_nothing(here: Here) -> None:
    """A checkpoint that could not be written in the background: the one before stays, whatever comes afterwards."""
    import toy
    from mmengine.runner import Runner

    case = settings(here, 'fsdp', 'O5', epochs=3)
    case['model_wrapper_cfg'] = dict(type='amp_wrapper.MMFullyShard', checkpoints='async')
    case['default_hooks']['checkpoint'] = dict(type='CheckpointHook', interval=1, max_keep_ckpts=1)
    case['custom_hooks'] = []
    original, calls = folder.look_at, [0]

    def look_at(path: Path) -> Any:
        calls[0] += 1
        if here.rank == 1 and calls[0] == 2:
            raise OSError(28, 'No space left on device')
        return original(path)

    runner = Runner.from_cfg(toy.toy_config(here.folder / 'run', **case))
    with (
        mock.patch.object(folder, 'look_at', look_at),
        pytest.raises((CheckpointWriteError, TypeError), match='No space left'),
    ):
        runner.train()
    path = here.folder / 'run' / 'epoch_1.pth'
    runner.load_checkpoint(str(path))
    dist.barrier()
    assert find_newest(path.parent).path == path
    assert sorted(each.name for each in path.parent.glob('*.pth*')) == ['epoch_1.pth']


@scenario
def fsdp_saving_to_several_folders(here: Here) -> None:
    """Ranks that do not see one folder find out before the training; so do those that cannot write to it."""
    import toy

    own = here.folder / f'disk of rank {here.rank}'
    own.mkdir()
    before = Path.cwd()
    os.chdir(own)
    try:
        case = settings(here, 'fsdp', 'O5')
        case['model_wrapper_cfg'] = dict(type='amp_wrapper.MMFullyShard', checkpoints='sharded')
        case['default_hooks']['checkpoint'] = dict(type='CheckpointHook', out_dir='checkpoints')
        with pytest.raises((AmpConfigError, TypeError), match='rank 1 does not see what rank 0 writes'):
            toy.run(here.folder / 'run', **case)
        # who got past that learns of it when the first one is written
        with pytest.raises(CheckpointWriteError, match=r'all ranks have to see one folder|rank 1'):
            sharded.save({'weight': _sharded(here)}, 'a.pth')
        assert not Path('a.pth').exists()
    finally:
        os.chdir(before)


def _sharded(here: Here) -> Any:
    from torch.distributed.tensor import Shard, distribute_tensor

    from scenarios.fsdp import mesh_of

    return distribute_tensor(torch.arange(6.0, device=here.device), mesh_of(here), [Shard(0)])


@scenario
def fsdp_saving_on_a_full_disk(here: Here) -> None:
    """What torch's writer raises on one rank is a typed error on all."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    def write_data(*args: Any, **kwargs: Any) -> Any:
        raise OSError(28, 'No space left on device')

    for asynchronous in (False, True):
        patched = mock.patch.object(FileSystemWriter, 'write_data', write_data) if here.rank else mock.MagicMock()
        with patched, pytest.raises(CheckpointWriteError, match=r'OSError: \[Errno 28\] No space left'):
            sharded.begin({'weight': _sharded(here)}, here.folder / 'a.pth', asynchronous).finish()
        dist.barrier()
        assert list(here.folder.glob('a.pth*')) == []


@scenario
def fsdp_damage_that_one_rank_sees(here: Here) -> None:
    """Each rank compares a part of the checksums; damage is an error on all, at once."""
    import toy

    from amp_wrapper import AmpCheckpointError

    run_of(here, 'sharded', 'run')
    dist.barrier()
    original, compared = folder.look_at, []

    def look_at(path: Path) -> Any:
        compared.append(path.name)
        return [-1, -1] if here.rank == 1 else original(path)

    case = settings(here, 'fsdp', 'O5', epochs=3)
    case['model_wrapper_cfg'] = dict(type='amp_wrapper.MMFullyShard', checkpoints='sharded')
    case['load_from'], case['resume'] = str(here.folder / 'run' / 'epoch_2.pth'), True
    for resumes in (True, False):
        compared.clear()
        case['resume'] = resumes
        with mock.patch.object(folder, 'look_at', look_at), pytest.raises(AmpCheckpointError, match='is damaged'):
            toy.run(here.folder / f'again_{resumes}', **case)
        assert 0 < len(compared) <= 2, compared


@scenario
def fsdp_files_beside_shards(here: Here) -> None:
    """A hook writes a file of its own while shards are saved; what could not be read back is warned of."""
    import toy
    from mmengine.hooks import Hook
    from mmengine.registry import HOOKS
    from mmengine.runner import Runner, save_checkpoint

    @HOOKS.register_module(force=True)
    class Writes(Hook):
        def before_save_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
            save_checkpoint(dict(extra=torch.ones(3)), str(Path(runner.work_dir) / 'extra.pth'))
            save_checkpoint(dict(checkpoint), str(Path(runner.work_dir) / 'twice.pth'))

    class Thing:
        pass

    @HOOKS.register_module(force=True)
    class Unreadable(Hook):
        def before_save_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
            checkpoint['thing'] = Thing()

    globals()['Thing'] = Thing
    Thing.__qualname__ = 'Thing'
    for kind in KINDS[:2]:
        case = settings(here, 'fsdp', 'O5', epochs=1)
        case['model_wrapper_cfg'] = dict(type='amp_wrapper.MMFullyShard', checkpoints=kind)
        case['custom_hooks'] = [dict(type='Writes')]
        case['default_hooks']['checkpoint'] = dict(type='CheckpointHook')
        toy.run(here.folder / kind, **case)
        dist.barrier()
        place = here.folder / kind
        assert content(place / 'extra.pth')['extra'].sum() == 3
        twice, once = content(place / 'twice.pth'), content(place / 'epoch_1.pth')
        assert differences(twice['state_dict'], once['state_dict']) == []
        case['custom_hooks'] = [dict(type='Unreadable')]
        runner = Runner.from_cfg(toy.toy_config(here.folder / f'{kind}_unreadable', **case))
        # each is said once in a process
        shard_files._warned = saving._warned = False
        with toy.captured_log() as lines:
            runner.train()
        if here.rank == 0:
            assert any('cannot be resumed from' in line for line in lines), kind


@scenario
def fsdp_a_training_after_another(here: Here) -> None:
    """One ends with an error while its last checkpoint is written; the next one in the process waits, and goes on from it."""
    import threading

    import toy
    from mmengine.hooks import Hook
    from mmengine.registry import HOOKS
    from mmengine.runner import Runner

    @HOOKS.register_module(force=True)
    class Breaks(Hook):
        def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
            if runner.epoch == 2:
                raise ValueError('broken')

    case = settings(here, 'fsdp', 'O5', epochs=3)
    case['model_wrapper_cfg'] = dict(type='amp_wrapper.MMFullyShard', checkpoints='async')
    case['default_hooks']['checkpoint'] = dict(type='CheckpointHook', interval=1, max_keep_ckpts=1)
    case['custom_hooks'] = [dict(type='Breaks')]
    case['val_dataloader'] = case['val_evaluator'] = case['val_cfg'] = None
    case['train_cfg'] = dict(by_epoch=True, max_epochs=3)
    original, go_on = folder.look_at, threading.Event()

    def look_at(path: Path) -> Any:
        if 'epoch_2' in str(path) and threading.current_thread() is not threading.main_thread():
            assert go_on.wait(60)
        return original(path)

    with mock.patch.object(folder, 'look_at', look_at):
        with pytest.raises(ValueError, match='broken'):
            toy.run(here.folder / 'run', **case)
        dist.barrier()
        assert find_newest(here.folder / 'run').path == here.folder / 'run' / 'epoch_1.pth'
        case['custom_hooks'], case['resume'] = [], True
        threading.Timer(1, go_on.set).start()
        runner = Runner.from_cfg(toy.toy_config(here.folder / 'run', **case))
        with toy.captured_log() as lines:
            runner.train()
    if here.rank == 0:
        assert any('resuming from' in line and 'epoch_2.pth' in line for line in lines)
    dist.barrier()
    assert find_newest(here.folder / 'run').path == here.folder / 'run' / 'epoch_3.pth'
