"""One rank of a scenario: ``python rank_worker.py SCENARIO RANK WORLD FOLDER DEVICE [words]``, started by ``ranks.py``.

As ``serve`` it runs one scenario after the other, each a JSON list of its name, a folder and words on a line of standard input.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
from datetime import timedelta
from pathlib import Path

os.environ.setdefault('OMP_NUM_THREADS', '1')
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / 'support'))
import scenarios
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
    sys.argv[6:] = here.words
    SCENARIOS[name](here)
    dist.barrier()
    # gloo's threads abort a process that ends under them, and models hold their groups
    gc.collect()
    print(f'{name}: done', flush=True)


def main() -> None:
    name, rank, world, folder, kind = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), sys.argv[5]
    # what torchrun would say
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    device = torch.device(kind, rank) if kind == 'cuda' else torch.device(kind)
    if kind == 'cuda':
        torch.cuda.set_device(rank)
    dist.init_process_group(
        'nccl' if kind == 'cuda' else 'gloo',
        init_method=f'file://{folder / "_".join(["store", name, str(world), *sys.argv[6:]])}',
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
    )
    if name == 'serve':
        for line in sys.stdin:
            scenario_name, where, *words = json.loads(line)
            run(scenario_name, Here(rank, world, Path(where), device, words))
    else:
        run(name, Here(rank, world, folder, device, sys.argv[6:]))
    dist.destroy_process_group()


if __name__ == '__main__':
    main()
