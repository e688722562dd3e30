"""FP32 master weights: the pairs of model weight and master, and their place in the optimizer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .. import ops
from ..errors import AmpUsageError, some
from ..ops import attributes
from ..policy.levels import dtype_name
from ..policy.nested import HALF_TYPES, is_frozen_16bit, parameters_of
from ..policy.options import is_number
from ..torch_internals import in_function_transform, is_zero, replace_in_zero
from . import fp32_values
from .fp32_values import Master
from .param_pairs import ParamPairs

logger = logging.getLogger('amp_wrapper')

_NOTHING_AGREED = (b'', b'', b'', b'')


class Fp32Masters(ParamPairs):
    """The FP32 counterparts that an optimizer steps in place of 16-bit model weights.

    Built while the weights are still FP32: a master takes over the very storage of its weight, so it is exact and
    costs no copy. It stands in the optimizer's ``param_groups`` where the weight stood, and the weight's optimizer
    state becomes its own, uncast. Parameters that stay FP32 are stepped themselves and do not appear here.

    Args:
        optimizer: Holds the parameters; its groups are changed in place.
        weights: The parameters about to become 16-bit, by name. Only those in ``optimizer`` get a master.
        paired: Called with each new weight and the record of its master.
        existing: Gives the record that another optimizer has made for a weight: both step the same master.
    """

    have_fp32_values = True

    def __init__(
        self,
        optimizer: Optimizer,
        weights: Mapping[str, nn.Parameter],
        paired: Callable[[nn.Parameter, Master], None] = fp32_values.pair,
        existing: Callable[[Tensor], Master | None] = fp32_values.master_of,
    ) -> None:
        super().__init__(optimizer)
        self._paired = paired
        self._existing = existing
        self._names = {id(weight): name for name, weight in weights.items()}
        # in the optimizer's order: the weights, their masters, and the records of both
        self._weights: list[nn.Parameter] = []
        self._masters: list[nn.Parameter] = []
        self._records: list[Master] = []
        self._index_of_weight: dict[int, int] = {}
        self._weight_of: dict[int, nn.Parameter] = {}
        # the version counters and addresses of all weights and masters, when all pairs last agreed: every step and every
        # forward call compares them
        self._agreed = _NOTHING_AGREED
        known = {id(weight) for weight in weights.values()}
        self._make(lambda parameter: id(parameter) in known or existing(parameter) is not None)

    def __len__(self) -> int:
        return len(self._weights)

    def weights(self) -> list[nn.Parameter]:
        """The weights behind masters, and parameters that are stepped themselves."""
        weight_of = self._weight_of.get
        return [weight_of(id(parameter), parameter) for parameter in self.parameters()]

    def without_master(self) -> list[nn.Parameter]:
        """The parameters that stay FP32, and are stepped themselves."""
        parameters = self.parameters()
        if all(map(self._weight_of.__contains__, map(id, parameters))):
            return []
        return [parameter for parameter in parameters if id(parameter) not in self._weight_of]

    def weight_of(self, parameter: nn.Parameter) -> nn.Parameter:
        """The model weight behind a master; any other parameter itself."""
        return self._weight_of.get(id(parameter), parameter)

    def copy_of(self, parameter: Tensor) -> nn.Parameter | None:
        """The model weight of a master, which a fused update writes beside it. None for any other parameter."""
        return self._weight_of.get(id(parameter))

    def adopt(self) -> None:
        """Give masters to 16-bit parameters that came into the optimizer later, by ``add_param_group``, or are trained from now
        on."""
        self._frozen.clear()
        self._make(lambda parameter: parameter.dtype in HALF_TYPES)

    @property
    def has_unfrozen(self) -> bool:
        """Whether a weight without a master, for it was 16-bit and frozen, is trained now: :meth:`adopt` makes one."""
        return any(weight.requires_grad for weight in self._frozen)

    def _make(self, wanted: Callable[[nn.Parameter], bool]) -> None:
        assert self.optimizer is not None
        replaced: dict[int, Tensor] = {}
        for group in self.optimizer.param_groups:
            for index, weight in enumerate(group['params']):
                if id(weight) in self._weight_of or not wanted(weight):
                    continue
                record = self._existing(weight)
                if record is None and is_frozen_16bit(weight):
                    # nothing is added to it, as long as it stays frozen
                    self._frozen.append(weight)
                    continue
                if id(weight) in self._index_of_weight:
                    raise AmpUsageError(
                        f'{self.name(weight)} was added to the optimizer a second time: it has a master there already. '
                        f'Leave it out of add_param_group().'
                    )
                if record is None:
                    # a weight that is FP32 now hands over its storage: its cast replaces it right after
                    made = nn.Parameter(weight.data.float(), requires_grad=weight.requires_grad)
                    record = Master(weight, made, self._names.get(id(weight), ''))
                master = record.tensor
                assert isinstance(master, nn.Parameter)
                group['params'][index] = replaced[id(weight)] = master
                if weight in self.optimizer.state:
                    self.optimizer.state[master] = self.optimizer.state.pop(weight)
                self._index_of_weight[id(weight)] = len(self._weights)
                self._weight_of[id(master)] = weight
                self._weights.append(weight)
                self._masters.append(master)
                self.pairs.append((weight, master))
                self._records.append(record)
                self._agreed = _NOTHING_AGREED
                self._paired(weight, record)
        if replaced and is_zero(self.optimizer):
            replace_in_zero(self.optimizer, replaced)

    # -- weights and masters agree -----------------------------------------------------------------------------------

    def write_weights(self, chosen: Iterable[nn.Parameter] | None = None) -> None:
        """Model weight = master, rounded to nearest-even. Idempotent.

        Args:
            chosen: Some of the weights; all of them by default.
        """
        if chosen is None:
            with torch.no_grad():
                ops.multi_tensor_copy(self._masters, self._weights)
            self.settle()
        else:
            fp32_values.copy_masters(self._with_records(chosen))

    def settle(self) -> None:
        """Masters and weights agree now: take both as they are."""
        self._agreed = self._state()
        numbers = zip(*map(attributes.numbers_of, self._agreed))
        for weight, record, agreed in zip(self._weights, self._records, numbers):
            record.settled, record.dtype = agreed, weight.dtype

    def synchronise(self, refuses: bool = True) -> None:
        """Copy within each pair of weight and master, from the one that somebody else wrote to, to the other. No host read.

        torch's version counters show which one that is; see :class:`~amp_wrapper.casting.fp32_values.Master`. Where nobody
        wrote, this compares numbers.

        Args:
            refuses: Whether it is an error if both were written to; such a pair is left alone otherwise.

        Raises:
            AmpUsageError: A weight and its master were both written to. Nothing has been changed.
        """
        if self._state() != self._agreed:
            fp32_values.round_again(zip(self._weights, self._records))
            if fp32_values.bring_together(self._with_records(self._weights), refuses):
                self._agreed = self._state()

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
        marks, self._marks, self._are_shown = self._marks, {}, True
        for weight, record in self._with_records(weight for weight in self._weights if id(weight) in marks):
            mark = marks[id(weight)][1].to(weight.device)
            is_old = fp32_values.fingerprint(weight) == mark
            # by .data: graphs that are there already may hold both
            weight.data.copy_(torch.where(is_old, record.tensor, weight))
            if trains:
                ops.multi_tensor_refresh([weight], [record.tensor.data])
            else:
                self._marks[id(weight)] = weight._version, torch.where(is_old, fp32_values.fingerprint(weight), mark)

    def _state(self) -> tuple[bytes, bytes, bytes, bytes]:
        return (
            attributes.versions(self._weights),
            attributes.addresses(self._weights),
            attributes.versions(self._masters),
            attributes.addresses(self._masters),
        )

    def _with_records(self, weights: Iterable[Tensor]) -> list[tuple[Tensor, Master]]:
        """Those of the weights that are 16-bit, with their records.

        A weight that another optimizer shared is FP32 again once that one was detached, and its master's own storage.
        """
        return [
            (weight, self._records[self._index_of_weight[id(weight)]])
            for weight in weights
            if weight.dtype in HALF_TYPES
        ]

    def before_step(self, busy: Container[Tensor] = ()) -> None:
        """As :meth:`synchronise`, and masters of weights without a gradient follow edits of the weights through ``.data``.

        Args:
            busy: Weights whose gradient lies elsewhere.
        """
        self.before_forward(trains=True)
        self.follow_idle(busy)

    def follow_idle(self, busy: Container[Tensor] = ()) -> None:
        """Masters of weights without a gradient take up what was done to the weights through ``.data``.

        Such edits leave no other trace: those of a key encoder, say, that is moved after each iteration. Only pairs without a
        gradient are compared, on the device; a master that somebody wrote to keeps its value.

        Args:
            busy: Weights whose gradient lies elsewhere.
        """
        found = zip(self._weights, attributes.gradients(self._weights), attributes.gradients(self._masters))
        idle = [weight for weight, here, there in found if here is None and there is None and weight not in busy]
        if idle:
            pairs = [(weight, record) for weight, record in self._with_records(idle) if not record.moved()]
            if pairs:
                fp32_values.take_weights(pairs)

    def edited(self) -> list[nn.Parameter]:
        """The weights that were written to since they last agreed with their masters, by torch's version counters.

        Edits through ``.data`` do not count there; :meth:`refresh` finds those by comparing.
        """
        return [weight for weight, record in zip(self._weights, self._records) if record.weight_moved(weight)]

    def refresh(self, weights: Iterable[Tensor] | None = None) -> list[str]:
        """The weights win: wherever one differs from its master rounded, bit for bit, the master takes its value. Syncs.

        Args:
            weights: Those to look at; all by default.

        Returns:
            The names of the weights that had been changed.
        """
        chosen = self._with_records(self._weights if weights is None else weights)
        flags = fp32_values.take_weights(chosen).tolist() if chosen else []
        return [self.name(weight) for (weight, _), differs in zip(chosen, flags) if differs]

    def weights_changed(self, tensors: Iterable[Tensor] | None) -> list[str]:
        """Take up edits of weights, also those through ``.data``, as :meth:`refresh` does. Syncs.

        Args:
            tensors: The edited weights; all by default.

        Returns:
            The names of those that differed from their masters.

        Raises:
            AmpUsageError: A master among ``tensors``; or no ``tensors``, and a master was written to as well.
        """
        if tensors is None:
            self._refuse_unclear('weights_changed', [r.name for r in self._records if r.moved()], 'masters')
            return self.refresh()
        given = list(tensors)
        if any(id(tensor) in self._weight_of for tensor in given):
            raise AmpUsageError(
                'weights_changed() was given an FP32 master (from amp.master_params or optimizer.param_groups): say '
                'masters_changed([...]) where the master is what you edited, or hand over the weight of the model.'
            )
        wanted = set(map(id, given))
        return self.refresh(weight for weight in self._weights if id(weight) in wanted)

    def masters_changed(self, tensors: Iterable[Tensor] | None) -> None:
        """Copy edited masters to their weights, also after edits through ``.data``. No host read.

        Args:
            tensors: The edited masters; all by default.

        Raises:
            AmpUsageError: A 16-bit weight among ``tensors``; or no ``tensors``, and a weight was written to as well.
        """
        if tensors is None:
            self._refuse_unclear('masters_changed', list(map(self.name, self.edited())), 'weights')
            self.write_weights(self._weights)
            return
        given = list(tensors)
        if any(id(tensor) in self._index_of_weight for tensor in given):
            raise AmpUsageError(
                'masters_changed() was given a 16-bit weight of the model: say weights_changed([...]) where the weight is what '
                'you edited, or hand over its master (from amp.master_params or optimizer.param_groups).'
            )
        self.write_weights(self._weight_of[id(master)] for master in given if id(master) in self._weight_of)

    @staticmethod
    def _refuse_unclear(call: str, names: Sequence[str], others: str) -> None:
        if names:
            raise AmpUsageError(
                f'{call}() without names, but the {others} of {some(names)} were written to as well, and that would be lost. '
                f'Name what you edited: {call}([...]).'
            )

    def name(self, weight: Tensor) -> str:
        """The qualified name of a weight in its model."""
        return self._names.get(id(weight), f'<parameter of shape {tuple(weight.shape)}>')

    def release(self) -> None:
        """Put the model weights back into the optimizer, with the masters' state.

        The caller gives the weights their FP32 values.
        """
        assert self.optimizer is not None
        for group in self.optimizer.param_groups:
            for index, parameter in enumerate(group['params']):
                weight = self._weight_of.get(id(parameter))
                if weight is not None:
                    group['params'][index] = weight
                    if parameter in self.optimizer.state:
                        self.optimizer.state[weight] = self.optimizer.state.pop(parameter)
        if is_zero(self.optimizer):
            replace_in_zero(self.optimizer, self._weight_of)
        for kept in (self._weights, self._masters, self.pairs, self._records, self._index_of_weight, self._weight_of):
            kept.clear()  # type: ignore[attr-defined]
        self._agreed = _NOTHING_AGREED


def cast_state_to_parameters(optimizer: Optimizer, parameters: Iterable[Tensor]) -> None:
    """Give the optimizer state of 16-bit parameters their type, as ``Optimizer.load_state_dict`` would have.

    State that was loaded while the parameters were still FP32 is FP32; without masters (O3), training goes on in
    16-bit, so the state must be what it was when it was saved. ``step`` counters keep their type.

    Args:
        optimizer: Its state is changed in place.
        parameters: 16-bit parameters that the optimizer steps itself.
    """
    for parameter in parameters:
        state = optimizer.state.get(parameter) or {}
        for key, value in state.items():
            # counters and running products keep their type; only what has an entry per element follows the parameter
            if (
                isinstance(value, Tensor)
                and value.is_floating_point()
                and value.shape == parameter.shape
                and key != 'step'
            ):
                state[key] = value.to(parameter.dtype)


def warn_of_lost_eps(optimizer: Optimizer, dtype: torch.dtype) -> None:
    """float16 has no 1e-8: Adam's default eps is 0 there, and the first update divides by zero.

    Args:
        optimizer: Steps weights of type ``dtype`` without masters.
        dtype: A 16-bit type.
    """
    lost = {
        float(group['eps'])
        for group in optimizer.param_groups
        if is_number(group.get('eps'))
        and group['eps'] > 0
        and dtype in HALF_TYPES
        and float(torch.tensor(group['eps'], dtype=dtype)) == 0
    }
    if lost:
        logger.warning(
            f'amp: {type(optimizer).__name__} steps {dtype_name(dtype)} weights without masters, and eps={min(lost):g} is 0 '
            f'in that type: the weights will become NaN. Write eps=1e-4, or use O2.'
        )


def keep_scalar_state(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Give scalar state of 16-bit parameters back the type it was saved in, which torch casts while loading.

    Args:
        optimizer: Has just loaded ``saved``.
        saved: The state dict.
    """
    keys = [key for group in saved['param_groups'] for key in group['params']]
    for key, parameter in zip(keys, parameters_of(optimizer)):
        for name, value in saved['state'].get(key, {}).items():
            if isinstance(value, Tensor) and value.shape != parameter.shape:
                # ZeroRedundancyOptimizer has None for what other ranks step
                loaded = (optimizer.state.get(parameter) or {}).get(name)
                if isinstance(loaded, Tensor) and loaded.dtype != value.dtype:
                    optimizer.state[parameter][name] = value.detach().to(loaded.device, copy=True)
