"""Fixtures of the tests of autocast."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from toy_autocast import HALVES

from amp_wrapper.autocast import regions
from amp_wrapper.autocast.global_autocast import GlobalCasts
from amp_wrapper.autocast.op_set import OpSet


@pytest.fixture(params=HALVES, ids=lambda dtype: str(dtype)[6:])
def half(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    """Casts to this type are on for everything."""
    casts = GlobalCasts(request.param)
    casts.start()
    yield request.param
    casts.stop()


@pytest.fixture
def inside() -> Iterator[None]:
    """A forward pass of ours is open."""
    regions.enter(OpSet().keys)
    yield
    regions.leave()
