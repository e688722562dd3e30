"""Models, data and comparisons that the tests on several ranks share."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from bits import differences
from on_ranks import Here
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from amp_wrapper import AmpOptimWrapper, FusedSGD, amp

LEVELS = ('O0', 'O1', 'O2', 'O3', 'O4', 'O5')
HALF = {'O2': torch.float16, 'O3': torch.float16, 'O5': torch.bfloat16}
#: How a model gets its level and its DDP: the functional API before DDP, and the optimizer wrapper after and before it.
DOORS = ('amp', 'wrapper', 'wrapper before DDP')
OPTIMIZERS = {'SGD': torch.optim.SGD, 'FusedSGD': FusedSGD, 'split': FusedSGD}


class Exact(nn.Module):
    """Linear in its weights, which are small dyadic numbers, as inputs are: gradients and their sums are not rounded.

    What differs from plain FP32 training by a bit is a gradient that was lost, counted twice, scaled or averaged wrongly.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.side = nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False)
        self.bn = nn.BatchNorm1d(2)
        self.bn.bias.requires_grad_(False)
        with torch.no_grad():
            self.fc.weight.copy_(torch.tensor([[1.0, 2.0], [0.5, -1.0]]))
            self.side.weight.copy_(torch.tensor([[0.5, 0.25]]))
            self.bn.weight.copy_(torch.tensor([2.0, -1.0]))

    def forward(self, x: Tensor, side: bool = False) -> Tensor:
        loss = self.fc(x).float().sum() + (self.bn.weight.float() * x.float()).sum()
        return loss + self.side(x).float().sum() if side else loss

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        return {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}


def dyadic(here: Here, index: int, rank: int | None = None) -> Tensor:
    """Even numbers, others on each rank: means over two ranks are exact in each type."""
    rank, index = here.rank if rank is None else rank, index % 4
    return torch.tensor([[2.0 + 2 * index - 4 * rank, 4.0 * rank - 2 * index]], device=here.device)


class Door:
    """A model and its optimizer behind a public door of the package.

    Args:
        here: This rank.
        net: Gives a loss.
        optimizer: Steps it.
        level: The opt level.
        door: Of :data:`DOORS`.
        ddp: For the DDP around the model; None for none.
        options: For ``amp.initialize`` or the wrapper.
    """

    def __init__(
        self, here: Here, net: Any, optimizer: Any, level: str, door: str = 'amp', ddp: Any = None, **options: Any
    ) -> None:
        self.here, self.net, self.optimizer, self.level = here, net, optimizer, level
        words: dict[str, Any] = {'opt_level': level, 'verbosity': 0, **options}
        self.wrapper = None if door == 'amp' else AmpOptimWrapper(optimizer=optimizer, **words)
        if self.wrapper is None:
            amp.initialize(net, optimizer, **words)
        elif door == 'wrapper before DDP':
            self.wrapper.attach(net)
        self.model: Any = net if ddp is None else wrapped(here, net, **ddp)
        self.stepper: Any = self.wrapper or optimizer

    @property
    def scale(self) -> float:
        return amp.loss_scale(self.optimizer) if self.wrapper is None else self.wrapper.loss_scaler.get_scale()

    def backward(self, x: Tensor, factor: float = 1.0, loss_id: int = 0, call: Any = None, **words: Any) -> Tensor:
        """A forward and a backward pass, of the loss times ``factor``; the loss."""
        call = self.model if call is None else call
        if self.wrapper is None:
            loss = call(x, **words)
            with amp.scale_loss(loss * factor, self.optimizer, loss_id) as scaled:
                scaled.backward()
        else:
            with self.wrapper.optim_context(self.model):
                loss = call(x, **words)
            self.wrapper.backward(self.wrapper.scale_loss(loss * factor), loss_id=loss_id)
        return loss.detach()

    def step(self) -> bool:
        """Step and clear; whether the step was skipped."""
        self.stepper.step()
        skipped = amp.last_step_skipped(self.optimizer) if self.wrapper is None else self.wrapper.step_was_skipped()
        self.stepper.zero_grad()
        return skipped


