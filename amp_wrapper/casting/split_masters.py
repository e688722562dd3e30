"""Split masters: 16-bit weights that the optimizer steps themselves, each with an int16 remainder beside it."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import AmpAttachError, AmpUsageError
from ..policy.nested import HALF_TYPES, is_frozen_16bit
from . import fp32_values
from .fp32_values import Remainder
from .param_pairs import ParamPairs


class SplitMasters(ParamPairs):
    """The remainders of the 16-bit weights that an optimizer steps: 2 bytes each, where a master would take 4 more.

    Weight and remainder together are the exact FP32 master, which exists nowhere else. The optimizer's ``param_groups`` keep
    the model's own parameters, and its state stays keyed by them, uncast. Only an optimizer that reads and writes both halves
    in one pass can step them (:func:`check_optimizer`).

    Built while the weights are still FP32, which it takes apart in place. A weight that another optimizer's engine has split
    already shares its remainder. Parameters that stay FP32 have none and do not appear here.

    Args:
        optimizer: Holds the parameters.
        weights: The parameters about to become 16-bit, by name. Only those in ``optimizer`` are split.
        dtype: ``torch.float16`` or ``torch.bfloat16``.
    """

    have_fp32_values = True

    def __init__(self, optimizer: Optimizer, weights: Mapping[str, nn.Parameter], dtype: torch.dtype) -> None:
        super().__init__(optimizer)
        self._names = {id(weight): name for name, weight in weights.items()}
        self._held: dict[int, tuple[nn.Parameter, Remainder]] = {}
        known = {id(weight) for weight in weights.values()}
        self._frozen = [weight for weight in self.parameters() if is_frozen_16bit(weight)]
        for weight in self.parameters():
            remainder = fp32_values.remainder_of(weight)
            if remainder is None and id(weight) in known and not is_frozen_16bit(weight):
                remainder = fp32_values.take_apart(weight, dtype)
            if remainder is not None:
                self._held[id(weight)] = (weight, remainder)

    def __len__(self) -> int:
        return len(self._held)

    def copy_of(self, parameter: Tensor) -> Tensor | None:
        """The live int16 remainder of a weight, which a fused update writes; None for a parameter without one."""
        found = self._held.get(id(parameter))
        # a weight that another optimizer shared is FP32 again once that one was detached
        return None if found is None or parameter.dtype not in HALF_TYPES else found[1].bits

    def adopt(self) -> None:
        """Give remainders of zero to 16-bit parameters that came into the optimizer later, by ``add_param_group``."""
        for weight in self.parameters():
            if id(weight) not in self._held and weight.dtype in HALF_TYPES and weight.requires_grad:
                remainder = fp32_values.remainder_of(weight)
                if remainder is None:
                    remainder = Remainder(weight, torch.zeros_like(weight, dtype=torch.int16))
                    fp32_values.pair(weight, remainder)
                self._held[id(weight)] = (weight, remainder)

    @property
    def has_unfrozen(self) -> bool:
        """Whether a weight without a remainder is trained now: :meth:`adopt` makes one."""
        return any(
            weight.requires_grad and id(weight) not in self._held and weight.dtype in HALF_TYPES
            for weight in self._frozen
        )

    def settle(self) -> None:
        """What the optimizer has just written to the weights is no edit."""
        for weight, held in self._held.values():
            held.version = weight._version

    def write_weights(self) -> None:
        """There is nothing to write: as :meth:`settle`."""
        self.settle()

    def synchronise(self, refuses: bool = True) -> None:
        """A weight changed by anyone but the optimizer wins: its remainder becomes zero, all of it. No host read.

        Args:
            refuses: Without a meaning here: there is no master tensor that somebody could write to.
        """
        self._drop(self.edited())

    def before_step(self, busy: Container[Tensor] = ()) -> None:
        """As :meth:`synchronise`. Before the first step, weights that were edited through ``.data`` since the cast are found.

        Later edits of that kind leave no trace, since the old value is not kept.

        Args:
            busy: Weights whose gradient lies elsewhere.
        """
        self.synchronise()
        marks, self._marks = self._marks, {}
        for key, (version, mark) in marks.items():
            weight, remainder = self._held[key]
            if weight._version == version:
                remainder.bits.mul_(fp32_values.fingerprint(weight) == mark.to(weight.device))

    def refresh(self) -> list[str]:
        """As :meth:`synchronise`.

        Returns:
            The names of the weights that were changed, by torch's version counters.
        """
        return self._drop(self.edited())

    def edited(self) -> list[nn.Parameter]:
        """The weights that were written to since the last step, by torch's version counters.

        Edits through ``.data`` do not count there, and leave no other trace.
        """
        return [weight for weight, held in self._held.values() if held.is_stale(weight) and weight.dtype in HALF_TYPES]

    def weights_changed(self, tensors: Iterable[Tensor] | None) -> list[str]:
        """Take up edits of weights, also those through ``.data``: their remainders become zero.

        Args:
            tensors: The edited weights.

        Returns:
            The names of those that are split.

        Raises:
            AmpUsageError: ``tensors`` is None: the edited weights cannot be found, and all others would be rounded.
        """
        if tensors is None:
            raise AmpUsageError(
                "weights_changed(None) with master_weights='split' would round every weight, edited or not: name those that "
                'were edited, weights_changed([model.fc.weight]).'
            )
        wanted = set(map(id, tensors))
        return self._drop(w for key, (w, _) in self._held.items() if key in wanted and w.dtype in HALF_TYPES)

    def masters_changed(self, tensors: Iterable[Tensor] | None) -> None:
        """As :meth:`weights_changed`: what the optimizer steps are the weights.

        Args:
            tensors: The edited weights.

        Raises:
            AmpUsageError: ``tensors`` is None.
        """
        self.weights_changed(tensors)

    def _drop(self, weights: Iterable[nn.Parameter]) -> list[str]:
        names = []
        for weight in weights:
            self._held[id(weight)][1].drop(weight)
            names.append(self._names.get(id(weight), f'<parameter of shape {tuple(weight.shape)}>'))
        return names

    def release(self) -> None:
        """Let go of the weights. The caller gives them their FP32 values."""
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
