"""Warnings of forward passes, each given once for a model."""

from __future__ import annotations

import logging
import threading

import torch

from ..compiler_internals import constant_when_traced

logger = logging.getLogger('amp_wrapper')
_said: set[str] = set()


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


def begin() -> None:
    """Another model is prepared: what was said before may be said of it, too."""
    _said.clear()


def pass_over(text: str) -> None:
    """Leave a warning unsaid."""
    _said.add(text)


@constant_when_traced
def warn_once(text: str, kind: str = '') -> bool:
    """Log a warning; what it returns means nothing.

    Args:
        text: Of the warning.
        kind: What counts as the same warning; the text itself by default.
    """
    if getattr(_thread, 'speaks', False) and (kind or text) not in _said:
        _said.add(kind or text)
        logger.warning('amp: %s', text)
    return True


def warn_clamped(what: str, value: float, dtype: torch.dtype) -> None:
    """Warn that a function was given a number beyond the range of a 16-bit type.

    Args:
        what: The function.
        value: The number.
        dtype: float16 or bfloat16.
    """
    name = str(dtype).removeprefix('torch.')
    warn_once(
        f'{what} was given {value:g} beyond the range of {name}, and takes the largest that {name} has '
        f'({torch.finfo(dtype).max:g}, with its sign) instead. Write torch.finfo(x.dtype).min in masks, where x is what is '
        f'masked, and .max for limits.',
        'beyond the range',
    )
