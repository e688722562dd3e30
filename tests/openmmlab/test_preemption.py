"""SIGTERM: saved at the next step boundary, ended cleanly, and gone on from as if nothing had happened."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import crash_harness
import forked
import pytest
import torch
import toy
from bits import differences
from command_line import python
from grid import but, grid, long
from preemption import PREEMPTION, under_default_hooks, with_hooks

from amp_wrapper import AmpConfigError
from amp_wrapper.openmmlab.resume.preemption import PreemptionHook

REPOSITORY = Path(__file__).parents[2]
WORKER = REPOSITORY / 'tests' / 'support' / 'ddp_preemption_worker.py'


@pytest.mark.parametrize(
    ('level', 'by_epoch', 'where', 'sent', 'saved'),
    [
        # accumulations of two: the signal in the first iteration of an accumulation waits for the second
        ('O2', True, 'train', 10, 12),
        pytest.param('O5', True, 'train', 9, 10, marks=long),
        pytest.param('O1', False, 'train', 10, 12, marks=long),
        # a validation comes to its end, and an iteration after it
        ('O5', True, 'val', 14, 16),
        # the last iteration of an epoch
        pytest.param('O5', True, 'train', 13, 14, marks=grid),
    ],
)
def test_saved_at_the_step_boundary_and_gone_on_from(
    tmp_path: Path, level: str, by_epoch: bool, where: str, sent: int, saved: int
) -> None:
    case = toy.everything(level, by_epoch)
    whole, part = tmp_path / 'whole', tmp_path / 'part'
    for folder in (whole, part):
        folder.mkdir()
    crash_harness.finish(whole, case)
    stopped = with_hooks(case, PREEMPTION, dict(type='SendSignal', iteration=sent, where=where))
    if where == 'val':
        # hooks stand there in a config that keeps those of its base
        case, stopped = under_default_hooks(case), under_default_hooks(stopped)
    assert forked.wait(crash_harness.start(part, stopped), 120) == 0
    file = toy.checkpoint(part, 'preempted.pth')
    assert file['meta']['iter'] == saved
    window = file['optimizer'].get('amp') or file['optimizer']['loss_scaler']['amp']
    assert 'window' not in window
    assert (part / 'last_checkpoint').read_text() == str(part / 'preempted.pth')
    crash_harness.finish(part, case)
    assert differences(crash_harness.result(whole), crash_harness.result(part)) == []
    # another checkpoint has taken its place
    assert not (part / 'preempted.pth').exists()


def test_the_signal_means_again_what_it_meant(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    runner = toy.run(tmp_path, **with_hooks(toy.everything('O5', max_epochs=1), PREEMPTION))
    assert runner.epoch == 1 and signal.getsignal(signal.SIGTERM) is before
    hooks = (
        dict(PREEMPTION, signals=['SIGUSR1'], exit_code=3),
        dict(type='SendSignal', iteration=1, number='SIGUSR1'),
    )
    case = with_hooks(toy.everything('O5', max_epochs=1), *hooks)
    with pytest.raises(SystemExit) as caught:
        toy.run(tmp_path / 'b', **case)
    assert caught.value.code == 3
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_other_wrappers_wait_for_their_step_too(tmp_path: Path) -> None:
    case = toy.everything('O0')
    case['optim_wrapper'] = dict(type='OptimWrapper', optimizer=dict(type='SGD', lr=0.1), accumulative_counts=2)
    with pytest.raises(SystemExit):
        toy.run(tmp_path, **with_hooks(case, PREEMPTION, dict(type='SendSignal', iteration=2)))
    assert toy.checkpoint(tmp_path, 'preempted.pth')['meta']['iter'] == 4


def test_every_problem_is_named() -> None:
    with pytest.raises(AmpConfigError, match=r"SIGKILL(.|\n)*'TERM'(.|\n)*exit_code=300"):
        PreemptionHook(signals=['SIGKILL', 'TERM'], exit_code=300)


@pytest.mark.timeout(300)
def test_two_processes_agree(tmp_path: Path) -> None:
    """The signal reaches one rank only; both save and end in the same iteration."""
    done = python('-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2', WORKER, tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    left, right = (toy.checkpoint(tmp_path / name) for name in ('whole', 'part'))
    assert (tmp_path / 'saved').read_text() == '6'
    for key in ('state_dict', 'optimizer', 'exact_resume', 'param_schedulers'):
        assert differences(left[key], right[key]) == [], key
    assert len(left['exact_resume']['ranks']) == 2
    states = [rank['now']['torch'] for rank in left['exact_resume']['ranks']]
    # each rank has drawn for itself
    assert not torch.equal(*states)
    # and has its own running statistics, with which it validates
    assert set(left['exact_resume']['ranks'][1]['statistics']) == {
        'bn.running_mean',
        'bn.running_var',
        'bn.num_batches_tracked',
    }
    assert differences(*(file['message_hub']['runtime_info']['best_score'] for file in (left, right))) == []


@grid
@pytest.mark.timeout(300)
def test_the_command(tmp_path: Path) -> None:
    """As a preempted user sees it."""
    command = [sys.executable, 'tools/train.py', 'configs/digits/cnn_o5.py', '--work-dir', str(tmp_path)]
    process = subprocess.Popen(
        [*command, '--save-on-sigterm'], cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if 'Saving checkpoint at 2 epochs' in line:
            process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0, ''.join(lines[-20:])
    assert 'amp: SIGTERM: saved' in lines[-1] and 'Go on with --resume.' in lines[-1]
    begin = time.monotonic()
    done = python(*command[1:], '--resume')
    assert done.returncode == 0, done.stderr[-3000:]
    assert 'resuming from' in done.stdout and 'preempted.pth' in done.stdout
    assert 'Finished: epoch 10, iteration 230' in done.stdout and time.monotonic() > begin


@pytest.mark.parametrize('by_epoch', [True, False])
def test_a_signal_to_the_whole_group_spares_the_data_workers(tmp_path: Path, by_epoch: bool) -> None:
    """As cluster schedulers send it."""
    case = toy.everything('O5', by_epoch, num_workers=2)
    case['train_dataloader'].update(persistent_workers=not by_epoch)
    whole, part = tmp_path / 'whole', tmp_path / 'part'
    for folder in (whole, part):
        folder.mkdir()
    crash_harness.finish(whole, case)
    process = crash_harness.start(part, with_hooks(case, PREEMPTION, dict(type='Marks', iteration=10)))
    assert forked.wait(process, 60, (part / 'mark').exists) is None
    os.killpg(process.pid, signal.SIGTERM)
    code = forked.wait(process, 60)
    assert code == 0, (tmp_path / 'part.log').read_text()[-3000:]
    assert 12 <= toy.checkpoint(part, 'preempted.pth')['meta']['iter'] <= 28
    crash_harness.finish(part, case)
    assert differences(crash_harness.result(whole), crash_harness.result(part)) == []
    # nobody is left behind
    end = time.monotonic() + 20
    while subprocess.run(['pgrep', '-g', str(process.pid)], capture_output=True).returncode == 0:
        assert time.monotonic() < end
        time.sleep(0.2)


@pytest.mark.parametrize(
    ('by_epoch', 'sent', 'start'),
    but(
        [(False, 3, 'fork')],
        itertools.product([True, False], [3, None], ['fork', 'spawn', 'forkserver']),
        long,
    ),
)
def test_a_process_with_data_workers_ends(tmp_path: Path, by_epoch: bool, sent: int | None, start: str) -> None:
    """An interpreter that runs nothing but the training, with workers that are still there when it ends."""
    workers = 8 if start == 'fork' else 2
    hooks = f"PREEMPTION, *([] if {sent} is None else [dict(type='SendSignal', iteration={sent})])"
    script = (
        'import pathlib, toy\n'
        'from preemption import PREEMPTION, with_hooks\n'
        f"case = with_hooks(toy.everything('O5', {by_epoch}, num_workers={workers}, max_epochs=1), {hooks})\n"
        f"case['train_dataloader'].update(multiprocessing_context={start!r}, persistent_workers=True)\n"
        f'toy.run(pathlib.Path({str(tmp_path)!r}), **case)\n'
    )
    done = python('-c', script, timeout=60)
    assert done.returncode == 0, done.stderr[-3000:]
    # nor does torch take their end for a failure
    assert 'killed by signal' not in done.stderr
    assert (tmp_path / 'preempted.pth').exists() == (sent is not None)


def test_a_forked_process_ends_by_the_signal(tmp_path: Path) -> None:
    """One that is forked during the training, as by a hook, does not keep the hook's handler."""
    with_fork = dict(type='Forks', iteration=2)
    toy.run(tmp_path, **with_hooks(toy.everything('O5', max_epochs=1), PREEMPTION, with_fork))
    assert (tmp_path / 'ended').read_text() == str(-signal.SIGTERM)


def test_without_the_hook_of_exact_resumes_it_says_so(tmp_path: Path) -> None:
    case = toy.everything('O5', max_epochs=1)
    case['custom_hooks'] = [PREEMPTION]
    with toy.run_log() as lines:
        toy.run(tmp_path, **case)
    assert any('PreemptionHook saves in the middle of epochs' in line for line in lines)
