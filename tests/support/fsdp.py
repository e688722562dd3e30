"""Where ``fully_shard`` trains."""

from __future__ import annotations

import pytest
import torch


def skip_without_fsdp(device: str = 'cpu') -> None:
    """Skip the test that calls this where torch cannot train what ``fully_shard`` has sharded on such a device.

    Args:
        device: Its type, such as ``cpu``.
    """
    if device == 'cpu' and torch.__version__ < (2, 7):
        pytest.skip('fully_shard of torch 2.6 needs a GPU')
