"""Unscales lists of gradients: in place, or into the FP32 gradients of masters."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat

from torch import Tensor, nn

from .. import ops
from ..errors import AmpUsageError
from ..ops import attributes
from ..shards import local, whole

_requires_grad: Callable[[Tensor], bool] = operator.attrgetter('requires_grad')

NO_GRAPH = (
    'backward(create_graph=True): gradients are unscaled, or made FP32 for the masters, after the backward pass, and their '
    'graph does not know of it: second derivatives would be those of the scaled loss. An optimizer that differentiates '
    "gradients (AdaHessian, Sophia) works without scale and masters, at opt_level='O4', or at 'O1' with loss_scale=1. A loss "
    'that contains gradients takes them by torch.autograd.grad(..., create_graph=True).'
)


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
        with _refused_gradients():
            ops.multi_tensor_scale(values, values, factor, found_inf)


def have_any(parameters: Sequence[nn.Parameter]) -> bool:
    """Whether one of them has a gradient."""
    return any(map(operator.is_not, attributes.gradients(parameters), repeat(None)))


def values_of(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """The elements of the gradients that lie on this rank, as dense tensors that share their memory."""
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()
    found = [grad for grad in attributes.gradients(parameters) if grad is not None]
    return local([grad._values() if grad.is_sparse else grad for grad in found])


def add_to_masters(
    weights: Sequence[nn.Parameter],
    masters: Sequence[nn.Parameter],
    inverse_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    """Add the gradients of weights, unscaled, in FP32 to those of their masters; the weights have none afterwards.

    Args:
        weights: Those without a gradient are passed over.
        masters: Of each.
        inverse_scale: As ``factor`` of :func:`multiply`.
        found_inf: As there; of the weights' gradients alone.

    Raises:
        AmpUsageError: As :func:`multiply`.
    """
    if list(map(_requires_grad, weights)) != list(map(_requires_grad, masters)):
        # frozen and unfrozen at will: clipping asks the tensor that the optimizer steps
        for weight, master in zip(weights, masters):
            master.requires_grad = weight.requires_grad
    firsts: tuple[list[nn.Parameter], list[Tensor]] = [], []
    further: tuple[list[Tensor], list[Tensor]] = [], []
    for master, grad, total in zip(masters, attributes.gradients(weights), attributes.gradients(masters)):
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
            firsts[0].append(master)
            firsts[1].append(grad)
        else:
            further[0].append(grad)
            further[1].append(total)
    with _refused_gradients():
        if further[0]:
            added, sums = map(local, further)
            ops.multi_tensor_axpby(added, sums, inverse_scale, None, found_inf)
        if firsts[0]:
            targets = attributes.float32_like(firsts[1])
            ops.multi_tensor_scale(local(firsts[1]), local(targets), inverse_scale, found_inf)
            attributes.set_gradients(firsts[0], targets)
    attributes.set_gradients(weights, None)


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
