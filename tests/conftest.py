"""One flag for all tests: ``pytest --device cuda`` runs the same tests on a GPU."""

from __future__ import annotations

import os

# before torch starts its threads: two workers on two cores, and bit-exact sums that do not depend on their number
os.environ.setdefault('OMP_NUM_THREADS', '1')

from collections.abc import Iterator

import pytest
import torch
from missing import SkipsWhatLacksAPackage, missing

from amp_wrapper import forward_hooks, fp32_ops, passes


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption('--device', default='cpu', choices=('cpu', 'cuda'), help='where tensors live')


def pytest_configure(config: pytest.Config) -> None:
    absent = missing()
    if absent:
        config.pluginmanager.register(SkipsWhatLacksAPackage(absent))


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


@pytest.fixture(autouse=True)
def _nothing_global_is_left() -> Iterator[None]:
    """Whatever a test does, and however it ends: no region is open afterwards, for the next test or for anybody else."""
    yield
    left = {
        'regions': forward_hooks.open_contexts() != forward_hooks.CLOSED,
        'passes': passes.depth() > 0,
        'suspended casts': passes.is_suspended(),
        'an overruled registry': passes._thread.overruled > 0,
        'global casts': passes.global_casts_open(),
        'a recorder': passes.in_forward(),
        'backward passes': bool(passes._backward_passes),
        'stand-ins': fp32_ops.is_installed(),
        'autocast': torch.is_autocast_enabled('cpu'),
    }
    found = [name for name, is_left in left.items() if is_left]
    if found:
        forward_hooks.unwind()
        torch.set_autocast_enabled('cpu', False)
        pytest.fail(f'left behind: {", ".join(found)}')
