"""What an optimizer steps in place of 16-bit weights: FP32 masters, or the weights with their remainders."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
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
        devices: Where the weights are.
    """

    def __init__(self, masters: Masters) -> None:
        self.parameters = masters.parameters()
        self.weights = masters.weights()
        found = zip(self.weights, map(fp32_values.pair_of, self.weights))
        self.copies = [None if pair is None else pair.partner if pair.is_split else weight for weight, pair in found]
        self.devices = {weight.device for weight in self.weights}


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
        find_optimizer: Returns what holds the parameters, and its groups are changed in place; None for inference.
        weights: The parameters about to become 16-bit, by name.
        kind: 'none'; 'whole' for masters; 'split' for remainders.
        dtype: What the weights become; None where they keep their types.

    Attributes:
        kind: As given.
        have_fp32_values: Whether 16-bit weights have an FP32 value beside their own.
        behind_masters, masters: The weights that have a master, and the master of each, in the order of the optimizer.
        layout: On which ranks the weights lay at the last step, where they are sharded.
    """

    def __init__(
        self,
        find_optimizer: Callable[[], Optimizer | None],
        weights: Mapping[str, nn.Parameter] | None = None,
        kind: Literal['none', 'whole', 'split'] = 'none',
        dtype: torch.dtype | None = None,
    ) -> None:
        self._find_optimizer, self.kind = find_optimizer, kind
        self.have_fp32_values = kind != 'none'
        self.behind_masters: list[nn.Parameter] = []
        self.masters: list[nn.Parameter] = []
        self.layout = Layout(())
        self._dtype = dtype
        self._names = {id(weight): name for name, weight in (weights or {}).items()}
        # the weights with FP32 values in the order of the optimizer, their partners, and what is known of both
        self._weights: list[nn.Parameter] = []
        self._partners: list[nn.Parameter] = []
        self._records: list[Pair] = []
        # by the id of the master
        self._weight_of: dict[int, nn.Parameter] = {}
        # those that came in 16-bit and frozen, by id: nothing is added to them, so they need no FP32 value until they train
        self._frozen: dict[int, nn.Parameter] = {}
        # version counters and addresses when all pairs last agreed: every step and every forward call compares them
        self._agreed: tuple[list[int], ...] = ()
        self._is_new = True
        self._lists: StepLists | None = None
        if self.have_fp32_values:
            given = self.parameters()
            self._frozen = {id(p): p for p in given if p.dtype in HALF_TYPES and not p.requires_grad}
            self._add([p for p in given if id(p) in self._names or fp32_values.pair_of(p) is not None])

    # -- what there is -----------------------------------------------------------------------------------------------

    def parameters(self) -> list[nn.Parameter]:
        """What the optimizer steps: FP32 masters where there are any, else the model's own parameters."""
        optimizer = self._find_optimizer()
        return [] if optimizer is None else parameters_of(optimizer)

    def weights(self) -> list[nn.Parameter]:
        """What the model computes with: the weights behind masters, and parameters that are stepped themselves."""
        parameters = self.parameters()
        return list(map(self.weight_of, parameters)) if self.masters else parameters

    def without_master(self) -> list[nn.Parameter]:
        """The parameters that are stepped themselves."""
        return [p for p in self.parameters() if id(p) not in self._weight_of]

    def weight_of(self, parameter: nn.Parameter) -> nn.Parameter:
        """The model weight behind a master; any other parameter itself."""
        return self._weight_of.get(id(parameter), parameter)

    def lists(self) -> StepLists:
        """Lists of everything that is stepped now. Kept from step to step, and made anew where anything changed."""
        trains = bool(self._frozen) and any(weight.requires_grad for weight in self._frozen.values())
        lists, now = None if trains else self._lists, self.parameters()
        if lists is None or len(now) != len(lists.parameters) or not all(map(operator.is_, now, lists.parameters)):
            self.adopt()
            lists = self._lists = StepLists(self)
            self.layout = Layout(lists.weights)
        return lists

    # -- pairs are made and released ---------------------------------------------------------------------------------

    def adopt(self) -> None:
        """Give FP32 values to 16-bit parameters that came into the optimizer later, or are trained from now on.

        Raises:
            AmpUsageError: A weight with a master was added once more. Nothing has been changed.
        """
        if self.have_fp32_values:
            self._frozen = {key: weight for key, weight in self._frozen.items() if not weight.requires_grad}
            self._add([weight for weight in self.parameters() if weight.dtype in HALF_TYPES])

    def _add(self, weights: Sequence[nn.Parameter]) -> None:
        """Make or share the pairs of weights, but of frozen ones, and of those that are stepped here already."""
        known = set(map(id, self._weights))
        twice = [pair.name for weight, pair in fp32_values.paired(weights) if id(weight) in known and not pair.is_split]
        if twice:
            raise AmpUsageError(
                f'{some(twice)} was added to the optimizer a second time: it has a master there already. Leave it out of '
                f'add_param_group().'
            )
        for weight in weights:
            pair = fp32_values.pair_of(weight)
            if id(weight) in known or (pair is None and id(weight) in self._frozen):
                continue
            pair = pair or self._make_pair(weight)
            self._weights.append(weight)
            self._partners.append(pair.partner)
            self._records.append(pair)
        self._agreed = ()
        if self.kind == 'whole':
            self.behind_masters, self.masters = self._weights, self._partners
            self._weight_of = {id(master): weight for weight, master in zip(self._weights, self.masters)}
            self._replace({id(weight): master for weight, master in zip(self._weights, self.masters)})

    def _make_pair(self, weight: nn.Parameter) -> Pair:
        name = self._names.get(id(weight))
        dtype = self._dtype if name and self._dtype else weight.dtype
        name = name or f'<parameter of shape {tuple(weight.shape)}>'
        return fp32_values.make_pair(weight, name, dtype, splits=self.kind == 'split')

    def _replace(self, others: Mapping[int, nn.Parameter]) -> None:
        """Let the optimizer step others in place of some tensors, given by id, with the same state."""
        replaced = [parameter for parameter in self.parameters() if id(parameter) in others]
        optimizer = self._find_optimizer()
        if optimizer is None or not replaced:
            return
        state = optimizer.state
        for parameter in replaced:
            if parameter in state:
                state[others[id(parameter)]] = state.pop(parameter)
        for group in optimizer.param_groups:
            group['params'][:] = [others.get(id(parameter), parameter) for parameter in group['params']]
        if is_zero(optimizer):
            replace_in_zero(optimizer, others)

    def release(self) -> None:
        """Put the model weights back into the optimizer, with the state of masters, which edits of any kind have reached.

        The caller gives the weights their FP32 values, and lets go of this object.

        Raises:
            AmpUsageError: A weight and its master were both written to. Nothing has been changed.
        """
        self.synchronise()
        fp32_values.weights_win(self._weights)
        self._replace({id(master): weight for weight, master in zip(self.behind_masters, self.masters)})

    # -- weights and FP32 values agree -------------------------------------------------------------------------------

    def _state(self) -> tuple[list[int], ...]:
        ours, theirs, version, address = self._weights, self._partners, attributes.VERSION, Tensor.data_ptr
        return [*map(version, ours)], [*map(address, ours)], [*map(version, theirs)], [*map(address, theirs)]

    def settle(self) -> None:
        """Weights and FP32 values agree now: what the optimizer has just written is no edit."""
        self._agreed = self._state()
        for pair, agreed in zip(self._records, zip(*self._agreed)):
            pair.agreed = agreed

    @torch.no_grad()
    def write_weights(self) -> None:
        """Each weight with a master takes it, rounded to nearest-even. Idempotent."""
        if self.masters:
            ops.multi_tensor_copy(self._partners, self._weights)
        self.settle()

    def synchronise(self) -> None:
        """As :func:`~amp_wrapper.casting.fp32_values.agree` for all pairs. Where nobody wrote, this compares numbers.

        Raises:
            AmpUsageError: A weight and its master were both written to. Nothing has been changed.
        """
        if self._state() != self._agreed:
            fp32_values.agree(self._weights)
            self._agreed = self._state()

    def before_step(self) -> None:
        """As :meth:`synchronise`, and masters of weights without a gradient follow edits of the weights through ``.data``.

        Such edits leave no other trace: those of a key encoder, say, that is moved after each iteration. So pairs are compared,
        on the device: before the first step all of them, for weights are written to after they were cast; later those without
        a gradient.
        """
        self.synchronise()
        if not self.masters:
            return
        found = zip(self._weights, map(attributes.GRADIENT, self._weights), map(attributes.GRADIENT, self._partners))
        idle = [weight for weight, here, there in found if here is None and there is None]
        compared, self._is_new = self._weights if self._is_new else idle, False
        if compared:
            fp32_values.weights_win(compared)

    def changed(self, side: Literal['weight', 'master'], tensors: Iterable[Tensor] | None) -> list[str]:
        """Take up what the user says was edited on one side, perhaps through ``.data``, on the other one.

        Where there are remainders, what the optimizer steps are the weights: they count as both.

        Args:
            side: Of weights, the FP32 values follow. Syncs. Of masters, the weights follow. No host read.
            tensors: What was edited; all of that side by default.

        Returns:
            The names of weights that differed from their masters, or that have a remainder; none of masters.

        Raises:
            AmpUsageError: Tensors of the other side; or no ``tensors``, and there are remainders, or the other side was written
                to as well.
        """
        other = 'master' if side == 'weight' else 'weight'
        given = None if tensors is None else set(map(id, tensors))
        chosen, unclear = [], []
        for weight, pair in fp32_values.paired(self._weights):
            own, beside = (weight, pair.partner) if side == 'weight' or pair.is_split else (pair.partner, weight)
            if given is None and (pair.is_split or pair.edited(weight) in (other, 'both')):
                unclear.append(pair.name)
            elif given is None or id(own) in given:
                chosen.append((weight, pair))
            elif id(beside) in given:
                raise AmpUsageError(
                    f'{side}s_changed() was given a {other} (masters are in amp.master_params, weights in the model): call '
                    f'{other}s_changed([...]) where that is what you edited, or name the {side}.'
                )
        if unclear:
            raise AmpUsageError(
                f'{side}s_changed() without names, but the {other}s of {some(unclear)} were written to as well, or are split '
                f"(master_weights='split'), and would be lost: name what you edited, {side}s_changed([...])."
            )
        weights = [weight for weight, _ in chosen]
        if side == 'master' and self.kind == 'whole':
            fp32_values.masters_win(weights)
            return []
        for _, pair in chosen:
            # though nothing may show it
            pair.agreed = ()
        names = [pair.name for weight, pair in chosen if fp32_values.differs(weight, pair)]
        fp32_values.weights_win(weights)
        return names
