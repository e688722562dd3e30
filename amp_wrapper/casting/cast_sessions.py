"""Whether a model at O1 or O4 of the functional API is alive: decorated functions act outside of models then."""

from __future__ import annotations

import weakref
from weakref import WeakSet


class CastSession:
    """Is held by whoever attached such a model."""


class _Alive:
    """Whether there is any session: an attribute, which torch.compile looks at before it takes a graph."""

    def __init__(self) -> None:
        self.any = False
        self._sessions: WeakSet[CastSession] = WeakSet()

    def add(self) -> CastSession:
        """Begin a session, which lasts as long as what is returned."""
        session = CastSession()
        self._sessions.add(session)
        self.any = True
        weakref.finalize(session, self._look)
        return session

    def _look(self) -> None:
        # a set of weak references counts those that go at this moment
        self.any = any(True for _ in self._sessions)


alive = _Alive()
