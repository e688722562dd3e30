"""What the fused optimizers have in common: one pass over gradient, weight and state, decided on the device.

A step gathers its lists, checks them, and calls :func:`amp_wrapper.ops.step_prologue` and an update for all parameters of a
device. What was gathered is kept and compared with what is there at the next step, object by object, which costs a tenth of
gathering it again; whatever differs (a late gradient, a loaded state, another group) is seen that way.
"""

from __future__ import annotations

import dataclasses
import operator
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .. import ops
from ..errors import AmpCheckpointError, AmpConfigError, AmpUsageError
from ..policy.policy import parse_dtype
from ..torch_internals import untraced
from .tensor_lists import WIDE, Hyper, Part, Place, Plan, flat, misfit, same, uncountable, unfit

_CPU = torch.device('cpu')


def _nothing() -> None:
    """For callers that have nothing to do after the writes."""


@dataclasses.dataclass(eq=False)
class Update:
    """What an owner of the loss scale tells a fused optimizer about one step; see :meth:`FusedOptimizer.updating`.

    Attributes:
        gradients: The scaled gradient of each parameter of all groups, in their order, wherever it lies; None for none.
        partners: What stands beside each: the 16-bit copy of a float32 one, the int16 remainder of a 16-bit one, or None. The
            same tensors every time, where nothing changed.
        decide: Called once with all gradients, after everything was checked and before anything is written. Returns keyword
            arguments of :func:`amp_wrapper.ops.step_prologue`: ``found_inf``, ``norm``, ``scale``, ``clip_value`` and the like.
        written: Called once everything is written, before the optimizer's post-hooks, which may write more.
        decision: Set by ``step()``: float32 (8,) on the device, as :func:`amp_wrapper.ops.step_prologue` describes it.
    """

    gradients: Sequence[Tensor | None]
    partners: Sequence[Tensor | None]
    decide: Callable[[list[Tensor]], Mapping[str, Any]]
    written: Callable[[], None] = _nothing
    decision: Tensor | None = None


class _Saved:
    """The state of a parameter in a state dict, which torch's loading passes on as it is, uncast."""

    def __init__(self, state: Any) -> None:
        self.state = state


class _NothingWrittenError(Exception):
    """An op refused before anything was written; the counts are what they were."""

    def __init__(self, reason: Exception) -> None:
        super().__init__(reason)
        self.reason = reason


