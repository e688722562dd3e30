"""Gathers the lists of a step: checks everything, makes the state that is missing, and sorts by device and kind of state."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .. import ops
from ..errors import AmpUsageError
from ..ops.attributes import fingerprints
from ..policy.levels import dtype_name
from ..policy.nested import HALF_TYPES, parameters_in
from ..shards import differs, is_sharded
from ..torch_internals import is_traceable_wrapper_subclass
from .algorithm import Algorithm
from .tensor_lists import Bucket, DeviceBucket, TensorLists

FUSED = (torch.float32, *HALF_TYPES)
REAL = (torch.float32, torch.float64, *HALF_TYPES)
COMPLEX = (torch.complex64, torch.complex128)
#: The group of parameters that torch's own functions step, or -1; the state that they need; and whether it has 64 bits.
Kind = tuple[int, tuple[str, ...], bool]


class Buffers:
    """Memory for what the prologue writes. It stays where it is as long as the optimizer lives: CUDA graphs write there."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, torch.device], list[Tensor]] = defaultdict(list)

    def rows(self, use: str, device: torch.device, rows: int, width: int, at_least: int = 1) -> Tensor:
        """Zeros at first, and what was written since.

        Args:
            use: What for.
            device: Where.
            rows: How many rows.
            width: Elements of a row; always the same for one use.
            at_least: How many rows to have room for.
        """
        held = self._held[use, device]
        if not held or held[-1].shape[0] < rows:
            # smaller ones are kept for graphs that were captured with them
            size = max(rows, at_least, 2 * held[-1].shape[0] if held else 0)
            held.append(torch.zeros(size, width, device=device))
        return held[-1][:rows]


