"""The files of a checkpoint of shards: a folder with a list of its files, their sizes and checksums.

The list is written last, and the folder is made under another name and renamed: a folder without a list is no checkpoint.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path

from ..errors import AmpCheckpointError
from . import file
from .file import LIST, OLD_SUFFIX, remove

#: The files in a folder: the shards, what is not sharded, and the list.
TENSORS, REST = 'tensors', 'rest.pth'

#: Size and checksum of a file.
Seen = list[int]


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Whether there is a complete folder of this kind."""
    return (standing(path) / LIST).is_file()


def part_of(target: Path) -> Path:
    """What a folder is called while it is being written."""
    return target.with_name(target.name + file.PART_SUFFIX)


def standing(path: str | os.PathLike[str]) -> Path:
    """A folder, or the one before it, where somebody died between renaming the two."""
    folder = Path(path).expanduser()
    if folder.exists():
        # also '.', which has no name to add to
        return folder
    old = folder.with_name(folder.name + OLD_SUFFIX)
    return old if old.exists() else folder


def look_at(path: Path) -> Seen:
    """Size and checksum of a file; -1 for one that is not there."""
    if not path.is_file():
        return [-1, -1]
    size = checksum = 0
    with open(path, 'rb') as stream:
        while chunk := stream.read(2**22):
            size, checksum = size + len(chunk), zlib.crc32(chunk, checksum)
    return [size, checksum]


def verify(path: str | os.PathLike[str], first: int = 0, every: int = 1) -> None:
    """Compare every file of a folder with the size and checksum that it was written with.

    Args:
        path: The folder.
        first: With ``every``, for ranks that share the work: the number of the rank.
        every: How many ranks there are.

    Raises:
        AmpCheckpointError: Names the file.
    """
    folder = standing(path)
    for name, seen in list(listed(folder).items())[first::every]:
        if look_at(folder / name) != seen:
            raise AmpCheckpointError(f'{folder} is damaged: {name} is not what was written. Use an earlier checkpoint.')


def listed(folder: Path) -> dict[str, Seen]:
    """The files that a folder has to have.

    Raises:
        AmpCheckpointError: There is no list, it cannot be read, or files that it names are missing.
    """
    try:
        pairs = json.loads((folder / LIST).read_text())
        found: dict[str, Seen] = {str(name): [int(size), int(checksum)] for name, (size, checksum) in pairs.items()}
    except FileNotFoundError:
        raise AmpCheckpointError(f'{folder} is no complete checkpoint: it has no {LIST}.') from None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise AmpCheckpointError(f'{folder} is damaged: {LIST} cannot be read ({error}).') from error
    missing = [name for name in found if not (folder / name).is_file()]
    if missing:
        raise AmpCheckpointError(f'{folder} is damaged: {", ".join(missing)} is missing. Use an earlier checkpoint.')
    return found


def make(target: Path, files: Mapping[str, Seen]) -> None:
    """Write the list of a folder that is written otherwise, and give the folder its name.

    Args:
        target: The name; an older folder, or a file, of this name goes when the new one stands.
        files: By name inside of the folder.

    Raises:
        FileNotFoundError: A file is not there, or has another size than its writer saw.
        OSError: No right to rename.
    """
    part = part_of(target)
    for name, (size, _) in files.items():
        if not (part / name).is_file() or (part / name).stat().st_size != size:
            raise FileNotFoundError(
                f'{part / name} is not what its rank has written: all ranks have to see one folder, on a file system that they '
                'share'
            )
    file.write_text(json.dumps(files, indent=1), part / LIST)
    file.replace(part, target)


def remove_leftovers(folder: str | os.PathLike[str]) -> list[str]:
    """Remove the half-written checkpoints of killed processes, and give the last complete one its name back.

    Args:
        folder: A local folder that no other process is writing checkpoints into.

    Returns:
        The names of what was removed.
    """
    parts = sorted(Path(folder).glob(f'*{file.PART_SUFFIX}'))
    for old in sorted(Path(folder).glob(f'*{OLD_SUFFIX}')):
        target = old.with_name(old.name.removesuffix(OLD_SUFFIX))
        if target.exists():
            parts.append(old)
        else:
            os.replace(old, target)
    for part in parts:
        remove(part)
    return [part.name for part in parts]
