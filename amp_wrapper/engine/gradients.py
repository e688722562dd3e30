"""The gradients of one optimizer between its backward passes and its step: all that wait carry one scale.

In one of two ways:

* *until the step*: where one loss of one optimizer is all there is. Gradients stay on the weights as backward passes leave
  them, times the loss scale, and the step unscales them.
* *after each pass*: several losses or optimizers, or sums in FP32. What waits carries no scale: it lies at what the optimizer
  steps, in the FP32 masters of 16-bit weights. A pass first brings it to its own scale where it adds to it, and all of it home
  at its end. So it does not matter whose loss reached whose parameters, nor how many losses there are.

A 16-bit weight whose master has the gradient has none itself. What lies there between two passes came without a scale, by a
``backward()`` of the script.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat

import torch
from torch import Tensor, nn

from .. import ops
from ..casting.masters import Masters, StepLists
from ..errors import AmpUsageError
from ..ops import attributes
from ..policy.nested import HALF_TYPES
from ..shards import any_sharded, fitted, local, local_part, whole

NO_GRAPH = (
    'backward(create_graph=True): gradients are unscaled, or made FP32, after the pass, so second derivatives would be those '
    "of the scaled loss. Optimizers that take some (AdaHessian, Sophia) work at opt_level='O4', or at 'O1' with loss_scale=1; "
    'a loss takes gradients by torch.autograd.grad(..., create_graph=True).'
)


class Gradients:
    """The gradients of one optimizer.

    Args:
        params: What it steps, and the weights of the model.
        after_each_pass: Whether they are unscaled after each backward pass, and not by the step.

    Attributes:
        params, after_each_pass: As given.
        in_backward: Whether a pass is under way that may add to them.
        kept_by_fsdp: Where FSDP2 keeps gradients of several passes until one averages them: the loss that they are of, and its
            scale then, a float32 scalar. None where nothing is kept.
    """

    def __init__(self, params: Masters, after_each_pass: bool) -> None:
        self.params = params
        self.after_each_pass = after_each_pass
        self.in_backward = False
        self.kept_by_fsdp: tuple[int, Tensor] | None = None
        # whether sums have not been averaged over the ranks
        self._is_unaveraged = False
        # the masters' gradients while a pass is under way: what it brings to masters themselves carries its scale
        self._aside: list[Tensor | None] = []
        self._versions: list[int] = []

    def __enter__(self) -> None:
        """Begin the pass of one loss of one optimizer: nothing meets anything, so gradients stay as they come."""
        self.drop_stepped()
        self.in_backward = True

    def __exit__(self, *_: object) -> None:
        self.in_backward = False

    # -- around a backward pass ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def begin_pass(self, scale: Tensor | None, is_averaged: bool, found_before: Tensor | None) -> None:
        """A backward pass is about to add to what waits.

        Args:
            scale: That of its loss, a float32 scalar; None for 1.
            is_averaged: Whether DDP averages what lies on the weights afterwards.
            found_before: float32 scalar, above 0 where what waits is non-finite already, by another loss; None for finite. Then
                zeros take its place, for the step will be skipped: so this pass answers for its own infinities alone.
        """
        self.drop_stepped()
        self.in_backward = True
        masters, own = self.params.masters, self.params.without_master()
        for weight, master in zip(self.params.behind_masters, masters) if self._is_unaveraged and is_averaged else ():
            # local sums, rounded, go where DDP looks for gradients: what stayed at the masters would stay on its rank
            if master.grad is not None:
                total = master.grad if scale is None else master.grad * scale
                weight.grad, master.grad = total.to(weight.dtype), None
        self._is_unaveraged = not is_averaged
        self._aside = attributes.gradients(masters)
        attributes.set_gradients(masters, None)
        multiply(own, scale)
        if found_before is not None:
            self.zero_where(found_before)
        self._versions = self._count_writes()

    @torch.no_grad()
    def end_pass(self, scale: Tensor | None, found_inf: Tensor | None) -> bool:
        """A backward pass is over, however it ended.

        Args:
            scale: As for :meth:`begin_pass`.
            found_inf: float32 scalar set to 1.0 where an element is non-finite, in place; None for no check.

        Returns:
            Whether it has brought anything.

        Raises:
            AmpUsageError: It was run with ``create_graph=True``, where a scale or masters are, or gradients share memory. All
                gradients of the optimizer are dropped, as after any error here.
        """
        self.in_backward = False
        has_come, inverse = self._count_writes() != self._versions, None if scale is None else scale.reciprocal()
        weights, masters, own = self.params.behind_masters, self.params.masters, self.params.without_master()
        try:
            changed = [*weights, *masters, *(own if scale is not None else ())]
            if any(grad is not None and grad.requires_grad for grad in attributes.gradients(changed)):
                raise AmpUsageError(NO_GRAPH)
            if has_come:
                multiply(masters, inverse, found_inf)
            if self._aside:
                sums = map(ops.add_gradients, self._aside, attributes.gradients(masters))
                attributes.set_gradients(masters, list(sums))
            self._add_to_masters(inverse, found_inf)
            multiply(own, inverse, found_inf if has_come else None)
        except BaseException:
            # some carry the scale, and some do not
            attributes.set_gradients([*weights, *masters, *own], None)
            raise
        finally:
            self._aside = []
        return has_come

    @torch.no_grad()
    def zero_where(self, flag: Tensor) -> None:
        """Make all of them 0 where a flag, a float32 scalar, is up."""
        for values in values_of([*self.params.parameters(), *self.params.behind_masters]):
            values.masked_fill_(flag.to(values.device) > 0, 0)

    def add_plain(self, found_inf: Tensor | None, is_unaveraged: bool) -> None:
        """Add what lies on weights, without a scale, to their masters' gradients.

        Args:
            found_inf: As for :meth:`end_pass`.
            is_unaveraged: Whether it may not be averaged over the ranks yet.
        """
        self._is_unaveraged = self._is_unaveraged or is_unaveraged
        self.drop_stepped()
        with torch.no_grad():
            self._add_to_masters(None, found_inf)

    @property
    def has_plain(self) -> bool:
        """Whether something lies on weights that carries no scale, and whose masters have the other gradients."""
        return self.after_each_pass and have_any(self.params.behind_masters)

    # -- at a step -----------------------------------------------------------------------------------------------------

    def to_step(self, lists: StepLists) -> list[Tensor | None]:
        """The gradient of each parameter for a fused step, of any floating type, scaled or not; None for none."""
        if self.after_each_pass:
            return attributes.gradients(lists.parameters)
        found, masters = list(map(attributes.GRADIENT, lists.weights)), map(attributes.GRADIENT, self.params.masters)
        if any(map(operator.is_not, masters, repeat(None))):
            # of losses that contain masters themselves
            direct = map(attributes.GRADIENT, lists.parameters)
            return [g if d is g else ops.add_gradients(d, g) for d, g in zip(direct, found)]
        return found

    @torch.no_grad()
    def unscale(self, inverse_scale: Tensor | None, found_inf: Tensor | None) -> None:
        """Bring unscaled gradients to where the optimizer looks for them, for the step of any other optimizer.

        Args:
            inverse_scale: float32 scalar; None for 1.
            found_inf: As for :meth:`end_pass`.
        """
        multiply([*self.params.masters, *self.params.without_master()], inverse_scale, found_inf)
        self._add_to_masters(inverse_scale, found_inf)

    def mark_stepped(self) -> None:
        """A step has used the masters' gradients. Scripts that clear those of weights alone do not know of them."""
        for grad in map(attributes.GRADIENT, self.params.masters):
            if grad is not None:
                grad._amp_stepped = grad._version  # type: ignore[attr-defined]

    def drop_stepped(self) -> None:
        """Drop the masters' gradients that a step has used, unless somebody has written to them since."""
        masters = self.params.masters
        for master, grad in zip(masters, map(attributes.GRADIENT, masters)):
            if grad is not None and getattr(grad, '_amp_stepped', None) == grad._version:
                master.grad = None

    def clear(self, set_to_none: bool) -> None:
        """The optimizer's own were cleared: clear those of the weights behind masters."""
        self._aside, self._is_unaveraged, self.kept_by_fsdp = [], False, None
        if set_to_none:
            attributes.set_gradients(self.params.behind_masters, None)
            return
        for weight, master in zip(self.params.behind_masters, self.params.masters):
            if weight.grad is not None:
                weight.grad.zero_()
                # zeros beside zeros would only cost memory
                master.grad = None

    def _add_to_masters(self, inverse_scale: Tensor | None, found_inf: Tensor | None) -> None:
        """Add the gradients of weights, unscaled, in FP32 to those of their masters; the weights have none afterwards.

        Args:
            inverse_scale: As ``factor`` of :func:`multiply`.
            found_inf: As there; of the weights' gradients alone.

        Raises:
            AmpUsageError: As :func:`multiply`.
        """
        weights, masters = self.params.behind_masters, self.params.masters
        firsts: list[tuple[nn.Parameter, Tensor]] = []
        further: list[tuple[Tensor, Tensor]] = []
        for weight, master, grad, total in zip(weights, masters, *map(attributes.gradients, (weights, masters))):
            # frozen and unfrozen at will: clipping asks the tensor that the optimizer steps
            master.requires_grad = weight.requires_grad
            if grad is None:
                continue
            if grad.is_sparse or (total is not None and total.is_sparse):
                # rows that occur twice are added in FP32: a finite sum that 16-bit cannot hold is no overflow
                wide = grad.to(master.dtype)
                wide = wide.coalesce() if wide.is_sparse else wide
                values = local([wide._values() if wide.is_sparse else wide])
                ops.multi_tensor_scale(values, values, inverse_scale, found_inf)
                master.grad = ops.add_gradients(total, wide)
            elif total is None:
                firsts.append((master, grad))
            else:
                further.append((grad, total))
        with _refused_gradients():
            if further:
                added, sums = map(local, zip(*further))
                ops.multi_tensor_axpby(added, sums, inverse_scale, None, found_inf)
            if firsts:
                chosen, grads = map(list, zip(*firsts))
                targets = attributes.float32_like(grads)
                ops.multi_tensor_scale(local(grads), local(targets), inverse_scale, found_inf)
                attributes.set_gradients(chosen, targets)
        attributes.set_gradients(weights, None)

    # -- who looks at them ---------------------------------------------------------------------------------------------

    def is_there(self) -> bool:
        """Whether there is any."""
        aside = any(grad is not None for grad in self._aside)
        return aside or have_any([*self.params.parameters(), *self.params.behind_masters])

    def save(self, lists: StepLists) -> list[Tensor | None]:
        """Copies of those that wait, in the order of the groups, for a checkpoint."""
        return [None if gradient is None else gradient.detach().clone() for gradient in self.to_step(lists)]

    def restore(self, gradients: Sequence[Tensor | None], lists: StepLists) -> None:
        """Put back what :meth:`save` gave; not changed, and not aliased."""
        for weight, stepped, gradient in zip(lists.weights, lists.parameters, gradients):
            weight.grad = stepped.grad = None
            if gradient is not None:
                # a sum with what a loss has brought to a master itself is FP32, and would be rounded at the weight
                is_wide = self.after_each_pass or gradient.dtype not in HALF_TYPES
                target = stepped if is_wide else weight
                target.grad = fitted(gradient, target)

    def _count_writes(self) -> list[int]:
        found = attributes.gradients([*self.params.parameters(), *self.params.behind_masters])
        # FSDP2 adds to the local shards, behind the back of the counters of whole tensors
        parts = map(local_part, found) if any_sharded(found) else found
        return [-1 if part is None else part._version for part in parts]


