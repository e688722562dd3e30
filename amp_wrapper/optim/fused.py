"""The base class of the fused optimizers: one pass over gradient, weight and state; the device decides whether to skip.

A step gathers its lists, checks them, and calls :func:`amp_wrapper.ops.step_prologue` and an update for all parameters of a
device. What no compiled op serves is updated by the fused functions of ``torch.optim``, group by group. The lists are kept and
compared with what is there at the next step, object by object, which costs a tenth of gathering them again; whatever differs (a
late gradient, a loaded state, another group) is seen that way.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from .. import ops
from ..compiler_internals import untraced
from ..errors import AmpCheckpointError, AmpConfigError, AmpUsageError
from ..ops.checks import check_lists
from ..policy.levels import to_dtype
from ..policy.nested import parameters_in
from ..shards import whole
from .algorithm import Algorithm, HyperParameters, check_bucket, hyper_parameters
from .gather import Buffers, Gatherer, count_of, misfit, moment_dtype, uncountable
from .tensor_lists import Bucket, DeviceBucket, TensorLists

_GRADIENT = operator.attrgetter('grad')


@dataclasses.dataclass(eq=False)
class Update:
    """How one step is scaled, clipped, decided and copied; see :meth:`FusedOptimizer.updating`.

    Attributes:
        gradients: The scaled gradient of each parameter of all groups, in their order, wherever it lies; None for none.
        partners: What stands beside each: the 16-bit copy of a float32 one, the int16 remainder of a 16-bit one, or None. The
            same tensors every time, where nothing changed.
        decide: Called once with all gradients, after everything was checked and before anything is written. Returns keyword
            arguments of :func:`amp_wrapper.ops.step_prologue`: ``found_inf``, ``norm``, ``scale``, ``clip_value`` and the like.
        written: Called once everything is written, before the optimizer's post-hooks, which may write more; and where new lists
            were tried, which moves the versions of parameters and partners and changes no value. None for nothing.
        decision: Set by ``step()``: float32 (8,) on the device, as :func:`amp_wrapper.ops.step_prologue` describes it.
    """

    gradients: Sequence[Tensor | None]
    partners: Sequence[Tensor | None]
    decide: Callable[[list[Tensor]], Mapping[str, Any]]
    written: Callable[[], None] | None = None
    decision: Tensor | None = None


class FusedOptimizer(Optimizer):
    """Stands before a class of ``torch.optim``, whose constructor, groups and names it keeps, and takes its steps.

    Works with :class:`torch.amp.GradScaler`, which leaves ``grad_scale`` and ``found_inf`` to it, without a host read.
    """

    #: GradScaler neither reads the flag nor unscales, but sets ``grad_scale`` and ``found_inf``.
    _step_supports_amp_scaling = True
    #: It steps a 16-bit weight and its int16 remainder together.
    supports_split_weights = True

    _algorithm: ClassVar[Algorithm]
    _state_dtype: torch.dtype | None = None
    _update: Update | None = None
    _lists: TensorLists | None = None
    _hyper: HyperParameters | None = None

    def _settle(self, state_dtype: Any, fused: Any, differentiable: Any) -> None:
        """What is asked of the constructor beyond torch's."""
        problems = []
        dtype = to_dtype(state_dtype)
        if state_dtype is not None and dtype not in (torch.float32, torch.bfloat16):
            problems.append(
                f"state_dtype={state_dtype!r} of {type(self).__name__} must be 'float32', 'bfloat16' or None; "
                'float16 has no room for squares of gradients.'
            )
        if fused is False:
            problems.append(
                f'fused=False: {type(self).__name__} is fused always. Leave the argument out, or use '
                f'torch.optim.{self._algorithm.torch_name}.'
            )
        if differentiable:
            problems.append(
                f'differentiable=True: {type(self).__name__} writes in place and keeps no graph. Use '
                f'torch.optim.{self._algorithm.torch_name}.'
            )
        if problems:
            raise AmpConfigError(problems)
        self._state_dtype = dtype

    @property
    def state_dtype(self) -> torch.dtype:
        """Type of the moments of float32 and 16-bit parameters. Others have moments of their own type."""
        return self._state_dtype or torch.float32

    # -- a step -----------------------------------------------------------------------------------------------------

    @contextmanager
    def updating(self, update: Update) -> Iterator[None]:
        """Inside, ``step()`` takes gradients, partners and the decision from ``update``.

        ``grad_scale`` and ``found_inf`` do not count then. All parameters must lie on one device.

        Args:
            update: From the engine that scales the loss.

        Raises:
            AmpUsageError: Inside another one.
        """
        if self._update is not None:
            raise AmpUsageError(
                f'{type(self).__name__}.updating() does not nest: leave the first one before the second.'
            )
        self._update = update
        try:
            yield
        finally:
            self._update = None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step. The host waits for no device.

        Where the step is skipped (``found_inf`` above 0), parameters, counts and moments stay as they are.

        Args:
            closure: Evaluates the model again and returns the loss.

        Returns:
            What ``closure`` returned, or None.

        Raises:
            AmpUsageError: A gradient, a state or a hyper-parameter that no step can be taken with. Nothing is changed then.
        """
        if torch.compiler.is_dynamo_compiling():
            # nothing here is worth a graph, and objects that are compared would be guarded one by one
            return self._step_eagerly(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._take_step(self._update)
        return loss

    @untraced
    def _step_eagerly(self, closure: Callable[[], Any] | None) -> Any:
        return FusedOptimizer.step(self, closure)

    def _take_step(self, update: Update | None) -> None:
        groups = self.param_groups
        parameters = parameters_in(groups)
        gradients = list(map(_GRADIENT, parameters)) if update is None else update.gradients
        if update is not None and not len(gradients) == len(update.partners) == len(parameters):
            raise AmpUsageError(
                f'{type(self).__name__} has {len(parameters)} parameters, and an Update {len(gradients)} gradients and '
                f'{len(update.partners)} partners: give one of each, or None, for every parameter.'
            )
        partners = None if update is None else update.partners
        options = list(map(operator.itemgetter(*self._algorithm.options), groups))
        lists = self._lists
        if lists is not None and lists.options == options:
            # known as these from here on
            options = lists.options
        if (
            lists is None
            or not (lists.options is options or self._has_names(lists, options))
            or not lists.is_current(groups, parameters, self.state, gradients, partners)
        ):
            lists = self._gather(gradients, partners, options)
            if update is not None and update.written is not None:
                # the trial of the new lists has moved versions
                update.written()
        hyper = self._hyper = hyper_parameters(self._algorithm, groups, options, lists.is_on_host, self._hyper)
        if not lists.devices:
            return
        present = lists.present(gradients)
        if update is None:
            # all of them, before the first prologue counts a step
            inputs: list[Mapping[str, Any]] = [self._scaling(place.device) for place in lists.devices]
        else:
            inputs = [update.decide(present)]
        self._write(lists, hyper, present, inputs)
        if lists is not self._lists:
            self._begin(lists, parameters)
            lists.begun = []
            lists.keys, lists.values = list(self.state), list(self.state.values())
            self._lists = lists
        if update is not None:
            update.decision = lists.devices[0].decision
            if update.written is not None:
                update.written()

    def _has_names(self, lists: TensorLists, options: list[Any]) -> bool:
        """Whether the groups ask for the state that was gathered."""
        groups = self.param_groups
        if lists.names != list(map(self._algorithm.names, groups)) or any(g['differentiable'] for g in groups):
            return False
        lists.options = options
        return True

    def _gather(
        self, gradients: Sequence[Tensor | None], partners: Sequence[Tensor | None] | None, options: list[Any]
    ) -> TensorLists:
        """New lists, which the ops take."""
        buffers: Buffers = self.__dict__.setdefault('_buffers', Buffers())
        try:
            lists = Gatherer(self, self._algorithm, self.state_dtype, buffers).gather(gradients, partners, options)
            present = lists.present(gradients)
            for place in lists.devices:
                # those of one group each, which share no memory either
                params = [p for bucket in place.buckets if bucket.group is not None for p in bucket.params]
                check_lists([], [('params', params)])
                for bucket in place.buckets:
                    if bucket.group is not None:
                        check_bucket(bucket.on_rank, bucket.pick(present))
                    elif partners is not None:
                        # a skipped step writes nothing: what the ops refuse, they refuse before a scale has moved
                        self._algorithm.update(bucket.on_rank, bucket.pick(present), torch.ones_like(place.decision))
        except ValueError as error:
            raise self._explained(error) from error
        return lists

    def _explained(self, reason: ValueError) -> AmpUsageError:
        """What an op says about lists, as an error of a step."""
        return AmpUsageError(
            f'{type(self).__name__} cannot take the step, and nothing was changed: {reason} (Numbers count the parameters that '
            'have a gradient.) Parameters, gradients and states need memory of their own: tie a parameter by using it twice.'
        )

    def _write(
        self,
        lists: TensorLists,
        hyper: HyperParameters,
        gradients: list[Tensor],
        inputs: Sequence[Mapping[str, Any]],
    ) -> None:
        counted: list[DeviceBucket] = []
        updated: list[Bucket] = []
        try:
            for place, given in zip(lists.devices, inputs):
                if lists.partners is not None:
                    # the caller of updating() keeps it
                    place.decision = torch.empty_like(place.decision)
                if place.steps or given:
                    table = (place.decision, place.rows, place.steps, hyper.table, place.groups, self._algorithm.kind)
                    ops.step_prologue(*table, *(hyper.rates_on(place.device) if hyper.tensors else ((), ())), **given)
                    counted.append(place)
                elif lists.partners is not None:
                    # torch's functions count by themselves: there is nothing to decide
                    place.decision.zero_()[1:3] = 1.0
                    place.decision[3], place.decision[4:6] = math.inf, math.nan
            for place, given in zip(lists.devices, inputs):
                for bucket in place.buckets:
                    mine = gradients if bucket.indices is None else bucket.pick(gradients)
                    if bucket.group is None:
                        self._algorithm.update(bucket.on_rank, mine, place.decision)
                    else:
                        group = {**self.param_groups[bucket.group], 'lr': hyper.rate(bucket.group, place.device)}
                        self._algorithm.update_by_torch(bucket.on_rank, mine, place.decision, given, group)
                    updated.append(bucket)
        except BaseException as error:
            # an op that refuses has written nothing: the steps that it should have taken are not counted
            for place in counted:
                steps = [
                    step
                    for bucket in place.buckets
                    if bucket.group is None and bucket not in updated
                    for step in bucket.steps
                ]
                if steps:
                    torch._foreach_add_(steps, [place.decision[0] - 1] * len(steps))
            if not updated and isinstance(error, ValueError):
                raise self._explained(error) from error
            self._begin(lists, [parameter for bucket in updated for parameter in bucket.params])
            raise

    def _begin(self, lists: TensorLists, written: list[Tensor]) -> None:
        """Show the state that parameters were stepped with."""
        ids = set(map(id, written))
        for parameter, state, fresh in lists.begun:
            if id(parameter) in ids:
                state.update(fresh)
                self.state[parameter] = state

    def _scaling(self, device: torch.device) -> dict[str, Tensor]:
        """What a GradScaler has set."""
        scaling = {}
        for name, attribute in (('scale', 'grad_scale'), ('found_inf', 'found_inf')):
            value = getattr(self, attribute, None)
            if value is None:
                continue
            if not isinstance(value, (Tensor, int, float)) or (isinstance(value, Tensor) and value.numel() != 1):
                raise AmpUsageError(
                    f'{type(self).__name__}.{attribute} is {value!r}: one number or None is expected, as GradScaler sets it.'
                )
            if not isinstance(value, Tensor):
                value = torch.full((), float(value), dtype=torch.float32, device=device)
            scaling[name] = whole(value.detach()).to(device, torch.float32, non_blocking=True)
        return scaling

    # -- saving and loading -----------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), '_state_dtype': self._state_dtype}

    def __setstate__(self, state: dict[str, Any]) -> None:
        loaded = self.__dict__.get('_loaded')
        if loaded is not None:
            # in place of what torch has cast to the types of the parameters
            state = {**state, 'state': defaultdict(dict, {**state['state'], **loaded})}
        super().__setstate__(state)
        self._lists = None
        self._hyper = None

    @untraced
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up a state dict of this class or of torch's own. It is copied, and left as it is.

        Moments get the type of this optimizer (:attr:`state_dtype`), where torch would give them the parameter's: those of
        16-bit parameters stay what they were.

        Args:
            state_dict: Of this class, or of the class of ``torch.optim`` that it extends.

        Raises:
            AmpCheckpointError: State or groups of another kind of optimizer, or shapes that do not fit. Nothing is
                changed then.
            ValueError: Another number of groups or parameters.
        """
        # the last of all hooks, which may change the dict
        handle = self.register_load_state_dict_pre_hook(_keep_types)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
            self.__dict__.pop('_loaded', None)

    def _held(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        for index, group in enumerate(state_dict['param_groups']):
            missing = [key for key in self._algorithm.required if key not in group]
            if missing:
                raise AmpCheckpointError(
                    f'param_groups[{index}] of the state dict has no {missing[0]!r}: that of '
                    f'torch.optim.{self._algorithm.torch_name} or {type(self).__name__} is expected.'
                )
        ids = [key for group in state_dict['param_groups'] for key in group['params']]
        places = {
            key: (index, parameter) for index, (key, parameter) in enumerate(zip(ids, parameters_in(self.param_groups)))
        }
        rest: dict[Any, Any] = {}
        loaded: dict[Tensor, Any] = {}
        for key, entry in state_dict['state'].items():
            if key in places and isinstance(entry, dict):
                index, parameter = places[key]
                loaded[parameter] = self._adopted(parameter, entry, f'state[{index}]')
            else:
                rest[key] = entry
        self.__dict__['_loaded'] = loaded
        return {**state_dict, 'state': rest}

    def _adopted(self, parameter: Tensor, saved: Mapping[str, Any], label: str) -> dict[str, Any]:
        """A copy of what was saved for a parameter."""
        state: dict[str, Any] = {}
        for name, value in saved.items():
            if name in self._algorithm.moments and value is not None:
                problem = misfit(value, parameter)
                if problem:
                    raise AmpCheckpointError(
                        f'{label}[{name!r}] of the state dict {problem}: it belongs to another parameter.'
                    )
                moment = torch.empty_like(
                    parameter, dtype=moment_dtype(parameter, self.state_dtype), requires_grad=False
                )
                state[name] = moment.copy_(value.detach())
            elif name == 'step' and value is not None:
                problem = uncountable(value)
                if problem:
                    raise AmpCheckpointError(f'{label}[{name!r}] of the state dict {problem}.')
                state[name] = count_of(value, parameter.device, copy=True)
            elif isinstance(value, Tensor):
                state[name] = value.detach().to(parameter.device, copy=True)
            elif value is not None:
                state[name] = value
        return state


def _keep_types(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
    return optimizer._held(state_dict) if isinstance(optimizer, FusedOptimizer) else None
