"""What an optimizer steps in place of 16-bit weights: FP32 masters, or the weights with their remainders."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .. import ops
from ..errors import AmpUsageError, some
from ..ops.attributes import VERSION
from ..policy.nested import HALF_TYPES, parameters_of
from ..shards import Layout
from ..torch_internals import is_zero, note_parameters
from . import fp32_values
from .fp32_values import Pair, make_pair, pairs


class StepLists(NamedTuple):
    """What an optimizer steps, and the model weights behind it, as lists in the order of its groups.

    Attributes:
        parameters: What the optimizer steps.
        weights: What the model computes with; backward passes leave their gradients there.
        copies: What a fused update writes beside each parameter: a 16-bit weight, an int16 remainder, or None.
    """

    parameters: list[nn.Parameter]
    weights: list[nn.Parameter]
    copies: list[nn.Parameter | None]


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
        self._names = {id(weight): name for name, weight in (weights or {}).items()}
        # the weights with FP32 values, in the order of the optimizer
        self._pairs: dict[nn.Parameter, Pair] = {}
        # by the id of the master
        self._weight_of: dict[int, nn.Parameter] = {}
        # those that came in 16-bit and frozen: nothing is added to them, so they need no FP32 value until they train
        self._frozen: set[nn.Parameter] = set()
        # version counters and addresses when all pairs last agreed: every step and every forward call compares them
        self._agreed: tuple[list[int], ...] = ()
        self._is_new = True
        self._lists: StepLists | None = None
        if self.have_fp32_values:
            self._frozen.update(p for p in self.parameters() if p.dtype in HALF_TYPES and not p.requires_grad)
            self._add([p for p in self.parameters() if id(p) in self._names or p in pairs], dtype)

    # -- what there is -----------------------------------------------------------------------------------------------

    def parameters(self) -> list[nn.Parameter]:
        """What the optimizer steps: FP32 masters where there are any, else the model's own parameters."""
        optimizer = self._find_optimizer()
        return [] if optimizer is None else parameters_of(optimizer)

    def weights(self) -> list[nn.Parameter]:
        """What the model computes with: the weights behind masters, and parameters that are stepped themselves."""
        return list(map(self.weight_of, self.parameters()))

    def without_master(self) -> list[nn.Parameter]:
        """The parameters that are stepped themselves."""
        return [p for p in self.parameters() if id(p) not in self._weight_of]

    def weight_of(self, parameter: nn.Parameter) -> nn.Parameter:
        """The model weight behind a master; any other parameter itself."""
        return self._weight_of.get(id(parameter), parameter)

    def lists(self) -> StepLists:
        """Lists of everything that is stepped now. Kept from step to step, and made anew where anything changed."""
        trains = bool(self._frozen) and any(weight.requires_grad for weight in self._frozen)
        lists, now = None if trains else self._lists, self.parameters()
        if lists is None or len(now) != len(lists.parameters) or not all(map(operator.is_, now, lists.parameters)):
            self.adopt()
            weights = self.weights()
            found = zip(weights, map(self._pairs.get, weights))
            copies = [None if pair is None else pair.partner if pair.is_split else weight for weight, pair in found]
            lists = self._lists = StepLists(self.parameters(), weights, copies)
            self.layout = Layout(weights)
        return lists

    # -- pairs are made and released ---------------------------------------------------------------------------------

    def adopt(self) -> None:
        """Give FP32 values to 16-bit parameters that came into the optimizer later, or are trained from now on.

        Raises:
            AmpUsageError: A weight with a master was added once more. Nothing has been changed.
        """
        if self.have_fp32_values:
            self._frozen = {weight for weight in self._frozen if not weight.requires_grad}
            self._add([weight for weight in self.parameters() if weight.dtype in HALF_TYPES])

    def _add(self, weights: Sequence[nn.Parameter], dtype: torch.dtype | None = None) -> None:
        """Make or share the pairs of weights, but of frozen ones, and of those that are stepped here already.

        Args:
            weights: Of the optimizer.
            dtype: What those without a pair are about to become; None where they are 16-bit.
        """
        twice = [self._pairs[weight].name for weight in weights if weight in self._pairs and self.kind == 'whole']
        if twice:
            raise AmpUsageError(
                f'{some(twice)} has a master in the optimizer already: leave it out of add_param_group().'
            )
        new = [p for p in weights if p not in self._pairs and (p in pairs or p not in self._frozen)]
        for weight in new:
            name = self._names.get(id(weight), f'<parameter of shape {tuple(weight.shape)}>')
            made = pairs.get(weight) or make_pair(weight, name, dtype or weight.dtype, splits=self.kind == 'split')
            self._pairs[weight] = made
        if new:
            self._agreed, self._lists = (), None
        if new and self.kind == 'whole':
            self.behind_masters, self.masters = list(self._pairs), [pair.partner for pair in self._pairs.values()]
            self._weight_of = {id(master): weight for weight, master in zip(self.behind_masters, self.masters)}
            replace_parameters(self._find_optimizer(), dict(zip(map(id, self.behind_masters), self.masters)))

    def release(self) -> None:
        """Put the model weights back into the optimizer, with the state of masters, which edits of any kind have reached.

        The caller gives the weights their FP32 values, and lets go of this object.

        Raises:
            AmpUsageError: A weight and its master were both written to. Nothing has been changed.
        """
        fp32_values.weights_win(fp32_values.agree(self._pairs))
        replace_parameters(self._find_optimizer(), self._weight_of)

    # -- weights and FP32 values agree -------------------------------------------------------------------------------

    def _state(self) -> tuple[list[int], ...]:
        ours, theirs = self._pairs, self.masters or [pair.partner for pair in self._pairs.values()]
        return (
            [*map(VERSION, ours)],
            [*map(Tensor.data_ptr, ours)],
            [*map(VERSION, theirs)],
            [*map(Tensor.data_ptr, theirs)],
        )

    def settle(self) -> None:
        """Weights and FP32 values agree now: what the optimizer has just written is no edit."""
        self._agreed = self._state()
        for pair, agreed in zip(self._pairs.values(), zip(*self._agreed)):
            pair.agreed = agreed

    @torch.no_grad()
    def write_weights(self) -> None:
        """Each weight with a master takes it, rounded to nearest-even. Idempotent."""
        ops.multi_tensor_copy(self.masters, self.behind_masters)
        self.settle()

    def synchronise(self) -> None:
        """As :func:`~amp_wrapper.casting.fp32_values.agree` for all pairs. Where nobody wrote, this compares numbers.

        Raises:
            AmpUsageError: A weight and its master were both written to. Nothing has been changed.
        """
        if self._state() != self._agreed:
            fp32_values.agree(self._pairs)
            self._agreed = self._state()

    def before_step(self) -> None:
        """As :meth:`synchronise`, and masters of weights without a gradient follow edits of the weights through ``.data``.

        Such edits leave no other trace: those of a key encoder, say, that is moved after each iteration. So pairs are compared,
        on the device: before the first step all of them, for weights are written to after they were cast; later those without
        a gradient.
        """
        self.synchronise()
        both = zip(self.behind_masters, self.masters)
        compared = [weight for weight, master in both if self._is_new or weight.grad is master.grad is None]
        self._is_new = False
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
        for weight, pair in fp32_values.paired(self._pairs):
            own, beside = (weight, pair.partner) if side == 'weight' or pair.is_split else (pair.partner, weight)
            weight_edited, master_edited = pair.edited(weight)
            would_be_lost = pair.is_split or (master_edited if side == 'weight' else weight_edited)
            if (would_be_lost if given is None else id(beside) in given) and id(own) not in (given or ()):
                unclear.append(pair.name)
            elif given is None or id(own) in given:
                chosen.append(weight)
        if unclear:
            raise AmpUsageError(
                f'{side}s_changed() does not tell which side of {some(unclear)} counts: you named the {other}, or it was '
                f"written to, or there are no masters (master_weights='split'). Name what you edited: "
                f'weights_changed([model.fc.weight]), or masters_changed([...]) with what amp.master_params gives.'
            )
        if side == 'master' and self.kind == 'whole':
            fp32_values.masters_win(chosen)
            return []
        names = [pairs[weight].name for weight in filter(fp32_values.differ, chosen)]
        fp32_values.weights_win(chosen)
        return names


def replace_parameters(optimizer: Any, others: Mapping[int, nn.Parameter]) -> None:
    """Let an optimizer step others in place of some tensors, given by id, with the same state.

    Args:
        optimizer: None for nothing. The groups that ``ZeroRedundancyOptimizer`` shows are copies of those of one inside.
        others: Of the same sizes, by which ZeRO divides parameters: each rank keeps what it has.
    """
    for group in () if optimizer is None else optimizer.param_groups:
        group['params'][:] = [others.get(id(parameter), parameter) for parameter in group['params']]
    for parameter in () if optimizer is None else list(optimizer.state):
        optimizer.state[others.get(id(parameter), parameter)] = optimizer.state.pop(parameter)
    if is_zero(optimizer):
        replace_parameters(optimizer.optim, others)
        note_parameters(optimizer)
