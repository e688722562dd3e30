"""The casts of O1 and O4 outside of any model: for the oldest API, where a handle turns them on."""

from __future__ import annotations

import threading
from contextlib import ExitStack

import torch

from ..errors import AmpUsageError
from ..policy import said_once
from ..policy.fp32_registry import BCE_WARNING
from . import functions, kernels, region


class _Thread(threading.local):
    def __init__(self) -> None:
        # those that have not restored autocast yet, in order
        self.started: list[GlobalCasts] = []


_thread = _Thread()


class GlobalCasts:
    """Casts for everything on the thread that makes them: every op, in a model or not.

    Of several that are on, the newest counts. They are a stack: where one is stopped before a newer one, what it has changed
    is restored together with that. Weights are not cached, so that no stale copy can exist.

    Args:
        allow_banned: Whether nothing is said about ``binary_cross_entropy`` of 16-bit probabilities.

    Raises:
        AmpUsageError: In a block of ``disable_casts()``, which will restore what was on before it.
    """

    def __init__(self, allow_banned: bool = False) -> None:
        _refuse_in_a_block('amp.init()')
        if not _thread.started and torch.is_autocast_enabled('cpu'):
            raise AmpUsageError(
                'amp.init() in a block of torch.autocast, whose end turns its casts off: write it outside.'
            )
        functions.install()
        if allow_banned:
            said_once.said.add(BCE_WARNING)
        self._is_on = True
        self._blocks = ExitStack()
        self._blocks.callback(said_once.speaks, said_once.speaks(True))
        for device in ('cpu', 'cuda') if torch.cuda.is_available() else ('cpu',):
            kernels.install_tables(device)
            self._blocks.enter_context(torch.autocast(device, dtype=torch.float16, cache_enabled=False))
        self._blocks.enter_context(region.spare(region.TABLES))
        _thread.started.append(self)

    def stop(self) -> None:
        """Turn them off; autocast is then what it was before the first of them. Does nothing where they are off.

        Raises:
            AmpUsageError: Called on another thread than that which made them, or in a block of ``disable_casts()``.
        """
        if not self._is_on:
            return
        started = _thread.started
        if self not in started:
            raise AmpUsageError('casts stop on the thread that started them: call stop() there.')
        _refuse_in_a_block('the end of a handle of amp.init()')
        self._is_on = False
        while started and not started[-1]._is_on:
            started.pop()._blocks.close()


def _refuse_in_a_block(call: str) -> None:
    if region.is_suspended():
        raise AmpUsageError(
            f'{call} in a block of disable_casts(), whose end restores what was before: write it outside.'
        )
