"""The pair of forward hooks that opens and closes a region, whatever the region is for."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from ..autocast import graph, graph_region, kernels, operands, regions, state
from ..autocast.call import tensors_in, warn_of_loss
from ..autocast.graph_region import GraphRegion
from ..autocast.op_set import OpSet
from ..autocast.patching import patches
from ..autocast.state import AutocastOff, Region, autocast_is_on
from ..compiler_internals import constant_when_traced, traced_as
from ..errors import AmpAttachError, AmpUsageError
from ..graph_internals import is_fake, trace_anew
from ..policy.copies import Copies
from ..policy.nested import HALF_TYPES, EnterObject, cast_tensors
from ..torch_internals import VERSION, first_pre_hook, forward_hooks, forward_pre_hooks
from .cast_hooks import AmpHook, CastOutputs
from .find_hooks import drop_hooks
from .modules import module_device
from .quiet_hooks import QuietHooks, make_quiet

#: What a region is for. The FP32 registry is at work in a model's forward.
FORWARD = 'forward'
#: As FORWARD, at the levels without casts of ops in the functional API: casts of other models end at its borders.
PLAIN = 'plain'
#: A forward of O1 and O4 in the functional API: autocast and the tables are on.
CASTS = 'casts'
#: A module that runs in FP32 inside autocast: inputs are cast up, and autocast is off.
FP32 = 'fp32'
#: torch.autocast around a forward, and nothing else.
AUTOCAST = 'autocast'

_FLOAT32 = frozenset({torch.float32})


class EnterRegion(AmpHook):
    """Forward pre-hook: opens a region. First of all, so that other people's pre-hooks run inside.

    Args:
        kind: What it is for.
        ops: What is active in it of the FP32 registry and of the casts of ops.
        dtype: The 16-bit type of autocast, for CASTS and AUTOCAST.
    """

    def __init__(self, kind: str, ops: OpSet | None = None, dtype: torch.dtype | None = None) -> None:
        self.kind = kind
        self.ops = ops
        self.dtype = dtype

    def in_graph(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """As a call of the hook, where torch.compile traces it."""
        if self.kind == FP32:
            return self._open_fp32_in_graph(module, args, kwargs)
        self.open_in_graph(module, args, kwargs)
        return None

    def open_in_graph(self, module: nn.Module, args: Any, kwargs: Any, again: bool = False) -> None:
        """:meth:`open`, where torch.compile traces it."""
        _keep_patched()
        outer = graph_region.innermost()
        device: str | None = None
        dtype: torch.dtype | None = None
        if self.kind != FORWARD and not again:
            device = _device_of_call(module, args, kwargs)
            if self.kind == PLAIN:
                device = device if graph_region.autocast_type(outer, device) is not None else None
            elif state.has_autocast(device) and (self.kind == AUTOCAST or outer is None or not outer.suspended):
                dtype = self.dtype
                if self.kind == CASTS:
                    kernels.install_for_graph(device)
            else:
                device = None
        region = GraphRegion(outer, self._keys(), device, dtype)
        region.module = module
        region.covers = region.covers or self.kind in (PLAIN, CASTS)
        graph.enter(region)

    def _open_fp32_in_graph(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        outer = graph_region.innermost()
        tensors = tensors_in(args, kwargs)
        halves = [tensor.dtype for tensor in tensors if tensor.dtype in HALF_TYPES]
        caller = halves[0] if halves else None
        warn_of_loss(module, args, kwargs)
        device = tensors[0].device.type if tensors else module_device(module).type
        is_on = graph_region.autocast_type(outer, device) is not None
        region = GraphRegion(outer, None, device if is_on else None, None, caller)
        region.module = module
        graph.enter(region)
        return _raised(region, args, kwargs)

    @traced_as(in_graph)
    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self.kind in (PLAIN, CASTS):
            regions.unwind_stale()
        if self.kind == FP32:
            return self._open_fp32(module, args, kwargs)
        self.open(module, args, kwargs)
        return None

    def open(self, module: nn.Module, args: Any, kwargs: Any, again: bool = False) -> None:
        """Open the region of a call of ``module``.

        Args:
            module: What is called.
            args: Its arguments.
            kwargs: The same.
            again: Whether the module calls itself: autocast is on then.
        """
        autocast: AbstractContextManager[Any] | None = None
        if self.kind != FORWARD and not again:
            device = _device_of_call(module, args, kwargs)
            if self.kind == PLAIN:
                autocast = AutocastOff([device]) if autocast_is_on(device) else None
            # inside disable_casts() nothing is cast
            elif self.kind == AUTOCAST or not state.is_suspended():
                autocast = autocast_context(device, self.dtype)
            if self.kind == CASTS:
                if torch.compiler.is_compiling():
                    _refuse_export(tensors_in(args, kwargs))
                kernels.install(device)
        regions.enter(self._keys(), module, autocast, self.kind in (PLAIN, CASTS), self.dtype)

    def _keys(self) -> frozenset[str] | None:
        """What the region makes active; None where it leaves that to those around it."""
        if self.ops is not None:
            return self.ops.keys
        return frozenset() if self.kind in (PLAIN, CASTS) else None

    def _open_fp32(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        tensors = tensors_in(args, kwargs)
        caller = next((tensor.dtype for tensor in tensors if tensor.dtype in HALF_TYPES), None)
        warn_of_loss(module, args, kwargs)
        devices = {tensor.device.type for tensor in tensors} or {module_device(module).type}
        region = regions.enter(None, module, AutocastOff([d for d in devices if autocast_is_on(d)]))
        region.caller = caller
        return _raised(region, args, kwargs)


def _raised(region: Region | GraphRegion, args: Any, kwargs: Any) -> Any:
    """The arguments of a call in an FP32 region, where 16-bit tensors are among them."""
    if region.caller is None:
        return None
    region.copies = Copies(torch.float32, HALF_TYPES)
    return region.copies.cast(args), region.copies.cast(kwargs)


class LeaveRegion(AmpHook):
    """Forward hook, called after every exception too: the counterpart of :class:`EnterRegion`.

    Args:
        kind: What the region is for.
        dtype: For CASTS: the type of floating outputs.
        enter: As in :class:`~amp_wrapper.casting.cast_hooks.CastOutputs`.
        gives_back: For FP32: whether floating outputs return to the 16-bit type that the caller came with, if it did.
    """

    def __init__(
        self, kind: str, dtype: torch.dtype | None = None, enter: EnterObject | None = None, gives_back: bool = False
    ) -> None:
        self.kind = kind
        self.dtype = dtype
        self.enter = enter
        self.gives_back = gives_back

    def in_graph(self, module: nn.Module, args: Any, output: Any) -> Any:
        """As a call of the hook, where torch.compile traces it."""
        region = graph_region.innermost()
        if region is None or region.module is not module:
            return None
        graph.leave(region)
        if region.copies is not None:
            region.copies.write_back()
        if self.kind == CASTS:
            return self.cast(output)
        if region.caller is not None and self.gives_back:
            return cast_tensors(output, region.caller, _FLOAT32)
        return None

    @traced_as(in_graph)
    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return self.close(module, output)

    def close(self, module: nn.Module, output: Any) -> Any:
        """Close the region of a call of ``module``, and cast what it gives."""
        # a pre-hook that failed before ours leaves nothing of this module open
        if not regions.is_innermost(module):
            return None
        region = state.thread.regions[-1]
        cast = self._cast_of(region)
        regions.leave()
        if region.copies is not None:
            region.copies.write_back()
        result = output if cast is None else cast(output)
        return None if result is output else result

    def _cast_of(self, region: Region) -> Callable[[Any], Any] | None:
        """What is done to outputs."""
        if self.kind == CASTS:
            return self.cast
        caller = region.caller
        if caller is None or not self.gives_back:
            return None
        return lambda value: cast_tensors(value, caller, _FLOAT32)

    def cast(self, value: Any) -> Any:
        """``value`` with floating tensors in the type of the outputs."""
        assert self.dtype is not None
        return cast_tensors(value, self.dtype, enter=self.enter)


def put_region(module: nn.Module, enter: EnterRegion, leave: LeaveRegion) -> None:
    """Put a pair on ``module``."""
    first_pre_hook(module, enter, with_kwargs=True)
    module.register_forward_hook(leave, always_call=True)


def run_in_fp32(module: nn.Module, gives_back: bool) -> None:
    """Put an FP32 region around ``module``, for autocast levels; ``gives_back`` as in :class:`LeaveRegion`."""
    put_region(module, EnterRegion(FP32), LeaveRegion(FP32, gives_back=gives_back))


def autocast_forward(
    module: nn.Module, dtype: torch.dtype, outputs: torch.dtype = torch.float32, enter: EnterObject | None = None
) -> None:
    """Put :class:`torch.autocast` around every forward of ``module``; :func:`.strip_hooks` takes it off.

    Args:
        module: An FP32 model.
        dtype: The 16-bit type.
        outputs: The type of floating outputs.
        enter: Casts tensors inside output objects of a framework's own kind.
    """
    put_region(module, EnterRegion(AUTOCAST, dtype=dtype), LeaveRegion(AUTOCAST))
    module.register_forward_hook(CastOutputs(outputs, enter))


def region_on(module: nn.Module, *kinds: str) -> EnterRegion | None:
    """The hook that opens a region of one of these kinds on ``module``, if there is one."""
    hooks = forward_pre_hooks(module).values()
    return next((hook for hook in hooks if isinstance(hook, EnterRegion) and hook.kind in kinds), None)


def drop_regions(module: nn.Module, kinds: Collection[str]) -> None:
    """Take the pairs of these kinds off ``module``."""
    drop_hooks(module, lambda hook: isinstance(hook, (EnterRegion, LeaveRegion)) and hook.kind in kinds)


@constant_when_traced
def _keep_patched() -> bool:
    regions.listen()
    operands.prepare()
    is_first = regions.compiling()
    if patches.keep() or is_first:
        trace_anew('functions of the FP32 registry stay patched')
    return True


def _refuse_export(tensors: Iterable[Tensor]) -> None:
    """``torch.export`` records blocks of autocast, and not what is cast inside of them beyond torch's own lists.

    Raises:
        AmpUsageError: The tensors have no memory: a call is recorded, on this thread.
    """
    if any(map(is_fake, tensors)):
        raise AmpUsageError(
            'torch.export of a model at O1 or O4 would lose casts of single ops. Export it as it was before amp.initialize: '
            'build the model anew and load the state dict, which is FP32; or train at O2, O3 or O5, whose casts are exported.'
        )


def _device_of_call(module: nn.Module, args: Any, kwargs: Any) -> str:
    """Where a call works: at the module's first tensor, or at the first that it is handed."""
    for tensor in itertools.chain(module.parameters(), module.buffers()):
        return tensor.device.type
    return next((tensor.device.type for tensor in tensors_in(args, kwargs)), 'cpu')


