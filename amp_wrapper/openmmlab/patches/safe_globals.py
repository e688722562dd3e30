"""The classes that mmengine's own checkpoints need under ``torch.load(weights_only=True)``, and no more."""

from __future__ import annotations

import datetime
import pathlib
import pickle
from typing import Any

import numpy as np
import torch
from mmengine.config import ConfigDict
from mmengine.logging import HistoryBuffer


def _restricted_getattr(owner: Any, name: str) -> Any:
    """``getattr`` for unpickling HistoryBuffer's statistics, and for nothing else."""
    if owner is HistoryBuffer and name in ('min', 'max', 'mean', 'current'):
        return getattr(owner, name)
    raise pickle.UnpicklingError(
        f"this checkpoint asks for getattr({owner!r}, {name!r}), which only HistoryBuffer's statistics may: "
        f'it was tampered with, or written by something other than mmengine.'
    )


def allow() -> None:
    """Add them to torch's list."""
    reconstruct = np.zeros(1).__reduce__()[0]
    scalar = np.float64(0).__reduce__()[0]
    classes: list[Any] = [
        HistoryBuffer,
        # containers that find their way into meta and message hub, and run nothing
        ConfigDict,
        datetime.datetime,
        datetime.date,
        datetime.timedelta,
        slice,
        range,
        np.ndarray,
        np.dtype,
    ]
    kinds = ('U1', 'f2', 'f4', 'f8', 'i1', 'i2', 'i4', 'i8', 'u1', 'u4', 'u8', '?')
    classes += {type(np.dtype(kind)) for kind in kinds}
    # each with its name: ``torch.serialization.safe_globals``, in which onedl-mmengine reads its files, takes out at its end
    # what it was given, and would take out our entry if it were the same
    named: list[Any] = [(each, f'{each.__module__}.{each.__qualname__}') for each in classes]
    # a file from one Python is read with another: 3.13 pickles the second name
    for module in ('pathlib', 'pathlib._local'):
        paths = (pathlib.PosixPath, pathlib.WindowsPath, pathlib.PurePosixPath)
        named += [(path, f'{module}.{path.__name__}') for path in paths]
    named.append((_restricted_getattr, 'builtins.getattr'))
    for module in ('numpy.core.multiarray', 'numpy._core.multiarray'):
        named += [(reconstruct, f'{module}._reconstruct'), (scalar, f'{module}.scalar')]
    torch.serialization.add_safe_globals(named)
