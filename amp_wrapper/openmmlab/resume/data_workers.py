"""Data workers that a signal to every process of a job does not end, so that the training can save first."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Sequence
from multiprocessing.util import Finalize
from typing import Any

from torch.utils.data import DataLoader


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


class _Protected:
    """The ids of the data workers that ignore signals, in memory that they share with the process whose workers they are.

    That process ends them at its own end: multiprocessing sends SIGTERM to what is left, and would wait for them.
    """

    def __init__(self) -> None:
        self.owner = os.getpid()
        # zero where there is none
        self._ids = multiprocessing.RawArray('q', 4096)
        # before multiprocessing ends its children
        Finalize(None, self._end, exitpriority=0)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Protected:
        return self

    def add(self) -> None:
        """In a worker: note its id, in a place of its own, or in that of one that has ended."""
        own = os.getpid()
        for offset in range(len(self._ids)):
            place = (own + offset) % len(self._ids)
            if not (self._ids[place] and _is_running(self._ids[place])):
                self._ids[place] = own
                return

    def _end(self) -> None:
        ids = set(self._ids)
        left = [child for child in multiprocessing.active_children() if child.pid in ids]
        if left:
            # torch's handler takes a worker that is killed for a failure
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for child in left:
            child.kill()


_protected: _Protected | None = None


def _protected_here() -> _Protected:
    global _protected
    if _protected is None or _protected.owner != os.getpid():
        _protected = _Protected()
    return _protected


class _IgnoreSignals:
    """A ``worker_init_fn`` that makes data workers ignore signals: they end with their loader, or with the training.

    Args:
        signals: Those to ignore. What a worker starts, such as a decoder, ignores them as well.
        then: The ``worker_init_fn`` of the user, or None.
        protected: Of the process whose workers ignore them; those of others do not.
    """

    def __init__(self, signals: Sequence[signal.Signals], then: Any, protected: _Protected) -> None:
        self.signals = tuple(signals)
        self.then = then
        self.protected = protected

    def __call__(self, worker_id: int) -> None:
        parent = multiprocessing.parent_process()
        if parent is not None and parent.pid == self.protected.owner:
            self.protected.add()
            for number in self.signals:
                signal.signal(number, signal.SIG_IGN)
        if self.then is not None:
            self.then(worker_id)


def protect_workers(loader: Any, signals: Sequence[signal.Signals]) -> bool:
    """Make the workers of a data loader ignore signals, those that are not started yet.

    Args:
        loader: Of a loop. Anything but a ``DataLoader`` with workers stays as it is.
        signals: Those to ignore.

    Returns:
        Whether anything was changed: workers that are there already do not ignore them.
    """
    if not isinstance(loader, DataLoader) or not loader.num_workers:
        return False
    protected, before = _protected_here(), loader.worker_init_fn
    if isinstance(before, _IgnoreSignals):
        if before.protected is protected and before.signals == tuple(signals):
            return False
        before = before.then
    loader.worker_init_fn = _IgnoreSignals(signals, before, protected)
    return True
