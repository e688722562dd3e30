"""Forward hooks: casts at the doors of modules, FP32 regions, and the beginning and end of a model's forward pass.

All of them are plain objects that know a dtype and nothing of the model, so they survive ``copy.deepcopy``, ``pickle``,
``torch.save(model)`` and replication.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.loss import _Loss

from . import fp32_ops
from .errors import AmpAttachError
from .fp32_call import autocast_is_on
from .nested import HALF_TYPES, EnterObject, cast_tensors, map_tensors

_Hook = TypeVar('_Hook', bound=Callable[..., Any])


# Hooks that open and close regions are not traced: torch.compile breaks its graph there, and what it compiles in between
# sees autocast and the stand-ins of the FP32 registry as they are.
untraced: Callable[[_Hook], _Hook] = torch.compiler.disable


class AmpHook:
    """Marks the hooks of this package, so that they can be found and taken off."""


class CastInputs(AmpHook):
    """Forward pre-hook: floating inputs become ``dtype``, inside any nesting.

    Args:
        dtype: The type the module computes in.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        dtype = self.dtype
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
            return None
        new_args, new_kwargs = cast_tensors(args, dtype), cast_tensors(kwargs, dtype)
        return None if new_args is args and new_kwargs is kwargs else (new_args, new_kwargs)


class CastOutputs(AmpHook):
    """Forward hook: floating outputs become ``dtype``, inside any nesting.

    Args:
        dtype: The type of the outputs.
        enter: Casts what is inside objects that :func:`~amp_wrapper.nested.map_tensors` does not know; a function of a
            module, so that it can be pickled.
        only_eval: Whether a module in training mode gives its outputs as they are.
    """

    def __init__(self, dtype: torch.dtype, enter: EnterObject | None = None, only_eval: bool = False) -> None:
        self.dtype = dtype
        self.enter = enter
        self.only_eval = only_eval

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self.only_eval and module.training:
            return None
        result = cast_tensors(output, self.dtype, enter=self.enter)
        return None if result is output else result


class EnterForward(AmpHook):
    """Forward pre-hook of a model: from here on, the members of the FP32 registry run in FP32.

    Args:
        ops: Which ones.
    """

    def __init__(self, ops: fp32_ops.OpSet) -> None:
        self.ops = ops

    @untraced
    def __call__(self, module: nn.Module, args: Any) -> None:
        fp32_ops.enter(self.ops, id(module))


class LeaveForward(AmpHook):
    """Forward hook of a model, called after exceptions too: the counterpart of :class:`EnterForward`."""

    @untraced
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        fp32_ops.leave(id(module))


class _AutocastStack(threading.local):
    """The autocast contexts that hooks opened on this thread; here, so that the hooks themselves hold no state."""

    def __init__(self) -> None:
        self.contexts: list[AbstractContextManager[Any]] = []


_autocasts = _AutocastStack()


class EnterAutocast(AmpHook):
    """Forward pre-hook: :class:`torch.autocast` around every forward of a model.

    Args:
        dtype: The 16-bit type.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, module: nn.Module, args: Any) -> None:
        context = autocast_context(module_device(module).type, self.dtype)
        context.__enter__()
        _autocasts.contexts.append(context)


class LeaveAutocast(AmpHook):
    """Forward hook, called after exceptions too: the counterpart of :class:`EnterAutocast`."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if _autocasts.contexts:
            _autocasts.contexts.pop().__exit__(None, None, None)


class _Region:
    """One FP32 region that is open on this thread."""

    def __init__(self, module: nn.Module) -> None:
        self.module_id = id(module)
        self.contexts = ExitStack()
        self.caller: torch.dtype | None = None


class _Regions(threading.local):
    def __init__(self) -> None:
        self.open: list[_Region] = []


_regions = _Regions()


class EnterFp32(AmpHook):
    """Forward pre-hook of a module that runs in FP32 inside autocast: inputs are cast up, and autocast is off."""

    @untraced
    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        region = _Region(module)
        devices: set[str] = set()

        def look(tensor: Tensor) -> Tensor:
            devices.add(tensor.device.type)
            if region.caller is None and tensor.dtype in HALF_TYPES:
                region.caller = tensor.dtype
            return tensor

        map_tensors(look, (args, kwargs))
        for device in devices or {module_device(module).type}:
            if autocast_is_on(device):
                region.contexts.enter_context(torch.autocast(device, enabled=False))
        _regions.open.append(region)
        if region.caller is None:
            return None
        return cast_tensors(args, torch.float32, HALF_TYPES), cast_tensors(kwargs, torch.float32, HALF_TYPES)


class LeaveFp32(AmpHook):
    """Forward hook, called after exceptions too: the counterpart of :class:`EnterFp32`.

    Args:
        gives_back: Whether floating outputs return to the 16-bit type that the caller came with, if it did.
    """

    def __init__(self, gives_back: bool) -> None:
        self.gives_back = gives_back

    @untraced
    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        # a pre-hook that failed before ours leaves nothing of this module open
        if not _regions.open or _regions.open[-1].module_id != id(module):
            return None
        region = _regions.open.pop()
        region.contexts.close()
        if not self.gives_back or region.caller is None:
            return None
        result = cast_tensors(output, region.caller, frozenset({torch.float32}))
        return None if result is output else result


def open_contexts() -> tuple[int, int, int]:
    """How much is open on this thread: forward passes, autocasts of hooks, FP32 regions."""
    return fp32_ops.depth(), len(_autocasts.contexts), len(_regions.open)


CLOSED = (0, 0, 0)


def unwind(to: tuple[int, int, int] = CLOSED) -> None:
    """Close down to ``to``; for exceptions such as KeyboardInterrupt, after which torch runs no hooks."""
    while len(_regions.open) > to[2]:
        _regions.open.pop().contexts.close()
    while len(_autocasts.contexts) > to[1]:
        _autocasts.contexts.pop().__exit__(None, None, None)
    fp32_ops.unwind(to[0])


def autocast_context(device_type: str, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """:class:`torch.autocast` on any device, or a context that does nothing for None.

    Raises:
        AmpAttachError: bfloat16 on a GPU that has none.
    """
    if dtype is None:
        return nullcontext()
    if device_type == 'cuda' and dtype is torch.bfloat16 and not torch.cuda.is_bf16_supported():
        raise AmpAttachError("this GPU has no bfloat16: write opt_level='O1' (float16) instead of 'O4'.")
    return torch.autocast(device_type, dtype=dtype)


def module_device(module: nn.Module) -> torch.device:
    """The device of the first parameter or buffer; the CPU for a module without any."""
    for tensor in (*module.parameters(), *module.buffers()):
        return tensor.device
    return torch.device('cpu')


def is_loss(module: nn.Module) -> bool:
    """Whether ``module`` is a loss, by its class or by its name."""
    return isinstance(module, _Loss) or type(module).__name__.endswith('Loss')


def run_in_fp32(module: nn.Module, gives_back: bool) -> None:
    """Put an FP32 region around ``module``, for autocast levels; ``gives_back`` as in :class:`LeaveFp32`."""
    module.register_forward_pre_hook(EnterFp32(), prepend=True, with_kwargs=True)
    module.register_forward_hook(LeaveFp32(gives_back), always_call=True)


def has_hook(module: nn.Module, kind: type) -> bool:
    """Whether a hook of this kind is on ``module``."""
    return any(
        isinstance(hook, kind)
        for hooks in (module._forward_pre_hooks, module._forward_hooks, module._state_dict_hooks)
        for hook in hooks.values()
    )
