"""Finds out which losses used the outputs of a forward call: their optimizers' steps decide whether its buffers are restored.

A step of an optimizer decides for all modules that its losses have gone through, also those of other optimizers: a generator's
loss goes through the discriminator, whose weights may be frozen meanwhile. Hooks at the graph nodes of a call's outputs are
called when a backward pass runs through them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from ...policy.nested import map_tensors

# the backward passes under way and their users, on any thread: autograd has some of its own. The last one is running
_under_way: dict[object, tuple[User, ...]] = {}
# whether hooks were ever put at the outputs of a call
_watched = False


class User(Protocol):
    """Whose losses go through modules, and whose steps decide on what they did; an engine."""

    @property
    def is_accumulating(self) -> bool:
        """Whether it has had gradients since its last step."""


class _Output:
    """Graph hook of the outputs of a forward call that some loss may still make use of. Their graph alone keeps it alive.

    Args:
        deciders: What it reports to. Not kept alive: scripts keep losses, and with them the graph.
    """

    __slots__ = ('__weakref__', '_deciders', '_step')

    def __init__(self, deciders: Deciders) -> None:
        self._deciders = ref(deciders)
        self._step = deciders.step

    def __call__(self, gradients: Any) -> None:
        deciders = self._deciders()
        if deciders is not None and deciders.step == self._step:
            deciders.unused.discard(ref(self))
            running = list(_under_way.values())
            deciders.used_by(running[-1] if running else ())


def _nothing() -> None:
    """A single optimizer decides alone."""


_ALONE = nullcontext(_nothing)


def backward(users: Sequence[User]) -> AbstractContextManager[Callable[[], None]]:
    """Around the backward pass of a loss.

    Args:
        users: Whose step decides on it.

    Returns:
        A context, which gives what to call where the pass begins inside, if others may be under way by then.
    """
    return _naming(tuple(users)) if _watched else _ALONE


@contextmanager
def _naming(users: tuple[User, ...]) -> Iterator[Callable[[], None]]:
    name = object()
    _under_way[name] = users

    def begins() -> None:
        _under_way[name] = _under_way.pop(name)

    try:
        yield begins
    finally:
        del _under_way[name]


class Deciders:
    """Whose steps decide on the forward calls that one optimizer's modules have made since its last step.

    The optimizer's own step does, whatever others may have done before. While its own losses have brought no gradients, the
    steps of those do whose losses went through the modules; and where no loss has, any step, as soon as nobody holds an output
    that one may come from.

    Args:
        owner: Whose modules they are; not kept alive.
    """

    def __init__(self, owner: User | None) -> None:
        self._owner = (lambda: None) if owner is None else ref(owner)
        #: Counts the steps, since outputs of earlier ones may live on.
        self.step = 0
        #: Outputs that no loss has made use of yet.
        self.unused: set[ReferenceType[_Output]] = set()
        #: Whether a loss of the owner has come since the last step.
        self.has_own_loss = False
        # others whose losses have made use of outputs
        self._users: set[ReferenceType[User]] = set()
        # up where the step of another optimizer was skipped before any loss went through the calls
        self._doubt: Tensor | None = None
        # whether others have stepped since the first of the calls
        self._others_stepped = False

    @property
    def wait(self) -> bool:
        """Whether a step that is still to come decides."""
        return self._owner_has_gradients() or bool(self.unused) or self._others_have_gradients()

    @property
    def are_done(self) -> bool:
        """Whether others have stepped, and no step that is still to come decides."""
        return self._others_stepped and not self.wait

    def _owner_has_gradients(self) -> bool:
        # of its own losses, and not thrown away since
        owner = self._owner()
        return self.has_own_loss and owner is not None and owner.is_accumulating

    def _others_have_gradients(self) -> bool:
        # one whose gradients were thrown away decides nothing
        return any(user is not None and user.is_accumulating for user in [found() for found in self._users])

    def watch(self, output: Any) -> None:
        """A forward call has ended with ``output``: any backward pass through its tensors counts as a use."""
        global _watched
        _watched = True
        nodes = set()

        def look(tensor: Tensor) -> Tensor:
            if tensor.grad_fn is not None:
                nodes.add(tensor.grad_fn)
            return tensor

        map_tensors(look, output)
        hook = _Output(self)
        for node in nodes:
            node.register_prehook(hook)
        if nodes:
            self.unused.add(ref(hook, self.unused.discard))

    def used_by(self, users: Iterable[User]) -> None:
        """Losses of these have made use of forward calls."""
        self._doubt = None
        for user in users:
            if user is self._owner():
                self.has_own_loss = True
            else:
                self._users.add(ref(user, self._users.discard))

    def other_step(self, user: User, flag: Tensor | None) -> bool:
        """The step of another optimizer is taken or skipped. Whether it decides now.

        What forward calls gave may have been used without its graph, as a discriminator's loss uses the pictures of a
        generator. As long as somebody holds an output, a loss of the owner may still come; the step is then remembered until
        :meth:`take_doubt`.

        Args:
            user: Whose step it is.
            flag: float32 scalar on any device, not zero where the step is skipped; None for a step that is taken.
        """
        self._others_stepped = True
        went_through = ref(user) in self._users
        self._users.discard(ref(user))
        if self._owner_has_gradients():
            return False
        if went_through:
            return True
        if self._others_have_gradients():
            return False
        if self.unused:
            if flag is not None:
                self._doubt = flag if self._doubt is None else torch.maximum(self._doubt, flag.to(self._doubt.device))
            return False
        return True

    def take_doubt(self) -> Tensor | None:
        """The flag of what :meth:`other_step` remembered, which decides now; None where there is nothing."""
        doubt, self._doubt = self._doubt, None
        return doubt

    def forget(self) -> None:
        """All is decided: the next forward call begins anew."""
        self.step += 1
        self.has_own_loss = self._others_stepped = False
        self._doubt = None
        self._users.clear()
        self.unused.clear()
