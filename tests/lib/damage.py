"""One catalogue of damages to checkpoints. Whatever reads checkpoints refuses each of them with a word that says what is wrong.

A damage of content changes a dict that was read; a damage of bytes changes what lies on the disk.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Change = Callable[[Any], None]


def put(*path: Any) -> Change:
    """Write the last element of ``path`` at the keys before it."""

    def change(content: Any) -> None:
        *keys, last, value = path
        for key in keys:
            content = content[key]
        content[last] = value

    return change


def drop(*path: Any) -> Change:
    """Remove what lies at ``path``."""

    def change(content: Any) -> None:
        *keys, last = path
        for key in keys:
            content = content[key]
        del content[last]

    return change


#: Of a checkpoint of mmengine, by key: model, average, position, schedules. The word is in the error.
FILE: dict[str, tuple[Change, str]] = {
    'a weight is missing': (drop('state_dict', 'fc.weight'), 'fc.weight'),
    'a weight too many': (put('state_dict', 'more', torch.ones(1)), 'more'),
    'a weight of another shape': (put('state_dict', 'fc.weight', torch.ones(1)), 'fc.weight'),
    'weights are no dict': (put('state_dict', [1]), 'state_dict'),
    'no weights': (drop('state_dict'), 'state_dict'),
    'no meta': (drop('meta'), 'meta'),
    'no iteration': (drop('meta', 'iter'), 'iter'),
    'a negative epoch': (put('meta', 'epoch', -1), 'epoch'),
    'no message hub': (drop('message_hub'), 'message_hub'),
    'a mean is missing': (drop('ema_state_dict', 'module.fc.weight'), 'fc.weight'),
    'a mean of another shape': (put('ema_state_dict', 'module.fc.weight', torch.ones(1)), 'fc.weight'),
    'a schedule too many': (lambda file: file['param_schedulers'].append(file['param_schedulers'][0]), 'schedule'),
    'a schedule lacks its place': (drop('param_schedulers', 0, 'last_step'), 'last_step'),
    'several optimizers': (lambda file: put('optimizer', {'a': file['optimizer']})(file), 'OptimWrapperDict'),
}

#: Of the state dict of an ``AmpOptimWrapper`` at O2, with two groups and two losses.
STATE: dict[str, tuple[Change, str]] = {
    'no state': (drop('state'), 'state'),
    'no groups': (drop('param_groups'), 'param_groups'),
    'a group without parameters': (drop('param_groups', 0, 'params'), 'params'),
    'a group is missing': (lambda state: state['param_groups'].pop(), 'parameter'),
    'a parameter too many': (lambda state: state['param_groups'][0]['params'].append(77), 'params'),
    'another optimizer': (drop('param_groups', 0, 'momentum'), 'momentum'),
    'no scale': (drop('amp', 'loss_scalers', 1, 'scale'), 'scale'),
    'a NaN scale': (put('amp', 'loss_scalers', 1, 'scale', math.nan), 'scale'),
    'a scale of 0': (put('amp', 'loss_scalers', 0, 'scale', 0.0), 'scale'),
    'no loss scalers': (put('amp', 'loss_scalers', []), 'loss_scalers'),
    'a newer format': (put('amp', 'version', 2), 'upgrade'),
    'no format': (drop('amp', 'version'), 'version'),
    'the part of amp is no dict': (put('amp', [1]), 'amp'),
}

#: Of apex's own state, where it has two losses.
APEX: dict[str, tuple[Change, str]] = {
    'a NaN scale': (put('loss_scaler0', 'loss_scale', math.nan), 'loss_scale'),
    'a scale of 0': (put('loss_scaler0', 'loss_scale', 0.0), 'loss_scale'),
    'no scale': (drop('loss_scaler0', 'loss_scale'), 'loss_scale'),
    'no counter': (drop('loss_scaler1', 'unskipped'), 'unskipped'),
    'a scaler is no dict': (put('loss_scaler1', 7), 'loss_scaler1'),
    'the first loss is missing': (drop('loss_scaler0'), 'loss_scaler0'),
    'a hole': (put('loss_scaler3', {'loss_scale': 1.0, 'unskipped': 0}), 'loss_scaler2'),
}


class _Code:
    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (self.mark,)


def with_code(mark: Path, archive: bool = True) -> bytes:
    """A file that makes the folder ``mark`` when it is read by whoever trusts it.

    Args:
        mark: The folder.
        archive: Whether in today's format of torch, or in that before 1.6.
    """
    file = io.BytesIO()
    torch.save({'state_dict': {}, 'x': _Code(str(mark))}, file, _use_new_zipfile_serialization=archive)
    return file.getvalue()


def with_flipped_bit(content: bytes, tensor: torch.Tensor) -> bytes:
    """One bit of one element of a tensor is another one."""
    place = content.index(tensor.contiguous().numpy().tobytes())
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


#: Of the bytes of a file.
BYTES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    'empty': (lambda content: b'', 'truncated'),
    'a half': (lambda content: content[: len(content) // 2], 'truncated'),
    'all but the last bytes': (lambda content: content[:-20], 'truncated'),
    'a text': (lambda content: b'hello world\n', 'no checkpoint'),
    'zeros': (lambda content: bytes(100), 'no checkpoint'),
    'a broken pickle': (lambda content: b'\x80\x02', 'no checkpoint'),
}
