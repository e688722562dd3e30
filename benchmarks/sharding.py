"""Measures FSDP2 at the levels: ``python -m benchmarks.sharding [--processes 2] [--device cuda]``.

Bytes that a rank holds and sends, counted on the meta device over a mesh whose other ranks do not exist, for 10^6 to 10^9
parameters; and memory of real ranks while a transformer is sharded, trained and saved, beside plain FSDP2 in FP32.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import amp_wrapper
from amp_wrapper import FusedAdamW, amp
from amp_wrapper.distributed_internals import parameters_of_group, shard_groups, types_of_group
from amp_wrapper.policy import LEVELS

from .machine import MIB, Memory, options, parse, publish, say, table

#: Layers and width of 10^6, 10^7, 10^8 and 10^9 parameters.
SIZES = ((4, 144), (8, 323), (12, 833), (24, 1863))
WORLDS = (2, 8, 64)
#: Ways to make a sharded model; the first word is the level.
WAYS = (
    'O5 from the meta device',
    'O2 from the meta device',
    'O5 from whole models',
    'FP32, plain FSDP2, from the meta device',
)


def transformer(layers: int, width: int) -> nn.Sequential:
    """Build a stack of layers, each of which is a group of FSDP2."""
    return nn.Sequential(
        *(nn.TransformerEncoderLayer(width, 1, 4 * width, 0.0, batch_first=True) for _ in range(layers))
    )


# -- counted -----------------------------------------------------------------------------------------------------------


@contextmanager
def absent_ranks(world: int) -> Iterator[DeviceMesh]:
    """Make this process rank 0 of so many; no other exists, and collectives do nothing."""
    # torch's own tests use it; the import registers it
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group('fake', store=FakeStore(), rank=0, world_size=world)
    try:
        yield init_device_mesh('cpu', (world,))
    finally:
        dist.destroy_process_group()


def count(level: str, layers: int, width: int, world: int) -> list[str]:
    """Return a row: bytes per parameter that a rank holds after a backward pass, and MiB that it receives in a step."""
    with absent_ranks(world) as mesh, torch.device('meta'):
        model = transformer(layers, width)
        total = sum(map(Tensor.numel, model.parameters()))
        amp_wrapper.fully_shard(model, level, mesh=mesh)
        held = gathered = reduced = 0
        for group in shard_groups([model]):
            parameters, (gathered_in, reduced_in) = parameters_of_group(group), types_of_group(group)
            kind = parameters[0].dtype
            mine = sum(parameter.to_local().numel() for parameter in parameters)
            # shard and gradient in their type, AdamW's moments in FP32
            held += mine * (2 * kind.itemsize + 8)
            # each parameter is padded to as many rows on each rank
            padded = sum(-(-len(p) // world) * world * (p.numel() // len(p)) for p in parameters)
            received = padded * (world - 1) // world
            # gathered in the forward and in the backward pass
            gathered += 2 * received * (gathered_in or kind).itemsize
            reduced += received * (reduced_in or kind).itemsize
    return [level, f'{total:.3g}', str(world), f'{held / total:.3f}', f'{gathered / MIB:.1f}', f'{reduced / MIB:.1f}']


# -- measured ----------------------------------------------------------------------------------------------------------


class Phases:
    """Memory at the end of each phase, above that of the beginning, and how much more there was at its peak.

    Args:
        device: 'cpu' or 'cuda'.
    """

    def __init__(self, device: str) -> None:
        self._memory = Memory(device)
        self._start = self._memory.now()
        self.found: dict[str, tuple[int, int]] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure what is done inside."""
        self._memory.reset()
        before = self._memory.now()
        yield
        peak, after = self._memory.peak(), self._memory.now()
        self.found[name] = (after - self._start, max(peak - max(after, before), 0))


