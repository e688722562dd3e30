"""Which checkpoint of a run is the newest that is complete, a file or a folder of shards; what a killed run leaves."""

from __future__ import annotations

import importlib
import inspect
import os
import pathlib
import re
import sys
import threading
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from bits import differences

from amp_wrapper import CheckpointWriteError
from amp_wrapper.checkpoint import file as checkpoint_file
from amp_wrapper.checkpoint import folder, shard_writer, sharded
from amp_wrapper.checkpoint.newest import Newest, find_newest


class _Evil:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder / 'evil'),)


def training_file(time: str = '20260101_000000', iteration: int = 0, **more: Any) -> dict[str, Any]:
    return {
        'state_dict': {'weight': torch.ones(3)},
        'optimizer': {},
        'message_hub': {},
        'meta': {'time': time, 'iter': iteration},
        **more,
    }


def test_newest_by_the_time_inside(tmp_path: Path) -> None:
    # copied folders have any modification times
    checkpoint_file.save(training_file('20260102_000000', 10), tmp_path / 'new.pth')
    checkpoint_file.save(training_file('20260101_000000', 99), tmp_path / 'old.pth')
    checkpoint_file.save(training_file('20260102_000000', 9), tmp_path / 'same_second.pth')
    checkpoint_file.save({'state_dict': {}, 'meta': {'time': '2027'}}, tmp_path / 'best.pth')
    (tmp_path / 'half.pth.amp-part').write_bytes(b'PK')
    assert find_newest(tmp_path) == Newest((tmp_path / 'new.pth').resolve(), ())


def test_newest_passes_over_what_is_broken(tmp_path: Path) -> None:
    for number in range(1, 5):
        checkpoint_file.save(training_file(iteration=number), tmp_path / f'iter_{number}.pth')
    data = (tmp_path / 'iter_4.pth').read_bytes()
    (tmp_path / 'iter_4.pth').write_bytes(data[:700])
    data = bytearray((tmp_path / 'iter_3.pth').read_bytes())
    data[data.find(torch.ones(3).numpy().tobytes())] ^= 1
    (tmp_path / 'iter_3.pth').write_bytes(data)
    (tmp_path / 'last_checkpoint').write_text('')
    found = find_newest(tmp_path)
    assert found.path == (tmp_path / 'iter_2.pth').resolve()
    assert len(found.passed_over) == 3
    for words in ('last_checkpoint is empty', 'iter_4.pth is truncated', 'iter_3.pth is damaged'):
        assert any(words in line for line in found.passed_over), words


def test_newest_follows_the_pointer_out_of_the_folder(tmp_path: Path) -> None:
    work, elsewhere = tmp_path / 'work', tmp_path / 'elsewhere'
    work.mkdir()
    checkpoint_file.save(training_file(), elsewhere / 'epoch_1.pth')
    (work / 'last_checkpoint').write_text(str(elsewhere / 'epoch_1.pth'))
    assert find_newest(work).path == (elsewhere / 'epoch_1.pth').resolve()
    (elsewhere / 'epoch_1.pth').unlink()
    found = find_newest(work)
    assert found.path is None and 'is not there' in found.passed_over[0]
    assert find_newest(tmp_path / 'nowhere') == Newest(None, ())


# -- found by a reviewer ----------------------------------------------------------------------------------------------


def _saves(*marks: str) -> dict[str, Any]:
    return {'runtime_info': {'amp_saves': list(marks)}}


def test_order_needs_no_clock(tmp_path: Path) -> None:
    """Time zones change, clocks are set back: the file that last_checkpoint names, or what was saved after it."""
    checkpoint_file.save(training_file('20260101_090000', 2, message_hub=_saves('a', 'b')), tmp_path / 'epoch_2.pth')
    checkpoint_file.save(
        training_file('20260101_010000', 4, message_hub=_saves('a', 'b', 'c')), tmp_path / 'epoch_4.pth'
    )
    (tmp_path / 'last_checkpoint').write_text(str(tmp_path / 'epoch_4.pth'))
    assert find_newest(tmp_path).path == tmp_path / 'epoch_4.pth'
    # killed before it could say so
    (tmp_path / 'last_checkpoint').write_text(str(tmp_path / 'epoch_2.pth'))
    assert find_newest(tmp_path).path == tmp_path / 'epoch_4.pth'
    # a run that began anew in this folder: what lies there is not its own
    checkpoint_file.save(training_file('20250101_010000', 1, message_hub=_saves('x')), tmp_path / 'epoch_1.pth')
    (tmp_path / 'last_checkpoint').write_text(str(tmp_path / 'epoch_1.pth'))
    assert find_newest(tmp_path).path == tmp_path / 'epoch_1.pth'


