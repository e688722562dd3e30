"""Containers of tensors: walking nested ones without losing their types, and the parameters of optimizers."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..compiler_internals import never_compiled_alone

#: The floating types that mixed precision moves between. float64 and complex tensors are always left alone.
CASTABLE = frozenset({torch.float32, torch.float16, torch.bfloat16})
#: Some types of tensors.
Types = frozenset[torch.dtype]
#: What becomes of a tensor; the same one for "no change".
MapTensor = Callable[[Tensor], Tensor]
#: The 16-bit floating types.
HALF_TYPES = frozenset({torch.float16, torch.bfloat16})

# what holds no tensors, and comes often
_PLAIN = (bool, int, float, str, torch.dtype, torch.device)
# containers that hold nothing but their items
_ITEMS_ALONE = (list, dict, OrderedDict)


def parameters_of(*optimizers: Optimizer) -> list[nn.Parameter]:
    """What optimizers step, in the order of their groups."""
    return [parameter for optimizer in optimizers for group in optimizer.param_groups for parameter in group['params']]


#: Maps tensors inside an object of a kind that only an integration knows: (function, object) to object.
EnterObject = Callable[[MapTensor, Any], Any]


class Memo:
    """What was made of objects, found by their identity.

    Attributes:
        entries: Of each object: itself, what was made of it, and what to compare that with to see whether it was written to.
    """

    def __init__(self) -> None:
        self.entries: list[tuple[Any, Any, Any]] = []
        self._by_id: dict[int, Any] = {}

    def find(self, value: Any) -> Any:
        """What was made of an object; None where nothing was. In a graph, tensors alone are found: 2.6 compares no dicts."""
        if not torch.compiler.is_dynamo_compiling():
            return self._by_id.get(id(value))
        # a graph would be made anew for each object whose id it asks for
        for original, made, _ in self.entries if isinstance(value, Tensor) else ():
            if original is value:
                return made
        return None

    def add(self, value: Any, made: Any, before: Any) -> None:
        """Note what was made of an object."""
        self.entries.append((value, made, before))
        if not torch.compiler.is_dynamo_compiling():
            self._by_id[id(value)] = made


def map_tensors(function: MapTensor, value: Any, enter: EnterObject | None = None, rebuilt: Memo | None = None) -> Any:
    """Apply ``function`` to every tensor inside ``value``.

    Lists, tuples, named tuples, dicts, dataclasses and subclasses of these are entered, and rebuilt as the same type
    only where a tensor in them changed; the input is never modified. Strings, arrays, numbers, modules, generators and
    every unknown object (mmengine's ``BaseDataElement`` among them) are returned as they are.

    Args:
        function: Maps a tensor to a tensor; returns the same object for "no change".
        value: Any object.
        enter: Called for objects of unknown kinds; None leaves them alone.
        rebuilt: Gets what can be written to and was rebuilt; what is in it already stays one object.

    Returns:
        ``value`` itself where nothing changed, else a new container of the same type.
    """
    new = _mapped(function, value, enter, rebuilt)
    return value if new is None else new


def _mapped(function: MapTensor, value: Any, enter: EnterObject | None, rebuilt: Memo | None) -> Any:
    """What becomes of ``value``; None where it stays. torch.compile does not compare containers by identity."""
    if isinstance(value, Tensor):
        tensor = function(value)
        return None if tensor is value else tensor
    if value is None or isinstance(value, _PLAIN):
        return None
    parts = parts_of(value)
    if parts is None:
        new = value if enter is None else enter(function, value)
        return None if new is value else new
    known = None if rebuilt is None else rebuilt.find(value)
    if known is not None:
        return known
    changed: dict[Any, Any] = {}
    for key, item in parts:
        new = _mapped(function, item, enter, rebuilt)
        if new is not None:
            changed[key] = new
    if not changed:
        return None
    if isinstance(value, tuple):
        make = getattr(type(value), '_make', type(value))
        return make([changed.get(place, item) for place, item in enumerate(value)])
    made = value.copy() if type(value) in _ITEMS_ALONE else copy.copy(value)
    for key, item in changed.items():
        set_part(made, key, item)
    if rebuilt is not None:
        rebuilt.add(value, made, dict(parts_of(made) or ()))
    return made


def parts_of(value: Any) -> Iterable[tuple[Any, Any]] | None:
    """The items of a dict, list or tuple by key or place, or the fields of a dataclass by name; None of anything else."""
    if isinstance(value, dict):
        return value.items()
    if isinstance(value, (list, tuple)):
        # before 2.13, graphs know no truth of an enumeration
        return list(enumerate(value))
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return None
    return [(field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value)]


def set_part(container: Any, key: Any, item: Any) -> None:
    """Set an item of a dict or list, or a field of a dataclass, also of a frozen one."""
    if isinstance(container, (dict, list)):
        container[key] = item
    else:
        object.__setattr__(container, key, item)


def tensors_in(value: Any, enter: EnterObject | None = None) -> list[Tensor]:
    """The tensors inside ``value``, in any nesting that :func:`map_tensors` enters, in order."""
    found: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(collect, value, enter)
    return found


def cast_tensors(value: Any, dtype: torch.dtype, sources: Types = CASTABLE, enter: EnterObject | None = None) -> Any:
    """Cast the tensors in ``value`` whose dtype is in ``sources`` to ``dtype``; differentiable.

    Args:
        value: Any nesting that :func:`map_tensors` enters.
        dtype: The target.
        sources: The dtypes that are cast; everything else is left alone.
        enter: As in :func:`map_tensors`.

    Returns:
        ``value`` itself where nothing had to be cast.
    """

    def cast(tensor: Tensor) -> Tensor:
        # the comparison is cheaper than the set lookup, and most tensors have the type already
        return tensor if tensor.dtype is dtype or tensor.dtype not in sources else tensor.to(dtype)

    return map_tensors(cast, value, enter)


# between two graphs they run as they are
never_compiled_alone(globals())
