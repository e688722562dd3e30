"""Memory of each rank while a large model is sharded, trained and saved: ``python -m benchmarks.sharding_memory [--write]``.

Real processes over gloo, or one on a GPU, each with a share of a transformer of 200 million parameters. For each phase: what
a rank holds when it ends, and how much more it held at its peak, by the system's count of resident pages (on a GPU, by torch's
count of allocated bytes). Plain FSDP2 in FP32, with torch's AdamW and ``torch.distributed.checkpoint``, runs beside it.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh

import amp_wrapper
from amp_wrapper import AmpOptimWrapper, FusedAdamW
from amp_wrapper.openmmlab import shard_files
from benchmarks import pages
from benchmarks.sharding import transformer

MIB = 2**20
WAYS = {
    'O5, from the meta device': 'shards on disk',
    'O2, from the meta device': 'shards on disk',
    'O5, from a model that is whole on each rank': 'a whole file by rank 0',
    'plain FSDP2 in FP32, from the meta device': 'torch.distributed.checkpoint',
}


class Memory:
    """What this process holds, and its peak, in bytes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> int:
        """Held at the moment."""
        gc.collect()
        if self._device.type == 'cuda':
            return torch.cuda.memory_allocated()
        return _pages('VmRSS')

    def reset(self) -> None:
        """Begin a new peak."""
        if self._device.type == 'cuda':
            torch.cuda.reset_peak_memory_stats()
        else:
            # Linux: the peak begins anew
            Path('/proc/self/clear_refs').write_text('5')

    def peak(self) -> int:
        """The most since :meth:`reset`."""
        return torch.cuda.max_memory_allocated() if self._device.type == 'cuda' else _pages('VmHWM')


def _pages(key: str) -> int:
    lines = Path('/proc/self/status').read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(key)).split()[1])


def run(rank: int, world: int, store: str, device_type: str, layers: int, width: int, way: str, folder: str) -> None:
    """One rank: the phases of a training, and what each holds, to a file."""
    torch.set_num_threads(1)
    device = torch.device(device_type, 0) if device_type == 'cuda' else torch.device('cpu')
    backend = 'nccl' if device_type == 'cuda' else 'gloo'
    dist.init_process_group(backend, init_method=f'file://{store}', rank=rank, world_size=world)
    memory = Memory(device)
    rows: dict[str, tuple[int, int]] = {}
    start = memory.now()

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        memory.reset()
        before = memory.now()
        yield
        peak = memory.peak()
        after = memory.now()
        rows[name] = (after - start, max(peak - max(after, before), 0))

    state: Any = None
    wrapper: AmpOptimWrapper | None = None
    mesh = init_device_mesh(device_type, (world,))
    level = way.partition(',')[0] if way.startswith('O') else ''
    with phase('attach'):
        if 'whole on each rank' in way:
            torch.manual_seed(0)
            model: Any = transformer(layers, width).to(device)
            amp_wrapper.fully_shard(model, level, mesh=mesh)
            optimizer: Any = FusedAdamW(model.parameters(), lr=1e-4)
        else:
            with torch.device('meta'):
                model = transformer(layers, width)
            if level:
                amp_wrapper.fully_shard(model, level, mesh=mesh)
            else:
                for block in (*model, model):
                    torch.distributed.fsdp.fully_shard(block, mesh=mesh)
            model.to_empty(device=device)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.to_local().uniform_(-0.01, 0.01)
            kind = FusedAdamW if level else torch.optim.AdamW
            optimizer = kind(model.parameters(), lr=1e-4)
        if level:
            wrapper = AmpOptimWrapper(optimizer=optimizer, opt_level=level, verbosity=0)
            wrapper.attach(model)
    x = torch.randn(2, width, device=device)
    stepper: Any = optimizer if wrapper is None else wrapper
    for number in ('first', 'second'):
        with phase(f'{number} backward pass'):
            if wrapper is None:
                model(x).float().square().mean().backward()
            else:
                with wrapper.optim_context(model):
                    loss = model(x).float().square().mean()
                wrapper.backward(loss)
                del loss
        with phase(f'{number} step'):
            stepper.step()
            stepper.zero_grad()
    with phase('save'):
        state = {'model': model.state_dict(), 'optimizer': optimizer.state_dict()}
        if not level:
            from torch.distributed.checkpoint import save

            save(state, checkpoint_id=f'{folder}/plain')
        else:
            shard_files.write_folder(state, Path(folder, 'shards'))
    if level and 'meta' in way:
        state = None
        with phase('load'), shard_files.loading(SimpleNamespace(model=model)):
            found = shard_files.load_folder(Path(folder, 'shards'))
            model.load_state_dict(found['model'])
            optimizer.load_state_dict(found['optimizer'])
            del found
    (Path(folder) / f'rows{rank}.json').write_text(json.dumps(rows))
    dist.destroy_process_group()


def main() -> None:
    """Run each way, print the table, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--ranks', type=int, default=2, help='processes; one on a GPU')
    parser.add_argument('--device', choices=('cpu', 'cuda'), default='cpu')
    parser.add_argument('--layers', type=int, default=16)
    parser.add_argument('--width', type=int, default=1020)
    pages.add_write(parser, 'sharding_memory.md')
    args = parser.parse_args()
    world = 1 if args.device == 'cuda' else args.ranks
    with torch.device('meta'):
        count = sum(parameter.numel() for parameter in transformer(args.layers, args.width).parameters())
    full = 4 * count
    # in the processes: what is freed goes back to the system at once, and does not count any more
    os.environ.update(MALLOC_MMAP_THRESHOLD_='65536', MALLOC_TRIM_THRESHOLD_='65536')
    what = torch.cuda.get_device_name() if args.device == 'cuda' else pages.processor()
    lines = [
        '# Memory of sharded training, measured',
        '',
        f'By `python -m benchmarks.sharding_memory --write`: {world} rank(s), {what}, {args.device}, torch '
        f'{torch.__version__}, Python {platform.python_version()}. A transformer of {count / 1e6:.0f} million parameters in '
        f'{args.layers} layers, each a group: its FP32 weights are {full / MIB:.0f} MiB, a share of them '
        f'{full / world / MIB:.0f} MiB. For the rank that held most: what it held at the end of each phase, above what it held '
        'at the beginning of all, and how much more at the peak of the phase. Backward passes end with gradients there.',
        '',
        '| way | phase | held, MiB | more at the peak, MiB | of a full FP32 copy | of a share |',
        '| --- | --- | --- | --- | --- | --- |',
    ]
    for way, file in WAYS.items():
        print(f'{way} ...', flush=True)
        with tempfile.TemporaryDirectory() as folder:
            words = (world, f'{folder}/store', args.device, args.layers, args.width, way, folder)
            mp.spawn(run, words, nprocs=world)
            ranks = [json.loads((Path(folder) / f'rows{rank}.json').read_text()) for rank in range(world)]
        for phase in ranks[0]:
            held, more = (max(rows[phase][index] for rows in ranks) for index in (0, 1))
            name = f'{phase} ({file})' if phase == 'save' else phase
            lines.append(
                f'| {way} | {name} | {held / MIB:.0f} | {more / MIB:.0f} | {more / full:.2f} | {more * world / full:.2f} |'
            )
    text = '\n'.join([*lines, ''])
    print(text)
    if args.write is not None:
        args.write.write_text(text)


if __name__ == '__main__':
    main()
