"""Runs everything that needs a GPU, in stages with a budget of seconds: ``python -m benchmarks.gpu_check --stage ops``.

It names what the machine lacks, leaves out what needs that, and writes a page for each stage. Without a GPU, and with
``--dry``, it prints what it would run.

Exit codes: 0 nothing failed, 1 something failed or took too long, 3 there is no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import torch

from .machine import RESULTS, ROOT, facts, table

STAGES = ('ops', 'step', 'engine', 'end-to-end', 'sanitizer', 'ddp')
#: The folders of tests of a stage; ``engine`` has all others that take a device.
TESTS = {'ops': ('ops',), 'step': ('optim', 'engine'), 'ddp': ('distributed',)}
ELSEWHERE = ('downstream', 'foreign_packages')
PASSED, FAILED, LATE, SKIPPED = 'passed', 'failed', 'out of time', 'skipped'


@dataclasses.dataclass(frozen=True)
class Job:
    """One process.

    Attributes:
        command: Its words; the first is the interpreter or a tool.
        needs: Keys of :func:`missing` with which it is left out.
        env: Variables beside the present ones.
    """

    command: tuple[str, ...]
    needs: tuple[str, ...] = ('gpu',)
    env: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        words = ['python' if word == sys.executable else word for word in self.command]
        return ' '.join([*(f'{name}={value}' for name, value in self.env), shlex.join(words)])


@dataclasses.dataclass(frozen=True)
class Step:
    """Jobs that wait for nothing but the step before.

    Attributes:
        jobs: The processes.
        workers: How many run at once.
        share: Of the time of the stage, beside those of the steps that follow it.
    """

    jobs: tuple[Job, ...]
    workers: int = 1
    share: float = 1.0


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Result of a job: status, seconds, and the end of its output or why it was left out."""

    job: Job
    status: str
    seconds: float = 0.0
    detail: str = ''

    @property
    def last(self) -> str:
        """The last line of the output."""
        return self.detail.rpartition('\n')[2].replace('|', '\\|')


# -- what is run -------------------------------------------------------------------------------------------------------


def missing() -> dict[str, str]:
    """Return what this machine lacks, and what to do about it."""
    gpus = torch.cuda.device_count()
    programs, packages = ('nvcc', 'compute-sanitizer'), ('pytest', 'hypothesis', 'mmengine', 'ninja')
    remedies = {
        'gpu': '' if gpus else 'torch sees no GPU',
        'second gpu': '' if gpus > 1 else 'two ranks of nccl need two GPUs',
        **{name: '' if shutil.which(name) else f'no {name}: the CUDA toolkit has it' for name in programs},
        **{name: '' if importlib.util.find_spec(name) else f'pip install {name}' for name in packages},
    }
    return {name: remedy for name, remedy in remedies.items() if remedy}


def python(*words: str, needs: Sequence[str] = ('gpu',)) -> Job:
    """Return a job that runs a module."""
    return Job((sys.executable, '-m', *words), tuple(needs))


def pytest(device: str, *words: str) -> tuple[str, ...]:
    """Return the words that run files of tests."""
    return (sys.executable, '-m', 'pytest', '-q', '-rs', '-p', 'no:cacheprovider', '--device', device, *words)


