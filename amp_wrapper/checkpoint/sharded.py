"""Checkpoints of sharded tensors: a folder to which each rank writes its own shards, whole or not there at all.

``torch.distributed.checkpoint`` writes and reads the shards. Beside them lie what is not sharded, from rank 0, and a list of
all files with their sizes and checksums, which is written last: a folder without it is none. All of it is made under another
name and renamed.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pickle
import shutil
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..errors import AmpCheckpointError, CheckpointWriteError
from ..shards import is_sharded
from ..torch_internals import METADATA_CLASSES
from . import file

#: What stands in the place of a sharded tensor: a dict of this key, and the name under which the tensor was written.
PLACE = 'sharded_tensor'
_TENSORS, _REST, _FILES = 'tensors', 'rest.pth', 'files.json'
_OLD_SUFFIX = '.amp-old'


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Whether there is a complete folder of this kind."""
    return (_standing(path) / _FILES).is_file()


class Pending:
    """A checkpoint that is being written; :meth:`finish` gives it its name. Made by :func:`begin`.

    Args:
        target: What the folder will be called.
        written: What the writing of this rank's shards is waited for with; None where it is done.
    """

    def __init__(self, target: Path, written: Future[Any] | None) -> None:
        self._target = target
        self._written = written

    @property
    def is_written(self) -> bool:
        """Whether this rank has written its shards, so that :meth:`finish` has nothing to wait for but other ranks."""
        return self._written is None or self._written.done()

    def finish(self) -> None:
        """Wait for the shards of all ranks, list the files, and rename the folder. Collective, once.

        Raises:
            CheckpointWriteError: As :func:`save`.
        """
        target, part = self._target, _part_of(self._target)
        rank, world = _place()
        try:
            with _together(target):
                if self._written is not None:
                    self._written.result()
            with _together(target):
                mine = {each.name: _look_at(each) for each in sorted((part / _TENSORS).glob(f'__{rank}_*'))}
            found: list[Any] = [mine]
            if world > 1:
                found = [None] * world
                torch.distributed.all_gather_object(found, mine)
            with _together(target):
                if rank == 0:
                    listed = {f'{_TENSORS}/{name}': seen for each in found for name, seen in each.items()}
                    for each in (part / _REST, part / _TENSORS / '.metadata'):
                        listed[each.relative_to(part).as_posix()] = _look_at(each)
                    file.write_text(json.dumps(listed, indent=1), part / _FILES)
                    _replace(part, target)
        finally:
            if rank == 0:
                shutil.rmtree(part, ignore_errors=True)


def save(checkpoint: Any, path: str | os.PathLike[str], takes: Callable[[Any], bool] = is_sharded) -> None:
    """Write a checkpoint to a folder that all ranks see. Collective, over all ranks; also works in one process.

    Args:
        checkpoint: Nested dicts and lists of tensors, numbers and strings. Each rank writes its shards of sharded tensors
            (``DTensor``); everything else is taken from rank 0.
        path: The folder; one of the same name is replaced.
        takes: Which tensors are written as shards; those that are not sharded are written once.

    Raises:
        CheckpointWriteError: On every rank, where any could not write. A folder of the name is what it was.
    """
    begin(checkpoint, path, False, takes).finish()


def begin(
    checkpoint: Any,
    path: str | os.PathLike[str],
    asynchronous: bool = True,
    takes: Callable[[Any], bool] = is_sharded,
) -> Pending:
    """Begin to write a checkpoint, and go on training meanwhile. Collective.

    Args:
        checkpoint: As for :func:`save`; it may be changed afterwards.
        path: As for :func:`save`.
        asynchronous: Whether the shards are copied to the CPU, and written from there while the training goes on.
        takes: As for :func:`save`.

    Returns:
        What makes a checkpoint of it, at a later step and before another one begins.

    Raises:
        CheckpointWriteError: As :func:`save`.
    """
    target = Path(path)
    part = _part_of(target)
    rank = _place()[0]
    tensors: dict[str, Tensor] = {}
    rest = _without_tensors(checkpoint, '', tensors, takes)
    with _together(target):
        if rank == 0:
            shutil.rmtree(part, ignore_errors=True)
            (part / _TENSORS).mkdir(parents=True)
            file.save(rest, part / _REST)
    with _together(target):
        written = _write_tensors(tensors, part / _TENSORS, asynchronous)
    return Pending(target, written)


