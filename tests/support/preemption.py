"""Hooks for trainings that a signal ends, and configs with them."""

from __future__ import annotations

import copy
import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

from mmengine.hooks import Hook
from mmengine.registry import HOOKS


@HOOKS.register_module()
class SendSignal(Hook):
    """Sends a signal to its own process in the middle of an iteration, or of a validation."""

    def __init__(self, iteration: int, where: str = 'train', number: str = 'SIGTERM', rank: int = 0) -> None:
        self.iteration, self.where, self.number, self.rank = iteration, where, signal.Signals[number], rank

    def _send(self, runner: Any) -> None:
        if runner.iter == self.iteration and runner.rank == self.rank:
            os.kill(os.getpid(), self.number)

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        if self.where == 'train':
            self._send(runner)

    def before_val_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        if self.where == 'val':
            self._send(runner)


@HOOKS.register_module()
class Marks(Hook):
    """Tells the outside where the run is, and waits a moment for the answer."""

    def __init__(self, iteration: int) -> None:
        self.iteration = iteration

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        if runner.iter == self.iteration:
            (Path(runner.work_dir) / 'mark').write_text('')
            time.sleep(1)


def _wait(runs: Any) -> None:
    runs.set()
    time.sleep(30)


@HOOKS.register_module()
class Forks(Hook):
    """Forks a process that waits, ends it with SIGTERM, and writes its exit code."""

    def __init__(self, iteration: int) -> None:
        self.iteration = iteration

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        if runner.iter == self.iteration:
            context = multiprocessing.get_context('fork')
            # Python drops signals that arrive while a process is being forked
            runs = context.Event()
            process = context.Process(target=_wait, args=(runs,))
            process.start()
            assert runs.wait(20)
            process.terminate()
            process.join(20)
            process.kill()
            (Path(runner.work_dir) / 'ended').write_text(str(process.exitcode))


def with_hooks(case: dict[str, Any], *hooks: dict[str, Any]) -> dict[str, Any]:
    case = copy.deepcopy(case)
    case['custom_hooks'] = [*case['custom_hooks'], *hooks]
    return case


PREEMPTION = dict(type='amp_wrapper.PreemptionHook')


def under_default_hooks(case: dict[str, Any]) -> dict[str, Any]:
    """A copy of a config that has the hooks of this package under ``default_hooks``."""
    case = copy.deepcopy(case)
    own = [hook for hook in case['custom_hooks'] if hook['type'].startswith('amp_wrapper.')]
    case['custom_hooks'] = [hook for hook in case['custom_hooks'] if hook not in own]
    case['default_hooks'].update({hook['type'].rpartition('.')[2].lower(): hook for hook in own})
    return case
