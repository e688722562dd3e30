"""Real processes that communicate: ``launch`` starts the ranks of a scenario and checks nothing but their exit codes."""

from __future__ import annotations

import dataclasses
import signal
import time
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast

import forked
import pytest
import torch
from missing import missing


@dataclasses.dataclass
class Ended:
    """How a rank ended.

    Attributes:
        code: Its exit code; negative where a signal ended it.
        said: Everything it wrote.
    """

    code: int
    said: str


def _skip_without(device: torch.device, world: int) -> None:
    if device.type == 'cuda' and torch.cuda.device_count() < world:
        pytest.skip(f'needs {world} GPUs for nccl, and this machine has {torch.cuda.device_count()}')
    if 'mmengine' in missing():
        pytest.skip('the ranks need mmengine, which is not installed')


def _be_a_rank(*args: Any) -> None:
    import rank_worker

    rank_worker.main(*args)


def _start(
    log: Path, scenario: str, rank: int, world: int, folder: Path, device: torch.device, *rest: Any
) -> BaseProcess:
    log.write_text('')
    return forked.start(log, _be_a_rank, scenario, rank, world, folder, device.type, *rest)


def launch(
    folder: Path, scenario: str, device: torch.device, *words: str, world: int = 2, limit: float = 240
) -> list[Ended]:
    """Run a scenario of ``scenarios/`` on every rank, and end the others soon after one has failed."""
    _skip_without(device, world)
    logs = [folder / f'{scenario}{rank}.log' for rank in range(world)]
    ranks = [_start(log, scenario, rank, world, folder, device, words) for rank, log in enumerate(logs)]
    end = time.monotonic() + limit
    while any(rank.exitcode is None for rank in ranks) and time.monotonic() < end:
        codes = [rank.exitcode for rank in ranks]
        if any(code not in (None, 0) for code in codes):
            # the others wait for an answer that will not come, and say what they saw; of a killed one they hear at once
            end = min(end, time.monotonic() + (3 if -signal.SIGKILL in codes else 10))
        time.sleep(0.05)
    for rank in ranks:
        forked.kill(rank)
    return [Ended(cast(int, rank.exitcode), log.read_text()) for rank, log in zip(ranks, logs)]


def succeed(
    folder: Path, scenario: str, device: torch.device, *words: str, world: int = 2, limit: float = 240
) -> list[str]:
    """Launch a scenario whose ranks must all end well; what they said."""
    ended = launch(folder, scenario, device, *words, world=world, limit=limit)
    codes = [rank.code for rank in ended]
    assert codes == [0] * world, f'{codes}\n' + '\n'.join(rank.said[-3000:] for rank in ended)
    # a worker that leaves before its checks would end with 0 as well
    assert all(rank.said.rstrip().endswith(f'{scenario}: done') for rank in ended)
    return [rank.said for rank in ended]


class Group:
    """Ranks that stay for several scenarios: to start them takes longer than most of these.

    After a scenario that failed, the next one has new ranks.
    """

    def __init__(self, folder: Path, device: torch.device, world: int = 2) -> None:
        self.folder, self.device, self.world = folder, device, world
        self._ranks: list[BaseProcess] = []
        self._requests: list[Connection] = []
        self._logs: list[Path] = []
        self._started = 0

    def succeed(self, folder: Path, scenario: str, *words: str, limit: float = 240) -> list[str]:
        """Run a scenario that must end well on all ranks; what they said."""
        if not self._ranks:
            self._start()
        before = [log.stat().st_size for log in self._logs]
        for requests in self._requests:
            requests.send((scenario, folder, words))
        end = time.monotonic() + limit
        while time.monotonic() < end:
            said = [log.read_bytes()[start:].decode(errors='replace') for log, start in zip(self._logs, before)]
            if all(text.rstrip().endswith(f'{scenario}: done') for text in said):
                return said
            if any(rank.exitcode is not None for rank in self._ranks):
                # the others wait for an answer that will not come
                end = min(end, time.monotonic() + 10)
            time.sleep(0.05)
        self.close()
        pytest.fail('\n'.join(text[-3000:] for text in said))

    def _start(self) -> None:
        _skip_without(self.device, self.world)
        self._started += 1
        store = self.folder / str(self._started)
        store.mkdir()
        self._logs = [store / f'{rank}.log' for rank in range(self.world)]
        for rank, log in enumerate(self._logs):
            received, requests = Pipe(duplex=False)
            self._ranks.append(_start(log, 'serve', rank, self.world, store, self.device, (), received))
            self._requests.append(requests)
            received.close()

    def close(self) -> None:
        """End the ranks: by the end of what they are asked, or by force."""
        for requests in self._requests:
            requests.close()
        for rank in self._ranks:
            rank.join(20)
            forked.kill(rank)
        self._ranks, self._requests = [], []
