"""What the tests of checkpoints share: runners that start quickly, and files of this package at each level."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import foreign
import pytest
import toy


@pytest.fixture(scope='module', autouse=True)
def _quick() -> Iterator[None]:
    with toy.quick_runners():
        yield


@pytest.fixture(scope='session')
def own_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Any]]]:
    """A run of our wrapper at each level: its last file, and what it had in memory when that was written."""
    folder = tmp_path_factory.mktemp('own')
    runs = {}
    for level in toy.LEVELS:
        scale = dict(loss_scale=foreign.SCALER) if level in ('O1', 'O2') else {}
        wrapper = dict(type='AmpOptimWrapper', opt_level=level, optimizer=foreign.SGD, **scale)
        with toy.quick_runners():
            runner = foreign.run(folder / level, wrapper)
        masters = [tensor.detach().clone() for tensor in runner.optim_wrapper.master_params()]
        state = copy.deepcopy(runner.optim_wrapper.optimizer.state_dict()['state'])
        scaler = runner.optim_wrapper.loss_scaler.state_dict()
        runs[level] = (folder / level / 'epoch_2.pth', dict(masters=masters, state=state, scaler=scaler))
    return runs
