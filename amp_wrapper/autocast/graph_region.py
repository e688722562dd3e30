"""What a region is inside of a graph that ``torch.compile`` traces: a mode of torch's functions.

Each call of a function of torch comes to the mode, and is made as the region wants it; so its casts become part of the graph.
Regions of graphs are opened and closed in :mod:`.graph`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from .. import compiler_internals
from ..compiler_internals import constant_when_traced
from ..policy.copies import Copies
from ..policy.nested import CASTABLE
from . import state
from .state import CASTS

# ops that call functions, and where these are among the arguments; the first three are activation checkpointing
_CALLS_FUNCTIONS = {
    'checkpoint': (0, 1),
    'tag_activation_checkpoint': (0, 1),
    'wrap_activation_checkpoint': (0, 1),
    'cond': (1, 3),
}


class Patched(Protocol):
    """A function of the FP32 registry, or with a rule of the user: see :mod:`amp_wrapper.autocast.patched_function`."""

    def run_in_graph(
        self,
        region: GraphRegion,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        held: int = 0,
    ) -> Any:
        """Call ``function`` as the region wants it."""


#: All functions of the FP32 registry, and those with rules; filled by :mod:`amp_wrapper.autocast.patched_function`.
patched: list[Patched] = []
#: What takes the place of a function while a region is open, in :data:`originals` by the same place.
stand_ins: list[Any] = []
originals: list[Any] = []
#: The id of a function to itself, and its place in :data:`patched`; of a stand-in its place in :data:`originals`.
places: dict[int, tuple[Any, int]] = {}
stand_in_places: dict[int, int] = {}


class GraphRegion(TorchFunctionMode):
    """What one region makes active, as a mode.

    Args:
        outer: The region around it; None where there is none.
        keys: What it makes active of the FP32 registry and of the casts of ops; None where it leaves that to ``outer``.
        device: The type of the device whose autocast it sets; None where it leaves autocast as it is.
        dtype: The type of autocast there; None to turn it off.
        caller: Of an FP32 region: the 16-bit type that the caller came with.

    Attributes:
        copies: Of an FP32 region: the arguments that were cast.
        key_sets: What is active: its own keys, and those of the regions around it.
        casts: Whether the tables of O1 and O4 act.
        operands: The type of the autocast by which operands of unlike types meet: see :mod:`.operands`.
        marks: Whether they act here, or in a region around it: calls say then which it is.
        covers: Whether it, or one around it, keeps casts of other models out.
        suspended: Whether nothing that O1 and O4 cast is cast inside.
        module: Whose call opened it; None for a block.
    """

    def __init__(
        self,
        outer: GraphRegion | None,
        keys: frozenset[str] | None,
        device: str | None = None,
        dtype: torch.dtype | None = None,
        caller: torch.dtype | None = None,
    ) -> None:
        self.outer = outer
        self.module: nn.Module | None = None
        self.caller = caller
        self.copies: Copies | None = None
        self.covers: bool = outer is not None and outer.covers
        self.suspended: bool = outer is not None and outer.suspended
        # whether ``outer`` was at the top of the stack, and waits to be put back there
        self.lifted = False
        self.key_sets: tuple[frozenset[str], ...] = () if outer is None else outer.key_sets
        self.casts: bool = outer is not None and outer.casts
        self.device: str | None = outer.device if device is None and outer is not None else device
        self.dtype: torch.dtype | None = outer.dtype if device is None and outer is not None else dtype
        # how many blocks of torch.autocast are open where its autocast begins
        self.depth: int = outer.depth if device is None and outer is not None else _autocast_depth()
        # a region around it may be open outside of the graph, where the tables act
        self.marks: bool = self.casts or (outer is not None and outer.marks)
        self.operands: torch.dtype | None = None if outer is None else outer.operands
        if keys is not None:
            self.operands = state.operands_type(keys)
            self.key_sets = (*self.key_sets, keys)
            self.casts = CASTS in keys and not self.suspended
            self.marks = self.marks or self.casts

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        if not torch.compiler.is_dynamo_compiling():
            # the regions of the thread do their work by themselves
            return func(*args, **kwargs)
        stand_in = _stand_in(func)
        if stand_in >= 0:
            # methods of tensors are looked up in their class, which is patched outside of graphs
            func = originals[stand_in]
        place = _place(func)
        if place < 0:
            return self.run(func, args, kwargs)
        return patched[place].run_in_graph(self, func, args, kwargs)

    # between two graphs it only hands calls on
    compiler_internals.never_compiled(__torch_function__)

    def has(self, key: str) -> bool:
        """Whether an entry of the FP32 registry is active."""
        return any(key in keys for keys in self.key_sets)

    def autocast_type(self, device: str) -> torch.dtype | None:
        """The type of autocast on a device; None where it is off."""
        return self.dtype if self.device == device and self.sets_autocast() else state.autocast_type(device)

    def sets_autocast(self) -> bool:
        """Whether the region says what autocast is, and no block of torch.autocast that was opened inside of it."""
        return self.device is not None and _autocast_depth() == self.depth

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function`` inside of the region, which is not on the stack while one of its calls is made."""

        def inside(*args: Any, **kwargs: Any) -> Any:
            compiler_internals.push_function_mode(self)
            result = function(*args, **kwargs)
            compiler_internals.pop_function_mode()
            return result

        return inside

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function of torch with the autocast of the region, and with its tables."""
        called = _functions_among(function)
        if called is not None and len(args) >= called[1]:
            # what is called is traced by itself; the stack changes before, or the change would count as an effect of it
            compiler_internals.push_function_mode(self)
            compiler_internals.pop_function_mode()
            first, end = called
            return function(*args[:first], *[self.around(each) for each in args[first:end]], *args[end:], **kwargs)
        if self.marks:
            torch.ops.amp_wrapper_graph.casts(self.casts)
        if self.operands is not None and _are_unlike(args, kwargs):
            with torch.autocast(state.SPARE, dtype=self.operands):
                result = self._call(function, args, kwargs)
        else:
            result = self._call(function, args, kwargs)
        if self.marks:
            torch.ops.amp_wrapper_graph.casts(None)
        return result

    def _call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.device is None or not self.sets_autocast():
            return function(*args, **kwargs)
        # the cache of cast weights ends with each call: the compiler finds casts that are made twice
        with torch.autocast(self.device, dtype=self.dtype, enabled=self.dtype is not None):
            return function(*args, **kwargs)


def _are_unlike(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether tensors of two floating types are among the arguments of a call."""
    types = []
    for value in (*args, *kwargs.values()):
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, torch.Tensor) and item.dtype in CASTABLE and item.dtype not in types:
                types.append(item.dtype)
    return len(types) > 1


