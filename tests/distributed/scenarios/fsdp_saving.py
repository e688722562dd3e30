"""What sharded runs of mmengine leave in their folders: shards of all ranks, whole files, and nothing half-done."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from bits import differences

from amp_wrapper import AmpConfigError, CheckpointWriteError
from amp_wrapper.checkpoint import file as checkpoint_file
from amp_wrapper.checkpoint import folder, sharded
from amp_wrapper.checkpoint.newest import find_newest
from scenarios.common import Here, refused, scenario
from scenarios.fsdp_runs import settings

KINDS = ('whole', 'sharded', 'async')


def run_of(here: Here, kind: str, name: str, level: str = 'O5', **saving: Any) -> Any:
    import toy

    case = settings(here, 'fsdp', level)
    case['model_wrapper_cfg'] = dict(type='amp_wrapper.MMFullyShard', checkpoints=kind)
    case['default_hooks']['checkpoint'].update(saving)
    return toy.run(here.folder / name, **case)


def content(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = sharded.load(path) if path.is_dir() else checkpoint_file.load(path)
    return found


@scenario
def fsdp_saving_kinds(here: Here) -> None:
    """Folders have the names and the content of files, also where old ones are deleted and the best one is kept. Whenever a
    folder gets its name, there is another one that is complete, but for the first."""
    original, standing = folder.make, []

    def make(target: Path, files: Any) -> None:
        standing.append((target.name, find_newest(target.parent).path))
        original(target, files)

    for keep in (1, 2):
        for kind in KINDS:
            standing.clear()
            with mock.patch.object(folder, 'make', make):
                run_of(here, kind, f'{kind}_{keep}', max_keep_ckpts=keep, published_keys=['meta', 'state_dict'])
            if here.rank == 0 and kind != 'whole':
                assert len(standing) > 3 and all(path is not None for _, path in standing[1:]), standing
        dist.barrier()
        places = [here.folder / f'{kind}_{keep}' for kind in KINDS]
        # published files have a hash in their names
        names = [sorted(path.name for path in place.glob('*.pth*') if '-' not in path.name) for place in places]
        assert names[0] == names[1] == names[2] and len(names[0]) == keep + 1, names
        for name in names[0]:
            whole, *others = (content(place / name) for place in places)
            assert not (places[0] / name).is_dir() and all((place / name).is_dir() for place in places[1:])
            for part in whole.keys() - {'meta', 'message_hub'}:
                for other in others:
                    assert differences(other[part], whole[part]) == [], (name, part)
        for place in places:
            published = [checkpoint_file.load(path) for path in place.glob('*-*.pth')]
            assert len(published) == 2 and all(set(each) == {'meta', 'state_dict'} for each in published)
            assert (place / 'last_checkpoint').read_text() == str(find_newest(place).path)


@scenario
def fsdp_saving_fails(here: Here) -> None:
    """A full disk on one rank ends the run on every rank; what stood before stands."""
    for kind in ('sharded', 'async'):
        place = here.folder / kind
        original, calls = folder.look_at, [0]

        def look_at(path: Path, original: Any = original, calls: list[int] = calls) -> Any:
            calls[0] += 1
            if here.rank == 1 and calls[0] > 1:
                raise OSError(28, 'No space left on device')
            return original(path)

        with (
            mock.patch.object(folder, 'look_at', look_at),
            pytest.raises((CheckpointWriteError, TypeError, RuntimeError), match=r'rank 1: OSError.*No space left'),
        ):
            run_of(here, kind, kind)
        dist.barrier()
        assert find_newest(place).path == place / 'epoch_1.pth'
        assert not list(place.glob('*.amp-part'))


@scenario
def fsdp_saving_with_hooks(here: Here) -> None:
    """A hook may look at what is saved, and take parts out; one that computes with it is told why not."""
    import toy
    from mmengine.hooks import Hook
    from mmengine.registry import HOOKS

    from amp_wrapper import AmpUsageError

    @HOOKS.register_module(force=True)
    class Looks(Hook):
        def before_save_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
            state = checkpoint['state_dict']
            checkpoint['shapes'] = {name: list(value.shape) for name, value in state.items()}
            checkpoint['numel'] = sum(value.numel() for value in state.values())
            checkpoint['state_dict'] = {f'renamed.{name}': value for name, value in state.items()}

    @HOOKS.register_module(force=True)
    class Computes(Hook):
        def before_save_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
            checkpoint['norm'] = [value.norm() for value in checkpoint['state_dict'].values()]

    found = []
    for kind in KINDS:
        case = settings(here, 'fsdp', 'O2', epochs=1)
        case['model_wrapper_cfg'] = dict(type='amp_wrapper.MMFullyShard', checkpoints=kind)
        case['custom_hooks'] = [dict(type='Looks')]
        case['default_hooks']['checkpoint'] = dict(type='CheckpointHook')
        toy.run(here.folder / kind, **case)
        dist.barrier()
        found.append(content(here.folder / kind / 'epoch_1.pth'))
    for other in found[1:]:
        assert differences(other['state_dict'], found[0]['state_dict']) == []
        assert other['shapes'] == found[0]['shapes'] and other['numel'] == found[0]['numel'] > 0
    case['custom_hooks'] = [dict(type='Computes')]
    with pytest.raises((AmpUsageError, CheckpointWriteError, TypeError), match='norm of a sharded weight'):
        toy.run(here.folder / 'computes', **case)


@scenario
def fsdp_saving_refusals(here: Here) -> None:
    """Before the training."""
    import toy

    case = settings(here, 'fsdp', 'O5')
    case['model_wrapper_cfg'] = dict(type='amp_wrapper.MMFullyShard', checkpoints='shards')
    with refused(
        AmpConfigError, "checkpoints='shards' (did you mean 'sharded'?): known are 'whole', 'sharded', 'async'"
    ):
        toy.run(here.folder / 'refused', **case)


@scenario
def fsdp_saving_preempted(here: Here) -> None:
    """SIGTERM to one rank: all save, the folder stands when they end, and is removed by the next regular checkpoint."""
    import toy
    from mmengine.hooks import Hook
    from mmengine.registry import HOOKS

    @HOOKS.register_module(force=True)
    class Terminates(Hook):
        def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
            if dist.get_rank() == 1 and runner.iter == 3:
                os.kill(os.getpid(), signal.SIGTERM)

    for kind in ('sharded', 'async'):
        case = settings(here, 'fsdp', 'O5')
        case['model_wrapper_cfg'] = dict(type='amp_wrapper.MMFullyShard', checkpoints=kind)
        hooks = case['custom_hooks']
        case['custom_hooks'] = [*hooks, dict(type='amp_wrapper.PreemptionHook'), dict(type='Terminates')]
        with pytest.raises(SystemExit):
            toy.run(here.folder / kind, **case)
        path = here.folder / kind / 'preempted.pth'
        assert find_newest(here.folder / kind).path == path and path.is_dir()
        assert content(path)['meta']['iter'] == 4
        dist.barrier()
        case['custom_hooks'], case['resume'] = hooks, True
        toy.run(here.folder / kind, **case)
        dist.barrier()
        case['resume'] = False
        toy.run(here.folder / f'{kind}_whole', **case)
        dist.barrier()
        assert not path.exists()
        mine, theirs = (content(here.folder / name / 'epoch_2.pth') for name in (kind, f'{kind}_whole'))
        for part in ('state_dict', 'ema_state_dict', 'optimizer', 'exact_resume'):
            assert differences(mine[part], theirs[part]) == [], part
        assert torch.is_tensor(mine['optimizer']['state'][0]['momentum_buffer'])
