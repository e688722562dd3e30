"""Kills trainings at random moments with SIGKILL and compares what they become with the uninterrupted run, bit for bit.

``python tests/system/crash_harness.py --kills 200 --seed 0 --report FILE.md``, or ``make crash-test``. Half of the kills wait
for a checkpoint that is being written. Each attempt is a process of its own.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

os.environ.setdefault('OMP_NUM_THREADS', '1')
import mmengine
import mmengine.runner.runner
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / 'support'))
import forked
import preemption  # noqa: F401  (its hooks)
import toy
from bits import differences

from amp_wrapper.checkpoint import file as checkpoint_file
from amp_wrapper.checkpoint.newest import find_newest

# nothing of what a process finds out about its machine takes part, and it takes a second
mmengine.runner.runner.collect_env = dict
BALLAST = 200_000
KINDS = {
    'epochs': dict(by_epoch=True),
    'epochs, saved within': dict(by_epoch=True, save_each=3),
    'iterations, one file kept': dict(by_epoch=False, max_keep_ckpts=1),
    'epochs, 2 workers': dict(by_epoch=True, num_workers=2),
}


@dataclass
class Tally:
    """What happened.

    Attributes:
        kills: Processes killed before they ended.
        writing: Those among them that left a half-written checkpoint behind.
        runs: Trainings that were brought to their end and compared.
        resumed: Attempts that began from a checkpoint.
        kinds: Kills per level and kind.
        failures: One line per difference.
    """

    kills: int = 0
    writing: int = 0
    runs: int = 0
    resumed: int = 0
    kinds: Counter[tuple[str, str]] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


def train(work_dir: Path, case: dict[str, Any]) -> None:
    """Train, or go on, in this process."""
    torch.set_num_threads(1)
    toy.run(work_dir, resume=True, **case)


def log_of(work_dir: Path) -> Path:
    """What all processes that trained there wrote."""
    return work_dir.parent / f'{work_dir.name}.log'


def start(work_dir: Path, case: dict[str, Any]) -> BaseProcess:
    """Train, or go on, in another process."""
    return forked.start(log_of(work_dir), train, work_dir, case)


def finish(work_dir: Path, case: dict[str, Any]) -> None:
    """Let a training come to its end."""
    code = forked.wait(start(work_dir, case), 300)
    if code != 0:
        raise RuntimeError(f'the training in {work_dir} ended with {code}:\n{log_of(work_dir).read_text()[-3000:]}')


def result(work_dir: Path) -> dict[str, Any]:
    """Everything a training leaves behind that must not depend on interruptions."""
    saved = toy.checkpoint(work_dir)
    hub = saved['message_hub']
    kept = {
        key: saved[key]
        for key in ('state_dict', 'ema_state_dict', 'optimizer', 'param_schedulers', 'exact_resume')
        if key in saved
    }
    kept['scalars'] = {
        key: buffer.data[0].tolist() for key, buffer in hub['log_scalars'].items() if not key.endswith('time')
    }
    info = hub['runtime_info']
    kept['best'] = [info.get('best_score'), Path(info.get('best_ckpt') or '').name, list(info.get('keep_ckpt_ids', []))]
    kept['place'] = [saved['meta']['epoch'], saved['meta']['iter'], saved['meta']['seed']]
    kept['files'] = sorted(path.name for path in work_dir.iterdir() if path.is_file() and '.pth' in path.name)
    best = [name for name in kept['files'] if name.startswith('best')]
    kept['best weights'] = [torch.load(work_dir / name, weights_only=True)['state_dict'] for name in best]
    return kept


def progress(work_dir: Path) -> int:
    """The iteration that a resume would go on from."""
    newest = find_newest(work_dir).path
    return 0 if newest is None else int(checkpoint_file.load(newest)['meta']['iter'])


def torture(
    folder: Path,
    level: str,
    kind: str,
    kills: int,
    dice: random.Random,
    tally: Tally,
    reference: dict[str, Any],
    whole: float,
) -> None:
    """Bring one training to its end through a number of kills, and compare."""
    case = toy.everything(level, ballast=BALLAST, **KINDS[kind])
    work_dir = folder / f'{level}-{kind}-{tally.runs}'.replace(', ', '-').replace(' ', '-')
    work_dir.mkdir(parents=True)
    done = best = 0
    while done < kills:
        in_write = dice.random() < 0.5
        place = progress(work_dir)
        if place < best:
            tally.failures.append(f'{work_dir.name}: iteration {best} had been saved, but {place} is all that is left')
        best = max(best, place)
        tally.resumed += place > 0
        process = start(work_dir, case)
        if in_write:
            # wait for the n-th write of this attempt, then a moment into it
            pause, number = dice.random() * 0.004, dice.randrange(1, 6)
            code = _wait_for_write(process, work_dir, number, pause)
        else:
            code = forked.wait(process, dice.random() * whole)
        if code is None:
            forked.kill(process)
            if process.exitcode != -signal.SIGKILL:
                continue
            done += 1
            tally.kills += 1
            tally.kinds[level, kind] += 1
            tally.writing += any(work_dir.glob('*.amp-part'))
        elif code != 0:
            raise RuntimeError(log_of(work_dir).read_text()[-4000:])
        else:
            break
    finish(work_dir, case)
    tally.runs += 1
    rows = differences(reference, result(work_dir))
    tally.failures += [f'{work_dir.name}: {row}' for row in rows]
    if not rows:
        shutil.rmtree(work_dir)


def _wait_for_write(process: BaseProcess, work_dir: Path, number: int, pause: float) -> int | None:
    seen = 0
    present = False

    def writing() -> bool:
        nonlocal seen, present
        now = any(entry.name.endswith('.amp-part') for entry in os.scandir(work_dir))
        seen += now and not present
        present = now
        return seen >= number

    code = forked.wait(process, 60, writing)
    if code is None:
        time.sleep(pause)
    return code


def run(
    kills: int, seed: int, folder: Path, levels: tuple[str, ...] = toy.LEVELS, kinds: tuple[str, ...] = tuple(KINDS)
) -> Tally:
    """Kill so many trainings, spread over levels and kinds.

    Args:
        kills: How many.
        seed: Of the moments.
        folder: For the work folders; those of failures stay there.
        levels: The opt levels.
        kinds: Keys of ``KINDS``.
    """
    dice = random.Random(seed)
    tally = Tally()
    references: dict[tuple[str, str], tuple[dict[str, Any], float]] = {}
    combinations = [(level, kind) for kind in kinds for level in levels]
    while tally.kills < kills:
        for level, kind in combinations:
            if tally.kills >= kills:
                break
            if (level, kind) not in references:
                place = folder / f'reference-{level}-{kind}'.replace(', ', '-').replace(' ', '-')
                place.mkdir(parents=True)
                begin = time.monotonic()
                finish(place, toy.everything(level, ballast=BALLAST, **KINDS[kind]))
                references[level, kind] = (result(place), time.monotonic() - begin)
            reference, whole = references[level, kind]
            torture(folder, level, kind, min(3, kills - tally.kills), dice, tally, reference, whole)
            print(
                f'{tally.kills} of {kills} kills ({tally.writing} in mid-write), {tally.runs} trainings compared, '
                f'{len(tally.failures)} differences',
                flush=True,
            )
    return tally


def report(tally: Tally, seed: int, seconds: float) -> str:
    """The result as a page."""
    levels = sorted({level for level, _ in tally.kinds})
    kinds = [kind for kind in KINDS if any(k == kind for _, k in tally.kinds)]
    rows = [f'| {kind} | ' + ' | '.join(str(tally.kinds[level, kind]) for level in levels) + ' |' for kind in kinds]
    lines = [
        '# Crash test',
        '',
        f'`make crash-test`: seed {seed}, {seconds:.0f} s on {os.cpu_count()} cores ({platform.machine()}), '
        f'{time.strftime("%Y-%m-%d")}, Python {platform.python_version()}, torch {torch.__version__}, '
        f'mmengine {mmengine.__version__}.',
        '',
        f'- {tally.kills} processes killed with SIGKILL, {tally.writing} of them with a half-written checkpoint on the disk.',
        f'- {tally.resumed} of the killed processes had gone on from a checkpoint; after each kill, the newest complete '
        'checkpoint was at least as far as before.',
        f'- {tally.runs} trainings brought to their end and compared with the uninterrupted run: weights, average, optimizer, '
        'loss scale, schedulers, random states, logged losses and scores, best score and file, names of the files.',
        f'- {len(tally.failures)} differences.',
        '',
        'Kills by kind of training and level:',
        '',
        '| | ' + ' | '.join(levels) + ' |',
        '| --- |' + ' --- |' * len(levels),
        *rows,
        '',
        'Every training has dropout, augmentation, accumulation over two batches, clipping, EMA with `begin_iter`, schedulers, '
        '`save_best`, early stopping and `max_keep_ckpts=2`; O1 and O2 have a loss scale that grows and backs off.',
    ]
    return '\n'.join([*lines, *(['', *tally.failures] if tally.failures else []), ''])


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--kills', type=int, default=200)
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--levels', nargs='+', default=toy.LEVELS, choices=toy.LEVELS)
    parser.add_argument('--report', type=Path, help='write the result there')
    args = parser.parse_args()
    begin = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix='crash-'))
    tally = run(args.kills, args.seed, folder, tuple(args.levels))
    page = report(tally, args.seed, time.monotonic() - begin)
    print('\n' + page)
    if args.report:
        args.report.write_text(page)
    if tally.failures:
        raise SystemExit(f'what differs lies in {folder}')
    shutil.rmtree(folder)


if __name__ == '__main__':
    main()
