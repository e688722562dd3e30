"""Finds the model inside its wrappers and the modules that one optimizer trains, and refuses what cannot be cast."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import cast

from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import LBFGS, Optimizer

from .. import compiler_internals, graph_internals, torch_internals
from ..errors import AmpAttachError, AmpConfigError
from ..policy.nested import parameters_of


def is_compiled(model: nn.Module) -> bool:
    """Whether a model or a module inside was compiled: in place, by a wrapper, or by a function in place of a method.

    Args:
        model: Any module.
    """
    return any(
        compiler_internals.is_compile_wrapper(module) or graph_internals.keeps_compiled_functions(module)
        for module in model.modules()
    )


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside DDP, DataParallel and ``torch.compile`` wrappers.

    Args:
        model: Any module.

    Raises:
        AmpAttachError: A model in ``FullyShardedDataParallel``, torch's older way to shard.
    """
    for module in model.modules():
        if any('FullyShardedDataParallel' in base.__name__ for base in type(module).__mro__):
            raise AmpAttachError(
                f'FullyShardedDataParallel ({type(module).__name__}) holds flat parameters, in which no level can tell '
                f'modules apart. Use torch.distributed.fsdp.fully_shard, or DistributedDataParallel.'
            )
    while True:
        if isinstance(model, (DataParallel, DistributedDataParallel)):
            model = cast(nn.Module, model.module)
        elif compiler_internals.is_compile_wrapper(model):
            model = compiler_internals.compiled_module(model)
        else:
            return model


def find_roots(
    model: nn.Module, optimizer: Optimizer | None, foreign: Iterable[Tensor] = (), done: Container[int] = ()
) -> list[tuple[str, nn.Module]]:
    """The modules whose inputs and outputs are cast: the model, or its largest parts that one optimizer steps alone.

    Args:
        model: Without wrappers around it.
        optimizer: None (inference) stands for the whole model.
        foreign: Parameters that other optimizers step.
        done: Modules, by id, that another optimizer's engine has cast already: they are left out.

    Returns:
        (qualified name, module) pairs. The model itself where the optimizer steps every trainable parameter and no other
        optimizer steps any; otherwise frozen parts, and those of other optimizers, are left out.

    Raises:
        AmpAttachError: A module with parameters of its own around one that is cast already.
    """
    if optimizer is None:
        return [('', model)]
    owned = set(map(id, parameters_of(optimizer)))
    others = {id(parameter) for parameter in foreign} - owned
    rest = [p for p in model.parameters() if id(p) not in owned]
    alone = not others.intersection(map(id, rest)) and not any(p.requires_grad for p in rest)
    if alone and not any(id(module) in done for module in model.modules()):
        return [('', model)]
    roots: list[tuple[str, nn.Module]] = []
    seen: set[int] = set()

    def descend(module: nn.Module, name: str) -> None:
        for key, child in module.named_children():
            child_name = f'{name}.{key}' if name else key
            parameters = [id(p) for p in child.parameters()]
            inside = unwrap(child)
            if id(child) in seen or not parameters or id(inside) in done:
                continue
            seen.add(id(child))
            if any(id(part) in done for part in child.modules()):
                if owned.intersection(id(p) for p in inside.parameters(recurse=False)):
                    raise AmpAttachError(
                        f'{child_name} ({type(inside).__name__}) has parameters of its own around a module that another '
                        f'wrapper casts: move them into a module of their own, or give the whole to one optimizer.'
                    )
                descend(child, child_name)
                continue
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
        AmpAttachError: LBFGS, or one that steps in the backward pass.
        AmpConfigError: Not an optimizer.
    """
    if not isinstance(optimizer, Optimizer):
        raise AmpConfigError(
            [f'optimizer={optimizer!r} must be a torch.optim.Optimizer, but is {type(optimizer).__name__}.']
        )
    if isinstance(optimizer, LBFGS):
        raise AmpAttachError(
            'LBFGS evaluates the model several times a step through a closure, which loss scaling and skipped steps '
            'cannot follow: choose a first-order optimizer, or enabled=False.'
        )
    if torch_internals.is_zero(optimizer) and torch_internals.overlaps_with_ddp(optimizer):
        raise AmpAttachError(
            'ZeroRedundancyOptimizer(overlap_with_ddp=True) steps inside of the backward pass, where gradients are scaled and '
            'unchecked: leave overlap_with_ddp out.'
        )
