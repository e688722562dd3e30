"""The multi-tensor operations of a training step: the one place through which the engine reaches them.

Each call goes to the compiled kernel where the library has one for the device and the dtypes, and to its reference in plain
torch otherwise. Both give the same bits. The functions here, the ops of torch's dispatcher and their fake kernels are all made
from :data:`amp_wrapper.ops.schemas.SCHEMAS`.
"""

from __future__ import annotations

import functools
import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from .. import compiler_internals
from . import checks, exponents, loader, norms, optimizer_step, prologue, reference, schemas
from .reference import add_gradients
from .schemas import ADAM, DECISION, EXPONENTS, HYPER, ROW, SGD

_P = ParamSpec('_P')
_R = TypeVar('_R')

#: What the compiled kernels take; anything else is left to the reference.
COMPILED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
#: Op to its reference implementation in plain torch.
REFERENCES: dict[str, Callable[..., Any]] = {
    op: next(
        getattr(module, op) for module in (reference, exponents, norms, prologue, optimizer_step) if hasattr(module, op)
    )
    for op in schemas.SCHEMAS
}
#: Ops that work on one device.
_STEP = ('update_scale', 'step_prologue', 'fused_adam', 'fused_sgd')
#: Ops that can be called once for each device. The sum of a norm runs over tensors in the order of the list, and counts lie in
#: one table.
_SPLIT = tuple(
    op for op in schemas.SCHEMAS if op not in (*_STEP, 'multi_tensor_exponents') and not schemas.ARGUMENTS[op].returns
)


def compiled_devices() -> frozenset[str]:
    """Types of the devices that compiled kernels serve."""
    return loader.library().devices


@compiler_internals.constant_when_traced
def _serves(kind: str) -> bool:
    # torch.compile knows what to do with a constant bool, and not with a set
    return kind in loader.library().devices


def backend_of(device: torch.device | str) -> str:
    """What serves the ops on a device: 'CUDA op', 'CPU op' or 'reference'.

    Args:
        device: Such as ``torch.device('cuda', 0)`` or 'cpu'.
    """
    kind = torch.device(device).type
    return f'{kind.upper()} op' if kind in loader.library().devices else 'reference'


def backend() -> str:
    """The implementation that serves the ops, for logs."""
    served = sorted(loader.library().devices)
    if not served:
        return 'reference (plain torch)'
    text = ', '.join(f'{kind.upper()} op' for kind in served)
    return f'{text}; reference on GPUs' if 'cuda' not in served and torch.cuda.is_available() else text


def _tensors(arguments: Mapping[str, Any], names: Sequence[str]) -> list[Tensor]:
    """Those of some lists."""
    return [tensor for name in names for tensor in arguments[name]]


def _is_served(op: str, arguments: Mapping[str, Any]) -> bool:
    """Whether one call of the compiled op can take all of this; where only the graph is made, nobody can try and see."""
    known = schemas.ARGUMENTS[op]
    listed = _tensors(arguments, known.lists)
    scalars = [arguments[name] for name in known.scalars if arguments[name] is not None]
    places = {tensor.device for tensor in [*listed, *scalars]}
    return len(places) == 1 and _serves(places.pop().type) and all(tensor.dtype in COMPILED_DTYPES for tensor in listed)


def _by_device(front: Callable[..., Any], arguments: Mapping[str, Any]) -> bool:
    """Call once for each device, where every tuple of tensors is on one; False, and nothing done, where that is not so."""
    op = front.__name__
    known = schemas.ARGUMENTS[op]
    lists = {name: arguments[name] for name in known.lists}
    first = next(iter(lists.values()))
    if len({tensor.device for tensor in first}) < 2 or len({len(tensors) for tensors in lists.values()}) > 1:
        return False
    groups: dict[torch.device, list[int]] = defaultdict(list)
    for index, tensors in enumerate(zip(*lists.values())):
        if len({tensor.device for tensor in tensors}) > 1:
            return False
        groups[tensors[0].device].append(index)
    # all of it, before the first of the calls writes anything
    checks.check_call(op, floating=op != 'multi_tensor_copy', **{n: arguments[n] for n in (*lists, *known.scalars)})
    found_inf = arguments.get('found_inf')
    for device, indices in groups.items():
        here: dict[str, Any] = {name: [tensors[i] for i in indices] for name, tensors in lists.items()}
        here |= {name: arguments[name].to(device) for name in known.scalars if arguments[name] is not None}
        if found_inf is not None:
            here['found_inf'] = torch.zeros((), dtype=torch.float32, device=device)
        front(**{**arguments, **here})
        if found_inf is not None:
            torch.maximum(found_inf, here['found_inf'].to(found_inf.device).view_as(found_inf), out=found_inf)
    return True


def _uncompiled(front: Callable[..., Any], arguments: Mapping[str, Any], is_missing: bool) -> Any:
    """A call that no compiled kernel takes as it is: on several devices, on another device, of other types, or wrong."""
    if not is_missing and front.__name__ in _SPLIT and _by_device(front, arguments):
        return None
    return REFERENCES[front.__name__](**arguments)


