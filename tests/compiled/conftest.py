"""Nothing stays compiled after a test, nothing stays open, and torch's classes are as they were."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from compiling import fresh


@pytest.fixture(autouse=True)
def counters() -> Iterator[dict[str, Any]]:
    # the one method of the FP32 registry that no kernel is under
    methods = {*vars(torch.Tensor), 'numpy'}
    yield fresh()
    fresh()
    assert torch._C._len_torch_function_stack() == 0 and {*vars(torch.Tensor), 'numpy'} == methods
    # what is left open would keep casts of weights from test to test
    nesting = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    assert nesting == 1
