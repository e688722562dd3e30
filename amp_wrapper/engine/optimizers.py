"""What the engine has to know of optimizers: which are taken, how each skips a step, and who stands before its methods."""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any
from weakref import ref

from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Optimizer

from .. import shards
from ..compiler_internals import untraced
from ..errors import AmpAttachError, AmpConfigError
from ..optim.fused import FusedOptimizer
from ..policy.nested import parameters_of
from ..torch_internals import is_zero, overlaps_with_ddp

# -- which are taken ---------------------------------------------------------------------------------------------------


def check_optimizer(optimizer: Optimizer, splits: bool) -> None:
    """Refuse optimizers whose steps cannot be scaled or skipped, or would step 16-bit weights without their remainders.

    Args:
        optimizer: What was handed over.
        splits: Whether weights have remainders.

    Raises:
        AmpAttachError: LBFGS, or one that steps in the backward pass; with remainders, all but this package's fused ones.
        AmpConfigError: Not an optimizer.
    """
    if not isinstance(optimizer, Optimizer):
        raise AmpConfigError([f'optimizer={optimizer!r} must be a torch.optim.Optimizer.'])
    if isinstance(optimizer, LBFGS):
        raise AmpAttachError('LBFGS calls the model several times a step, beside any loss scale: write enabled=False.')
    if is_zero(optimizer) and overlaps_with_ddp(optimizer):
        raise AmpAttachError('ZeroRedundancyOptimizer(overlap_with_ddp=True) steps scaled gradients: leave it out.')
    if splits and not getattr(type(optimizer), 'supports_split_weights', False):
        raise AmpAttachError(
            f"master_weights='split' with {type(optimizer).__name__}: take FusedAdam, FusedAdamW or FusedSGD, or write True."
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


# -- how they skip a step ----------------------------------------------------------------------------------------------


def takes_flag(optimizer: Optimizer) -> bool:
    """Whether the optimizer skips a step by itself where ``found_inf`` says so, reading it on the device.

    That is GradScaler's protocol. torch's fused SGD is left out: a skipped first step leaves memory that nobody wrote as the
    momentum.
    """
    reads = bool(getattr(optimizer, '_step_supports_amp_scaling', False))
    if not reads or isinstance(optimizer, FusedOptimizer):
        return reads
    return not isinstance(optimizer, SGD) and all(group.get('fused', True) for group in optimizer.param_groups)


# -- calls of their methods --------------------------------------------------------------------------------------------


@untraced
def _call_front(front: Callable[..., Any], function: Any, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    # no function of one optimizer is untraced itself: before 2.13, torch lets such a function hold itself
    return front(function.__get__(optimizer), *args, **kwargs)


def put_in_front(optimizer: Optimizer, name: str, front: Callable[..., Any]) -> None:
    """Let calls of a method of one optimizer lead through a function.

    Around the step of one inside (SAM's base optimizer) the outer one does its work, in methods that this package does not
    know, and with closures that run in the middle. So the inner ``step`` is where gradients are used: taken or skipped.

    Args:
        optimizer: The method becomes an attribute of the object, which torch neither pickles nor copies: its class, its saved
            form and every copy are those of a plain optimizer. Schedulers that came before stay inside, those that come later
            go around.
        name: Of the method.
        front: Takes the optimizer's own method, and the arguments of a call.
    """
    own: Any = getattr(optimizer, name)
    # a scheduler's wrapper is a function of its own, without the object
    function: Any = own.__func__ if getattr(own, '__self__', None) is optimizer else staticmethod(own)

    # a bound method would keep its object alive, in which it lies
    owner: Any = ref(optimizer)

    @functools.wraps(getattr(own, '__func__', own))
    def method(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        return _call_front(front, function, self, args, kwargs)

    @functools.wraps(method)
    def bound(*args: Any, **kwargs: Any) -> Any:
        return method(owner(), *args, **kwargs)

    # torch's schedulers wrap the function that they find there
    vars(bound).update(__func__=method, __signature__=inspect.signature(own))
    setattr(optimizer, name, bound)


def inside(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizers that another one holds as attributes, and that step its very groups; theirs too, outermost first."""
    found, groups = [optimizer], list(map(id, optimizer.param_groups))
    # it grows meanwhile; two may hold each other
    for each in found:
        for value in vars(each).values():
            if isinstance(value, Optimizer) and value not in found and list(map(id, value.param_groups)) == groups:
                found.append(value)
    return found[1:]
