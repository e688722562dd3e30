"""Checkpoints are written whole or not at all, and ``resume=True`` takes the newest one that is whole."""

from __future__ import annotations

import copy
import os
import pickle
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import toy
from damage import with_code, with_flipped_bit
from mmengine import fileio
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import Runner

from amp_wrapper import AmpCheckpointError, CheckpointWriteError

WRAPPER = dict(type='AmpOptimWrapper', opt_level='O5', optimizer=dict(type='SGD', lr=0.1, momentum=0.9))
SMALL: dict[str, Any] = dict(
    train_dataloader=toy.loader(length=4), val_dataloader=None, val_evaluator=None, val_cfg=None, log_level='INFO'
)


@HOOKS.register_module()
class OnlyLoad(Hook):
    """Ends a run when everything is loaded."""

    priority = 'LOWEST'

    def before_train(self, runner: Any) -> None:
        raise toy.Stop


# -- writing ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """Of a run that has saved three times."""
    return toy.run(tmp_path_factory.mktemp('run'), dict(WRAPPER), train_cfg=dict(by_epoch=True, max_epochs=3), **SMALL)


def save(runner: Runner, folder: Path, number: Any) -> Path:
    """The only file of the folder ``saved``."""
    runner.save_checkpoint(str(folder / 'saved'), 'a.pth', meta=dict(number=number))
    return folder / 'saved' / 'a.pth'


def number_in(path: Path) -> int:
    assert os.listdir(path.parent) == [path.name]
    number: int = torch.load(path, weights_only=True)['meta']['number']
    return number


