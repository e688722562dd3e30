"""What a call of a module does, as data, and what ties a module to the model that it is attached with."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from ..compiler_internals import never_compiled_alone
from ..policy.levels import LEVEL_TABLE, Policy
from ..policy.nested import CASTABLE, EnterObject
from . import region
from .copies import Copies


@dataclasses.dataclass(frozen=True)
class Rule:
    """What a call of a module does. By default, nothing.

    Attributes:
        policy: The configuration that the module is cast by.
        casts: Whether weights are 16-bit, or may have FP32 values beside them.
        entry: What the region of a method in :data:`ENTRY_METHODS` lets act that is called outside of any region.
        inputs: Floating arguments become this type; None leaves them.
        sources: The types that are cast.
        kept: Arguments that stay as they were before a module around this one cast them: their names, and their places in
            ``args``; -1 for those that are given by name alone.
        outputs: Floating outputs become this type; None leaves them.
        gives_back: Whether FP32 outputs go back to the 16-bit type that the caller came with, if it did.
        only_eval: Whether a module in training mode leaves them.
        clamps: Whether finite outputs below the range of the type become its lowest.
        enter: Casts tensors inside outputs of a framework's own kind.
        opens: What the region of a call lets act, such as :data:`.region.TABLES`.
        outermost: Whether a call does anything only where no region is open.
        sets_autocast: Whether a call decides about autocast.
        autocast: Its type; None for off.
        warning: Given where the first argument is 16-bit.
        is_model: Whether the module is a whole model: says whether its calls may warn, and explains errors about types.
    """

    policy: Policy = LEVEL_TABLE['O0']
    casts: bool = False
    entry: str = region.AS_AROUND
    inputs: torch.dtype | None = None
    sources: frozenset[torch.dtype] = CASTABLE
    kept: tuple[tuple[str, int], ...] = ()
    outputs: torch.dtype | None = None
    gives_back: bool = False
    only_eval: bool = False
    clamps: bool = False
    enter: EnterObject | None = None
    opens: str = region.AS_AROUND
    outermost: bool = False
    sets_autocast: bool = False
    autocast: torch.dtype | None = None
    warning: str = ''
    is_model: bool = False

    def copies(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Copies | None:
        """What casts the arguments of a call; None where none of them has to be cast."""
        if self.inputs is None and not self.kept:
            return None
        dtype = self.inputs
        # the usual case, tensors of the right type and a few flags, must cost next to nothing
        for value in (*args, *kwargs.values()) if kwargs else args:
            has_type = isinstance(value, Tensor) and value.dtype is dtype
            if not has_type and value is not None and not isinstance(value, (bool, int, float, str)):
                within = tuple(traced) if torch.compiler.is_dynamo_compiling() else ()
                return Copies(dtype or torch.float32, self.sources if dtype else frozenset(), within)
        return None

    def cast(self, copies: Copies, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments of a call as its module gets them."""
        if not self.kept:
            # a call has its kwargs for itself, so nothing of them is written back
            return copies.cast(args), {name: copies.cast(value) for name, value in kwargs.items()}
        kept = dict(self.kept)
        places = list(kept.values())
        return (
            tuple([copies.exact(v) if place in places else copies.cast(v) for place, v in enumerate(args)]),
            {name: copies.exact(value) if name in kept else copies.cast(value) for name, value in kwargs.items()},
        )


@dataclasses.dataclass(eq=False)
class Link:
    """Ties a module to those who attached it, and who watch it. A copy of the module has a new one.

    Attributes:
        is_attached: Whether the module belongs to an attached model, whose types the level decides.
        trains: Whether it is trained with 16-bit weights: deep copies are FP32 then.
        listener: Is told, for the whole model, of calls from outside of any region (``before_call()``), and of loading
            (``before_load()``, ``after_load()`` of buffers); its ``synchronise()`` lets weights and masters agree.
        watchers: Those of :class:`.cast_module.Watcher`.
    """

    is_attached: bool = False
    trains: bool = False
    listener: Any = None
    watchers: tuple[Any, ...] = ()

    def __reduce__(self) -> tuple[type[Link], tuple[()]]:
        return Link, ()


def rule_of(module: nn.Module) -> Rule | None:
    """The rule of a module; None where it is not cast."""
    return getattr(module, '_amp_wrapper_rule', None)


#: Of the calls that are becoming part of a graph, the outermost first: what has cast their arguments.
traced: list[Copies] = []


# between two graphs they run as they are
never_compiled_alone(globals())