def autocast_context(device_type: str, dtype: torch.dtype | None) -> AbstractContextManager[Any] | None:
    """:class:`torch.autocast`; None without a type, and on devices without autocast, such as 'meta'.

    Raises:
        AmpAttachError: bfloat16 on a GPU that has none.
    """
    if dtype is None or not state.has_autocast(device_type):
        return None
    # torch says by default that a GPU without bfloat16 has it, which is emulated there
    if device_type == 'cuda' and dtype is torch.bfloat16 and not torch.cuda.is_bf16_supported(False):
        raise AmpAttachError("this GPU has no bfloat16: write opt_level='O1' (float16) instead of 'O4'.")
    # before 2.11, copies of weights that were made without gradients served forwards that need them
    return torch.autocast(device_type, dtype=dtype, cache_enabled=None if VERSION >= (2, 11) else False)


# -- the modules below a model at O1 and O4 ----------------------------------------------------------------------------


class EnterBelow(EnterRegion):
    """Pre-hook of every module below a model with a region of kind CASTS: calling it directly is cast as calling the model.

    Inside of a region that covers it, it costs a few tests.
    """

    def in_graph(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """As a call of the hook, where torch.compile traces it."""
        outer = graph_region.innermost()
        if outer is None or not outer.covers:
            self.open_in_graph(module, args, kwargs)
        elif outer.module is module:
            self.open_in_graph(module, args, kwargs, again=True)

    @traced_as(in_graph)
    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        top = state.innermost()
        cover = None if top is None else top.cover
        if cover is None:
            # a checkpointed segment that runs again has what the region of its forward had, and no FP32 outputs inside
            if not state.is_resumed():
                self.open(module, args, kwargs)
        elif cover.module is module:
            # a module that calls itself: so that each call finds its own end
            self.open(module, args, kwargs, again=True)


class LeaveBelow(LeaveRegion):
    """The counterpart of :class:`EnterBelow`: the outermost call gives FP32 outputs."""

    def in_graph(self, module: nn.Module, args: Any, output: Any) -> Any:
        """As a call of the hook, where torch.compile traces it."""
        region = graph_region.innermost()
        if region is None or region.module is not module:
            return None
        graph.leave(region)
        return self.cast(output) if graph_region.innermost() is None else None

    @traced_as(in_graph)
    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return self.close(module, output)

    def _cast_of(self, region: Region) -> Callable[[Any], Any] | None:
        return self.cast if region.around is None else None


def cover_below(module: nn.Module, enter: EnterBelow, leave: LeaveBelow) -> None:
    """Put the pair on a module below a model."""
    make_quiet(module)
    put_region(module, enter, leave)
    for hooks in (forward_pre_hooks(module), forward_hooks(module)):
        if isinstance(hooks, QuietHooks):
            hooks.ours = next(key for key, hook in hooks.items() if hook in (enter, leave))
