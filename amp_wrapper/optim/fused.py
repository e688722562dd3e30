"""The base class of the fused optimizers: one pass over gradient, weight and state, and the device decides whether to skip.

One rule says who takes a step. The compiled ops step dense float32, float16 and bfloat16 tensors of one device that the library
serves. Everything else is the step of ``torch.optim``, fused where torch has that.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
import warnings
from abc import abstractmethod
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from .. import ops
from ..compiler_internals import untraced
from ..errors import AmpCheckpointError, AmpConfigError, AmpUsageError
from ..ops.attributes import are_strided, gradients, like, places
from ..policy.levels import to_dtype
from ..policy.nested import parameters_of
from ..shards import any_sharded, local, local_like, whole
from ..torch_internals import step_without_hooks
from .tensors import count_of, lay_out, served_by_ops, served_by_torch

Tensors = Sequence[Tensor]


@dataclasses.dataclass(eq=False)
class Update:
    """How one fused step is scaled, clipped, decided and copied; see :attr:`FusedOptimizer.amp_update`.

    Attributes:
        parameters: Those of all groups, in their order.
        gradients: The scaled gradient of each, wherever it lies; None for none. Dense.
        partners: What stands beside each: the 16-bit copy of a float32 one, the int16 remainder of a 16-bit one, or None.
        decide: Called once with the gradients that are there, of sharded ones this rank's part, before anything is written.
            Returns keyword arguments of :func:`amp_wrapper.ops.fused_adam`: ``found_inf``, ``norm``, ``scale`` and the like.
        written: Called once everything is written, before the optimizer's post-hooks, which may write more.
        decision: Set by ``step()``: float32 (8,) on the device, see :data:`amp_wrapper.ops.DECISION`.
    """

    parameters: Sequence[Tensor]
    gradients: Sequence[Tensor | None]
    partners: Sequence[Tensor | None]
    decide: Callable[[Tensors], Mapping[str, Any]]
    written: Callable[[], None]
    decision: Tensor | None = None


class FusedOptimizer(Optimizer):
    """Stands before a class of ``torch.optim``, whose constructor, groups and names it keeps, and takes its steps.

    Works with :class:`torch.amp.GradScaler`, which leaves ``grad_scale`` and ``found_inf`` to it where the device reads them.
    """

    #: It steps a 16-bit weight and its int16 remainder together.
    supports_split_weights = True

    #: The class of ``torch.optim`` that is extended.
    _torch: ClassVar[type[Optimizer]]
    #: The op, the order in which it takes the state, the option that all groups have or none has, and the state without it.
    _op: ClassVar[Callable[..., None]]
    _order: ClassVar[tuple[str, ...]]
    _option: ClassVar[str]
    _without_option: ClassVar[tuple[str, ...]] = ()
    #: What a group of a saved state dict has to have, and the state of a parameter, where there is any.
    _in_groups: ClassVar[tuple[str, ...]]
    _in_state: ClassVar[tuple[str, ...]] = ()
    #: The state with an entry for each element.
    _moments: ClassVar[tuple[str, ...]]

    #: Type of the moments in a step of the compiled ops. torch's own steps keep them in the type of the parameter.
    state_dtype: torch.dtype = torch.float32

    #: Set around a step by the engine that scales the loss: it is a fused one by this, ``grad_scale`` and ``found_inf`` do not
    #: count then, and ``step()`` takes it.
    amp_update: Update | None = None
    # whether the compiled ops serve the parameters; None for "ask again"
    _is_served: bool | None = None
    # for torch's steps: where the parameters lay, which groups it serves, and which fused ones the state is laid out for
    _places: list[Any] | None = None
    _served: Sequence[bool] = ()
    _laid_out: Sequence[bool] = ()

    # -- what the classes differ in ----------------------------------------------------------------------------------

    @abstractmethod
    def _row(self, group: Mapping[str, Any]) -> list[Any]:
        """Return the hyper-parameters of a group after lr, in the order of the ops."""

    def _names(self) -> tuple[str, ...]:
        """Return the state that each parameter needs for a fused step."""
        return self._order if self.param_groups[0][self._option] else self._without_option

    def _knows(self, group: Mapping[str, Any]) -> bool:
        """Return whether fused steps, ours and torch's, know all options of a group."""
        option = self._option
        return not group['differentiable'] and bool(group[option]) == bool(self.param_groups[0][option])

    def _begin(self, group: Mapping[str, Any]) -> None:
        """Make the state of a group that torch's fused step expects to be there."""

    def _check_arguments(self, state_dtype: Any, fused: Any, differentiable: Any) -> None:
        name, problems, dtype = type(self).__name__, [], to_dtype(state_dtype)
        if state_dtype is not None and dtype not in (torch.float32, torch.bfloat16):
            problems.append(f"state_dtype={state_dtype!r} of {name} must be 'float32', 'bfloat16' or None.")
        for words, is_wrong in (('fused=False', fused is False), ('differentiable=True', differentiable)):
            if is_wrong:
                problems.append(
                    f'{words}: {name} is fused, and keeps no graph. Use torch.optim.{self._torch.__name__}.'
                )
        if problems:
            raise AmpConfigError(problems)
        self.state_dtype = dtype or torch.float32

    # -- who takes the step ------------------------------------------------------------------------------------------

    @property
    def fuses(self) -> bool:
        """Whether the compiled ops serve all parameters and the options of their groups."""
        if self._is_served is None:
            self._is_served = served_by_ops(parameters_of(self))
        return self._is_served and all(map(self._knows, self.param_groups))

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether GradScaler leaves ``grad_scale`` and ``found_inf`` to the optimizer, and reads no flag."""
        params = parameters_of(self)
        if self.fuses:
            return are_strided([p.grad for p in params if p.grad is not None])
        return all(self._fused_by_torch(params))

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value: bool) -> None:
        """Ignore what torch's constructor sets."""

    def _fused_by_torch(self, params: Tensors) -> list[bool]:
        """Return of each group whether torch's step of it is fused."""
        now = places(params)
        if now != self._places:
            self._places, self._laid_out = now, ()
            self._served = [served_by_torch(group['params']) for group in self.param_groups]
        is_plain = len(now) == len(params)
        return [served and self._torch_fuses(group, is_plain) for served, group in zip(self._served, self.param_groups)]

    def _torch_fuses(self, group: Mapping[str, Any], is_plain: bool = False) -> bool:
        """Return whether torch's fused step of a group whose parameters it serves computes what it should.

        Args:
            group: Of parameters and options.
            is_plain: Whether it is known that the parameters are contiguous.
        """
        params, found = group['params'], gradients(group['params'])
        grads = [grad for grad in found if grad is not None]
        # it looks at no strides, and walks through memory; sparse gradients are not contiguous
        if all(map(Tensor.is_contiguous, grads)) and (is_plain or all(map(Tensor.is_contiguous, params))):
            return self._knows(group)
        beside = [parameter.stride() for parameter, grad in zip(params, found) if grad is not None]
        return are_strided(grads) and beside == [grad.stride() for grad in grads] and self._knows(group)

    # -- a step -----------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step. In a fused one the host waits for no device.

        Where the step is skipped (``found_inf`` above 0), parameters, counts and moments stay as they are.

        Args:
            closure: Evaluates the model again and returns the loss.

        Returns:
            What ``closure`` returned, or None.

        Raises:
            AmpUsageError: A state or a hyper-parameter that no fused step can be taken with. Nothing is changed then.
        """
        if torch.compiler.is_dynamo_compiling():
            # nothing here is worth a graph
            return self._step_eagerly(closure)
        loss = None if closure is None else torch.enable_grad()(closure)()
        with torch.no_grad():
            update = self.amp_update
            params = parameters_of(self) if update is None else update.parameters
            if update is not None:
                update.decision = self._step_fused(params, update.gradients, update.partners, update.decide)
                update.written()
            elif params and (not self.fuses or self._step_fused(params, gradients(params)) is None):
                self._step_by_torch(params)
        return loss

    @untraced
    def _step_eagerly(self, closure: Callable[[], Any] | None) -> Any:
        return FusedOptimizer.step(self, closure)

    def _step_fused(
        self,
        params: Sequence[Any],
        grads: Sequence[Any],
        partners: Sequence[Any] = (),
        decide: Callable[[Tensors], Mapping[str, Any]] | None = None,
    ) -> Tensor | None:
        """Decide and update in one op, and return the decision; None, and nothing is done, where only torch can."""
        device, rows = params[0].device, array('q')
        for row, group in enumerate(self.param_groups):
            rows += array('q', [row]) * len(group['params'])
        if not all(map(operator.is_not, grads, itertools.repeat(None))):
            chosen = [place for place, grad in enumerate(grads) if grad is not None]
            params, grads = ([values[place] for place in chosen] for values in (params, grads))
            partners = [partners[place] for place in chosen] if partners else ()
            rows = array('q', [rows[place] for place in chosen])
        is_sharded = any_sharded(params)
        here, found, columns = params, grads, self._columns(params, is_sharded)
        beside = [p if partner is None else partner for p, partner in zip(params, partners)]
        if is_sharded:
            here, found = local(params), local_like(grads, params, 'gradients')
            beside = local_like(beside, params, 'copies')
        hyper, rates, rated = self._hyper_parameters(device)
        given = self._scaling(device) if decide is None else decide(found)
        decision = torch.empty(ops.DECISION, device=device)
        table = torch.frombuffer(rows, dtype=torch.int64) if rows else torch.zeros(0, dtype=torch.int64)
        rest = decision, hyper, table, rates, rated
        try:
            self._op(found, here, *columns, beside, *rest, **given)
        except ValueError:
            # nothing was written: something is sparse, or lies in other ways than its parameter
            self._is_served = None
            if not self.fuses or not are_strided(found):
                return None
            found, is_split = [like(g, p) for g, p in zip(found, here)], any(b.dtype is torch.int16 for b in beside)
            # as parameters are, which may have been replaced
            for parameter, name in itertools.product(params, self._names()):
                state = self.state[parameter]
                state[name] = (count_of if name == 'step' else like)(state[name], parameter)
            try:
                self._op(found, here, *self._columns(params, is_sharded), beside if is_split else [], *rest, **given)
            except ValueError as error:
                raise AmpUsageError(f'{error} Nothing was changed. Remove state that does not fit.') from error
            if beside and not is_split:
                ops.multi_tensor_copy(here, beside)
        # torch's steps want moments of other types
        self._places = None
        return decision

    def _columns(self, params: Sequence[Any], is_sharded: bool) -> list[list[Tensor]]:
        """Return the state of parameters, a list for each of :attr:`_order`; of sharded state this rank's part.

        What is missing is begun. A state that the options do not need has an empty list.
        """
        names, states, columns = self._names(), [*self.state.values()], list[list[Tensor]]()
        if names and not (len(states) == len(params) and all(map(operator.is_, self.state, params))):
            states = [self.state[parameter] for parameter in params]
        try:
            for name in self._order:
                values = [*map(operator.itemgetter(name), states)] if name in names else []
                columns.append(local_like(values, params, name) if values and is_sharded and name != 'step' else values)
        except KeyError:
            for parameter, state in zip(params, states):
                for name in [name for name in ('step', *self._moments) if name in names and name not in state]:
                    zeros = torch.zeros_like(parameter, dtype=self.state_dtype, requires_grad=False)
                    state[name] = count_of(0.0, parameter) if name == 'step' else zeros
            return self._columns(params, is_sharded)
        return columns

    def _hyper_parameters(self, device: torch.device) -> tuple[Tensor, list[Tensor], list[int]]:
        """Read the groups: float64 (groups, 7) on the CPU, each lr that is read on the device, and the groups of these."""
        rows, rates, rated = [], [], []
        for index, group in enumerate(self.param_groups):
            rate = group['lr']
            if isinstance(rate, Tensor) and rate.device == device and rate.numel() == 1:
                rates.append(rate.detach().to(torch.float32))
                rated.append(index)
                rate = 0.0
            try:
                rows.append([*map(float, (rate, *self._row(group)))])
            except (RuntimeError, TypeError, ValueError) as error:
                shown = {name: value for name, value in group.items() if name != 'params'}
                raise AmpUsageError(f'param_groups[{index}] holds {shown}: numbers are expected ({error}).') from error
        if len(rates) < len(rows) and device.type == 'cuda' and torch.cuda.is_current_stream_capturing():
            text = "a captured step keeps a learning rate that is a number: give param_groups[i]['lr'] a tensor on the device."
            warnings.warn(text, stacklevel=2)
        return torch.tensor(rows, dtype=torch.float64), rates, rated

    def _scaling(self, device: torch.device) -> dict[str, Tensor]:
        """Return what a GradScaler has set, as float32 scalars on a device. It adds the flags of several devices up."""
        scaling = {}
        for name, attribute, most in (('scale', 'grad_scale', torch.inf), ('found_inf', 'found_inf', 1.0)):
            value = getattr(self, attribute, None)
            if value is not None:
                value = whole(value.detach()) if isinstance(value, Tensor) else torch.tensor(float(value))
                scaling[name] = value.reshape(()).to(device, torch.float32, non_blocking=True).clamp(max=most)
        return scaling

    def _step_by_torch(self, params: Tensors) -> None:
        """Take the step of the class of ``torch.optim``, fused in those groups where torch can."""
        if self.state_dtype is torch.bfloat16 and self._names() and any(p.dtype is torch.float32 for p in params):
            raise AmpUsageError(
                f"{type(self).__name__}(state_dtype='bfloat16'): torch has no such step, and the compiled ops do not take it "
                f'(ops: {ops.backend()}). Build them by amp-wrapper build-ops, or leave state_dtype out.'
            )
        fused, before = self._fused_by_torch(params), [group['fused'] for group in self.param_groups]
        if fused != self._laid_out:
            for group, is_fused in zip(self.param_groups, fused):
                lay_out(self.state, group['params'], self._moments, is_fused)
            self._laid_out = fused
        # torch's kernels compare the flag with 1
        for name, value in self._scaling(params[0].device).items():
            setattr(self, 'grad_scale' if name == 'scale' else name, value)
        for group, is_fused in zip(self.param_groups, fused):
            group['fused'] = is_fused
            if is_fused:
                self._begin(group)
        try:
            step_without_hooks(self._torch)(self)
        finally:
            for group, fused in zip(self.param_groups, before):
                group['fused'] = fused

    # -- saving and loading -----------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's own."""
        super().add_param_group(param_group)
        self._is_served = self._places = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), 'state_dtype': self.state_dtype}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._is_served = self._places = None

    @untraced
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up a state dict of this class or of torch's own. It is copied, and left as it is.

        Where steps are fused, moments get :attr:`state_dtype`, and not the type of the parameter as in torch.

        Args:
            state_dict: Of this class, or of the class of ``torch.optim`` that it extends.

        Raises:
            AmpCheckpointError: State or groups of another kind of optimizer, or shapes that do not fit. Nothing is
                changed then.
            ValueError: Another number of groups or parameters.
        """
        saved: list[tuple[Tensor, dict[str, Any]]] = []

        def check(_: Optimizer, loaded: dict[str, Any]) -> None:
            ids = [key for group in loaded['param_groups'] for key in group['params']]
            saved.extend((p, loaded['state'].get(key, {})) for key, p in zip(ids, parameters_of(self)))
            self._check_saved(loaded['param_groups'], saved)

        # the last of these hooks, which may change the dict
        handle = self.register_load_state_dict_pre_hook(check)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        for parameter, state in saved:
            for name in (*self._moments, 'step'):
                value = state.get(name)
                if value is not None and name == 'step':
                    self.state[parameter][name] = count_of(value, parameter, copy=True)
                elif value is not None:
                    # torch's steps give it the type of the parameter
                    dtype = self.state_dtype if self.fuses else value.dtype
                    moment = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
                    self.state[parameter][name] = moment.copy_(value.detach())
                elif name in state:
                    # of torch's SGD: not begun
                    del self.state[parameter][name]

    def _check_saved(self, groups: list[dict[str, Any]], saved: list[tuple[Tensor, dict[str, Any]]]) -> None:
        own = f'that of torch.optim.{self._torch.__name__} or {type(self).__name__} is expected'
        for index, group in enumerate(groups):
            missing = [key for key in self._in_groups if key not in group]
            if missing:
                raise AmpCheckpointError(f'param_groups[{index}] of the state dict has no {missing[0]!r}: {own}.')
        for index, (parameter, state) in enumerate(saved):
            missing = [name for name in self._in_state if state and state.get(name) is None]
            if missing:
                found = ', '.join(map(repr, state))
                raise AmpCheckpointError(f'state[{index}] of the state dict has no {missing[0]!r}, but {found}: {own}.')
            for name in (*self._moments, 'step'):
                value, expected = state.get(name), tuple(parameter.shape if name in self._moments else ())
                # files of old have numbers of steps
                shape = tuple(getattr(value, 'shape', ()))
                if value is not None and shape != expected:
                    raise AmpCheckpointError(
                        f'state[{index}][{name!r}] of the state dict has shape {shape}, and {expected} is expected: it '
                        f'belongs to another parameter.'
                    )
