"""One rank of a scenario, in a process that ``ranks.py`` starts."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import scenarios
import torch
import torch.distributed as dist
from scenarios.common import SCENARIOS, Here, scenario

from amp_wrapper.engine.ddp import rebuild

for file in sorted(Path(scenarios.__file__).parent.glob('[!_]*.py')):
    importlib.import_module(f'scenarios.{file.stem}')


@scenario
def planted(here: Here) -> None:
    """The silent failure itself, for the test of the tests: the reducer is not rebuilt."""
    rebuild.rebuild_ddp = lambda ddp: None
    SCENARIOS[here.words[0]](here)


def run(name: str, here: Here) -> None:
    """One scenario; the last line says that all of it was done."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    sys.argv[1:] = here.words
    SCENARIOS[name](here)
    dist.barrier()
    # gloo's threads abort a process that ends under them, and models hold their groups
    gc.collect()
    print(f'{name}: done', flush=True)


def main(
    name: str,
    rank: int,
    world: int,
    folder: Path,
    kind: str,
    words: tuple[str, ...],
    requests: Connection | None = None,
) -> None:
    """Run one scenario, or as ``serve`` one after the other, until there are no more requests.

    Args:
        name: Of the scenario.
        rank: Of this process.
        world: The number of processes.
        folder: For the scenario's files.
        kind: The type of the device.
        words: What the scenario reads besides.
        requests: For ``serve``: each a name, a folder and words.
    """
    # amp.initialize collects garbage: not each time all that was imported
    gc.freeze()
    # what torchrun would say
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    device = torch.device(kind, rank) if kind == 'cuda' else torch.device(kind)
    if kind == 'cuda':
        torch.cuda.set_device(rank)
    dist.init_process_group(
        'nccl' if kind == 'cuda' else 'gloo',
        init_method=f'file://{folder / "_".join(["store", name, str(world), *words])}',
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
    )
    if requests is None:
        run(name, Here(rank, world, folder, device, list(words)))
    else:
        with contextlib.suppress(EOFError):
            while True:
                scenario_name, where, words = requests.recv()
                run(scenario_name, Here(rank, world, where, device, list(words)))
    dist.destroy_process_group()