@constant_when_traced
def _autocast_depth() -> int:
    depth = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return depth


@constant_when_traced
def _functions_among(function: Any) -> tuple[int, int] | None:
    name = 'checkpoint' if function is checkpoint.checkpoint else getattr(function, '__name__', '')
    return _CALLS_FUNCTIONS.get(name)


@constant_when_traced
def _stand_in(function: Any) -> int:
    return stand_in_places.get(id(function), -1)


def note_stand_in(function: Any, original: Any) -> None:
    """A function takes the place of another from time to time."""
    stand_in_places[id(function)] = len(originals)
    stand_ins.append(function)
    originals.append(original)


@constant_when_traced
def _place(function: Any) -> int:
    known = places.get(id(function))
    return -1 if known is None else known[1]


def innermost() -> GraphRegion | None:
    """The region that is open where a graph is traced."""
    for place in range(compiler_internals.function_modes() - 1, -1, -1):
        mode = compiler_internals.function_mode_at(place)
        if isinstance(mode, GraphRegion):
            return mode
    return None


def autocast_type(region: GraphRegion | None, device: str) -> torch.dtype | None:
    """The type of autocast on a device where a graph is traced, inside of a region or of none; None where it is off."""
    return state.autocast_type(device) if region is None else region.autocast_type(device)