class Training(Door):
    """An :class:`Exact` under DDP, and beside it plain FP32 training with averages that one process has computed.

    ``optimizer`` is of :data:`OPTIMIZERS`; 'split' has split masters where there can be any. With ``side``, the first rank uses
    a layer that the others do not.
    """

    def __init__(
        self,
        here: Here,
        level: str,
        door: str = 'wrapper',
        optimizer: str = 'SGD',
        ddp: Any = None,
        side: bool = False,
        **options: Any,
    ) -> None:
        self.side, self.is_split = side, optimizer == 'split'
        net, self.plain = (Exact().to(here.device) for _ in range(2))
        for each in (net, self.plain):
            each.side.requires_grad_(side)
        words: dict[str, Any] = dict(lr=0.25, momentum=0.5)
        self.oracle = torch.optim.SGD(self.plain.trained.values(), **words)
        if self.is_split and level in ('O2', 'O5') and door != 'amp':
            options['master_weights'] = 'split'
        options = {'loss_scale': dict(init_scale=4.0), **options}
        steps = OPTIMIZERS[optimizer](net.trained.values(), **words)
        super().__init__(here, net, steps, level, door, ddp or {}, **options)
        self.indices: list[int] = []

    def one_pass(self, index: int, averages: bool = True, hit: bool = False, loss_id: int = 0) -> None:
        """A forward and a backward pass; with an infinite loss on this rank where ``hit``."""
        with nullcontext() if averages else self.model.no_sync():
            side = self.side and self.here.rank == 0
            self.backward(dyadic(self.here, index), math.inf if hit else 1.0, loss_id, side=side)
        self.indices.append(index)

    def step_both(self, skips: bool = False) -> None:
        """Step and clear both trainings; a step that ``skips`` is left out of the plain one."""
        if not skips:
            self.average()
            self.oracle.step()
            self.oracle.zero_grad()
        assert self.step() == skips, f'rank {self.here.rank} has {"not " if skips else ""}skipped the step'
        self.indices = []

    def average(self) -> None:
        """Gradients of the plain training: means over ranks of the sums over passes."""
        for index in self.indices:
            for rank in range(self.here.world):
                x = dyadic(self.here, index, rank)
                (self.plain(x, side=self.side and rank == 0) / self.here.world).backward()

    def update(self, passes: str) -> None:
        """Backward passes and a step.

        Args:
            passes: For each 'a' (averaged) or 'l' (local: under ``no_sync``), with the number of a rank on which its loss is
                infinite; '!' clears by the model, and '?' by the optimizer.
        """
        skips = False
        for number, act in enumerate(re.findall(r'[al]\d?|[!?]', passes)):
            if act in '!?':
                (self.model if act == '!' else self.stepper).zero_grad()
                self.indices = []
                continue
            skips |= len(act) > 1
            self.one_pass(number + len(passes), act[0] == 'a', hit=act[1:] == str(self.here.rank))
        self.step_both(skips)

    def check(self, what: str) -> None:
        """FP32 values and momenta are those of the plain training, weights are rounded values, and all ranks have the same."""
        state, names = self.net.state_dict(), list(self.net.trained)
        wanted = self.plain.state_dict()
        if self.level == 'O3':
            state = {name: value.float() for name, value in state.items()}
        assert differences({n: state[n] for n in names}, {n: wanted[n] for n in names}) == [], f'{what}: weights'
        found = [momentum.float() for momentum in momenta(self.optimizer)]
        assert differences(found, momenta(self.oracle)) == [], f'{what}: momenta'
        for name, weight in self.net.trained.items():
            rounded = torch.equal(weight, state[name].to(weight.dtype))
            assert rounded or self.is_split, f'{what}: {name} is not its rounded master'
        same_on_all_ranks(self.here, [*self.net.parameters(), torch.tensor(self.scale)], what)


def momenta(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group['params']]
    found = [optimizer.state[p].get('momentum_buffer') for p in parameters if p in optimizer.state]
    return [momentum.detach().clone() for momentum in found if momentum is not None]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.bn, self.norm, self.place = nn.BatchNorm1d(width), nn.LayerNorm(width), nn.Identity()
        self.up, self.down = nn.Linear(width, 2 * width, bias=False), nn.Linear(2 * width, width)

    def body(self, x: Tensor) -> Tensor:
        return x + self.down(self.place(self.up(self.norm(self.bn(x)))).relu())

    def forward(self, x: Tensor, recompute: bool = False) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=False) if recompute else self.body(x)


