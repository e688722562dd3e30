"""Checkpoints that are damaged at random give a typed error that names the file, and nothing of them is applied.

A runner stands at one checkpoint and is asked to resume from a damaged copy of another; ``nox -s nightly`` damages more
(``FILES``, ``SEED``).
"""

from __future__ import annotations

import copy
import os
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from bits import differences
from mmengine.hooks import Hook
from mmengine.runner import Runner

from amp_wrapper import AmpError

FILES, SEED = int(os.environ.get('FILES', 400)), int(os.environ.get('SEED', 0))


class Target:
    """A runner at one checkpoint, and another checkpoint that is damaged."""

    def __init__(self, level: str, folder: Path) -> None:
        case = toy.everything(level, max_epochs=2)
        toy.run(folder, **copy.deepcopy(case))
        self.here, other = folder / 'epoch_1.pth', folder / 'epoch_2.pth'
        self.bytes, self.content = other.read_bytes(), torch.load(other, weights_only=True)
        self.runner = Runner.from_cfg(toy.toy_config(folder / 'target', resume=True, load_from=str(self.here), **case))
        self.runner.register_hook(StopWhenLoaded(), priority='LOWEST')
        with pytest.raises(toy.Stop):
            self.runner.train()
        self.damaged = folder / 'damaged.pth'
        self.there = self.resumed(other)
        self.before = self.resumed(self.here)

    def resumed(self, path: Path) -> dict[str, Any]:
        self.runner.resume(str(path))
        return self.state()

    def state(self) -> dict[str, Any]:
        """Everything that a resume changes."""
        runner = self.runner
        average = next(hook for hook in runner.hooks if type(hook).__name__ == 'EMAHook')
        state = {
            'model': runner.model.state_dict(),
            'optimizer': runner.optim_wrapper.state_dict(),
            'schedulers': [scheduler.state_dict() for scheduler in runner.param_schedulers],
            'place': [runner.epoch, runner.iter, runner.seed],
            'average': average.ema_model.state_dict(),
            'logged': {name: buffer.data[0].tolist() for name, buffer in runner.message_hub.log_scalars.items()},
            'info': {key: repr(value) for key, value in runner.message_hub.runtime_info.items()},
        }
        return copy.deepcopy(state)

    def attack(self, kind: str, dice: random.Random) -> str:
        """Damage the file in one way, and resume from it: 'refused', 'harmless', or what went wrong."""
        KINDS[kind](self, dice)
        try:
            self.runner.resume(str(self.damaged))
        except AmpError as error:
            rows = differences(self.before, self.state())
            if rows:
                self.resumed(self.here)
                return f'{kind}: half-applied: {rows[:3]} after: {error}'
            return 'refused' if str(self.damaged) in str(error) else f'{kind}: the file is not named: {error}'
        except Exception as error:
            self.resumed(self.here)
            return f'{kind}: {type(error).__name__}: {str(error)[:300]}'
        rows = differences(self.there, self.state())
        self.resumed(self.here)
        return f'{kind}: accepted: {rows[:3]}' if rows or kind != 'bytes' else 'harmless'


class StopWhenLoaded(Hook):
    """Ends ``Runner.train`` before the first iteration."""

    def before_train(self, runner: Any) -> None:
        raise toy.Stop


def _damage_bytes(target: Target, dice: random.Random) -> None:
    data, changed = target.bytes, bytearray(target.bytes)
    start, length = dice.randrange(len(data)), dice.choice((1, 64, 512, 5000))
    for _ in range(dice.choice((1, 1, 2, 8, 100))):
        changed[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    other = dice.randrange(len(data) - 512)
    damage = dice.choice((
        data[:start],
        bytes(changed),
        data[:start] + bytes(min(length, len(data) - start)) + data[start + length :],
        data[:start] + dice.randbytes(length) + data[start:],
        data[:start] + data[start + length :],
        data[:other] + data[start : start + 512] + data[other + 512 :],
    ))  # fmt: skip
    target.damaged.write_bytes(damage)


def _another_model(target: Target, dice: random.Random) -> None:
    """A file that torch writes and reads without complaint, with one weight or buffer of the model missing, renamed or cut."""
    # with the versions of its modules, as every state dict that torch writes
    part = copy.copy(target.content['state_dict'])
    name = dice.choice(list(part))
    value = part.pop(name)
    change = dice.choice(('remove', 'rename', 'reshape'))
    if change != 'remove':
        part[name if change == 'reshape' else f'{name}x'] = value if change == 'rename' else torch.stack([value, value])
    torch.save({**target.content, 'state_dict': part}, target.damaged)


KINDS: dict[str, Callable[[Target, random.Random], None]] = {'bytes': _damage_bytes, 'another model': _another_model}


def attacked(target: Target, files: int, seed: int) -> tuple[Counter[str], list[str]]:
    """How many files were refused, and what went wrong."""
    dice = random.Random(seed)
    kinds = [dice.choice(('bytes', 'bytes', 'another model')) for _ in range(files)]
    found = [target.attack(kind, dice) for kind in kinds]
    return Counter(found), [words for words in found if words not in ('refused', 'harmless')]


@pytest.mark.parametrize('level', ['O2'])
def test_damaged_checkpoints_are_refused_whole(level: str, tmp_path: Path) -> None:
    target = Target(level, tmp_path)
    assert differences(target.before, target.there)
    found, wrong = attacked(target, 60, 4)
    assert wrong == [] and found['refused'] > 40


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize('level', ['O0', 'O1', 'O2', 'O5'])
def test_more_damaged_checkpoints_are_refused_whole(level: str, tmp_path: Path) -> None:
    _, wrong = attacked(Target(level, tmp_path), FILES, SEED)
    assert wrong == []