def _front(meaning: Callable[_P, _R]) -> Callable[_P, _R]:
    """The function that users call: the compiled op where it takes the call, and the reference otherwise."""
    op = meaning.__name__
    signature = inspect.signature(meaning)
    defaults = {name: each.default for name, each in signature.parameters.items() if each.default is not each.empty}
    # torch 2.6 traces no mapping of a signature
    parameters = tuple(signature.parameters)

    @functools.wraps(meaning)
    def front(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not torch.compiler.is_compiling():
            compiled = getattr(torch.ops.amp_wrapper, op) if loader.library().devices else None
            if compiled is not None:
                # its own checks are the cheapest way to find out; they come before anything is written
                with suppress(NotImplementedError):
                    return compiled(*args, **kwargs)  # type: ignore[no-any-return]
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            return _uncompiled(front, bound.arguments, compiled is None)  # type: ignore[no-any-return]
        # what is traced cannot try and see, and the graph wants the dispatcher's op
        arguments = {**defaults, **dict(zip(parameters, args)), **kwargs}
        if op in _STEP or _is_served(op, arguments):
            return getattr(torch.ops.amp_wrapper, op)(**arguments)  # type: ignore[no-any-return]
        return meaning(*args, **kwargs)

    front.__module__ = __name__
    return front


multi_tensor_scale = _front(reference.multi_tensor_scale)
multi_tensor_axpby = _front(reference.multi_tensor_axpby)
multi_tensor_copy = _front(reference.multi_tensor_copy)
multi_tensor_isnonfinite = _front(reference.multi_tensor_isnonfinite)
multi_tensor_exponents = _front(exponents.multi_tensor_exponents)
multi_tensor_l2norm = _front(norms.multi_tensor_l2norm)
multi_tensor_maxnorm = _front(norms.multi_tensor_maxnorm)
multi_tensor_scale_l2norm = _front(norms.multi_tensor_scale_l2norm)
multi_tensor_refresh = _front(reference.multi_tensor_refresh)
update_scale = _front(reference.update_scale)
step_prologue = _front(prologue.step_prologue)
fused_adam = _front(optimizer_step.fused_adam)
fused_sgd = _front(optimizer_step.fused_sgd)


def _fake(op: str) -> Callable[..., Any]:
    """An op where tensors have no memory: what is written keeps its shape and type, what is returned is made here."""
    known = schemas.ARGUMENTS[op]
    parameters = tuple(inspect.signature(REFERENCES[op]).parameters)

    def fake(*args: Any, **kwargs: Any) -> Any:
        arguments = {**dict(zip(parameters, args)), **kwargs}
        listed = _tensors(arguments, known.lists)
        scalars = [arguments[name] for name in known.scalars if arguments.get(name) is not None]
        if len({tensor.is_meta for tensor in [*listed, *scalars]}) > 1:
            # the dispatcher sends lists of both here, where nothing is computed: the real ones would be left as they are
            raise NotImplementedError('One call takes meta tensors or real ones, not both.')
        if not known.returns:
            return None
        first = arguments[known.lists[0]]
        device = reference.device_of(first, arguments.get('found_inf'))
        if op == 'multi_tensor_refresh':
            return torch.empty(len(first), dtype=torch.bool, device=device)
        norm = torch.empty((), dtype=torch.float32, device=device)
        if op == 'multi_tensor_scale_l2norm':
            return norm
        return norm, norm.new_empty(len(first) if arguments.get('per_tensor') else 0)

    return fake


_library = torch.library.Library(schemas.NAMESPACE, 'DEF')  # type: ignore[no-untyped-call]
for _name, _schema in schemas.SCHEMAS.items():
    _library.define(_name + _schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
    _library.impl(_name, REFERENCES[_name], 'CompositeExplicitAutograd')  # type: ignore[no-untyped-call]
    # a lazy negation is looked at by the kernels: torch's fallback expects written arguments to be returned
    _library.impl(_name, torch.library.fallthrough_kernel, 'Negative')  # type: ignore[no-untyped-call]
    # not differentiable: results want no gradient, whatever the inputs do
    _library.impl(_name, torch.library.fallthrough_kernel, 'Autograd')  # type: ignore[no-untyped-call]
    torch.library.register_fake(f'{schemas.NAMESPACE}::{_name}', _fake(_name), lib=_library)

__all__ = [
    'ADAM',
    'COMPILED_DTYPES',
    'DECISION',
    'EXPONENTS',
    'HYPER',
    'ROW',
    'SGD',
    'add_gradients',
    'backend',
    'backend_of',
    'compiled_devices',
    'fused_adam',
    'fused_sgd',
    'multi_tensor_axpby',
    'multi_tensor_copy',
    'multi_tensor_exponents',
    'multi_tensor_isnonfinite',
    'multi_tensor_l2norm',
    'multi_tensor_maxnorm',
    'multi_tensor_refresh',
    'multi_tensor_scale',
    'multi_tensor_scale_l2norm',
    'step_prologue',
    'update_scale',
]
