"""Runs in an environment of its own: see ``make test-downstream``."""

from __future__ import annotations

import logging
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / 'support')]

from torchvision_schemas import declare_torchvision_ops

declare_torchvision_ops()

import torch
import types_seen  # noqa: F401  (registers the evaluator)
from zoo import CASES, Case

import amp_wrapper  # noqa: F401

LEVELS = ('O1', 'O2', 'O4', 'O5')


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
