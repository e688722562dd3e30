"""Writes checkpoint files whole or not at all, and reads them with a check that they are whole, without running any code.

A file is written under another name beside its own, flushed to the disk, and renamed: whoever looks sees the old file or
the new one. torch writes zip archives with a checksum per record but does not verify them when it reads; this does.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ..errors import AmpCheckpointError, CheckpointWriteError

#: Ending of what is being written; a leftover of a killed process is worth nothing.
PART_SUFFIX = '.amp-part'


def save(checkpoint: Any, path: str | os.PathLike[str]) -> None:
    """Write a checkpoint so that ``path`` is the old file or the whole new one at any moment, also after a power cut.

    Args:
        checkpoint: For :func:`torch.save`.
        path: A local file; missing folders are made.

    Raises:
        CheckpointWriteError: Full disk, no permission and their like. ``path`` is what it was.
    """
    with replacing(path) as part, open(part, 'wb') as file:
        torch.save(checkpoint, file)


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Give the name to write to inside of the block; what lies there is flushed, and takes the place of ``path`` at its end.

    Args:
        path: A local file, or a folder that is written as a whole.

    Raises:
        CheckpointWriteError: As in :func:`save`; ``path`` is what it was.
    """
    target = Path(path)
    part, old = (target.with_name(target.name + ending) for ending in (PART_SUFFIX, f'.old{PART_SUFFIX}'))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield part
        if part.is_file():
            with open(part, 'rb+') as file:
                os.fsync(file.fileno())
        elif part.is_dir() and target.exists():
            # a folder cannot be replaced in one act
            os.replace(target, old)
        os.replace(part, target)
        remove(old)
        _sync_folder(target.parent)
    except (OSError, RuntimeError) as error:
        # torch's zip writer reports a failed write as a RuntimeError about its position in the file
        if isinstance(error, RuntimeError) and 'unexpected pos' not in str(error) and 'Writer' not in str(error):
            raise
        text = f'{target} could not be written ({error.__context__ or error})'
        raise CheckpointWriteError(f'{text}: free space, change the permissions, or choose another folder.') from error
    finally:
        remove(part)


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there and can be removed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Flush a folder to the disk: a rename in it is not there before. Not every file system can be asked for that."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def verify(path: str | os.PathLike[str]) -> None:
    """Compare every record of a file with its checksum. Files of torch before 1.6 have none and pass.

    Args:
        path: A local file.

    Raises:
        AmpCheckpointError: Missing, truncated or changed; names the file and the record.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise AmpCheckpointError(f'{path} is not there, or no file: check the path.')
    with open(path, 'rb') as stream:
        # archives begin with a P, also those that are cut off, and an empty file is none of any format
        if stream.read(1) not in (b'P', b''):
            return
    try:
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
            # torch can be told to leave checksums out, of all records; they are 0 then
            if bad is not None and archive.getinfo(bad).CRC:
                raise AmpCheckpointError(f'its record {bad!r} does not have the checksum it was written with')
    except Exception as error:  # a damaged or truncated directory makes zipfile fail in many ways
        raise AmpCheckpointError(f'{path} is damaged or truncated: {error}. Use an earlier checkpoint.') from error


def load(path: str | os.PathLike[str], map_location: Any = 'cpu') -> Any:
    """Read a file under ``weights_only=True``, whatever the environment says, once its checksums were compared.

    Args:
        path: A local file.
        map_location: As in :func:`torch.load`.

    Returns:
        What was saved.

    Raises:
        AmpCheckpointError: Missing, truncated, changed, no checkpoint at all, or one that would run code.
    """
    path = Path(path).expanduser()
    verify(path)
    return read(path, str(path), map_location)


def read(source: Any, name: str, map_location: Any = 'cpu') -> Any:
    """Read a file or a stream as :func:`load` does, without checksums.

    Args:
        source: For :func:`torch.load`.
        name: How errors call it.
        map_location: As in :func:`torch.load`.

    Raises:
        AmpCheckpointError: No checkpoint, or one that would run code.
    """
    try:
        return torch.load(source, map_location=map_location, weights_only=True)
    except Exception as error:  # the many ways in which a damaged pickle fails
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ['']
        asks = [line for line in lines if any(word in line for word in ('GLOBAL', 'getattr', 'Unsupported class'))]
        if asks:
            raise AmpCheckpointError(
                f'{name} is refused: it asks for code to run while it is read ({asks[0][:300]}). If you trust the file, allow '
                f'the class by torch.serialization.add_safe_globals([...]) and read it again.'
            ) from error
        what = f'{type(error).__name__}: {lines[-1][:300]}'
        raise AmpCheckpointError(f'{name} is no checkpoint, or a damaged one ({what}).') from error
