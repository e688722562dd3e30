"""Fixtures of the ops."""

from __future__ import annotations

import pytest
import torch
from op_lists import skip_without_library


@pytest.fixture
def library(device: torch.device) -> None:
    """For tests of what only compiled kernels do."""
    skip_without_library(device)
