"""Checkpoints of sharded tensors: a folder to which each rank writes its own shards, whole or not there at all.

``torch.distributed.checkpoint`` writes and reads the shards. Beside them lies what is not sharded, from rank 0. The writing
is done in :mod:`amp_wrapper.checkpoint.shard_writer`; which files a folder has, in :mod:`amp_wrapper.checkpoint.folder`.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import AmpCheckpointError
from ..shards import is_sharded
from . import file, folder
from .folder import is_folder, verify
from .shard_writer import Pending, quiet, write

__all__ = ['Pending', 'begin', 'is_folder', 'join', 'load', 'save', 'shapes', 'split', 'verify', 'write']

#: What stands in the place of a sharded tensor: a dict of this key, and the name under which the tensor was written.
PLACE = '_amp_wrapper_sharded_tensor'
#: What torch pickles into the metadata, by module: classes that hold values. Reading must know them, to refuse all others.
METADATA_CLASSES: Mapping[str, str] = {
    'torch.distributed.checkpoint.metadata': 'BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex StorageMeta '
    'TensorProperties TensorStorageMetadata _MEM_FORMAT_ENCODING',
    'torch.distributed.checkpoint.filesystem': '_StorageInfo',
    'torch.serialization': '_get_layout',
    'torch': 'Size',
    'collections': 'OrderedDict',
    'pathlib': 'PosixPath WindowsPath PurePosixPath PureWindowsPath',
}


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
    """Begin to write a checkpoint, and go on training meanwhile. Collective; one that is still being written is waited for.

    Args:
        checkpoint: As for :func:`save`; it may be changed afterwards.
        path: As for :func:`save`.
        asynchronous: Whether the shards are copied to the CPU, and written by a thread while the training goes on.
        takes: As for :func:`save`.

    Returns:
        What to wait for, before the process group is destroyed.

    Raises:
        CheckpointWriteError: As :func:`save`, for what is written before the thread begins.
    """
    return write(*split(checkpoint, takes), path, asynchronous)


def load(
    path: str | os.PathLike[str],
    like: Callable[[str], Tensor | None] = lambda name: None,
    map_location: Any = 'cpu',
    check: bool = True,
    only_shapes: bool = False,
) -> Any:
    """Read a folder, on any number of ranks, under ``weights_only=True``. No communication.

    Args:
        path: The folder.
        like: Gives a sharded tensor for the name of one that was saved, such as 'state_dict/head.weight': a new tensor of its
            layout takes the values, of which this rank reads its own part. None: the whole tensor is read.
        map_location: Where whole tensors go to; shards go to the device of what ``like`` gave.
        check: Whether to :func:`verify` first.
        only_shapes: Whether sharded tensors are not read: in the place of each are zeros of its shape and type, which take no
            memory until they are written to.

    Returns:
        What was saved.

    Raises:
        AmpCheckpointError: Missing, incomplete or changed files, one that would run code, or a shape that is not that of
            ``like``. Nothing has been applied.
    """
    place = folder.standing(path)
    folder.listed(place)
    if check:
        verify(place)
    rest = file.load(place / folder.REST, map_location, check=False)
    wanted = list(_places(rest))
    if not wanted:
        return rest
    with _reading(place):
        metadata = _metadata(place)
        found: dict[str, Tensor] = {}
        for name in wanted:
            saved = metadata.state_dict_metadata.get(name)
            if saved is None:
                raise AmpCheckpointError(f'{place} is damaged: it has no tensor {name!r}. Use an earlier checkpoint.')
            if only_shapes:
                found[name] = _zeros(saved.size, saved.properties.dtype)
            else:
                found[name] = _empty(place, name, saved, like(name), map_location)
        if not only_shapes:
            _fill(found, place, metadata)
    return join(rest, found)


def shapes(path: str | os.PathLike[str]) -> dict[str, torch.Size]:
    """The shapes of the sharded tensors in a folder, by the names that :func:`load` asks for.

    Raises:
        AmpCheckpointError: Missing or damaged.
    """
    place = folder.standing(path)
    folder.listed(place)
    with _reading(place):
        return {name: saved.size for name, saved in _metadata(place).state_dict_metadata.items()}


# -- the parts of a checkpoint -----------------------------------------------------------------------------------------


def split(checkpoint: Any, takes: Callable[[Any], bool] = is_sharded) -> tuple[Any, dict[str, Tensor]]:
    """A checkpoint with places in it, and the tensors that belong there.

    Args:
        checkpoint: Not changed.
        takes: Which tensors are taken out.

    Returns:
        The rest, and the tensors by name: keys and indices, with slashes between.
    """
    tensors: dict[str, Tensor] = {}

    def walk(value: Any, name: str) -> Any:
        if isinstance(value, Mapping):
            return _with_items(
                value, [walk(item, f'{name}/{key}' if name else str(key)) for key, item in value.items()]
            )
        if isinstance(value, (list, tuple)):
            return rebuilt(value, [walk(item, f'{name}/{index}') for index, item in enumerate(value)])
        if not isinstance(value, Tensor) or not takes(value):
            return value
        while name in tensors:
            # a key with a slash in it
            name += '+'
        tensors[name] = value.detach()
        return {PLACE: name}

    return walk(checkpoint, ''), tensors


def join(rest: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The opposite of :func:`split`."""
    if isinstance(rest, Mapping):
        if set(rest) == {PLACE}:
            return tensors[rest[PLACE]]
        return _with_items(rest, [join(item, tensors) for item in rest.values()])
    if isinstance(rest, (list, tuple)):
        return rebuilt(rest, [join(item, tensors) for item in rest])
    return rest