class FusedOptimizer(Optimizer):
    """Stands before a class of ``torch.optim``, whose constructor, groups and names it keeps, and takes its steps.

    Works with :class:`torch.amp.GradScaler`, which leaves ``grad_scale`` and ``found_inf`` to it, without a host read.
    """

    #: GradScaler neither reads the flag nor unscales, but sets ``grad_scale`` and ``found_inf``.
    _step_supports_amp_scaling = True
    #: It steps a 16-bit weight and its int16 remainder together.
    supports_split_weights = True

    # told by each class: kind of the ops, the state with an entry per element, what has to stand in a group, and what of that
    # becomes the hyper-parameters beside lr
    _kind: int
    _moments: tuple[str, ...]
    _required: tuple[str, ...]
    _rest: tuple[str, ...]
    _torch_name: str

    _state_dtype: torch.dtype | None = None
    _update: Update | None = None
    _plan: Plan | None = None
    _hyper: Hyper | None = None

    def _settle(self, state_dtype: Any, fused: Any, differentiable: Any) -> None:
        """What is asked of the constructor beyond torch's."""
        problems = []
        dtype = parse_dtype(state_dtype)
        if state_dtype is not None and dtype not in (torch.float32, torch.bfloat16):
            problems.append(
                f"state_dtype={state_dtype!r} of {type(self).__name__} must be 'float32' (or None) or 'bfloat16'; float16 has "
                'no room for squares of gradients.'
            )
        if fused is False:
            problems.append(
                f'fused=False: {type(self).__name__} is fused always. Leave the argument out, or use '
                f'torch.optim.{self._torch_name}.'
            )
        if differentiable:
            problems.append(
                f'differentiable=True: {type(self).__name__} writes in place and keeps no graph. Use '
                f'torch.optim.{self._torch_name}.'
            )
        if problems:
            raise AmpConfigError(problems)
        self._state_dtype = dtype

    @property
    def state_dtype(self) -> torch.dtype:
        """Type of the moments of float32 and 16-bit parameters. Others have moments of their own type."""
        return self._state_dtype or torch.float32

    # -- what a class adds ------------------------------------------------------------------------------------------

    def _names(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """The state that a parameter of the group needs."""
        raise NotImplementedError

    def _row(self, group: Mapping[str, Any]) -> list[Any]:
        """The hyper-parameters of a group, without lr, in the order of the ops."""
        raise NotImplementedError

    def _first_step(self, state: Mapping[str, Any]) -> float | None:
        """The count of a parameter whose state tells none; None where it must."""
        raise NotImplementedError

    def _run(self, part: Part, grads: list[Tensor], decision: Tensor) -> None:
        """The update of one part."""
        raise NotImplementedError

    # -- a step -----------------------------------------------------------------------------------------------------

    @contextmanager
    def updating(self, update: Update) -> Iterator[None]:
        """Inside, ``step()`` takes gradients, partners and the decision from ``update``.

        ``grad_scale`` and ``found_inf`` do not count then. All parameters must lie on one device.

        Args:
            update: Told by the owner of the loss scale.

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
        if torch.compiler.is_compiling():
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
        parameters = [parameter for group in self.param_groups for parameter in group['params']]
        if update is None:
            gradients = [parameter.grad for parameter in parameters]
        else:
            gradients = list(update.gradients)
            if len(gradients) != len(parameters) or len(update.partners) != len(parameters):
                raise AmpUsageError(
                    f'{type(self).__name__} has {len(parameters)} parameters, and an Update {len(gradients)} gradients and '
                    f'{len(update.partners)} partners: give one of each, or None, for every parameter.'
                )
        present = [gradient for gradient in gradients if gradient is not None]
        rest = list(map(operator.itemgetter(*self._rest), self.param_groups))
        plan = self._plan
        if plan is not None and plan.rest == rest:
            # known as these from here on
            rest = plan.rest
        if plan is None or not self._fits(plan, parameters, gradients, present, rest, update):
            plan = self._arrange(parameters, gradients, present, rest, update)
        hyper = self._hyper_of(plan, rest)
        if not plan.places:
            return
        inputs: list[Mapping[str, Any]]
        if update is None:
            # all of them, before the first prologue counts a step
            inputs = [self._scaling(place.device) for place in plan.places]
        else:
            if plan is not self._plan:
                self._rehearse(plan, present)
            inputs = [update.decide(present)]
        try:
            self._write(plan, hyper, present, inputs)
        except _NothingWrittenError as refused:
            if plan is not self._plan or update is not None:
                raise self._explained(refused.reason) from refused.reason
            # perhaps something is other than the plan has it: gathered anew, it is named, or the step is taken
            plan = self._arrange(parameters, gradients, present, rest, update)
            inputs = [self._scaling(place.device) for place in plan.places]
            try:
                self._write(plan, self._hyper_of(plan, rest), present, inputs)
            except _NothingWrittenError as again:
                raise self._explained(again.reason) from again.reason
        self._commit(plan)
        if update is not None:
            update.decision = plan.places[0].decision
            update.written()

    def _fits(
        self,
        plan: Plan,
        parameters: list[Tensor],
        gradients: list[Tensor | None],
        present: list[Tensor],
        rest: list[Any],
        update: Update | None,
    ) -> bool:
        """Whether everything is as it was when the plan was made."""
        if plan.rest is not rest:
            groups = self.param_groups
            if plan.names != list(map(self._names, groups)) or any(group['differentiable'] for group in groups):
                return False
            plan.rest = rest
        return (
            plan.decides == (update is not None)
            and plan.lengths == [len(group['params']) for group in self.param_groups]
            and same(plan.parameters, parameters)
            and plan.given == [gradient is not None for gradient in gradients]
            and plan.dtypes == [parameter.dtype for parameter in plan.stepped]
            and same(plan.keys, self.state)
            and same(plan.values, self.state.values())
            and all(part.is_current() for place in plan.places for part in place.parts)
            and (update is None or self._still_pairs(plan, present, update))
        )

    def _still_pairs(self, plan: Plan, gradients: list[Tensor], update: Update) -> bool:
        """What an owner gives, before it decides. Without one, torch has seen to gradients, and a step can be taken back."""
        return (
            plan.shapes == [gradient.shape for gradient in gradients]
            and plan.layouts == [gradient.layout for gradient in gradients]
            and plan.devices == [gradient.get_device() for gradient in gradients]
            and (plan.partners is update.partners or same(plan.partners, update.partners))
        )

    def _rehearse(self, plan: Plan, gradients: list[Tensor]) -> None:
        """The updates as a skipped step, which writes nothing: what they refuse, they refuse before a scale has moved."""
        for place in plan.places:
            skipped = torch.ones_like(place.decision)
            for part in place.parts:
                try:
                    self._run(part, part.real([gradients[i] for i in part.indices]), skipped)
                except ValueError as error:
                    raise self._explained(error) from error

    def _explained(self, reason: Exception) -> Exception:
        """What an op says about lists, as an error of a step."""
        if not isinstance(reason, ValueError):
            return reason
        return AmpUsageError(
            f'{type(self).__name__} cannot take the step, and nothing was changed: {reason} (Numbers count the parameters that '
            'have a gradient.) Parameters, gradients and states need memory of their own: tie a parameter by using it twice.'
        )

    def _write(self, plan: Plan, hyper: Hyper, gradients: list[Tensor], inputs: Sequence[Mapping[str, Any]]) -> None:
        counted: list[Place] = []
        updated: list[Part] = []
        try:
            for place, given in zip(plan.places, inputs):
                if plan.decides:
                    # the owner keeps it
                    place.decision = torch.empty_like(place.decision)
                rates, rated = self._rates(place, hyper)
                table = (place.decision, place.rows, place.steps, hyper.table, place.groups, self._kind)
                ops.step_prologue(*table, rates, rated, **given)
                counted.append(place)
                if place.narrow is not None:
                    # what was rounded to float64 and is rounded again has the bits of what is rounded once
                    place.narrow.copy_(place.rows[: place.narrow.shape[0]])
            for place in plan.places:
                for part in place.parts:
                    self._run(part, part.real([gradients[i] for i in part.indices]), place.decision)
                    updated.append(part)
        except BaseException as error:
            # an op that refuses has written nothing: the steps that it should have taken are not counted
            for place in counted:
                steps = [step for part in place.parts if part not in updated for step in part.steps]
                if steps:
                    torch._foreach_add_(steps, [place.decision[0] - 1] * len(steps))
            if not updated and isinstance(error, Exception):
                raise _NothingWrittenError(error) from None
            written = {id(parameter) for part in updated for parameter in part.params}
            self._begin(plan, written)
            raise

    def _begin(self, plan: Plan, written: Container[int]) -> None:
        """Show the state that parameters, by id, were stepped with."""
        for parameter, state, fresh in plan.begun:
            if id(parameter) in written:
                state.update(fresh)
                self.state[parameter] = state

    def _commit(self, plan: Plan) -> None:
        if plan is self._plan:
            return
        self._begin(plan, {id(parameter) for parameter in plan.stepped})
        plan.begun = []
        plan.keys, plan.values = list(self.state), list(self.state.values())
        self._plan = plan

    # -- gathering --------------------------------------------------------------------------------------------------

    def _arrange(
        self,
        parameters: list[Tensor],
        gradients: list[Tensor | None],
        present: list[Tensor],
        rest: list[Any],
        update: Update | None,
    ) -> Plan:
        """Check everything, then make the state that is missing; it is shown when the step is taken."""
        groups = self.param_groups
        group_of = [index for index, group in enumerate(groups) for _ in group['params']]
        for index, group in enumerate(groups):
            if group['differentiable']:
                raise AmpUsageError(
                    f"param_groups[{index}]['differentiable'] is True: {type(self).__name__} writes in place and keeps no "
                    f'graph. Set it to False, or use torch.optim.{self._torch_name}.'
                )
        names = [self._names(group) for group in groups]
        chosen = [index for index, gradient in enumerate(gradients) if gradient is not None]
        stepped = [parameters[index] for index in chosen]
        partners = [None] * len(parameters) if update is None else update.partners
        for index, parameter, gradient in zip(chosen, stepped, present):
            self._check(index, parameter, gradient, names[group_of[index]])
        kinds: dict[torch.device, dict[tuple[bool, tuple[str, ...]], list[int]]] = defaultdict(dict)
        for position, (index, parameter) in enumerate(zip(chosen, stepped)):
            kind = (parameter.dtype in WIDE, names[group_of[index]])
            kinds[parameter.device].setdefault(kind, []).append(position)
        if update is not None:
            if len(kinds) > 1:
                raise AmpUsageError(
                    f'{type(self).__name__}: parameters with gradients are on {", ".join(map(str, kinds))}; under one loss '
                    'scale they must be on one device.'
                )
            if not kinds and parameters:
                # nothing is stepped, but others may wait for the decision
                kinds[parameters[0].device] = {}
        plan = Plan(
            decides=update is not None,
            lengths=[len(group['params']) for group in groups],
            parameters=parameters,
            given=[gradient is not None for gradient in gradients],
            shapes=[gradient.shape for gradient in present],
            devices=[gradient.get_device() for gradient in present],
            dtypes=[parameter.dtype for parameter in stepped],
            layouts=[gradient.layout for gradient in present],
            stepped=stepped,
            chosen=chosen,
            partners=partners,
            names=names,
            rest=rest,
            places=[],
            begun=[],
        )
        places = [group_of[index] for index in chosen]
        plan.places = [self._place(device, sorts, plan, places) for device, sorts in kinds.items()]
        return plan

    def _place(
        self,
        device: torch.device,
        kinds: Mapping[tuple[bool, tuple[str, ...]], list[int]],
        plan: Plan,
        group_of: list[int],
    ) -> Place:
        order = sorted(kinds.items(), key=lambda item: item[0])
        total = sum(map(len, kinds.values()))
        narrow = sum(len(positions) for (wide, _), positions in order if not wide)
        dtype = torch.float32 if narrow == total else torch.float64
        rows = self._buffer('rows', device, dtype, total)
        slim = self._buffer('rows', device, torch.float32, narrow) if 0 < narrow < total else None
        parts, begin, unnamed = [], 0, 0
        for (wide, names), positions in order:
            source = rows if wide or slim is None else slim
            part = self._part(names, positions, plan, source[begin : begin + len(positions)])
            if not names:
                # the prologue counts steps, and nobody asks for these
                spare = self._buffer('steps', device, torch.float32, unnamed + len(positions))
                part.steps = list(spare[unnamed:, 0].unbind())
                unnamed += len(positions)
            parts.append(part)
            begin += len(positions)
        flat = [group_of[position] for _, positions in order for position in positions]
        decision = self._buffer('decision', device, torch.float32, 1)[0]
        return Place(device, parts, rows, slim, torch.tensor(flat, dtype=torch.int64), decision)

    def _part(self, names: tuple[str, ...], positions: list[int], plan: Plan, rows: Tensor) -> Part:
        params = [plan.stepped[position] for position in positions]
        states: list[dict[str, Any]] = []
        columns: dict[str, list[Tensor]] = {name: [] for name in names}
        if names:
            for parameter in params:
                state = self.state.get(parameter)
                state = {} if state is None else state
                states.append(state)
                whole = self._completed(parameter, state, names)
                fresh = {name: value for name, value in whole.items() if state.get(name) is not value}
                if fresh:
                    plan.begun.append((parameter, state, fresh))
                for name in names:
                    columns[name].append(whole[name])
        beside = [plan.partners[plan.chosen[position]] for position in positions]
        has_partners = any(partner is not None for partner in beside)
        return Part(
            names=names,
            indices=positions,
            params=params,
            states=states,
            columns=columns,
            steps=columns.get('step', []),
            partners=[p if b is None else b for p, b in zip(params, beside)] if has_partners else [],
            twofold=[index for index, parameter in enumerate(params) if parameter.is_complex()],
            rows=rows,
        )

    def _completed(self, parameter: Tensor, state: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Tensor]:
        """The state of a parameter under ``names``: what is there, corrected, and what was missing."""
        whole: dict[str, Tensor] = {}
        for name in names:
            value = state.get(name)
            if name == 'step':
                whole[name] = _count(self._first_step(state) if value is None else value, parameter.device)
            elif value is None:
                whole[name] = torch.zeros_like(parameter, dtype=self._moment_dtype(parameter), requires_grad=False)
            else:
                whole[name] = value
        return whole

    def _moment_dtype(self, parameter: Tensor) -> torch.dtype:
        if parameter.dtype in WIDE or parameter.is_complex():
            return parameter.dtype
        return self.state_dtype

    def _buffer(self, use: str, device: torch.device, dtype: torch.dtype, rows: int) -> Tensor:
        """``rows`` rows that stay where they are as long as the optimizer lives: CUDA graphs write there."""
        buffers = self._buffers
        held = buffers.setdefault((use, device, dtype), [])
        if not held or held[-1].shape[0] < rows:
            count = sum(len(group['params']) for group in self.param_groups)
            # smaller ones are kept for graphs that were captured with them
            width = ops.DECISION if use == 'decision' else ops.ROW if use == 'rows' else 1
            size = 1 if use == 'decision' else max(rows, count, 2 * held[-1].shape[0] if held else 0)
            held.append(torch.zeros(size, width, dtype=dtype, device=device))
        return held[-1][:rows]

    @property
    def _buffers(self) -> dict[tuple[str, torch.device, torch.dtype], list[Tensor]]:
        buffers: dict[tuple[str, torch.device, torch.dtype], list[Tensor]]
        buffers = self.__dict__.setdefault('_kept_buffers', {})
        return buffers

    def _label(self, index: int) -> str:
        """What to call the parameter at a position among all."""
        for number, group in enumerate(self.param_groups):
            if index < len(group['params']):
                names = group.get('param_names')
                name = f'{names[index]!r} ' if names else ''
                return f"parameter {name}(param_groups[{number}]['params'][{index}])"
            index -= len(group['params'])
        raise IndexError(index)

    def _check(self, index: int, parameter: Tensor, gradient: Tensor, names: tuple[str, ...]) -> None:
        problem = unfit(parameter, gradient, self._torch_name)
        if problem:
            raise AmpUsageError(f'{type(self).__name__}: {self._label(index)} {problem}.')
        state = self.state.get(parameter) or {}
        for name in names if state else ():
            value = state.get(name)
            if name == 'step':
                problem = uncountable(self._first_step(state) if value is None else value)
            elif value is not None:
                problem = misfit(value, parameter)
                if not problem and value.device != parameter.device:
                    problem = f'is on {value.device} and the parameter on {parameter.device}'
            if problem:
                raise AmpUsageError(
                    f'{type(self).__name__}: state[{name!r}] of {self._label(index)} {problem}. Set it right, or remove the '
                    'state of this parameter to begin anew.'
                )

    # -- hyper-parameters -------------------------------------------------------------------------------------------

    def _hyper_of(self, plan: Plan, rest: list[Any]) -> Hyper:
        """The table of the groups, the one of the last step where nothing changed."""
        groups = self.param_groups
        rates = [group['lr'] for group in groups]
        on_host = any(place.device.type != 'cpu' for place in plan.places)
        known = self._hyper
        if known is not None and (known.mutable or known.on_host != on_host or known.rest is not rest):
            known = None
        if known is not None and not known.read and same(known.rates, rates):
            return known
        tensors = [(index, rate) for index, rate in enumerate(rates) if isinstance(rate, Tensor)]
        read = on_host and any(rate.device == _CPU for _, rate in tensors)
        first = [rate if type(rate) is float else self._rate(index, rate, on_host) for index, rate in enumerate(rates)]
        if known is None:
            rows = [[rate, *self._numbers(index, group)] for index, (rate, group) in enumerate(zip(first, groups))]
            table = torch.tensor(rows, dtype=torch.float64)
            mutable = any(not isinstance(value, (int, float, tuple)) for value in flat(rest))
        else:
            # a new one: a copy of the old one may be under way
            table, mutable = known.table.clone(), False
            table[:, 0] = torch.tensor(first, dtype=torch.float64)
        self._hyper = Hyper(rates, rest, table, on_host, read, mutable, tensors)
        return self._hyper

    def _numbers(self, index: int, group: Mapping[str, Any]) -> list[float]:
        try:
            return [float(value) for value in self._row(group)]
        except (TypeError, ValueError) as error:
            given = {key: group.get(key) for key in self._rest}
            raise AmpUsageError(f'param_groups[{index}] holds {given}: numbers are expected ({error}).') from error

    def _rate(self, index: int, rate: Any, on_host: bool) -> float:
        """The lr of a group as the table has it; 0 for one that stays on its device."""
        if isinstance(rate, Tensor):
            if rate.numel() != 1:
                raise AmpUsageError(
                    f"param_groups[{index}]['lr'] is a tensor of shape {tuple(rate.shape)}: one number is expected."
                )
            return float(rate) if on_host and rate.device == _CPU else 0.0
        try:
            return float(rate)
        except (TypeError, ValueError) as error:
            raise AmpUsageError(f"param_groups[{index}]['lr'] is {rate!r}: a number is expected.") from error

    def _rates(self, place: Place, hyper: Hyper) -> tuple[list[Tensor], list[int]]:
        handed = [
            (index, rate.detach().to(place.device, torch.float32))
            for index, rate in hyper.tensors
            if rate.device != _CPU or place.device == _CPU
        ]
        return [rate for _, rate in handed], [index for index, _ in handed]

    def _scaling(self, device: torch.device) -> dict[str, Tensor]:
        """What a GradScaler has set."""
        given = {'scale': getattr(self, 'grad_scale', None), 'found_inf': getattr(self, 'found_inf', None)}
        scaling = {}
        for name, value in given.items():
            if value is None:
                continue
            attribute = 'grad_scale' if name == 'scale' else name
            if not isinstance(value, (Tensor, int, float)) or (isinstance(value, Tensor) and value.numel() != 1):
                raise AmpUsageError(
                    f'{type(self).__name__}.{attribute} is {value!r}: one number or None is expected, as GradScaler sets it.'
                )
            if not isinstance(value, Tensor):
                value = torch.full((), float(value), dtype=torch.float32, device=device)
            scaling[name] = value.detach().to(device, torch.float32, non_blocking=True)
        return scaling

    # -- saving and loading -----------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), '_state_dtype': self._state_dtype}

    def __setstate__(self, state: dict[str, Any]) -> None:
        entries = state.get('state', {})
        if any(isinstance(entry, _Saved) for entry in entries.values()):
            # before torch takes up anything of it
            order = {id(p): i for i, p in enumerate(p for group in state['param_groups'] for p in group['params'])}
            adopted: defaultdict[Any, Any] = defaultdict(dict)
            for key, entry in entries.items():
                if isinstance(entry, _Saved) and isinstance(key, Tensor):
                    entry = self._adopted(key, entry.state, f'state[{order[id(key)]}]')
                adopted[key] = entry.state if isinstance(entry, _Saved) else entry
            state = {**state, 'state': adopted}
        super().__setstate__(state)
        self._plan = None
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

    def _held(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        for index, group in enumerate(state_dict['param_groups']):
            missing = [key for key in self._required if key not in group]
            if missing:
                raise AmpCheckpointError(
                    f'param_groups[{index}] of the state dict has no {missing[0]!r}: that of torch.optim.{self._torch_name} or '
                    f'{type(self).__name__} is expected.'
                )
        held = {key: _Saved(entry) if isinstance(entry, dict) else entry for key, entry in state_dict['state'].items()}
        return {**state_dict, 'state': held}

    def _adopted(self, parameter: Tensor, saved: Mapping[str, Any], label: str) -> dict[str, Any]:
        """A copy of what was saved for a parameter."""
        state: dict[str, Any] = {}
        for name, value in saved.items():
            if name in self._moments and value is not None:
                problem = misfit(value, parameter)
                if problem:
                    raise AmpCheckpointError(
                        f'{label}[{name!r}] of the state dict {problem}: it belongs to another parameter.'
                    )
                moment = torch.empty_like(parameter, dtype=self._moment_dtype(parameter), requires_grad=False)
                state[name] = moment.copy_(value.detach())
            elif name == 'step' and value is not None:
                problem = uncountable(value)
                if problem:
                    raise AmpCheckpointError(f'{label}[{name!r}] of the state dict {problem}.')
                state[name] = _count(value, parameter.device, copy=True)
            elif isinstance(value, Tensor):
                state[name] = value.detach().to(parameter.device, copy=True)
            elif value is not None:
                state[name] = value
        return state


def _keep_types(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
    return optimizer._held(state_dict) if isinstance(optimizer, FusedOptimizer) else None


def _count(value: Any, device: torch.device, copy: bool = False) -> Tensor:
    """A count of steps as the ops take it."""
    if isinstance(value, Tensor):
        return (
            value.detach().reshape(()).to(device, torch.float32, copy=copy)
            if copy or not _is_count(value, device)
            else value
        )
    return torch.full((), float(value), dtype=torch.float32, device=device)


def _is_count(value: Tensor, device: torch.device) -> bool:
    return value.dtype is torch.float32 and value.device == device and value.dim() == 0 and not value.requires_grad