def shard(way: str, layers: int, width: int, mesh: DeviceMesh) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Make a sharded model and its optimizer in one of :data:`WAYS`."""
    level = way[:2] if way.startswith('O') else ''
    if 'whole' in way:
        torch.manual_seed(0)
        model = transformer(layers, width).to(mesh.device_type)
        optimizer: torch.optim.Optimizer = FusedAdamW(model.parameters(), lr=1e-4)
        return amp.initialize(model, optimizer, opt_level=level, mesh=mesh, verbosity=0)
    with torch.device('meta'):
        model = transformer(layers, width)
    if level:
        amp_wrapper.fully_shard(model, level, mesh=mesh)
    else:
        for block in (*model, model):
            torch.distributed.fsdp.fully_shard(block, mesh=mesh)
    model.to_empty(device=mesh.device_type)
    for parameter in model.parameters():
        nn.init.uniform_(parameter.to_local(), -0.01, 0.01)
    if not level:
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4)
    optimizer = FusedAdamW(model.parameters(), lr=1e-4)
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0)


def run(rank: int, world: int, device: str, layers: int, width: int, way: str, folder: str) -> None:
    """Train and save on one rank, and write the memory of each phase to a file."""
    torch.set_num_threads(1)
    if device == 'cuda':
        torch.cuda.set_device(rank)
    backend = 'nccl' if device == 'cuda' else 'gloo'
    dist.init_process_group(backend, init_method=f'file://{folder}/store', rank=rank, world_size=world)
    mesh, phases = init_device_mesh(device, (world,)), Phases(device)
    with phases.phase('shard'):
        model, optimizer = shard(way, layers, width, mesh)
    x = torch.randn(2, 4, width, device=device)
    for number in ('first', 'second'):
        with phases.phase(f'{number} backward pass'):
            loss = model(x).float().square().mean()
            if way.startswith('O'):
                with amp.scale_loss(loss, optimizer) as scaled:
                    scaled.backward()
                del scaled
            else:
                loss.backward()
            del loss
        with phases.phase(f'{number} step'):
            optimizer.step()
            optimizer.zero_grad()
    state = {'model': model.state_dict(), 'optimizer': optimizer.state_dict()}
    with phases.phase('save shards'):
        dcp.save(state, checkpoint_id=f'{folder}/shards')
    with phases.phase('load shards'):
        dcp.load(state, checkpoint_id=f'{folder}/shards')
    Path(folder, f'rank{rank}.json').write_text(json.dumps(phases.found), encoding='utf-8')
    dist.destroy_process_group()


def measure(way: str, device: str, world: int, layers: int, width: int) -> list[list[str]]:
    """Return a row for each phase, of the rank that held most."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (world, device, layers, width, way, folder), nprocs=world)
        ranks = [json.loads(Path(folder, f'rank{rank}.json').read_text(encoding='utf-8')) for rank in range(world)]
    with torch.device('meta'):
        share = 4 * sum(map(Tensor.numel, transformer(layers, width).parameters())) / world
    rows = []
    for phase in ranks[0]:
        held, more = (max(found[phase][index] for found in ranks) for index in (0, 1))
        rows.append([way, phase, f'{held / MIB:.0f}', f'{more / MIB:.0f}', f'{more / share:.2f}'])
    return rows


def main(words: Sequence[str] | None = None) -> None:
    """Count, measure, and print the page."""
    parser = options(__doc__, 1)
    parser.add_argument('--processes', type=int, default=2, help='ranks (2); on GPUs each has its own')
    args = parse(parser, words)
    sizes, worlds = (SIZES[:1], WORLDS[:1]) if args.quick else (SIZES, WORLDS)
    counted = [count(level, *size, world) for level in LEVELS for size in sizes for world in worlds]
    layers, width = (2, 64) if args.quick else (16, 1020)
    # what is freed goes back to the system at once, and does not count any more
    os.environ.update(MALLOC_MMAP_THRESHOLD_='65536', MALLOC_TRIM_THRESHOLD_='65536')
    measured = []
    for way in WAYS:
        say(way)
        measured += measure(way, args.device, args.processes, layers, width)
    heads = ('level', 'parameters', 'ranks', 'bytes held per parameter', 'all-gather, MiB', 'reduce-scatter, MiB')
    publish(args, 'sharding', 'Sharded training', [
        '## Bytes, counted', '', 'Held are shard, gradient and moments of AdamW; the rest is received in a step.',
        *table(heads, counted), '## Memory, measured', '',
        f'{args.processes} rank(s), {layers} layers of width {width}. Of the rank that held most, above what it held at first.',
        *table(('way', 'phase', 'held, MiB', 'more at the peak, MiB', 'of a share in FP32'), measured),
    ])  # fmt: skip


if __name__ == '__main__':
    main()
