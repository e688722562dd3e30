"""Damages checkpoints at random and resumes from them: typed errors only, nothing half-applied.

``python tests/system/fuzz_checkpoints.py --files 10000 --seed 0 --report FILE.md``, or ``make fuzz-test``. A runner stands at
the state of one checkpoint and is asked to resume from a damaged copy of another. Whatever happens, it must be at the first
state still, or be wholly at the other one.

``--record FILE`` keeps what became of each file, with the two checkpoints that were damaged, and ``--compare FILE`` damages
those again in the same way and asks for the same verdicts and messages, see ``fuzz_verdicts.py``.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import logging
import math
import os
import pickle
import platform
import random
import shutil
import sys
import tempfile
import time
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault('OMP_NUM_THREADS', '1')
import mmengine
import mmengine.runner.runner
import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / 'support')]
import fuzz_verdicts
import toy
from bits import differences
from mmengine.hooks import Hook
from mmengine.logging import HistoryBuffer
from mmengine.registry import HOOKS
from mmengine.runner import Runner

from amp_wrapper import AmpError

mmengine.runner.runner.collect_env = dict


class Built(Exception):
    """The runner is built, and has loaded nothing."""


@HOOKS.register_module()
class StopWhenBuilt(Hook):
    """Ends ``Runner.train`` before it loads."""

    priority = 'LOWEST'

    def before_run(self, runner: Any) -> None:
        raise Built


class Target:
    """A runner that resumes again and again.

    Args:
        level: The opt level.
        folder: For its files.
        attached: Whether its model is cast before it resumes.
        files: Checkpoints to take, by name; without them, a run makes its own.
    """

    def __init__(self, level: str, folder: Path, attached: bool, files: dict[str, bytes] | None = None) -> None:
        self.case = toy.everything(level)
        first = folder / f'{level}-{attached}'
        self.names = dict(here=first / 'epoch_2.pth', there=first / 'epoch_3.pth')
        if files is None:
            # an open accumulation is among the things that can be damaged: 7 iterations an epoch, accumulations of 2
            toy.run(
                first, **copy.deepcopy(dict(self.case, train_cfg=dict(by_epoch=True, max_epochs=3, val_interval=1)))
            )
        else:
            first.mkdir()
            for name in self.names.values():
                name.write_bytes(files[f'{level}/{name.name}'])
        case = dict(copy.deepcopy(self.case), resume=True, load_from=str(self.names['here']))
        case['custom_hooks'] = [*case['custom_hooks'], dict(type='StopWhenBuilt')]
        self.runner = Runner.from_cfg(toy.toy_config(first / 'target', **case))
        with contextlib.suppress(Built):
            self.runner.train()
        if attached:
            self.runner.optim_wrapper.initialize_count_status(self.runner.model, 0, 28)
        self.bytes = self.names['there'].read_bytes()
        self.content = torch.load(self.names['there'], weights_only=True)
        self.here = self.resumed(self.names['here'])
        self.there = self.resumed(self.names['there'])
        self.resumed(self.names['here'])

    def resumed(self, path: Path) -> dict[str, Any]:
        """The state after a resume."""
        self.runner.resume(str(path))
        return self.state()

    def state(self) -> dict[str, Any]:
        """Everything a resume changes."""
        runner = self.runner
        hooks = {type(hook).__name__: hook for hook in runner.hooks}
        hub = runner.message_hub
        state = {
            'model': runner.model.state_dict(),
            'optimizer': runner.optim_wrapper.state_dict(),
            'schedulers': [scheduler.state_dict() for scheduler in runner.param_schedulers],
            'place': [runner.epoch, runner.iter, runner.seed],
            'average': hooks['EMAHook'].ema_model.state_dict(),
            'random': hooks['ExactResumeHook']._resumed,
            'logged': {name: buffer.data[0].tolist() for name, buffer in hub.log_scalars.items()},
            'info': {key: repr(value) for key, value in hub.runtime_info.items()},
        }
        return copy.deepcopy(state)

    def can_go_on(self) -> None:
        """One iteration, as the loop would run it; raises what the loop would raise."""
        runner = self.runner
        runner.optim_wrapper.initialize_count_status(runner.model, runner.iter, 10**9)
        for batch in runner.train_loop.dataloader:
            runner.model.train_step(batch, runner.optim_wrapper)
            break
        for scheduler in runner.param_schedulers:
            scheduler.step()


# -- damage to bytes -------------------------------------------------------------------------------------------------


def _truncate(data: bytes, dice: random.Random) -> bytes:
    return data[: dice.randrange(len(data))]


def _flip(data: bytes, dice: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(dice.choice((1, 1, 2, 8, 100))):
        changed[dice.randrange(len(changed))] ^= 1 << dice.randrange(8)
    return bytes(changed)


def _zero(data: bytes, dice: random.Random) -> bytes:
    start, length = dice.randrange(len(data)), dice.choice((1, 16, 512, 4096))
    end = min(len(data), start + length)
    return data[:start] + bytes(end - start) + data[end:]


def _insert(data: bytes, dice: random.Random) -> bytes:
    start = dice.randrange(len(data) + 1)
    return data[:start] + dice.randbytes(dice.choice((1, 7, 600))) + data[start:]


def _cut(data: bytes, dice: random.Random) -> bytes:
    start = dice.randrange(len(data))
    return data[:start] + data[start + dice.choice((1, 64, 5000)) :]


def _swap(data: bytes, dice: random.Random) -> bytes:
    size = 512
    a, b = sorted(dice.sample(range(0, len(data) - size), 2))
    return (
        data
        if b - a < size
        else data[:a] + data[b : b + size] + data[a + size : b] + data[a : a + size] + data[b + size :]
    )


BYTES: tuple[Callable[[bytes, random.Random], bytes], ...] = (_truncate, _flip, _flip, _zero, _insert, _cut, _swap)


# -- damage to the pickle, under right checksums ---------------------------------------------------------------------


def _pickle(data: bytes, dice: random.Random) -> bytes:
    """Bits of ``data.pkl`` are flipped and the archive is written anew."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, 'w', zipfile.ZIP_STORED) as new:
        for info in old.infolist():
            content = old.read(info)
            if info.filename.endswith('data.pkl'):
                content = dice.choice((_flip, _zero, _cut, _insert, _truncate))(content, dice)
            new.writestr(info.filename, content)
    return out.getvalue()


