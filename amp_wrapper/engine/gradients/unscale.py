"""Unscales gradients: from scaled ones in ``.grad`` of the model's weights to unscaled ones where the optimizer reads them."""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import repeat

import torch
from torch import Tensor, nn

from ... import ops
from ...errors import AmpUsageError
from ...ops import attributes
from ...shards import local, whole

_requires_grad: Callable[[Tensor], bool] = operator.attrgetter('requires_grad')
_is_sparse: Callable[[Tensor | None], bool] = operator.attrgetter('is_sparse')
_FIRST, _SECOND = operator.itemgetter(0), operator.itemgetter(1)


def unscale_to_masters(
    pairs: Iterable[tuple[nn.Parameter, nn.Parameter]],
    own: Iterable[nn.Parameter],
    inverse_scale: Tensor | None,
    found_inf: Tensor | None,
    fp32_sum: Callable[[Tensor], Tensor | None] | None = None,
) -> None:
    """Bring scaled gradients to where the optimizer looks for them, unscaled.

    Args:
        pairs: (model weight, master): the master's gradient becomes the weight's in FP32, unscaled.
        own: Parameters that the optimizer steps themselves, unscaled in place.
        inverse_scale: float32 scalar, or None for 1.
        found_inf: float32 scalar set to 1.0 where a gradient element is non-finite, in place; None for no check.
        fp32_sum: Gives the FP32 gradient of a weight where it was summed beside ``.grad``, else None. None: there are none.

    Sparse gradients are coalesced and stay sparse.

    Raises:
        AmpUsageError: A gradient shares memory with another, or has elements that share it. No gradient changes then.
    """
    acts = inverse_scale is not None or found_inf is not None
    changes = _Changes([], [], [], [])
    changes.to_masters(list(pairs), found_inf, fp32_sum)
    changes.in_place(own, fp32_sum, acts)
    with refused_gradients():
        ops.multi_tensor_scale(local(changes.sources), local(changes.targets), inverse_scale, found_inf)
    if changes.results:
        attributes.set_gradients(*zip(*changes.results))


@dataclasses.dataclass
class _Changes:
    """What is unscaled, where to, and what becomes of each gradient once nothing can be refused any more.

    Attributes:
        parameters: Those that have a gradient.
        sources: The scaled gradient of each, dense; of a sparse one, its values.
        targets: Where it goes, unscaled; some are the sources themselves.
        results: (parameter, its gradient from then on), for parameters that get another tensor.
    """

    parameters: list[nn.Parameter]
    sources: list[Tensor]
    targets: list[Tensor]
    results: list[tuple[nn.Parameter, Tensor | None]]

    def to_masters(
        self,
        pairs: Sequence[tuple[nn.Parameter, nn.Parameter]],
        found_inf: Tensor | None,
        fp32_sum: Callable[[Tensor], Tensor | None] | None,
    ) -> None:
        """Gradients of weights go to their masters."""
        weights, masters = list(map(_FIRST, pairs)), list(map(_SECOND, pairs))
        if list(map(_requires_grad, weights)) != list(map(_requires_grad, masters)):
            # frozen and unfrozen at will: clipping asks the tensor that the optimizer steps
            for weight, master in pairs:
                master.requires_grad = weight.requires_grad
        found = attributes.gradients(weights)
        is_plain = all(map(operator.is_, map(type, found), repeat(Tensor)))
        if fp32_sum is None and is_plain and not any(map(_is_sparse, found)):
            self.parameters = masters
            self.sources = found  # type: ignore[assignment]
            self.targets = attributes.float32_like(self.sources)
            self.results = list(zip(self.parameters, self.targets))
            return
        for weight, master in pairs:
            gradient, total = weight.grad, None
            if fp32_sum is not None:
                total = fp32_sum(weight)
                gradient = ops.add_gradients(total, gradient)
            if gradient is None:
                self.results.append((master, None))
            elif gradient.is_sparse:
                if found_inf is not None:
                    ops.multi_tensor_isnonfinite([gradient._values()], found_inf)
                # rows that occur twice are summed in FP32: a finite sum that 16-bit cannot hold is no overflow
                summed = gradient.to(master.dtype).coalesce()
                self._add_sparse(master, summed, summed)
            else:
                # a sum of ours becomes the gradient itself: nobody else holds it
                target = gradient if total is not None else torch.empty_like(gradient, dtype=master.dtype)
                self.parameters.append(master)
                self.sources.append(gradient)
                self.targets.append(target)
                self.results.append((master, target))

    def in_place(
        self, parameters: Iterable[nn.Parameter], fp32_sum: Callable[[Tensor], Tensor | None] | None, acts: bool
    ) -> None:
        """Gradients of parameters without masters stay where they are; those that ``acts`` says nothing is done to are left."""
        for parameter in parameters:
            gradient = parameter.grad
            total = None if fp32_sum is None else fp32_sum(parameter)
            if total is not None:
                # without masters the optimizer reads 16-bit: rounded once, after the unscaling
                gradient = ops.add_gradients(total, gradient)
                assert gradient is not None
                if gradient.is_sparse:
                    gradient = gradient.coalesce()
                    self._add_sparse(parameter, gradient, gradient.to(parameter.dtype).coalesce())
                    continue
                target = torch.empty_like(parameter)
                self.results.append((parameter, target))
            elif gradient is None or not acts:
                continue
            elif gradient.is_sparse:
                gradient = gradient.coalesce()
                self._add_sparse(parameter, gradient, gradient)
                continue
            else:
                target = gradient
            self.parameters.append(parameter)
            self.sources.append(gradient)
            self.targets.append(target)

    def _add_sparse(self, parameter: nn.Parameter, gradient: Tensor, result: Tensor) -> None:
        self.parameters.append(parameter)
        self.sources.append(gradient._values())
        self.targets.append(result._values())
        self.results.append((parameter, result))


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


def check_no_graph(parameters: Sequence[Tensor]) -> None:
    """Refuse gradients that can be differentiated, of parameters whose gradients are about to be unscaled or made FP32.

    Raises:
        AmpUsageError: One of them is of a ``backward(create_graph=True)``.
    """
    if attributes.any_requires_grad(attributes.gradients(parameters)):
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
    pairs, own = list(pairs), list(own)
    if not before and not any(map(operator.is_not, attributes.gradients(list(map(_SECOND, pairs))), repeat(None))):
        # the first of a sum
        unscale_to_masters(pairs, own, inverse_scale, found_inf)
        return
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
    if added:
        with refused_gradients():
            ops.multi_tensor_axpby(
                local(added), local(sums), local(targets), inverse_scale, None, found_inf, check_y=False
            )

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
    """The names of the parameters whose gradient has a non-finite element. Syncs; collective where gradients are sharded.

    Args:
        named: (name, parameter) pairs.
    """
    bad = []
    for name, parameter in named:
        grad = parameter.grad
        if grad is not None:
            values = grad.coalesce()._values() if grad.is_sparse else whole(grad)
            if not bool(values.isfinite().all()):
                bad.append(name)
    return bad
