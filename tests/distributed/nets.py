"""Models, data and comparisons that the tests on several ranks share."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from bits import differences
from on_ranks import Here
from torch import Tensor, nn
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


class Training:
    """An :class:`Exact` under DDP, and beside it plain FP32 training with averages that one process has computed.

    Args:
        here: This rank.
        level: The opt level.
        door: Of :data:`DOORS`.
        optimizer: Of :data:`OPTIMIZERS`; 'split' has split masters where there can be any.
        ddp: For DDP.
        side: Whether the first rank uses a layer that the others do not.
        options: For ``amp.initialize`` or the wrapper.
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
        self.here, self.level, self.side, self.is_split = here, level, side, optimizer == 'split'
        self.net, self.plain = (Exact().to(here.device) for _ in range(2))
        for net in (self.net, self.plain):
            net.side.requires_grad_(side)
        words = dict(lr=0.25, momentum=0.5)
        self.optimizer = OPTIMIZERS[optimizer](self.net.trained.values(), **words)  # type: ignore[arg-type]
        self.oracle = torch.optim.SGD(self.plain.trained.values(), **words)  # type: ignore[arg-type]
        options = {'loss_scale': dict(init_scale=4.0), 'verbosity': 0, **options}
        self.wrapper: AmpOptimWrapper | None = None
        if door == 'amp':
            amp.initialize(self.net, self.optimizer, opt_level=level, **options)  # type: ignore[call-overload]
        else:
            if optimizer == 'split' and level in ('O2', 'O5'):
                options['master_weights'] = 'split'
            self.wrapper = AmpOptimWrapper(opt_level=level, optimizer=self.optimizer, **options)  # type: ignore[arg-type]
        if self.wrapper is not None and door == 'wrapper before DDP':
            self.wrapper.attach(self.net)
        self.ddp = wrapped(here, self.net, **(ddp or {}))
        self.indices: list[int] = []

    @property
    def scale(self) -> float:
        return amp.loss_scale(self.optimizer) if self.wrapper is None else self.wrapper.loss_scaler.get_scale()

    def backward(self, index: int, averages: bool = True, hit: bool = False, loss_id: int = 0) -> None:
        """A forward and a backward pass; with an infinite loss on this rank where ``hit``."""
        call = partial(self.ddp, dyadic(self.here, index), side=self.side and self.here.rank == 0)
        factor = float('inf') if hit else 1.0
        with nullcontext() if averages else self.ddp.no_sync():
            if self.wrapper is None:
                with amp.scale_loss(call() * factor, self.optimizer, loss_id) as scaled:
                    scaled.backward()
            else:
                with self.wrapper.optim_context(self.ddp):
                    loss = call()
                self.wrapper.backward(loss * factor, loss_id=loss_id)
        self.indices.append(index)

    def step(self, skips: bool = False) -> None:
        """Step and clear both trainings; a step that ``skips`` is left out of the plain one."""
        (self.optimizer if self.wrapper is None else self.wrapper).step()
        skipped = amp.last_step_skipped(self.optimizer) if self.wrapper is None else self.wrapper.step_was_skipped()
        assert skipped == skips, f'rank {self.here.rank} has {"" if skipped else "not "}skipped the step'
        self.clear()
        if not skips:
            self.oracle.step()
            self.oracle.zero_grad()

    def clear(self, model: bool = False) -> None:
        """Clear gradients, by ``model.zero_grad()`` or as the optimizer does it."""
        (self.ddp if model else self.wrapper or self.optimizer).zero_grad()
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
                self.clear(model=act == '!')
                continue
            skips |= len(act) > 1
            self.backward(number + len(passes), act[0] == 'a', hit=act[1:] == str(self.here.rank))
        if not skips:
            self.average()
        self.step(skips)

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
    found = [optimizer.state[parameter].get('momentum_buffer') for parameter in parameters if parameter in optimizer.state]
    return [momentum.detach().clone() for momentum in found if momentum is not None]


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
    return AmpOptimWrapper(opt_level=level, optimizer=optimizer(parameters, lr=0.1, momentum=0.9), **options)  # type: ignore[arg-type]


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
    for index, tensor in enumerate(tensors):
        if tensor is not None:
            parts = gather(here, tensor.detach().contiguous().view(-1).view(torch.uint8))
            for rank, other in enumerate(parts):
                assert parts[here.rank].equal(other), f'{what}[{index}] differs between rank {here.rank} and {rank}'


def differs(here: Here, tensors: Sequence[Tensor]) -> bool:
    """Whether ranks hold different numbers: equality would prove nothing where all had the same data."""
    flat = torch.cat([tensor.detach().float().view(-1) for tensor in tensors])
    return any(not flat.equal(other) for other in gather(here, flat))


def grads(model: nn.Module) -> list[Tensor]:
    return [parameter.grad.detach().clone() for parameter in model.parameters() if parameter.grad is not None]


def fp32(model: nn.Module) -> dict[str, Tensor]:
    """The FP32 values of a model, as its state dict has them."""
    return {name: value.detach().float().clone() for name, value in getattr(model, 'module', model).state_dict().items()}
