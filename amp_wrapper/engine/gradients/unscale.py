"""Unscales gradients: from scaled ones in ``.grad`` of the model's weights to unscaled ones where the optimizer reads them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from ... import ops
from ...errors import AmpUsageError


def unscale_to_masters(
    pairs: Iterable[tuple[nn.Parameter, nn.Parameter]],
    own: Iterable[nn.Parameter],
    inverse_scale: Tensor | None,
    found_inf: Tensor | None,
    fp32_sum: Callable[[Tensor], Tensor | None] = lambda weight: None,
    norm: bool = False,
) -> Tensor | None:
    """Bring scaled gradients to where the optimizer looks for them, unscaled.

    Args:
        pairs: (model weight, master): the master's gradient becomes the weight's in FP32, unscaled.
        own: Parameters that the optimizer steps themselves, unscaled in place.
        inverse_scale: float32 scalar, or None for 1.
        found_inf: float32 scalar set to 1.0 where a gradient element is non-finite, in place; None for no check.
        fp32_sum: Gives the FP32 gradient of a weight where it was summed beside ``.grad``, else None.
        norm: Whether to find the Euclidean norm in the same pass.

    Sparse gradients are coalesced and stay sparse.

    Returns:
        The norm of the unscaled gradients, a float32 scalar, where it was asked for; None where it would leave something out or
        count something in that is not clipped: sparse gradients, frozen parameters, and those that were not unscaled.

    Raises:
        AmpUsageError: A gradient shares memory with another, or has elements that share it. No gradient changes then.
    """
    sources: list[Tensor] = []
    targets: list[Tensor] = []
    # what becomes of each gradient, once nothing can be refused any more
    results: list[tuple[nn.Parameter, Tensor | None]] = []
    for weight, master in pairs:
        # frozen and unfrozen at will: clipping asks the tensor that the optimizer steps
        master.requires_grad = weight.requires_grad
        total = fp32_sum(weight)
        gradient = ops.add_gradients(total, weight.grad)
        if gradient is None:
            results.append((master, None))
        elif gradient.is_sparse:
            if found_inf is not None:
                ops.multi_tensor_isnonfinite([gradient._values()], found_inf)
            # rows that occur twice are summed in FP32: a finite sum that 16-bit cannot hold is no overflow
            summed = gradient.to(master.dtype).coalesce()
            results.append((master, summed))
            sources.append(summed._values())
            targets.append(summed._values())
        else:
            # a sum of ours becomes the gradient itself: nobody else holds it
            target = gradient if total is not None else torch.empty_like(gradient, dtype=master.dtype)
            results.append((master, target))
            sources.append(gradient)
            targets.append(target)
    for parameter in own:
        total = fp32_sum(parameter)
        if total is not None:
            # without masters the optimizer reads 16-bit: rounded once, after the unscaling
            gradient = ops.add_gradients(total, parameter.grad)
            assert gradient is not None
            if gradient.is_sparse:
                gradient = gradient.coalesce()
                rounded = gradient.to(parameter.dtype).coalesce()
                results.append((parameter, rounded))
                sources.append(gradient._values())
                targets.append(rounded._values())
            else:
                target = torch.empty_like(parameter)
                results.append((parameter, target))
                sources.append(gradient)
                targets.append(target)
        elif parameter.grad is not None and (inverse_scale is not None or found_inf is not None):
            gradient = parameter.grad.coalesce() if parameter.grad.is_sparse else parameter.grad
            values = gradient._values() if gradient.is_sparse else gradient
            results.append((parameter, gradient))
            sources.append(values)
            targets.append(values)
    everything = all(
        result is None or (result.layout is torch.strided and parameter.requires_grad) for parameter, result in results
    ) and (inverse_scale is not None or found_inf is not None)
    total_norm = None
    with refused_gradients():
        if norm and everything and sources:
            total_norm = ops.multi_tensor_scale_l2norm(sources, targets, inverse_scale, found_inf)
        else:
            ops.multi_tensor_scale(sources, targets, inverse_scale, found_inf)
    for parameter, result in results:
        parameter.grad = result
    return total_norm


@contextlib.contextmanager
def refused_gradients() -> Iterator[None]:
    """Turn what an op raises about tensors into an :class:`AmpUsageError` about gradients."""
    try:
        yield
    except ValueError as error:
        raise AmpUsageError(
            f'The gradients cannot be unscaled: {error} Each parameter needs a dense or sparse gradient of its own, which '
            'shares memory with no other: parameter.grad = parameter.grad.clone(), where one was put there by hand.'
        ) from error


NO_GRAPH = (
    'backward(create_graph=True): gradients are unscaled, or made FP32 for the masters, after the backward pass, and their '
    'graph does not know of it: second derivatives would be those of the scaled loss. An optimizer that differentiates '
    "gradients (AdaHessian, Sophia) works without scale and masters, at opt_level='O4', or at 'O1' with loss_scale=1. A loss "
    'that contains gradients takes them by torch.autograd.grad(..., create_graph=True).'
)


def check_no_graph(parameters: Iterable[Tensor]) -> None:
    """Refuse gradients that can be differentiated, of parameters whose gradients are about to be unscaled or made FP32.

    Raises:
        AmpUsageError: One of them is of a ``backward(create_graph=True)``.
    """
    if any(parameter.grad is not None and parameter.grad.requires_grad for parameter in parameters):
        raise AmpUsageError(NO_GRAPH)


def accumulate_unscaled(
    pairs: Iterable[tuple[nn.Parameter, nn.Parameter]],
    own: Iterable[nn.Parameter],
    before: Mapping[int, Tensor],
    inverse_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    """Add the gradients of one backward pass to what earlier ones left, each unscaled by its own scale.

    Args:
        pairs: (model weight, master): sums live in the master's gradient, in FP32; the weight's stays as it is.
        own: Parameters whose gradient holds only this pass; the sum takes its place.
        before: What the ``own`` gradients were before this pass, by ``id`` of the parameter.
        inverse_scale: float32 scalar, or None for 1.
        found_inf: As in :func:`unscale_to_masters`.
    """
    added: list[Tensor] = []
    sums: list[Tensor] = []
    other_pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
    for weight, master in pairs:
        if weight.grad is not None and master.grad is not None and _are_dense(weight.grad, master.grad):
            master.requires_grad = weight.requires_grad
            added.append(weight.grad)
            sums.append(master.grad)
        else:
            other_pairs.append((weight, master))
    other_own: list[nn.Parameter] = []
    targets = list(sums)
    for parameter in own:
        earlier = before.get(id(parameter))
        if parameter.grad is not None and earlier is not None and _are_dense(parameter.grad, earlier):
            added.append(parameter.grad)
            sums.append(earlier)
            # the earlier sum may be held by somebody else
            targets.append(parameter.grad)
        else:
            other_own.append(parameter)
    with refused_gradients():
        ops.multi_tensor_axpby(added, sums, targets, inverse_scale, None, found_inf, check_y=False)

    # sparse gradients, and the first of a sum
    earlier_sums = {id(master): master.grad for _, master in other_pairs if master.grad is not None}
    unscale_to_masters(other_pairs, other_own, inverse_scale, found_inf)
    for _, master in other_pairs:
        master.grad = ops.add_gradients(earlier_sums.get(id(master)), master.grad)
    for parameter in other_own:
        parameter.grad = ops.add_gradients(before.get(id(parameter)), parameter.grad)


def _are_dense(*tensors: Tensor) -> bool:
    return not any(tensor.is_sparse for tensor in tensors)


def nonfinite_names(named: Iterable[tuple[str, Tensor]]) -> list[str]:
    """The names of the parameters whose gradient has a non-finite element. Syncs.

    Args:
        named: (name, parameter) pairs.
    """
    bad = []
    for name, parameter in named:
        grad = parameter.grad
        if grad is not None:
            values = grad.coalesce()._values() if grad.is_sparse else grad
            if not bool(values.isfinite().all()):
                bad.append(name)
    return bad
