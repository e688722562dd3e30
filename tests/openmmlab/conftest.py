"""Runners start quickly in the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import toy


@pytest.fixture(scope='module', autouse=True)
def _quick() -> Iterator[None]:
    with toy.quick_runners():
        yield
