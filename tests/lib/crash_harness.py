"""Trainings in processes of their own, what becomes of them, and a loop that kills them at random moments."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections import Counter
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import mmengine.runner.runner
import processes
import torch
import toy
from bits import differences

# what a process finds out about its machine takes a second and no part in what is compared
mmengine.runner.runner.collect_env = dict
#: Makes checkpoints large enough to be caught while they are being written.
BALLAST = 200_000
KINDS: dict[str, dict[str, Any]] = {
    'epochs': dict(by_epoch=True),
    'within-epochs': dict(by_epoch=True, save_each=3),
    'iterations': dict(by_epoch=False),
    'workers': dict(by_epoch=True, num_workers=2),
}


def train(work_dir: Path, case: dict[str, Any]) -> None:
    """Train, or go on, in this process."""
    torch.set_num_threads(1)
    toy.run(work_dir, resume=True, **case)


def log_of(work_dir: Path) -> Path:
    """What all processes that trained there wrote."""
    return work_dir.parent / f'{work_dir.name}.log'


def start(work_dir: Path, case: dict[str, Any]) -> BaseProcess:
    """Train, or go on, in another process."""
    return processes.start(log_of(work_dir), train, work_dir, case)


def finish(work_dir: Path, case: dict[str, Any]) -> None:
    """Let a training come to its end."""
    code = processes.wait(start(work_dir, case), 300)
    assert code == 0, f'the training in {work_dir} ended with {code}:\n{log_of(work_dir).read_text()[-3000:]}'


def result(work_dir: Path) -> dict[str, Any]:
    """All that a training becomes but for times."""
    saved = toy.checkpoint(work_dir)
    hub = saved['message_hub']
    names = ('state_dict', 'ema_state_dict', 'optimizer', 'param_schedulers')
    kept = {key: saved[key] for key in names if key in saved}
    scalars = hub['log_scalars'].items()
    kept['scalars'] = {key: buffer.data[0].tolist() for key, buffer in scalars if not key.endswith('time')}
    info = hub['runtime_info']
    kept['best'] = [info.get('best_score'), Path(info.get('best_ckpt') or '').name, list(info.get('keep_ckpt_ids', []))]
    kept['place'] = [saved['meta']['epoch'], saved['meta']['iter'], saved['meta']['seed']]
    kept['files'] = sorted(path.name for path in work_dir.iterdir() if path.is_file() and '.pth' in path.name)
    best = [name for name in kept['files'] if name.startswith('best')]
    kept['best weights'] = [torch.load(work_dir / name, weights_only=True)['state_dict'] for name in best]
    return kept


def _place(work_dir: Path) -> int:
    """The iteration of the newest checkpoint that is complete."""
    files = [path for path in work_dir.glob('*.pth') if not path.name.startswith('best')]
    return max((torch.load(path, weights_only=True)['meta']['iter'] for path in files), default=0)


def _half_written(work_dir: Path) -> list[str]:
    return [name for name in os.listdir(work_dir) if '.pth' in name and not name.endswith('.pth')]


def run(folder: Path, kills: int, seed: int, level: str, kind: str) -> tuple[Counter[str], list[str]]:
    """Kill a training so many times, let it come to its end, and compare it with an uninterrupted one.

    Half of the kills wait until a checkpoint is being written.

    Args:
        folder: For the work folders.
        kills: How many.
        seed: Of the moments.
        level: The opt level.
        kind: A key of ``KINDS``.

    Returns:
        How many processes were killed, were killed in a write, and had resumed; and what differs.
    """
    dice = random.Random(seed)
    case = toy.everything(level, ballast=BALLAST, **KINDS[kind])
    whole, work_dir = folder / 'whole', folder / 'part'
    begin = time.monotonic()
    for path in (whole, work_dir):
        path.mkdir()
    finish(whole, case)
    seconds = time.monotonic() - begin
    found: Counter[str] = Counter()
    rows: list[str] = []
    best = 0
    while found['killed'] < kills:
        place = _place(work_dir)
        if place < best:
            rows.append(f'iteration {best} had been saved, but {place} is all that is left')
        best = max(best, place)
        process = start(work_dir, case)
        # a process that resumes has less to do
        code = processes.wait(process, dice.random() * seconds / 2)
        if code is None and dice.random() < 0.5:
            # the next write, and a moment into it
            processes.wait(process, 60, lambda: bool(_half_written(work_dir)))
            code = processes.wait(process, dice.random() * 0.004)
        if code is not None:
            assert code == 0, log_of(work_dir).read_text()[-4000:]
            # too late: the next training is killed
            shutil.rmtree(work_dir)
            work_dir.mkdir()
            best = 0
            continue
        processes.kill(process)
        if process.exitcode == -signal.SIGKILL:
            found['killed'] += 1
            found['writing'] += bool(_half_written(work_dir))
            found['resumed'] += place > 0
    finish(work_dir, case)
    return found, rows + differences(result(whole), result(work_dir))
