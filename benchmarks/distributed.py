"""Measures the exchange of gradients in DDP: ``python -m benchmarks.distributed [--processes 2] [--device cuda]``.

Real processes, over gloo on a CPU and nccl on GPUs: bytes that a rank hands to the all-reduce in one optimizer step, counted
from the buckets of DDP; memory of gradients and buckets; the exchange alone; whole steps. With ``--processes 1`` a rank trains
alone, with DDP and with FSDP2, to see whether the backend works.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from amp_wrapper import FusedAdamW, amp
from amp_wrapper.policy import LEVELS

from .loops import SCALE, TORCH_TYPES, TorchAmp
from .machine import in_turns, median, options, parse, publish, ratio, say, table
from .models import Training, resnet50, small_resnet, small_transformer, tiny_transformer

PLAIN = 'FP32'


class GradientExchange:
    """A communication hook that notes the buckets of DDP, and averages as DDP does by itself."""

    def __init__(self) -> None:
        self.buckets: list[Tensor] = []

    def hook(self, _: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Note one bucket."""
        self.buckets.append(bucket.buffer())
        return default_hooks.allreduce_hook(dist.group.WORLD, bucket)

    def bytes(self) -> dict[str, int]:
        """Return the bytes for each type."""
        found: Counter[str] = Counter()
        for bucket in self.buckets:
            found[str(bucket.dtype).removeprefix('torch.')] += bucket.nbytes
        return dict(found)


# DDP looks at the annotations as objects, and here they are strings
GradientExchange.hook.__annotations__.clear()


class Rank:
    """A model in DDP, or sharded by FSDP2, with the batch of this rank.

    Args:
        training: Model and inputs.
        variant: A level, or a way of torch alone.
        device: Where.
        sharded: Whether FSDP2 takes the place of DDP.
        exchange: Notes the buckets of DDP.
    """

    def __init__(
        self,
        training: Training,
        variant: str,
        device: str,
        sharded: bool = False,
        exchange: GradientExchange | None = None,
    ) -> None:
        torch.manual_seed(0)
        self.model = training.build().to(device)
        self.stock: TorchAmp | None = None
        if variant in TORCH_TYPES:
            self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
            self.stock = TorchAmp(self.optimizer, TORCH_TYPES[variant])
        else:
            self.optimizer = FusedAdamW(self.model.parameters(), lr=1e-5)
            mesh = init_device_mesh(device, (dist.get_world_size(),)) if sharded else None
            scale = {'init_scale': SCALE} if variant in ('O1', 'O2') else None
            amp.initialize(self.model, self.optimizer, True, variant, loss_scale=scale, mesh=mesh, verbosity=0)
        if not sharded:
            self.model = DistributedDataParallel(
                self.model, device_ids=[torch.cuda.current_device()] if device == 'cuda' else None
            )
        if exchange is not None:
            self.model.register_comm_hook(None, exchange.hook)
        torch.manual_seed(dist.get_rank())
        self.inputs, self.labels = training.batch(device)

    def backward(self) -> None:
        """Forward and backward."""
        if self.stock is not None:
            with self.stock.optim_context(self.model):
                loss = self.loss()
            self.stock.backward(loss)
            return
        with amp.scale_loss(self.loss(), self.optimizer) as scaled:
            scaled.backward()

    def loss(self) -> Tensor:
        """Return the loss."""
        return F.cross_entropy(self.model(self.inputs).float(), self.labels)

    def step(self) -> None:
        """Forward, backward with the exchange, step, clear."""
        self.backward()
        (self.stock or self.optimizer).step()
        self.optimizer.zero_grad()


def storage_bytes(tensors: Sequence[Tensor | None]) -> int:
    """Return the bytes of the storages behind tensors, each counted once: views of buckets cost nothing."""
    storages = [tensor.untyped_storage() for tensor in tensors if tensor is not None]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def count(training: Training, variant: str, device: str) -> dict[str, Any]:
    """Count the bytes of one optimizer step.

    Raises:
        RuntimeError: Ranks differ in buckets or weights.
    """
    exchange = GradientExchange()
    rank = Rank(training, variant, device, exchange=exchange)
    # DDP sorts its buckets anew after the first step
    for _ in range(2):
        exchange.buckets.clear()
        rank.optimizer.zero_grad()
        rank.backward()
        weights = list(rank.model.parameters())
        stepped = [parameter for group in rank.optimizer.param_groups for parameter in group['params']]
        held = storage_bytes([*(tensor.grad for tensor in (*weights, *stepped)), *exchange.buckets])
        (rank.stock or rank.optimizer).step()
    total = sum(weight.detach().double().sum().item() for weight in weights)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (exchange.bytes(), total))
    if any(other != everyone[0] for other in everyone):
        raise RuntimeError(f'{training.name}, {variant}: ranks differ in buckets or weights: {everyone}')
    sizes = [bucket.numel() for bucket in exchange.buckets]
    return {'bytes': exchange.bytes(), 'sizes': sizes, 'held': held / sum(map(Tensor.numel, weights))}


def all_reduce(sizes: Sequence[int], dtype: torch.dtype, device: str) -> Callable[[], None]:
    """Return a call that averages buckets of these sizes, all under way together as in DDP."""
    return functools.partial(_exchange, [torch.zeros(size, dtype=dtype, device=device) for size in sizes])


def _exchange(buffers: Sequence[Tensor]) -> None:
    for work in [dist.all_reduce(buffer, async_op=True) for buffer in buffers]:
        work.wait()


