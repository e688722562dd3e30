"""One flag for all tests: ``pytest --device cuda`` runs the same tests on a GPU."""

from __future__ import annotations

import os

# before torch starts its threads: two workers on two cores, and bit-exact sums that do not depend on their number
os.environ.setdefault('OMP_NUM_THREADS', '1')

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption('--device', default='cpu', choices=('cpu', 'cuda'), help='where tensors live')


@pytest.fixture(scope='session')
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device under test; asking for an absent GPU is an error, not a skip."""
    name = request.config.getoption('--device')
    if name == 'cuda' and not torch.cuda.is_available():
        raise pytest.UsageError('--device cuda, but torch sees no GPU')
    return torch.device(name)


@pytest.fixture(autouse=True)
def _same_start() -> None:
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
