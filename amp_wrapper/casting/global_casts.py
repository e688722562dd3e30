"""The casts of O1 and O4 outside of any model: for the oldest API, where a handle turns them on."""

from __future__ import annotations

import threading

import torch

from ..errors import AmpUsageError
from ..policy import said_once
from ..policy.fp32_registry import BCE_WARNING
from . import functions, kernels, region

#: What a handle has changed: a device, whether its autocast was on, and its type then.
_State = tuple[str, bool, torch.dtype]


class _Thread(threading.local):
    def __init__(self) -> None:
        # those that have not restored autocast yet, in order
        self.started: list[GlobalCasts] = []


_thread = _Thread()


class GlobalCasts:
    """Casts for everything on the thread that starts them: every op, in a model or not.

    Of several that are on, the newest counts. They are a stack: where one is stopped before a newer one, what it has changed
    is restored together with that. Weights are not cached, so that no stale copy can exist.

    Args:
        allow_banned: Whether nothing is said about ``binary_cross_entropy`` of 16-bit probabilities.
    """

    def __init__(self, allow_banned: bool = False) -> None:
        self._allow_banned = allow_banned
        self._devices = ('cpu', 'cuda') if torch.cuda.is_available() else ('cpu',)
        self._thread: int | None = None
        self._before: list[_State] = []
        self._cache = self._speaks = True

    def start(self) -> None:
        """Turn the casts on for this thread.

        Raises:
            AmpUsageError: In a block of ``disable_casts()``, which will restore what was on before it.
        """
        _refuse_in_a_block('amp.init()')
        functions.install()
        for device in self._devices:
            kernels.install_tables(device)
        if self._allow_banned:
            said_once.pass_over(BCE_WARNING)
        self._thread = threading.get_ident()
        self._speaks = said_once.speaks(True)
        self._before = [
            (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
            for device in (*self._devices, region.SPARE)
        ]
        self._cache = torch.is_autocast_cache_enabled()
        for device, _, _ in self._before:
            torch.set_autocast_dtype(device, torch.float16)
            torch.set_autocast_enabled(device, True)
        torch.set_autocast_cache_enabled(False)
        torch.clear_autocast_cache()
        _thread.started.append(self)

    def stop(self) -> None:
        """Turn them off; autocast is then what it was before the first of them. Does nothing where they are off.

        Raises:
            AmpUsageError: Called on another thread than ``start``, or in a block of ``disable_casts()``.
        """
        if self._thread is None:
            return
        if self._thread != threading.get_ident():
            raise AmpUsageError('casts stop on the thread that started them: call stop() there.')
        _refuse_in_a_block('the end of a handle of amp.init()')
        self._thread = None
        started = _thread.started
        while started and started[-1]._thread is None:
            started.pop()._restore()
        torch.clear_autocast_cache()

    def _restore(self) -> None:
        for device, enabled, dtype in self._before:
            # where it is off by now, a block around the start has ended, and has restored what it found
            if torch.is_autocast_enabled(device):
                torch.set_autocast_enabled(device, enabled)
                torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(self._cache)
        said_once.speaks(self._speaks)


def _refuse_in_a_block(call: str) -> None:
    if region.is_suspended():
        raise AmpUsageError(
            f'{call} in a block of disable_casts(), whose end restores what was before: write it outside.'
        )
