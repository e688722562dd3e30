"""What an optimizer steps in place of 16-bit weights: FP32 masters, or the weights with their remainders."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .. import ops
from ..errors import AmpUsageError, some
from ..ops import attributes
from ..ops.split import split
from ..policy.nested import HALF_TYPES, parameters_of
from ..shards import Layout
from ..torch_internals import in_function_transform, is_zero, replace_in_zero
from . import fp32_values
from .fp32_values import Pair


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

    def __init__(self, masters: Masters, device: torch.device) -> None:
        self.parameters = masters.parameters()
        self.weights = masters.weights()
        found = zip(self.weights, map(fp32_values.pair_of, self.weights))
        self.copies = [None if pair is None else pair.partner if pair.is_split else weight for weight, pair in found]
        self.on_one_device = all(weight.device == device for weight in self.weights)
        self.layout = Layout(self.weights)
        self.pairs = masters.pairs
        self._device = device
        self._types = [weight.dtype for weight in self.weights]

    def are_of(self, parameters: Sequence[nn.Parameter], device: torch.device) -> bool:
        """Whether these parameters are still the same objects, of the same types."""
        is_same = attributes.same(parameters, self.parameters) and device == self._device
        return is_same and self._types == [weight.dtype for weight in self.weights]


class Masters:
    """What one optimizer steps, and the weights that the model computes with. Without FP32 values both are the same.

    Made while the weights are still FP32. A master takes over the very storage of its weight, so it is exact and costs no copy;
    it stands in ``param_groups`` where the weight stood, and takes over the weight's optimizer state, uncast. A weight with a
    remainder is taken apart in place, and keeps its place and its state: only the fused optimizers of this package step both
    halves. A weight whose pair another optimizer has made shares it.

    One rule says which weights have an FP32 value, frozen or not: those that come in FP32 and that an optimizer holds. A frozen
    one that comes in 16-bit loses nothing, and gets its FP32 value when it is trained. What no optimizer holds is rounded for
    good, in files too.

    Args:
        optimizer: Holds the parameters, and its groups are changed in place; None for inference.
        weights: The parameters about to become 16-bit, by name.
        kind: 'none'; 'whole' for masters; 'split' for remainders.
        dtype: What the weights become.

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
        dtype: torch.dtype = torch.float32,
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
        # 16-bit weights without FP32 values, as long as they are frozen
        self._frozen: list[nn.Parameter] = []
        # version counters and addresses when all pairs last agreed: every step and every forward call compares them
        self._agreed: tuple[bytes, ...] = ()
        # the versions and bits of weights after the cast, until they are used for the first time
        self._marks: list[tuple[Tensor, int, Tensor]] = []
        # whether weights show what was written to masters before
        self._are_shown = False
        self._lists: StepLists | None = None
        if self.have_fp32_values:
            self._add(p for p in self.parameters() if id(p) in self._names or fp32_values.has_fp32_value(p))

    # -- what there is -----------------------------------------------------------------------------------------------

    def parameters(self) -> list[nn.Parameter]:
        """What the optimizer steps: FP32 masters where there are any, else the model's own parameters."""
        return [] if self.optimizer is None else parameters_of(self.optimizer)

    def weights(self) -> list[nn.Parameter]:
        """What the model computes with: the weights behind masters, and parameters that are stepped themselves."""
        parameters = self.parameters()
        return [self._weight_of.get(id(p), p) for p in parameters] if self.pairs else parameters

    def without_master(self) -> list[nn.Parameter]:
        """The parameters that are stepped themselves."""
        return [p for p in self.parameters() if self._weight_of.get(id(p), p) is p]

    def weight_of(self, parameter: nn.Parameter) -> nn.Parameter:
        """The model weight behind a master; any other parameter itself."""
        return self._weight_of.get(id(parameter), parameter)

    def lists(self, device: torch.device) -> StepLists:
        """Lists of everything that is stepped now. Kept from step to step, and made anew where anything changed.

        Args:
            device: Where the step runs.
        """
        if self.has_unfrozen or self._lists is None or not self._lists.are_of(self.parameters(), device):
            self.adopt()
            self._lists = StepLists(self, device)
        return self._lists

    @property
    def layout(self) -> Layout:
        """On which ranks they lay at the last step, where they are sharded."""
        return Layout(()) if self._lists is None else self._lists.layout

    # -- pairs are made and released ---------------------------------------------------------------------------------

    @property
    def has_unfrozen(self) -> bool:
        """Whether a 16-bit weight without an FP32 value, for it was frozen, is trained now: :meth:`adopt` makes one."""
        return any(weight.requires_grad for weight in self._frozen)

    def adopt(self) -> None:
        """Give FP32 values to 16-bit parameters that came into the optimizer later, or are trained from now on.

        Raises:
            AmpUsageError: A weight with a master was added once more. Nothing has been changed.
        """
        if self.have_fp32_values:
            self._add(weight for weight in self.parameters() if weight.dtype in HALF_TYPES)

    def _add(self, weights: Iterable[nn.Parameter]) -> None:
        """Make or share the pairs of weights, but of those that are stepped here already."""
        known, new, frozen = set(map(id, self._weights)), [], []
        for weight in weights:
            if id(weight) in self._weight_of:
                continue
            is_frozen = weight.dtype in HALF_TYPES and not weight.requires_grad
            if is_frozen and not fp32_values.has_fp32_value(weight):
                # nothing is added to it, so it needs no FP32 value beside it
                frozen.append(weight)
                continue
            if id(weight) in known:
                raise AmpUsageError(
                    f'{self._name(weight)} was added to the optimizer a second time: it has a master there already. '
                    f'Leave it out of add_param_group().'
                )
            known.add(id(weight))
            new.append(weight)
        self._frozen = frozen
        for weight in new:
            pair = fp32_values.pair_of(weight)
            if pair is None or pair.is_split is not (self.kind == 'split'):
                pair = self._new_pair(weight)
            self._records.append(pair)
            self._weights.append(weight)
            self._partners.append(pair.partner)
            self._weight_of[id(weight if pair.is_split else pair.partner)] = weight
            if not pair.is_split:
                self.pairs.append((weight, pair.partner))
        if new:
            self._agreed = ()
            self._replace({id(weight): master for weight, master in self.pairs})

    def _new_pair(self, weight: nn.Parameter) -> Pair:
        # an FP32 weight hands over its storage: its cast replaces it right after
        value = weight.data.float()
        if self.kind == 'whole':
            partner = nn.Parameter(value, requires_grad=weight.requires_grad)
        else:
            near, bits = split(value, self._dtype if id(weight) in self._names else weight.dtype)
            partner = nn.Parameter(bits, requires_grad=False)
            if weight.dtype is not near.dtype:
                grad, weight.grad = weight.grad, None
                # through .data, so that the optimizer, DDP and tied modules keep the very object they hold
                weight.data = near
                weight.grad = None if grad is None else grad.to(near.dtype)
        return fp32_values.make_pair(weight, self._name(weight), partner)

    def _name(self, weight: Tensor) -> str:
        return self._names.get(id(weight), f'<parameter of shape {tuple(weight.shape)}>')

    def _replace(self, others: Mapping[int, nn.Parameter]) -> None:
        """Let the optimizer step others in place of some tensors, given by id, with the same state."""
        assert self.optimizer is not None
        for group in self.optimizer.param_groups:
            for index, parameter in enumerate(group['params']):
                other = others.get(id(parameter))
                if other is not None:
                    group['params'][index] = other
                    if parameter in self.optimizer.state:
                        self.optimizer.state[other] = self.optimizer.state.pop(parameter)
        if others and is_zero(self.optimizer):
            replace_in_zero(self.optimizer, others)

    def release(self) -> None:
        """Put the model weights back into the optimizer, with the state of masters, which edits of any kind have reached.

        The caller gives the weights their FP32 values, and lets go of this object.

        Raises:
            AmpUsageError: A weight and its master were both written to. Nothing has been changed.
        """
        self.synchronise()
        fp32_values.weights_win(self._weights)
        if self.pairs:
            self._replace({id(master): weight for weight, master in self.pairs})

    # -- weights and FP32 values agree -------------------------------------------------------------------------------

    def _state(self) -> tuple[bytes, ...]:
        sides, read = (self._weights, self._partners), (attributes.versions, attributes.addresses)
        return tuple(numbers(side) for side in sides for numbers in read)

    def settle(self) -> None:
        """Weights and FP32 values agree now: what the optimizer has just written is no edit."""
        self._agreed = self._state()
        numbers = zip(*map(attributes.numbers_of, self._agreed))
        for pair, weight, agreed in zip(self._records, self._weights, numbers):
            pair.agreed, pair.dtype = agreed, weight.dtype

    @torch.no_grad()
    def write_weights(self) -> None:
        """Each weight with a master takes it, rounded to nearest-even. Idempotent."""
        if self.pairs:
            ops.multi_tensor_copy(self._partners, self._weights)
        self.settle()

    def synchronise(self, refuses: bool = True) -> None:
        """As :func:`~amp_wrapper.casting.fp32_values.agree` for all pairs. Where nobody wrote, this compares numbers.

        A weight whose ``.data`` was replaced by numbers of another type becomes 16-bit again; its FP32 value takes them as they
        were.

        Args:
            refuses: As there.

        Raises:
            AmpUsageError: A weight and its master were both written to. Nothing has been changed.
        """
        if self._state() == self._agreed:
            return
        for pair, weight in zip(self._records, self._weights):
            if weight.dtype is not pair.dtype and fp32_values.has_fp32_value(weight):
                value = weight.data
                weight.data = value.to(pair.dtype)
                fp32_values.write_fp32(weight, value)
        if fp32_values.agree(self._weights, refuses):
            self._agreed = self._state()

    def mark(self) -> None:
        """Note the bits of the weights after the cast: what is written to them through ``.data`` before they are used shows."""
        found = fp32_values.paired(self._weights)
        self._marks = [(weight, weight._version, fp32_values.fingerprint(weight)) for weight, _ in found]

    @torch.no_grad()
    def before_forward(self, trains: bool) -> None:
        """As :meth:`synchronise`; the first time, edits through ``.data`` since the cast count too. No host read.

        A weight whose bits are those after the cast follows its master, any other one is followed where the call ``trains``,
        which it does where gradients are recorded: averages that are evaluated before are taken out again.
        """
        self.synchronise()
        # what transforms the call would transform this
        if not self._marks or (self._are_shown and not trains) or in_function_transform(or_mode=True):
            return
        marks, self._marks, self._are_shown = self._marks, [], True
        for weight, version, mark in marks:
            pair = fp32_values.pair_of(weight)
            if pair is None or weight.dtype not in HALF_TYPES or (pair.is_split and weight._version != version):
                continue
            is_old = fp32_values.fingerprint(weight) == mark.to(weight.device)
            if pair.is_split:
                pair.partner.mul_(is_old)
                continue
            # by .data: graphs that are there already may hold both
            weight.data.copy_(torch.where(is_old, pair.partner, weight))
            if trains:
                ops.multi_tensor_refresh([weight], [pair.partner.data])
            else:
                self._marks.append((weight, version, torch.where(is_old, fp32_values.fingerprint(weight), mark)))

    def before_step(self, busy: Container[Tensor] = ()) -> None:
        """As :meth:`before_forward`, and masters of weights without a gradient follow edits of the weights through ``.data``.

        Such edits leave no other trace: those of a key encoder, say, that is moved after each iteration. Only pairs without a
        gradient are compared, on the device.

        Args:
            busy: Weights whose gradient lies elsewhere.
        """
        self.before_forward(trains=True)
        if not self.pairs:
            return
        found = zip(self._weights, attributes.gradients(self._weights), attributes.gradients(self._partners))
        idle = [weight for weight, here, there in found if here is None and there is None and weight not in busy]
        if idle:
            fp32_values.weights_win(idle)

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

    def _chosen(self, side: Literal['weight', 'master'], tensors: Iterable[Tensor] | None) -> list[Tensor]:
        """The 16-bit weights of which somebody says that one side was edited."""
        other, call = 'master' if side == 'weight' else 'weight', f'{side}s_changed'
        own, others = (self._weights, self._partners) if side == 'weight' else (self._partners, self._weights)
        found = fp32_values.paired(self._weights)
        if tensors is None:
            if self.kind == 'split':
                raise AmpUsageError(
                    f"{call}(None) with master_weights='split' would round every weight, edited or not: name those that were "
                    f'edited, {call}([model.fc.weight]).'
                )
            unclear = [pair.name for weight, pair in found if pair.edited(weight) in (other, 'both')]
            if unclear:
                raise AmpUsageError(
                    f'{call}() without names, but the {other}s of {some(unclear)} were written to as well, and that would be '
                    f'lost: name what you edited, {call}([...]).'
                )
            return list(self._weights)
        given = set(map(id, tensors))
        if given.intersection(map(id, others)):
            raise AmpUsageError(
                f'{call}() was given a {other} (masters are in amp.master_params, weights in the model): call '
                f'{other}s_changed([...]) where that is what you edited, or name the {side}.'
            )
        return [weight for weight, tensor in zip(self._weights, own) if id(tensor) in given]
