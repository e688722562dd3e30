"""Containers of tensors: walking nested ones without losing their types, and the parameters of optimizers."""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

#: The floating types that mixed precision moves between. float64 and complex tensors are always left alone.
CASTABLE = frozenset({torch.float32, torch.float16, torch.bfloat16})
#: The 16-bit floating types.
HALF_TYPES = frozenset({torch.float16, torch.bfloat16})

# what holds no tensors, and comes often
_PLAIN = (bool, int, float, str, torch.dtype, torch.device)
_GROUPS = operator.attrgetter('param_groups')
_PARAMS = operator.itemgetter('params')


def is_frozen_16bit(parameter: Tensor) -> bool:
    """Whether a parameter is 16-bit and not trained: nothing is added to it, so it needs no FP32 value beside it."""
    return parameter.dtype in HALF_TYPES and not parameter.requires_grad


def parameters_of(*optimizers: Optimizer) -> list[nn.Parameter]:
    """What optimizers step, in the order of their groups."""
    return parameters_in(chain.from_iterable(map(_GROUPS, optimizers)))


def parameters_in(groups: Iterable[Mapping[str, Any]]) -> list[Any]:
    """The parameters of all groups, in their order. Several times in a step, so without a loop in Python."""
    return list(chain.from_iterable(map(_PARAMS, groups)))


#: Maps tensors inside an object of a kind that only an integration knows: (function, object) to object.
EnterObject = Callable[[Callable[[Tensor], Tensor], Any], Any]


#: Lists, dicts and dataclasses that were rebuilt, by the id of the original, in graphs by number: the original, what was made
#: of it, and what that held then.
Rebuilt = dict[int, tuple[Any, Any, Any]]


def map_tensors(
    function: Callable[[Tensor], Tensor], value: Any, enter: EnterObject | None = None, rebuilt: Rebuilt | None = None
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
    if isinstance(value, Tensor):
        return function(value)
    if value is None or isinstance(value, _PLAIN):
        return value
    if rebuilt and id(value) in rebuilt:
        return rebuilt[id(value)][1]
    if isinstance(value, dict):
        changed = _changed(function, value, enter, rebuilt)
        if not changed:
            return value
        result = dict(value) if type(value) is dict else copy.copy(value)
        for key, item in changed.items():
            result[key] = item
        return _noted(value, result, rebuilt)
    if isinstance(value, (list, tuple)):
        items = [map_tensors(function, item, enter, rebuilt) for item in value]
        if all(new is old for new, old in zip(items, value)):
            return value
        if isinstance(value, list):
            sequence = items if type(value) is list else copy.copy(value)
            sequence[:] = items
            return _noted(value, sequence, rebuilt)
        make = getattr(type(value), '_make', type(value))
        return make(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = (field.name for field in dataclasses.fields(value))
        fields = {name: getattr(value, name) for name in names if hasattr(value, name)}
        changed = _changed(function, fields, enter, rebuilt)
        if not changed:
            return value
        duplicate: Any = copy.copy(value)
        for name, item in changed.items():
            # object.__setattr__ also reaches the fields of a frozen dataclass; the copy is ours alone
            object.__setattr__(duplicate, name, item)
        return _noted(value, duplicate, rebuilt)
    return value if enter is None else enter(function, value)


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors inside ``value``, in any nesting that :func:`map_tensors` enters, in order."""
    found: list[Tensor] = []
    _collect(value, found)
    return found


def _collect(value: Any, found: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            _collect(item, found)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            _collect(getattr(value, field.name, None), found)


def _noted(value: Any, result: Any, rebuilt: Rebuilt | None) -> Any:
    if rebuilt is not None:
        rebuilt[key_in(rebuilt, value)] = (value, result, held_by(result))
    return result


def key_in(known: Mapping[int, Any], value: Any) -> int:
    """What an object that is not known yet stands under."""
    # a graph would be made anew for each object whose id it asks for
    return len(known) if torch.compiler.is_dynamo_compiling() else id(value)


def held_by(container: Any) -> tuple[dict[Any, Any] | list[Any], dict[str, Any]]:
    """What a list, dict or dataclass holds now, in a container of its own, and its attributes."""
    items: dict[Any, Any] | list[Any] = {}
    if isinstance(container, (dict, list)):
        items = dict(container) if isinstance(container, dict) else list(container)
        if type(container) in (dict, list):
            return items, {}
    fields = dataclasses.fields(container) if dataclasses.is_dataclass(container) else ()
    names = [*(field.name for field in fields), *getattr(container, '__dict__', ())]
    return items, {name: getattr(container, name) for name in names if hasattr(container, name)}


def _changed(
    function: Callable[[Tensor], Tensor],
    items: Mapping[Any, Any],
    enter: EnterObject | None,
    rebuilt: Rebuilt | None = None,
) -> dict[Any, Any]:
    # torch.compile cannot trace a comprehension that binds a name
    changed = {}
    for key, item in items.items():
        new = map_tensors(function, item, enter, rebuilt)
        if new is not item:
            changed[key] = new
    return changed


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

    if torch.compiler.is_dynamo_compiling():
        return map_in_graph(cast, value, enter) if has_to_cast(value, dtype, sources, enter) else value
    return map_tensors(cast, value, enter)


def has_to_cast(value: Any, dtype: torch.dtype, sources: frozenset[torch.dtype], enter: EnterObject | None) -> bool:
    """Whether :func:`cast_tensors` would make a new object. torch.compile does not compare containers by identity."""
    if isinstance(value, Tensor):
        return value.dtype is not dtype and value.dtype in sources
    if value is None or isinstance(value, _PLAIN):
        return False
    if isinstance(value, dict):
        items = list(value.values())
    elif isinstance(value, (list, tuple)):
        items = list(value)
    else:
        # whatever has fields is known to the function that builds it anew
        return enter is not None or (dataclasses.is_dataclass(value) and not isinstance(value, type))
    return any(has_to_cast(item, dtype, sources, enter) for item in items)


def map_in_graph(
    function: Callable[[Tensor], Tensor], value: Any, enter: EnterObject | None, rebuilt: Rebuilt | None = None
) -> Any:
    """:func:`map_tensors`, where a graph is traced: containers are made anew without a look at what has changed in them."""
    if isinstance(value, Tensor):
        return function(value)
    if type(value) in (dict, OrderedDict):
        pairs = {key: map_in_graph(function, item, enter, rebuilt) for key, item in value.items()}
        return _noted(value, pairs if type(value) is dict else OrderedDict(pairs), rebuilt)
    if isinstance(value, dict) and dataclasses.is_dataclass(value):
        # the outputs of transformers are dicts and dataclasses
        fields = {key: map_in_graph(function, item, enter, rebuilt) for key, item in value.items()}
        return _noted(value, type(value)(**fields), rebuilt)
    if type(value) is list:
        return _noted(value, [map_in_graph(function, item, enter, rebuilt) for item in value], rebuilt)
    if type(value) is tuple:
        return tuple([map_in_graph(function, item, enter, rebuilt) for item in value])
    if isinstance(value, tuple) and hasattr(type(value), '_make'):
        return type(value)(*[map_in_graph(function, item, enter, rebuilt) for item in value])
    return map_tensors(function, value, enter, rebuilt)