# -- lists of gradients ------------------------------------------------------------------------------------------------


def multiply(parameters: Sequence[nn.Parameter], factor: Tensor | None, found_inf: Tensor | None = None) -> None:
    """Multiply gradients in place, each rounded once to its type. Sparse ones are coalesced and stay sparse.

    Args:
        parameters: Those without a gradient are passed over.
        factor: float32 scalar on their device; None for 1.
        found_inf: float32 scalar set to 1.0 where an element was non-finite, in place; None for no check.

    Raises:
        AmpUsageError: A gradient shares memory with another, or has elements that share it. No gradient changes then.
    """
    if (factor is not None or found_inf is not None) and (values := values_of(parameters)):
        places = [value.data_ptr() for value in values if value.numel()]
        with _refused_gradients():
            if len(set(places)) < len(places):
                raise ValueError('two of them begin at one address.')
            ops.multi_tensor_scale(values, values, factor, found_inf)


def have_any(parameters: Sequence[nn.Parameter]) -> bool:
    """Whether one of them has a gradient."""
    return any(map(operator.is_not, map(attributes.GRADIENT, parameters), repeat(None)))


def values_of(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """The elements of the gradients that lie on this rank, as dense tensors that share their memory."""
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()
    found = [grad for grad in attributes.gradients(parameters) if grad is not None]
    return local([grad._values() if grad.is_sparse else grad for grad in found])


@contextlib.contextmanager
def _refused_gradients() -> Iterator[None]:
    """Turn what an op raises about tensors into an :class:`AmpUsageError` about gradients."""
    try:
        yield
    except ValueError as error:
        raise AmpUsageError(
            f'The gradients cannot be unscaled: {error} Each parameter needs a dense or sparse gradient of its own, which '
            'shares memory with no other: parameter.grad = parameter.grad.clone(), where one was put there by hand.'
        ) from error


def nonfinite_names(named: Iterable[tuple[str, Tensor]]) -> list[str]:
    """The names of the parameters whose gradient has a non-finite element. Syncs; collective where gradients are sharded.

    Args:
        named: (name, parameter) pairs.
    """
    found = ((name, parameter.grad) for name, parameter in named if parameter.grad is not None)
    dense = ((name, grad.coalesce()._values() if grad.is_sparse else whole(grad)) for name, grad in found)
    return [name for name, values in dense if not bool(values.isfinite().all())]