def _part_of(target: Path) -> Path:
    return target.with_name(target.name + file.PART_SUFFIX)


def verify(path: str | os.PathLike[str]) -> None:
    """Compare every file of a folder with the size and checksum that it was written with.

    Raises:
        AmpCheckpointError: Names the file.
    """
    folder = _standing(path)
    for name, (size, checksum) in _listed(folder).items():
        if _look_at(folder / name) != [size, checksum]:
            raise AmpCheckpointError(f'{folder} is damaged: {name} is not what was written. Use an earlier checkpoint.')


def load(
    path: str | os.PathLike[str],
    like: Callable[[str], Tensor | None] = lambda name: None,
    map_location: Any = 'cpu',
    check: bool = True,
) -> Any:
    """Read a folder, on any number of ranks, under ``weights_only=True``. No communication.

    Args:
        path: The folder.
        like: Gives a sharded tensor for the name of one that was saved, such as 'state_dict/head.weight': a new tensor of its
            layout takes the values, of which this rank reads its own part. None: the whole tensor is read.
        map_location: Where whole tensors go to; shards go to the device of what ``like`` gave.
        check: Whether to :func:`verify` first.

    Returns:
        What was saved.

    Raises:
        AmpCheckpointError: Missing, incomplete or changed files, one that would run code, or a shape that is not that of
            ``like``. Nothing has been applied.
    """
    folder = _standing(path)
    listed = _listed(folder)
    missing = [name for name in listed if not (folder / name).is_file()]
    if missing:
        raise AmpCheckpointError(f'{folder} is damaged: {", ".join(missing)} is missing. Use an earlier checkpoint.')
    if check:
        verify(folder)
    rest = file.load(folder / _REST, map_location, check=False)
    wanted = list(_places(rest))
    if not wanted:
        return rest
    try:
        tensors = _read_tensors(folder / _TENSORS, wanted, like, map_location)
    except AmpCheckpointError:
        raise
    except Exception as error:  # the many ways in which damage shows
        raise AmpCheckpointError(f'{folder} cannot be read ({type(error).__name__}: {error}).') from error
    return _with_tensors(rest, tensors)


# -- the parts of a checkpoint -----------------------------------------------------------------------------------------


def _without_tensors(value: Any, name: str, tensors: dict[str, Tensor], takes: Callable[[Any], bool]) -> Any:
    """The checkpoint with places in it; the tensors that ``takes`` names are put into ``tensors``."""
    if isinstance(value, Mapping):
        inside = {key: (f'{name}/{key}' if name else str(key), item) for key, item in value.items()}
        return {key: _without_tensors(item, path, tensors, takes) for key, (path, item) in inside.items()}
    if isinstance(value, (list, tuple)):
        found = [_without_tensors(item, f'{name}/{index}', tensors, takes) for index, item in enumerate(value)]
        return type(value)(found)
    if not isinstance(value, Tensor) or not takes(value):
        return value
    tensors[name] = value.detach()
    return {PLACE: name}


