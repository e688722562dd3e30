"""Pairs what an optimizer steps with what the model computes with: FP32 masters and 16-bit weights, or the same tensor."""

from __future__ import annotations

import operator
from collections.abc import Container, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..policy.nested import parameters_of
from ..shards import Layout
from . import fp32_values


class StepLists:
    """What an optimizer steps, and the model weights behind it, as lists in the order of its groups.

    Attributes:
        parameters: What the optimizer steps.
        weights: What the model computes with; backward passes leave their gradients there.
        copies: What a fused update writes beside each parameter: a 16-bit weight, an int16 remainder, or None.
        on_one_device: Whether all weights are on ``device``.
        layout: On which ranks they lie, where they are sharded.
        pairs: (model weight, FP32 master) where there is one.
    """

    def __init__(self, pairs: ParamPairs, parameters: list[nn.Parameter], device: torch.device) -> None:
        self.parameters = parameters
        self.weights = list(map(pairs.weight_of, parameters))
        self.copies: list[Tensor | None] = list(map(pairs.copy_of, parameters))
        self.on_one_device = all(weight.device == device for weight in self.weights)
        self.layout = Layout(self.weights)
        self.pairs = pairs.pairs
        self._device = device
        self._types = [weight.dtype for weight in self.weights]

    def are_of(self, parameters: Sequence[nn.Parameter], device: torch.device) -> bool:
        """Whether these parameters are still the same objects, of the same types."""
        return (
            len(parameters) == len(self.parameters)
            and all(map(operator.is_, parameters, self.parameters))
            and device == self._device
            and self._types == [weight.dtype for weight in self.weights]
        )


class ParamPairs:
    """The parameters of one optimizer, each of which is stepped in the type that the model computes with.

    So it is at O0, O1, O3 and O4. :class:`~amp_wrapper.casting.masters.Fp32Masters` and
    :class:`~amp_wrapper.casting.split_masters.SplitMasters` are the kinds whose 16-bit weights have FP32 values.

    Args:
        optimizer: Holds the parameters; None for inference.
    """

    #: Whether 16-bit weights have an FP32 value beside their own.
    have_fp32_values = False

    def __init__(self, optimizer: Optimizer | None) -> None:
        self.optimizer = optimizer
        self._lists: StepLists | None = None
        #: (model weight, FP32 master) for every weight that has a master tensor of its own, in the optimizer's order.
        self.pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        # 16-bit weights without FP32 values, as long as they are frozen
        self._frozen: list[nn.Parameter] = []
        # of 16-bit weights, by id, until they are used for the first time: the version and the bits
        self._marks: dict[int, tuple[int, Tensor]] = {}
        # whether weights show what was written to masters before
        self._are_shown = False

    # -- what there is -----------------------------------------------------------------------------------------------

    def parameters(self) -> list[nn.Parameter]:
        """What the optimizer steps: FP32 masters where there are any, else the model's own parameters."""
        return [] if self.optimizer is None else parameters_of(self.optimizer)

    def weights(self) -> list[nn.Parameter]:
        """What the model computes with: the weights behind masters, and parameters that are stepped themselves."""
        return self.parameters()

    def without_master(self) -> list[nn.Parameter]:
        """The parameters that are stepped themselves."""
        return self.parameters()

    def weight_of(self, parameter: nn.Parameter) -> nn.Parameter:
        """The model weight behind a master; any other parameter itself."""
        return parameter

    def copy_of(self, parameter: nn.Parameter) -> Tensor | None:
        """What a fused update writes beside a parameter; None for nothing."""
        return None

    def lists(self, device: torch.device) -> StepLists:
        """Lists of everything that is stepped now. Kept from step to step, and made anew where anything changed.

        Args:
            device: Where the step runs.
        """
        parameters = self.parameters()
        lists = self._lists
        if lists is None or (self._frozen and self.has_unfrozen) or not lists.are_of(parameters, device):
            self.adopt()
            lists = self._lists = StepLists(self, self.parameters(), device)
        return lists

    @property
    def layout(self) -> Layout:
        """On which ranks they lay at the last step, where they are sharded."""
        return Layout(()) if self._lists is None else self._lists.layout

    # -- parameters that come late -----------------------------------------------------------------------------------

    @property
    def has_unfrozen(self) -> bool:
        """Whether a 16-bit weight without an FP32 value, for it was frozen, is trained now: :meth:`adopt` makes one."""
        return False

    def adopt(self) -> None:
        """Give FP32 values to 16-bit parameters that came into the optimizer later, or are trained from now on."""

    # -- weights and FP32 values agree -------------------------------------------------------------------------------

    def synchronise(self, refuses: bool = True) -> None:
        """Copy within each pair of weight and master, from the one that somebody else wrote to, to the other. No host read.

        Args:
            refuses: Whether it is an error if both were written to; such a pair is left alone otherwise.

        Raises:
            AmpUsageError: A weight and its master were both written to. Nothing has been changed.
        """

    def before_step(self, busy: Container[Tensor] = ()) -> None:
        """As :meth:`synchronise`, and masters of weights without a gradient follow edits of the weights through ``.data``.

        Args:
            busy: Weights whose gradient lies elsewhere.
        """

    def write_weights(self) -> None:
        """Model weight = master, rounded to nearest-even. Idempotent."""

    def settle(self) -> None:
        """Weights and masters agree now: take them as they are."""

    def mark(self) -> None:
        """Note the bits of the weights after the cast: what is written to them through ``.data`` before they are used shows."""
        paired = filter(fp32_values.has_fp32_value, self.weights())
        self._marks = {id(weight): (weight._version, fp32_values.fingerprint(weight)) for weight in paired}

    def weights_changed(self, tensors: Iterable[Tensor] | None) -> list[str]:
        """Take up edits of weights, also those through ``.data``, in their FP32 values. Syncs.

        Args:
            tensors: The edited weights; all by default.

        Returns:
            The names of those that differed from their FP32 value.

        Raises:
            AmpUsageError: Masters may have been edited as well, and it is not clear which value counts.
        """
        return []

    def masters_changed(self, tensors: Iterable[Tensor] | None) -> None:
        """Copy edited masters to their weights, also after edits through ``.data``. No host read.

        Args:
            tensors: The edited masters; all by default.

        Raises:
            AmpUsageError: Weights may have been edited as well, and it is not clear which value counts.
        """

    def refresh(self) -> list[str]:
        """The weights win: wherever one differs from its FP32 value rounded, that takes the value of the weight. Syncs.

        Returns:
            The names of the weights that had been changed.
        """
        return []

    def release(self) -> None:
        """Put the model's own parameters back into the optimizer. The caller gives them their FP32 values."""
