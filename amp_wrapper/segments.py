"""Checkpointed segments: what runs again in a backward pass sees the casts that its forward pass saw.

torch gives a segment its autocast back. What it cannot know of, the passes that were open, is remembered here, by the
function that it keeps for the second run. So it holds in any backward pass, on any thread, and for the segments of
attached models alone.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from . import passes

#: Functions of torch that are handed a segment, whichever way a script came to them -> its place among the arguments.
SEGMENT_TAKERS = {
    'torch.utils.checkpoint._checkpoint_without_reentrant_generator': 0,
    'torch.utils.checkpoint.CheckpointFunction.forward': 1,
}


class Segment:
    """A function that opens the passes of its making wherever it is called without them.

    Args:
        function: The segment.
        state: From :func:`amp_wrapper.passes.snapshot`.
        held: Makes a context in which the stand-ins of the registry are in place.
    """

    def __init__(
        self, function: Callable[..., Any], state: passes.State, held: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._function, self._state, self._held = function, state, held

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if passes.snapshot() == self._state:
            return self._function(*args, **kwargs)
        with self._held(), passes.resumed(self._state):
            return self._function(*args, **kwargs)


def remembering(args: tuple[Any, ...], place: int, held: Callable[[], AbstractContextManager[None]]) -> tuple[Any, ...]:
    """The arguments of a function of :data:`SEGMENT_TAKERS`, where O1 and O4 cast with a :class:`Segment` in its place."""
    if len(args) <= place or not passes.casts_open():
        return args
    return (*args[:place], Segment(args[place], passes.snapshot(), held), *args[place + 1 :])
