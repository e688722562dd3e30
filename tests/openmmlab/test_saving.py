"""mmengine's CheckpointHook with a wrapper of ours: old files go when the new stand, and a crash in between is tidied up."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from bits import differences
from mmengine.fileio import LocalBackend
from mmengine.hooks import CheckpointHook, Hook
from mmengine.registry import HOOKS

from amp_wrapper import CheckpointWriteError
from amp_wrapper.checkpoint import file as checkpoint_file
from amp_wrapper.openmmlab.patches.saving import WAITING
from amp_wrapper.openmmlab.wrappers import wrappers_of

OURS = dict(type='AmpOptimWrapper', opt_level='O2', optimizer=dict(type='SGD', lr=0.1))
STOCK = dict(type='OptimWrapper', optimizer=dict(type='SGD', lr=0.1))


def hooks(**more: Any) -> dict[str, Any]:
    return dict(default_hooks=dict(checkpoint=dict(type='CheckpointHook', interval=1, **more)))


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if '.pth' in path.name)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is written and removed on the disk, in order."""
    seen: list[str] = []
    save, put, remove = checkpoint_file.save, LocalBackend.put, LocalBackend.remove

    def watch(verb: str, function: Any, name: Any) -> Any:
        def watched(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            seen.append(f'{verb} {Path(name(args)).name}')
            return result

        return watched

    monkeypatch.setattr(checkpoint_file, 'save', watch('whole', save, lambda args: args[1]))
    monkeypatch.setattr(LocalBackend, 'put', watch('plain', put, lambda args: args[2]))
    monkeypatch.setattr(LocalBackend, 'remove', watch('remove', remove, lambda args: args[1]))
    return seen


def test_the_old_goes_when_the_new_stands(tmp_path: Path, events: list[str]) -> None:
    toy.run(tmp_path, OURS, **hooks(max_keep_ckpts=1, save_best='toy/score', rule='greater'))
    assert events == [
        'whole epoch_1.pth',
        'whole best_toy_score_epoch_1.pth',
        'whole epoch_1.pth',
        'whole epoch_2.pth',
        'remove epoch_1.pth',
        'whole best_toy_score_epoch_2.pth',
        'whole epoch_2.pth',
        'remove best_toy_score_epoch_1.pth',
    ]
    assert toy.checkpoint(tmp_path)['message_hub']['runtime_info'][WAITING] == [
        str(tmp_path / 'best_toy_score_epoch_1.pth')
    ]


def test_nothing_changes_without_a_wrapper_of_ours(tmp_path: Path, events: list[str]) -> None:
    toy.run(tmp_path, STOCK, **hooks(max_keep_ckpts=1))
    assert events == ['plain epoch_1.pth', 'remove epoch_1.pth', 'plain epoch_2.pth']
    saved = torch.load(tmp_path / 'epoch_2.pth', weights_only=True)
    assert WAITING not in saved['message_hub']['runtime_info']


@pytest.mark.skipif(not Path('/dev/full').exists(), reason='no /dev/full on this system to play a full disk')
def test_full_disk_leaves_the_last_good_checkpoint(tmp_path: Path) -> None:
    whole, part = tmp_path / 'whole', tmp_path / 'part'
    # leftovers are removed when the training starts, so the disk becomes full afterwards
    case = dict(hooks(max_keep_ckpts=1), custom_hooks=[dict(type='FillTheDisk', folder=str(part), epoch=2)])
    part.mkdir()
    with pytest.raises(CheckpointWriteError, match=r'epoch_2\.pth could not be written: the disk is full'):
        toy.run(part, OURS, **copy.deepcopy(case))
    assert 'epoch_1.pth' in files(part)
    checkpoint_file.load(part / 'epoch_1.pth')
    assert not list(part.glob('epoch_2*'))
    # somebody frees space
    toy.run(part, OURS, resume=True, **hooks(max_keep_ckpts=1))
    toy.run(whole, OURS, **hooks(max_keep_ckpts=1))
    assert files(part) == files(whole) == ['epoch_2.pth']
    left, right = toy.checkpoint(part), toy.checkpoint(whole)
    assert differences(left['state_dict'], right['state_dict']) == []


@HOOKS.register_module()
class FillTheDisk(Hook):
    """From an epoch on, its checkpoint cannot be written."""

    def __init__(self, folder: str, epoch: int) -> None:
        self.part = Path(folder) / f'epoch_{epoch}.pth.amp-part'

    def before_train_epoch(self, runner: Any) -> None:
        if not self.part.is_symlink():
            self.part.symlink_to('/dev/full')


def test_unwritable_folder_is_found_out_before_the_first_epoch(tmp_path: Path) -> None:
    (tmp_path / 'file').write_text('')
    with pytest.raises((CheckpointWriteError, NotADirectoryError), match='file') as caught:
        toy.run(tmp_path / 'work', OURS, **hooks(out_dir=str(tmp_path / 'file')))
    assert isinstance(caught.value, CheckpointWriteError)
    # not the file itself, after an epoch of work
    assert str(caught.value).startswith('checkpoints cannot be written')


class Killed(Exception):
    """In place of SIGKILL."""


@pytest.mark.parametrize('place', ['before the old goes', 'before the best is noted'])
def test_what_a_killed_run_left_is_tidied_up(tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, part = tmp_path / 'whole', tmp_path / 'part'
    arguments = hooks(max_keep_ckpts=1, save_best='toy/score', rule='greater')
    case = dict(arguments, custom_hooks=[dict(type='amp_wrapper.ExactResumeHook')])
    toy.run(whole, OURS, **copy.deepcopy(case))

    with monkeypatch.context() as patch:
        if place == 'before the old goes':
            patch.setattr(LocalBackend, 'remove', _die)
        else:
            save = checkpoint_file.save
            done = []

            def dies_at_the_last(checkpoint: Any, path: Any) -> None:
                done.append(path)
                if len(done) == 6:
                    (Path(path).parent / 'epoch_2.pth.amp-part').write_bytes(b'PK')
                    raise Killed
                save(checkpoint, path)

            patch.setattr(checkpoint_file, 'save', dies_at_the_last)
        with pytest.raises(Killed):
            toy.run(part, OURS, **copy.deepcopy(case))
    left = files(part)
    assert len(left) > 2
    toy.run(part, OURS, resume=True, **copy.deepcopy(case))
    assert files(part) == files(whole)
    first, second = (toy.checkpoint(folder)['message_hub']['runtime_info'] for folder in (whole, part))
    assert first['best_score'] == second['best_score']
    assert Path(first['best_ckpt']).name == Path(second['best_ckpt']).name


def _die(*args: Any) -> None:
    raise Killed


def test_a_file_cannot_have_others_removed(tmp_path: Path) -> None:
    """Whatever its message hub says: only checkpoints of the very folder, and none that is in use."""
    work = tmp_path / 'work'
    toy.run(work, OURS, **hooks())
    victims = [tmp_path / 'victim.pth', tmp_path / 'victim.txt', work / 'victim.txt', work / 'epoch_2.pth']
    for path in victims[:3]:
        path.write_text('x')
    (work / 'old.pth').write_text('x')
    file = torch.load(work / 'epoch_2.pth', weights_only=True)
    file['message_hub']['runtime_info'][WAITING] = [*map(str, victims), str(work / 'old.pth')]
    file['message_hub']['resumed_keys'][WAITING] = True
    torch.save(file, work / 'epoch_2.pth')
    toy.run(work, OURS, resume=True, train_cfg=dict(by_epoch=True, max_epochs=3, val_interval=1), **hooks())
    assert all(path.exists() for path in victims)
    assert not (work / 'old.pth').exists()


def test_the_last_checkpoint_is_known_after_a_resume(tmp_path: Path) -> None:
    """mmengine forgets it, so that a new best score was not written into it."""
    case = hooks(save_best='toy/score', rule='greater')
    toy.run(tmp_path, OURS, **copy.deepcopy(case))
    runner = toy.run(tmp_path, OURS, resume=True, **copy.deepcopy(case))
    hook = next(hook for hook in runner.hooks if isinstance(hook, CheckpointHook))
    assert hook.last_ckpt == str(tmp_path / 'epoch_2.pth')


def test_a_file_of_the_name_of_an_old_one_stays(tmp_path: Path) -> None:
    """A best checkpoint that is saved anew under its name must not be removed as the previous best."""
    case = hooks(save_best='toy/score', rule='greater', filename_tmpl='same_{}.pth', max_keep_ckpts=1)
    runner = toy.run(tmp_path, OURS, **case)
    hook = next(hook for hook in runner.hooks if isinstance(hook, CheckpointHook))
    runner.message_hub.update_info('best_score', -100.0)
    hook._save_best_checkpoint(runner, {'toy/score': -0.1})
    assert Path(hook.best_ckpt_path).is_file() and (tmp_path / 'same_2.pth').is_file()


def test_published_files_are_whole_too(tmp_path: Path, events: list[str]) -> None:
    toy.run(tmp_path, OURS, **hooks(published_keys=['meta', 'state_dict']))
    assert [event.split()[0] for event in events] == ['whole'] * 3
    name = events[-1].split()[1]
    assert name.startswith('epoch_2-') and set(checkpoint_file.load(tmp_path / name)) == {'meta', 'state_dict'}


def test_checkpoints_elsewhere(tmp_path: Path) -> None:
    work = tmp_path / 'work'
    toy.run(work, OURS, **hooks(out_dir=str(tmp_path / 'out')))
    assert files(tmp_path / 'out' / 'work') == ['epoch_1.pth', 'epoch_2.pth']
    (tmp_path / 'out' / 'work' / 'epoch_2.pth').write_bytes(b'PK')
    with toy.run_log() as lines:
        toy.run(work, OURS, resume=True, log_level='INFO', **hooks(out_dir=str(tmp_path / 'out')))
    text = '\n'.join(lines)
    assert 'passed over' in text and 'epoch_2.pth is truncated' in text
    assert f'resuming from {tmp_path / "out" / "work" / "epoch_1.pth"}' in text


def test_wrappers_of_knows_ours(tmp_path: Path) -> None:
    runner = toy.run(tmp_path, STOCK)
    assert wrappers_of(runner) == {}
    runner = toy.run(tmp_path, OURS)
    assert list(wrappers_of(runner)) == ['']
    assert os.listdir(tmp_path)


# -- found by a reviewer ----------------------------------------------------------------------------------------------


def test_an_archive_of_another_hook_is_left_alone(tmp_path: Path) -> None:
    """Files carry the list of what was due to go, and another hook may have files of the same names."""
    case = hooks(max_keep_ckpts=1)
    case['default_hooks']['archive'] = dict(type='CheckpointHook', interval=1, out_dir=str(tmp_path / 'archive'))
    longer = dict(train_cfg=dict(by_epoch=True, max_epochs=3, val_interval=1))
    toy.run(tmp_path / 'work', OURS, **copy.deepcopy(case))
    toy.run(tmp_path / 'work', OURS, resume=True, **longer, **copy.deepcopy(case))
    assert files(tmp_path / 'archive' / 'work') == ['epoch_1.pth', 'epoch_2.pth', 'epoch_3.pth']


def test_the_files_of_the_run_one_comes_from_are_left_alone(tmp_path: Path) -> None:
    case = hooks(max_keep_ckpts=1, save_best='toy/score', rule='greater')
    toy.run(tmp_path / 'a', OURS, **copy.deepcopy(case))
    before = files(tmp_path / 'a')
    toy.run(tmp_path / 'b', OURS, **copy.deepcopy(case))
    mine = files(tmp_path / 'b')
    longer = dict(train_cfg=dict(by_epoch=True, max_epochs=4, val_interval=1))
    path = str(tmp_path / 'a' / 'epoch_2.pth')
    toy.run(tmp_path / 'b', OURS, resume=True, load_from=path, **longer, **copy.deepcopy(case))
    assert files(tmp_path / 'a') == before
    assert set(mine) - {'epoch_2.pth'} <= set(files(tmp_path / 'b'))


def test_a_younger_file_of_a_listed_name_is_left_alone(tmp_path: Path) -> None:
    """A run was begun anew in the folder, and then somebody goes back to a file of the first one."""
    toy.run(tmp_path, OURS, **hooks(max_keep_ckpts=1))
    os.rename(tmp_path / 'epoch_2.pth', tmp_path / 'first.pth')
    (tmp_path / 'epoch_1.pth').write_text('of the second run')
    longer = dict(train_cfg=dict(by_epoch=True, max_epochs=3, val_interval=1))
    toy.run(tmp_path, OURS, resume=True, load_from=str(tmp_path / 'first.pth'), **longer, **hooks())
    assert (tmp_path / 'epoch_1.pth').read_text() == 'of the second run'


def test_weights_alone_do_not_replace_a_preempted_run(tmp_path: Path) -> None:
    case = hooks()
    case['default_hooks']['checkpoint'].update(save_optimizer=False)
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / 'preempted.pth').write_text('x')
    toy.run(tmp_path, OURS, **case)
    assert (tmp_path / 'preempted.pth').exists()
    toy.run(tmp_path, OURS, **hooks())
    assert not (tmp_path / 'preempted.pth').exists()


def test_an_empty_pointer_and_checkpoints_elsewhere(tmp_path: Path) -> None:
    """mmengine writes the pointer without care; killed in between, it is empty."""
    case = hooks(out_dir=str(tmp_path / 'out'))
    toy.run(tmp_path / 'work', OURS, **copy.deepcopy(case))
    (tmp_path / 'work' / 'last_checkpoint').write_text('')
    longer = dict(train_cfg=dict(by_epoch=True, max_epochs=3, val_interval=1))
    with toy.run_log() as lines:
        toy.run(tmp_path / 'work', OURS, resume=True, log_level='INFO', **longer, **case)
    assert any(f'resuming from {tmp_path / "out" / "work" / "epoch_2.pth"}' in line for line in lines)
