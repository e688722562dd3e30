"""The casts of O1 and O4 outside of any model: for the oldest API, where a handle turns them on."""

from __future__ import annotations

import threading

import torch

from ..errors import AmpUsageError
from ..policy import said_once
from ..policy.fp32_registry import BCE_WARNING
from . import graph, kernels, regions, state
from .op_set import OpSet


class GlobalCasts:
    """Casts for everything on the thread that starts them: every op, in a model or not.

    Of several that are on, the newest counts. They are a stack: where one is stopped before a newer one, what it has changed
    is put back together with that. Weights are not cached, so that no stale copy can exist.

    Args:
        dtype: The 16-bit type.
        allow_banned: Whether nothing is said about ``binary_cross_entropy`` of 16-bit probabilities.
        device_types: Where autocast is on; None for the CPU, and CUDA if there is a GPU.

    Examples:
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
        self._before: list[tuple[str, bool, torch.dtype]] = []
        self._cache = True

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
        regions.listen()
        regions.global_casts_begin(self, OpSet(marks=state.marks(casts=True)).keys)
        if self.allow_banned:
            said_once.pass_over(BCE_WARNING)
        self._thread = threading.get_ident()
        self._before = [
            (device, state.autocast_enabled(device), torch.get_autocast_dtype(device)) for device in self.device_types
        ]
        self._cache = torch.is_autocast_cache_enabled()
        for device in self.device_types:
            torch.set_autocast_dtype(device, self.dtype)
            state.set_autocast_enabled(device, True)
        torch.set_autocast_cache_enabled(False)
        torch.clear_autocast_cache()
        state.thread.started.append(self)

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
        regions.global_casts_end(self)
        started = state.thread.started
        while started and not started[-1].is_on:
            started.pop()._put_back()
        torch.clear_autocast_cache()
        graph.agree()

    def _put_back(self) -> None:
        for device, enabled, dtype in self._before:
            # where it is off by now, a block around the start has ended, and has put back what it found
            if state.autocast_enabled(device):
                state.set_autocast_enabled(device, enabled)
                torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(self._cache)
