"""Bytes of FSDP2 at the opt levels, counted: ``python -m benchmarks.sharding [--write]``.

A transformer of 10^6 to 10^9 parameters is sharded on the meta device over a mesh whose other ranks do not exist; what a rank
holds and sends is counted from the groups that result. Nothing is computed, and no time is measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import platform
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import amp_wrapper
from amp_wrapper.distributed_internals import parameters_of_group, shard_groups, types_of_group
from amp_wrapper.policy import LEVELS
from benchmarks import pages

#: (parameters, layers, width): 12 x layers x width^2, about.
SIZES = ((10**6, 4, 144), (10**7, 8, 323), (10**8, 12, 833), (10**9, 24, 1863))
WORLDS = (2, 8, 64)


class Layer(nn.Module):
    """A layer of a transformer, as far as its parameters go."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """No attention between tokens: parameters count here."""
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        x = x + self.out(torch.sigmoid(q * k) * v)
        y: Tensor = x + self.down(torch.relu(self.up(self.norm2(x))))
        return y


def transformer(layers: int, width: int) -> nn.Sequential:
    """A stack of them."""
    return nn.Sequential(*(Layer(width) for _ in range(layers)))


@dataclasses.dataclass(frozen=True)
class Bytes:
    """What one rank holds between two steps, and at most during one; what it receives in one.

    Attributes:
        parameters: Of the whole model.
        shards: Parameters of this rank.
        gradients: Of this rank, when a backward pass has ended.
        moments: AdamW's two, of this rank.
        gathered: The parameters of the largest group and the next, whole: as much as is there at once, besides the root's.
        all_gather: Received in the forward and the backward pass.
        reduce_scatter: Received in the backward pass.
        collectives: How many of the two.
    """

    parameters: int
    shards: int
    gradients: int
    moments: int
    gathered: int
    all_gather: int
    reduce_scatter: int
    collectives: int

    @property
    def per_parameter(self) -> float:
        """Resident bytes per parameter of the model: shards, gradients and moments."""
        return (self.shards + self.gradients + self.moments) / self.parameters


def count(model: nn.Module, world: int) -> Bytes:
    """Count the bytes of a sharded model on this rank.

    Args:
        model: Sharded; may be on the meta device.
        world: Number of ranks.
    """
    own = gradients = gathers = reduces = moments = total = calls = 0
    whole = []
    groups = shard_groups([model])
    for group in groups:
        # the root keeps what it has gathered until the backward pass
        passes = 1 if any(module is model for module in group.modules) else 2
        parameters, (gathered_in, reduced_in) = parameters_of_group(group), types_of_group(group)
        mine = sum(parameter.to_local().numel() for parameter in parameters)  # type: ignore[attr-defined]
        # each is padded to the same number of rows on each rank
        padded = sum(_padded(parameter, world) for parameter in parameters)
        kind = parameters[0].dtype
        total += sum(parameter.numel() for parameter in parameters)
        own += mine * kind.itemsize
        averaged_in = reduced_in or kind
        gradients += mine * kind.itemsize
        moments += 2 * mine * 4
        gathered = padded * (gathered_in or kind).itemsize
        gathers += passes * gathered * (world - 1) // world
        reduces += padded * averaged_in.itemsize * (world - 1) // world
        calls += passes + 1
        whole.append(gathered)
    return Bytes(total, own, gradients, moments, sum(sorted(whole, reverse=True)[:2]), gathers, reduces, calls)


def _padded(parameter: Tensor, world: int) -> int:
    rows = parameter.shape[0] if parameter.ndim else 1
    return -(-rows // world) * world * (parameter.numel() // max(rows, 1))


@contextmanager
def ranks(world: int) -> Iterator[None]:
    """This process is rank 0 of so many; no other exists, and collectives do nothing."""
    # torch's own tests use it; it is registered by the import
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group('fake', store=FakeStore(), rank=0, world_size=world)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        dist.destroy_process_group()


def table() -> list[str]:
    """The rows of all levels, sizes and worlds."""
    lines = [
        '| level | parameters | ranks | resident bytes per parameter | gathered at most | all-gather | reduce-scatter | '
        'collectives |',
        '| --- | --- | --- | --- | --- | --- | --- | --- |',
    ]
    for level in LEVELS:
        for _, layers, width in SIZES:
            for world in WORLDS:
                with ranks(world), torch.device('meta'):
                    model = transformer(layers, width)
                    mesh = init_device_mesh('cpu', (world,))
                    amp_wrapper.fully_shard(model, level, mesh=mesh)
                    found = count(model, world)
                lines.append(
                    f'| {level} | {found.parameters:.3g} | {world} | {found.per_parameter:.3f} | {_mib(found.gathered)} | '
                    f'{_mib(found.all_gather)} | {_mib(found.reduce_scatter)} | {found.collectives} |'
                )
    return lines


def _mib(count: int) -> str:
    return f'{count / 2**20:.1f} MiB'


def main() -> None:
    """Print the tables, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    pages.add_write(parser, 'sharding.md')
    args = parser.parse_args()
    lines = [
        '# Bytes of sharded training, counted',
        '',
        'By `python -m benchmarks.sharding --write`, on the meta device: no time is measured, and no GPU was there. torch '
        f'{torch.__version__}, Python {platform.python_version()}. AdamW, gradients and moments in FP32 (at O3: gradients in '
        'float16), each layer of a transformer a group. Resident: shards, gradients and moments of one rank. Gathered: the two '
        'largest groups, which are whole at once while the next is fetched. The rest is what a rank receives in a step; its '
        'overflow flag and norm are one all-reduce of some numbers more.',
        '',
        *table(),
        '',
    ]
    text = '\n'.join(lines)
    print(text)
    if args.write is not None:
        args.write.write_text(text)


if __name__ == '__main__':
    main()
