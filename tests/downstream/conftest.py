"""Runs in an environment of its own: see ``nox -s downstream``."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / 'distributed'))


@pytest.fixture(autouse=True)
def one_thread_and_quiet() -> None:
    # two workers share two cores
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(False)
    logging.getLogger('mmengine').setLevel(logging.ERROR)