def test_a_copied_folder_is_a_run_of_its_own(tmp_path: Path) -> None:
    first, copied = tmp_path / 'a', tmp_path / 'b'
    checkpoint_file.save(training_file(iteration=1), first / 'epoch_1.pth')
    checkpoint_file.save(training_file(iteration=1), copied / 'epoch_1.pth')
    checkpoint_file.save(training_file('20270101_000000', 3), first / 'epoch_3.pth')
    for text in (first / 'epoch_1.pth', 'epoch_1.pth'):
        (copied / 'last_checkpoint').write_text(str(text))
        assert find_newest(copied).path == copied / 'epoch_1.pth'


@pytest.mark.parametrize('text', ['a\0b', 'x' * 5000, 'nothing', '\n', 'file:///nowhere/epoch_1.pth'])
def test_a_pointer_to_nowhere(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere, work = tmp_path / 'elsewhere', tmp_path / 'work'
    checkpoint_file.save(training_file(iteration=7), elsewhere / 'epoch_7.pth')
    monkeypatch.chdir(elsewhere)
    work.mkdir()
    (work / 'last_checkpoint').write_text(text)
    found = find_newest(work)
    assert found.path is None and len(found.passed_over) == 1


def test_other_peoples_files_do_not_stand_in_the_way(tmp_path: Path) -> None:
    (tmp_path / 'loop.pth').symlink_to(tmp_path / 'loop.pth')
    (tmp_path / 'backbone.pth').write_bytes(b'PK')
    torch.save({'state_dict': {}, 'x': _Evil(tmp_path)}, tmp_path / 'pretrained.pth')
    assert find_newest(tmp_path) == Newest(None, ())
    (tmp_path / 'epoch_1.pth').write_bytes(b'PK')
    assert len(find_newest(tmp_path).passed_over) == 1


def test_names_of_ones_own_are_found_through_the_pointer(tmp_path: Path) -> None:
    checkpoint_file.save(training_file(), tmp_path / 'ep_1.pt')
    (tmp_path / 'last_checkpoint').write_text(str(tmp_path / 'ep_1.pt'))
    assert find_newest(tmp_path).path == tmp_path / 'ep_1.pt'
    checkpoint_file.save({'state_dict': {}, 'meta': {}}, tmp_path / 'ep_1.pt')
    found = find_newest(tmp_path)
    assert found.path is None and 'holds no optimizer' in found.passed_over[0]


def test_leftovers_are_removed_and_nothing_else(tmp_path: Path) -> None:
    for name in ('a.pth', 'a.pth.amp-part', 'b.pth.amp-part', 'notes.part'):
        (tmp_path / name).write_text('x')
    assert folder.remove_leftovers(tmp_path) == ['a.pth.amp-part', 'b.pth.amp-part']
    assert sorted(os.listdir(tmp_path)) == ['a.pth', 'notes.part']


# -- folders of shards -----------------------------------------------------------------------------------------------


def save_shards(path: Path, **words: Any) -> None:
    sharded.save(training_file(**words), path, lambda tensor: bool(tensor.ndim))


def test_folders_are_found_beside_files(tmp_path: Path) -> None:
    checkpoint_file.save(training_file('20260101_000001'), tmp_path / 'epoch_1.pth')
    save_shards(tmp_path / 'epoch_2.pth', time='20260101_000002')
    checkpoint_file.save(training_file('20260101_000000'), tmp_path / 'epoch_3.pth')
    (tmp_path / 'last_checkpoint').write_text(str(tmp_path / 'epoch_2.pth'))
    assert find_newest(tmp_path) == Newest(tmp_path / 'epoch_2.pth', ())
    (tmp_path / 'last_checkpoint').unlink()
    assert find_newest(tmp_path).path == tmp_path / 'epoch_2.pth'


@pytest.mark.parametrize('name', ['files.json', 'rest.pth', 'tensors/.metadata', 'tensors/__0_0.distcp'])
@pytest.mark.parametrize('how', ['changed', 'missing'])
def test_damaged_folders_are_passed_over(tmp_path: Path, name: str, how: str) -> None:
    save_shards(tmp_path / 'epoch_1.pth', time='20260101_000001')
    save_shards(tmp_path / 'epoch_2.pth', time='20260101_000002')
    path = tmp_path / 'epoch_2.pth' / name
    content = path.read_bytes()
    path.unlink() if how == 'missing' else path.write_bytes(content[:-2] + bytes([content[-2] ^ 1, content[-1]]))
    found = find_newest(tmp_path)
    assert found.path == tmp_path / 'epoch_1.pth'
    assert len(found.passed_over) == 1 and 'epoch_2.pth' in found.passed_over[0]


def test_a_folder_that_was_being_replaced(tmp_path: Path) -> None:
    """Somebody died between renaming the old folder and the new one: the old one counts, and gets its name back."""
    save_shards(tmp_path / 'epoch_1.pth')
    (tmp_path / 'epoch_1.pth').rename(tmp_path / 'epoch_1.pth.amp-old')
    (tmp_path / 'epoch_1.pth.amp-part' / 'tensors').mkdir(parents=True)
    assert find_newest(tmp_path).path == tmp_path / 'epoch_1.pth'
    assert sharded.load(tmp_path / 'epoch_1.pth')['state_dict']['weight'].sum() == 3
    assert folder.remove_leftovers(tmp_path) == ['epoch_1.pth.amp-part']
    assert os.listdir(tmp_path) == ['epoch_1.pth'] and folder.is_folder(tmp_path / 'epoch_1.pth')
    (tmp_path / 'epoch_1.pth.amp-old').mkdir()
    assert folder.remove_leftovers(tmp_path) == ['epoch_1.pth.amp-old']
    assert os.listdir(tmp_path) == ['epoch_1.pth']


def test_a_run_in_one_process_writes_in_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is changed afterwards is not written; a second one waits for the first; errors come when it is waited for."""
    may_write, original = threading.Event(), shard_writer._write

    def write(*args: Any) -> None:
        assert may_write.wait(60)
        original(*args)

    monkeypatch.setattr(shard_writer, '_write', write)
    content = training_file()
    first = sharded.begin(content, tmp_path / 'epoch_1.pth', takes=lambda tensor: bool(tensor.ndim))
    content['state_dict']['weight'].zero_()
    assert not first.is_written
    may_write.set()
    second = sharded.begin(content, tmp_path / 'epoch_2.pth', takes=lambda tensor: bool(tensor.ndim))
    assert first.is_written
    first.finish()
    second.finish()
    for number, total in ((1, 3), (2, 0)):
        assert sharded.load(tmp_path / f'epoch_{number}.pth')['state_dict']['weight'].sum() == total
    monkeypatch.setattr(folder, 'look_at', lambda path: [][0])
    third = sharded.begin(content, tmp_path / 'epoch_2.pth')
    with pytest.raises(CheckpointWriteError, match=r'epoch_2.*IndexError'):
        third.finish()
    monkeypatch.undo()
    assert 'weight' in sharded.load(tmp_path / 'epoch_2.pth')['state_dict']
    assert sorted(os.listdir(tmp_path)) == ['epoch_1.pth', 'epoch_2.pth']


def test_shapes_without_reading(tmp_path: Path) -> None:
    save_shards(tmp_path / 'a.pth')
    assert sharded.shapes(tmp_path / 'a.pth') == {'state_dict/weight': torch.Size([3])}
    (tmp_path / 'a.pth' / 'tensors' / '__0_0.distcp').write_bytes(b'')
    found = sharded.load(tmp_path / 'a.pth', check=False, only_shapes=True)['state_dict']['weight']
    assert found.shape == (3,) and found.dtype is torch.float32


def test_keys_with_slashes(tmp_path: Path) -> None:
    content = {'a': {'b/c': torch.ones(2)}, 'a/b': {'c': torch.zeros(2)}}
    sharded.save(content, tmp_path / 'a.pth', lambda tensor: True)
    found = sharded.load(tmp_path / 'a.pth')
    assert found['a']['b/c'].sum() == 2 and found['a/b']['c'].sum() == 0


@pytest.mark.parametrize('module', ['pathlib', 'pathlib._local'])
def test_folders_of_another_python(tmp_path: Path, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch keeps a path in the metadata, and Python 3.13 pickles paths under another module than those around it."""
    with monkeypatch.context() as other_python:
        other_python.setitem(sys.modules, module, pathlib)
        other_python.setattr(type(tmp_path), '__module__', module)
        save_shards(tmp_path / 'a.pth')
    content = (tmp_path / 'a.pth' / 'tensors' / '.metadata').read_bytes()
    assert [part for part in re.findall(rb'pathlib[._a-z]*', content) if part != module.encode()] == []
    assert module.encode() in content
    assert sharded.load(tmp_path / 'a.pth')['state_dict']['weight'].sum() == 3


def test_files_and_folders_replace_each_other(tmp_path: Path) -> None:
    path = tmp_path / 'epoch_1.pth'
    for _ in range(2):
        save_shards(path)
        assert path.is_dir() and os.listdir(tmp_path) == ['epoch_1.pth']
        checkpoint_file.save({'x': 1}, path)
        assert path.is_file() and os.listdir(tmp_path) == ['epoch_1.pth']


def test_other_folders_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / 'epoch_1.pth'
    path.mkdir()
    (path / 'notes').write_text('x')
    with pytest.raises(CheckpointWriteError, match='is a folder, and no checkpoint'):
        save_shards(path)
    with pytest.raises(CheckpointWriteError, match=r'epoch_1\.pth'):
        checkpoint_file.save({'x': 1}, path)
    assert (path / 'notes').read_text() == 'x' and os.listdir(tmp_path) == ['epoch_1.pth']


def test_a_file_that_a_folder_was_about_to_replace(tmp_path: Path) -> None:
    checkpoint_file.save(training_file(), tmp_path / 'epoch_1.pth.amp-old')
    assert find_newest(tmp_path).path == tmp_path / 'epoch_1.pth'
    assert checkpoint_file.load(tmp_path / 'epoch_1.pth')['state_dict']['weight'].sum() == 3
    folder.remove_leftovers(tmp_path)
    assert os.listdir(tmp_path) == ['epoch_1.pth']


def test_who_dies_while_a_folder_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_shards(tmp_path / 'epoch_1.pth')

    def rmtree(path: Path, ignore_errors: bool = False) -> None:
        if Path(path).is_dir():
            (Path(path) / 'files.json').unlink()
            raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint_file.shutil, 'rmtree', rmtree)
    with pytest.raises(KeyboardInterrupt):
        checkpoint_file.remove(tmp_path / 'epoch_1.pth')
    monkeypatch.undo()
    assert folder.remove_leftovers(tmp_path) == ['epoch_1.pth.removed.amp-part'] and os.listdir(tmp_path) == []


