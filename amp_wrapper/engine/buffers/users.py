"""Which losses made use of a forward pass, and whose steps decide on it therefore.

A step of an optimizer decides on all that its losses have gone through, the modules of others among it: a generator's loss goes
through the discriminator, whose weights may be frozen meanwhile. The graph nodes of a pass's outputs tell, as a backward pass
comes by.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol
from weakref import WeakMethod, WeakSet, ref

import torch
from torch import Tensor

from ...policy.nested import map_tensors

# whose losses are being run backward, on any thread: autograd has some of its own. The last one is the one that runs
_under_way: list[tuple[object, ...]] = []


class User(Protocol):
    """Whose losses go through modules, and whose steps decide on what they did; an engine."""

    @property
    def is_accumulating(self) -> bool:
        """Whether it has had gradients since its last step."""


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


class Deciders:
    """Whose steps decide on the forward passes that one optimizer's modules have made since its last step.

    The optimizer's own step does, whatever others may have done before. While its own losses have brought no gradients, the
    steps of those do whose losses went through the modules; and where no loss has, any step, as soon as nobody holds an output
    that one may come from.

    Args:
        owner: Whose modules they are; not kept alive.
    """

    def __init__(self, owner: User | None) -> None:
        self._owner = (lambda: None) if owner is None else ref(owner)
        # passes that a loss may still make use of, and those that one has made use of
        self._unused: WeakSet[Pass] = WeakSet()
        self._used: WeakSet[Pass] = WeakSet()
        # whether a loss of the owner has come since; others whose losses have made use of passes
        self._own = False
        self._users: WeakSet[User] = WeakSet()
        # up where the step of another optimizer was skipped before any loss went through the passes
        self._doubt: Tensor | None = None
        # whether others have stepped since the first of the passes
        self._others_stepped = False

    @property
    def doubts(self) -> bool:
        """Whether the skipped step of another optimizer decides unless a loss still comes."""
        return self._doubt is not None

    @property
    def wait(self) -> bool:
        """Whether a step that is still to come decides."""
        return self._owner_has_gradients() or bool(self._unused) or self._others()

    @property
    def are_done(self) -> bool:
        """Whether others have stepped, and no step that is still to come decides."""
        return self._others_stepped and not self.wait

    def _owner_has_gradients(self) -> bool:
        # of its own losses, and not thrown away since
        owner = self._owner()
        return self._own and owner is not None and owner.is_accumulating

    def _others(self) -> bool:
        # one whose gradients were thrown away decides nothing
        return any(user.is_accumulating for user in self._users)

    def watch(self, output: Any) -> None:
        """A forward pass has ended with ``output``."""
        seen = Pass(self._see_use)
        if seen.watch(output):
            self._unused.add(seen)

    def _see_use(self, seen: Pass, users: Sequence[Any]) -> None:
        if seen in self._unused or seen in self._used:
            self._unused.discard(seen)
            self._used.add(seen)
            self.used_by(users)

    def used_by(self, users: Iterable[User]) -> None:
        """Losses of these have made use of passes."""
        owner = self._owner()
        self._doubt = None
        for user in users:
            if user is owner:
                self._own = True
            else:
                self._users.add(user)

    def other_step(self, user: User, flag: Tensor | None) -> bool:
        """The step of another optimizer is taken or skipped. Whether it decides now.

        What passes gave may have been used without its graph, as a discriminator's loss uses the pictures of a generator. As
        long as somebody holds an output, a loss of the owner may still come; the step is then remembered until
        :meth:`take_doubt`.

        Args:
            user: Whose step it is.
            flag: float32 scalar on any device, not zero where the step is skipped; None for a step that is taken.
        """
        self._others_stepped = True
        went_through = user in self._users
        self._users.discard(user)
        if self._owner_has_gradients():
            return False
        if went_through:
            return True
        if self._others():
            return False
        if self._unused:
            if flag is not None:
                self._doubt = flag if self._doubt is None else torch.maximum(self._doubt, flag.to(self._doubt.device))
            return False
        return True

    def take_doubt(self) -> Tensor | None:
        """The flag of what :meth:`other_step` remembered, which decides now; None where there is nothing."""
        doubt, self._doubt = self._doubt, None
        return doubt

    def forget(self) -> None:
        """All is decided: the next pass begins anew."""
        self._own = self._others_stepped = False
        self._doubt = None
        self._users.clear()
        self._unused.clear()
        self._used.clear()


def _remove(users: tuple[object, ...]) -> None:
    for index, other in enumerate(_under_way):
        if other is users:
            del _under_way[index]
            return


__all__ = ['Deciders', 'Pass', 'User', 'backward']
