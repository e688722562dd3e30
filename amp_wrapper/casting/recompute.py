"""Activation checkpointing: a segment that runs again finds the region of its forward pass. Autocast comes from torch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from .. import torch_internals
from ..policy import copies
from . import region


class Segment:
    """A function that finds, wherever it is called, the region in which it was made.

    Args:
        function: The segment.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._blocks = [
            (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
            for device in (region.SPARE, region.OPERANDS_SPARE, region.SUSPENDED_SPARE)
        ]
        self._originals: list[Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        region.reach()
        if self._originals is None:
            self._originals = [copies.original_of(value) for value in args]
        for value, original in zip(args, self._originals):
            # it runs again with detached arguments
            if original is not None and original is not value:
                copies.keep_original(value, original)
        spare, operands, suspended = (torch.autocast(name, dtype=dtype, enabled=on) for name, dtype, on in self._blocks)
        with spare, operands, suspended:
            return self._function(*args, **kwargs)


@functools.cache
def install() -> None:
    """Put :class:`Segment` into torch's checkpointing, once in a process."""
    torch_internals.wrap_segments(Segment)