def slowest(times: dict[str, list[float]]) -> dict[str, list[float]]:
    """Return the times of the rank that was slowest in each round."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, times)
    return {name: [max(turn) for turn in zip(*(other[name] for other in everyone))] for name in times}


def measure(trainings: Sequence[Training], args: argparse.Namespace) -> dict[str, list[list[str]]]:
    """Return the rows of all tables."""
    tables: dict[str, list[list[str]]] = {'bytes': [], 'exchange': [], 'steps': []}
    for training in trainings:
        variants = (PLAIN, 'torch.amp, bfloat16', *LEVELS) if args.device == 'cpu' else (*TORCH_TYPES, *LEVELS)
        counts = {variant: count(training, variant, args.device) for variant in variants}
        base = sum(counts['O0']['bytes'].values())
        for variant, found in counts.items():
            kinds = [f'{found["bytes"].get(kind, 0):,}' for kind in ('float32', 'float16', 'bfloat16')]
            to_base = f'{sum(found["bytes"].values()) / base:.4f}'
            row = [training.name, variant, *kinds, to_base, str(len(found['sizes'])), f'{found["held"]:.2f}']
            tables['bytes'].append(row)
        dist.barrier()
        sizes = counts['O0']['sizes']
        kinds_of = {'float32': torch.float32, 'float16': torch.float16, 'bfloat16': torch.bfloat16}
        ways = {name: all_reduce(sizes, dtype, args.device) for name, dtype in kinds_of.items()}
        times = slowest(in_turns(ways, args.rounds, args.device, _meet, wall=True))
        tables['exchange'] += _compare(training.name, times, 'float32')
        # float16 has no fast path on a CPU
        timed = [name for name in variants if args.device == 'cuda' or name not in ('torch.amp', 'O1', 'O2', 'O3')]
        ranks = {variant: Rank(training, variant, args.device) for variant in timed}
        steps = {name: rank.step for name, rank in ranks.items()}
        times = slowest(in_turns(steps, args.rounds, args.device, _meet, wall=True))
        tables['steps'] += _compare(training.name, times, 'O0')
        if dist.get_rank() == 0:
            say(f'{training.name} is done')
        del ranks, steps
        gc.collect()
    return tables


def _meet(_: str) -> None:
    dist.barrier()


def _compare(name: str, times: dict[str, list[float]], base: str) -> list[list[str]]:
    return [[name, way, median(found), ratio(found, times[base])] for way, found in times.items()]


def train_alone(device: str) -> list[str]:
    """Train a little with DDP and FSDP2, and return a line for each."""
    lines = []
    for sharded in (False, True):
        for level in ('O2', 'O5'):
            training = Training('1 block of width 16', tiny_transformer, (8, 4, 16), 'AdamW')
            rank = Rank(training, level, device, sharded)
            before = rank.loss().item()
            for _ in range(5):
                rank.step()
            after = rank.loss().item()
            assert after < before, (level, sharded, before, after)
            way = 'FSDP2' if sharded else 'DDP'
            lines.append(f'{dist.get_backend()}, one rank, {way}, {level}: trains, loss {before:.4f} to {after:.4f}')
    return lines


def run(rank: int, args: argparse.Namespace, folder: str) -> None:
    """Join the group, measure, leave the group; rank 0 writes ``result.json``."""
    torch.set_num_threads(1)
    backend = 'nccl' if args.device == 'cuda' else 'gloo'
    if args.device == 'cuda':
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f'file://{folder}/store', rank=rank, world_size=args.processes)
    try:
        found = train_alone(args.device) if args.processes == 1 else measure(_trainings(args.quick), args)
        if rank == 0:
            Path(folder, 'result.json').write_text(json.dumps(found), encoding='utf-8')
        dist.barrier()
    finally:
        # models that outlive the group leave threads of gloo behind
        gc.collect()
        dist.destroy_process_group()


def _trainings(quick: bool) -> Sequence[Training]:
    if quick:
        return [Training('small ResNet', small_resnet, (4, 3, 32, 32), 'SGD')]
    images = Training('ResNet-50', resnet50, (4, 3, 64, 64), 'SGD')
    return [images, Training('4 transformer blocks of width 256', small_transformer, (8, 16, 256), 'AdamW')]


def main(words: Sequence[str] | None = None) -> None:
    """Start the ranks, and print the page."""
    parser = options(__doc__, 20)
    parser.add_argument('--processes', type=int, default=2, help='ranks (2); on GPUs each has its own')
    args = parse(parser, words)
    if args.device == 'cuda' and torch.cuda.device_count() < args.processes:
        parser.error(
            f'--processes {args.processes}: torch sees {torch.cuda.device_count()} GPU(s), and each rank needs one'
        )
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (args, folder), nprocs=args.processes)
        found = json.loads(Path(folder, 'result.json').read_text(encoding='utf-8'))
    if args.processes == 1:
        print('\n'.join(found))
        return
    heads = ('model', 'level', 'float32', 'float16', 'bfloat16', 'to O0', 'buckets', 'bytes held per parameter')
    publish(args, 'distributed', 'Exchange of gradients in DDP', [
        f'{args.processes} processes. Medians of the slowest rank; ratios are medians of the ratios round by round.',
        '', '## Bytes that a rank hands to the all-reduce in one optimizer step', '',
        'Held are gradients and buckets after the backward pass, memory that they share once.', *table(heads, found['bytes']),
        '## The exchange alone', *table(('gradients of', 'type', 'ms', 'to float32'), found['exchange']),
        '## Whole steps', *table(('model', 'level', 'ms', 'to O0'), found['steps']),
    ])  # fmt: skip


if __name__ == '__main__':
    main()
