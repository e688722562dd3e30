"""Gradients between backward and the optimizer: unscaling, overflow, norm and clipping."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from ... import ops
from ...errors import AmpConfigError, AmpUsageError, nearest
from ...policy.options import is_number

_CLIP_KEYS = {
    'norm': ('max_norm', 'norm_type', 'error_if_nonfinite', 'foreach'),
    'value': ('clip_value', 'foreach'),
}


@dataclasses.dataclass(frozen=True)
class GradientClip:
    """How gradients are clipped, after unscaling: mmengine's ``clip_grad`` in a typed form.

    Attributes:
        kind: 'norm' or 'value'.
        arguments: Keyword arguments of :func:`torch.nn.utils.clip_grad_norm_` or ``clip_grad_value_``.
    """

    kind: str
    arguments: Mapping[str, Any]

    @classmethod
    def parse(cls, clip_grad: Mapping[str, Any] | None) -> GradientClip | None:
        """Read mmengine's dict without changing it.

        Args:
            clip_grad: ``dict(max_norm=..., norm_type=..., error_if_nonfinite=...)``, or
                ``dict(type='value', clip_value=...)``, or None.

        Raises:
            AmpConfigError: An unknown type or key, or a missing or impossible limit.
        """
        if clip_grad is None:
            return None
        if not isinstance(clip_grad, Mapping) or not clip_grad:
            raise AmpConfigError(
                [
                    f'clip_grad={clip_grad!r} must be a dict such as dict(max_norm=1.0) or dict(type="value", clip_value=1.0).'
                ]
            )
        words = dict(clip_grad)
        kind = words.pop('type', 'norm')
        if kind not in _CLIP_KEYS:
            raise AmpConfigError([f"clip_grad['type']={kind!r} must be 'norm' or 'value'."])
        known = _CLIP_KEYS[kind]
        problems = [
            f'clip_grad has an unknown key {key!r}{nearest(str(key), known)}: known are {", ".join(known)}.'
            for key in words
            if key not in known
        ]
        limit = known[0]
        value: Any = words.get(limit)
        if limit not in words:
            problems.append(f'clip_grad lacks {limit!r}: write dict(type={kind!r}, {limit}=1.0), say.')
        elif not ((isinstance(value, Tensor) and value.numel() == 1) or (is_number(value) and value >= 0)):
            problems.append(f'clip_grad[{limit!r}]={value!r} must be a number of at least 0.')
        if problems:
            raise AmpConfigError(problems)
        return cls(kind, words)

    @property
    def raises_on_nonfinite(self) -> bool:
        """Whether a non-finite norm is an error."""
        return bool(self.arguments.get('error_if_nonfinite', False))

    @property
    def fits_prologue(self) -> bool:
        """Whether a fused step can clip so: by value, by the Euclidean or by the maximum norm, with a limit on the host."""
        limit = self.arguments[_CLIP_KEYS[self.kind][0]]
        if isinstance(limit, Tensor) and limit.device.type != 'cpu':
            return False
        return self.kind == 'value' or float(self.arguments.get('norm_type', 2.0)) in (2.0, math.inf)

    @property
    def not_in_prologue(self) -> str:
        """What to say where :attr:`fits_prologue` has to hold."""
        return (
            f"clip_grad={dict(self.arguments)!r} conflicts with master_weights='split', whose gradients are clipped while they "
            "are used: by value, or by norm_type=2 or 'inf' with a number as limit. Write one of these, or master_weights=True."
        )

    def refuse_nonfinite(self, norm: Tensor, found_inf: Tensor | None, learns: bool) -> None:
        """``error_if_nonfinite``, before anything is clipped. Syncs.

        Args:
            norm: float32 scalar.
            found_inf: float32 scalar: whether gradients are non-finite, here or on another rank; None where nobody looked.
            learns: Whether a dynamic loss scale is there, which learns from an overflow: it is skipped, and no error.

        Raises:
            RuntimeError: As torch's own.
        """
        length, found = torch.stack(
            [norm, torch.zeros_like(norm) if found_inf is None else found_inf.view_as(norm)]
        ).tolist()
        if (found > 0 and not learns) or (found == 0 and not math.isfinite(length)):
            raise RuntimeError(
                'The total norm of gradients is non-finite, here or on another rank, so it cannot be clipped. '
                'error_if_nonfinite=False skips such steps where gradients are checked.'
            )

    def prologue(self) -> dict[str, float]:
        """What :func:`~amp_wrapper.ops.step_prologue` is told."""
        name = _CLIP_KEYS[self.kind][0]
        return {name: float(self.arguments[name])}

    def norm(self, gradients: Sequence[Tensor], found_inf: Tensor | None) -> Tensor:
        """The norm of gradients as they are, and whether they are finite, in one pass.

        Args:
            gradients: Dense; not changed.
            found_inf: float32 scalar set to 1.0 where an element is non-finite, in place; None for no check.

        Returns:
            float32 scalar on the device.
        """
        greatest = float(self.arguments.get('norm_type', 2.0)) == math.inf
        norm = ops.multi_tensor_maxnorm if greatest else ops.multi_tensor_l2norm
        return norm(gradients, None, found_inf)[0]

    @property
    def is_euclidean(self) -> bool:
        """Whether gradients are clipped by their Euclidean norm, and no error is asked for."""
        return (
            self.kind == 'norm' and not self.raises_on_nonfinite and float(self.arguments.get('norm_type', 2.0)) == 2.0
        )

    def apply(self, parameters: Sequence[Tensor], norm: Tensor | None = None) -> Tensor | None:
        """Clip the gradients of ``parameters`` in place.

        Args:
            parameters: FP32 (at O3: 16-bit) tensors; those without a gradient are passed over.
            norm: Their Euclidean norm, where it is known.

        Returns:
            The norm before clipping, a scalar on the device; None for 'value' and where there is no gradient.
        """
        chosen = [p for p in parameters if p.requires_grad and p.grad is not None]
        if not chosen:
            return None
        if self.kind == 'value':
            clip_grad_value_(chosen, **self.arguments)
            return None
        if norm is not None:
            # the coefficient of torch's clip_grad_norm_
            coefficient = (self.arguments['max_norm'] / (norm + 1e-6)).clamp(max=1.0)
            gradients = [parameter.grad for parameter in chosen if parameter.grad is not None]
            ops.multi_tensor_scale(gradients, gradients, coefficient.float())
            return norm
        total: Tensor = clip_grad_norm_(chosen, **self.arguments)
        return total


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
    """What the ops say about tensors, in the words of somebody who knows parameters."""
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
