"""Forward hooks: casts at the doors of modules, FP32 regions, and the beginning and end of a model's forward pass.

All of them are plain objects that know a dtype and nothing of the model, so they survive ``copy.deepcopy``, ``pickle``,
``torch.save(model)`` and replication.
"""

from __future__ import annotations

import copy
import itertools
import sys
import threading
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.loss import _Loss

from ..autocast import generators, interrupts
from ..autocast import kernels as op_casts
from ..autocast import patching as fp32_ops
from ..autocast import state as passes
from ..autocast.call import autocast_is_on
from ..autocast.call import untraced as untraced
from ..errors import AmpAttachError, BannedOpError, ScriptingError
from ..policy.fp32_registry import BCE_REASON
from ..policy.nested import HALF_TYPES, EnterObject, cast_tensors, map_tensors


class _Unscriptable:
    """torch.jit.script begins with the names of a module's hooks, and nobody else needs one."""

    @property
    def __name__(self) -> str:
        # an AttributeError as well, for who asks politely
        raise ScriptingError(
            'torch.jit.script cannot compile the casts of a model that mixed precision is attached to. Write '
            'torch.jit.trace(model, example), which records them, or load model.state_dict() into a new FP32 model and script '
            'that one.'
        )


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
        # nobody trains a model that was pickled, and its copies are what it is
        return {name: value for name, value in self.__dict__.items() if name != 'stays_behind'}


class StayedBehind(_Unscriptable):
    """Stands in a deep copy where the original has a hook, and does nothing."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        return None


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


class Fp32Inputs(CastInputs):
    """:class:`CastInputs` of a model whose weights stay what they are (O0), which another wrapper may take off.

    Args:
        dtype: float32, but for frozen 16-bit parts of the model.
    """

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(dtype)


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

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self.only_eval and module.training:
            return None
        result = generators.resuming(output, self.cast)
        if result is output:
            result = self.cast(output)
        return None if result is output else result

    def cast(self, value: Any) -> Any:
        """``value`` with floating tensors in the type of the outputs."""
        return cast_tensors(value, self.dtype, enter=self.enter)


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
    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        result = generators.resuming(output)
        fp32_ops.leave(id(module))
        return None if result is output else result


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
        context = ExitStack()
        context.enter_context(autocast_context(module_device(module).type, self.dtype))
        interrupts.begin()
        context.callback(interrupts.end)
        _autocasts.contexts.append(context)


class LeaveAutocast(AmpHook):
    """Forward hook, called after exceptions too: the counterpart of :class:`EnterAutocast`."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        result = generators.resuming(output)
        if _autocasts.contexts:
            _autocasts.contexts.pop().__exit__(None, None, None)
        return None if result is output else result


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
        if region.caller is not None and isinstance(module, nn.BCELoss) and fp32_ops.refuses_bce():
            raise BannedOpError('nn.BCELoss', BCE_REASON)
        for device in devices or {module_device(module).type}:
            if autocast_is_on(device):
                region.contexts.enter_context(torch.autocast(device, enabled=False))
        interrupts.begin()
        region.contexts.callback(interrupts.end)
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
        caller = _regions.open[-1].caller if self.gives_back else None

        def give_back(value: Any) -> Any:
            return value if caller is None else cast_tensors(value, caller, frozenset({torch.float32}))

        result = generators.resuming(output, give_back)
        _regions.open.pop().contexts.close()
        if result is output:
            result = give_back(output)
        return None if result is output else result


class _CastRegion:
    """What one model's forward, or a direct call of a part of it, has opened on this thread for O1 or O4."""

    __slots__ = ('autocast', 'before', 'dtype', 'frame', 'grad', 'hooks', 'module_id', 'pre_hooks')

    def __init__(self, module: nn.Module, dtype: torch.dtype | None, autocast: AbstractContextManager[Any]) -> None:
        self.module_id = id(module)
        self.pre_hooks, self.hooks = module._forward_pre_hooks, module._forward_hooks
        self.dtype = dtype
        self.before = open_contexts()
        self.frame = _calling_frame()
        self.grad = torch.is_grad_enabled()
        self.autocast = autocast


class _CastRegions(threading.local):
    def __init__(self) -> None:
        self.open: list[_CastRegion] = []
        # the innermost, for the check that every module makes
        self.top: _CastRegion | None = None


_cast_regions = _CastRegions()


def innermost_region() -> _CastRegion | None:
    """The region of O1's and O4's casts that was opened last on this thread."""
    return _cast_regions.top