class Net(nn.Module):
    """BatchNorm that stays FP32, a parameter of its own; no shape is a multiple of the number of ranks. Gives a loss."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.bn = nn.Linear(6, 7), nn.BatchNorm1d(7)
        self.blocks = nn.Sequential(Block(7), Block(7))
        self.head, self.temperature = nn.Linear(7, 5), nn.Parameter(torch.ones(1))
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(self.stem(x))
        for block in self.blocks:
            x = block(x, self.recompute)
        return (self.head(x) * self.temperature).float().square().mean()


class Layers(nn.Module):
    """A layer that stays FP32 in a body that can be recomputed, a weight in two places if asked for, a layer by the side."""

    def __init__(self, tied: bool = False, recompute: str = '', side: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(6, 8), nn.LayerNorm(8)
        self.middle, self.again = nn.Linear(8, 8), nn.Linear(8, 8)
        self.last, self.side = nn.Linear(8, 3), nn.Linear(8, 3)
        if tied:
            self.again.weight = self.middle.weight
        self.side.requires_grad_(side)
        self.recompute = recompute

    def body(self, x: Tensor) -> Tensor:
        return self.again(self.middle(self.norm(torch.tanh(x))))

    def forward(self, inputs: Tensor, side: bool = False) -> Tensor:
        x = self.first(inputs)
        x = checkpoint(self.body, x, use_reentrant=self.recompute == 'reentrant') if self.recompute else self.body(x)
        out = self.last(x) + (self.side(x) if side else 0)
        return out.float().square().mean()


def batch(here: Here, step: int, rank: int | None = None, rows: int = 4, width: int = 6) -> Tensor:
    """Random rows; others on each rank, and at each step."""
    generator = torch.Generator().manual_seed(1000 * step + (here.rank if rank is None else rank))
    return torch.randn(rows, width, generator=generator).to(here.device)


def wrapped(here: Here, model: nn.Module, kind: Any = DistributedDataParallel, **settings: Any) -> Any:
    """A model in DDP."""
    ids = [here.device.index] if here.device.type == 'cuda' else None
    return kind(module=model.to(here.device), device_ids=ids, **{'broadcast_buffers': False, **settings})


def optim_wrapper(parameters: Iterable[Tensor], level: str, optimizer: Any = torch.optim.SGD, **options: Any) -> Any:
    options = {'loss_scale': 64.0, 'verbosity': 0, **options}
    return AmpOptimWrapper(opt_level=level, optimizer=optimizer(parameters, lr=0.1, momentum=0.9), **options)


def backward(wrapper: AmpOptimWrapper, model: nn.Module, inputs: Tensor, **words: Any) -> Tensor:
    """A forward and a backward pass; the loss."""
    with wrapper.optim_context(model):
        loss: Tensor = model(inputs, **words)
    wrapper.backward(loss)
    return loss


def step(wrapper: AmpOptimWrapper, model: nn.Module, inputs: Tensor, **words: Any) -> Tensor:
    """A whole iteration; the loss."""
    with wrapper.optim_context(model):
        loss: Tensor = model(inputs, **words).float()
    loss = loss if loss.ndim == 0 else loss.square().mean()
    wrapper.update_params(loss)
    return loss


def gather(here: Here, tensor: Tensor) -> list[Tensor]:
    """A tensor of each rank."""
    found = [torch.empty_like(tensor) for _ in range(here.world)]
    dist.all_gather(found, tensor.detach().contiguous())
    return found


def same_on_all_ranks(here: Here, tensors: Iterable[Tensor | None], what: str) -> None:
    """Bit for bit."""
    tensors = [tensor for tensor in tensors if tensor is not None]
    assert tensors, f'{what}: there is nothing to compare'
    for index, tensor in enumerate(tensors):
        parts = gather(here, tensor.detach().contiguous().view(-1).view(torch.uint8))
        for rank, other in enumerate(parts):
            assert parts[here.rank].equal(other), f'{what}[{index}] differs between rank {here.rank} and {rank}'


def differs(here: Here, tensors: Sequence[Tensor]) -> bool:
    """Whether ranks hold different numbers: equality would prove nothing where all had the same data."""
    flat = torch.cat([tensor.detach().float().view(-1) for tensor in tensors])
    return any(not flat.equal(other) for other in gather(here, flat))


def grads(model: nn.Module) -> list[Tensor]:
    return [parameter.grad.detach().clone() for parameter in model.parameters() if parameter.grad is not None]


def whole(value: Any) -> Any:
    """A copy of a nested structure, with whole tensors in place of shards."""
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [whole(item) for item in value]
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return value.clone() if isinstance(value, Tensor) else value


def mesh_of(here: Here, *shape: int) -> DeviceMesh:
    """Over all ranks, or of a shape."""
    names = ('replicate', 'shard')[-len(shape or (1,)) :]
    return init_device_mesh(here.device.type, shape or (here.world,), mesh_dim_names=names)


def fp32(model: nn.Module) -> dict[str, Tensor]:
    """The FP32 values of a model, as its state dict has them."""
    return {name: v.detach().float().clone() for name, v in getattr(model, 'module', model).state_dict().items()}