# -- damage to the content -------------------------------------------------------------------------------------------

WRONG: tuple[Any, ...] = (
    None, '', 'nonsense', -1, 0, -(2**40), 2**70, math.nan, math.inf, -math.inf, True, [], {}, (), [1, 2], {'a': 1},
    torch.zeros(3), torch.zeros(0), torch.tensor(math.nan), torch.zeros(2, 2, dtype=torch.int64), b'bytes',
)  # fmt: skip


def _paths(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _paths(value, (*path, key))
    elif isinstance(node, (list, tuple)):
        for index, value in enumerate(node):
            yield from _paths(value, (*path, index))


def _set(node: Any, path: tuple[Any, ...], change: Callable[[Any], None]) -> Any:
    """A copy of ``node`` in which ``change`` was applied to the container at ``path``."""
    if not path:
        copied = type(node)(node) if isinstance(node, (dict, list)) else list(node) if isinstance(node, tuple) else node
        change(copied)
        return copied
    copied = type(node)(node) if isinstance(node, dict) else list(node)
    copied[path[0]] = _set(node[path[0]], path[1:], change)
    return copied


def damage_content(content: dict[str, Any], dice: random.Random) -> tuple[dict[str, Any], str]:
    """A file that torch writes and reads without complaint, with one thing in it wrong.

    Returns:
        The file, and what was done to it.
    """
    parts = dict(content)
    # parts of equal weight, or the long lists of numbers would get all the damage
    top = dice.choice(list(parts))
    options = [(top, *path) for path in _paths(parts[top])]
    path = dice.choice(options)
    deep = dice.choice([option for option in options if len(option) <= dice.choice((1, 2, 3, 4, 9))])
    path = dice.choice((path, deep))
    where, key = path[:-1], path[-1]
    what = dice.choice(('remove', 'replace', 'replace', 'replace', 'rename', 'add', 'reshape', 'retype'))
    value = content
    for step in path:
        value = value[step]

    def change(container: Any) -> None:
        if what == 'remove':
            del container[key]
        elif what == 'rename' and isinstance(container, dict):
            container[dice.choice((f'{key}x', 7, 'module.'))] = container.pop(key)
        elif what == 'add' and isinstance(container, dict):
            container[dice.choice(('something', 99, 'config'))] = dice.choice(WRONG)
        elif what == 'add':
            container.append(dice.choice(WRONG))
        elif what == 'reshape' and isinstance(value, torch.Tensor):
            container[key] = dice.choice((value.reshape(-1)[:-1], value.unsqueeze(0), value.reshape(-1).repeat(2)))
        elif what == 'retype' and isinstance(value, torch.Tensor):
            dtypes = (torch.int64, torch.float64, torch.float16, torch.bool, torch.complex64, torch.uint8)
            container[key] = (
                value.nan_to_num().to(dice.choice(dtypes)) if value.dtype.is_floating_point else value.float()
            )
        else:
            container[key] = dice.choice(WRONG)

    return _set(content, where, change), f'{what} {"".join(f"[{step!r}]" for step in path)}'


# -- code that wants to run ------------------------------------------------------------------------------------------

HACKED = Path(tempfile.gettempdir()) / f'amp-wrapper-hacked-{os.getpid()}'


class _Evil:
    def __init__(self, how: int) -> None:
        self.how = how

    def __reduce__(self) -> Any:
        line = f'open({str(HACKED)!r}, "w").close()'
        return [
            (os.system, (f'touch {HACKED}',)),
            (eval, (line,)),
            (exec, (line,)),
            (getattr, (int, '__subclasses__')),
            (getattr, (HistoryBuffer, '__init__')),
            (__import__, ('os',)),
        ][self.how % 6]


def _malicious(content: dict[str, Any], dice: random.Random) -> tuple[dict[str, Any], str]:
    path = dice.choice([path for path in _paths(content) if path and len(path) < 5])

    def change(container: Any) -> None:
        container[path[-1]] = _Evil(dice.randrange(6))

    return _set(content, path[:-1], change), f'code at {path!r}'


# -- the run ---------------------------------------------------------------------------------------------------------


class Outcome:
    """What happened.

    Attributes:
        counts: Files by kind of damage and outcome.
        failures: One line each.
        verdicts: What became of each file, for :mod:`fuzz_verdicts`.
    """

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self.failures: list[str] = []
        self.verdicts: list[list[str]] = []


def attack(target: Target, path: Path, dice: random.Random, outcome: Outcome) -> None:
    """Damage one file, resume from it, and look at what is left."""
    kind = dice.choice(('bytes', 'bytes', 'pickle', 'content', 'content', 'content', 'content', 'code'))
    what = ''
    if kind == 'bytes':
        damage = dice.choice(BYTES)
        path.write_bytes(damage(target.bytes, dice))
        what = damage.__name__
    elif kind == 'pickle':
        path.write_bytes(_pickle(target.bytes, dice))
    else:
        content, what = (damage_content if kind == 'content' else _malicious)(target.content, dice)
        if kind == 'code' and dice.random() < 0.3:
            path.write_bytes(pickle.dumps(content))
        else:
            torch.save(content, path)
    label = f'{target.case["optim_wrapper"]["opt_level"]} {kind} {what}'
    try:
        target.runner.resume(str(path))
    except AmpError as error:
        outcome.counts[kind, 'refused'] += 1
        outcome.verdicts.append(fuzz_verdicts.refused(label, error, path))
        if str(path) not in str(error):
            outcome.failures.append(f'{label}: the message does not name the file: {error}')
        rows = differences(target.here, target.state())
        if rows:
            outcome.failures.append(f'{label}: half-applied: {rows[:3]} after: {error}')
            target.resumed(target.names['here'])
    except Exception as error:
        outcome.counts[kind, 'untyped'] += 1
        outcome.verdicts.append(fuzz_verdicts.failed(label, error, path))
        outcome.failures.append(f'{label}: {type(error).__name__}: {str(error)[:300]}')
        target.resumed(target.names['here'])
    else:
        outcome.counts[kind, 'harmless'] += 1
        if kind == 'code':
            outcome.failures.append(f'{label}: accepted')
        rows = differences(target.there, target.state())
        if kind == 'bytes' and rows:
            outcome.failures.append(f'{label}: damaged bytes were applied')
        end: Exception | None = None
        try:
            target.can_go_on()
        except AmpError as error:
            end = error
        except Exception as error:
            end = error
            outcome.failures.append(f'{label}: accepted, then {type(error).__name__}: {str(error)[:300]}')
        outcome.verdicts.append(fuzz_verdicts.harmless(label, rows, end, path))
        try:
            _start_over(target)
        except AmpError as error:
            outcome.failures.append(f'{label}: accepted, and now a good file is refused: {str(error)[:300]}')
            raise SystemExit('\n'.join(outcome.failures)) from error


def _start_over(target: Target) -> None:
    # what nobody resets: entries that the damaged file had and a good one has not
    hub = target.runner.message_hub
    hub._log_scalars.clear()
    hub._runtime_info.clear()
    hub._resumed_keys.clear()
    target.resumed(target.names['here'])


def run(
    files: int,
    seed: int,
    folder: Path,
    levels: tuple[str, ...] = ('O2', 'O1', 'O5', 'O0'),
    checkpoints: dict[str, bytes] | None = None,
) -> Outcome:
    """Attack with so many files, spread over levels, models cast and not yet cast.

    Args:
        files: How many.
        seed: Of the damage.
        folder: For the files.
        levels: The opt levels.
        checkpoints: What to damage, from :func:`good_checkpoints`; without them, each target makes its own.
    """
    torch.set_num_threads(1)
    warnings.simplefilter('ignore')
    dice = random.Random(seed)
    outcome = Outcome()
    targets = [Target(level, folder, attached, checkpoints) for level in levels for attached in (False, True)]
    # thousands of lines about what is wrong with the files
    logging.disable(logging.CRITICAL)
    for number in range(files):
        attack(targets[number % len(targets)], folder / 'damaged.pth', dice, outcome)
        if (number + 1) % 500 == 0:
            print(f'{number + 1} of {files} files, {len(outcome.failures)} failures', flush=True)
    if HACKED.exists():
        HACKED.unlink()
        outcome.failures.append('code of a file was executed')
    return outcome


def good_checkpoints(folder: Path, levels: tuple[str, ...] = ('O2', 'O1', 'O5', 'O0')) -> dict[str, bytes]:
    """The checkpoints that targets of these levels start from, by ``level/name``."""
    made = {}
    for level in levels:
        for path in Target(level, folder, False).names.values():
            made[f'{level}/{path.name}'] = path.read_bytes()
    shutil.rmtree(folder)
    folder.mkdir()
    return made


def report(outcome: Outcome, seed: int, seconds: float) -> str:
    """The result as a page."""
    kinds = {
        'bytes': 'bytes: truncated, bits flipped, blocks zeroed, cut out, inserted, swapped',
        'pickle': 'the pickle inside the archive, under right checksums',
        'content': 'content: keys removed, renamed, added; values, shapes and types replaced',
        'code': 'code that wants to run',
    }
    rows = [
        f'| {text} | ' + ' | '.join(str(outcome.counts[kind, end]) for end in ('refused', 'harmless', 'untyped')) + ' |'
        for kind, text in kinds.items()
    ]
    lines = [
        '# Damaged checkpoints',
        '',
        f'`make fuzz-test`: {sum(outcome.counts.values())} files, seed {seed}, {seconds:.0f} s on {os.cpu_count()} cores '
        f'({platform.machine()}), {time.strftime("%Y-%m-%d")}, Python {platform.python_version()}, '
        f'torch {torch.__version__}, mmengine {mmengine.__version__}.',
        '',
        '| damage | refused with a typed error | harmless, resumed | untyped error |',
        '| --- | --- | --- | --- |',
        *rows,
        '',
        f'{len(outcome.failures)} failures. A failure is an untyped error, an error that does not name the file, a state that '
        'differs after an error, damaged bytes that were applied, code that ran, or an accepted file with which the next '
        'iteration fails. Harmless are a changed date or comment in the archive, a changed log entry, and values that could '
        'have been saved (another learning rate, say).',
    ]
    return '\n'.join([*lines, *(['', *outcome.failures] if outcome.failures else []), ''])


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--files', type=int, default=10_000)
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--report', type=Path, help='write the result there')
    parser.add_argument(
        '--record', type=Path, help='write what became of each file there, and the files it began with beside it'
    )
    parser.add_argument('--compare', type=Path, help='what --record wrote: the verdicts must be the same')
    parser.add_argument(
        '--loose', action='store_true', help='compare verdicts, errors and named keys, not whole messages'
    )
    args = parser.parse_args()
    begin = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix='fuzz-'))
    before = fuzz_verdicts.read(args.compare, args.seed) if args.compare else None
    checkpoints = before.checkpoints if before else good_checkpoints(folder) if args.record else None
    outcome = run(args.files, args.seed, folder, checkpoints=checkpoints)
    page = report(outcome, args.seed, time.monotonic() - begin)
    print('\n' + page)
    if args.report:
        args.report.write_text(page)
    if args.record:
        fuzz_verdicts.write(args.record, args.seed, outcome.verdicts, checkpoints or {})
    shutil.rmtree(folder)
    different = fuzz_verdicts.compare(before, outcome.verdicts, args.loose) if before else []
    print('\n'.join(different))
    if outcome.failures or different:
        raise SystemExit(1)


if __name__ == '__main__':
    main()
