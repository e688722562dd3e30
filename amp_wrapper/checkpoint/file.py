"""Writes checkpoint files whole or not at all, and reads them with a check that they are whole, without running any code.

A file is written under another name beside its own, flushed to the disk, and renamed: whoever looks sees the old file or
the new one. torch writes zip archives with a checksum per record but does not verify them when it reads; this does.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ..errors import AmpCheckpointError, CheckpointWriteError

#: Ending of a file that is being written; a leftover of a killed process is worth nothing.
PART_SUFFIX = '.amp-part'
#: Ending of a folder of shards, while another checkpoint of its name takes its place.
OLD_SUFFIX = '.amp-old'
#: What each folder of shards has in it.
LIST = 'files.json'


def save(checkpoint: Any, path: str | os.PathLike[str]) -> None:
    """Write a checkpoint so that ``path`` is the old file or the whole new one at any moment, also after a power cut.

    Args:
        checkpoint: For :func:`torch.save`.
        path: A local file; missing folders are made.

    Raises:
        CheckpointWriteError: Full disk, no permission and their like. ``path`` is what it was.
    """
    with _replacing(path) as part, open(part, 'wb') as file:
        torch.save(checkpoint, file)
        file.flush()
        os.fsync(file.fileno())


def write_text(text: str, path: str | os.PathLike[str]) -> None:
    """Write a small text file whole or not at all.

    Args:
        text: Its content.
        path: A local file.

    Raises:
        CheckpointWriteError: As in :func:`save`.
    """
    with _replacing(path) as part:
        part.write_text(text)


@contextlib.contextmanager
def _replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """The name of a file to write, which takes the place of ``path`` at the end of the block; removed after an error."""
    target = Path(path)
    part = target.with_name(target.name + PART_SUFFIX)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield part
        replace(part, target)
    except (OSError, RuntimeError) as error:
        # torch's zip writer reports a failed write as a RuntimeError about its position in the file
        if isinstance(error, RuntimeError) and not _is_write_failure(error):
            raise
        raise CheckpointWriteError(
            f'{target} could not be written: {_explain_write(error, target)}. Files written before are untouched; go on '
            f'from the last one with --resume.'
        ) from error
    finally:
        remove(part)


def replace(part: Path, target: Path) -> None:
    """Give a file or a folder of shards its name, and remove what had the name before.

    Args:
        part: What is renamed.
        target: The new name. A folder there has to be one of shards.

    Raises:
        OSError: Something else stands there, or no right to rename it.
    """
    if part.is_file() and not target.is_dir():
        os.replace(part, target)
        sync_folder(target.parent)
        return
    if target.is_dir() and not (target / LIST).is_file():
        raise IsADirectoryError(errno.EEXIST, f'{target} is a folder, and no checkpoint', str(target))
    # a folder cannot be replaced in one act: whoever looks in between finds the old one
    old = target.with_name(target.name + OLD_SUFFIX)
    remove(old)
    if target.exists():
        os.replace(target, old)
    os.replace(part, target)
    sync_folder(target.parent)
    remove(old)


def remove(path: str | os.PathLike[str]) -> None:
    """Remove a file or a folder, if it is there and can be removed.

    A folder loses its name first: who dies in between leaves no folder that looks like something.
    """
    path = Path(path)
    if path.is_dir() and not path.is_symlink():
        gone = path
        if not path.name.endswith(PART_SUFFIX):
            gone = path.with_name(f'{path.name}.removed{PART_SUFFIX}')
            shutil.rmtree(gone, ignore_errors=True)
            with contextlib.suppress(OSError):
                os.replace(path, gone)
        shutil.rmtree(gone, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def check_writable(folder: str | os.PathLike[str]) -> None:
    """Find out before the work begins whether checkpoints can be written at all.

    Args:
        folder: A local folder; made if it is missing.

    Raises:
        CheckpointWriteError: Says why not and what to do.
    """
    target = Path(folder) / 'probe.pth'
    part = target.with_name(target.name + PART_SUFFIX)
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        part.write_bytes(b'\0' * 4096)
    except OSError as error:
        raise CheckpointWriteError(f'checkpoints cannot be written: {_explain_write(error, target)}.') from error
    finally:
        remove(part)


def sync_folder(folder: Path) -> None:
    """Flush a folder to the disk: a rename in it is not there before. Not every file system can be asked for that."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        with contextlib.suppress(OSError):
            os.fsync(handle)
    finally:
        os.close(handle)


def _is_write_failure(error: RuntimeError) -> bool:
    text = str(error)
    return 'unexpected pos' in text or 'file write failed' in text or 'PytorchStreamWriter' in text


def _explain_write(error: Exception, target: Path) -> str:
    code = error.errno if isinstance(error, OSError) else None
    cause = error
    while code is None and cause.__context__ is not None and isinstance(cause.__context__, Exception):
        cause = cause.__context__
        code = cause.errno if isinstance(cause, OSError) else None
    try:
        free = shutil.disk_usage(target.parent).free
    except OSError:
        free = None
    space = '' if free is None else f' ({free / 2**20:.0f} MiB free there)'
    if code in (errno.ENOSPC, errno.EDQUOT) or (code is None and free is not None and free < 2**26):
        return f'the disk is full{space}: free some space, or save elsewhere (CheckpointHook out_dir, max_keep_ckpts)'
    if code in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
        why = os.strerror(code)
        return f'no file can be made in {target.parent} ({why}): change its permissions, or choose another work_dir'
    return f'{cause}{space}'


