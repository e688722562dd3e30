"""Real processes that communicate: ``launch`` starts the ranks of a scenario and checks nothing but their exit codes."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from missing import missing

WORKER = Path(__file__).parent / 'rank_worker.py'


@dataclasses.dataclass
class Ended:
    """How a rank ended.

    Attributes:
        code: Its exit code; negative where a signal ended it.
        said: Everything it wrote.
    """

    code: int
    said: str


def launch(
    folder: Path, scenario: str, device: torch.device, *words: str, world: int = 2, limit: float = 240
) -> list[Ended]:
    """Run a scenario of ``scenarios/`` on every rank, and end the others soon after one has failed."""
    if device.type == 'cuda' and torch.cuda.device_count() < world:
        pytest.skip(f'needs {world} GPUs for nccl, and this machine has {torch.cuda.device_count()}')
    if 'mmengine' in missing():
        pytest.skip('the ranks need mmengine, which is not installed')
    logs = [folder / f'{scenario}{rank}.log' for rank in range(world)]
    ranks = []
    for rank, log in enumerate(logs):
        with log.open('w') as out:
            command = [sys.executable, str(WORKER), scenario, str(rank), str(world), str(folder), device.type, *words]
            ranks.append(subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT))
    end = time.monotonic() + limit
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < end:
        if any(rank.poll() not in (None, 0) for rank in ranks):
            # the others wait for an answer that will not come
            end = min(end, time.monotonic() + 10)
        time.sleep(0.05)
    for rank in ranks:
        if rank.poll() is None:
            rank.kill()
        rank.wait()
    return [Ended(rank.returncode, log.read_text()) for rank, log in zip(ranks, logs)]


def succeed(
    folder: Path, scenario: str, device: torch.device, *words: str, world: int = 2, limit: float = 240
) -> list[str]:
    """Launch a scenario whose ranks must all end well; what they said."""
    ended = launch(folder, scenario, device, *words, world=world, limit=limit)
    assert [rank.code for rank in ended] == [0] * world, '\n'.join(rank.said[-3000:] for rank in ended)
    # a worker that leaves before its checks would end with 0 as well
    assert all(rank.said.rstrip().endswith(f'{scenario}: done') for rank in ended)
    return [rank.said for rank in ended]
