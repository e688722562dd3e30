"""Forward hooks that cast: the inputs and outputs of modules, and weights that other hooks compute.

All hooks of this package are plain objects that know a dtype and nothing of the model, so they survive ``copy.deepcopy``,
``pickle``, ``torch.save(model)`` and replication.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, Protocol
from weakref import ReferenceType

import torch
from torch import Tensor, nn
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from .. import torch_internals
from ..autocast import state
from ..autocast.call import warn_of_loss
from ..compiler_internals import constant_when_traced, never_compiled, traced_as, untraced
from ..errors import ScriptingError
from ..policy import said_once
from ..policy.copies import Copies
from ..policy.nested import CASTABLE, EnterObject, cast_tensors
from ..torch_internals import forward_pre_hooks
from . import fp32_values
from .modules import class_name

#: The calls under way whose arguments were cast, the innermost last: the module, and the copies; None where there are none.
CastCalls = list[tuple[nn.Module, 'Copies | None']]


class _Unscriptable:
    """torch.jit.script begins with the names of a module's hooks, and nobody else needs one."""

    @property
    def __name__(self) -> str:
        # an AttributeError as well, so that hasattr() is False
        raise ScriptingError(
            'torch.jit.script cannot compile the casts of a model that mixed precision is attached to. Write '
            'torch.jit.trace(model, example), which records them, or load model.state_dict() into a new FP32 model and script '
            'that one.'
        )


@untraced
def _synchronise(module: nn.Module) -> None:
    fp32_values.agree(module.parameters())


#: The calls that are becoming part of a graph.
_traced_calls: CastCalls = []


def _copies(dtype: torch.dtype, calls: CastCalls) -> Copies:
    within = [around for _, around in calls if around is not None] if torch.compiler.is_dynamo_compiling() else ()
    return Copies(dtype, within=within)


def _cast_in_graph(hook: CastInputs, module: nn.Module, calls: CastCalls, args: Any, kwargs: Any) -> Any:
    """Cast the arguments of a call of ``module``, and note it for :class:`WriteBack`."""
    warn_of_loss(module, args, kwargs)
    copies = _copies(hook.dtype, calls)
    calls.append((module, copies))
    if not hook.kept:
        return copies.cast(args), copies.cast(kwargs)
    places = list(hook.kept.values())
    return (
        tuple([value if place in places else copies.cast(value) for place, value in enumerate(args)]),
        {name: value if name in hook.kept else copies.cast(value) for name, value in kwargs.items()},
    )


def _has_values() -> bool:
    """Whether numbers of tensors can be read: not where a call is recorded or transformed."""
    return not (torch.compiler.is_compiling() or torch_internals.in_function_transform(or_mode=True))


@untraced
def _cast(hook: CastInputs, module: nn.Module, calls: CastCalls, args: Any, kwargs: Any) -> Any:
    # between two graphs, casts are not worth one of their own
    state.thread.is_casting = True
    try:
        result = _cast_in_graph(hook, module, calls, args, kwargs)
        copies = calls[-1][1]
        if hook.checks_range and copies is not None and _has_values():
            hook.checks_range = False
            if copies.clamped():
                said_once.warn_clamped(class_name(module), None, hook.dtype)
    finally:
        state.thread.is_casting = False
    return None if result[0] is args and result[1] is kwargs else result


class AmpHook(_Unscriptable):
    """Marks the hooks of this package, so that they can be found and taken off."""

    #: Whether a deep copy of the module goes without this hook, since its weights are FP32.
    stays_behind = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if self.stays_behind:
            return StayedBehind()
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def __getstate__(self) -> dict[str, Any]:
        # an unpickled model belongs to no optimizer: its deep copies keep its types
        return {name: value for name, value in self.__dict__.items() if name != 'stays_behind'}


