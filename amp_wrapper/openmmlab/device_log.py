"""Logs numbers to mmengine's message hub without reading them from the device until the log is read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
        self._rows: list[tuple[Tensor, list[tuple[DeviceHistoryBuffer, int]], bool]] = []
        self.transfers = 0

    def update(self, row: Tensor, names: Mapping[str, int], is_news: bool = False) -> None:
        """Log some numbers of a row. Syncs once for each name that the log does not know yet.

        Args:
            row: Vector on any device; NaN means "nothing this time".
            names: Names in the log, and where in the row their numbers are.
            is_news: Whether the reviewer is given the row.
        """
        scalars = self._hub.log_scalars
        entries = []
        for name, index in names.items():
            buffer = scalars.get(name)
            if not isinstance(buffer, DeviceHistoryBuffer) or buffer.log is not self:
                if buffer is None:
                    # mmengine cannot take a mean of nothing, so the first number is waited for
                    if math.isnan(float(row[index])):
                        continue
                    # settles that it is resumed
                    self._hub.update_scalar(name, 0.0)
                # a resume puts a plain buffer there
                buffer = scalars[name] = DeviceHistoryBuffer(self, *([[], []] if buffer is None else buffer.data))
            entries.append((buffer, index))
        self._rows.append((row, entries, is_news))
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
        for numbers, (_, entries, _) in zip(values, rows):
            for buffer, index in entries:
                if not math.isnan(numbers[index]):
                    buffer.update(numbers[index])
        news = [numbers for numbers, (*_, is_news) in zip(values, rows) if is_news]
        reviewer = self._reviewer()
        if news and reviewer is not None:
            reviewer.review(news)


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
