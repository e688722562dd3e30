"""How far one forward and backward pass at a level is from the same pass in FP32, module by module."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ..casting.cast_module import Watcher
from ..casting.modules import class_name
from ..engine import backward
from ..errors import AmpUsageError
from .op_tensors import is_bad
from .recorder import outputs_of
from .sandbox import Sandbox

#: Elements of one tensor that are compared, spread evenly over it.
SAMPLES = 2**14
#: By what a dynamic loss scale is divided after a backward pass that was not finite, and how often.
BACKOFF, MOST_BACKOFFS = 2.0**4, 8
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


@dataclasses.dataclass(frozen=True)
class Distance:
    """Two sets of numbers, as sums in double precision.

    Attributes:
        difference: Sum of the squared differences.
        reference: Sum of the squares of the FP32 numbers.
        own: Sum of the squares of the others.
        product: Sum of the products.
        lost: The part of ``reference`` that belongs to numbers which are zero in the other set.
    """

    difference: float = 0.0
    reference: float = 0.0
    own: float = 0.0
    product: float = 0.0
    lost: float = 0.0

    @classmethod
    def of(cls, reference: Tensor, own: Tensor) -> Distance:
        """Compare two tensors of one shape. Syncs.

        Args:
            reference: In FP32.
            own: Of any floating type, on the same device.
        """
        a, b = reference.detach().double().flatten(), own.detach().double().flatten()
        gone = a[b == 0]
        return cls(*torch.stack([(a - b) @ (a - b), a @ a, b @ b, a @ b, gone @ gone]).tolist())

    def __add__(self, other: Distance) -> Distance:
        return Distance(*(x + y for x, y in zip(dataclasses.astuple(self), dataclasses.astuple(other))))

    @property
    def error(self) -> float:
        """The relative L2 error; infinity where a number is not finite, or where only FP32 has nothing but zeros."""
        if not math.isfinite(self.difference):
            return math.inf
        if self.reference == 0.0:
            return 0.0 if self.difference == 0.0 else math.inf
        return math.sqrt(self.difference / self.reference)

    @property
    def cosine(self) -> float:
        """The cosine of the angle between the two; NaN where one of them is zero or not finite."""
        lengths = self.reference * self.own
        return self.product / math.sqrt(lengths) if lengths > 0 and math.isfinite(lengths) else math.nan

    @property
    def vanished(self) -> float:
        """The share of the FP32 numbers that became zero, by their squares."""
        return self.lost / self.reference if self.reference > 0 else 0.0


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a module.

    Attributes:
        module: Its qualified name.
        inputs: Samples of its floating inputs, before any cast.
        outputs: Samples of its floating outputs.
        usual_inputs: Whether all elements of every input were finite or minus infinity, as in masks.
        finite_outputs: Whether all elements of every output were finite.
        usual_outputs: Whether they were finite or minus infinity.
    """

    module: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    usual_inputs: bool
    finite_outputs: bool
    usual_outputs: bool


@dataclasses.dataclass
class Pass:
    """One forward and backward pass.

    Attributes:
        loss: Its value.
        calls: The calls of modules, in the order in which they ended.
        gradients: Name of a parameter to its gradient, unscaled, float32; those that are not finite as they are.
        scale: The loss scale at which the gradients are finite, or the last one that was tried.
    """

    loss: float
    calls: list[Call]
    gradients: dict[str, Tensor]
    scale: float

    @property
    def finite_gradients(self) -> bool:
        """Whether all are. Syncs."""
        return all(bool(each.isfinite().all()) for each in self.gradients.values())


def _floating_in(value: Any) -> list[Tensor]:
    # a recomputed segment must not find what is done with them
    return [tensor.detach() for tensor in outputs_of(value) if tensor.layout is torch.strided]


