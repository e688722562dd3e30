"""Which optimizers are taken: none whose steps cannot be scaled or skipped, and none that steps another model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

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
            'LBFGS evaluates the model several times a step through a closure, which loss scaling and skipped steps '
            'cannot follow: choose a first-order optimizer, or enabled=False.'
        )
    if torch_internals.is_zero(optimizer) and torch_internals.overlaps_with_ddp(optimizer):
        raise AmpAttachError(
            'ZeroRedundancyOptimizer(overlap_with_ddp=True) steps inside of the backward pass, where gradients are scaled and '
            'unchecked: leave overlap_with_ddp out.'
        )


def check_steps_split(optimizer: Optimizer) -> None:
    """Refuse optimizers that would step 16-bit weights without their remainders.

    Raises:
        AmpAttachError: Not one of this package's fused optimizers.
    """
    if not getattr(type(optimizer), 'supports_split_weights', False):
        raise AmpAttachError(
            f"master_weights='split' with {type(optimizer).__name__}: only FusedAdam, FusedAdamW and FusedSGD of amp_wrapper "
            f'step a weight and its remainder together. Use one of them, or master_weights=True.'
        )


def check_shared(
    weights: Sequence[Tensor], others: Iterable[Sequence[Tensor]], names: Mapping[int, str] | None = None
) -> None:
    """Refuse parameters that two optimizers step: which of two loss scales their gradients carry could not be known.

    Args:
        weights: Of one optimizer.
        others: Of each of the others.
        names: Of the model's parameters, by id.

    Raises:
        AmpAttachError: Names the parameters. Nothing has been changed.
    """
    mine = {id(weight): weight for weight in weights}
    both = [weight for other in others for weight in other if id(weight) in mine]
    if both:
        shown = [(names or {}).get(id(weight), f'one of shape {tuple(weight.shape)}') for weight in both]
        raise AmpAttachError(
            f'{len(both)} parameters are stepped by two optimizers ({some(shown)}): give each parameter to one of them; losses '
            f'of the others reach it all the same.'
        )


def check_once(optimizer: Optimizer, weights: Sequence[Tensor], names: Mapping[int, str]) -> None:
    """Refuse an optimizer that has a parameter twice: its gradient would be unscaled twice, and have two masters.

    Raises:
        AmpAttachError: Names the parameters. Nothing has been changed.
    """
    counts = Counter(map(id, weights))
    twice = [names.get(key, f'one with the id {key}') for key, count in counts.items() if count > 1]
    if twice:
        raise AmpAttachError(
            f'{type(optimizer).__name__} has parameters twice ({some(twice)}): give it each of them once, such as '
            f'{{id(p): p for p in parameters}}.values().'
        )


def check_owners(
    optimizers: Sequence[Optimizer],
    models: Sequence[nn.Module],
    elsewhere: Iterable[Tensor] = (),
    is_known: Callable[[Tensor], bool] = lambda parameter: False,
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
        is_known: Whether a parameter belongs to a model that was handed over before.
        casts: Whether weights of the models are about to become 16-bit.

    Raises:
        AmpAttachError: Names the optimizer.
    """
    stepped = set(map(id, (*parameters_of(*optimizers), *elsewhere)))
    weights = {id(parameter): parameter for model in models for parameter in model.parameters()}
    idle = [weight for key, weight in weights.items() if weight.requires_grad and key not in stepped]
    for optimizer in optimizers if idle else ():
        own = parameters_of(optimizer)
        outside = [p for p in own if id(p) not in weights and not is_known(p)]
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
