"""The hook that saves and ends a training when the machine is about to be taken away."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed
from mmengine.dist import barrier, get_world_size, is_main_process
from mmengine.hooks import CheckpointHook, Hook
from mmengine.optim import OptimWrapperDict

from ...checkpoint import file as checkpoint_file
from ...errors import AmpConfigError
from ...policy.options import is_whole
from ...registry import HOOKS
from .. import shard_files
from ..patches.saving import PREEMPTED, collect_states, is_local, mark_save
from .data_order import restart_iterator
from .data_workers import protect_workers
from .exact_resume import ExactResumeHook


def _is_accumulating(runner: Any) -> bool:
    """Whether gradients wait for a step in any wrapper, ours or not."""
    wrapper = runner.optim_wrapper
    members = wrapper.values() if isinstance(wrapper, OptimWrapperDict) else [wrapper]
    return any(member.in_window if hasattr(member, 'in_window') else not member.should_update() for member in members)


def _runs(loop: Any, frame: FrameType | None) -> bool:
    """Whether a method of a loop is among the calls that a frame is in."""
    while frame is not None:
        if frame.f_locals.get('self') is loop:
            return True
        frame = frame.f_back
    return False


@HOOKS.register_module()
class PreemptionHook(Hook):
    """On SIGTERM, saves a checkpoint at the next step boundary and ends the process.

    ``default_hooks=dict(preemption=dict(type='amp_wrapper.PreemptionHook'))``, or ``amp-wrapper train --save-on-sigterm``.
    The step boundary is the end of the running iteration, or of the accumulation that it is in; during a validation, the
    end of the iteration after it. With several processes a signal to any of them counts for all: they exchange one number
    an iteration, on the CPU over gloo. The checkpoint is ``preempted.pth``: a resume without a path finds it, and it is
    removed once the next regular checkpoint is written.

    Args:
        signals: Names of the signals.
        exit_code: Of the process, after saving.

    Raises:
        AmpConfigError: A name that is no signal, or one that cannot be caught; an exit code out of 0 to 255.
    """

    priority = 'LOWEST'

    def __init__(self, signals: Sequence[str] = ('SIGTERM',), exit_code: int = 0) -> None:
        problems = []
        names = [signals] if isinstance(signals, str) else list(signals)
        for name in names:
            if name not in signal.Signals.__members__ or name in ('SIGKILL', 'SIGSTOP'):
                problems.append(f"signals={name!r} is no signal that can be caught: write 'SIGTERM' or 'SIGUSR1', say.")
        if not is_whole(exit_code, 0, 256):
            problems.append(f'exit_code={exit_code!r} must be a whole number from 0 to 255.')
        if problems:
            raise AmpConfigError(problems)
        self.signals = [signal.Signals[name] for name in names]
        self.exit_code = int(exit_code)
        self._received = ''
        self._process = 0
        self._loop: Any = None
        self._before: dict[signal.Signals, Any] = {}
        self._group: Any = None

    def before_train(self, runner: Any) -> None:
        """Begin to listen."""
        if threading.current_thread() is not threading.main_thread():
            runner.logger.warning(
                'amp: PreemptionHook does nothing outside the main thread: signals do not arrive there'
            )
            return
        self._received = ''
        self._process, self._loop = os.getpid(), runner.train_loop
        self._protect_workers(runner)
        if not any(isinstance(hook, ExactResumeHook) for hook in runner.hooks):
            runner.logger.warning(
                'amp: PreemptionHook saves in the middle of epochs, which mmengine begins again after a resume: add '
                "dict(type='amp_wrapper.ExactResumeHook') to custom_hooks"
            )
        if get_world_size() > 1:
            self._group = torch.distributed.new_group(backend='gloo')
        for number in self.signals:
            self._before[number] = signal.signal(number, self._receive)

    def _protect_workers(self, runner: Any) -> None:
        """Schedulers send the signal to every process, and a data worker that dies of it would take the training along."""
        for loop in (runner.train_loop, runner.val_loop):
            if protect_workers(getattr(loop, 'dataloader', None), self.signals):
                restart_iterator(loop)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._process and _runs(self._loop, frame):
            # nothing but a note: whatever runs now must come to its end
            self._received = signal.Signals(number).name
        else:
            # a process that was forked from the training, or one whose training has ended with an error
            self._restore_signals()
            os.kill(os.getpid(), number)

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Save and end the process, if any rank has got a signal and the step is complete."""
        if not self._before or not self._is_time() or _is_accumulating(runner):
            return
        path = self._save(runner)
        self._stop_listening()
        runner.logger.warning(
            f'amp: {self._received or "a signal to another process"}: saved {path} after iteration {runner.iter + 1}, and the '
            f'training ends here. Go on with --resume.'
        )
        raise SystemExit(self.exit_code)

    def _is_time(self) -> bool:
        if self._group is None:
            return bool(self._received)
        anyone = torch.tensor(int(bool(self._received)))
        torch.distributed.all_reduce(anyone, op=torch.distributed.ReduceOp.MAX, group=self._group)
        return bool(anyone)

    def _save(self, runner: Any) -> str:
        savers = [hook for hook in runner.hooks if isinstance(hook, CheckpointHook)]
        folder = (
            savers[0].out_dir if savers and is_local(savers[0].out_dir, savers[0].backend_args) else runner.work_dir
        )
        path = str(Path(folder) / PREEMPTED)
        collect_states(runner)
        mark_save(runner)
        runner.save_checkpoint(
            folder, PREEMPTED, meta=dict(epoch=runner.epoch, iter=runner.iter + 1), by_epoch=False, save_optimizer=True
        )
        # the process ends after this
        shard_files.settle(runner)
        if is_main_process():
            checkpoint_file.write_text(path, Path(runner.work_dir) / 'last_checkpoint')
        barrier()
        return path

    def after_train(self, runner: Any) -> None:
        """The training is over: signals mean again what they meant before."""
        self._stop_listening()

    def _restore_signals(self) -> None:
        for number, handler in self._before.items():
            # None: a handler that Python does not know
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before.clear()
        self._loop = None

    def _stop_listening(self) -> None:
        self._restore_signals()
        group, self._group = self._group, None
        if group is not None:
            # its threads could abort a process that ends under them
            barrier(group)
            torch.distributed.destroy_process_group(group)
