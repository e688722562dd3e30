"""Containers of tensors: walking nested ones without losing their types, and the parameters of optimizers."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..compiler_internals import never_compiled_alone

#: The floating types that mixed precision moves between. float64 and complex tensors are always left alone.
CASTABLE = frozenset({torch.float32, torch.float16, torch.bfloat16})
#: The 16-bit floating types.
HALF_TYPES = frozenset({torch.float16, torch.bfloat16})

# what holds no tensors, and comes often
_PLAIN = (bool, int, float, str, torch.dtype, torch.device)
# containers that hold nothing but their items
_ITEMS_ALONE = (list, dict, OrderedDict)


def parameters_of(*optimizers: Optimizer) -> list[nn.Parameter]:
    """What optimizers step, in the order of their groups."""
    return parameters_in(chain.from_iterable(optimizer.param_groups for optimizer in optimizers))


def parameters_in(groups: Iterable[Mapping[str, Any]]) -> list[Any]:
    """The parameters of all groups, in their order."""
    return list(chain.from_iterable(group['params'] for group in groups))


#: Maps tensors inside an object of a kind that only an integration knows: (function, object) to object.
EnterObject = Callable[[Callable[[Tensor], Tensor], Any], Any]


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


def map_tensors(
    function: Callable[[Tensor], Tensor], value: Any, enter: EnterObject | None = None, rebuilt: Memo | None = None
) -> Any:
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


def _mapped(function: Callable[[Tensor], Tensor], value: Any, enter: EnterObject | None, rebuilt: Memo | None) -> Any:
    """What becomes of ``value``; None where it stays. torch.compile does not compare containers by identity."""
    if isinstance(value, Tensor):
        tensor = function(value)
        return None if tensor is value else tensor
    if value is None or isinstance(value, _PLAIN):
        return None
    parts: Iterable[tuple[Any, Any]]
    if isinstance(value, dict):
        parts = value.items()
    elif isinstance(value, (list, tuple)):
        parts = enumerate(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = _fields(value).items()
    else:
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
        if isinstance(made, (dict, list)):
            made[key] = item
        else:
            # also of a frozen dataclass; the copy is ours alone
            object.__setattr__(made, key, item)
    if rebuilt is not None:
        rebuilt.add(value, made, (items_of(made), attributes_of(made)))
    return made


def _fields(value: Any) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else []
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def items_of(container: Any) -> dict[Any, Any] | list[Any]:
    """What a list or dict holds now, in one of its own; nothing of anything else."""
    return list(container) if isinstance(container, list) else dict(container) if isinstance(container, dict) else {}


def attributes_of(container: Any) -> dict[str, Any]:
    """The fields of a dataclass and the attributes of any other container, as they are now."""
    return {} if type(container) in _ITEMS_ALONE else {**_fields(container), **getattr(container, '__dict__', {})}


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors inside ``value``, in any nesting that :func:`map_tensors` enters, in order."""
    found: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(collect, value)
    return found


def cast_tensors(
    value: Any, dtype: torch.dtype, sources: frozenset[torch.dtype] = CASTABLE, enter: EnterObject | None = None
) -> Any:
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