class StayedBehind(_Unscriptable):
    """Takes the place of a hook in a deep copy of a module, and does nothing."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        return None


class Follower(Protocol):
    """Lets the weights of a model follow their masters: :class:`amp_wrapper.engine.forward_entry.FollowMasters`."""

    def is_traced(self) -> bool:
        """A call is becoming part of a graph."""


class CastInputs(AmpHook):
    """Forward pre-hook: floating inputs become ``dtype``, inside any nesting.

    Args:
        dtype: The type the module computes in.
        kept: The arguments that stay as they are: their names, and their places in ``args``.
        speaks: Whether the first call warns of numbers beyond the range of ``dtype``. Syncs then.
    """

    #: Whether the module is a whole model.
    is_model = False
    #: Whether the module has weights with masters: they follow these where somebody calls the module directly.
    follows_masters = False
    #: The hook of the model that lets them follow before a graph, where a call of the module becomes part of one.
    follower: ReferenceType[Follower] | None = None

    def __init__(self, dtype: torch.dtype, kept: Mapping[str, int] | None = None, speaks: bool = False) -> None:
        self.dtype = dtype
        self.kept = dict(kept or {})
        # whether the next call looks for numbers beyond the range; it reads the device
        self.checks_range = speaks

    def put(self, module: nn.Module, is_model: bool = False) -> None:
        """Register the hook, and the one behind the forward that writes back.

        Args:
            module: What to register them on.
            is_model: Whether it is a whole model. Only there the second one is called after an exception, too, and does what
                those inside have left: for others, torch.compile would make a graph for each layer.
        """
        self.is_model = is_model
        module.register_forward_pre_hook(self, with_kwargs=True)
        module.register_forward_hook(WriteBack(), always_call=is_model)

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        is_traced = torch.compiler.is_dynamo_compiling()
        if is_traced:
            if self.follows_masters:
                self.is_traced()
        elif self.follows_masters:
            regions = state.thread.regions
            if not regions or not regions[-1].depth:
                # with those below, which some modules use without calling them
                _synchronise(module)
        dtype = self.dtype
        calls = _traced_calls if is_traced else state.thread.cast_calls
        # the usual case, tensors of the right type and a few flags, must cost next to nothing
        for values in (args, kwargs.values()) if kwargs else (args,):
            for value in values:
                if value is None or (isinstance(value, Tensor) and value.dtype is dtype):
                    continue
                if not isinstance(value, (bool, int, float, str)):
                    break
            else:
                continue
            break
        else:
            if self.is_model or (calls and calls[-1][0] is module):
                # a module may call itself: so that each call finds its own copies
                calls.append((module, None))
            return None
        return (_cast_in_graph if is_traced else _cast)(self, module, calls, args, kwargs)

    never_compiled(__call__)

    @constant_when_traced
    def is_traced(self) -> bool:
        """The call is becoming part of a graph."""
        follower = None if self.follower is None else self.follower()
        if follower is not None:
            follower.is_traced()
        return True

    def __getstate__(self) -> dict[str, Any]:
        # it belongs to the masters of this process
        return {name: value for name, value in super().__getstate__().items() if name != 'follower'}


class ExactInputs(AmpHook):
    """Forward pre-hook: arguments that ``keep_inputs`` names are given as they were before a module around this one cast them.

    Args:
        kept: Their names, and their places in ``args``.
    """

    def __init__(self, kept: Mapping[str, int]) -> None:
        self.kept = dict(kept)

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        is_traced = torch.compiler.is_dynamo_compiling()
        exact = _copies(torch.float32, _traced_calls if is_traced else state.thread.cast_calls).exact
        places = list(self.kept.values())
        return (
            tuple([exact(value) if place in places else value for place, value in enumerate(args)]),
            {name: exact(value) if name in self.kept else value for name, value in kwargs.items()},
        )

    never_compiled(__call__, with_callees=True)


class WriteBack(AmpHook):
    """Forward hook: what the module wrote to copies of its arguments reaches the caller's."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        calls = _traced_calls if torch.compiler.is_dynamo_compiling() else state.thread.cast_calls
        is_open = any(owner is module for owner, _ in calls)
        while is_open:
            # an exception has left those of modules inside
            owner, copies = calls.pop()
            if copies is not None:
                copies.write_back()
            is_open = owner is not module

    never_compiled(__call__, with_callees=True)


class Fp32Inputs(CastInputs):
    """:class:`CastInputs` of a model whose weights stay what they are (O0), which another wrapper may take off."""


class CastOutputs(AmpHook):
    """Forward hook: floating outputs become ``dtype``, inside any nesting.

    Args:
        dtype: The type of the outputs.
        enter: Casts what is inside objects that :func:`~amp_wrapper.policy.nested.map_tensors` does not know; a function of a
            module, so that it can be pickled.
        only_eval: Whether a module in training mode gives its outputs as they are.
    """

    def __init__(self, dtype: torch.dtype, enter: EnterObject | None = None, only_eval: bool = False) -> None:
        self.dtype = dtype
        self.enter = enter
        self.only_eval = only_eval

    def in_graph(self, module: nn.Module, args: Any, output: Any) -> Any:
        """As a call of the hook, where torch.compile traces it."""
        return None if self.only_eval and module.training else self.cast(output)

    @traced_as(in_graph)
    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self.only_eval and module.training:
            return None
        result = self.cast(output)
        return None if result is output else result

    def cast(self, value: Any) -> Any:
        """``value`` with floating tensors in the type of the outputs."""
        return cast_tensors(value, self.dtype, enter=self.enter)


class TableOutputs(CastOutputs):
    """:class:`CastOutputs` of a module whose buffers stay FP32: numbers beyond the range of ``dtype`` become its largest."""

    def cast(self, value: Any) -> Any:
        """``value`` with floating tensors in the type of the outputs."""
        return Copies(self.dtype).cast(value)


# -- weights that are computed anew before each forward ----------------------------------------------------------------


def computed_weights(module: nn.Module) -> list[str]:
    """The attributes of ``module`` that ``torch.nn.utils.weight_norm`` and ``spectral_norm`` compute, by a hook of the module.

    What they are computed from stays in FP32, and so does the computation. Weights that :mod:`torch.nn.utils.parametrize`
    computes belong to a module of their own, which the FP32 registry names.
    """
    return [hook.name for hook in forward_pre_hooks(module).values() if isinstance(hook, (WeightNorm, SpectralNorm))]


def computed_from(module: nn.Module) -> Iterator[Tensor]:
    """The parameters and buffers that :func:`computed_weights` are computed from."""
    for hook in forward_pre_hooks(module).values():
        if isinstance(hook, (WeightNorm, SpectralNorm)):
            for ending in ('_g', '_v') if isinstance(hook, WeightNorm) else ('_orig', '_u', '_v'):
                yield getattr(module, hook.name + ending)


class CastComputed(AmpHook):
    """Forward pre-hook behind those of torch: what they computed becomes ``dtype``; differentiable.

    Args:
        names: The attributes.
        dtype: The type that the module computes in.
    """

    def __init__(self, names: list[str], dtype: torch.dtype) -> None:
        self.names = names
        self.dtype = dtype

    def cast(self, module: nn.Module, args: Any) -> None:
        """Cast the attributes."""
        for name in self.names:
            value = getattr(module, name, None)
            # a parameter again, once the normalisation is removed
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and value.dtype in CASTABLE:
                setattr(module, name, value.to(self.dtype))

    __call__ = traced_as(cast)(cast)
