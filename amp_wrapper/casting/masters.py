"""FP32 master weights: the pairs of model weight and master, and their place in the optimizer."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .. import ops
from ..errors import AmpUsageError
from ..policy.nested import HALF_TYPES, is_frozen_16bit
from ..policy.options import is_number
from ..policy.policy import dtype_name
from . import fp32_values as twins
from .fp32_values import Master

logger = logging.getLogger('amp_wrapper')

_version: Callable[[Tensor], int] = operator.attrgetter('_version')


class MasterWeights:
    """The FP32 counterparts that an optimizer steps in place of 16-bit model weights.

    Built while the weights are still FP32: a master takes over the very storage of its weight, so it is exact and
    costs no copy. It stands in the optimizer's ``param_groups`` where the weight stood, and the weight's optimizer
    state becomes its own, uncast. Parameters that stay FP32 are their own masters and do not appear here.

    Args:
        optimizer: Holds the parameters; its groups are changed in place.
        weights: The parameters about to become 16-bit, by name. Only those in ``optimizer`` get a master.
        paired: Called with each new weight and the record of its master.
        existing: Gives the record that another optimizer has made for a weight: both step the same master.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        weights: Mapping[str, nn.Parameter],
        paired: Callable[[nn.Parameter, Master], None],
        existing: Callable[[Tensor], Master | None] = lambda weight: None,
    ) -> None:
        self._optimizer = optimizer
        self._paired = paired
        self._names = {id(weight): name for name, weight in weights.items()}
        self._pairs: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        # master -> weight, by id of the master
        self._weights: dict[int, nn.Parameter] = {}
        # in the order of the pairs: both sides, their records, and where each pair stands
        self._weight_list: list[nn.Parameter] = []
        self._master_list: list[nn.Parameter] = []
        self._records: list[Master] = []
        self._places: dict[int, int] = {}
        # the version counters of all weights and all masters, and the addresses of the masters, when no record told of a write.
        # Lists, since every step and every forward pass goes through them
        self._known_versions: list[int] = []
        self._known_addresses: list[int] = []
        self._existing = existing
        # 16-bit and frozen before the cast, by id
        self._frozen: dict[int, nn.Parameter] = {}
        known = {id(weight) for weight in weights.values()}
        self._swap(lambda parameter: id(parameter) in known or existing(parameter) is not None)

    def __len__(self) -> int:
        return len(self._pairs)

    @property
    def pairs(self) -> Iterable[tuple[nn.Parameter, nn.Parameter]]:
        """(model weight, master) for every weight that has a master, in the optimizer's order."""
        return self._pairs.values()

    def is_master(self, parameter: Tensor) -> bool:
        """Whether ``parameter`` is a master of this object."""
        return id(parameter) in self._weights

    def weight_of(self, parameter: nn.Parameter) -> nn.Parameter:
        """The model weight behind a master; any other parameter itself."""
        return self._weights.get(id(parameter), parameter)

    def partner_of(self, parameter: Tensor) -> nn.Parameter | None:
        """What a fused update writes beside a master: its model weight. None for any other parameter."""
        return self._weights.get(id(parameter))

    def adopt(self) -> None:
        """Give masters to 16-bit parameters that came into the optimizer later, by ``add_param_group``, or are trained from now
        on."""
        self._frozen.clear()
        self._swap(lambda parameter: parameter.dtype in HALF_TYPES)

    @property
    def has_unfrozen(self) -> bool:
        """Whether a weight without a master, for it was 16-bit and frozen, is trained now: :meth:`adopt` makes one."""
        return any(weight.requires_grad for weight in self._frozen.values())

    def _swap(self, wanted: Callable[[nn.Parameter], bool]) -> None:
        for group in self._optimizer.param_groups:
            for index, weight in enumerate(group['params']):
                if id(weight) in self._weights or not wanted(weight):
                    continue
                if is_frozen_16bit(weight) and self._existing(weight) is None:
                    # nothing is added to it, as long as it stays frozen
                    self._frozen[id(weight)] = weight
                    continue
                if id(weight) in self._pairs:
                    raise AmpUsageError(
                        f'{self.name(weight)} was added to the optimizer a second time: it has a master there already. '
                        f'Leave it out of add_param_group().'
                    )
                # a weight that is FP32 now hands over its storage: its cast replaces it right after
                record = self._existing(weight)
                if record is None:
                    made = nn.Parameter(weight.data.float(), requires_grad=weight.requires_grad)
                    record = Master(weight, made, self._names.get(id(weight), ''))
                master = record.tensor
                assert isinstance(master, nn.Parameter)
                group['params'][index] = master
                if weight in self._optimizer.state:
                    self._optimizer.state[master] = self._optimizer.state.pop(weight)
                self._pairs[id(weight)] = (weight, master)
                self._weights[id(master)] = weight
                self._places[id(weight)] = len(self._places)
                self._weight_list.append(weight)
                self._master_list.append(master)
                self._records.append(record)
                self._known_versions = []
                self._paired(weight, record)

    def copy_to_weights(self, pairs: Iterable[tuple[nn.Parameter, nn.Parameter]] | None = None) -> None:
        """Model weight = master, rounded to nearest-even. Idempotent.

        Args:
            pairs: Some of :attr:`pairs`; all of them by default.
        """
        chosen = None if pairs is None else list(pairs)
        masters = self._master_list if chosen is None else [master for _, master in chosen]
        weights = self._weight_list if chosen is None else [weight for weight, _ in chosen]
        with torch.no_grad():
            ops.multi_tensor_copy(masters, weights)
        self.settle(chosen)

    def settle(self, pairs: Iterable[tuple[nn.Parameter, nn.Parameter]] | None = None) -> None:
        """Masters and weights agree now: take both as they are.

        Args:
            pairs: Some of :attr:`pairs`; all of them by default.
        """
        if pairs is not None:
            for weight, _ in pairs:
                self._records[self._places[id(weight)]].settle(weight)
            return
        self._note()
        count = len(self._records)
        versions = self._known_versions
        for record, settled in zip(self._records, zip(versions[:count], versions[count:], self._known_addresses)):
            record.settled = settled

    def _note(self) -> None:
        """Every record knows the present state: nothing has to be looked at until a number differs from these."""
        self._known_versions = self._versions()
        self._known_addresses = self._addresses()

    def synchronise(self, refuses: bool = True) -> None:
        """Let the older side of each pair follow the newer one, the one that somebody else wrote to. No host read.

        torch's version counters tell; see :class:`~amp_wrapper.casting.fp32_values.Master`. Where nobody wrote, this
        compares two lists of numbers.

        Args:
            refuses: Whether a pair that was written to on both sides is an error; it is left alone otherwise.

        Raises:
            AmpUsageError: A weight and its master were both written to. Nothing has been changed.
        """
        if self._versions() == self._known_versions and self._addresses() == self._known_addresses:
            return
        # a weight that another optimizer shared is FP32 again once that one was detached, and its master's own storage
        pairs = [pair for pair in zip(self._weight_list, self._records) if pair[0].dtype in HALF_TYPES]
        if twins.bring_together(pairs, refuses):
            self._note()

    def _versions(self) -> list[int]:
        return [*map(_version, self._weight_list), *map(_version, self._master_list)]

    def _addresses(self) -> list[int]:
        return list(map(Tensor.data_ptr, self._master_list))

    def follow_idle(self, busy: Container[Tensor] = ()) -> None:
        """Before a step: masters of weights without a gradient take up what was done to the weights through ``.data``.

        Nothing else tells of such edits, and nobody announces them: a key encoder, say, that is moved after each iteration.
        Only pairs without a gradient are compared, on the device; a master that somebody wrote to stands.

        Args:
            busy: Weights whose gradient lies elsewhere.
        """
        idle = [
            place
            for place, weight in enumerate(self._weight_list)
            if weight.grad is None
            and weight.dtype in HALF_TYPES
            and weight not in busy
            and self._master_list[place].grad is None
            and not self._records[place].moved()
        ]
        if idle:
            twins.take_weights([(self._weight_list[place], self._records[place]) for place in idle])

    def edited(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """The pairs whose weight was written to since both sides agreed, as torch's version counters tell.

        Edits through ``.data`` do not count there; :meth:`refresh` finds those by comparing.
        """
        return [pair for pair, record in zip(self.pairs, self._records) if record.weight_moved(pair[0])]

    def refresh(self, pairs: Iterable[tuple[nn.Parameter, Tensor]] | None = None) -> list[str]:
        """The weights win: wherever one differs from its master rounded, bit for bit, the master takes its value. Syncs.

        Args:
            pairs: The pairs to look at; all by default.

        Returns:
            The names of the weights that had been changed.
        """
        # a weight that another optimizer shared is FP32 again once that one was detached, and its master's own storage
        chosen = [pair for pair in (self.pairs if pairs is None else pairs) if pair[0].dtype in HALF_TYPES]
        if not chosen:
            return []
        flags = twins.take_weights([(weight, self._records[self._places[id(weight)]]) for weight, _ in chosen])
        return [self.name(weight) for (weight, _), differs in zip(chosen, flags.tolist()) if differs]

    def changed(self, tensors: Iterable[Tensor] | None) -> list[str]:
        """Somebody says that weights were edited, through ``.data`` perhaps: as :meth:`refresh`. Syncs.

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
        if any(id(tensor) in self._weights for tensor in given):
            raise AmpUsageError(
                'weights_changed() was given an FP32 master (from amp.master_params or optimizer.param_groups): say '
                'masters_changed([...]) where the master is what you edited, or hand over the weight of the model.'
            )
        return self.refresh(self.select(given))

    def masters_changed(self, tensors: Iterable[Tensor] | None) -> None:
        """Somebody says that masters were edited, through ``.data`` perhaps: their weights follow. No host read.

        Args:
            tensors: The edited masters; all by default.

        Raises:
            AmpUsageError: A 16-bit weight among ``tensors``; or no ``tensors``, and a weight was written to as well.
        """
        if tensors is None:
            self._refuse_unclear('masters_changed', list(map(self.name, (w for w, _ in self.edited()))), 'weights')
            self.copy_to_weights(pair for pair in self.pairs if pair[0].dtype in HALF_TYPES)
            return
        given = list(tensors)
        if any(id(tensor) in self._pairs for tensor in given):
            raise AmpUsageError(
                'masters_changed() was given a 16-bit weight of the model: say weights_changed([...]) where the weight is what '
                'you edited, or hand over its master (from amp.master_params or optimizer.param_groups).'
            )
        chosen = [(self._weights[id(master)], master) for master in given if id(master) in self._weights]
        self.copy_to_weights((w, m) for w, m in chosen if isinstance(m, nn.Parameter) and w.dtype in HALF_TYPES)

    @staticmethod
    def _refuse_unclear(call: str, names: Sequence[str], others: str) -> None:
        if names:
            shown = ', '.join(names[:5]) + (f' and {len(names) - 5} more' if len(names) > 5 else '')
            raise AmpUsageError(
                f'{call}() without names, but the {others} of {shown} were written to as well, and that would be lost. Name '
                f'what you edited: {call}([...]).'
            )

    def name(self, weight: Tensor) -> str:
        """The qualified name of a weight in its model."""
        return self._names.get(id(weight), f'<parameter of shape {tuple(weight.shape)}>')

    def select(self, tensors: Iterable[Tensor]) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """The pairs whose weight is among ``tensors``."""
        wanted = {id(tensor) for tensor in tensors}
        return [pair for key, pair in self._pairs.items() if key in wanted]

    def release(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        """Put the model weights back into the optimizer, with the masters' state; yields each pair.

        The caller gives the weights their FP32 values.
        """
        for group in self._optimizer.param_groups:
            for index, parameter in enumerate(group['params']):
                weight = self._weights.get(id(parameter))
                if weight is not None:
                    group['params'][index] = weight
                    if parameter in self._optimizer.state:
                        self._optimizer.state[weight] = self._optimizer.state.pop(parameter)
        yield from self.pairs
        self._pairs.clear()
        self._weights.clear()
        self._places.clear()
        for kept in (self._weight_list, self._master_list, self._records, self._known_versions, self._known_addresses):
            kept.clear()  # type: ignore[attr-defined]


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
    parameters = [parameter for group in optimizer.param_groups for parameter in group['params']]
    for key, parameter in zip(keys, parameters):
        for name, value in saved['state'].get(key, {}).items():
            if isinstance(value, Tensor) and value.shape != parameter.shape:
                loaded = optimizer.state[parameter].get(name)
                if isinstance(loaded, Tensor) and loaded.dtype != value.dtype:
                    optimizer.state[parameter][name] = value.detach().to(loaded.device, copy=True)
