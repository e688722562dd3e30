"""The casts of O1 and O4 outside of any model: for the oldest API, where a handle turns them on."""

from __future__ import annotations

from contextlib import ExitStack

import torch

from ..errors import AmpUsageError
from ..policy.fp32_registry import BCE_WARNING
from . import functions, kernels, region, said_once


def start_casts(allow_banned: bool = False) -> ExitStack:
    """Turn casts on for everything on this thread: every op, in a model or not.

    It enters the blocks that calls of a model at O1 are in, and leaves them open. Weights are not cached, so that no stale copy
    can exist.

    Args:
        allow_banned: Whether nothing is said about ``binary_cross_entropy`` of 16-bit probabilities.

    Returns:
        Its ``close()`` turns them off, on the same thread.

    Raises:
        AmpUsageError: In a block of ``disable_casts()`` or of autocast, which restores at its end what was on before it, or
            where they are on already.
    """
    if region.is_suspended() or torch.is_autocast_enabled('cpu'):
        raise AmpUsageError(
            'amp.init() in a block of disable_casts() or of torch.autocast, whose end turns its casts off, or where another '
            'handle is active: write it outside, once.'
        )
    functions.install()
    if allow_banned:
        said_once.said.add(BCE_WARNING)
    blocks = ExitStack()
    blocks.callback(said_once.speaks, said_once.speaks(True))
    for device in ('cpu', 'cuda') if torch.cuda.is_available() else ('cpu',):
        kernels.install_tables(device)
        blocks.enter_context(torch.autocast(device, dtype=torch.float16, cache_enabled=False))
    blocks.enter_context(region.spare(region.TABLES))
    return blocks