def test_old_file_stays_until_the_next_is_safe(runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(runner, tmp_path, 1)
    seen: list[Any] = []
    replace, fsync = os.replace, os.fsync

    def watch_replace(source: Any, target: Any) -> None:
        if Path(target) == path:
            # at this moment both are whole
            seen.append([torch.load(each, weights_only=True)['meta']['number'] for each in (source, target)])
        replace(source, target)

    def watch_fsync(handle: int) -> None:
        seen.append('fsync')
        fsync(handle)

    monkeypatch.setattr(os, 'replace', watch_replace)
    monkeypatch.setattr(os, 'fsync', watch_fsync)
    save(runner, tmp_path, 2)
    # the folder, too: a rename is not on the disk before
    assert seen == ['fsync', [2, 1], 'fsync'] and number_in(path) == 2


def test_failed_write_leaves_the_old_file(runner: Runner, tmp_path: Path) -> None:
    path = save(runner, tmp_path, 1)
    failures: list[tuple[BaseException, type[BaseException], str]] = [
        (KeyboardInterrupt('stop'), KeyboardInterrupt, 'stop'),
        (OSError(28, 'No space left on device'), CheckpointWriteError, 'No space left'),
        (PermissionError(13, 'Permission denied'), CheckpointWriteError, 'change the permissions'),
    ]
    for failure, expected, word in failures:
        with mock.patch.object(os, 'fsync', side_effect=failure), pytest.raises(expected, match=word):
            save(runner, tmp_path, 2)
        assert number_in(path) == 1
    # what cannot be saved is no failure of the disk
    with pytest.raises((AttributeError, TypeError, pickle.PicklingError)):
        save(runner, tmp_path, lambda: 0)
    assert number_in(path) == 1


def test_write_that_fails_in_the_middle_leaves_the_old_file(runner: Runner, tmp_path: Path) -> None:
    """As on a full disk, torch's writer meets an error of the system before the file is whole."""
    path = save(runner, tmp_path, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(CheckpointWriteError, match=r'a\.pth could not be written'):
            save(runner, tmp_path, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert number_in(path) == 1


def test_content_that_cannot_be_read_back_is_warned_of_when_it_is_saved(tmp_path: Path) -> None:
    toy.ToyData.METAINFO['secret'] = Path  # type: ignore[assignment]
    try:
        with toy.run_log() as lines:
            toy.run(tmp_path, dict(WRAPPER), **SMALL)
    finally:
        del toy.ToyData.METAINFO['secret']
    said = [line for line in lines if 'nothing can be resumed from' in line]
    assert len(said) == 1 and 'GLOBAL' in said[0]


# -- the newest one ---------------------------------------------------------------------------------------------------


def resumed(folder: Path) -> tuple[int, str]:
    """The epoch from which a run in a folder goes on, and what it says."""
    case: dict[str, Any] = dict(train_cfg=dict(by_epoch=True, max_epochs=9), custom_hooks=[dict(type='OnlyLoad')])
    runner = Runner.from_cfg(toy.toy_config(folder, dict(WRAPPER), resume=True, **case, **SMALL))
    with toy.run_log() as lines, pytest.raises(toy.Stop):
        runner.train()
    return runner.epoch, '\n'.join(lines)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:700])


def flip(path: Path) -> None:
    weight = torch.load(path, weights_only=True)['state_dict']['fc.weight']
    path.write_bytes(with_flipped_bit(path.read_bytes(), weight))


def point(folder: Path, text: str) -> None:
    (folder / 'last_checkpoint').write_text(text)


def beside(folder: Path) -> None:
    """What else may lie in a work folder: a half-written file, weights alone, a link to itself, somebody's code."""
    (folder / 'epoch_4.pth.amp-part').write_bytes(b'PK')
    torch.save({'state_dict': {}, 'meta': {'time': '2099'}}, folder / 'best.pth')
    (folder / 'loop.pth').symlink_to(folder / 'loop.pth')
    (folder / 'pretrained.pth').write_bytes(with_code(folder / 'mark'))


NEWEST: dict[str, tuple[Callable[[Path], Any], int, str]] = {
    'nothing happened': (lambda folder: None, 3, 'epoch_3.pth'),
    'the last is cut off': (lambda folder: cut(folder / 'epoch_3.pth'), 2, 'epoch_3.pth is damaged'),
    'a bit of the last is flipped': (lambda folder: flip(folder / 'epoch_3.pth'), 2, 'epoch_3.pth is damaged'),
    'the last is gone': (lambda folder: (folder / 'epoch_3.pth').unlink(), 2, 'epoch_3.pth'),
    'no pointer': (lambda folder: (folder / 'last_checkpoint').unlink(), 3, ''),
    'an empty pointer': (lambda folder: point(folder, ''), 3, 'is not there'),
    'a pointer to nothing': (lambda folder: point(folder, 'nothing'), 3, 'nothing'),
    'a name of its own': (
        lambda folder: [(folder / 'epoch_3.pth').rename(folder / 'ep_3.pt'), point(folder, 'ep_3.pt')],
        3,
        'ep_3.pt',
    ),
    'other files': (beside, 3, 'epoch_3.pth'),
}


@pytest.mark.parametrize('case', NEWEST)
def test_newest_whole_checkpoint_is_resumed(case: str, runner: Runner, tmp_path: Path) -> None:
    happened, epoch, words = NEWEST[case]
    folder = tmp_path / 'work'
    shutil.copytree(runner.work_dir, folder)
    # as in a run that was not copied
    point(folder, str(folder / 'epoch_3.pth'))
    happened(folder)
    found, said = resumed(folder)
    assert found == epoch and words in said, said
    assert not (folder / 'mark').exists()


def test_training_starts_anew_only_where_there_is_no_checkpoint(runner: Runner, tmp_path: Path) -> None:
    assert resumed(tmp_path / 'new')[0] == 0
    shutil.copytree(runner.work_dir, tmp_path / 'work')
    for path in (tmp_path / 'work').glob('*.pth'):
        cut(path)
    with pytest.raises(AmpCheckpointError, match=r'no checkpoint in .* is whole'):
        resumed(tmp_path / 'work')


def test_folder_of_checkpoints_beside_an_older_run(tmp_path: Path) -> None:
    """The work dir has a file of the same name. The pointer names that of the other folder, where the youngest follows."""
    hooks = dict(checkpoint=dict(type='CheckpointHook', interval=1, out_dir=str(tmp_path / 'out')))
    case = dict(train_cfg=dict(by_epoch=True, max_epochs=2), default_hooks=hooks)
    toy.run(tmp_path / 'work', dict(WRAPPER), **copy.deepcopy(case), **SMALL)
    (tmp_path / 'work' / 'epoch_2.pth').write_bytes(b'PK')
    assert resumed(tmp_path / 'work')[0] == 2
    (tmp_path / 'out' / 'work' / 'epoch_2.pth').unlink()
    (tmp_path / 'work' / 'epoch_2.pth').unlink()
    assert resumed(tmp_path / 'work')[0] == 1


def test_links_and_pipes_are_written_to(tmp_path: Path) -> None:
    (tmp_path / 'link').symlink_to(tmp_path / 'file')
    fileio.put(b'x', str(tmp_path / 'link'))
    assert (tmp_path / 'link').is_symlink() and (tmp_path / 'file').read_bytes() == b'x'
