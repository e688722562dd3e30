"""What scenarios share: the process that runs them, a model and its wrapper, comparisons over ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mmengine.model import BaseModel, MMDistributedDataParallel
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from amp_wrapper import AmpOptimWrapper, FusedSGD

LEVELS = ('O0', 'O1', 'O2', 'O3', 'O4', 'O5')
HALF = {'O2': torch.float16, 'O3': torch.float16, 'O5': torch.bfloat16}
# one unit of the last place of 1.0, halved: the bound of one rounding to nearest
ROUNDING = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
SCENARIOS: dict[str, Callable[..., None]] = {}


class Here:
    """This process."""

    def __init__(self, rank: int, world: int, folder: Path, device: torch.device, words: list[str]) -> None:
        self.rank, self.world, self.folder, self.device, self.words = rank, world, folder, device, words


def scenario(function: Callable[..., None]) -> Callable[..., None]:
    SCENARIOS[function.__name__] = function
    return function


class Net(BaseModel):
    """No BatchNorm, so that two half batches are the joint batch; a kept FP32 layer; a tied weight if asked for."""

    def __init__(self, tied: bool = False, recompute: str = '') -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)
        self.middle = nn.Linear(8, 8)
        self.last = nn.Linear(8, 3)
        self.side = nn.Linear(8, 3)
        self.register_buffer('seen', torch.zeros(2))
        if tied:
            self.again = nn.Linear(8, 8)
            self.again.weight = self.middle.weight
        self.tied, self.recompute = tied, recompute

    def body(self, x: Tensor) -> Tensor:
        x = self.middle(self.norm(torch.tanh(x)))
        return self.again(x) if self.tied else x

    def forward(self, inputs: Tensor, factor: float = 1.0, side: bool = False, mode: str = 'loss') -> Any:
        self.seen.add_(0.125)
        x = self.first(inputs)
        x = checkpoint(self.body, x, use_reentrant=self.recompute == 'reentrant') if self.recompute else self.body(x)
        out = self.last(x) + (self.side(x) if side else 0)
        return dict(loss=out.float().square().mean() * factor)


def data(here: Here, step: int, rank: int | None = None) -> Tensor:
    """Eight rows, of which each rank has its part; other data on each rank, and at each step."""
    whole = torch.randn(4 * here.world, 6, generator=torch.Generator().manual_seed(step))
    rank = here.rank if rank is None else rank
    return whole[rank * 4 : rank * 4 + 4].to(here.device)


def wrap(here: Here, model: nn.Module, **settings: Any) -> DistributedDataParallel:
    ids = [here.device.index] if here.device.type == 'cuda' else None
    return MMDistributedDataParallel(
        module=model.to(here.device), device_ids=ids, **{'broadcast_buffers': False, **settings}
    )


def optim_wrapper(parameters: Any, level: str, lr: float = 0.1, **settings: Any) -> AmpOptimWrapper:
    kind = FusedSGD if 'fused' in sys.argv else torch.optim.SGD
    optimizer = kind(parameters, lr=lr, momentum=settings.pop('momentum', 0.9))
    if 'split' in sys.argv and level in ('O2', 'O5'):
        settings['master_weights'] = 'split'
    settings.setdefault('loss_scale', 1024.0)
    return AmpOptimWrapper(opt_level=level, optimizer=optimizer, **settings)


def same_on_all_ranks(here: Here, tensors: Any, what: str) -> None:
    """Bit for bit."""
    for index, tensor in enumerate(tensors):
        mine = tensor.detach().contiguous().view(-1).view(torch.uint8)
        all_of_them = [torch.empty_like(mine) for _ in range(here.world)]
        dist.all_gather(all_of_them, mine)
        for rank, other in enumerate(all_of_them):
            assert mine.equal(other), f'{what}[{index}] differs between rank {here.rank} and {rank}'


def differs_somewhere(here: Here, tensors: Any) -> bool:
    """Whether any rank holds other bits: equality would prove nothing where all ranks had the same data."""
    flat = torch.cat([tensor.detach().float().view(-1) for tensor in tensors])
    all_of_them = [torch.empty_like(flat) for _ in range(here.world)]
    dist.all_gather(all_of_them, flat)
    return any(not flat.equal(other) for other in all_of_them)


def weights_of(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def masters_of(wrapper: AmpOptimWrapper) -> list[Tensor]:
    return [p.detach().clone() for p in wrapper.master_params()]


def scaler_of(wrapper: AmpOptimWrapper) -> list[Tensor]:
    return [
        torch.tensor([v]) for s in wrapper.loss_scalers for v in s.state_dict().values() if isinstance(v, (int, float))
    ]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None}


def gather(here: Here, tensor: Tensor) -> list[Tensor]:
    found = [torch.empty_like(tensor) for _ in range(here.world)]
    dist.all_gather(found, tensor.contiguous())
    return found


def averaged(here: Here, local: dict[str, Tensor]) -> dict[str, Tensor]:
    """DDP's arithmetic: each part divided, rounded, then added up in the type of the gradients. For two ranks."""
    assert here.world == 2
    return {name: sum(part / here.world for part in gather(here, grad)) for name, grad in local.items()}  # type: ignore[misc]


def backward(wrapper: AmpOptimWrapper, model: nn.Module, inputs: Tensor, **words: Any) -> None:
    with wrapper.optim_context(model):
        losses = model(inputs, **words)
    wrapper.backward(wrapper.scale_loss(losses['loss']))


def spy(seen: set[torch.dtype], bucket: Any):  # DDP reads annotations as objects, and here they are strings
    """Communication hook: notes the type of each bucket, and averages."""
    seen.add(bucket.buffer().dtype)
    return default_hooks.allreduce_hook(None, bucket)


del spy.__annotations__['seen'], spy.__annotations__['bucket']


@contextmanager
def refused(kind: type[Exception], why: str) -> Iterator[None]:
    """The block must raise ``kind`` with ``why`` in its message."""
    try:
        yield
    except kind as error:
        if why not in str(error):
            raise RuntimeError(f'refused for another reason than {why!r}') from error
    else:
        raise RuntimeError(f'{why!r}: not refused')


class Heads(BaseModel):
    """Two parts that one forward pass can use by turns, or both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.g = nn.Linear(6, 6)
        self.d = nn.Linear(6, 6)

    def forward(self, inputs: Tensor, use: str = 'gd', mode: str = 'loss') -> Any:
        x, losses = inputs, {}
        for name in use:
            x = getattr(self, name)(x)
            losses[name] = x.float().square().mean()
        return dict(losses, loss=losses[use[-1]])