def _calling_frame() -> FrameType | None:
    """The frame of ``nn.Module.__call__`` above a hook."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != nn.modules.module.__file__:
        frame = frame.f_back
    return frame


def _open_casts(
    module: nn.Module,
    dtype: torch.dtype | None,
    autocast: AbstractContextManager[Any],
    ops: fp32_ops.OpSet | None,
) -> None:
    regions = _cast_regions
    region = _CastRegion(module, dtype, autocast)
    if regions.top is not None and regions.top.dtype is not dtype:
        torch.clear_autocast_cache()
    autocast.__enter__()
    try:
        if ops is None:
            passes.begin(object(), frozenset())
        else:
            fp32_ops.enter(ops)
    except BaseException:
        autocast.__exit__(None, None, None)
        raise
    regions.open.append(region)
    regions.top = region


def _close_casts() -> None:
    regions = _cast_regions
    region = regions.open.pop()
    top = regions.top = regions.open[-1] if regions.open else None
    # with its own pass ends what an interrupt left open inside of it
    try:
        fp32_ops.unwind(region.before[0])
    finally:
        region.autocast.__exit__(None, None, None)
    # an autocast around the model would keep copies of weights past a change of these
    if top is None or top.dtype is not region.dtype:
        torch.clear_autocast_cache()


def unwind_stale() -> None:
    """Close what calls left that are no longer under way: a signal may end a forward pass in the middle of one of our hooks.

    May be called at any time; does nothing to what is under way on this thread.
    """
    if not _cast_regions.open:
        return
    alive = set()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        alive.add(frame)
        frame = frame.f_back
    for region in _cast_regions.open:
        if region.frame is not None and region.frame not in alive:
            unwind(region.before)
            break


class EnterCasts(AmpHook):
    """Forward pre-hook of a model at O1 and O4 in the functional API: autocast and the tables are on from here.

    Args:
        ops: What is active.
        dtype: The 16-bit type.
    """

    def __init__(self, ops: fp32_ops.OpSet, dtype: torch.dtype) -> None:
        self.ops = ops
        self.dtype = dtype

    @untraced
    def __call__(self, module: nn.Module, args: Any) -> None:
        unwind_stale()
        self.open(module, args)

    def open(self, module: nn.Module, args: Any) -> None:
        """Open a region for a call of ``module``."""
        device = _device_of_call(module, args)
        # inside disable_casts() nothing is cast
        autocast = nullcontext() if passes.is_suspended() else autocast_context(device, self.dtype)
        op_casts.install(device)
        _open_casts(module, self.dtype, autocast, self.ops)


class EnterCastsBelow(EnterCasts):
    """Forward pre-hook of every module below: calling it directly is cast as calling the model.

    Inside an open region it costs a few tests.
    """

    def __call__(self, module: nn.Module, args: Any) -> None:
        # what torch.compile traces is inside of a region, or compiled apart from the model
        if torch.compiler.is_compiling():
            return
        region = _cast_regions.top
        if region is None:
            # a checkpointed segment that runs again has what the region of its forward had, and no FP32 outputs inside
            if not passes.is_resumed():
                self.open(module, args)
        elif region.module_id == id(module):
            # a module that calls itself: so that each call finds its own end
            _open_casts(module, self.dtype, nullcontext(), self.ops)
        elif region.grad is not torch.is_grad_enabled():
            # copies of weights that were made without gradients must not serve a forward that needs them
            torch.clear_autocast_cache()
            region.grad = torch.is_grad_enabled()


class LeaveCasts(AmpHook):
    """Forward hook, called after exceptions too: the counterpart of :class:`EnterCasts`.

    Args:
        dtype: The type of floating outputs.
        enter: As in :class:`CastOutputs`.
    """

    below = False

    def __init__(self, dtype: torch.dtype, enter: EnterObject | None = None) -> None:
        self.dtype = dtype
        self.enter = enter

    @untraced
    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        region = _cast_regions.top
        # a pre-hook that failed before ours leaves nothing of this module open
        if region is None or region.module_id != id(module):
            return None
        return self.close(output)

    def close(self, output: Any) -> Any:
        """Close the region, and cast what the outermost call gives."""
        outermost = len(_cast_regions.open) == 1 or not self.below
        result = generators.resuming(output, self.cast if outermost else None)
        _close_casts()
        if outermost and result is output:
            result = self.cast(output)
        return None if result is output else result

    def cast(self, value: Any) -> Any:
        """``value`` with floating tensors in the type of the outputs."""
        return cast_tensors(value, self.dtype, enter=self.enter)


class LeaveCastsBelow(LeaveCasts):
    """The counterpart of :class:`EnterCastsBelow`: the outermost call gives FP32 outputs."""

    below = True

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        if torch.compiler.is_compiling():
            return None
        region = _cast_regions.top
        if region is None or region.module_id != id(module):
            return None
        return self.close(output)


class EnterPlain(AmpHook):
    """Forward pre-hook of a model at the other levels of the functional API: casts of other models end at its door."""

    @untraced
    def __call__(self, module: nn.Module, args: Any) -> None:
        unwind_stale()
        device = _device_of_call(module, args)
        autocast = torch.autocast(device, enabled=False) if autocast_is_on(device) else nullcontext()
        _open_casts(module, None, autocast, None)


class LeavePlain(AmpHook):
    """Forward hook, called after exceptions too: the counterpart of :class:`EnterPlain`."""

    @untraced
    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        region = _cast_regions.top
        if region is None or region.module_id != id(module):
            return None
        result = generators.resuming(output)
        _close_casts()
        return None if result is output else result


def _device_of_call(module: nn.Module, args: Any) -> str:
    """Where a call works: at the module's first tensor, or at the first that it is handed."""
    for tensor in itertools.chain(module.parameters(), module.buffers()):
        return tensor.device.type
    found: list[str] = []

    def look(tensor: Tensor) -> Tensor:
        found.append(tensor.device.type)
        return tensor

    map_tensors(look, args)
    return found[0] if found else 'cpu'


