"""What an optimizer steps in place of 16-bit weights: FP32 masters, or the weights with their remainders."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .. import ops
from ..errors import AmpUsageError, some
from ..ops import attributes
from ..policy.nested import HALF_TYPES, parameters_of
from ..shards import Layout
from ..torch_internals import is_zero, replace_in_zero
from . import fp32_values
from .fp32_values import Pair


class StepLists:
    """What an optimizer steps, and the model weights behind it, as lists in the order of its groups.

    Attributes:
        parameters: What the optimizer steps.
        weights: What the model computes with; backward passes leave their gradients there.
        copies: What a fused update writes beside each parameter: a 16-bit weight, an int16 remainder, or None.
        device: Where the step runs.
        on_one_device: Whether all weights are there.
        layout: On which ranks they lie, where they are sharded.
        pairs: (model weight, FP32 master) where there is one.
    """

    def __init__(self, masters: Masters, device: torch.device) -> None:
        self.parameters = masters.parameters()
        self.weights = masters.weights()
        found = zip(self.weights, map(fp32_values.pair_of, self.weights))
        self.copies = [None if pair is None else pair.partner if pair.is_split else weight for weight, pair in found]
        self.device = device
        self.on_one_device = all(weight.device == device for weight in self.weights)
        self.layout = Layout(self.weights)
        self.pairs = masters.pairs


class Masters:
    """What one optimizer steps, and the weights that the model computes with. Without FP32 values both are the same.

    Made while the weights are still FP32. A master takes over the very storage of its weight, so it is exact and costs no copy;
    it stands in ``param_groups`` where the weight stood, and takes over the weight's optimizer state, uncast. A weight with a
    remainder is taken apart in place, and keeps its place and its state: only the fused optimizers of this package step both
    halves. A weight whose pair another optimizer has made shares it.

    One rule says which weights have an FP32 value, frozen or not: those that come in FP32 and that an optimizer holds, and
    those that join it. A frozen one that comes in 16-bit loses nothing, and gets its FP32 value when it is trained. What no
    optimizer holds is rounded for good, in files too.

    Args:
        optimizer: Holds the parameters, and its groups are changed in place; None for inference.
        weights: The parameters about to become 16-bit, by name.
        kind: 'none'; 'whole' for masters; 'split' for remainders.
        dtype: What the weights become; None where they keep their types.

    Attributes:
        kind: As given.
        have_fp32_values: Whether 16-bit weights have an FP32 value beside their own.
        pairs: (model weight, FP32 master) for each weight with a master, in the order of the optimizer.
    """

    def __init__(
        self,
        optimizer: Optimizer | None,
        weights: Mapping[str, nn.Parameter] | None = None,
        kind: Literal['none', 'whole', 'split'] = 'none',
        dtype: torch.dtype | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.kind = kind
        self.have_fp32_values = kind != 'none'
        self.pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        self._dtype = dtype
        self._names = {id(weight): name for name, weight in (weights or {}).items()}
        # the pairs in the order of the optimizer, and both sides of each
        self._records: list[Pair] = []
        self._weights: list[nn.Parameter] = []
        self._partners: list[nn.Parameter] = []
        # by the id of what is stepped
        self._weight_of: dict[int, nn.Parameter] = {}
        # those that came in 16-bit and frozen, by id: nothing is added to them, so they need no FP32 value until they are trained
        self._frozen: dict[int, nn.Parameter] = {}
        # version counters and addresses when all pairs last agreed: every step and every forward call compares them
        self._agreed: tuple[bytes, ...] = ()
        self._is_new = True
        self._lists: StepLists | None = None
        if self.have_fp32_values:
            has_pair = fp32_values.has_fp32_value
            frozen = (p for p in self.parameters() if p.dtype in HALF_TYPES and not p.requires_grad and not has_pair(p))
            self._frozen = {id(parameter): parameter for parameter in frozen}
            self._add(p for p in self.parameters() if id(p) in self._names or has_pair(p))

    # -- what there is -----------------------------------------------------------------------------------------------

    def parameters(self) -> list[nn.Parameter]:
        """What the optimizer steps: FP32 masters where there are any, else the model's own parameters."""
        return [] if self.optimizer is None else parameters_of(self.optimizer)

    def weights(self) -> list[nn.Parameter]:
        """What the model computes with: the weights behind masters, and parameters that are stepped themselves."""
        parameters = self.parameters()
        return list(map(self.weight_of, parameters)) if self.pairs else parameters

    def without_master(self) -> list[nn.Parameter]:
        """The parameters that are stepped themselves."""
        return [p for p in self.parameters() if self.weight_of(p) is p]

    def weight_of(self, parameter: nn.Parameter) -> nn.Parameter:
        """The model weight behind a master; any other parameter itself."""
        return self._weight_of.get(id(parameter), parameter)

    def lists(self, device: torch.device) -> StepLists:
        """Lists of everything that is stepped now. Kept from step to step, and made anew where anything changed.

        Args:
            device: Where the step runs.
        """
        lists = self._lists
        is_old = (
            lists is None or lists.device != device or any(weight.requires_grad for weight in self._frozen.values())
        )
        if lists is None or is_old or not attributes.same(self.parameters(), lists.parameters):
            self.adopt()
            lists = self._lists = StepLists(self, device)
        return lists

    @property
    def layout(self) -> Layout:
        """On which ranks they lay at the last step, where they are sharded."""
        return Layout(()) if self._lists is None else self._lists.layout

    # -- pairs are made and released ---------------------------------------------------------------------------------

    def adopt(self) -> None:
        """Give FP32 values to 16-bit parameters that came into the optimizer later, or are trained from now on.

        Raises:
            AmpUsageError: A weight with a master was added once more. Nothing has been changed.
        """
        if self.have_fp32_values:
            self._frozen = {key: weight for key, weight in self._frozen.items() if not weight.requires_grad}
            self._add(weight for weight in self.parameters() if weight.dtype in HALF_TYPES)

    def _add(self, weights: Iterable[nn.Parameter]) -> None:
        """Make or share the pairs of weights, but of frozen ones, and of those that are stepped here already."""
        new = [weight for weight in weights if id(weight) not in self._weight_of and id(weight) not in self._frozen]
        known = set(map(id, self._weights))
        twice = [self._name(weight) for weight in new if id(weight) in known]
        if twice:
            raise AmpUsageError(
                f'{some(twice)} was added to the optimizer a second time: it has a master there already. Leave it out of '
                f'add_param_group().'
            )
        masters = {}
        for weight in new:
            dtype = (self._dtype if id(weight) in self._names else None) or weight.dtype
            known_pair = fp32_values.pair_of(weight)
            pair = known_pair or fp32_values.make_pair(weight, self._name(weight), dtype, self.kind == 'split')
            stepped = weight if pair.is_split else pair.partner
            self._records.append(pair)
            self._weights.append(weight)
            self._partners.append(pair.partner)
            self._weight_of[id(stepped)] = weight
            if stepped is not weight:
                self.pairs.append((weight, stepped))
                masters[id(weight)] = stepped
        self._agreed = ()
        self._replace(masters)

    def _name(self, weight: Tensor) -> str:
        return self._names.get(id(weight), f'<parameter of shape {tuple(weight.shape)}>')

    def _replace(self, others: Mapping[int, nn.Parameter]) -> None:
        """Let the optimizer step others in place of some tensors, given by id, with the same state."""
        if self.optimizer is None or not others:
            return
        for group in self.optimizer.param_groups:
            for index, parameter in enumerate(group['params']):
                other = others.get(id(parameter))
                if other is not None:
                    group['params'][index] = other
                    if parameter in self.optimizer.state:
                        self.optimizer.state[other] = self.optimizer.state.pop(parameter)
        if is_zero(self.optimizer):
            replace_in_zero(self.optimizer, others)

    def release(self) -> None:
        """Put the model weights back into the optimizer, with the state of masters, which edits of any kind have reached.

        The caller gives the weights their FP32 values, and lets go of this object.

        Raises:
            AmpUsageError: A weight and its master were both written to. Nothing has been changed.
        """
        self.synchronise()
        fp32_values.weights_win(self._weights)
        self._replace({id(master): weight for weight, master in self.pairs})

    # -- weights and FP32 values agree -------------------------------------------------------------------------------

    def _state(self) -> tuple[bytes, ...]:
        sides, read = (self._weights, self._partners), (attributes.versions, attributes.addresses)
        return tuple(numbers(side) for side in sides for numbers in read)

    def settle(self) -> None:
        """Weights and FP32 values agree now: what the optimizer has just written is no edit."""
        self._agreed = self._state()
        for pair, agreed in zip(self._records, zip(*map(attributes.numbers_of, self._agreed))):
            pair.agreed = agreed

    @torch.no_grad()
    def write_weights(self) -> None:
        """Each weight with a master takes it, rounded to nearest-even. Idempotent."""
        if self.pairs:
            ops.multi_tensor_copy(self._partners, self._weights)
        self.settle()

    def synchronise(self, refuses: bool = True) -> None:
        """As :func:`~amp_wrapper.casting.fp32_values.agree` for all pairs. Where nobody wrote, this compares numbers.

        Args:
            refuses: As there.

        Raises:
            AmpUsageError: A weight and its master were both written to. Nothing has been changed.
        """
        if self._state() != self._agreed and fp32_values.agree(self._weights, refuses):
            self._agreed = self._state()

    def before_step(self, busy: Container[Tensor] = ()) -> None:
        """As :meth:`synchronise`, and masters of weights without a gradient follow edits of the weights through ``.data``.

        Such edits leave no other trace: those of a key encoder, say, that is moved after each iteration. So pairs are compared,
        on the device: before the first step all of them, for weights are written to after they were cast; later those without
        a gradient.

        Args:
            busy: Weights whose gradient lies elsewhere.
        """
        self.synchronise()
        if not self.pairs:
            return
        found = zip(self._weights, attributes.gradients(self._weights), attributes.gradients(self._partners))
        idle = [weight for weight, here, there in found if here is None and there is None and weight not in busy]
        compared, self._is_new = self._weights if self._is_new else idle, False
        if compared:
            fp32_values.weights_win(compared)

    # -- what the user says ------------------------------------------------------------------------------------------

    def weights_changed(self, tensors: Iterable[Tensor] | None) -> list[str]:
        """Take up edits of weights, also those through ``.data``, in their FP32 values. Syncs.

        Args:
            tensors: The edited weights; all by default.

        Returns:
            The names of those that differed from their masters, or that have a remainder.

        Raises:
            AmpUsageError: A master among ``tensors``; or no ``tensors``, and there are remainders, or a master was written to.
        """
        chosen = fp32_values.paired(self._chosen('weight', tensors))
        flags = fp32_values.weights_win([weight for weight, _ in chosen], hidden=True).tolist() or [True] * len(chosen)
        return [pair.name for (_, pair), differs in zip(chosen, flags) if differs]

    def masters_changed(self, tensors: Iterable[Tensor] | None) -> None:
        """Copy edited masters to their weights, also after edits through ``.data``. No host read.

        Where there are remainders, what the optimizer steps are the weights: as :meth:`weights_changed`.

        Args:
            tensors: The edited masters; all by default.

        Raises:
            AmpUsageError: A 16-bit weight among ``tensors``; no ``tensors``, and a weight was written to as well.
        """
        if self.kind == 'split':
            self.weights_changed(tensors)
        else:
            fp32_values.masters_win(self._chosen('master', tensors))

    def _chosen(self, side: Literal['weight', 'master'], tensors: Iterable[Tensor] | None) -> list[nn.Parameter]:
        """The 16-bit weights of which somebody says that one side was edited."""
        sides = {'weight': self._weights, 'master': self._partners}
        own, other = sides.pop(side), *sides
        if tensors is None:
            found = fp32_values.paired(self._weights)
            unclear = [pair.name for weight, pair in found if pair.is_split or pair.edited(weight) in (other, 'both')]
            if unclear:
                raise AmpUsageError(
                    f'{side}s_changed() without names, but the {other}s of {some(unclear)} were written to as well, or are '
                    f"split (master_weights='split'), and would be lost: name what you edited, {side}s_changed([...])."
                )
            return self._weights
        given = set(map(id, tensors))
        if given.intersection(map(id, sides[other])):
            raise AmpUsageError(
                f'{side}s_changed() was given a {other} (masters are in amp.master_params, weights in the model): call '
                f'{other}s_changed([...]) where that is what you edited, or name the {side}.'
            )
        return [weight for weight, tensor in zip(self._weights, own) if id(tensor) in given]