class Gatherer:
    """Gathers the lists of one step of one optimizer.

    Args:
        optimizer: Of the groups and the state.
        algorithm: What it computes.
        state_dtype: Type of new moments of float32 and 16-bit parameters.
        buffers: Of the optimizer.
    """

    def __init__(self, optimizer: Optimizer, algorithm: Algorithm, state_dtype: torch.dtype, buffers: Buffers) -> None:
        self._optimizer = optimizer
        self._algorithm = algorithm
        self._state_dtype = state_dtype
        self._buffers = buffers
        self._begun: list[tuple[Tensor, dict[str, Any], dict[str, Tensor]]] = []

    def gather(
        self,
        gradients: Sequence[Tensor | None],
        partners: Sequence[Tensor | None] | None,
        options: list[Any],
    ) -> TensorLists:
        """Check everything, then make the state that is missing; it is shown when the step is taken.

        Args:
            gradients: Of all parameters.
            partners: Of all parameters, where an Update gives them.
            options: Of all groups.

        Raises:
            AmpUsageError: A gradient, a state or a group that no step can be taken with.
        """
        groups = self._optimizer.param_groups
        for index, group in enumerate(groups):
            if group['differentiable']:
                raise AmpUsageError(
                    f"param_groups[{index}]['differentiable'] is True: {type(self._optimizer).__name__} writes in place and "
                    f'keeps no graph. Set it to False, or use torch.optim.{self._algorithm.torch_name}.'
                )
        parameters = parameters_in(groups)
        group_of = [index for index, group in enumerate(groups) for _ in group['params']]
        names = [self._algorithm.names(group) for group in groups]
        chosen = [index for index, gradient in enumerate(gradients) if gradient is not None]
        for index in chosen:
            self._check(index, parameters[index], gradients[index], names[group_of[index]])
        served = ops.compiled_devices()
        # torch's own functions take the hyper-parameters of one group, and tensors of one type
        kinds = [
            (
                -1 if p.dtype in FUSED and p.device.type in served else group,
                names[group],
                torch.finfo(p.dtype).bits == 64,
            )
            for p, group in ((parameters[index], group_of[index]) for index in chosen)
        ]
        places: dict[torch.device, dict[Kind, list[int]]] = defaultdict(lambda: defaultdict(list))
        for position, (index, kind) in enumerate(zip(chosen, kinds)):
            places[parameters[index].device][kind].append(position)
        if partners is not None:
            if len(places) > 1:
                raise AmpUsageError(
                    f'{type(self._optimizer).__name__}: parameters with gradients are on {", ".join(map(str, places))}; under '
                    'one loss scale they must be on one device.'
                )
            if not places and parameters:
                # nothing is stepped, but others may wait for the decision
                places[parameters[0].device].clear()
        stepped = [parameters[index] for index in chosen]
        beside: list[Tensor | None] = (
            [None] * len(stepped) if partners is None else [partners[index] for index in chosen]
        )
        own_group = [group_of[index] for index in chosen]
        return TensorLists(
            lengths=[len(group['params']) for group in groups],
            names=names,
            options=options,
            parameters=parameters,
            fingerprints=fingerprints(parameters, gradients, partners is None),
            partners=partners,
            devices=[self._place(device, kinds, stepped, beside, own_group) for device, kinds in places.items()],
            begun=self._begun,
        )

    def _place(
        self,
        device: torch.device,
        kinds: Mapping[Kind, list[int]],
        stepped: list[Tensor],
        partners: list[Tensor | None],
        group_of: list[int],
    ) -> DeviceBucket:
        # those of the fused ops first
        buckets = [self._bucket(kind, positions, stepped, partners) for kind, positions in sorted(kinds.items())]
        fused = [bucket for bucket in buckets if bucket.group is None]
        count = sum(len(group['params']) for group in self._optimizer.param_groups)
        total = sum(len(bucket.params) for bucket in fused)
        rows = self._buffers.rows('rows', device, total, ops.ROW, count)
        begin = 0
        for bucket in fused:
            bucket.rows = rows[begin : begin + len(bucket.params)]
            begin += len(bucket.params)
            if not bucket.columns:
                # the prologue counts steps, and nobody asks for these
                bucket.steps = list(self._buffers.rows('steps', device, len(bucket.params), 1, count)[:, 0].unbind())
        return DeviceBucket(
            device=device,
            buckets=buckets,
            rows=rows,
            steps=[step for bucket in buckets for step in bucket.steps],
            groups=torch.tensor(
                [group_of[i] for bucket in fused for i in kinds[-1, tuple(bucket.columns), False]], dtype=torch.int64
            ),
            decision=self._buffers.rows('decision', device, 1, ops.DECISION)[0],
        )

    def _bucket(self, kind: Kind, positions: list[int], stepped: list[Tensor], partners: list[Tensor | None]) -> Bucket:
        group, names, _ = kind
        params = [stepped[position] for position in positions]
        states: list[dict[str, Any]] = []
        columns: dict[str, list[Tensor]] = {name: [] for name in names}
        for parameter in params if names else ():
            state = self._optimizer.state.get(parameter)
            state = {} if state is None else state
            states.append(state)
            whole = self._completed(parameter, state, names)
            fresh = {name: value for name, value in whole.items() if state.get(name) is not value}
            if fresh:
                self._begun.append((parameter, state, fresh))
            for name in names:
                columns[name].append(whole[name])
        counts = None
        if group >= 0 and names and not self._algorithm.torch_counts:
            # one addition counts for all
            counts = torch.stack(columns['step'])
            columns['step'] = list(counts.unbind())
            self._begun += [(p, s, {'step': step}) for p, s, step in zip(params, states, columns['step'])]
        beside = [partners[position] for position in positions]
        has_partners = any(partner is not None for partner in beside)
        return Bucket(
            group=None if group < 0 else group,
            indices=None if len(positions) == len(stepped) else positions,
            params=params,
            states=states,
            columns=columns,
            steps=columns.get('step', []) if group < 0 else [],
            partners=[p if b is None else b for p, b in zip(params, beside)] if has_partners else [],
            rows=torch.empty(0),
            counts=counts,
        )

    def _completed(self, parameter: Tensor, state: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Tensor]:
        """The state of a parameter under ``names``: what is there, corrected, and what was missing."""
        state = self._algorithm.kept(state)
        dtype = moment_dtype(parameter, self._state_dtype)
        whole: dict[str, Tensor] = {}
        for name in names:
            value = state.get(name)
            if name == 'step':
                whole[name] = count_of(self._algorithm.first_step(state) if value is None else value, parameter.device)
            elif value is None:
                whole[name] = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
            else:
                # torch's functions take moments of the parameter's type alone
                whole[name] = value if parameter.dtype in FUSED else value.to(dtype)
        return whole

    def _check(self, index: int, parameter: Tensor, gradient: Tensor | None, names: tuple[str, ...]) -> None:
        assert gradient is not None
        problem = unfit(parameter, gradient, self._algorithm.torch_name)
        if problem:
            raise AmpUsageError(f'{type(self._optimizer).__name__}: {self._label(index)} {problem}.')
        state = self._optimizer.state.get(parameter) or {}
        for name in names if state else ():
            value = state.get(name)
            if name == 'step':
                problem = uncountable(self._algorithm.first_step(state) if value is None else value)
            elif value is not None:
                problem = misfit(value, parameter)
                if not problem and value.device != parameter.device:
                    problem = f'is on {value.device} and the parameter on {parameter.device}'
            if problem:
                raise AmpUsageError(
                    f'{type(self._optimizer).__name__}: state[{name!r}] of {self._label(index)} {problem}. Set it right, or '
                    'remove the state of this parameter to begin anew.'
                )

    def _label(self, index: int) -> str:
        """What to call the parameter at a position among all."""
        for number, group in enumerate(self._optimizer.param_groups):
            if index < len(group['params']):
                names = group.get('param_names')
                name = f'{names[index]!r} ' if names else ''
                return f"parameter {name}(param_groups[{number}]['params'][{index}])"
            index -= len(group['params'])
        raise IndexError(index)


