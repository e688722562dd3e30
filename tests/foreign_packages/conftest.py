"""Runs in an environment of its own: see ``make test-foreign``."""

from __future__ import annotations

import contextlib
import datetime
import gc
import importlib
import json
import logging
import os
import platform
import re
import sys
import types
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / 'support')]

from torchvision_schemas import declare_torchvision_ops

declare_torchvision_ops()

import torch

#: Of the results page, beside those of the packages that are tried.
_VERSIONS = ('torch', 'mmengine', 'mmcv', 'torchvision', 'numpy')


def _stand_in(name: str, real: str) -> None:
    """``real`` under the name of a package that does not load here."""
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
        return
    module = types.ModuleType(name)
    module.__path__ = []  # type: ignore[attr-defined]
    sys.modules[name] = module
    for part in ('coco', 'cocoeval', 'mask'):
        found = importlib.import_module(f'{real}.{part}')
        sys.modules[f'{name}.{part}'] = found
        setattr(module, part, found)


# the wheel of xtcocotools does not load beside numpy 2.4
_stand_in('xtcocotools', 'pycocotools')
# the wheel of mmaction2 lacks a folder that its own __init__ imports
sys.modules.setdefault('mmaction.models.localizers.drn', types.ModuleType('drn'))
sys.modules.setdefault('mmaction.models.localizers.drn.drn', types.ModuleType('drn'))
# and its models of pictures and words want a transformers of long ago
sys.modules.setdefault('mmaction.models.multimodal', types.ModuleType('multimodal'))
sys.modules['mmaction.models.localizers.drn.drn'].DRN = type('DRN', (), {})  # type: ignore[attr-defined]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption('--results', help='folder for the verdicts, one JSON file a test')


@pytest.fixture(scope='module', autouse=True)
def quick_collections() -> Iterator[None]:
    """Each session of ``amp`` looks for dead ones before it, among what is new since here alone."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def one_thread_and_quiet() -> Iterator[None]:
    # two workers share two cores
    torch.set_num_threads(1)
    logging.getLogger('mmengine').setLevel(logging.ERROR)
    random = torch.get_rng_state()
    yield
    torch.set_rng_state(random)


@pytest.fixture
def row(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What the table of results says of this test: package, what was tried, level, api; verdict and numbers at the end."""
    request.node.foreign_row = found = {}
    return found


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Iterator[None]:
    report = (yield).get_result()
    found = getattr(item, 'foreign_row', None)
    folder = item.config.getoption('--results')
    if not folder or not found or call.when != 'call':
        return
    found['passed'] = bool(report.passed)
    if call.excinfo is not None:
        found['verdict'] = f'fails: {call.excinfo.typename}'
        found['why'] = str(call.excinfo.value)[:400]
    Path(folder).mkdir(parents=True, exist_ok=True)
    name = re.sub(r'[^\w.-]+', '_', item.nodeid.rpartition('/')[2])
    (Path(folder) / f'{name}.json').write_text(json.dumps({**found, 'seconds': report.duration, 'where': where()}))


def where() -> str:
    """Date, machine and versions of this run."""
    versions = [f'Python {platform.python_version()}']
    for name in _VERSIONS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions.append(f'{name} {metadata.version(name)}')
    return f'{datetime.date.today()}, {platform.machine()} CPU with {os.cpu_count()} cores, {", ".join(versions)}'