def open_contexts() -> tuple[int, int, int, int]:
    """How much is open on this thread: forward passes, autocasts of hooks, FP32 regions, regions of per-op casts."""
    return fp32_ops.depth(), len(_autocasts.contexts), len(_regions.open), len(_cast_regions.open)


CLOSED = (0, 0, 0, 0)


def unwind(to: tuple[int, int, int, int] = CLOSED) -> None:
    """Close down to ``to``."""
    while len(_regions.open) > to[2]:
        _regions.open.pop().contexts.close()
    while len(_autocasts.contexts) > to[1]:
        _autocasts.contexts.pop().__exit__(None, None, None)
    while len(_cast_regions.open) > to[3]:
        _close_casts()
    fp32_ops.unwind(to[0])


def autocast_context(device_type: str, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """:class:`torch.autocast`, or a context that does nothing: for None, and on devices without autocast, such as 'meta'.

    Raises:
        AmpAttachError: bfloat16 on a GPU that has none.
    """
    if dtype is None or not torch.amp.is_autocast_available(device_type):
        return nullcontext()
    if device_type == 'cuda' and dtype is torch.bfloat16 and not torch.cuda.is_bf16_supported():
        raise AmpAttachError("this GPU has no bfloat16: write opt_level='O1' (float16) instead of 'O4'.")
    return torch.autocast(device_type, dtype=dtype)


def module_device(module: nn.Module) -> torch.device:
    """The device of the first parameter or buffer; the CPU for a module without any."""
    for tensor in itertools.chain(module.parameters(), module.buffers()):
        return tensor.device
    return torch.device('cpu')


def is_loss(module: nn.Module) -> bool:
    """Whether ``module`` is a loss, by its class or by its name."""
    return isinstance(module, _Loss) or type(module).__name__.endswith('Loss')


def run_in_fp32(module: nn.Module, gives_back: bool) -> None:
    """Put an FP32 region around ``module``, for autocast levels; ``gives_back`` as in :class:`LeaveFp32`."""
    module.register_forward_pre_hook(EnterFp32(), prepend=True, with_kwargs=True)
    module.register_forward_hook(LeaveFp32(gives_back), always_call=True)


def holds_casts(module: nn.Module) -> bool:
    """Whether casts of a wrapper are on ``module`` or below. What O0, O1 and O4 put on is none, and makes way for others."""
    return any(
        isinstance(hook, CastInputs) and not isinstance(hook, Fp32Inputs)
        for part in module.modules()
        for hook in part._forward_pre_hooks.values()
    )


def has_hook(module: nn.Module, kind: type) -> bool:
    """Whether a hook of this kind is on ``module``."""
    return any(
        isinstance(hook, kind)
        for hooks in (module._forward_pre_hooks, module._forward_hooks, module._state_dict_hooks)
        for hook in hooks.values()
    )
