"""Everything that needs a GPU, in stages that can be run one by one: ``python -m benchmarks.gpu_check --stage ops``.

It starts with the standard library alone, says what is missing in place of failing, and writes a page for each stage. Without a
GPU, and with ``--dry``, it prints what it would run.

Exit codes: 0 nothing failed, 1 something failed or took too long, 3 there is no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from .gpu_stages import ROOT, STAGES, Job, Step, missing, steps

RESULTS = ROOT / 'benchmarks' / 'results'
#: Seconds for a stage, which has to end within ten minutes.
BUDGET = 530
PASSED, FAILED, LATE, SKIPPED = 'passed', 'failed', 'out of time', 'skipped'


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a job.

    Attributes:
        step: Its step.
        job: The job.
        status: 'passed', 'failed', 'out of time' or 'skipped'.
        seconds: It took.
        detail: Why it was skipped, or the end of what it printed.
    """

    step: str
    job: Job
    status: str
    seconds: float = 0.0
    detail: str = ''


def lacking(job: Job, absent: dict[str, str]) -> str:
    """Why a job is left out; '' where nothing is missing."""
    return '; '.join(absent[need] for need in job.needs if need in absent)


def run(step: Step, job: Job, until: float, logs: Path) -> Outcome:
    """Run a job, and end it with all its children when its time is over.

    Args:
        step: The step it belongs to.
        job: The job.
        until: When its time is over, by ``time.monotonic()``.
        logs: A folder, where a file gets what it prints as it prints it.
    """
    begin = time.monotonic()
    seconds = until - begin
    log = logs / f'{job.name.replace(" ", "_")}.log'
    if seconds < 1:
        return Outcome(step.name, job, LATE, 0.0, 'no time was left to start it')
    paths = [str(ROOT), *filter(None, [os.environ.get('PYTHONPATH')])]
    env = {**os.environ, **job.env, 'PYTHONPATH': os.pathsep.join(paths), 'PYTHONUNBUFFERED': '1'}
    with log.open('w', encoding='utf-8') as file:
        file.write(f'$ {shown(job)}\n')
        file.flush()
        try:
            process = subprocess.Popen(
                job.command, cwd=ROOT, env=env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
        except OSError as error:
            return Outcome(step.name, job, FAILED, time.monotonic() - begin, str(error))
        late = False
        try:
            code = process.wait(timeout=seconds)
        except BaseException as error:
            # this one's group alone; on Ctrl-C, too
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            late = True
    text = log.read_text(encoding='utf-8', errors='replace')
    status = LATE if late else PASSED if code == 0 else FAILED
    if status == FAILED and code == 5 and 'pytest' in job.command:
        # every test of the file was skipped while it was collected
        status = SKIPPED
    return Outcome(step.name, job, status, time.monotonic() - begin, end_of(text, 1 if status == PASSED else 15))


def end_of(text: str, lines: int) -> str:
    """The last lines that say something."""
    return '\n'.join([line for line in text.splitlines()[1:] if line.strip()][-lines:])


def shown(job: Job) -> str:
    """The command as one would type it."""
    front = [f'{name}={shlex.quote(value)}' for name, value in job.env.items()]
    words = ['python' if word == sys.executable else word for word in job.command]
    return ' '.join([*front, shlex.join(words)])


def run_stage(
    plan: Sequence[Step],
    absent: dict[str, str],
    budget: float,
    logs: Path,
    tell: Callable[[list[Outcome]], object] = lambda outcomes: None,
) -> list[Outcome]:
    """Run the steps of a stage, one after the other; what is left of the time is divided among those that follow.

    Args:
        plan: The steps.
        absent: What the machine lacks.
        budget: Seconds in all.
        logs: A folder.
        tell: Called after each job with all outcomes so far.
    """
    deadline = time.monotonic() + budget
    outcomes: list[Outcome] = []
    for index, step in enumerate(plan):
        able = [job for job in step.jobs if not lacking(job, absent)]
        outcomes += [
            Outcome(step.name, job, SKIPPED, 0.0, lacking(job, absent)) for job in step.jobs if lacking(job, absent)
        ]
        rest = sum(other.share for other in plan[index:])
        until = time.monotonic() + (deadline - time.monotonic()) * step.share / rest
        workers = step.workers or max(1, (os.cpu_count() or 2) // 2)

        with ThreadPoolExecutor(workers) as pool:
            for done in as_completed([pool.submit(run, step, job, until, logs) for job in able]):
                outcome = done.result()
                outcomes.append(outcome)
                last = end_of('\n' + outcome.detail, 1)
                print(f'  {outcome.status:<12}{outcome.seconds:>7.1f} s  {outcome.job.name}  {last}', flush=True)
                tell(outcomes)
    tell(outcomes)
    return outcomes


def verdict(outcomes: Sequence[Outcome]) -> tuple[str, str]:
    """The status of a stage, and a few words about it."""
    counts = {status: sum(o.status == status for o in outcomes) for status in (PASSED, FAILED, LATE, SKIPPED)}
    words = ', '.join(f'{count} {status}' for status, count in counts.items() if count)
    reasons = list(dict.fromkeys(o.detail.splitlines()[-1] for o in outcomes if o.status == SKIPPED and o.detail))
    if reasons:
        words += f' (skipped because: {"; ".join(reasons)})'
    status = FAILED if counts[FAILED] or counts[LATE] else PASSED if counts[PASSED] else SKIPPED
    return status, words


def page(stage: str, outcomes: Sequence[Outcome], head: str) -> str:
    """The result page of a stage, in Markdown."""
    status, words = verdict(outcomes)
    lines = [
        f'# GPU check: {stage}',
        '',
        f'{head} {status}: {words}.',
        '',
        '| step | job | | s | |',
        '| --- | --- | --- | --- | --- |',
    ]
    for o in outcomes:
        last = end_of('\n' + o.detail, 1).replace('|', '\\|')
        lines.append(f'| {o.step} | {o.job.name} | {o.status} | {o.seconds:.1f} | {last} |')
    for o in outcomes:
        if o.status in (FAILED, LATE) and o.detail:
            lines += ['', f'## {o.job.name}: {o.status}', '', f'`{shown(o.job)}`', '', '```text', o.detail, '```']
    return '\n'.join([*lines, ''])


def describe() -> tuple[str, str]:
    """The machine in a sentence, and what to compile for; '' without a GPU."""
    parts, arch = [str(datetime.date.today()), platform.machine(), f'Python {platform.python_version()}'], ''
    try:
        import torch
    except ImportError:
        return ', '.join([*parts, 'no torch']) + '.', ''
    parts.append(f'torch {torch.__version__}')
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability(0)
        arch = f'{major}.{minor}'
        parts.append(f'{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}')
    return ', '.join(parts) + '.', arch


def print_plan(stages: Sequence[str], absent: dict[str, str], arch: str) -> None:
    """What would be run, and what is missing for it."""
    for stage in stages:
        print(f'== {stage}')
        for step in steps(stage, arch):
            for job in step.jobs:
                reason = lacking(job, absent)
                print(f'  {shown(job)}{f"   # left out: {reason}" if reason else ""}')


def main(words: Sequence[str] | None = None) -> int:
    """Run stages, print a line for each, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
    parser.add_argument('--stage', nargs='+', choices=('all', *STAGES), default=['all'])
    parser.add_argument('--dry', action='store_true', help='print the commands, and what is missing')
    parser.add_argument('--budget', type=float, default=BUDGET, help=f'seconds for each stage (default: {BUDGET})')
    parser.add_argument('--out', type=Path, help='a folder for copies of the pages and for what the jobs print')
    args = parser.parse_args(words)
    stages = [stage for stage in STAGES if 'all' in args.stage or stage in args.stage]
    head, arch = describe()
    absent = missing()
    print(head)
    for name, remedy in absent.items():
        print(f'missing: {name}: {remedy}')
    if args.dry or 'gpu' in absent:
        print_plan(stages, absent, arch)
        code = 0 if args.dry else 3
        print(f'Nothing was run: {"a dry run" if args.dry else "there is no GPU"} (exit code {code}).')
        return code
    summary = []
    begun = time.time()
    for stage in stages:
        print(f'== {stage}', flush=True)
        logs = (args.out or ROOT / 'build' / 'gpu_check') / stage
        logs.mkdir(parents=True, exist_ok=True)
        path = RESULTS / f'gpu_check_{stage}.md'
        outcomes = run_stage(
            steps(stage, arch), absent, args.budget, logs,
            lambda found, stage=stage, path=path: path.write_text(page(stage, found, head), encoding='utf-8'),  # type: ignore[misc]
        )  # fmt: skip
        summary.append((stage, *verdict(outcomes)))
        if args.out is not None:
            for result in RESULTS.iterdir():
                if result.stat().st_mtime >= begun:
                    shutil.copy(result, args.out / result.name)
    print('== summary')
    for stage, status, line in summary:
        print(f'{stage:<12}{status:<10}{line}')
    return 1 if any(status == FAILED for _, status, _ in summary) else 0


if __name__ == '__main__':
    raise SystemExit(main())
