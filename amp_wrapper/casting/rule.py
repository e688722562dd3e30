"""What a call of a module does, as data."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from ..policy.copies import Copies
from ..policy.fp32_registry import Fp32Op
from ..policy.nested import CASTABLE, EnterObject
from . import region


@dataclasses.dataclass(frozen=True)
class Rule:
    """What a call of a module does. By default, nothing.

    Attributes:
        inputs: Floating arguments become this type; None leaves them.
        sources: The types that are cast.
        kept: Arguments that stay as they were before a module around this one cast them: their names, and their places in
            ``args``; -1 for those that are given by name alone.
        outputs: Floating outputs become this type; None leaves them.
        gives_back: Whether FP32 outputs go back to the 16-bit type that the caller came with, if it did.
        only_eval: Whether a module in training mode leaves them.
        clamps: Whether finite outputs beyond the range of the type become its largest.
        enter: Casts tensors inside outputs of a framework's own kind.
        opens: What the region of a call lets act, such as :data:`.region.TABLES`.
        entry: The same, of a method in :data:`ENTRY_METHODS` that is called outside of any region.
        outermost: Whether a call does anything only where no region is open.
        sets_autocast: Whether a call decides about autocast.
        autocast: Its type; None for off.
        warning: Given where the first argument is 16-bit.
        is_model: Whether the module is a whole model: says whether its calls may warn, and explains errors about types.
        level: The opt level of the model.
        speaks: Whether calls of the model may warn.
        fp32_ops: Of a whole model: what its configuration names.
        casts: Whether the weights of the model are 16-bit.
        is_idle: Whether a call does nothing but what the module does.
    """

    inputs: torch.dtype | None = None
    sources: frozenset[torch.dtype] = CASTABLE
    kept: tuple[tuple[str, int], ...] = ()
    outputs: torch.dtype | None = None
    gives_back: bool = False
    only_eval: bool = False
    clamps: bool = False
    enter: EnterObject | None = None
    opens: str = region.AS_AROUND
    entry: str = region.AS_AROUND
    outermost: bool = False
    sets_autocast: bool = False
    autocast: torch.dtype | None = None
    warning: str = ''
    is_model: bool = False
    level: str = ''
    speaks: bool = False
    fp32_ops: tuple[Fp32Op, ...] = ()
    casts: bool = False
    is_idle: bool = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        acts = self.inputs or self.outputs or self.kept or self.opens or self.sets_autocast
        object.__setattr__(self, 'is_idle', not acts)

    def copies(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Copies | None:
        """What casts the arguments of a call; None where none of them has to be cast."""
        if self.inputs is None and not self.kept:
            return None
        dtype = self.inputs
        # the usual case, tensors of the right type and a few flags, must cost next to nothing
        for value in (*args, *kwargs.values()) if kwargs else args:
            if isinstance(value, Tensor) and value.dtype is dtype:
                continue
            if value is not None and not isinstance(value, (bool, int, float, str)):
                within = tuple(traced) if torch.compiler.is_dynamo_compiling() else ()
                return Copies(dtype or torch.float32, self.sources if dtype else frozenset(), within)
        return None

    def cast(self, copies: Copies, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments of a call as its module gets them."""
        if not self.kept:
            return copies.cast(args), copies.cast(kwargs)
        kept = dict(self.kept)
        places = list(kept.values())
        return (
            tuple([copies.exact(v) if place in places else copies.cast(v) for place, v in enumerate(args)]),
            {name: copies.exact(value) if name in kept else copies.cast(value) for name, value in kwargs.items()},
        )


#: Of the calls that are becoming part of a graph, the outermost first: what has cast their arguments.
traced: list[Copies] = []
