"""Logged numbers that stay on the device until somebody reads them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from weakref import WeakMethod

import numpy as np
import torch
from mmengine.logging import HistoryBuffer, MessageHub
from torch import Tensor


class DeferredRows:
    """Rows of device scalars that several buffers share, so that one read brings over all of them.

    Args:
        told: Called with the rows that are news to somebody, in order.
        limit: Rows after which they are brought over unasked, so that memory stays bounded where nobody reads.
    """

    def __init__(self, told: Callable[[list[list[float]]], None] = lambda rows: None, limit: int = 100) -> None:
        self._told = told
        self._limit = limit
        self._rows: list[tuple[Tensor, list[tuple[DeferredHistoryBuffer, int]], bool]] = []
        self.transfers = 0

    def add(self, row: Tensor, entries: list[tuple[DeferredHistoryBuffer, int]], tells: bool) -> None:
        """Keep one iteration's numbers for later: a vector, which of them belong to which buffer, and whether to tell."""
        self._rows.append((row, entries, tells))
        if len(self._rows) >= self._limit:
            self.flush()

    def flush(self) -> None:
        """Bring every waiting scalar to the host, in one transfer. Syncs."""
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
        told = [numbers for numbers, (*_, tells) in zip(values, rows) if tells]
        if told:
            self._told(told)


class DeferredHistoryBuffer(HistoryBuffer):
    """mmengine's ``HistoryBuffer``, filled from :class:`DeferredRows` when it is read.

    It is pickled and deep-copied as the plain class, so a checkpoint can be read without this package.

    Args:
        rows: Where the waiting values are.
        source: A buffer to go on from, after a resume.
    """

    def __init__(self, rows: DeferredRows, source: HistoryBuffer | None = None) -> None:
        self._rows = rows
        history, counts = ([], []) if source is None else source.data
        super().__init__(history, counts)

    @property
    def _log_history(self) -> Any:
        self._rows.flush()
        return self._values

    @_log_history.setter
    def _log_history(self, values: Any) -> None:
        self._values = values

    @property
    def _count_history(self) -> Any:
        self._rows.flush()
        return self._counts

    @_count_history.setter
    def _count_history(self, values: Any) -> None:
        self._counts = values

    def __reduce_ex__(self, protocol: Any) -> Any:
        history, counts = self.data
        return HistoryBuffer(np.array(history), np.array(counts), self.max_length).__reduce_ex__(protocol)


class DeferredLog:
    """Writes numbers of the device to mmengine's message hub without reading them.

    Args:
        hub: The hub whose ``log_scalars`` the logger hook prints.
        told: A method that is called with the rows that are news, when they are read. Its object is not kept alive: hubs
            live as long as the process.
    """

    def __init__(self, hub: MessageHub, told: Callable[[list[list[float]]], None] | None = None) -> None:
        self._hub = hub
        self.rows = DeferredRows() if told is None else DeferredRows(_weakly(told))

    def update(self, row: Tensor, names: dict[str, int], tells: bool = False) -> None:
        """Log some numbers of a row. Syncs once for each name that the log does not know yet.

        Args:
            row: Vector on any device; NaN means "nothing this time".
            names: Names in the log, and where in the row their numbers are.
            tells: Whether the row is news when it is read.
        """
        entries = []
        for name, index in names.items():
            buffer = self._hub.log_scalars.get(name)
            if not isinstance(buffer, DeferredHistoryBuffer) or buffer._rows is not self.rows:
                # the first value creates the entry and settles that it is resumed; a resume puts a plain buffer there
                if buffer is None:
                    # mmengine cannot take a mean of nothing, so the first number is waited for
                    if math.isnan(float(row[index])):
                        continue
                    self._hub.update_scalar(name, 0.0)
                    source = None
                else:
                    source = HistoryBuffer(*buffer.data)
                buffer = DeferredHistoryBuffer(self.rows, source)
                self._hub.log_scalars[name] = buffer
            entries.append((buffer, index))
        self.rows.add(row, entries, tells)


def _weakly(method: Callable[[list[list[float]]], None]) -> Callable[[list[list[float]]], None]:
    reference = WeakMethod(method)

    def call(rows: list[list[float]]) -> None:
        found = reference()
        if found is not None:
            found(rows)

    return call
