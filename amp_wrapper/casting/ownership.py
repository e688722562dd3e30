"""Checks that an optimizer steps the model that it was handed over with, and not a copy of it or another one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import AmpAttachError
from ..policy.nested import parameters_of
from ..shards import any_sharded, is_sharded


def check_owners(
    optimizers: Sequence[Optimizer],
    models: Sequence[nn.Module],
    elsewhere: Iterable[Tensor] = (),
    is_known: Callable[[Tensor], bool] = lambda parameter: False,
    casts: bool = False,
) -> None:
    """Refuse an optimizer that steps nothing of the models, where its parameters look like those of a model.

    Parameters outside of any model are no mistake by themselves: temperatures, weights of losses, centres of a loss module,
    images. It is one where weights of the models are trained by nobody, and

    - they have the shapes that the optimizer's parameters have: it was made from a copy, or before the model was built anew;
    - they have exactly the shapes of those that are not the model's, where some are: a copy of an initialised pair, whose
      masters are copies as well, or a model of which a part was replaced;
    - or nobody steps any weight of the models, and the optimizer has several parameters: it is that of another model;
    - or they share memory with the optimizer's parameters, and a cast is about to give them memory of their own.

    Args:
        optimizers: Those handed over.
        models: Those handed over; without any, all is well.
        elsewhere: What other optimizers step.
        is_known: Whether a parameter belongs to a model that was handed over before.
        casts: Whether weights of the models are about to become 16-bit.

    Raises:
        AmpAttachError: Names the optimizer.
    """
    for model in models:
        _check_built_later(model, optimizers)
    stepped = set(map(id, (*parameters_of(*optimizers), *elsewhere)))
    weights = {id(parameter): parameter for model in models for parameter in model.parameters()}
    idle = [weight for key, weight in weights.items() if weight.requires_grad and key not in stepped]
    if not idle:
        return
    nobody = not stepped.intersection(weights)
    for optimizer in optimizers:
        parameters = parameters_of(optimizer)
        outside = [p for p in parameters if id(p) not in weights and not is_known(p)]
        if casts and any(_share_memory(p, weight) for p in outside for weight in idle):
            raise AmpAttachError(
                f'{type(optimizer).__name__} steps parameters that share memory with weights of the model, such as one flat '
                f'parameter for all, and not the weights: the cast to 16-bit gives these memory of their own, and they would '
                f'not be trained. Make the optimizer from model.parameters(), or train at O4 or O1, which cast no weights.'
            )
        if 1 < len(outside) < len(parameters) and _shapes(outside) == _shapes(idle):
            raise AmpAttachError(
                f'{type(optimizer).__name__} steps {len(outside)} parameters that do not belong to the model, and as many of '
                f'the same shapes in the model are stepped by nobody: these would not be trained. The optimizer was copied '
                f'together with an initialised model, or made before a part of the model was replaced. Make it from '
                f'model.parameters() of the very model that is handed over, and load a state dict into it.'
            )
        if not parameters or len(outside) < len(parameters):
            continue
        if _is_copy(parameters, idle) or (nobody and _is_model(parameters)):
            raise AmpAttachError(
                f'{type(optimizer).__name__} steps {len(parameters)} parameters, and none of them belongs to the model: '
                f'nothing of it would be trained. The optimizer was made from another copy of the model, or before the model '
                f'was built anew (copy.deepcopy, SyncBatchNorm.convert_sync_batchnorm, a replaced part). Make it from '
                f'model.parameters() of the very model that is handed over. Freeze a model that is not '
                f'to be trained: model.requires_grad_(False).'
            )


def _check_built_later(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Refuse optimizers that were built before the model was sharded."""
    weights = list(model.parameters())
    if not any_sharded(weights):
        return
    mine = set(map(id, weights))
    shapes = {tuple(weight.shape) for weight in weights}
    for optimizer in optimizers:
        parameters = parameters_of(optimizer)
        lost = [p for p in parameters if id(p) not in mine and not is_sharded(p) and tuple(p.shape) in shapes]
        if lost and len(lost) == len(parameters):
            raise AmpAttachError(
                f'{type(optimizer).__name__} was built before the model was sharded: its {len(lost)} parameters are whole ones '
                f'that the model does not use any more. Call fully_shard first, and then build the optimizer from '
                f'model.parameters(); or leave fully_shard out and write amp.initialize(model, optimizer, ..., mesh=mesh).'
            )


def _share_memory(one: Tensor, other: Tensor) -> bool:
    starts = one.data_ptr(), other.data_ptr()
    # there is no address on meta, and none of shards
    return all(starts) and starts[0] < starts[1] + other.nbytes and starts[1] < starts[0] + one.nbytes


def _shapes(tensors: Sequence[Tensor]) -> Counter[tuple[int, ...]]:
    return Counter(tuple(tensor.shape) for tensor in tensors)


def _is_copy(parameters: Sequence[Tensor], idle: Sequence[Tensor]) -> bool:
    shapes, theirs = _shapes(parameters), _shapes(idle)
    return shapes <= theirs and (len(parameters) > 1 or shapes == theirs)


def _is_model(parameters: Sequence[Tensor]) -> bool:
    return len(parameters) > 1 and all(isinstance(parameter, nn.Parameter) for parameter in parameters)
