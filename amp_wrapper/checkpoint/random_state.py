"""The states of the random generators of a process, kept in memory."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def capture() -> dict[str, Any]:
    """Return the states of Python's, NumPy's and torch's global generators, of all GPUs among them."""
    return {
        'python': random.getstate(),
        'numpy': np.random.get_state(),
        'torch': torch.get_rng_state(),
        'cuda': torch.cuda.get_rng_state_all(),
    }


def restore(states: dict[str, Any]) -> None:
    """Set the generators to states of :func:`capture`."""
    random.setstate(states['python'])
    np.random.set_state(states['numpy'])
    torch.set_rng_state(states['torch'])
    torch.cuda.set_rng_state_all(states['cuda'])
