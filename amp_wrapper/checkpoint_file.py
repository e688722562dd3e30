"""Checkpoint files: written whole or not at all, read with proof that they are whole, and never executed.

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
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .errors import AmpCheckpointError, CheckpointWriteError

#: Ending of a file that is being written; a leftover of a killed process is worth nothing.
PART_SUFFIX = '.part'
#: What a file must hold to go on from, beside the model's weights.
_RESUMABLE = ('state_dict', 'optimizer', 'meta', 'message_hub')


def save(checkpoint: Any, path: str | os.PathLike[str]) -> None:
    """Write a checkpoint so that ``path`` is the old file or the whole new one at any moment, also after a power cut.

    Args:
        checkpoint: For :func:`torch.save`.
        path: A local file; missing folders are made.

    Raises:
        CheckpointWriteError: Full disk, no permission and their like. ``path`` is what it was.
    """
    target = Path(path)
    part = target.with_name(target.name + PART_SUFFIX)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(part, 'wb') as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, target)
        _sync_folder(target.parent)
    except (OSError, RuntimeError) as error:
        _remove_quietly(part)
        # torch's zip writer reports a failed write as a RuntimeError about its position in the file
        if isinstance(error, RuntimeError) and not _is_write_failure(error):
            raise
        raise _failed(error, target) from error
    except BaseException:
        _remove_quietly(part)
        raise


def write_text(text: str, path: str | os.PathLike[str]) -> None:
    """Write a small text file whole or not at all.

    Args:
        text: Its content.
        path: A local file.

    Raises:
        CheckpointWriteError: As in :func:`save`.
    """
    target = Path(path)
    part = target.with_name(target.name + PART_SUFFIX)
    try:
        part.write_text(text)
        os.replace(part, target)
    except OSError as error:
        _remove_quietly(part)
        raise _failed(error, target) from error


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
        _remove_quietly(part)


def _sync_folder(folder: Path) -> None:
    """The rename itself is on the disk only when the folder is; not every file system can be asked for that."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)


def _remove_quietly(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


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


def _failed(error: Exception, target: Path) -> CheckpointWriteError:
    return CheckpointWriteError(
        f'{target} could not be written: {_explain_write(error, target)}. Files written before are untouched; go on from the '
        f'last one with --resume.'
    )


def remove_leftovers(folder: str | os.PathLike[str]) -> list[str]:
    """Remove the half-written checkpoints of killed processes.

    Args:
        folder: A local folder that no other process is writing checkpoints into.

    Returns:
        The names of the removed files.
    """
    found = sorted(Path(folder).glob(f'*.pth{PART_SUFFIX}'))
    for part in found:
        _remove_quietly(part)
    return [part.name for part in found]


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
    except (zipfile.BadZipFile, OSError, ValueError) as error:
        raise AmpCheckpointError(f'{path} is damaged ({error}): use an earlier checkpoint.') from error
    with open(path, 'rb') as file:
        start = file.read(2)
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
        if 'GLOBAL' in reason or 'getattr' in reason or 'Unsupported class' in reason:
            raise AmpCheckpointError(
                f'{path} is refused: it asks for code to run while it is read ({reason}). If you trust the file, allow '
                f'the class by torch.serialization.add_safe_globals([...]) and read it again.'
            ) from error
        raise AmpCheckpointError(f'{path} is no checkpoint, or a damaged one ({reason}).') from error
    except Exception as error:  # the many ways in which a damaged pickle fails
        reason = f'{type(error).__name__}: {_reason(error)}'
        raise AmpCheckpointError(f'{path} is no checkpoint, or a damaged one ({reason}).') from error


def _reason(error: Exception) -> str:
    """The line of torch's advice that says what is wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    for word in ('GLOBAL', 'getattr', 'Unsupported', 'WeightsUnpickler error'):
        for line in lines:
            if word in line:
                return line[:300]
    return lines[0][:300] if lines else 'no reason given'


def _existing(path: str | os.PathLike[str]) -> Path:
    path = Path(path)
    if not path.is_file():
        raise AmpCheckpointError(f'{path} is not there, or no file: check the path, or write --resume without one.')
    return path


@dataclass(frozen=True)
class Newest:
    """What :func:`find_newest` found.

    Attributes:
        path: The newest complete checkpoint, or None.
        passed_over: One sentence per newer file that was passed over.
    """

    path: Path | None
    passed_over: tuple[str, ...]


def find_newest(folder: str | os.PathLike[str]) -> Newest:
    """The newest checkpoint of a folder that is complete and can be resumed from.

    The newest is the one saved last, by the time inside the file and then by its iteration. The file that
    ``last_checkpoint`` points to, and its neighbours, are looked at as well, wherever they lie.

    Args:
        folder: The work folder.
    """
    folder = Path(folder)
    passed: list[str] = []
    folders = {folder}
    pointer = folder / 'last_checkpoint'
    if pointer.is_file():
        named = pointer.read_text(errors='replace').strip()
        target = Path(named)
        if not named:
            passed.append(f'{pointer} is empty')
        # the whole folder may have been moved
        elif not target.is_file() and not (folder / target.name).is_file():
            passed.append(f'{target}, which {pointer} points to, is not there')
        if named:
            folders.add(target.parent)
    candidates = {path.resolve() for place in folders for path in place.glob('*.pth')}
    ordered: list[tuple[tuple[str, int, float], Path]] = []
    for path in sorted(candidates):
        try:
            found = load(path, check=False, mmap=True)
        except AmpCheckpointError as error:
            passed.append(str(error))
            continue
        if isinstance(found, Mapping) and all(key in found for key in _RESUMABLE):
            meta = found['meta'] if isinstance(found['meta'], Mapping) else {}
            time, iteration = meta.get('time', ''), meta.get('iter', 0)
            if isinstance(time, str) and isinstance(iteration, int):
                ordered.append(((time, iteration, path.stat().st_mtime), path))
    for _, path in sorted(ordered, reverse=True):
        try:
            verify(path)
        except AmpCheckpointError as error:
            passed.append(str(error))
            continue
        return Newest(path, tuple(passed))
    return Newest(None, tuple(passed))
