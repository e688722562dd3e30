"""Containers of tensors: walking nested ones without losing their types, and the parameters of optimizers."""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .. import graph_internals
from ..compiler_internals import constant_when_traced

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


def _noted(value: Any, result: Any, rebuilt: Rebuilt | None) -> Any:
    if rebuilt is not None:
        rebuilt[_key(value, rebuilt)] = (value, result, _held_by(result))
    return result


def _key(value: Any, known: Mapping[int, Any]) -> int:
    # a graph would be made anew for each object whose id it asks for
    return len(known) if torch.compiler.is_dynamo_compiling() else id(value)


def _held_by(container: Any) -> tuple[dict[Any, Any] | list[Any], dict[str, Any]]:
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
        return _map_in_graph(cast, value, enter) if _has_to_cast(value, dtype, sources, enter) else value
    return map_tensors(cast, value, enter)


# the attribute of a 16-bit copy with what it was made of, and its version then
_ORIGINAL = '_amp_wrapper_original'


class Copies:
    """Arguments of one call in another type. What the callee writes to them reaches the caller's objects afterwards.

    Tensors, lists, dicts and dataclasses that are given several times stay one object.

    Args:
        target: The type.
        sources: The types that are cast; everything else is left alone.
        within: In a graph, the copies of calls around this one: what is a copy of theirs is cast from the original. Elsewhere
            copies know their originals.
    """

    def __init__(
        self,
        target: torch.dtype,
        sources: frozenset[torch.dtype] = CASTABLE,
        within: Sequence[Copies] = (),
    ) -> None:
        self._target, self._sources, self._within = target, sources, within
        # by the id of a tensor, in graphs by number: itself, its copy, and by what to see whether that was written to
        self._tensors: dict[int, tuple[Tensor, Tensor, int | None]] = {}
        self._rebuilt: Rebuilt = {}

    def cast(self, value: Any) -> Any:
        """``value``, any nesting, with copies of the tensors that have to be cast; itself where there are none."""
        if torch.compiler.is_dynamo_compiling():
            needed = _has_to_cast(value, self._target, self._sources, None)
            return _map_in_graph(self._cast, value, None, self._rebuilt) if needed else value
        return map_tensors(self._cast, value, rebuilt=self._rebuilt)

    def _cast(self, tensor: Tensor) -> Tensor:
        # the comparison is cheaper than the set lookup, and most tensors have the type already
        if tensor.dtype is self._target or tensor.dtype not in self._sources:
            return tensor
        known = self._known(tensor)
        if known is None:
            exact = self._exact(tensor)
            if exact.dtype is self._target:
                known = (tensor, exact, None if torch.compiler.is_dynamo_compiling() else _version(exact))
            else:
                made = self._copy(exact)
                known = (tensor, made, _version(made))
            self._tensors[_key(tensor, self._tensors)] = known
        return known[1]

    def _copy(self, tensor: Tensor) -> Tensor:
        if torch.compiler.is_dynamo_compiling():
            return _rounded(tensor, self._target)
        if torch.is_inference_mode_enabled():
            # a tensor of inference does not count what is written to it
            with torch.inference_mode(False), torch.no_grad():
                made = _rounded(tensor, self._target)
        else:
            made = _rounded(tensor, self._target)
        if self._target in HALF_TYPES and (tensor.is_leaf or not tensor.requires_grad):
            # activations would live as long as their copies
            keep_original(made, tensor)
        return made

    def _known(self, tensor: Tensor) -> tuple[Tensor, Tensor, int | None] | None:
        if not torch.compiler.is_dynamo_compiling():
            return self._tensors.get(id(tensor))
        for known in self._tensors.values():
            if known[0] is tensor:
                return known
        return None

    def exact(self, value: Any) -> Any:
        """``value``, any nesting, with the originals of 16-bit copies that :meth:`cast` made for calls around this one."""
        return map_tensors(self._exact, value)

    def _exact(self, tensor: Tensor) -> Tensor:
        """The numbers that this one was rounded from, unless it was written to since. Gradients go through it."""
        original = self._original_tensor(tensor)
        if original is None:
            return tensor
        return _unrounded(tensor, original) if tensor.requires_grad else original

    def _original_tensor(self, tensor: Tensor) -> Tensor | None:
        if not torch.compiler.is_dynamo_compiling():
            return original_of(tensor)
        for copies in reversed(self._within):
            for original, made, before in copies._tensors.values():
                if made is tensor and not _was_written(made, before):
                    return original
        return None

    def clamped(self) -> bool:
        """Whether a tensor without a gradient had numbers beyond the range of the type. Syncs."""
        pairs = [
            (tensor, _clamped(tensor, self._target)) for tensor, _, _ in self._tensors.values() if not tensor.is_meta
        ]
        return any(bool(((fits != tensor) & (tensor == tensor)).any()) for tensor, fits in pairs if fits is not tensor)

    def write_back(self, result: Any = None) -> Any:
        """Let what was written to copies reach the originals.

        Returns:
            ``result`` with the caller's tensors in place of copies that were written to.
        """
        written = [(tensor, made) for tensor, made, before in self._tensors.values() if _was_written(made, before)]
        for tensor, made in written:
            if tensor.shape == made.shape:
                value = _unrounded(made, tensor)
            else:
                # an empty tensor that was given as ``out``
                value = made
                tensor.resize_(made.shape)
            if tensor.requires_grad and tensor.is_leaf:
                with torch.no_grad():
                    tensor.copy_(value)
            else:
                tensor.copy_(value)
            if getattr(tensor, _ORIGINAL, (None,))[0] is made:
                keep_original(tensor, made)
        for original, made, (had, attributes) in self._rebuilt.values():
            now, attributes_now = _held_by(made)
            if isinstance(now, list):
                if len(now) != len(had) or any(new is not old for new, old in zip(now, had)):
                    original[:] = [self._original(item) for item in now]
            else:
                self._update(original, had, now, _set_item, _delete_item)
            if not getattr(getattr(original, '__dataclass_params__', None), 'frozen', False):
                # what a frozen one has of its own, it caches for itself
                self._update(original, attributes, attributes_now, setattr, delattr)
        return self.originals(result, written) if written else result

    def _update(
        self, original: Any, had: Any, now: dict[Any, Any], put: Callable[..., None], remove: Callable[..., None]
    ) -> None:
        """Let what a copy holds now, and did not before, reach its original."""
        for key in had:
            if key not in now:
                remove(original, key)
        for key, item in now.items():
            if key not in had or item is not had[key]:
                put(original, key, self._original(item))

    def _original(self, value: Any) -> Any:
        """What stands behind a copy; anything else is its own."""
        for original, made, _ in (*self._rebuilt.values(), *self._tensors.values()):
            if made is value:
                return original
        return value

    def originals(self, result: Any, among: Sequence[tuple[Tensor, Tensor]] | None = None) -> Any:
        """``result`` with the caller's tensors in place of their copies."""
        pairs = [(tensor, made) for tensor, made, _ in self._tensors.values()] if among is None else among
        return map_tensors(lambda t: next((tensor for tensor, made in pairs if made is t), t), result)


