"""Tests whose body runs on every rank of a group of processes, which communicate over gloo (nccl with ``--device cuda``)."""

from __future__ import annotations

import dataclasses
import functools
import gc
import importlib
import inspect
import os
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
import torch.distributed as dist
from missing import missing


@dataclasses.dataclass
class Here:
    """This process.

    Attributes:
        rank: Its number.
        world: How many there are.
        folder: For files of the test; the same on all ranks.
        device: Of this rank.
    """

    rank: int
    world: int
    folder: Path
    device: torch.device


def on_ranks(world: int = 2) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Turns a function of a :class:`Here` and parameters into a test that calls it on each of so many ranks."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(ranks_of: Callable[[int], Group], tmp_path: Path, **parameters: Any) -> None:
            ranks_of(world).run(tmp_path, body, **parameters)

        own = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ('ranks_of', 'tmp_path')]
        parameters = list(inspect.signature(body).parameters.values())[1:]
        test.__signature__ = inspect.Signature([*own, *parameters])
        test.on_rank = body
        return test

    return decorate


class Group:
    """Ranks that stay for several tests: to start them takes longer than most of these.

    After a test that failed, or that killed a rank, the next one has new ranks.
    """

    def __init__(self, folder: Path, device: torch.device, world: int) -> None:
        self.folder, self.device, self.world = folder, device, world
        self._ranks: list[BaseProcess] = []
        self._links: list[Connection] = []
        self._started = 0

    def run(self, folder: Path, body: Callable[..., None], /, **parameters: Any) -> None:
        """Call a function of a module on all ranks, which must end well."""
        answers = self.answers(folder, body, **parameters)
        if any(answers):
            pytest.fail('\n'.join(f'rank {rank}: {text[-3000:]}' for rank, text in enumerate(answers) if text))

    def answers(self, folder: Path, body: Callable[..., None], /, **parameters: Any) -> list[str]:
        """What came of the call on each rank: nothing, the traceback of an error, or that the rank is gone."""
        if not self._ranks:
            self._start()
        for link in self._links:
            link.send((body.__module__, body.__name__, folder, parameters))
        found: dict[int, str] = {}
        end = time.monotonic() + 240
        while len(found) < self.world and time.monotonic() < end:
            left = {self._links[rank]: rank for rank in range(self.world) if rank not in found}
            for link in wait(list(left), timeout=end - time.monotonic()):
                try:
                    found[left[link]] = link.recv()
                except (EOFError, ConnectionError):
                    found[left[link]] = 'killed'
            if any(found.values()):
                # the others wait for an answer that will not come
                end = min(end, time.monotonic() + 10)
        answers = [found.get(rank, 'no answer') for rank in range(self.world)]
        if any(answers):
            self.close()
        return answers

    def _start(self) -> None:
        if self.device.type == 'cuda' and torch.cuda.device_count() < self.world:
            pytest.skip(f'needs {self.world} GPUs for nccl, and this machine has {torch.cuda.device_count()}')
        if 'mmengine' in missing():
            pytest.skip('the ranks need mmengine, which is not installed')
        self._started += 1
        folder = self.folder / str(self._started)
        folder.mkdir()
        for rank in range(self.world):
            mine, its = Pipe()
            place = (rank, self.world, folder / 'store', self.device.type)
            self._ranks.append(processes.start(folder / f'{rank}.log', _serve, *place, its))
            self._links.append(mine)
            its.close()

    def close(self) -> None:
        """End the ranks: by the end of what they are asked, or by force."""
        for link in self._links:
            link.close()
        for rank in self._ranks:
            rank.join(10)
            processes.kill(rank)
        self._ranks, self._links = [], []


def _serve(rank: int, world: int, store: Path, kind: str, link: Connection) -> None:
    """One rank: calls what it is asked to, one after the other, until there are no more requests or an error comes."""
    # what torchrun would say
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    device = torch.device(kind, rank) if kind == 'cuda' else torch.device(kind)
    if kind == 'cuda':
        torch.cuda.set_device(rank)
    dist.init_process_group(
        'nccl' if kind == 'cuda' else 'gloo',
        init_method=f'file://{store}',
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
    )
    while True:
        try:
            module, name, folder, parameters = link.recv()
        except EOFError:
            break
        try:
            torch.manual_seed(0)
            torch.use_deterministic_algorithms(True)
            body = getattr(importlib.import_module(module), name)
            getattr(body, 'on_rank', body)(Here(rank, world, folder, device), **parameters)
            dist.barrier()
        except BaseException:
            link.send(traceback.format_exc())
            raise
        # models hold groups, whose threads abort a process that ends under them
        gc.collect()
        link.send('')
    dist.destroy_process_group()
