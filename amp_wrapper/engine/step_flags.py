"""Why a step may have to be skipped: its flags, on the device, and what each loss scale learns from them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed import ProcessGroup


class StepFlags:
    """The flags of one optimizer step. All are float32 scalars, 0.0 or 1.0, made when they are first needed.

    Three things can be non-finite: gradients at the parameters of this optimizer, gradients that its losses brought to
    parameters of others, and gradients that losses of others brought here. Each makes the step be skipped. A loss scale
    learns from the first two: what others brought is for their scales to learn from.

    Args:
        losses: Number of losses with a scale of their own.
        apart: Whether the gradients of each pass are looked at alone, before they are added up.

    Attributes:
        used: Whether each loss has had a backward pass since the last step.
        received_locally: Whether something was received in a pass that was not averaged over the ranks.
        named: Whether a pass that was meant for this optimizer has come since the last step, whosever scale it carried.
        lent: Whether a pass that was meant for other optimizers alone has brought something.
        looked: Whether somebody has looked at the gradients that were there before the first pass.
    """

    def __init__(self, losses: int, apart: bool = False) -> None:
        self._apart = apart
        self._device = torch.device('cpu')
        self._losses = losses
        #: Flags that are down, and that nobody has yet.
        self._spare: list[Tensor] = []
        self.clear()

    def clear(self) -> None:
        """After a step, and when gradients are cleared."""
        self.used = [False] * self._losses
        self._found: list[Tensor | None] = [None] * self._losses
        self._brought: list[Tensor | None] = [None] * self._losses
        self._received: Tensor | None = None
        self.received_locally = False
        self.looked = False
        self.named = self.lent = False

    def to(self, device: torch.device) -> None:
        """Where flags are made from now on."""
        self._device = device
        self._spare = []

    def found(self, loss_id: int) -> Tensor:
        """The flag of the gradients at our own parameters; a live tensor."""
        found = self._found[loss_id]
        if found is None:
            found = self._found[loss_id] = self.new()
        return found

    def find(self, loss_id: int, found_inf: Tensor) -> None:
        """A pass has brought something non-finite, or not: a flag of its own."""
        self._found[loss_id] = self._larger(self._found[loss_id], found_inf)

    def new(self) -> Tensor:
        """A flag that is down."""
        if self._device.type == 'cuda' and torch.cuda.is_current_stream_capturing():
            # a graph has to lower its flag each time it runs
            return torch.zeros((), dtype=torch.float32, device=self._device)
        if not self._spare:
            # one kernel for many steps
            self._spare = list(torch.zeros(64, dtype=torch.float32, device=self._device).unbind())
        return self._spare.pop()

    def bring(self, loss_id: int, found_inf: Tensor) -> None:
        """A loss of ours brought gradients to another optimizer."""
        self._brought[loss_id] = self._larger(self._brought[loss_id], found_inf)

    def receive(self, found_inf: Tensor, locally: bool) -> None:
        """A loss of another optimizer brought gradients here, in a pass that was not averaged where ``locally``."""
        self._received = self._larger(self._received, found_inf)
        self.received_locally = self.received_locally or locally

    def _larger(self, before: Tensor | None, found_inf: Tensor) -> Tensor:
        found_inf = found_inf.to(self._device)
        return found_inf if before is None else torch.maximum(before, found_inf)

    @property
    def has_received(self) -> bool:
        """Whether losses of other optimizers brought anything, finite or not."""
        return self._received is not None

    def forget_received(self) -> None:
        """What was received has been cleared by somebody."""
        self._received, self.received_locally, self.looked, self.lent = None, False, False, False

    def agree(self, groups: Iterable[ProcessGroup]) -> None:
        """A flag that is up on one rank is up on every rank of the groups. Collective.

        Args:
            groups: One after the other; each rank calls this with the same ones.
        """
        groups = list(groups)
        if not groups:
            return
        zero = torch.zeros((), dtype=torch.float32, device=self._device)
        flags = torch.stack([zero if flag is None else flag for flag in self._all()])
        for group in groups:
            torch.distributed.all_reduce(flags, torch.distributed.ReduceOp.MAX, group=group)
        *each, self._received = flags.unbind()
        self._found, self._brought = list(each[: self._losses]), list(each[self._losses :])

    def _all(self) -> list[Tensor | None]:
        return [*self._found, *self._brought, self._received]

    def skipped(self) -> Tensor | None:
        """1.0 where any flag is up; None where nothing was checked."""
        flags = [flag for flag in self._all() if flag is not None]
        if len(flags) < 2:
            return flags[0] if flags else None
        return torch.stack(flags).max()

    @property
    def are_own(self) -> bool:
        """Whether only the losses of this optimizer, and only at its own parameters, have found anything."""
        return self._received is None and all(flag is None for flag in self._brought)

    def learned(self, loss_id: int) -> Tensor:
        """Whether the scale of a loss was too large."""
        found, brought = self.found(loss_id), self._brought[loss_id]
        if self._received is not None and not self._apart:
            # the gradients were added up
            found = (found - self._received).clamp_(min=0)
        return found if brought is None else torch.maximum(found, brought)

    def state(self) -> tuple[list[float], float | None]:
        """The flags of our own gradients, and of what was received (None where nothing was). Syncs."""
        found = [0.0 if flag is None else float(flag) for flag in self._found]
        return found, None if self._received is None else float(self._received)

    def restore(self, used: Iterable[bool], found: Iterable[float], received: float | None) -> None:
        """Put back what :meth:`state` told."""
        self.clear()
        self.used = list(used)
        for index, value in enumerate(found):
            if self.used[index]:
                self.found(index).fill_(value)
        if received is not None:
            self._received = torch.full((), received, device=self._device)
