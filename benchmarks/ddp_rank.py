"""One rank of ``benchmarks.distributed``, which starts it with RANK PROCESSES BACKEND FOLDER SIZE.

Counts what DDP hands to the all-reduce, then times the exchange alone and whole steps. Rank 0 writes ``FOLDER/result.json``.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import json
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault('OMP_NUM_THREADS', '1')
import mmcv
import mmengine
import torch
import torch._dynamo  # DDP imports it at its first use: here, so that its thousands of objects can be frozen
import torch.distributed as dist
import torch.nn.functional as F
from mmcv.cnn import ResNet
from mmengine.logging import MMLogger
from mmengine.model import BaseModel, MMDistributedDataParallel
from mmengine.optim import OptimWrapper
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from amp_wrapper import AmpOptimWrapper
from amp_wrapper.openmmlab.optim_wrapper import TorchAmpOptimWrapper

CLASSES = 100
#: Low enough that no step overflows: a skipped step would be a cheaper one.
SCALE = 8.0
#: Longer than any step of a CPU in float16.
PATIENCE = datetime.timedelta(seconds=120)

# -- models --------------------------------------------------------------------------------------------------------


class Classifier(BaseModel):
    """A body, a mean over what is left of the image or the sequence, a linear layer, the loss inside forward."""

    def __init__(self, body: nn.Module, features: int, over: tuple[int, ...]) -> None:
        super().__init__()
        self.body = body
        self.over = over
        self.head = nn.Linear(features, CLASSES)

    def forward(self, inputs: Tensor, labels: Tensor, mode: str = 'loss') -> dict[str, Tensor]:
        return dict(loss=F.cross_entropy(self.head(self.body(inputs).mean(self.over)), labels))


class Block(nn.Module):
    """A transformer's block: Linear and LayerNorm around attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before = nn.LayerNorm(width)
        self.project = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        parts = self.project(self.before(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        return x + self.mlp(x)


def resnet(depth: int, features: int) -> Classifier:
    """mmcv's ResNet with BatchNorm that trains; mmcv freezes its statistics by default."""
    return Classifier(ResNet(depth, out_indices=(3,), bn_eval=False), features, (2, 3))


def transformer(width: int, depth: int) -> Classifier:
    """No BatchNorm: every parameter becomes 16-bit."""
    blocks = [Block(width, 4) for _ in range(depth)]
    return Classifier(nn.Sequential(nn.Linear(48, width), *blocks, nn.LayerNorm(width)), width, (1,))


def small_cnn() -> Classifier:
    """BatchNorm for the quick run."""
    return Classifier(nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU()), 16, (2, 3))


@dataclass(frozen=True)
class Recipe:
    """A model with its optimizer and the inputs of one rank.

    Attributes:
        build: Makes the model.
        shape: Of the inputs.
        counted: Of the inputs where only bytes count.
        sgd: SGD with momentum; otherwise AdamW.
    """

    build: Callable[[], Classifier]
    shape: tuple[int, ...]
    counted: tuple[int, ...]
    sgd: bool = True

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """A new optimizer for ``model``."""
        if self.sgd:
            return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        # float16 knows no eps=1e-8, and O3 steps float16 weights
        return torch.optim.AdamW(model.parameters(), lr=1e-5, eps=1e-4)


# BatchNorm over two values of an image of 32 x 32 makes gradients that float16 cannot hold
RECIPES = {
    'ResNet-50': Recipe(lambda: resnet(50, 2048), (4, 3, 64, 64), (2, 3, 64, 64)),
    'ResNet-18': Recipe(lambda: resnet(18, 512), (4, 3, 64, 64), (2, 3, 64, 64)),
    'transformer': Recipe(lambda: transformer(256, 4), (8, 16, 48), (2, 4, 48), sgd=False),
    'small CNN': Recipe(small_cnn, (4, 3, 8, 8), (4, 3, 8, 8)),
    'small transformer': Recipe(lambda: transformer(32, 1), (4, 4, 48), (4, 4, 48), sgd=False),
}

# -- variants ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    """A way of training.

    Attributes:
        name: For the tables.
        level: Opt level of amp_wrapper; None without the package.
        autocast: Type of stock AMP; None with a level, and for plain FP32.
    """

    name: str
    level: str | None = None
    autocast: torch.dtype | None = None


PLAIN = Variant('plain DDP')
STOCK_FP16 = Variant('stock AMP, float16', autocast=torch.float16)
STOCK_BF16 = Variant('stock AMP, bfloat16', autocast=torch.bfloat16)
O0, O1, O2, O3, O4, O5 = (Variant(level, level) for level in ('O0', 'O1', 'O2', 'O3', 'O4', 'O5'))

COUNTED = (PLAIN, STOCK_FP16, O0, O1, O2, O3, O4, O5)
BFLOAT16 = (PLAIN, O0, STOCK_BF16, O4, O5)
FLOAT16 = (PLAIN, O0, STOCK_FP16, O1, O2, O3)


class StockOnCpu(OptimWrapper):
    """What mmengine's AmpOptimWrapper does in a step, for a CPU, where that class refuses to be built."""

    def __init__(self, dtype: torch.dtype, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.dtype = dtype
        self.scaler = torch.amp.GradScaler('cpu', init_scale=SCALE)

    @contextlib.contextmanager
    def optim_context(self, model: nn.Module) -> Iterator[None]:
        with super().optim_context(model), torch.autocast('cpu', self.dtype):
            yield

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        self.scaler.scale(loss).backward(**kwargs)
        self._inner_count += 1

    def step(self, **kwargs: Any) -> None:
        self.scaler.step(self.optimizer, **kwargs)
        self.scaler.update()


def wrap(variant: Variant, optimizer: torch.optim.Optimizer, passes: int, device: torch.device) -> OptimWrapper:
    """The optimizer wrapper of a variant.

    Args:
        variant: Which.
        optimizer: Of the FP32 model.
        passes: Forward and backward passes of an optimizer step.
        device: Where the model is.
    """
    words: dict[str, Any] = dict(optimizer=optimizer, accumulative_counts=passes)
    if variant.level is not None:
        # the level's own scale: dynamic at O1 and O2, none at the others
        scale = dict(init_scale=SCALE) if variant.level in ('O1', 'O2') else None
        return AmpOptimWrapper(scale, opt_level=variant.level, verbosity=0, **words)
    if variant.autocast is None:
        return OptimWrapper(**words)
    if device.type == 'cpu':
        return StockOnCpu(variant.autocast, **words)
    return TorchAmpOptimWrapper(dict(init_scale=SCALE), dtype=variant.autocast, **words)


class Training:
    """A model in DDP with its wrapper and one batch, the rank's own.

    Args:
        recipe: Which model.
        variant: Which wrapper.
        device: Where.
        shape: Of the rank's inputs.
        passes: Forward and backward passes of an optimizer step.
        view: DDP's ``gradient_as_bucket_view``.
        hook: A communication hook with its state, registered before anything is cast, as mmengine's users would.
    """

    def __init__(
        self,
        recipe: Recipe,
        variant: Variant,
        device: torch.device,
        shape: tuple[int, ...],
        passes: int = 1,
        view: bool = False,
        hook: tuple[Any, Callable[..., Any]] | None = None,
    ) -> None:
        torch.manual_seed(0)
        model = recipe.build().to(device)
        model.train()
        self.model = MMDistributedDataParallel(
            module=model,
            device_ids=None if device.type == 'cpu' else [device.index],
            broadcast_buffers=False,
            gradient_as_bucket_view=view,
        )
        if hook is not None:
            self.model.register_comm_hook(*hook)
        self.optimizer = recipe.optimizer(model)
        self.steps = 0
        self.optimizer.register_step_post_hook(self._stepped)
        self.passes = passes
        self.wrapper = wrap(variant, self.optimizer, passes, device)
        self.wrapper.initialize_count_status(self.model, 0, 10**9)
        random = torch.Generator().manual_seed(dist.get_rank())
        self.data = dict(
            inputs=torch.randn(shape, generator=random).to(device),
            labels=torch.randint(CLASSES, shape[:1], generator=random).to(device),
        )

    def _stepped(self, *_: Any) -> None:
        self.steps += 1

    def step(self) -> None:
        """One optimizer step."""
        for _ in range(self.passes):
            self.model.train_step(self.data, self.wrapper)


# -- bytes ---------------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What DDP handed over during one optimizer step.

    Attributes:
        buckets: Type and elements of each bucket.
        buffers: The buckets, for as long as the step lasts.
    """

    buckets: list[tuple[str, int]] = field(default_factory=list)
    buffers: list[Tensor] = field(default_factory=list)

    def bytes(self) -> dict[str, int]:
        """Bytes per type."""
        total: Counter[str] = Counter()
        for kind, elements in self.buckets:
            total[kind] += elements * getattr(torch, kind).itemsize
        return dict(total)


def counting(tally: Tally, bucket):  # DDP reads annotations as objects, and here they are strings
    """Note the bucket, then average as DDP does by itself."""
    buffer = bucket.buffer()
    tally.buckets.append((str(buffer.dtype).removeprefix('torch.'), buffer.numel()))
    tally.buffers.append(buffer)
    return default_hooks.allreduce_hook(dist.group.WORLD, bucket)


def resident(tensors: list[Tensor | None]) -> int:
    """Bytes of the storages behind ``tensors``, each counted once: views of buckets cost nothing."""
    storages = [tensor.untyped_storage() for tensor in tensors if tensor is not None]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def count(recipe: Recipe, variant: Variant, device: torch.device, passes: int, view: bool = False) -> dict[str, Any]:
    """The bytes of one optimizer step, the same in two steps and on every rank.

    Raises:
        RuntimeError: Steps or ranks differ, the buckets are not the gradients, a step was skipped, or the ranks' weights
            went apart.
    """
    tally = Tally()
    training = Training(recipe, variant, device, recipe.counted, passes, view, (tally, counting))
    weights = [weight for weight in training.model.parameters() if weight.requires_grad]
    memory: dict[str, int] = {}

    def look(moment: str) -> None:
        stepped = [tensor for group in training.optimizer.param_groups for tensor in group['params']]
        memory[moment] = resident([tensor.grad for tensor in (*weights, *stepped)] + list(tally.buffers))

    wrapper_step = training.wrapper.step

    def step(**kwargs: Any) -> None:
        look('after backward')
        wrapper_step(**kwargs)
        # the masters' gradients are made in there, and all are cleared later
        look('after the step')

    training.wrapper.step = step
    seen = []
    # two, because DDP sorts its buckets anew after the first
    for _ in range(2):
        tally.buckets.clear()
        tally.buffers.clear()
        training.step()
        seen.append((tally.bytes(), list(tally.buckets)))
    everyone: list[Any] = [None] * dist.get_world_size()
    total = sum(weight.detach().double().sum().item() for weight in weights)
    dist.all_gather_object(everyone, (seen, total))
    wanted = sum(weight.numel() * weight.element_size() for weight in weights)
    if any(one != everyone[0] for one in everyone):
        raise RuntimeError(f'{variant.name}: the ranks differ in buckets or weights: {everyone}')
    if any(step[0] != seen[0][0] for step in seen) or sum(seen[0][0].values()) != wanted:
        raise RuntimeError(f'{variant.name}: gradients of {wanted} bytes, but buckets of {[step[0] for step in seen]}')
    if training.steps != len(seen):
        raise RuntimeError(
            f'{variant.name}: skipped steps leave the weights as they were, and equal weights prove nothing'
        )
    return dict(
        variant=variant.name,
        passes=passes,
        view=view,
        bytes=seen[-1][0],
        buckets=seen[-1][1],
        memory=memory,
        parameters=sum(weight.numel() for weight in weights),
        norms=sum(
            weight.numel()
            for module in training.model.modules()
            if isinstance(module, nn.modules.batchnorm._BatchNorm)
            for weight in module.parameters()
        ),
    )


# -- time ----------------------------------------------------------------------------------------------------------


def in_turn(
    ways: dict[str, Callable[[], Any]], rounds: int, device: torch.device, say: Callable[[str], None]
) -> dict[str, list[float]]:
    """Milliseconds of each way in each round: A B C A B C, the ranks together, the slowest rank counts."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    said = time.monotonic()
    # the first steps allocate, and DDP rebuilds its buckets
    for turn in range(-2, rounds):
        for name, way in ways.items():
            dist.barrier()
            start = time.perf_counter()
            way()
            if device.type == 'cuda':
                torch.cuda.synchronize(device)
            if turn >= 0:
                times[name].append((time.perf_counter() - start) * 1e3)
        if time.monotonic() - said > 10:
            said = time.monotonic()
            say(f'round {turn + 1} of {rounds}')
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, times)
    return {name: [max(turn) for turn in zip(*(one[name] for one in everyone))] for name in ways}


def exchange(buckets: list[tuple[str, int]], dtype: torch.dtype, device: torch.device) -> Callable[[], None]:
    """All-reduces of buckets of these sizes, under way together as in DDP."""
    # zeros: many sums of the same buffers would overflow float16
    buffers = [torch.zeros(elements, dtype=dtype, device=device) for _, elements in buckets]

    def run() -> None:
        for work in [dist.all_reduce(buffer, async_op=True) for buffer in buffers]:
            work.wait()

    return run


@dataclass(frozen=True)
class Size:
    """How much is measured.

    Attributes:
        counted: Models whose bytes are counted.
        exchanged: Models whose gradients are exchanged without a step.
        timed: Models whose steps are timed.
        exchanges: Rounds of the exchange alone.
        rounds: Rounds with the 16-bit type that the device is good at.
        slow: Rounds with float16 on a CPU.
    """

    counted: tuple[str, ...]
    exchanged: tuple[str, ...]
    timed: tuple[str, ...]
    exchanges: int
    rounds: int
    slow: int


SIZES = {
    'full': Size(
        ('ResNet-50', 'ResNet-18', 'transformer'),
        ('ResNet-50', 'ResNet-18', 'transformer'),
        ('ResNet-18', 'transformer'),
        60,
        40,
        5,
    ),
    'quick': Size(('small CNN', 'small transformer'), ('small transformer',), ('small transformer',), 3, 3, 2),
}


def measure(size: Size, device: torch.device, say: Callable[[str], None]) -> dict[str, Any]:
    """Everything, in this order: bytes with the hook, then times without it, on new models."""
    counts, exchanges, times = [], [], []
    for name in size.counted:
        for variant in COUNTED:
            say(f'counting {name}, {variant.name}')
            for passes, view in ((1, False), (4, False), (1, True)):
                counts.append(dict(model=name, **count(RECIPES[name], variant, device, passes, view)))
                gc.collect()
    for name in size.exchanged:
        ways = {}
        for level, dtype in (('O0', torch.float32), ('O3', torch.float16), ('O3', torch.bfloat16)):
            buckets = next(
                one['buckets']
                for one in counts
                if (one['model'], one['variant'], one['passes'], one['view']) == (name, level, 1, False)
            )
            ways[str(dtype).removeprefix('torch.')] = exchange(buckets, dtype, device)
        say(f'exchanging the gradients of {name}')
        exchanges.append(
            dict(
                model=name,
                parameters=sum(elements for _, elements in buckets),
                times=in_turn(ways, size.exchanges, device, say),
            )
        )
        del ways
    groups = [(BFLOAT16, size.rounds), (FLOAT16, size.slow if device.type == 'cpu' else size.rounds)]
    for name in size.timed:
        for variants, rounds in groups:
            say(f'timing {name}: {", ".join(variant.name for variant in variants)}')
            trainings = {
                variant.name: Training(RECIPES[name], variant, device, RECIPES[name].shape) for variant in variants
            }
            ways = {key: training.step for key, training in trainings.items()}
            measured = in_turn(ways, rounds, device, say)
            skipped = {key: rounds + 2 - training.steps for key, training in trainings.items()}
            times.append(dict(model=name, shape=RECIPES[name].shape, times=measured, skipped=skipped))
            del trainings, ways
            gc.collect()
    versions = dict(torch=torch.__version__, mmengine=mmengine.__version__, mmcv=mmcv.__version__)
    return dict(versions=versions, counts=counts, exchanges=exchanges, times=times)


def main() -> None:
    """Join the group, measure, leave the group."""
    rank, processes, backend, folder, size = (
        int(sys.argv[1]),
        int(sys.argv[2]),
        sys.argv[3],
        Path(sys.argv[4]),
        sys.argv[5],
    )
    torch.set_num_threads(1)
    # models in DDP are cycles and leave only when collected; without the modules that takes milliseconds, not half a second
    gc.collect()
    gc.freeze()
    # it is what tools/train.py passes
    warnings.filterwarnings('ignore', message='.broadcast_buffers. is deprecated')
    MMLogger.get_instance('benchmark', log_level='WARNING')
    device = torch.device('cpu')
    if backend == 'nccl':
        device = torch.device('cuda', rank)
        torch.cuda.set_device(device)
    start = time.monotonic()

    def say(text: str) -> None:
        if rank == 0:
            print(f'{time.monotonic() - start:5.0f} s  {text}', file=sys.stderr, flush=True)

    dist.init_process_group(
        backend, init_method=f'file://{folder / "store"}', rank=rank, world_size=processes, timeout=PATIENCE
    )
    try:
        result = measure(SIZES[size], device, say)
        if rank == 0:
            (folder / 'result.json').write_text(json.dumps(result))
        dist.barrier()
    finally:
        # models that outlive the group leave gloo threads behind, and the process ends with an abort
        gc.collect()
        dist.destroy_process_group()


if __name__ == '__main__':
    main()
