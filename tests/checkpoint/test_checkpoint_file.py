"""Files written whole or not at all, read with their checksums, never executed."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from amp_wrapper import AmpCheckpointError, CheckpointWriteError
from amp_wrapper.checkpoint import file as checkpoint_file

FULL = Path('/dev/full')
needs_full = pytest.mark.skipif(not FULL.exists(), reason='no /dev/full on this system to play a full disk')


# -- writing ---------------------------------------------------------------------------------------------------------


def test_the_old_file_stands_until_the_new_one_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / 'deep' / 'a.pth'
    checkpoint_file.save({'x': 1}, path)
    seen = []
    replace, fsync = os.replace, os.fsync

    def watch_replace(source: Any, target: Any) -> None:
        # at this moment both are whole, and the new one is on the disk
        seen.append(('replace', checkpoint_file.load(source), checkpoint_file.load(target)))
        replace(source, target)

    def watch_fsync(handle: int) -> None:
        seen.append(('fsync', os.path.realpath(f'/proc/self/fd/{handle}')) if Path('/proc').exists() else ('fsync', ''))
        fsync(handle)

    monkeypatch.setattr(os, 'replace', watch_replace)
    monkeypatch.setattr(os, 'fsync', watch_fsync)
    checkpoint_file.save({'x': 2}, path)
    assert [step[0] for step in seen] == ['fsync', 'replace', 'fsync']
    assert seen[1][1:] == ({'x': 2}, {'x': 1})
    assert checkpoint_file.load(path) == {'x': 2}
    assert os.listdir(path.parent) == ['a.pth']


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / 'a.pth'
    checkpoint_file.save({'x': 1}, path)

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, 'fsync', interrupted)
    with pytest.raises(KeyboardInterrupt):
        checkpoint_file.save({'x': 2}, path)
    assert checkpoint_file.load(path) == {'x': 1} and os.listdir(tmp_path) == ['a.pth']


@needs_full
@pytest.mark.parametrize('size', [1, 100_000])
def test_full_disk(tmp_path: Path, size: int) -> None:
    path = tmp_path / 'a.pth'
    checkpoint_file.save({'x': 1}, path)
    # every write to this device fails as on a full disk
    (tmp_path / 'a.pth.amp-part').symlink_to(FULL)
    with pytest.raises(CheckpointWriteError, match=r'a\.pth could not be written: the disk is full.*free some space'):
        checkpoint_file.save({'x': torch.ones(size)}, path)
    assert checkpoint_file.load(path) == {'x': 1} and os.listdir(tmp_path) == ['a.pth']


def test_unwritable_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / 'file').write_text('')
    with pytest.raises(CheckpointWriteError, match=r'file/a\.pth could not be written'):
        checkpoint_file.save({}, tmp_path / 'file' / 'a.pth')
    with pytest.raises(CheckpointWriteError, match=r'checkpoints cannot be written: no file can be made in .*file \('):
        checkpoint_file.check_writable(tmp_path / 'file')
    checkpoint_file.check_writable(tmp_path / 'new')
    assert os.listdir(tmp_path / 'new') == []

    # who runs as root may write everywhere, so the answer is given by hand
    def refused(*args: Any, **kwargs: Any) -> Any:
        raise PermissionError(13, 'Permission denied')

    monkeypatch.setattr('builtins.open', refused)
    with pytest.raises(
        CheckpointWriteError, match=r'no file can be made in .* \(Permission denied\): change its permissions'
    ):
        checkpoint_file.save({}, tmp_path / 'a.pth')


def test_errors_of_the_content_are_not_errors_of_the_disk(tmp_path: Path) -> None:
    with pytest.raises((AttributeError, TypeError, pickle.PicklingError)):
        checkpoint_file.save({'x': lambda: 0}, tmp_path / 'a.pth')
    assert os.listdir(tmp_path) == []


def test_write_text_replaces(tmp_path: Path) -> None:
    checkpoint_file.write_text('old', tmp_path / 'last_checkpoint')
    checkpoint_file.write_text('new', tmp_path / 'last_checkpoint')
    assert (tmp_path / 'last_checkpoint').read_text() == 'new' and os.listdir(tmp_path) == ['last_checkpoint']
    with pytest.raises(CheckpointWriteError):
        checkpoint_file.write_text('x', tmp_path / 'last_checkpoint' / 'x')


# -- reading ---------------------------------------------------------------------------------------------------------


def test_every_flipped_byte_is_seen_or_harmless(tmp_path: Path) -> None:
    path = tmp_path / 'a.pth'
    content = {'x': torch.arange(300.0), 'y': [1, 'two', None]}
    checkpoint_file.save(content, path)
    data = path.read_bytes()
    refused = 0
    for position in range(0, len(data), 7):
        changed = bytearray(data)
        changed[position] ^= 0x10
        path.write_bytes(changed)
        try:
            read = checkpoint_file.load(path)
        except AmpCheckpointError as error:
            refused += str(path) in str(error)
        else:
            assert torch.equal(read['x'], content['x']) and read['y'] == content['y'], position
    # the numbers alone are more than a third of the file
    assert refused > len(data) / 7 / 3


def test_torch_alone_does_not_see_a_flipped_byte(tmp_path: Path) -> None:
    """Why checksums are compared here: if torch does it one day, this can go."""
    path = tmp_path / 'a.pth'
    checkpoint_file.save({'x': torch.zeros(300)}, path)
    data = bytearray(path.read_bytes())
    middle = data.find(bytes(1200)) + 600
    data[middle] ^= 0x10
    path.write_bytes(data)
    assert torch.load(path, weights_only=True)['x'].count_nonzero() == 1
    with pytest.raises(AmpCheckpointError, match=r"record '.*data/0' does not have the checksum"):
        checkpoint_file.load(path)


@pytest.mark.parametrize('check', [True, False])
@pytest.mark.parametrize('length', [0, 1, 3, 500, -20])
def test_truncated(tmp_path: Path, length: int, check: bool) -> None:
    path = tmp_path / 'a.pth'
    checkpoint_file.save({'x': torch.ones(500)}, path)
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(AmpCheckpointError, match=rf'a\.pth is truncated \({path.stat().st_size} bytes\)'):
        checkpoint_file.load(path, check=check)


@pytest.mark.parametrize('data', [b'hello world\n', b'{"a": 1}', b'\x80\x02', bytes(100), pickle.dumps({'a': 1}, 2)])
def test_no_checkpoint(tmp_path: Path, data: bytes) -> None:
    (tmp_path / 'a.pth').write_bytes(data)
    with pytest.raises(AmpCheckpointError, match=r'a\.pth is no checkpoint, or a damaged one'):
        checkpoint_file.load(tmp_path / 'a.pth')
    with pytest.raises(AmpCheckpointError, match=r'b\.pth is not there'):
        checkpoint_file.load(tmp_path / 'b.pth')
    with pytest.raises(AmpCheckpointError, match='is not there, or no file'):
        checkpoint_file.load(tmp_path)


def test_older_format_is_read(tmp_path: Path) -> None:
    torch.save({'x': torch.ones(3)}, tmp_path / 'a.pth', _use_new_zipfile_serialization=False)
    assert checkpoint_file.load(tmp_path / 'a.pth')['x'].sum() == 3


class _Evil:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f'touch {self.mark}',)


@pytest.mark.parametrize('how', ['new', 'old'])
@pytest.mark.parametrize('forced', [False, True])
def test_code_is_refused(tmp_path: Path, how: str, forced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if forced:
        # what mmengine's own checkpoints need without this package
        monkeypatch.setenv('TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD', '1')
    mark = tmp_path / 'hacked'
    torch.save({'x': _Evil(mark)}, tmp_path / 'a.pth', _use_new_zipfile_serialization=how == 'new')
    with pytest.raises(AmpCheckpointError, match=r'a\.pth is refused: it asks for code to run.*system'):
        checkpoint_file.load(tmp_path / 'a.pth')
    assert not mark.exists()


def test_the_home_folder_may_be_written_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv('HOME', str(tmp_path))
    checkpoint_file.save({'x': 1}, tmp_path / 'a.pth')
    assert checkpoint_file.load('~/a.pth') == {'x': 1}


def test_what_torch_2_6_advises_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its message has the reason at the end of a line, and a hint on the next."""
    path = tmp_path / 'text.pth'
    path.write_text('# no checkpoint')

    def load(*_: Any, **__: Any) -> Any:
        raise pickle.UnpicklingError(
            'Weights only load failed. Do it only if you got the file from a trusted source.\n'
            'Please file an issue so that weights_only=True suits you: WeightsUnpickler error: Unsupported operand 35\n\n'
            'Check the documentation of torch.load to learn more about types accepted by default with weights_only'
        )

    monkeypatch.setattr(torch, 'load', load)
    with pytest.raises(AmpCheckpointError) as caught:
        checkpoint_file.load(path)
    assert str(caught.value) == f'{path} is no checkpoint, or a damaged one (Unsupported operand 35).'
