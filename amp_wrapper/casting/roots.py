"""Finds the model inside its wrappers and the modules that one optimizer trains, and refuses what cannot be cast."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TypeGuard

from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from ..compiler_internals import compiled_module, keeps_compiled_functions
from ..errors import AmpAttachError
from ..policy.nested import parameters_of


def is_compiled(model: nn.Module) -> bool:
    """Whether a model or a module inside was compiled: in place, by a wrapper, or by a function in place of a method.

    Args:
        model: Any module.
    """
    return any(compiled_module(each) is not None or keeps_compiled_functions(each) for each in model.modules())


def is_parallel(module: nn.Module) -> TypeGuard[DataParallel[nn.Module] | DistributedDataParallel]:
    """Whether a module is a wrapper that runs a model on several devices.

    Args:
        module: Any module.
    """
    return isinstance(module, (DataParallel, DistributedDataParallel))


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside DDP, DataParallel and ``torch.compile`` wrappers.

    Args:
        model: Any module.

    Raises:
        AmpAttachError: A model in ``FullyShardedDataParallel``, torch's older way to shard.
    """
    if any(base.__name__ == 'FullyShardedDataParallel' for module in model.modules() for base in type(module).__mro__):
        raise AmpAttachError(
            'FullyShardedDataParallel holds flat parameters, in which no level can tell modules apart. Use '
            'torch.distributed.fsdp.fully_shard, or DistributedDataParallel.'
        )
    inside = model.module if is_parallel(model) else compiled_module(model)
    return model if inside is None else unwrap(inside)


def find_roots(
    model: nn.Module, optimizer: Optimizer | None, foreign: Iterable[Tensor] = (), done: Collection[int] = ()
) -> list[tuple[str, nn.Module]]:
    """The modules whose inputs and outputs are cast: the model, or its largest parts that one optimizer steps alone.

    Args:
        model: Without wrappers around it.
        optimizer: None (inference) stands for the whole model.
        foreign: Parameters that other optimizers step.
        done: Modules, by id, that another optimizer's engine has cast already: they are left out.

    Returns:
        (qualified name, module) pairs. The model itself where the optimizer steps every trainable parameter and no other
        optimizer steps any; otherwise frozen parts, those of other optimizers, and parameters beside them are left out.
    """
    if optimizer is None:
        return [('', model)]
    owned, others = set(map(id, parameters_of(optimizer))), set(map(id, foreign))
    is_alone = all(id(p) in owned or not (p.requires_grad or id(p) in others) for p in model.parameters())
    if is_alone and not any(id(module) in done for module in model.modules()):
        return [('', model)]
    roots: list[tuple[str, nn.Module]] = []
    # modules of the roots, and the model, which is none
    inside = {id(model)}
    for name, module in model.named_modules():
        parameters, parts = set(map(id, module.parameters())), set(map(id, module.modules()))
        part = unwrap(module)
        if id(module) in inside or not parameters or id(part) in done:
            continue
        if not parts.isdisjoint(done):
            if not owned.isdisjoint(map(id, part.parameters(recurse=False))):
                raise AmpAttachError(
                    f'{name} ({type(part).__name__}) has parameters of its own around a module that another wrapper casts: '
                    f'move them into a module of their own, or give the whole to one optimizer.'
                )
        # a list or dict of modules has no forward of its own
        elif parameters <= owned and not isinstance(part, (nn.ModuleList, nn.ModuleDict)):
            roots.append((name, part))
            inside |= parts
    return roots
