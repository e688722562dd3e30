"""Gradients that model weights keep although they were added to their masters' gradients already."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...ops import attributes


class AddedGradients:
    """Which gradient each weight had when it was added, and its version: what differs now was changed since.

    Mostly all weights are noted by one backward pass, and forgotten by one ``zero_grad``. So the last note is kept as lists,
    which are compared without a loop in Python, and goes into a dict where something else happens.
    """

    def __init__(self) -> None:
        self._weights: Sequence[Tensor] = []
        self._gradients: list[Tensor | None] = []
        self._versions = b''
        # id of a weight -> its gradient, the version
        self._others: dict[int, tuple[Tensor, int]] = {}
        # id of a weight -> the version of its gradient after torch.nn.utils has clipped it
        self._clipped: dict[int, int] = {}

    def __bool__(self) -> bool:
        return bool(self._weights or self._others)

    def note(self, weights: Sequence[Tensor]) -> None:
        """The gradients of these weights have been added."""
        self._spread()
        for noted in (self._others, self._clipped):
            for weight in weights if noted else ():
                noted.pop(id(weight), None)  # type: ignore[attr-defined]
        self._weights, self._gradients = weights, attributes.gradients(weights)
        self._versions = attributes.versions(self._gradients)

    def get(self, weight: Tensor) -> tuple[Tensor, int] | None:
        """The gradient that was added, and its version then; None for none."""
        self._spread()
        return self._others.get(id(weight))

    def has(self, weight: Tensor) -> bool:
        """Whether the weight's gradient is the one that was added, unchanged; whether it has none, where none was."""
        known, gradient = self.get(weight), weight.grad
        if known is None or gradient is None:
            return known is None and gradient is None
        return gradient is known[0] and gradient._version == known[1]

    def are_as_noted(self, weights: Sequence[Tensor]) -> bool:
        """Whether these weights are those of the last note, and nothing has happened to any gradient since then."""
        return (
            not self._others
            and attributes.unchanged([(weights, self._weights), (attributes.gradients(weights), self._gradients)])
            and attributes.versions(self._gradients) == self._versions
        )

    def forget(self, weights: Sequence[Tensor]) -> None:
        """The gradients of these weights were cleared."""
        if attributes.unchanged([(weights, self._weights)]):
            self._weights = []
        self._spread()
        for weight in weights if self._others else ():
            self._others.pop(id(weight), None)

    def note_clipped(self, weights: Sequence[Tensor], writes: int) -> None:
        """The gradients of these weights are about to be clipped.

        Args:
            weights: Those whose gradient is not the one that was added are passed over.
            writes: How often each gradient is written to.
        """
        for weight in weights:
            known = self.get(weight)
            if known is not None and weight.grad is known[0]:
                # from the version that was added, so that what others write makes a difference
                self._clipped[id(weight)] = self._clipped.get(id(weight), known[1]) + writes

    def was_clipped(self, weight: Tensor) -> bool:
        """Whether clipping is all that has been written to the weight's gradient since it was added; it may be 0 by that."""
        return weight.grad is not None and self._clipped.get(id(weight)) == weight.grad._version

    def _spread(self) -> None:
        for weight, gradient, version in zip(self._weights, self._gradients, attributes.numbers_of(self._versions)):
            if gradient is not None:
                self._others[id(weight)] = (gradient, version)
        self._weights, self._gradients, self._versions = [], [], b''


__all__ = ['AddedGradients']