def _with_items(value: Mapping[Any, Any], items: list[Any]) -> dict[Any, Any]:
    """A dict with the keys of another; an ordered one keeps what it has beside them: the versions of modules."""
    if not isinstance(value, OrderedDict):
        return dict(zip(value, items))
    made = OrderedDict(zip(value, items))
    vars(made).update(vars(value))
    return made


def rebuilt(value: list[Any] | tuple[Any, ...], items: list[Any]) -> Any:
    """A list, tuple or named tuple of the type of another."""
    return type(value)(*items) if hasattr(value, '_fields') else type(value)(items)


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


# -- reading -----------------------------------------------------------------------------------------------------------


class _Metadata(pickle.Unpickler):
    """Reads what torch pickles, and nothing that would run code."""

    def find_class(self, module: str, name: str) -> Any:
        """The classes of metadata, and types of tensors."""
        # the name that Python 3.13 pickles
        module = 'pathlib' if module == 'pathlib._local' else module
        is_dtype = module == 'torch' and isinstance(getattr(torch, name, 0), torch.dtype)
        if is_dtype or name in METADATA_CLASSES.get(module, '').split():
            return super().find_class(module, name)
        raise AmpCheckpointError(f'a metadata file is refused: it asks for {module}.{name} while it is read.')


def _metadata(place: Path) -> Any:
    with open(place / folder.TENSORS / '.metadata', 'rb') as stream:
        return _Metadata(stream).load()


@contextlib.contextmanager
def _reading(place: Path) -> Iterator[None]:
    try:
        yield
    except AmpCheckpointError:
        raise
    except Exception as error:  # the many ways in which damage shows
        raise AmpCheckpointError(f'{place} cannot be read ({type(error).__name__}: {error}).') from error


def _zeros(size: torch.Size, dtype: torch.dtype) -> Tensor:
    # numpy asks the system for zeroed memory, which is there only once somebody writes to it; torch would write
    flat = torch.from_numpy(np.zeros(size.numel() * dtype.itemsize, np.uint8))
    return flat.view(dtype).view(size)


def _empty(place: Path, name: str, saved: Any, like: Tensor | None, map_location: Any) -> Tensor:
    """Room for a tensor, laid out as it is wanted."""
    dtype = saved.properties.dtype
    if like is None or not is_sharded(like):
        return torch.empty(saved.size, dtype=dtype, device=map_location)
    if like.shape != saved.size:
        raise AmpCheckpointError(
            f'{place}: {name} has the shape {tuple(saved.size)}, and {tuple(like.shape)} is expected.'
        )
    return torch.empty_like(like, dtype=dtype, requires_grad=False)


def _fill(tensors: dict[str, Tensor], place: Path, metadata: Any) -> None:
    from torch.distributed.checkpoint import state_dict_loader
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    # in torch 2.6, only the deprecated function reads without the other processes
    takes_it = 'no_dist' in inspect.signature(state_dict_loader.load).parameters
    load_now = state_dict_loader.load if takes_it else state_dict_loader.load_state_dict

    class Reader(FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            return metadata

    with quiet(), warnings.catch_warnings():
        warnings.filterwarnings('ignore', message='`load_state_dict` is deprecated')
        load_now(tensors, storage_reader=Reader(place / folder.TENSORS), no_dist=True)
