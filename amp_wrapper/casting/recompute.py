"""Activation checkpointing: a segment that runs again finds the region of its forward pass. Autocast comes from torch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import checkpoint

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
            for device in (region.SPARE, region.OPERANDS_SPARE)
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
        first, second = (torch.autocast(device, dtype=dtype, enabled=on) for device, dtype, on in self._blocks)
        with first, second:
            return self._function(*args, **kwargs)


@functools.cache
def install() -> None:
    """Put an entry into torch, once in a process: all ways to checkpoint come to one of two functions, under whatever name."""
    name = '_checkpoint_without_reentrant_generator'
    # since 2.14 the generator is called by decorators as well, under this name
    name = f'{name}_impl' if hasattr(checkpoint, f'{name}_impl') else name
    generate, forward = getattr(checkpoint, name), checkpoint.CheckpointFunction.forward

    @functools.wraps(generate)
    def generate_segment(function: Any, *args: Any, **kwargs: Any) -> Any:
        return generate(Segment(function), *args, **kwargs)

    @functools.wraps(forward)
    def forward_segment(ctx: Any, function: Any, *args: Any) -> Any:
        return forward(ctx, Segment(function), *args)

    setattr(checkpoint, name, generate_segment)
    checkpoint.CheckpointFunction.forward = staticmethod(forward_segment)