def device_tests(stage: str, device: str, *needs: str) -> Step:
    """Return the files of tests of a stage that take a device, each in a process: an error of CUDA stays in it."""
    elsewhere = {*ELSEWHERE, *(folder for folders in TESTS.values() for folder in folders)}
    jobs = []
    for path in sorted((ROOT / 'tests').rglob('test_*.py')):
        folder = path.parent.name
        # ranks get their device from a fixture; scripts of steps make their tensors where --device says
        takes = re.search(r'def \w+\([^)]*\bdevice\b|from on_ranks import', path.read_text(encoding='utf-8'))
        if (takes or folder in ('amp', 'engine')) and folder in TESTS.get(stage, {folder} - elsewhere):
            command = pytest(device, str(path.relative_to(ROOT)))
            jobs.append(Job(command, (*needs, 'pytest', 'hypothesis'), (('OMP_NUM_THREADS', '1'),)))
    return Step(tuple(jobs), workers=max(1, (os.cpu_count() or 2) // 2), share=3)


def sanitizer(check: str) -> Job:
    """Return the parity tests of the ops under compute-sanitizer."""
    tests = pytest('cuda', '-x', 'tests/ops/test_lists.py', 'tests/ops/test_steps.py')
    command = ('compute-sanitizer', '--tool', check, '--error-exitcode', '99', *tests)
    needs = ('gpu', 'compute-sanitizer', 'pytest', 'hypothesis')
    return Job(command, needs, (('PYTORCH_NO_CUDA_MEMORY_CACHING', '1'),))


def steps(stage: str) -> list[Step]:
    """Return what a stage does, in order."""
    cuda, rounds = ('--device', 'cuda', '--write'), ('--rounds', '5')
    if stage == 'ops':
        build = python('amp_wrapper', 'build-ops', '--cuda', needs=('gpu', 'nvcc', 'ninja'))
        bench = python('benchmarks.ops', *rounds, *cuda)
        return [Step((build,), share=3), device_tests(stage, 'cuda', 'gpu'), Step((bench,), share=2)]
    if stage == 'step':
        bench = python('benchmarks.step', *rounds, *cuda)
        overhead = python('benchmarks.overhead', *rounds, *cuda)
        return [device_tests(stage, 'cuda', 'gpu'), Step((bench,), share=3), Step((overhead,))]
    if stage == 'engine':
        return [device_tests(stage, 'cuda', 'gpu')]
    if stage == 'end-to-end':
        bench = python('benchmarks.levels', *rounds, *cuda)
        return [Step((bench,), share=3), Step((python('benchmarks.compiled', *rounds, *cuda),), share=2)]
    if stage == 'sanitizer':
        checks = ('memcheck', 'racecheck', 'initcheck', 'synccheck')
        return [Step(tuple(map(sanitizer, checks)), workers=4)]
    # nccl takes no two ranks on one GPU; gloo takes them on the processor
    one = python('benchmarks.distributed', '--processes', '1', '--device', 'cuda')
    memory = python('benchmarks.sharding', '--processes', '1', *cuda)
    two = python('benchmarks.distributed', '--processes', '2', *rounds, *cuda, needs=('gpu', 'second gpu'))
    several, gloo = device_tests(stage, 'cuda', 'gpu', 'second gpu'), device_tests(stage, 'cpu', 'mmengine')
    return [Step((one,)), several, gloo, Step((two, memory), share=2)]


# -- running it --------------------------------------------------------------------------------------------------------


def run(job: Job, until: float, log: Path) -> Outcome:
    """Run a job, and end it with all its children when its time is over.

    Args:
        job: The job.
        until: When its time is over, by ``time.monotonic()``.
        log: A file that gets its output while it is printed.
    """
    begin = time.monotonic()
    env = {**os.environ, **dict(job.env), 'PYTHONUNBUFFERED': '1'}
    with log.open('w', encoding='utf-8') as file:
        process = subprocess.Popen(
            job.command, cwd=ROOT, env=env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            # pytest ends with 5 where every test of a file was skipped while it was collected
            status = {0: PASSED, 5: SKIPPED}.get(process.wait(max(until - begin, 1)), FAILED)
        except subprocess.TimeoutExpired:
            status = LATE
        finally:
            # its group alone; on Ctrl-C, too
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    printed = [line for line in log.read_text(encoding='utf-8', errors='replace').splitlines() if line.strip()]
    lines = printed[-15 if status in (FAILED, LATE) else -1 :]
    return Outcome(job, status, time.monotonic() - begin, '\n'.join(lines))


def run_stage(stage: str, absent: Mapping[str, str], budget: float, out: Path) -> list[Outcome]:
    """Run a stage, and write its page after each step; what is left of the time is divided among the steps that follow."""
    deadline, plan = time.monotonic() + budget, steps(stage)
    outcomes: list[Outcome] = []
    for index, step in enumerate(plan):
        reasons = {job: '; '.join(absent[need] for need in job.needs if need in absent) for job in step.jobs}
        outcomes += [Outcome(job, SKIPPED, detail=reason) for job, reason in reasons.items() if reason]
        now = time.monotonic()
        until = now + (deadline - now) * step.share / sum(other.share for other in plan[index:])
        with ThreadPoolExecutor(step.workers) as pool:
            logs = {job: out / f'{stage}_{index}_{place}.log' for place, job in enumerate(step.jobs)}
            started = [pool.submit(run, job, until, logs[job]) for job, reason in reasons.items() if not reason]
            for done in as_completed(started):
                outcomes.append(done.result())
                found = outcomes[-1]
                print(f'  {found.status:<12}{found.seconds:>7.1f} s  {found.job}  {found.last}', flush=True)
        (RESULTS / f'gpu_check_{stage}.md').write_text(page(stage, outcomes), encoding='utf-8')
    return outcomes


def verdict(outcomes: Sequence[Outcome]) -> tuple[str, str]:
    """Return the status of a stage, and how many jobs have which status."""
    statuses = [outcome.status for outcome in outcomes]
    words = ', '.join(f'{statuses.count(status)} {status}' for status in dict.fromkeys(statuses))
    return FAILED if {FAILED, LATE} & {*statuses} else PASSED if PASSED in statuses else SKIPPED, words


def page(stage: str, outcomes: Sequence[Outcome]) -> str:
    """Return the result page of a stage."""
    status, words = verdict(outcomes)
    rows = [[f'`{one.job}`', one.status, f'{one.seconds:.1f}', one.last] for one in outcomes]
    lines = [f'# GPU check: {stage}', '', facts('cuda'), '', f'{status}: {words}.', *table(('job', '', 's', ''), rows)]
    for one in outcomes:
        if one.status in (FAILED, LATE):
            lines += [f'## {one.status}', '', f'`{one.job}`', '', '```text', one.detail, '```', '']
    return '\n'.join(lines)


def main(words: Sequence[str] | None = None) -> int:
    """Run stages, print a line for each job, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
    parser.add_argument('--stage', nargs='+', choices=('all', *STAGES), default=['all'])
    parser.add_argument('--dry', action='store_true', help='print the commands, and what is missing')
    parser.add_argument('--budget', type=float, default=530, help='seconds for each stage (530)')
    parser.add_argument('--out', type=Path, default=ROOT / 'build' / 'gpu_check', help='gets pages and output')
    args = parser.parse_args(words)
    stages = [stage for stage in STAGES if {'all', stage} & {*args.stage}]
    # where the tools of the toolkit lie
    os.environ['PATH'] += os.pathsep + str(Path(os.environ.get('CUDA_HOME', '/usr/local/cuda'), 'bin'))
    absent = missing()
    for name, remedy in absent.items():
        print(f'missing: {name}: {remedy}')
    if args.dry or 'gpu' in absent:
        for stage in stages:
            print(f'== {stage}', *(f'  {job}' for step in steps(stage) for job in step.jobs), sep='\n')
        return 0 if args.dry else 3
    args.out.mkdir(parents=True, exist_ok=True)
    begun, failed = time.time(), False
    for stage in stages:
        print(f'== {stage}', flush=True)
        status, counts = verdict(run_stage(stage, absent, args.budget, args.out))
        failed |= status == FAILED
        print(f'== {stage}: {status}, {counts}', flush=True)
        for result in RESULTS.iterdir():
            if result.stat().st_mtime >= begun:
                shutil.copy(result, args.out)
    return int(failed)


if __name__ == '__main__':
    raise SystemExit(main())
