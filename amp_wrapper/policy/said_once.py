"""Warnings of forward passes, each given once for a model."""

from __future__ import annotations

import threading

import torch

from ..compiler_internals import constant_when_traced
from ..errors import logger

#: What counts as said: of nothing in it a warning is given. It is emptied where another model is prepared.
said: set[str] = set()
# whether what runs on a thread may warn: a model with verbosity=0 may not
_thread = threading.local()


@constant_when_traced
def speaks(may: bool) -> bool:
    """Say whether what runs on this thread from now on may warn.

    Returns:
        What was so before.
    """
    before = getattr(_thread, 'speaks', False)
    _thread.speaks = may
    return before


@constant_when_traced
def warn_once(text: str, kind: str = '') -> bool:
    """Log a warning; what it returns means nothing.

    Args:
        text: Of the warning.
        kind: What counts as the same warning; the text itself by default.
    """
    if getattr(_thread, 'speaks', False) and (kind or text) not in said:
        said.add(kind or text)
        logger.warning('amp: %s', text)
    return True


def warn_clamped(what: str, dtype: torch.dtype) -> None:
    """Warn that a function was given finite numbers beyond the range of a 16-bit type."""
    warn_once(
        f'{what} was given numbers beyond the range of {dtype}, and takes the largest that it has '
        f'({torch.finfo(dtype).max:g}, with its sign) instead. Write torch.finfo(x.dtype).min in masks, where x is what is '
        f'masked, and .max for limits.',
        'beyond the range',
    )
