"""Which losses made use of a forward pass: the graph nodes of its outputs tell, as a backward pass comes by.

A step of an optimizer decides on all that its losses have gone through, the modules of others among it: a generator's loss goes
through the discriminator, whose weights may be frozen meanwhile.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakMethod

from torch import Tensor

from .nested import map_tensors

# whose losses are being run backward, on any thread: autograd has some of its own. The last one is the one that runs
_under_way: list[tuple[object, ...]] = []


class Pass:
    """A forward pass that some loss may still make use of. Its graph alone keeps it alive.

    Args:
        told: A method, called with those whose loss made use of it, each time that happens. Its object is not kept alive:
            scripts keep losses, and with them the graph.
    """

    __slots__ = ('__weakref__', '_told')

    def __init__(self, told: Callable[[Pass, Sequence[object]], None]) -> None:
        self._told = WeakMethod(told)

    def watch(self, outputs: Any) -> bool:
        """Wait for backward passes at the nodes of all tensors in ``outputs``; whether there are any."""
        nodes = set()

        def look(tensor: Tensor) -> Tensor:
            if tensor.grad_fn is not None:
                nodes.add(tensor.grad_fn)
            return tensor

        map_tensors(look, outputs)
        for node in nodes:
            node.register_prehook(functools.partial(_arrives, self))
        return bool(nodes)

    def used(self) -> None:
        """A backward pass has come by."""
        told = self._told()
        if told is not None:
            told(self, _under_way[-1] if _under_way else ())


def _arrives(seen: Pass, gradients: Any) -> None:
    seen.used()


@contextmanager
def backward(users: Sequence[object]) -> Iterator[Callable[[], None]]:
    """Around the backward pass of a loss.

    Args:
        users: Whose step decides on it.

    Yields:
        What to call where the pass begins inside, if others may be under way by then.
    """
    mine = tuple(users)
    _under_way.append(mine)

    def begins() -> None:
        _remove(mine)
        _under_way.append(mine)

    try:
        yield begins
    finally:
        _remove(mine)


def _remove(users: tuple[object, ...]) -> None:
    for index, other in enumerate(_under_way):
        if other is users:
            del _under_way[index]
            return


__all__ = ['Pass', 'backward']
