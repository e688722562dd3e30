"""Parameters that are sharded over the ranks (DTensor), as ``fully_shard`` leaves them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bits import differences
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim import Optimizer

from amp_wrapper import AmpUsageError, amp
from amp_wrapper.optim import FusedAdam, FusedAdamW, FusedSGD
from scenarios.common import Here, scenario

#: Optimizers, and torch's own to compare the names and kinds of state with.
OPTIMIZERS: list[tuple[Callable[..., Any], type[Optimizer], dict[str, Any]]] = [
    (FusedAdamW, torch.optim.AdamW, dict(lr=0.01, weight_decay=0.1, amsgrad=True)),
    (FusedAdamW, torch.optim.AdamW, dict(lr=torch.tensor(0.01), maximize=True)),
    (FusedAdam, torch.optim.Adam, dict(lr=0.01, state_dtype='bfloat16')),
    (FusedSGD, torch.optim.SGD, dict(lr=0.1, momentum=0.9, nesterov=True)),
    (FusedSGD, torch.optim.SGD, dict(lr=0.1, weight_decay=0.1)),
]


def make_net() -> nn.Sequential:
    """Layers whose first dimensions are divided evenly, unevenly, and by fewer ranks than there are."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 7), nn.Linear(7, 1), nn.Linear(1, 3))
    # torch's own functions step this one
    net.register_parameter('wide', nn.Parameter(torch.randn(3, dtype=torch.float64)))
    return net


def make(here: Here) -> tuple[nn.Sequential, nn.Sequential]:
    """A model with sharded parameters, and the same on this rank alone."""
    whole, sharded = make_net().to(here.device), make_net().to(here.device)
    mesh = init_device_mesh(here.device.type, (here.world,))
    for module in sharded.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)])))
    return sharded, whole


def set_gradients(sharded: nn.Module, whole: nn.Module, step: int) -> None:
    """The same on both; some parameters have none at some steps."""
    generator = torch.Generator().manual_seed(step)
    for index, (mine, full) in enumerate(zip(sharded.parameters(), whole.parameters())):
        gradient = torch.randn(full.shape, generator=generator, dtype=full.dtype).to(full.device)
        is_late = index == 3 and step < 2
        full.grad = None if is_late else gradient
        mine.grad = None if is_late else distribute_tensor(gradient, mine.device_mesh, mine.placements)  # type: ignore[arg-type, attr-defined]


def assembled(values: Any) -> Iterator[tuple[str, Tensor]]:
    """All tensors of a nested dict, sharded ones put together."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from ((f'{key}.{name}', tensor) for name, tensor in assembled(value))
        elif isinstance(value, Tensor):
            yield str(key), value.full_tensor() if isinstance(value, DTensor) else value


def agree(sharded: nn.Module, whole: nn.Module, optimizers: tuple[Optimizer, Optimizer]) -> None:
    """Parameters and state have the same bits."""
    assert differences(dict(assembled(sharded.state_dict())), whole.state_dict()) == []
    mine, full = (dict(assembled(optimizer.state_dict()['state'])) for optimizer in optimizers)
    assert differences(mine, full) == []


@scenario
def fused_steps(here: Here) -> None:
    """Uneven and empty shards, late gradients, skipped steps, a resume in the middle: the bits of one process."""
    for kind, torch_kind, options in OPTIMIZERS:
        sharded, whole = make(here)
        # an lr that is a tensor is changed in place
        first, second = (kind(model.parameters(), **options) for model in (sharded, whole))
        for step in range(6):
            set_gradients(sharded, whole, step)
            # as a GradScaler says it
            for optimizer in (first, second):
                optimizer.grad_scale = torch.tensor(4.0, device=here.device)
                optimizer.found_inf = torch.tensor(float(step == 3), device=here.device)
            before = [value.clone() for _, value in assembled(sharded.state_dict())]
            first.step()
            second.step()
            agree(sharded, whole, (first, second))
            after = [value for _, value in assembled(sharded.state_dict())]
            assert all(map(torch.equal, before, after)) == (step == 3)
            if step == 4:
                saved = get_optimizer_state_dict(sharded, first)
                first = kind(sharded.parameters(), **options)
                set_optimizer_state_dict(sharded, first, saved)
        if 'state_dtype' in options:
            # torch has no such argument, and the DTensors of 2.6 mix up types
            continue
        like = {key: options[key] for key in ('momentum', 'amsgrad') if key in options}
        theirs = torch_kind(sharded.parameters(), lr=0.1, **like)
        theirs.step()
        for parameter in sharded.parameters():
            kinds = {name: type(value) for name, value in theirs.state[parameter].items() if isinstance(value, Tensor)}
            mine = first.state[parameter]
            assert {name: type(mine[name]) for name in kinds} == kinds


@scenario
def fused_refusals(here: Here) -> None:
    """Gradients and state that are not laid out as the parameter: refused on every rank, and nothing changes."""
    sharded, whole = make(here)
    optimizer = FusedAdamW(sharded.parameters())
    set_gradients(sharded, whole, 5)
    optimizer.step()
    before = [(name, value.clone()) for name, value in assembled(sharded.state_dict())]
    parameter = sharded[0].weight
    assert isinstance(parameter, DTensor) and parameter.grad is not None
    gradient, mesh = parameter.grad, parameter.device_mesh
    # torch itself takes no plain gradient for a sharded parameter
    parameter.grad = gradient.redistribute(mesh, [Replicate()])  # type: ignore[attr-defined]
    with pytest.raises(AmpUsageError, match=r'Replicate.*Shard.*redistribute'):
        optimizer.step()
    parameter.grad = gradient
    moment = optimizer.state[parameter]['exp_avg']
    optimizer.state[parameter]['exp_avg'] = moment.full_tensor()
    with pytest.raises(AmpUsageError, match='is a plain tensor and the parameter a DTensor; set_optimizer_state_dict'):
        optimizer.step()
    optimizer.state[parameter]['exp_avg'] = moment
    assert differences(dict(assembled(sharded.state_dict())), dict(before)) == []
    optimizer.step()
    assert differences(dict(assembled(sharded.state_dict())), dict(before)) != []


@scenario
def fused_training(here: Here) -> None:
    """``fully_shard`` with 16-bit copies: the bits of torch's collectives with the update of one process."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(here.device.type, (here.world,))
    sharded, whole = (make_net()[:2].to(here.device) for _ in range(2))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in sharded:
        fully_shard(module, mesh=mesh, mp_policy=policy)
    fully_shard(sharded, mesh=mesh, mp_policy=policy)
    # from then on other optimizers are looked at
    amp.initialize(nn.Linear(2, 2), opt_level='O2', verbosity=0)
    first, second = (FusedAdamW(model.parameters(), lr=0.01) for model in (sharded, whole))
    for step in range(4):
        torch.manual_seed(here.rank + 10 * step)
        sharded(torch.randn(4, 5, device=here.device)).float().square().mean().backward()
        for mine, full in zip(sharded.parameters(), whole.parameters()):
            assert isinstance(mine.grad, DTensor)
            full.grad = mine.grad.full_tensor()
        first.step()
        second.step()
        first.zero_grad()
        if step == 1:
            # torch gives the parameters other memory
            sharded.to(torch.float64).to(torch.float32)
    agree(sharded, whole, (first, second))


@scenario
def one_process_per_shard(here: Here) -> None:
    """All of the above that every torch can do."""
    for each in (fused_steps, fused_refusals):
        print(each.__name__, flush=True)
        each(here)
    dist.barrier()
