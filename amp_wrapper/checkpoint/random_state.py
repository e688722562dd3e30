"""The states of the random generators of a process, kept in memory."""

from __future__ import annotations

import ctypes
import random
from typing import Any

import numpy as np
import torch


def capture(before: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the states of Python's, NumPy's and torch's global generators, of all GPUs among them.

    Args:
        before: An earlier result, whose NumPy state serves again where nobody has drawn a number from NumPy since: NumPy
            takes longer to give its state than all others together.
    """
    # the words and the position of a Mersenne Twister; NumPy before 1.24 has no such function
    generator = getattr(np.random, 'get_bit_generator', object)()
    memory = ctypes.string_at(generator.ctypes.state_address, 2500) if isinstance(generator, np.random.MT19937) else b''
    known = before['numpy'] if before and before['memory'] == memory != b'' else None
    return {
        'python': random.getstate(),
        # of two normal numbers one is kept for the next call, and drawing it leaves the memory as it is
        'numpy': np.random.get_state() if known is None or known[3] else known,
        'memory': memory,
        'torch': torch.get_rng_state(),
        'cuda': torch.cuda.get_rng_state_all(),
    }


def restore(states: dict[str, Any]) -> None:
    """Set the generators to states of :func:`capture`."""
    random.setstate(states['python'])
    np.random.set_state(states['numpy'])
    torch.set_rng_state(states['torch'])
    torch.cuda.set_rng_state_all(states['cuda'])