def moment_dtype(parameter: Tensor, state_dtype: torch.dtype) -> torch.dtype:
    """Of the moments of a parameter: ``state_dtype``, or the parameter's own where no op takes that."""
    return state_dtype if parameter.dtype in FUSED else parameter.dtype


def count_of(value: Any, device: torch.device, copy: bool = False) -> Tensor:
    """A step counter as the ops take it.

    Args:
        value: A number, or a tensor of one.
        device: Of the parameter.
        copy: Whether a tensor that fits is copied.
    """
    if not isinstance(value, Tensor):
        return torch.full((), float(value), dtype=torch.float32, device=device)
    fits = value.dtype is torch.float32 and value.device == device and value.dim() == 0 and not value.requires_grad
    return value if fits and not copy else value.detach().reshape(()).to(device, torch.float32, copy=copy)


def unfit(parameter: Tensor, gradient: Tensor, optimizer: str) -> str:
    """Why no step can be taken with a gradient; empty where one can.

    Args:
        parameter: What is stepped.
        gradient: Its gradient.
        optimizer: Name of the class in ``torch.optim`` that is extended.
    """
    if is_traceable_wrapper_subclass(parameter) and not is_sharded(parameter):
        return (
            f'is a {type(parameter).__name__}, and plain tensors and DTensors are expected. Use torch.optim.{optimizer}'
        )
    problem = differs(gradient, parameter)
    if problem:
        return f'has a gradient that {problem}: parameter.grad = parameter.grad.redistribute(...) makes them agree'
    if parameter.dtype not in REAL and parameter.dtype not in COMPLEX:
        return f'has dtype {dtype_name(parameter.dtype)}: {", ".join(map(dtype_name, (*REAL, *COMPLEX)))} fit'
    if gradient.layout is not torch.strided:
        other = 'SGD' if optimizer == 'SGD' else 'SparseAdam'
        return f'has a sparse gradient: use torch.optim.{other} for it, or sparse=False in its embedding'
    if gradient.shape != parameter.shape:
        return f'has shape {tuple(parameter.shape)} and its gradient {tuple(gradient.shape)}: they must agree'
    if gradient.device != parameter.device:
        return f'is on {parameter.device} and its gradient on {gradient.device}: move the gradient there'
    fitting = COMPLEX if parameter.is_complex() else REAL
    if gradient.dtype not in fitting:
        mine, theirs = dtype_name(parameter.dtype), dtype_name(gradient.dtype)
        return f'has dtype {mine} and its gradient {theirs}: {", ".join(map(dtype_name, fitting))} fit'
    return ''


def misfit(value: Any, parameter: Tensor) -> str:
    """What is wrong with a moment of a parameter; empty where nothing is."""
    if not isinstance(value, Tensor):
        return f'is a {type(value).__name__}, no tensor'
    if value.layout is not torch.strided:
        return 'is sparse'
    if value.shape != parameter.shape:
        return f'has shape {tuple(value.shape)} and the parameter {tuple(parameter.shape)}'
    problem = differs(value, parameter)
    if problem:
        return f'{problem}; set_optimizer_state_dict of torch.distributed.checkpoint.state_dict loads sharded state'
    fitting = COMPLEX if parameter.is_complex() else REAL
    if value.dtype not in fitting:
        return f'has dtype {dtype_name(value.dtype)}, and {", ".join(map(dtype_name, fitting))} fit'
    return ''


def uncountable(step: Any) -> str:
    """What is wrong with a count of steps; empty where nothing is."""
    if step is None:
        return 'is missing, without which the moments mean nothing'
    if isinstance(step, Tensor):
        return '' if step.numel() == 1 else f'has shape {tuple(step.shape)}: one number is expected'
    return '' if isinstance(step, (int, float)) else f'is a {type(step).__name__}: one number is expected'
