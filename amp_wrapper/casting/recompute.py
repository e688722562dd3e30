"""Activation checkpointing: a segment that runs again finds the region of its forward pass. Autocast comes from torch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from .. import torch_internals
from . import copies, region


def _in_its_region(segment: Callable[..., Any]) -> Callable[..., Any]:
    """A function that finds, wherever it is called, the region in which this one was called."""
    states = [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in region.KINDS]
    originals: list[Any] = []

    def run(*args: Any, **kwargs: Any) -> Any:
        region.reach()
        if not originals:
            originals.extend(copies.original_of(value) for value in args)
        for value, original in zip(args, originals):
            # it runs again with detached arguments
            if original is not None and original is not value:
                copies.keep_original(value, original)
        spare, operands, suspended = (torch.autocast(kind, dtype=dtype, enabled=on) for kind, dtype, on in states)
        with spare, operands, suspended:
            return segment(*args, **kwargs)

    return run


@functools.cache
def install() -> None:
    """Let what is checkpointed find its region; once in a process."""
    torch_internals.wrap_segments(_in_its_region)
