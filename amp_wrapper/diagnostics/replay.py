"""Runs a recorded step again, on a copy of the model, at its own level or at another one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from ..errors import AmpError
from ..policy import Policy
from .ranges import Ranges, measure
from .recorder import CallRecord, StepRecord, outputs_of, tensors_of
from .sandbox import Attach, Sandbox, sandbox
from .trace import BACKWARD, BadOp, ModuleOutput, Tracer


@dataclasses.dataclass
class Replay:
    """What one replay of a step has shown.

    Attributes:
        refused: Why there is none; '' where it ran.
        outputs_finite: Whether all outputs of the forward calls were finite.
        gradients_known: Whether the backward passes ran with the gradients that the losses gave.
        losses_finite: Whether the gradients that came from the losses, at the outputs of the model, were finite.
        parameters: The parameters with non-finite gradients, in the order of the model.
        sums: Those whose gradients are finite in each pass, and not in their sum.
        losses: The losses, by their ``loss_id``, whose passes have something non-finite.
        calls: Of each forward call: '' where all was finite, else 'outputs', 'gradients' (of parameters) or 'loss' (what came
            from the loss, or from another call).
        forward: Where the infinities and NaN of the outputs begin; None where they are finite, or nothing was traced.
        backward: The same of the gradients of parameters.
        first_gradient: The first op of a backward pass with a non-finite result.
        outputs: What the modules gave, in the order in which they ended.
        gradients: Ranges of the gradients by parameter, where they were asked for.
    """

    refused: str = ''
    outputs_finite: bool = True
    gradients_known: bool = True
    losses_finite: bool = True
    parameters: list[str] = dataclasses.field(default_factory=list)
    sums: list[str] = dataclasses.field(default_factory=list)
    losses: set[int] = dataclasses.field(default_factory=set)
    calls: list[str] = dataclasses.field(default_factory=list)
    forward: BadOp | None = None
    backward: BadOp | None = None
    first_gradient: BadOp | None = None
    outputs: list[ModuleOutput] = dataclasses.field(default_factory=list)
    gradients: dict[str, Ranges] = dataclasses.field(default_factory=dict)

    @property
    def is_finite(self) -> bool:
        """Whether all that ran was finite."""
        return not self.refused and not any(self.calls) and not self.sums


def replay(
    step: StepRecord,
    model: nn.Module,
    policy: Policy,
    attach: Attach,
    factor: float = 1.0,
    traced: bool = False,
    judges_losses: bool = True,
) -> Replay:
    """Run the forward calls of a step again, and their backward passes from the gradients that the losses gave.

    Args:
        step: What was recorded.
        model: With the weights that it had in the step. It is left as it is.
        policy: The level to run at.
        attach: Attaches a copy.
        factor: The gradients of the losses are multiplied by it: another loss scale.
        traced: Whether to look for the places where infinities and NaN begin.
        judges_losses: Whether non-finite gradients of the losses count. Where the outputs of the model were not finite, those
            of losses outside of it are not either, and say nothing of a level that gives other outputs.
    """
    found = Replay()
    try:
        with sandbox(model, policy, attach=attach) as box:
            one = _OneCall(box, factor, traced, judges_losses, found)
            sums: dict[str, Tensor] = {}
            for call in step.calls:
                status, keys = one.run(call)
                found.calls.append(status)
                if status:
                    found.losses |= {step.losses[key].loss_id for key in keys if key < len(step.losses)}
                for name, parameter in box.model.named_parameters():
                    if parameter.grad is not None:
                        sums[name] = parameter.grad if name not in sums else sums[name] + parameter.grad
            if not any(found.calls):
                found.sums = [name for name, total in sums.items() if is_bad(total)]
            if traced:
                found.gradients = measure(sums)
    except torch.OutOfMemoryError as error:
        found.refused = f'there was no memory for a copy of the model ({str(error).splitlines()[0]})'
    except AmpError as error:
        found.refused = str(error)
    except Exception as error:
        # a replay is a service: whatever a copy of a model does, the training goes on
        found.refused = f'a copy of the model could not be run ({type(error).__name__}: {error})'
    return found


class _OneCall:
    """Runs recorded calls, each with its backward passes.

    Args:
        box: The copy of the model.
        factor: For the gradients of the losses.
        traced: Whether to look for places.
        judges_losses: Whether non-finite gradients of the losses count.
        found: Takes what the first call with something non-finite shows.
    """

    def __init__(self, box: Sandbox, factor: float, traced: bool, judges_losses: bool, found: Replay) -> None:
        self._box, self._factor, self._traced, self._found = box, factor, traced, found
        self._judges_losses = judges_losses

    def run(self, call: CallRecord) -> tuple[str, set[int]]:
        """Run one call; its gradients are on the copy.

        Returns:
            An entry of :attr:`Replay.calls`, and the backward passes, by their key in the record, in which something is not
            finite.
        """
        model = self._box.model
        module = model.get_submodule(call.name) if call.name else model
        for parameter in model.parameters():
            parameter.grad = None
        args, kwargs = call.arguments()
        call.states.restore()
        tracer = Tracer(model, tensors_of((args, kwargs))) if self._traced else None
        try:
            with self._box.forward(), tracer or nullcontext():
                outputs = outputs_of(module(*args, **kwargs))
            bad = {place for place, tensor in enumerate(outputs) if is_bad(tensor)}
            if tracer is not None:
                self._found.outputs = tracer.outputs
                self._found.forward = _begin(tracer, [outputs[place] for place in bad])
            if not bad:
                return self._backward(call, outputs, tracer)
            self._found.outputs_finite = False
            reached = {key for key, gradients in call.gradients.items() if bad.intersection(gradients)}
            return 'outputs', reached or set(call.gradients)
        finally:
            if tracer is not None:
                tracer.remove()

    def _backward(self, call: CallRecord, outputs: Sequence[Tensor], tracer: Tracer | None) -> tuple[str, set[int]]:
        found, model = self._found, self._box.model
        found.gradients_known = found.gradients_known and bool(call.gradients)
        wrong: set[int] = set()
        status = ''
        sums: dict[str, Tensor] = {}
        for number, (key, gradients) in enumerate(call.gradients.items()):
            if any(is_bad(gradient) for gradient in gradients.values()):
                if not self._judges_losses:
                    found.gradients_known = False
                    continue
                found.losses_finite = False
                status = status or 'loss'
                wrong.add(key)
                continue
            pairs = [
                (outputs[place], gradient.to(outputs[place].dtype) * self._factor)
                for place, gradient in gradients.items()
                if place < len(outputs) and outputs[place].requires_grad and outputs[place].shape == gradient.shape
            ]
            found.gradients_known = found.gradients_known and len(pairs) == len(gradients)
            if not pairs:
                continue
            for parameter in model.parameters():
                parameter.grad = None
            with tracer or nullcontext():
                torch.autograd.backward(
                    [tensor for tensor, _ in pairs],
                    [value for _, value in pairs],
                    retain_graph=number + 1 < len(call.gradients),
                )
            gradients_of = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            named = [name for name, gradient in gradients_of.items() if is_bad(gradient)]
            if named:
                status = 'gradients'
                wrong.add(key)
                if tracer is not None and not found.parameters:
                    found.backward = _begin(tracer, [gradients_of[name] for name in named])
                    found.first_gradient = next(
                        (each for each in tracer.bad if each.phase == BACKWARD and not each.is_mask), None
                    )
                found.parameters += [name for name in named if name not in found.parameters]
            for name, gradient in gradients_of.items():
                sums[name] = gradient if name not in sums else sums[name] + gradient
        for name, parameter in model.named_parameters():
            parameter.grad = sums.get(name)
        return status, wrong


def is_bad(tensor: Tensor) -> bool:
    """Whether a tensor has infinities or NaN. Syncs."""
    values = tensor.coalesce().values() if tensor.is_sparse else tensor
    return not bool(values.isfinite().all())


def _begin(tracer: Tracer, tensors: Sequence[Tensor]) -> BadOp | None:
    """The earliest op in which what is wrong with some tensors begins."""
    causes = [tracer.bad_of(tensor) for tensor in tensors if not tensor.is_sparse]
    begins = [each.begins() for each in causes if each is not None]
    return min(begins, key=lambda each: each.order, default=None)
