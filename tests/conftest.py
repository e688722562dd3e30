"""One flag for all tests: ``pytest --device cuda`` runs the same tests on a GPU."""

from __future__ import annotations

import gc
import logging
import os
import sys
from contextlib import nullcontext
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

# before torch starts its threads: two workers on two cores, and bit-exact sums that do not depend on their number
os.environ.setdefault('OMP_NUM_THREADS', '1')
# processes that tests start import what the tests share, too
SHARED = str(Path(__file__).parent / 'lib')
if SHARED not in os.environ.get('PYTHONPATH', '').split(os.pathsep):
    os.environ['PYTHONPATH'] = os.pathsep.join(filter(None, [SHARED, os.environ.get('PYTHONPATH')]))

from collections.abc import Iterator

import pairs
import pytest
import torch
import torch._dynamo
from hypothesis import Phase, settings
from missing import SkipsWhatLacksAPackage, missing
from op_lists import ops_from, skip_without_library
from torch.optim.optimizer import _global_optimizer_pre_hooks

from amp_wrapper.casting import region

# for planted faults: that there is an example is enough
settings.register_profile('any-example', phases=[Phase.explicit, Phase.generate])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption('--device', default='cpu', choices=('cpu', 'cuda'), help='where tensors live')
    parser.addoption('--full', action='store_true', help='all combinations where others try pairs; and what takes long')


def pytest_configure(config: pytest.Config) -> None:
    pairs.full = config.getoption('--full')
    absent = missing()
    if find_spec('mmengine') is not None:
        # tests read checkpoints of runners, whose classes torch.load knows by this
        import_module('amp_wrapper.openmmlab')
    if absent:
        config.pluginmanager.register(SkipsWhatLacksAPackage(absent))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What starts compilers and whole trainings comes first, so that no worker is left alone with it at the end."""
    if not config.getoption('--full'):
        items[:] = [item for item in items if item.get_closest_marker('long') is None]
    long = {'system', 'tools', 'distributed', 'test_cuda_sources'}
    items.sort(key=lambda item: long.isdisjoint((item.path.parent.name, item.path.stem)))


@pytest.fixture(scope='module', autouse=True)
def few_objects_to_collect() -> None:
    """amp.initialize and many tests collect garbage: not each time all that was imported, and what earlier files have left."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope='session')
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device under test; asking for an absent GPU is an error, not a skip."""
    name = request.config.getoption('--device')
    if name == 'cuda' and not torch.cuda.is_available():
        raise pytest.UsageError('--device cuda, but torch sees no GPU')
    return torch.device(name)


@pytest.fixture(params=['compiled', 'without ops'])
def with_and_without_ops(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs a test as things are here, and once more as if no library had been built."""
    with nullcontext() if request.param == 'compiled' else ops_from('torch'):
        yield


@pytest.fixture
def library(device: torch.device) -> None:
    """For tests of what only compiled kernels do."""
    skip_without_library(device)


@pytest.fixture
def log() -> Iterator[list[str]]:
    """Lines of the package's logger with their levels, whether or not it propagates."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(f'{record.levelname} {record.getMessage()}')  # type: ignore[method-assign]
    logger = logging.getLogger('amp_wrapper')
    before = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)
    logger.setLevel(before)


@pytest.fixture(autouse=True)
def _same_start(request: pytest.FixtureRequest, device: torch.device) -> None:
    """Tests of these folders make all tensors where they are asked for; others name the device."""
    if device.type != 'cpu':
        torch.set_default_device(device if request.path.parent.name in ('amp', 'engine') else None)
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)


def _left_behind() -> list[str]:
    """What is open on this thread, or in this process, that no test may leave open."""
    hooks = _global_optimizer_pre_hooks
    left = {
        'a region': region.is_open() or torch.is_autocast_enabled(region.OPERANDS_SPARE),
        'suspended casts': region.is_suspended(),
        'autocast': torch.is_autocast_enabled('cpu') or torch.is_autocast_enabled('cuda'),
        # steps wait for the host where there are any but those of the package
        'hooks of all optimizers': any(not hasattr(hook, 'sees_no_gradient') for hook in hooks.values()),
        'no gradients': not torch.is_grad_enabled(),
    }
    return [name for name, is_left in left.items() if is_left]


def _close_everything() -> None:
    for device in ('cpu', 'cuda', region.SPARE, region.OPERANDS_SPARE, region.SUSPENDED_SPARE):
        torch.set_autocast_enabled(device, False)
    torch.clear_autocast_cache()
    torch.set_grad_enabled(True)


@pytest.fixture(autouse=True)
def _nothing_global_is_left() -> Iterator[None]:
    """Whatever a test does, and however it ends: no region is open afterwards, for the next test or for anybody else.

    What torch.compile keeps is dropped: a compiler that fails in the middle of a region leaves its code behind, too.
    pytest keeps the traceback of the last failure, and with it models and optimizers that later tests would find alive;
    for good, where the next file freezes them.
    """
    yield
    for name in ('last_type', 'last_value', 'last_traceback', 'last_exc'):
        vars(sys).pop(name, None)
    torch._dynamo.reset()
    found = _left_behind()
    if found:
        _close_everything()
        pytest.fail(f'left behind: {", ".join(found)}')
