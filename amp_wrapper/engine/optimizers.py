"""Which optimizers are taken: none whose steps cannot be scaled or skipped, and none that steps another model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence

from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from .. import shards, torch_internals
from ..errors import AmpAttachError, AmpConfigError, some
from ..policy.nested import parameters_of


def check_optimizer(optimizer: Optimizer) -> None:
    """Refuse optimizers whose steps cannot be scaled or skipped.

    Raises:
        AmpAttachError: LBFGS, or one that steps in the backward pass.
        AmpConfigError: Not an optimizer.
    """
    if not isinstance(optimizer, Optimizer):
        raise AmpConfigError([f'optimizer={optimizer!r} must be a torch.optim.Optimizer.'])
    if isinstance(optimizer, LBFGS):
        raise AmpAttachError(
            'LBFGS evaluates the model several times a step, beside any loss scale: choose another, or enabled=False.'
        )
    if torch_internals.is_zero(optimizer) and torch_internals.overlaps_with_ddp(optimizer):
        raise AmpAttachError(
            'ZeroRedundancyOptimizer(overlap_with_ddp=True) steps scaled gradients: leave overlap_with_ddp out.'
        )


def check_steps_split(optimizer: Optimizer) -> None:
    """Refuse optimizers that would step 16-bit weights without their remainders.

    Raises:
        AmpAttachError: Not one of this package's fused optimizers.
    """
    if not getattr(type(optimizer), 'supports_split_weights', False):
        raise AmpAttachError(
            f"master_weights='split' with {type(optimizer).__name__}: take FusedAdam, FusedAdamW or FusedSGD, or write True."
        )


def check_once(stepped: Sequence[Sequence[Tensor]], names: Mapping[int, str]) -> None:
    """Refuse parameters that are stepped twice, by two optimizers or by one.

    Which of two loss scales their gradients carry could not be known; in one, they would be unscaled twice, and have two
    masters.

    Args:
        stepped: The weights of each optimizer.
        names: Of the model's parameters, by id.

    Raises:
        AmpAttachError: Names the parameters. Nothing has been changed.
    """
    found = {id(weight): weight for weights in stepped for weight in weights}
    counts = Counter(id(weight) for weights in stepped for weight in weights)
    twice = [names.get(key, f'one of shape {tuple(found[key].shape)}') for key, count in counts.items() if count > 1]
    if twice:
        raise AmpAttachError(
            f'{len(twice)} parameters are stepped by two optimizers, or twice by one ({some(twice)}): give each of them once, '
            f'{{id(p): p for p in parameters}}.values(), and to one optimizer; losses of the others reach it all the same.'
        )


def check_owners(
    optimizers: Sequence[Optimizer],
    models: Sequence[nn.Module],
    elsewhere: Iterable[Tensor] = (),
    known: Container[int] = (),
    casts: bool = False,
) -> None:
    """Refuse optimizers that were made from another model, or from a copy, while weights of the models are trained by nobody.

    Parameters outside of any model are no mistake by themselves: temperatures, weights of losses, centres, images. They are
    where an optimizer has several of them and nothing else, and nobody steps any weight of the models, or none of their shapes;
    or where they share memory with weights that nobody steps, and a cast is about to end that.

    Args:
        optimizers: Those handed over.
        models: Those handed over; without any, all is well.
        elsewhere: What other optimizers step.
        known: The parameters, by id, of models that were handed over before.
        casts: Whether weights of the models are about to become 16-bit.

    Raises:
        AmpAttachError: Names the optimizer.
    """
    stepped = set(map(id, (*parameters_of(*optimizers), *elsewhere)))
    weights = {id(parameter): parameter for model in models for parameter in model.parameters()}
    idle = [weight for key, weight in weights.items() if weight.requires_grad and key not in stepped]
    for optimizer in optimizers if idle else ():
        own = parameters_of(optimizer)
        outside = [p for p in own if id(p) not in weights and id(p) not in known]
        shapes, theirs = Counter(p.shape for p in outside), Counter(weight.shape for weight in idle)
        is_alone = len(outside) == len(own) and all(isinstance(p, nn.Parameter) for p in own)
        is_copy = shapes == theirs or (is_alone and (shapes <= theirs or stepped.isdisjoint(weights)))
        shares_memory = casts and any(_share_memory(p, weight) for p in outside for weight in idle)
        if shares_memory or (len(outside) > 1 and is_copy):
            why = 'It was made from a copy of the model, copied with an initialised one, or made before a part was replaced.'
            if shares_memory:
                why = 'They share memory with weights of the model, which the cast to 16-bit ends: O4 and O1 cast no weights.'
            elif shards.any_sharded(idle) and not shards.any_sharded(outside):
                why = 'It was built before the model was sharded: call fully_shard first, or amp.initialize(..., mesh=mesh).'
            raise AmpAttachError(
                f'{type(optimizer).__name__} steps {len(outside)} parameters that do not belong to the model, of which '
                f'{len(idle)} weights would be trained by nobody. {why} Make it from model.parameters() of the very model that '
                f'is handed over, and load a state dict into it; freeze what is not to be trained, by requires_grad_(False).'
            )


def _share_memory(one: Tensor, other: Tensor) -> bool:
    starts = one.data_ptr(), other.data_ptr()
    # there is no address on meta, and none of shards
    return all(starts) and starts[0] < starts[1] + other.nbytes and starts[1] < starts[0] + one.nbytes
