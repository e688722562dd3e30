"""Runs in an environment of its own: see ``make test-downstream``."""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import os
import platform
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / 'support')]

from torchvision_schemas import declare_torchvision_ops

declare_torchvision_ops()

import torch
import types_seen  # noqa: F401  (registers the evaluator)
from zoo import CASES, Case

import amp_wrapper  # noqa: F401

LEVELS = ('O1', 'O2', 'O4', 'O5')


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption('--results', help='folder for what was measured, one JSON file a test')


@pytest.fixture(autouse=True)
def one_thread_and_quiet() -> None:
    # two workers share two cores
    torch.set_num_threads(1)
    logging.getLogger('mmengine').setLevel(logging.ERROR)


@pytest.fixture(params=CASES, ids=lambda case: case.slug)
def case(request: pytest.FixtureRequest) -> Case:
    skip_without_ops(request.param.project)
    return request.param


def skip_without_ops(project: str) -> None:
    """mmdetection and mmsegmentation cannot even be imported beside mmcv-lite."""
    if project != 'mmpretrain' and find_spec('mmcv._ext') is None:
        pytest.skip(f'{project} imports the compiled ops of mmcv, and this is mmcv-lite')


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> str:
    return request.param


def where() -> str:
    """Date, machine and versions of this run."""
    versions = [f'Python {platform.python_version()}', f'torch {torch.__version__}']
    for name in ('mmengine', 'mmcv', 'mmcv-lite', 'mmpretrain', 'mmsegmentation', 'mmdet'):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions.append(f'{name} {metadata.version(name)}')
    return f'{datetime.date.today()}, {platform.machine()} CPU with {os.cpu_count()} cores, {", ".join(versions)}'


@pytest.fixture
def keep(request: pytest.FixtureRequest) -> Any:
    """A function that writes what a test measured, for the table in the docs."""
    folder = request.config.getoption('--results')

    def write(name: str, row: dict[str, Any]) -> None:
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            (Path(folder) / f'{name}.json').write_text(json.dumps({**row, 'where': where()}))

    return write
