"""Split masters: 16-bit weights that the optimizer steps themselves, each with an int16 remainder beside it."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import AmpAttachError, AmpUsageError
from ..policy.nested import HALF_TYPES, is_frozen_16bit
from . import fp32_values as twins
from .fp32_values import Remainder


class SplitWeights:
    """The remainders of the 16-bit weights that an optimizer steps: 2 bytes each, where a master would take 4 more.

    Weight and remainder together are the exact FP32 master, which exists nowhere else. The optimizer's ``param_groups`` keep
    the model's own parameters, and its state stays keyed by them, uncast. Only an optimizer that reads and writes both halves
    in one pass can step them (:func:`check_optimizer`). The methods are those of
    :class:`~amp_wrapper.casting.masters.MasterWeights` as far as they make sense here.

    Built while the weights are still FP32, which it takes apart in place. A weight that another optimizer's engine has split
    already shares its remainder. Parameters that stay FP32 have none and do not appear here.

    Args:
        optimizer: Holds the parameters.
        weights: The parameters about to become 16-bit, by name. Only those in ``optimizer`` are split.
        dtype: ``torch.float16`` or ``torch.bfloat16``.
    """

    def __init__(self, optimizer: Optimizer, weights: Mapping[str, nn.Parameter], dtype: torch.dtype) -> None:
        self._optimizer = optimizer
        self._names = {id(weight): name for name, weight in weights.items()}
        self._held: dict[int, tuple[nn.Parameter, Remainder]] = {}
        known = {id(weight) for weight in weights.values()}
        self._frozen = [weight for weight in self._parameters() if is_frozen_16bit(weight)]
        for weight in self._parameters():
            remainder = twins.remainder_of(weight)
            if remainder is None and id(weight) in known and not is_frozen_16bit(weight):
                remainder = twins.take_apart(weight, dtype)
            if remainder is not None:
                self._held[id(weight)] = (weight, remainder)

    def _parameters(self) -> Iterator[nn.Parameter]:
        for group in self._optimizer.param_groups:
            yield from group['params']

    def __len__(self) -> int:
        return len(self._held)

    @property
    def pairs(self) -> Iterable[tuple[nn.Parameter, Tensor]]:
        """(model weight, int16 remainder) for every split weight, in the optimizer's order."""
        # a weight that another optimizer shared is FP32 again once that one was detached
        return [(weight, held.bits) for weight, held in self._held.values() if weight.dtype in HALF_TYPES]

    def partner_of(self, weight: Tensor) -> Tensor | None:
        """The live int16 remainder of a weight, for who steps it; None for a parameter that is its own master."""
        found = self._held.get(id(weight))
        return None if found is None or weight.dtype not in HALF_TYPES else found[1].bits

    def is_master(self, parameter: Tensor) -> bool:
        """Always False: what the optimizer steps are the model's own weights."""
        return False

    def weight_of(self, parameter: nn.Parameter) -> nn.Parameter:
        """The parameter itself."""
        return parameter

    def adopt(self) -> None:
        """Give remainders of zero to 16-bit parameters that came into the optimizer later, by ``add_param_group``."""
        for weight in self._parameters():
            if id(weight) not in self._held and weight.dtype in HALF_TYPES and weight.requires_grad:
                remainder = twins.remainder_of(weight)
                if remainder is None:
                    remainder = Remainder(weight, torch.zeros_like(weight, dtype=torch.int16))
                    twins.pair(weight, remainder)
                self._held[id(weight)] = (weight, remainder)

    @property
    def has_unfrozen(self) -> bool:
        """Whether a weight without a remainder is trained now: :meth:`adopt` makes one."""
        return any(
            weight.requires_grad and id(weight) not in self._held and weight.dtype in HALF_TYPES
            for weight in self._frozen
        )

    def copy_to_weights(self) -> None:
        """After a step: there is nothing to copy, and what the optimizer wrote to the weights is no edit."""
        self.mark_clean()

    def settle(self) -> None:
        """The same."""
        self.mark_clean()

    def synchronise(self, refuses: bool = True) -> None:
        """As :meth:`refresh`: what the optimizer steps is the weight itself, so there is no other side. No host read.

        Args:
            refuses: Without a meaning here.
        """
        self.refresh()

    def follow_idle(self, busy: Container[Tensor] = ()) -> None:
        """Nothing: an edit through ``.data`` cannot be told from a weight that was always so.

        Args:
            busy: Weights whose gradient lies elsewhere.
        """

    def mark_clean(self, weights: Iterable[Tensor] | None = None) -> None:
        """Take the present values of the weights as known: only later edits count as edits."""
        for weight, held in self._held.values() if weights is None else self._chosen(weights):
            held.version = weight._version

    def edited(self) -> list[tuple[nn.Parameter, Tensor]]:
        """The pairs whose weight was written to since the last step, as torch's version counters tell.

        Edits through ``.data`` do not count there, and nothing else tells of them.
        """
        return [
            (weight, held.bits)
            for weight, held in self._held.values()
            if held.is_stale(weight) and weight.dtype in HALF_TYPES
        ]

    def refresh(self, pairs: Iterable[tuple[nn.Parameter, Tensor]] | None = None) -> list[str]:
        """A weight changed by anyone but the optimizer wins: its remainder becomes zero, all of it. No host read.

        Args:
            pairs: The pairs to look at; all by default.

        Returns:
            The names of the weights that torch's version counters tell to be changed.
        """
        stale = self.edited() if pairs is None else [p for p in pairs if self._held[id(p[0])][1].is_stale(p[0])]
        return self._drop(weight for weight, _ in stale)

    def changed(self, tensors: Iterable[Tensor] | None) -> list[str]:
        """Somebody says that weights were edited, through ``.data`` perhaps: their remainders become zero.

        Args:
            tensors: The edited weights.

        Returns:
            The names of those that are split.

        Raises:
            AmpUsageError: ``tensors`` is None: nothing tells the edited weights from the others, which would be rounded.
        """
        if tensors is None:
            raise AmpUsageError(
                "weights_changed(None) with master_weights='split' would round every weight, edited or not: name those that "
                'were edited, weights_changed([model.fc.weight]).'
            )
        return self._drop(weight for weight, _ in self._chosen(tensors))

    def masters_changed(self, tensors: Iterable[Tensor] | None) -> None:
        """As :meth:`changed`: what the optimizer steps are the weights.

        Args:
            tensors: The edited weights.

        Raises:
            AmpUsageError: ``tensors`` is None.
        """
        self.changed(tensors)

    def _drop(self, weights: Iterable[Tensor]) -> list[str]:
        names = []
        for weight in weights:
            self._held[id(weight)][1].drop(weight)
            names.append(self.name(weight))
        return names

    def _chosen(self, tensors: Iterable[Tensor]) -> list[tuple[nn.Parameter, Remainder]]:
        wanted = {id(tensor) for tensor in tensors}
        return [entry for key, entry in self._held.items() if key in wanted and entry[0].dtype in HALF_TYPES]

    def name(self, weight: Tensor) -> str:
        """The qualified name of a weight in its model."""
        return self._names.get(id(weight), f'<parameter of shape {tuple(weight.shape)}>')

    def select(self, tensors: Iterable[Tensor]) -> list[tuple[nn.Parameter, Tensor]]:
        """The pairs whose weight is among ``tensors``."""
        return [(weight, held.bits) for weight, held in self._chosen(tensors)]

    def release(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Let go of the weights; yields each pair. The caller gives the weights their FP32 values."""
        yield from self.pairs
        self._held.clear()


def check_optimizer(optimizer: Optimizer) -> None:
    """Refuse optimizers that would step 16-bit weights without their remainders.

    Raises:
        AmpAttachError: Not one of this package's fused optimizers.
    """
    if not getattr(type(optimizer), 'supports_split_weights', False):
        raise AmpAttachError(
            f"master_weights='split' with {type(optimizer).__name__}: only FusedAdam, FusedAdamW and FusedSGD of amp_wrapper "
            f'step a weight and its remainder together. Use one of them, or master_weights=True.'
        )
