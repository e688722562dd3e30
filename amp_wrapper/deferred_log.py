"""Logged numbers that stay on the device until somebody reads them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from mmengine.logging import HistoryBuffer, MessageHub
from torch import Tensor


class DeferredRows:
    """Rows of device scalars that several buffers share, so that one read brings over all of them.

    Args:
        limit: Rows after which they are brought over unasked, so that memory stays bounded where nobody reads.
    """

    def __init__(self, limit: int = 1000) -> None:
        self._limit = limit
        self._rows: list[list[tuple[DeferredHistoryBuffer, Tensor]]] = []
        self.transfers = 0

    def add(self, row: list[tuple[DeferredHistoryBuffer, Tensor]]) -> None:
        """Keep one iteration's scalars for later."""
        self._rows.append(row)
        if len(self._rows) >= self._limit:
            self.flush()

    def flush(self) -> None:
        """Bring every waiting scalar to the host, in one transfer. Syncs."""
        rows, self._rows = self._rows, []
        entries = [entry for row in rows for entry in row]
        if not entries:
            return
        device = entries[0][1].device
        # float64 holds every float32 scale and every count exactly
        values = torch.stack([value.detach().to(device, torch.float64) for _, value in entries]).tolist()
        self.transfers += 1
        for (buffer, _), value in zip(entries, values):
            if not math.isnan(value):
                buffer.update(value)


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
    """Writes device scalars to mmengine's message hub without reading them.

    Args:
        hub: The hub whose ``log_scalars`` the logger hook prints.
    """

    def __init__(self, hub: MessageHub) -> None:
        self._hub = hub
        self.rows = DeferredRows()

    def update(self, scalars: dict[str, Tensor]) -> None:
        """Log scalars under their names.

        Args:
            scalars: Name to scalar tensor, on any device; NaN means "nothing this time".
        """
        row = []
        for name, value in scalars.items():
            buffer = self._hub.log_scalars.get(name)
            if not isinstance(buffer, DeferredHistoryBuffer) or buffer._rows is not self.rows:
                # the first value creates the entry and settles that it is resumed; a resume puts a plain buffer there
                if buffer is None:
                    self._hub.update_scalar(name, 0.0)
                    source = None
                else:
                    source = HistoryBuffer(*buffer.data)
                buffer = DeferredHistoryBuffer(self.rows, source)
                self._hub.log_scalars[name] = buffer
            row.append((buffer, value))
        self.rows.add(row)