def verify(path: str | os.PathLike[str]) -> None:
    """Compare every record of a file with its checksum. Files of torch before 1.6 have none and pass.

    Args:
        path: A local file.

    Raises:
        AmpCheckpointError: Missing, truncated or changed; names the file and the record.
    """
    path = _existing(path)
    if not _is_archive(path):
        return
    try:
        with zipfile.ZipFile(path) as archive:
            # torch can be told to leave checksums out; they are 0 then
            names = [info.filename for info in archive.infolist() if info.CRC or not info.file_size]
            bad = next((name for name in names if not _is_whole(archive, name)), None)
    except Exception as error:  # a damaged directory makes zipfile fail in many ways
        raise AmpCheckpointError(f'{path} is damaged ({type(error).__name__}: {error}): use an earlier one.') from error
    if bad is not None:
        raise AmpCheckpointError(
            f'{path} is damaged: its record {bad!r} does not have the checksum it was written with. Use an earlier checkpoint.'
        )


def _is_archive(path: Path) -> bool:
    """Whether a file is a whole zip archive; False for the older format."""
    try:
        if zipfile.is_zipfile(path):
            return True
        with open(path, 'rb') as file:
            start = file.read(2)
    except (zipfile.BadZipFile, ValueError) as error:
        raise AmpCheckpointError(f'{path} is damaged ({error}): use an earlier checkpoint.') from error
    except OSError as error:
        raise AmpCheckpointError(f'{path} cannot be read ({error.strerror}).') from error
    # a truncated archive has lost its directory, which lies at the end, but not its beginning
    if start in (b'PK', b'P', b''):
        raise AmpCheckpointError(f'{path} is truncated ({path.stat().st_size} bytes): use an earlier checkpoint.')
    return False


def _is_whole(archive: zipfile.ZipFile, name: str) -> bool:
    try:
        with archive.open(name) as record:
            while record.read(2**22):
                pass
    except zipfile.BadZipFile:
        return False
    return True


def load(path: str | os.PathLike[str], map_location: Any = 'cpu', check: bool = True, mmap: bool = False) -> Any:
    """Read a file under ``weights_only=True``, whatever the environment says.

    Args:
        path: A local file.
        map_location: As in :func:`torch.load`.
        check: Whether to :func:`verify` the checksums first (reads the file once more).
        mmap: Whether tensors are mapped from the file, and read when they are used.

    Returns:
        What was saved.

    Raises:
        AmpCheckpointError: Missing, truncated, changed, no checkpoint at all, or one that would run code.
    """
    path = _existing(path)
    if check:
        verify(path)
    mapped = _is_archive(path) and mmap
    try:
        return torch.load(path, map_location=map_location, weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        reason = _reason(error)
        asks = 'GLOBAL' in reason or 'getattr' in reason or 'Unsupported class' in reason
        # the first letter of a text may be an instruction of a pickle
        if asks and (_is_archive(path) or _is_pickle(path)):
            raise AmpCheckpointError(
                f'{path} is refused: it asks for code to run while it is read ({reason}). If you trust the file, allow '
                f'the class by torch.serialization.add_safe_globals([...]) and read it again.'
            ) from error
        raise AmpCheckpointError(f'{path} is no checkpoint, or a damaged one ({reason}).') from error
    except Exception as error:  # the many ways in which a damaged pickle fails
        reason = f'{type(error).__name__}: {_reason(error)}'
        raise AmpCheckpointError(f'{path} is no checkpoint, or a damaged one ({reason}).') from error


def _is_pickle(path: Path) -> bool:
    """Whether a file begins as the pickles that torch.save wrote before there were archives."""
    with open(path, 'rb') as file:
        return file.read(1) == b'\x80'


def _reason(error: Exception) -> str:
    """The line of torch's advice that says what is wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    for word in ('GLOBAL', 'getattr', 'WeightsUnpickler error:'):
        for index, line in enumerate(lines):
            if word in line:
                # what is wrong may stand on the next line; in torch 2.6, that one is about weights_only
                more = lines[index + 1 : index + 2]
                if word == 'WeightsUnpickler error:' and more and more[0].startswith('Check the documentation'):
                    more = []
                return ' '.join([line, *more]).rpartition('WeightsUnpickler error:')[2].strip()[:300]
    return lines[0][:300] if lines else 'no reason given'


def _existing(path: str | os.PathLike[str]) -> Path:
    path = Path(path).expanduser()
    if path.is_file():
        return path
    # a folder may have no name to add to, as '.'
    old = path if path.exists() else path.with_name(path.name + OLD_SUFFIX)
    if not old.is_file():
        raise AmpCheckpointError(f'{path} is not there, or no file: check the path.')
    # somebody died while a folder of shards took its place
    return old
