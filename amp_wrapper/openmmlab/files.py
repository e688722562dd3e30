"""Files of mmengine: written whole or not at all, read without running code, and the newest one that is whole."""

from __future__ import annotations

import datetime
import os
import pathlib
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mmengine.config import ConfigDict
from mmengine.fileio import LocalBackend, register_backend
from mmengine.logging import HistoryBuffer
from mmengine.runner import CheckpointLoader, Runner
from torch import nn

from ..checkpoint import file
from ..errors import AmpCheckpointError
from . import shard_files
from .log import warn


class WholeFiles(LocalBackend):
    """mmengine's local disk, on which a file is the old one or the whole new one at any moment."""

    def put(self, obj: bytes, filepath: str | Path) -> None:
        """Write a file beside the old one, and put it in its place.

        Args:
            obj: Its content.
            filepath: Its name; missing folders are made.

        Raises:
            CheckpointWriteError: Full disk, no permission and their like. The file is what it was.
        """
        if Path(filepath).is_symlink() or (Path(filepath).exists() and not Path(filepath).is_file()):
            # what must not be replaced by a file: links, pipes
            super().put(obj, filepath)
            return
        with file.replacing(filepath) as part:
            part.write_bytes(obj)


class LocalLoader:
    """Reads local checkpoints for mmengine, files and folders of shards.

    Attributes:
        path: What was read last: mmengine tells hooks what is in a file, and not which it is.
        model: The model in whose layout folders are read.
    """

    #: For mmengine's log.
    __name__ = 'load_from_local'
    path: Path | None = None
    model: nn.Module | None = None

    def __call__(self, filename: str, map_location: Any) -> Any:
        """Read a checkpoint.

        Args:
            filename: Without a prefix such as ``https://``.
            map_location: As in :func:`torch.load`.

        Raises:
            AmpCheckpointError: Truncated, changed, no checkpoint at all, or one that would run code.
            FileNotFoundError: Missing, as in mmengine.
        """
        self.path = path = Path(filename).expanduser()
        if not path.exists():
            raise FileNotFoundError(f'{filename} can not be found.')
        if path.is_dir():
            return shard_files.load_folder(path, map_location, self.model)
        return file.load(path, map_location)


local_loader = LocalLoader()


def newest(work_dir: str) -> str | None:
    """Find the newest checkpoint of a run that is whole.

    That is the one ``last_checkpoint`` names (in a folder that was copied, the copy of it); where it is missing or damaged, the
    youngest of the ``epoch_*`` and ``iter_*`` beside it.

    Args:
        work_dir: A local folder.

    Returns:
        Its path; None where no checkpoint was written yet.

    Raises:
        AmpCheckpointError: There are checkpoints, and none is whole.
    """
    pointer = Path(work_dir, 'last_checkpoint')
    text = pointer.read_text(errors='replace').strip().removeprefix('file://') if pointer.is_file() else ''
    if '://' in text:
        return text
    target, folders = Path(text), [Path(text).parent, Path(work_dir)]
    if target.parent.name != Path(work_dir).name:
        # of the run that this folder is a copy of
        folders.reverse()
    named = [each / target.name for each in folders if target.name and (each / target.name).exists()][:1]
    folder = named[0].parent if named else next(each for each in folders if each.is_dir())
    others = [path for name in ('epoch_*.pth', 'iter_*.pth') for path in folder.glob(name)]
    passed = [f'{text[:200]!r} of {pointer} is not there'] if pointer.exists() and not named else []
    for path in [*named, *sorted(set(others) - set(named), key=os.path.getmtime, reverse=True)]:
        try:
            (shard_files.verify_folder if path.is_dir() else file.verify)(path)
        except AmpCheckpointError as error:
            passed.append(str(error))
            continue
        if passed:
            warn(f'resuming from {path}; passed over: {"; ".join(passed)}')
        return str(path)
    if passed:
        found = '; '.join(passed)
        raise AmpCheckpointError(f'no checkpoint in {work_dir} is whole ({found}): remove them, or change work_dir.')
    return None


def _restricted_getattr(owner: Any, name: str) -> Any:
    """``getattr`` for unpickling HistoryBuffer's statistics, and for nothing else."""
    if owner is HistoryBuffer and name in ('min', 'max', 'mean', 'current'):
        return getattr(owner, name)
    raise pickle.UnpicklingError(f'the file asks for getattr({owner!r}, {name!r}), not a statistic of HistoryBuffer.')


def _allow_classes() -> None:
    """Add the classes that mmengine's checkpoints need under ``weights_only=True``, and no more."""
    containers = [HistoryBuffer, ConfigDict, datetime.datetime, datetime.date, datetime.timedelta, slice, range]
    kinds = ('U1', 'f2', 'f4', 'f8', 'i1', 'i2', 'i4', 'i8', 'u1', 'u2', 'u4', 'u8', '?')
    classes: list[Any] = [*containers, np.ndarray, np.dtype, *{type(np.dtype(kind)) for kind in kinds}]
    # each with its name: ``torch.serialization.safe_globals``, in which onedl-mmengine reads its files, takes out at its end
    # what it was given, and would take out our entry if it were the same
    named: list[Any] = [(each, f'{each.__module__}.{each.__qualname__}') for each in classes]
    # a file from one Python is read with another: 3.13 pickles the second name
    for module in ('pathlib', 'pathlib._local'):
        paths = (pathlib.PosixPath, pathlib.WindowsPath, pathlib.PurePosixPath)
        named += [(path, f'{module}.{path.__name__}') for path in paths]
    named.append((_restricted_getattr, 'builtins.getattr'))
    for module in ('numpy.core.multiarray', 'numpy._core.multiarray'):
        named.append((np.zeros(1).__reduce__()[0], f'{module}._reconstruct'))
        named.append((np.float64(0).__reduce__()[0], f'{module}.scalar'))
    torch.serialization.add_safe_globals(named)


def register() -> None:
    """Register the backend, the loader and the classes in mmengine and torch."""
    register_backend('local', WholeFiles, force=True, prefixes='')
    CheckpointLoader.register_scheme(prefixes='', loader=local_loader, force=True)
    _allow_classes()
    names = Runner.load_checkpoint.__defaults__[-1]  # type: ignore[index]
    if names == [(r'^module.', '')]:
        # the dot stands for any letter there: it takes "module_" from "module_list.0.weight"
        names[:] = [(r'^module\.', '')]
