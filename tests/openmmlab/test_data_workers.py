"""Data workers during a preemption: nothing ends them but their training, and a training ends with them."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from command_line import python
from grid import but, long
from torch.utils.data import DataLoader

from amp_wrapper.openmmlab.resume import data_workers

BEGIN = """
import ctypes, multiprocessing, os, pathlib, signal, subprocess, sys, time
import toy
from mmengine.hooks import Hook
from mmengine.registry import DATASETS, HOOKS
from preemption import PREEMPTION, with_hooks

folder = pathlib.Path(sys.argv[1])

@HOOKS.register_module()
class Act(Hook):
    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if runner.iter == 2:
            act()

def train(by_epoch, dataset='ToyData', hooks=(PREEMPTION,), **loader):
    case = with_hooks(toy.everything('O5', by_epoch, num_workers=2, max_epochs=1), *hooks, dict(type='Act'))
    case['train_dataloader'].update(loader)
    case['train_dataloader']['dataset']['type'] = dataset
    toy.run(folder, **case)

def act():
    pass
"""
#: A worker that hangs in C, where no handler written in Python would run.
STUCK = """
@DATASETS.register_module()
class Stuck(toy.ToyData):
    seen = 0
    def __getitem__(self, index):
        Stuck.seen += 1
        if Stuck.seen == 15:
            (folder / 'stuck').write_text('')
            mutex, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
            libc.pthread_mutex_lock(mutex)
            libc.pthread_mutex_lock(mutex)
        return super().__getitem__(index)

def act():
    while not (folder / 'stuck').exists():
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGTERM)

train(True, 'Stuck')
"""
#: As a decoder in a process of its own, while a scheduler signals all of a job.
SUBPROCESS = """
@DATASETS.register_module()
class Decoded(toy.ToyData):
    def __getitem__(self, index):
        subprocess.run(['sleep', '0.2'], check=True)
        return super().__getitem__(index)

def act():
    os.killpg(0, signal.SIGTERM)

train(True, 'Decoded')
"""
#: The training has failed; the program goes on.
FAILED = """
def act():
    raise ValueError('of the training')

try:
    train(True, num_workers=0)
except ValueError:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
"""
#: A second training, of the same data, in a process that is forked from the first one.
AGAIN = """
train(False, persistent_workers=True)
child = multiprocessing.get_context('fork').Process(target=train, args=(False,), kwargs=dict(persistent_workers=True))
child.start()
child.join(60)
sys.exit(child.exitcode is None or child.exitcode)
"""


@pytest.mark.parametrize(
    ('script', 'code', 'saves'),
    but(
        [(STUCK, 0, True), (SUBPROCESS, 0, True), (FAILED, -signal.SIGTERM, False)],
        [(STUCK, 0, True), (SUBPROCESS, 0, True), (FAILED, -signal.SIGTERM, False), (AGAIN, 0, False)],
        long,
    ),
    ids=['stuck', 'subprocess', 'failed', 'again'],
)
def test_how_a_process_ends(tmp_path: Path, script: str, code: int, saves: bool) -> None:
    done = python('-c', BEGIN + script, tmp_path, timeout=100)
    said = done.stdout + done.stderr
    assert done.returncode == code, said[-3000:]
    assert 'is killed by signal' not in said
    assert (tmp_path / 'preempted.pth').exists() == saves


def test_a_loader_is_changed_once() -> None:
    loader: DataLoader[Any] = DataLoader(list(range(4)), num_workers=1, worker_init_fn=print)
    assert data_workers.protect_workers(loader, [signal.SIGTERM])
    first: Any = loader.worker_init_fn
    assert first.then is print
    assert not data_workers.protect_workers(loader, [signal.SIGTERM]) and loader.worker_init_fn is first
    assert copy.deepcopy(first).then is print
    # another hook, with other signals
    assert data_workers.protect_workers(loader, [signal.SIGTERM, signal.SIGUSR1])
    again: Any = loader.worker_init_fn
    assert again.then is print and again.signals == (signal.SIGTERM, signal.SIGUSR1)
    for other in (DataLoader(list(range(4))), [1, 2], None):
        assert not data_workers.protect_workers(other, [signal.SIGTERM])


def test_places_of_workers_that_have_ended_are_used_again() -> None:
    protected = data_workers._Protected()
    ended = subprocess.Popen(['true'])
    ended.wait()
    size, own = len(protected._ids), os.getpid()
    # its own place and the next one are taken, by a process that runs and by one that does not any more
    protected._ids[own % size], protected._ids[(own + 1) % size] = os.getppid(), ended.pid
    protected.add()
    assert [protected._ids[(own + offset) % size] for offset in range(3)] == [os.getppid(), own, 0]


def test_workers_of_other_processes_ignore_nothing() -> None:
    protected = data_workers._Protected()
    before = signal.getsignal(signal.SIGUSR1)
    seen: list[int] = []
    # this process is no worker
    data_workers._IgnoreSignals([signal.SIGUSR1], seen.append, protected)(3)
    assert seen == [3] and signal.getsignal(signal.SIGUSR1) is before