# those of ``operator`` have no place in a graph
def _set_item(container: Any, key: Any, value: Any) -> None:
    container[key] = value


def _delete_item(container: Any, key: Any) -> None:
    del container[key]


def keep_original(made: Tensor, original: Tensor) -> None:
    """Note what a 16-bit tensor is a copy of."""
    setattr(made, _ORIGINAL, (original, made._version))


def original_of(value: Any) -> Tensor | None:
    """What a 16-bit tensor is a copy of; None where that is not known, or the copy was written to since."""
    original, version = getattr(value, _ORIGINAL, (None, None))
    return original if version is not None and value._version == version else None


def _rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return _clamped(tensor, dtype).to(dtype)


def _unrounded(made: Tensor, original: Tensor) -> Tensor:
    """A copy that was written to, with the numbers of the original where nothing was."""
    with torch.no_grad():
        is_same = (made == _rounded(original, made.dtype)) & original.isfinite()
        lost = torch.where(is_same, original - made, 0.0)
    # the gradient goes through the copy
    return made + lost


def _clamped(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask or the like with finite numbers within the range of a type; what has a gradient as it is."""
    limit = torch.finfo(dtype).max
    is_dense = tensor.layout is torch.strided and not tensor.is_nested
    if tensor.requires_grad or not is_dense or limit >= torch.finfo(tensor.dtype).max:
        return tensor
    return torch.where(tensor.isinf(), tensor, tensor.clamp(-limit, limit))


_mark_last_tensor = constant_when_traced(graph_internals.mark_last_tensor)
_is_marked_written = constant_when_traced(graph_internals.was_written)


def _version(tensor: Tensor) -> int | None:
    if torch.compiler.is_dynamo_compiling():
        return _mark_last_tensor()
    # inference tensors keep no count
    return None if tensor.is_inference() else tensor._version


def _was_written(made: Tensor, before: int | None) -> bool:
    if before is None:
        return False
    return _is_marked_written(before) if torch.compiler.is_dynamo_compiling() else made._version != before


def _has_to_cast(value: Any, dtype: torch.dtype, sources: frozenset[torch.dtype], enter: EnterObject | None) -> bool:
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
    return any(_has_to_cast(item, dtype, sources, enter) for item in items)


def _map_in_graph(
    function: Callable[[Tensor], Tensor], value: Any, enter: EnterObject | None, rebuilt: Rebuilt | None = None
) -> Any:
    """:func:`map_tensors`, where a graph is traced: containers are made anew without a look at what has changed in them."""
    if isinstance(value, Tensor):
        return function(value)
    if type(value) in (dict, OrderedDict):
        pairs = {key: _map_in_graph(function, item, enter, rebuilt) for key, item in value.items()}
        return _noted(value, pairs if type(value) is dict else OrderedDict(pairs), rebuilt)
    if isinstance(value, dict) and dataclasses.is_dataclass(value):
        # the outputs of transformers are dicts and dataclasses
        fields = {key: _map_in_graph(function, item, enter, rebuilt) for key, item in value.items()}
        return _noted(value, type(value)(**fields), rebuilt)
    if type(value) is list:
        return _noted(value, [_map_in_graph(function, item, enter, rebuilt) for item in value], rebuilt)
    if type(value) is tuple:
        return tuple([_map_in_graph(function, item, enter, rebuilt) for item in value])
    if isinstance(value, tuple) and hasattr(type(value), '_make'):
        return type(value)(*[_map_in_graph(function, item, enter, rebuilt) for item in value])
    return map_tensors(function, value, enter, rebuilt)
