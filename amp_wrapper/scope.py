"""What an engine is responsible for: the model inside its wrappers, the modules of one optimizer, and what is refused."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import LBFGS, Optimizer

from .errors import AmpAttachError


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside DDP, DataParallel and ``torch.compile`` wrappers.

    Args:
        model: Any module.

    Raises:
        AmpAttachError: A sharded model (FSDP, FSDP2, DTensor parameters).
    """
    for module in model.modules():
        if 'FullyShardedDataParallel' in type(module).__name__:
            raise AmpAttachError(
                f'FSDP ({type(module).__name__}): sharded parameters cannot be cast in place, and sharding is not supported '
                f'yet. Use DistributedDataParallel.'
            )
    for name, parameter in model.named_parameters():
        if type(parameter.data).__name__ == 'DTensor':
            raise AmpAttachError(
                f'parameter {name!r} is a DTensor: sharded parameters cannot be cast in place, and sharding '
                f'(fully_shard, tensor parallelism) is not supported yet. Use DistributedDataParallel.'
            )
    while True:
        if isinstance(model, (DataParallel, DistributedDataParallel)):
            model = cast(nn.Module, model.module)
        elif hasattr(model, '_orig_mod'):
            model = cast(nn.Module, model._orig_mod)
        else:
            return model


def find_roots(
    model: nn.Module, optimizer: Optimizer | None, foreign: Iterable[Tensor] = ()
) -> list[tuple[str, nn.Module]]:
    """The modules whose inputs and outputs are cast: the model, or the largest parts one optimizer owns alone.

    Args:
        model: Without wrappers around it.
        optimizer: None (inference) stands for the whole model.
        foreign: Parameters that other optimizers step.

    Returns:
        (qualified name, module) pairs. The model itself where the optimizer owns every trainable parameter and nobody
        else owns any; otherwise frozen and foreign parts are left out.
    """
    if optimizer is None:
        return [('', model)]
    owned = {id(parameter) for group in optimizer.param_groups for parameter in group['params']}
    others = {id(parameter) for parameter in foreign} - owned
    rest = [p for p in model.parameters() if id(p) not in owned]
    if not others.intersection(map(id, rest)) and not any(p.requires_grad for p in rest):
        return [('', model)]
    roots: list[tuple[str, nn.Module]] = []
    seen: set[int] = set()

    def descend(module: nn.Module, name: str) -> None:
        for key, child in module.named_children():
            child_name = f'{name}.{key}' if name else key
            parameters = [id(p) for p in child.parameters()]
            if id(child) in seen or not parameters:
                continue
            seen.add(id(child))
            inside = unwrap(child)
            # a list or dict of modules has no forward of its own
            if owned.issuperset(parameters) and not isinstance(inside, (nn.ModuleList, nn.ModuleDict)):
                roots.append((child_name, inside))
            else:
                descend(child, child_name)

    descend(model, '')
    return roots


def check_optimizer(optimizer: Optimizer) -> None:
    """Refuse optimizers whose steps cannot be scaled or skipped.

    Raises:
        AmpAttachError: Not an optimizer, LBFGS, or one that shards its state.
    """
    if not isinstance(optimizer, Optimizer):
        raise AmpAttachError(
            f'optimizer={optimizer!r} must be a torch.optim.Optimizer, but is {type(optimizer).__name__}.'
        )
    if isinstance(optimizer, LBFGS):
        raise AmpAttachError(
            'LBFGS evaluates the model several times a step through a closure, which loss scaling and skipped steps '
            'cannot follow: choose a first-order optimizer, or enabled=False.'
        )
    if type(optimizer).__name__ == 'ZeroRedundancyOptimizer':
        raise AmpAttachError(
            'ZeroRedundancyOptimizer shards its parameters over processes and saves collectively, while mmengine saves '
            'on rank 0 alone; it is not supported yet. Use a torch optimizer with DistributedDataParallel.'
        )
