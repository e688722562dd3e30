"""Logs numbers of the device to mmengine's message hub, in one transfer when the log is read."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import torch
from mmengine.logging import MessageHub
from torch import Tensor

from ..engine import Engine


class DeviceLog:
    """Numbers of the device that wait until the log is read; nothing waits for the device before.

    In a runner they are in the log whenever ``LoggerHook`` reads it, and in every checkpoint. Who reads
    ``message_hub.log_scalars`` in between calls :meth:`flush` first.

    Args:
        hub: Whose ``log_scalars`` get the numbers.
        engine: Reviews the steps that the host had not read.
        limit: Rows that wait at most, so that memory stays bounded.
    """

    def __init__(self, hub: MessageHub, engine: Engine, limit: int = 100) -> None:
        self._hub, self._engine, self._limit = hub, engine, limit
        self._rows: list[tuple[Tensor, Mapping[str, int], Collection[str], bool]] = []

    def update(
        self, row: Tensor, names: Mapping[str, int], is_news: bool = False, counters: Collection[str] = ()
    ) -> None:
        """Log some numbers of a row. Syncs only where ``limit`` rows wait.

        Args:
            row: Vector on any device; NaN means "nothing this time". A name that never had a number is not in the log.
            names: Names in the log, and where in the row their numbers are.
            is_news: Whether the engine reviews the row.
            counters: Those of the names that are in the log from the first number on that is not 0.
        """
        self._rows.append((row, names, counters, is_news))
        if len(self._rows) >= self._limit:
            self.flush()

    def flush(self) -> None:
        """Copy every waiting number to the log, in one transfer. Syncs."""
        rows, self._rows = self._rows, []
        if not rows:
            return
        # float64 holds every float32 scale and every count exactly
        values = torch.stack([row.detach().to(rows[0][0].device, torch.float64) for row, *_ in rows]).tolist()
        for numbers, (_, names, counters, _) in zip(values, rows):
            for name, index in names.items():
                is_shown = numbers[index] or name not in counters or name in self._hub.log_scalars
                if is_shown and not math.isnan(numbers[index]):
                    self._hub.update_scalar(name, numbers[index])
        if news := [numbers for numbers, (*_, is_news) in zip(values, rows) if is_news]:
            self._engine.review(news)
