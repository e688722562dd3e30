"""Everything that needs a GPU, in stages that end within ten minutes: ``python -m benchmarks.gpu_check --stage ops``.

It says what the machine lacks, leaves out what needs that, and writes a page for each stage. Without a GPU, and with ``--dry``,
it prints what it would run.

Exit codes: 0 nothing failed, 1 something failed or took too long, 3 there is no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import functools
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

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / 'benchmarks' / 'results'
STAGES = ('ops', 'step', 'engine', 'end-to-end', 'sanitizer', 'ddp')
#: The folders of tests of a stage; ``engine`` has all others that take a device.
TESTS = {'ops': ('ops',), 'step': ('optim', 'engine'), 'ddp': ('distributed',)}
ELSEWHERE = ('downstream', 'foreign_packages')
PASSED, FAILED, LATE, SKIPPED = 'passed', 'failed', 'out of time', 'skipped'


@dataclasses.dataclass(frozen=True)
class Job:
    """One process.

    Attributes:
        name: In the report.
        command: Its words; the first is the interpreter or a tool.
        needs: Keys of :func:`missing` with which it is left out.
        env: Variables beside the present ones.
    """

    name: str
    command: tuple[str, ...]
    needs: tuple[str, ...] = ('gpu',)
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        words = ['python' if word == sys.executable else word for word in self.command]
        return ' '.join([*(f'{name}={value}' for name, value in self.env.items()), shlex.join(words)])


@dataclasses.dataclass(frozen=True)
class Step:
    """Jobs of a stage that follow nobody but the step before.

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
    """What became of a job, after how many seconds, and the end of what it printed, or why it was left out."""

    job: Job
    status: str
    seconds: float = 0.0
    detail: str = ''


# -- what is run ------------------------------------------------------------------------------------------------------


def missing() -> dict[str, str]:
    """What this machine lacks, and what to do about it."""
    gpus = torch.cuda.device_count()
    programs, packages = ('nvcc', 'compute-sanitizer'), ('pytest', 'hypothesis', 'mmengine', 'ninja')
    remedies = {
        'gpu': '' if gpus else 'torch sees no GPU',
        'second gpu': '' if gpus > 1 else 'two ranks of nccl need two GPUs',
        **{name: '' if shutil.which(name) else f'no {name}: the CUDA toolkit has it' for name in programs},
        **{name: '' if importlib.util.find_spec(name) else f'pip install {name}' for name in packages},
    }
    return {name: remedy for name, remedy in remedies.items() if remedy}


def python(name: str, *words: str, needs: Sequence[str] = ('gpu',)) -> Job:
    """A module that runs as a program."""
    return Job(' '.join([name, *words]), (sys.executable, '-m', name, *words), tuple(needs))


def pytest(device: str, *files: str) -> tuple[str, ...]:
    """The words that run files of tests."""
    return (sys.executable, '-m', 'pytest', '-q', '-rs', '-p', 'no:cacheprovider', '--device', device, *files)


