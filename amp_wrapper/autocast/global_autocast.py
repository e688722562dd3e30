"""The casts of O1 and O4 outside of any model: for the oldest API, where a handle turns them on."""

from __future__ import annotations

import threading

import torch

from ..errors import AmpUsageError
from . import kernels, regions, state
from .op_set import OpSet


class _Autocast(threading.local):
    """What autocast was on this thread before the first handle."""

    def __init__(self) -> None:
        self.before: list[tuple[str, bool, torch.dtype]] = []
        self.cache = True


_autocast = _Autocast()


class GlobalCasts:
    """Casts for everything on the thread that starts them: every op, in a model or not.

    Of several that are on, the newest counts; they may stop in any order. Weights are not cached, so that no stale copy
    can exist.

    Args:
        dtype: The 16-bit type.
        allow_banned: Whether ``binary_cross_entropy`` runs in FP32 on 16-bit tensors, where it is refused otherwise.
        device_types: Where autocast is on; None for the CPU, and CUDA if there is a GPU.

    Example:
        >>> casts = GlobalCasts(torch.bfloat16)
        >>> casts.start()
        >>> torch.softmax(torch.ones(2, dtype=torch.bfloat16), 0).dtype
        torch.float32
        >>> casts.stop()
    """

    def __init__(
        self,
        dtype: torch.dtype = torch.float16,
        allow_banned: bool = False,
        device_types: tuple[str, ...] | None = None,
    ) -> None:
        self.dtype = dtype
        self.allow_banned = allow_banned
        if device_types is None:
            device_types = ('cpu', 'cuda') if torch.cuda.is_available() else ('cpu',)
        self.device_types = device_types
        self._thread: int | None = None

    @property
    def is_on(self) -> bool:
        """Whether it was started and not stopped since."""
        return self._thread is not None

    def start(self) -> None:
        """Turn the casts on for this thread. Does nothing where they are on."""
        if self.is_on:
            return
        for device in self.device_types:
            kernels.install(device)
        first = not state.thread.global_casts
        regions.global_casts_begin(self, OpSet(casts=True, allow_banned=self.allow_banned).keys)
        self._thread = threading.get_ident()
        if first:
            _autocast.before = []
            _autocast.cache = torch.is_autocast_cache_enabled()
        self._apply()

    def stop(self) -> None:
        """Turn them off; autocast is then what it was before the first of them. Does nothing where they are off.

        Raises:
            AmpUsageError: Called on another thread than ``start``.
        """
        if not self.is_on:
            return
        if self._thread != threading.get_ident():
            raise AmpUsageError('casts stop on the thread that started them: call stop() there.')
        self._thread = None
        newest = regions.global_casts_end(self)
        if isinstance(newest, GlobalCasts):
            newest._apply()
        else:
            for device, enabled, dtype in _autocast.before:
                # where it is off by now, a block around the start has ended, and has put back what it found
                if state.autocast_enabled(device):
                    state.set_autocast_enabled(device, enabled)
                    torch.set_autocast_dtype(device, dtype)
            torch.set_autocast_cache_enabled(_autocast.cache)
            _autocast.before = []
        torch.clear_autocast_cache()

    def _apply(self) -> None:
        known = {device for device, _, _ in _autocast.before}
        for device in self.device_types:
            if device not in known:
                found = (device, state.autocast_enabled(device), torch.get_autocast_dtype(device))
                _autocast.before.append(found)
        for device, enabled, dtype in _autocast.before:
            ours = device in self.device_types
            torch.set_autocast_dtype(device, self.dtype if ours else dtype)
            state.set_autocast_enabled(device, ours or enabled)
        torch.set_autocast_cache_enabled(False)
        torch.clear_autocast_cache()
