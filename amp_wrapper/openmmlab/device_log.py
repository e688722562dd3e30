"""Logs numbers to mmengine's message hub without reading them from the device until the log is read."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol
from weakref import ref

import numpy as np
import torch
from mmengine.logging import HistoryBuffer, MessageHub
from torch import Tensor


class Reviewer(Protocol):
    """Is given the rows of steps that the host had not read, once the log has copied them to the host."""

    def review(self, rows: Sequence[Sequence[float]], /) -> None:
        """Look at rows of numbers, in the order of their steps."""


class DeviceLog:
    """Writes numbers of the device to mmengine's message hub without reading them.

    They wait in rows that several buffers share, so that one transfer brings all of them to the host.

    Args:
        hub: The hub whose ``log_scalars`` the logger hook prints.
        reviewer: Is given the rows that are news, when they are read. It is not kept alive: hubs live as long as the process.
        limit: Number of waiting rows at which they are copied to the host unasked, so that memory stays bounded.
    """

    def __init__(self, hub: MessageHub, reviewer: Reviewer | None = None, limit: int = 100) -> None:
        self._hub = hub
        self._reviewer = (lambda: None) if reviewer is None else ref(reviewer)
        self._limit = limit
        self._rows: list[tuple[Tensor, list[tuple[DeviceHistoryBuffer | str, int, bool]], bool]] = []
        self.transfers = 0

    def update(
        self, row: Tensor, names: Mapping[str, int], is_news: bool = False, counters: Collection[str] = ()
    ) -> None:
        """Log some numbers of a row. Syncs only where ``limit`` rows wait.

        Args:
            row: Vector on any device; NaN means "nothing this time". A name that never had a number does not stand in the log.
            names: Names in the log, and where in the row their numbers are.
            is_news: Whether the reviewer is given the row.
            counters: Those of the names that stand in the log from the first number on that is not 0.
        """
        scalars = self._scalars()
        self._rows.append(
            (row, [(scalars.of(name, self), index, name in counters) for name, index in names.items()], is_news)
        )
        if len(self._rows) >= self._limit:
            self.flush()

    def flush(self) -> None:
        """Copy every waiting number to the host, in one transfer. Syncs."""
        rows, self._rows = self._rows, []
        if not rows:
            return
        device = rows[0][0].device
        # float64 holds every float32 scale and every count exactly
        values = torch.stack([row.detach().to(device, torch.float64) for row, *_ in rows]).tolist()
        self.transfers += 1
        scalars = self._scalars()
        scalars.forget(self)
        for numbers, (_, entries, _) in zip(values, rows):
            for target, index, counts in entries:
                if not math.isnan(numbers[index]) and (numbers[index] or not counts):
                    self._buffer(scalars, target).update(numbers[index])
        news = [numbers for numbers, (*_, is_news) in zip(values, rows) if is_news]
        reviewer = self._reviewer()
        if news and reviewer is not None:
            reviewer.review(news)

    def _scalars(self) -> LateScalars:
        """The hub's dict of buffers, which is made one that new names can wait in."""
        scalars = self._hub.log_scalars
        if not isinstance(scalars, LateScalars):
            scalars = self._hub._log_scalars = LateScalars(scalars)
        return scalars

    def _buffer(self, scalars: LateScalars, target: DeviceHistoryBuffer | str) -> DeviceHistoryBuffer:
        """The buffer of a name that waited for its first number."""
        if isinstance(target, DeviceHistoryBuffer):
            return target
        found = scalars.get(target)
        if isinstance(found, DeviceHistoryBuffer) and found.log is self:
            return found
        if found is None:
            # settles that it is resumed
            self._hub.update_scalar(target, 0.0)
        found = DeviceHistoryBuffer(self, *([[], []] if found is None else found.data))
        scalars[target] = found
        return found


class LateScalars(OrderedDict[str, HistoryBuffer]):
    """The ``log_scalars`` of a hub, to which names are added when they are looked at.

    mmengine cannot take a mean of nothing, so a name has to have a number before it stands there. Whether the first one is a
    number, the host does not know until it is read. So new names wait, and whoever looks at all names, or at one that waits,
    has the rows of their logs read.

    Args:
        known: What stands there already.
    """

    def __init__(self, known: Mapping[str, HistoryBuffer] = MappingProxyType({})) -> None:
        self._waiting: dict[str, DeviceLog] = {}
        super().__init__()
        for name, buffer in known.items():
            self[name] = buffer

    def of(self, name: str, log: DeviceLog) -> DeviceHistoryBuffer | str:
        """The buffer of a name; the name itself, which waits from now on, where it has none. Does not sync."""
        buffer = super().get(name)
        if buffer is None:
            self._waiting[name] = log
            return name
        if not isinstance(buffer, DeviceHistoryBuffer) or buffer.log is not log:
            # a resume puts a plain buffer there
            buffer = self[name] = DeviceHistoryBuffer(log, *buffer.data)
        return buffer

    def forget(self, log: DeviceLog) -> None:
        """The rows of a log are being read, so none of its names waits."""
        self._waiting = {name: each for name, each in self._waiting.items() if each is not log}

    def _settle(self) -> None:
        for log in list(self._waiting.values()):
            log.flush()
        self._waiting = {}

    def __iter__(self) -> Iterator[str]:
        self._settle()
        return super().__iter__()

    def __len__(self) -> int:
        self._settle()
        return super().__len__()

    def __contains__(self, name: object) -> bool:
        if name in self._waiting:
            self._settle()
        return super().__contains__(name)

    def __missing__(self, name: str) -> HistoryBuffer:
        if name in self._waiting:
            self._settle()
            if name in self:
                return self[name]
        raise KeyError(name)

    def get(self, name: str, default: Any = None) -> Any:
        """As a dict's."""
        if name in self._waiting:
            self._settle()
        return super().get(name, default)

    def keys(self) -> Any:
        """As a dict's."""
        self._settle()
        return super().keys()

    def values(self) -> Any:
        """As a dict's."""
        self._settle()
        return super().values()

    def items(self) -> Any:
        """As a dict's."""
        self._settle()
        return super().items()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return OrderedDict, (), None, None, iter(list(self.items()))


class DeviceHistoryBuffer(HistoryBuffer):
    """mmengine's ``HistoryBuffer``, filled from a :class:`DeviceLog` when it is read.

    It is pickled and deep-copied as the plain class, so a checkpoint can be read without this package.

    Args:
        log: Where the waiting values are.
        history: Values to go on from, after a resume.
        counts: Of each of these values.
    """

    def __init__(self, log: DeviceLog, history: Sequence[float], counts: Sequence[int]) -> None:
        self.log = log
        super().__init__(history, counts)

    @property
    def _log_history(self) -> Any:
        self.log.flush()
        return self._values

    @_log_history.setter
    def _log_history(self, values: Any) -> None:
        self._values = values

    @property
    def _count_history(self) -> Any:
        self.log.flush()
        return self._counts

    @_count_history.setter
    def _count_history(self, values: Any) -> None:
        self._counts = values

    def __reduce_ex__(self, protocol: Any) -> Any:
        history, counts = self.data
        return HistoryBuffer(np.array(history), np.array(counts), self.max_length).__reduce_ex__(protocol)