def _places(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        if set(value) == {PLACE}:
            yield value[PLACE]
        else:
            for item in value.values():
                yield from _places(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _places(item)


def _with_tensors(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, Mapping):
        if set(value) == {PLACE}:
            return tensors[value[PLACE]]
        return {key: _with_tensors(item, tensors) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_with_tensors(item, tensors) for item in value)
    return value


# -- torch.distributed.checkpoint --------------------------------------------------------------------------------------


def _write_tensors(tensors: dict[str, Tensor], folder: Path, asynchronous: bool) -> Future[Any] | None:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import async_save
    from torch.distributed.checkpoint.state_dict_saver import save as save_now

    writer = FileSystemWriter(folder, single_file_per_rank=True, sync_files=True)
    alone = _place()[1] == 1
    if asynchronous and not alone:
        found: Any = async_save(dict(tensors), storage_writer=writer, process_group=_group_beside())
        # newer versions may return more than the future
        future: Future[Any] = getattr(found, 'upload_completion', found)
        return future
    with _quiet():
        save_now(dict(tensors), storage_writer=writer, no_dist=alone)
    return None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """torch warns where there is one process, which is what is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings('ignore', message='torch.distributed is disabled')
        yield


@functools.cache
def _group_beside() -> ProcessGroup:
    """A group of all ranks for what runs beside the training: collectives of two threads must not meet. Collective, once."""
    return torch.distributed.new_group(backend='gloo')  # type: ignore[no-any-return]


class _Metadata(pickle.Unpickler):
    """Reads what torch pickles, and nothing that would run code."""

    def find_class(self, module: str, name: str) -> Any:
        """The classes of metadata, and types of tensors."""
        is_dtype = module == 'torch' and isinstance(getattr(torch, name, 0), torch.dtype)
        if is_dtype or name in METADATA_CLASSES.get(module, '').split():
            return super().find_class(module, name)
        raise AmpCheckpointError(f'a metadata file is refused: it asks for {module}.{name} while it is read.')


def _read_tensors(
    folder: Path, names: list[str], like: Callable[[str], Tensor | None], map_location: Any
) -> dict[str, Tensor]:
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load as load_now

    with open(folder / '.metadata', 'rb') as stream:
        metadata = _Metadata(stream).load()

    class Reader(FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            return metadata

    found: dict[str, Tensor] = {}
    for name in names:
        saved = metadata.state_dict_metadata.get(name)
        if saved is None:
            raise AmpCheckpointError(
                f'{folder.parent} is damaged: it has no tensor {name!r}. Use an earlier checkpoint.'
            )
        shown = like(name)
        if shown is None or not is_sharded(shown):
            found[name] = torch.empty(saved.size, dtype=saved.properties.dtype, device=map_location)
        elif shown.shape != saved.size:
            raise AmpCheckpointError(
                f'{folder.parent}: {name} has the shape {tuple(saved.size)}, and {tuple(shown.shape)} is expected.'
            )
        else:
            found[name] = torch.empty_like(shown, dtype=saved.properties.dtype, requires_grad=False)
    with _quiet():
        load_now(found, storage_reader=Reader(folder), no_dist=True)
    return found


# -- files -------------------------------------------------------------------------------------------------------------


def _place() -> tuple[int, int]:
    """The number of this rank, and of ranks."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


@contextlib.contextmanager
def _together(target: Path) -> Iterator[None]:
    """An error on one rank is one on all of them, at the end of the block."""
    problem: str | None = None
    cause: Exception | None = None
    try:
        yield
    except Exception as error:
        problem, cause = f'{type(error).__name__}: {error}', error
    world = _place()[1]
    problems: list[Any] = [problem]
    if world > 1:
        problems = [None] * world
        torch.distributed.all_gather_object(problems, problem)
    said = {rank: text for rank, text in enumerate(problems) if text}
    if said:
        first = min(said)
        raise CheckpointWriteError(
            f'{target} could not be written: rank {first}: {said[first][:500]}. Checkpoints written before are untouched.'
        ) from cause


def _look_at(path: Path) -> list[int]:
    """Size and checksum of a file; nothing for one that is not there."""
    if not path.is_file():
        return [-1, -1]
    size = checksum = 0
    with open(path, 'rb') as stream:
        while chunk := stream.read(2**22):
            size, checksum = size + len(chunk), zlib.crc32(chunk, checksum)
    return [size, checksum]


def _listed(folder: Path) -> dict[str, list[int]]:
    try:
        listed = json.loads((folder / _FILES).read_text())
        pairs = {str(name): [int(size), int(checksum)] for name, (size, checksum) in listed.items()}
    except FileNotFoundError:
        raise AmpCheckpointError(f'{folder} is no complete checkpoint: it has no {_FILES}.') from None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise AmpCheckpointError(f'{folder} is damaged: {_FILES} cannot be read ({error}).') from error
    return pairs


def _standing(path: str | os.PathLike[str]) -> Path:
    """A folder, or the one before it, where somebody died between renaming the two."""
    folder = Path(path)
    old = folder.with_name(folder.name + _OLD_SUFFIX)
    return old if not folder.exists() and old.exists() else folder


def _replace(part: Path, target: Path) -> None:
    """Rename a folder; an older one, or a file, of the name goes when the new one stands."""
    old = target.with_name(target.name + _OLD_SUFFIX)
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        os.replace(target, old)
    os.replace(part, target)
    if old.is_dir():
        shutil.rmtree(old, ignore_errors=True)
    elif old.exists():
        old.unlink()