def _sample(tensor: Tensor) -> Tensor:
    flat = tensor.reshape(-1)
    # odd, so that it does not meet the same few columns of a width that is a power of two
    step = max(1, flat.numel() // SAMPLES) | 1
    return flat[::step].float().clone()


def _usual(tensors: list[Tensor]) -> bool:
    """Whether all numbers are finite or minus infinity, as in a mask and in what it was added to."""
    return not any(bool((tensor.isnan() | tensor.isposinf()).any()) for tensor in tensors)


@contextmanager
def _recorded(model: nn.Module) -> Iterator[list[Call]]:
    """The calls of all modules inside, but for those that a recomputed segment makes in the backward pass."""
    calls: list[Call] = []
    open_calls: list[tuple[nn.Module, tuple[Tensor, ...], bool]] = []
    names = {id(module): name for name, module in model.named_modules()}

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        inputs = _floating_in((args, kwargs))
        open_calls.append((module, tuple(map(_sample, inputs)), _usual(inputs)))

    def after(module: nn.Module, output: Any) -> None:
        _, inputs, usual = open_calls.pop()
        # without an output, it ended with an error
        if output is not None:
            outputs = _floating_in(output)
            samples = tuple(map(_sample, outputs))
            calls.append(
                Call(names[id(module)], inputs, samples, usual, not any(map(is_bad, outputs)), _usual(outputs))
            )

    watcher = Watcher(before, after)
    try:
        for module in model.modules():
            if not isinstance(module, torch.jit.ScriptModule):
                watcher.watch(module)
        yield calls
    finally:
        watcher.remove()


def run_pass(
    box: Sandbox, loss_fn: Callable[[nn.Module], Tensor], seeded: Callable[[], None], surrounds: bool = False
) -> Pass:
    """Run one forward and backward pass of a copy, without a step. Its weights stay what they are. Syncs.

    Dropout modules do nothing, so that passes can be compared. A dynamic loss scale falls until the gradients are finite.

    Args:
        box: The copy.
        loss_fn: From the model to the loss.
        seeded: Sets the random generators; called before each forward pass.
        surrounds: Whether the engine surrounds ``loss_fn``, as mmengine's wrapper does; ``amp.initialize`` leaves that to the
            model.
    """
    for module in box.model.modules():
        if isinstance(module, _DROPOUTS):
            module.eval()
    scaler = box.engine.scales.scalers[0]
    tries = MOST_BACKOFFS if scaler.is_dynamic else 1
    for remaining in reversed(range(tries)):
        seeded()
        with _recorded(box.model) as calls, box.forward() if surrounds else nullcontext():
            loss = check_loss(loss_fn(box.model))
        # a scaler that is one for good is no scale
        scale = 1.0 if scaler.is_one else scaler.get_scale()
        backward(box.engine, loss)
        found = box.engine.gradients_at_hand()
        gradients = {name: grad.detach().float() / (1.0 if unscaled else scale) for name, _, grad, unscaled in found}
        box.engine.zero_grad()
        result = Pass(float(loss.detach()), calls, gradients, scale)
        if not math.isfinite(result.loss) or result.finite_gradients:
            break
        if remaining:
            scaler.current_scale.div_(BACKOFF)
    return result


def check_loss(loss: Any) -> Tensor:
    """What ``loss_fn`` has returned, if it is a loss.

    Raises:
        AmpUsageError: It is none.
    """
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        shown = (
            f'a tensor of shape {tuple(loss.shape)} and {loss.dtype}' if isinstance(loss, Tensor) else repr(loss)[:80]
        )
        raise AmpUsageError(
            f'loss_fn(model, batch) returned {shown}: it has to return the loss, a floating tensor of one number.'
        )
    return loss.reshape(())


@dataclasses.dataclass
class ModuleDeviation:
    """How far one module is from FP32 at the same weights.

    Attributes:
        name: Qualified; '' for the model.
        kind: Its class.
        inputs: Relative L2 error of its inputs; None where it was not called, or has none.
        outputs: Of its outputs.
        gradient: The gradients of the parameters in it and below it.
        finite: Whether its outputs were, where those of FP32 were.
    """

    name: str
    kind: str
    inputs: float | None = None
    outputs: float | None = None
    gradient: Distance | None = None
    finite: bool = True

    @property
    def added(self) -> float:
        """By how much the error of the outputs exceeds that of the inputs."""
        if self.outputs is None:
            return 0.0
        return max(0.0, self.outputs - (self.inputs or 0.0))


@dataclasses.dataclass
class Deviation:
    """How far one pass at a level is from FP32 at the same weights, with the same batch and the same random numbers.

    Attributes:
        loss: ``abs(loss - loss in FP32) / abs(loss in FP32)``.
        modules: By name, in the order of ``named_modules``.
        first_nonfinite: The innermost module whose inputs were finite and whose outputs were not, the first to end; None
            without one, or where loss and gradients are finite all the same. Minus infinity in inputs counts as finite, since
            masks bring it, and a module that gives nothing worse is named only where there is no other.
        scale: As :attr:`Pass.scale`.
        finite: Whether loss and gradients are.
        owners: The modules that own trained parameters, by name; their gradients are those of these parameters alone.
    """

    loss: float
    modules: dict[str, ModuleDeviation]
    first_nonfinite: str | None
    scale: float
    finite: bool
    owners: dict[str, ModuleDeviation]

    @property
    def gradient(self) -> Distance:
        """All gradients together."""
        return sum((each.gradient for each in self.owners.values() if each.gradient is not None), Distance())

    @property
    def error(self) -> float:
        """One number for the search: the root mean square, over the modules that own parameters, of the relative error of their
        gradients, each at most 1. So small gradients count as much as large ones. Infinity where something is not finite."""
        if not self.finite:
            return math.inf
        errors = [
            min(each.gradient.error, 1.0)
            for each in self.owners.values()
            if each.gradient is not None and each.gradient.reference > 0
        ]
        return math.sqrt(sum(error * error for error in errors) / len(errors)) if errors else 0.0

    @property
    def worst_vanished(self) -> ModuleDeviation | None:
        """The module of whose gradient the largest part became zero."""
        known = [each for each in self.owners.values() if each.gradient is not None]
        return max(known, key=lambda each: each.gradient.vanished if each.gradient else 0.0, default=None)


def compare(model: nn.Module, reference: Pass, own: Pass) -> Deviation:
    """Compare two passes of copies of one model. Syncs.

    Args:
        model: Its modules and their names.
        reference: In FP32.
        own: At a level.
    """
    modules = {name: ModuleDeviation(name, class_name(module)) for name, module in model.named_modules()}
    by_call: dict[tuple[str, int], Call] = {}
    for key, call in _numbered(reference.calls):
        by_call[key] = call
    sums: dict[str, list[Distance]] = {}
    first: str | None = None
    first_masked: str | None = None
    for key, call in _numbered(own.calls):
        known = by_call.get(key)
        if known is None or key[0] not in modules:
            continue
        into, out = sums.setdefault(key[0], [Distance(), Distance()])
        sums[key[0]] = [into + _distance(known.inputs, call.inputs), out + _distance(known.outputs, call.outputs)]
        worse = known.usual_outputs and not call.usual_outputs
        if worse or (known.finite_outputs and not call.finite_outputs):
            modules[key[0]].finite = False
            begins = call.usual_inputs or not known.usual_inputs
            if begins and call.usual_outputs:
                first_masked = first_masked or key[0]
            elif begins and first is None:
                first = key[0]
    for name, (into, out) in sums.items():
        modules[name].inputs = into.error if into.reference else None
        modules[name].outputs = out.error if out.reference or out.difference else None
    owners = _add_gradients(modules, reference.gradients, own.gradients)
    off = abs(own.loss - reference.loss) / max(abs(reference.loss), 1e-12) if math.isfinite(own.loss) else math.inf
    finite = math.isfinite(own.loss) and own.finite_gradients
    named = None if finite else first if first is not None else first_masked
    return Deviation(off, modules, named, own.scale, finite, owners)


def _numbered(calls: list[Call]) -> Iterator[tuple[tuple[str, int], Call]]:
    seen: dict[str, int] = {}
    for call in calls:
        number = seen[call.module] = seen.get(call.module, -1) + 1
        yield (call.module, number), call


def _distance(reference: tuple[Tensor, ...], own: tuple[Tensor, ...]) -> Distance:
    pairs = [(a, b) for a, b in zip(reference, own) if a.shape == b.shape]
    # infinities that FP32 has too are meant: masks
    kept = [(a[a.isfinite()], b[a.isfinite()]) for a, b in pairs]
    return sum((Distance.of(a, b) for a, b in kept), Distance())


def _add_gradients(
    modules: Mapping[str, ModuleDeviation], reference: Mapping[str, Tensor], own: Mapping[str, Tensor]
) -> dict[str, ModuleDeviation]:
    """Put the gradients into the modules and those around them; gives those that own parameters, with their own alone."""
    owners: dict[str, ModuleDeviation] = {}
    for name, grad in reference.items():
        other = own.get(name)
        distance = Distance.of(grad, torch.zeros_like(grad) if other is None else other)
        owner = name.rpartition('.')[0]
        place = modules[owner] if owner in modules else modules['']
        mine = owners.setdefault(place.name, ModuleDeviation(place.name, place.kind, place.inputs, place.outputs))
        mine.gradient = distance if mine.gradient is None else mine.gradient + distance
        while True:
            above = modules.get(owner)
            if above is not None:
                above.gradient = distance if above.gradient is None else above.gradient + distance
            if not owner:
                break
            owner = owner.rpartition('.')[0]
    return owners