def device_tests(stage: str, device: str, *needs: str) -> Step:
    """The files of tests of a stage that take a device, each in a process: an error of CUDA stays in it."""
    elsewhere = {*ELSEWHERE, *(folder for folders in TESTS.values() for folder in folders)}
    jobs = []
    for path in sorted((ROOT / 'tests').rglob('test_*.py')):
        folder, file = path.parent.name, str(path.relative_to(ROOT))
        # ranks get their device from a fixture; scripts of steps make their tensors where --device says
        takes = re.search(r'def \w+\([^)]*\bdevice\b|from on_ranks import', path.read_text(encoding='utf-8'))
        if (takes or folder in ('amp', 'engine')) and folder in TESTS.get(stage, {folder} - elsewhere):
            all_needs = (*needs, 'pytest', 'hypothesis')
            jobs.append(Job(f'{file} on {device}', pytest(device, file), all_needs, {'OMP_NUM_THREADS': '1'}))
    return Step(tuple(jobs), workers=max(1, (os.cpu_count() or 2) // 2), share=3)


def sanitizer(check: str) -> Job:
    """The parity tests of the ops under compute-sanitizer."""
    tried = pytest('cuda', '-x', 'tests/ops/test_lists.py', 'tests/ops/test_steps.py')
    command = ('compute-sanitizer', '--tool', check, '--error-exitcode', '99', *tried)
    needs = ('gpu', 'compute-sanitizer', 'pytest', 'hypothesis')
    return Job(check, command, needs, {'PYTORCH_NO_CUDA_MEMORY_CACHING': '1'})


def steps(stage: str) -> list[Step]:
    """What a stage does, in order."""
    cuda, rounds = ('--device', 'cuda', '--write'), ('--rounds', '5')
    if stage == 'ops':
        build = python('amp_wrapper', 'build-ops', '--cuda', needs=('gpu', 'nvcc', 'ninja'))
        bench = python('benchmarks.ops', '--threads', '1', '--seconds', '0.2', *cuda)
        return [Step((build,), share=3), device_tests(stage, 'cuda', 'gpu'), Step((bench,), share=2)]
    if stage == 'step':
        bench = python('benchmarks.step', '--threads', '1', *rounds, *cuda)
        hooks = [python(f'benchmarks.{name}', *cuda, needs=('gpu', 'mmengine')) for name in ('buffers', 'monitoring')]
        beside = python('benchmarks.step', '--beside-torch', '--device', 'cuda')
        return [device_tests(stage, 'cuda', 'gpu'), Step((bench, beside), share=3), Step(tuple(hooks))]
    if stage == 'engine':
        return [device_tests(stage, 'cuda', 'gpu')]
    if stage == 'end-to-end':
        bench = python('benchmarks.step', '--end-to-end', *rounds, *cuda)
        compiled = python('benchmarks.compiled', '--batch', '32', '--size', '128', *cuda)
        return [Step((bench,), share=3), Step((compiled,), share=2)]
    if stage == 'sanitizer':
        checks = tuple(sanitizer(check) for check in ('memcheck', 'racecheck', 'initcheck', 'synccheck'))
        return [Step(checks, workers=4)]
    # nccl takes no two ranks on one GPU; gloo takes them on the processor
    one = python('benchmarks.one_rank', '--backend', 'nccl')
    report = 'benchmarks/results/distributed_beside_a_gpu.md'
    ranks = python('benchmarks.distributed', '--quick', '--report', report, needs=('gpu', 'mmengine'))
    memory = python('benchmarks.sharding_memory', *cuda)
    several, gloo = device_tests(stage, 'cuda', 'gpu', 'second gpu'), device_tests(stage, 'cpu', 'mmengine')
    return [Step((one,)), several, gloo, Step((ranks, memory), share=2)]


# -- running it -------------------------------------------------------------------------------------------------------


def run(job: Job, until: float, logs: Path) -> Outcome:
    """Run a job, and end it with all its children when its time is over.

    Args:
        job: The job.
        until: When its time is over, by ``time.monotonic()``.
        logs: A folder, where a file gets what it prints as it prints it.
    """
    begin = time.monotonic()
    log = logs / f'{re.sub("[^a-z0-9_]+", "-", job.name)[-80:]}.log'
    env = {**os.environ, **job.env, 'PYTHONUNBUFFERED': '1'}
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
    said = [line for line in log.read_text(encoding='utf-8', errors='replace').splitlines() if line.strip()]
    return Outcome(job, status, time.monotonic() - begin, '\n'.join(said[-15 if status in (FAILED, LATE) else -1 :]))


def run_stage(stage: str, absent: Mapping[str, str], budget: float, out: Path) -> list[Outcome]:
    """Run the steps of a stage, and write its page after each; what is left of the time is divided among those that follow."""
    deadline = time.monotonic() + budget
    outcomes: list[Outcome] = []
    plan = steps(stage)
    for index, step in enumerate(plan):
        left_out = {job: '; '.join(absent[need] for need in job.needs if need in absent) for job in step.jobs}
        outcomes += [Outcome(job, SKIPPED, detail=reason) for job, reason in left_out.items() if reason]
        now = time.monotonic()
        until = now + (deadline - now) * step.share / sum(other.share for other in plan[index:])
        with ThreadPoolExecutor(step.workers) as pool:
            started = [pool.submit(run, job, until, out) for job, reason in left_out.items() if not reason]
            for done in as_completed(started):
                outcome = done.result()
                outcomes.append(outcome)
                last = outcome.detail.rpartition('\n')[2]
                print(
                    f'  {outcome.status:<12}{outcome.seconds:>7.1f} s  {outcome.job.name}  {last}',
                    flush=True,
                )
        (RESULTS / f'gpu_check_{stage}.md').write_text(page(stage, outcomes), encoding='utf-8')
    return outcomes


# -- what is said of it -----------------------------------------------------------------------------------------------


@functools.cache
def machine() -> str:
    """Date, versions and GPUs."""
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return f'{datetime.date.today()}, torch {torch.__version__}, {", ".join(gpus) or "no GPU"}.'


def verdict(outcomes: Sequence[Outcome]) -> tuple[str, str]:
    """The status of a stage, and a few words about it."""
    statuses = [outcome.status for outcome in outcomes]
    words = ', '.join(f'{statuses.count(status)} {status}' for status in dict.fromkeys(statuses))
    return FAILED if {FAILED, LATE} & {*statuses} else PASSED if PASSED in statuses else SKIPPED, words


def page(stage: str, outcomes: Sequence[Outcome]) -> str:
    """The result page of a stage, in Markdown."""
    status, words = verdict(outcomes)
    lines = [
        f'# GPU check: {stage}',
        '',
        f'{machine()} {status}: {words}.',
        '',
        '| job | | s | |',
        '| --- | --- | --- | --- |',
    ]
    for outcome in outcomes:
        last = outcome.detail.rpartition('\n')[2].replace('|', '\\|')
        lines.append(f'| {outcome.job.name} | {outcome.status} | {outcome.seconds:.1f} | {last} |')
    for outcome in outcomes:
        if outcome.status in (FAILED, LATE):
            lines += ['', f'## {outcome.job.name}: {outcome.status}', '', f'`{outcome.job}`', '']
            lines += ['```text', outcome.detail, '```']
    return '\n'.join([*lines, ''])


def main(words: Sequence[str] | None = None) -> int:
    """Run stages, print a line for each, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
    parser.add_argument('--stage', nargs='+', choices=('all', *STAGES), default=['all'])
    parser.add_argument('--dry', action='store_true', help='print the commands, and what is missing')
    parser.add_argument('--budget', type=float, default=530, help='seconds for each stage (530)')
    parser.add_argument(
        '--out', type=Path, default=ROOT / 'build' / 'gpu_check', help='gets pages, and what jobs print'
    )
    args = parser.parse_args(words)
    stages = [stage for stage in STAGES if {'all', stage} & {*args.stage}]
    # where the tools of the toolkit lie
    os.environ['PATH'] += os.pathsep + str(Path(os.environ.get('CUDA_HOME', '/usr/local/cuda'), 'bin'))
    absent = missing()
    print(machine())
    for name, remedy in absent.items():
        print(f'missing: {name}: {remedy}')
    if args.dry or 'gpu' in absent:
        for stage in stages:
            print(f'== {stage}', *(f'  {job}' for step in steps(stage) for job in step.jobs), sep='\n')
        return 0 if args.dry else 3
    summary = []
    begun = time.time()
    for stage in stages:
        print(f'== {stage}', flush=True)
        (args.out / stage).mkdir(parents=True, exist_ok=True)
        summary.append((stage, *verdict(run_stage(stage, absent, args.budget, args.out / stage))))
        for result in RESULTS.iterdir():
            if result.stat().st_mtime >= begun:
                shutil.copy(result, args.out)
    print('== summary')
    for stage, status, text in summary:
        print(f'{stage:<12}{status:<10}{text}')
    return int(any(status == FAILED for _, status, _ in summary))


if __name__ == '__main__':
    raise SystemExit(main())
