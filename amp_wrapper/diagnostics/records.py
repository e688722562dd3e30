"""Hands numbers of a training on, once they have reached the host: to a file of one JSON object a line, and to a function."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from ..engine.flags import LateRead
from ..errors import logger
from .pages import finite

#: Is given the iteration and the values.
Taker = Callable[[int, dict[str, Any]], object]


class LateRecords:
    """Hands numbers on, in their order, without waiting for the device.

    A training does not end because of what takes its numbers: the first failure of each costs a line in the log.

    Args:
        path: Of the file; folders on the way are made. None writes nothing.
        log: Is given what is written.

    Attributes:
        latest: The values that were handed on last.
    """

    def __init__(self, path: Path | None, log: Taker | None = None) -> None:
        self.latest: dict[str, Any] = {}
        self._takers: dict[str, Taker] = {} if path is None else {path.name: partial(_append, path)}
        if log is not None:
            self._takers['log= of amp.monitor'] = log
        self._failed: set[str] = set()
        self._waiting: list[tuple[int, LateRead, Callable[[list[float]], dict[str, Any]]]] = []

    def add(self, iteration: int, numbers: Tensor, read: Callable[[list[float]], dict[str, Any]]) -> None:
        """Begin to copy numbers to the host.

        Args:
            iteration: When they were measured.
            numbers: Vector on any device.
            read: Makes plain data of them.
        """
        self._waiting.append((iteration, LateRead(numbers), read))

    def hand_on(self, wait: bool) -> None:
        """Hand on what has reached the host.

        Args:
            wait: Whether to wait for the rest. Syncs.
        """
        while self._waiting and (wait or self._waiting[0][1].is_there):
            iteration, numbers, read = self._waiting.pop(0)
            self.latest = read(numbers.wait())
            for name, take in self._takers.items():
                try:
                    take(iteration, dict(self.latest))
                except Exception as error:
                    if name not in self._failed:
                        text = f'{type(error).__name__}: {" ".join(str(error).split())}'
                        logger.warning(f'amp: {name} failed at step {iteration} ({text}). The training goes on.')
                    self._failed.add(name)


def _append(path: Path, iteration: int, values: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open('a', encoding='utf-8') as file:
        file.write(json.dumps(finite({'iteration': iteration, **values}, null=True), allow_nan=False) + '\n')