def test_what_is_removed_meanwhile_is_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody tidies up the folder while it is written: an error, and the one before stays."""
    save_shards(tmp_path / 'epoch_1.pth')
    original = shard_writer._write

    def write(*args: Any) -> None:
        folder.remove_leftovers(tmp_path)
        original(*args)

    monkeypatch.setattr(shard_writer, '_write', write)
    pending = sharded.begin(training_file(), tmp_path / 'epoch_1.pth')
    with pytest.raises(CheckpointWriteError, match=r'epoch_1\.pth'):
        pending.finish()
    folder.verify(tmp_path / 'epoch_1.pth')
    assert os.listdir(tmp_path) == ['epoch_1.pth']


def test_what_nobody_asked_about_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: list[str]) -> None:
    monkeypatch.setattr(folder, 'look_at', lambda path: [][0])
    sharded.begin(training_file(), tmp_path / 'epoch_1.pth')
    shard_writer.wait_for_the_last()
    shard_writer.wait_for_the_last()
    assert len(log) == 1 and 'WARNING' in log[0] and 'epoch_1.pth could not be written' in log[0]


class Pair(NamedTuple):
    left: torch.Tensor
    right: int


def test_what_a_state_may_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Named tuples, ordered dicts with the versions of modules, dicts of one key; the home folder may be written short."""
    monkeypatch.setenv('HOME', str(tmp_path))
    model = torch.nn.BatchNorm1d(2)
    content = {'model': model.state_dict(), 'one': {'sharded_tensor': 'x'}, 'many': [(torch.ones(1), 2)]}
    sharded.save(content, '~/a.pth', lambda tensor: bool(tensor.ndim))
    found = sharded.load('~/a.pth')
    assert found['model']._metadata == model.state_dict()._metadata and found['model']._metadata['']['version'] == 2
    assert found['one'] == {'sharded_tensor': 'x'} and found['many'][0][1] == 2
    assert (tmp_path / 'a.pth' / 'files.json').is_file()
    pair, tensors = sharded.split(Pair(torch.ones(3), 4), lambda tensor: True)
    assert isinstance(pair, Pair) and isinstance(sharded.join(pair, tensors), Pair)


def test_a_torch_without_the_argument_no_dist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch 2.6: neither ``save`` nor ``load`` has it, and ``load`` would wait for other processes."""
    saves = importlib.import_module('torch.distributed.checkpoint.state_dict_saver')
    loads = importlib.import_module('torch.distributed.checkpoint.state_dict_loader')
    save_now = saves.save
    alone = {'no_dist': True} if 'no_dist' in inspect.signature(save_now).parameters else {}

    def save(state_dict: Any, *, storage_writer: Any = None, process_group: Any = None) -> Any:
        return save_now(state_dict, storage_writer=storage_writer, process_group=process_group, **alone)

    def load(state_dict: Any, *, storage_reader: Any = None, process_group: Any = None) -> None:
        raise AssertionError('collective')

    monkeypatch.setattr(saves, 'save', save)
    monkeypatch.setattr(loads, 'load', load)
    save_shards(tmp_path / 'a.pth')
    with warnings.catch_warnings():
        warnings.simplefilter('error', FutureWarning)
        found = sharded.load(tmp_path / 'a.pth')
    assert differences(found, training_file()) == []
