"""Nothing stays compiled after a test, and nothing stays open."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from compiling import fresh


@pytest.fixture(autouse=True)
def counters() -> Iterator[dict[str, Any]]:
    yield fresh()
    fresh()
    # what is left open would keep casts of weights from test to test
    nesting = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    assert nesting == 1
