"""What to type after a training: how to test its checkpoint, and how to go on from it or to train longer."""

from __future__ import annotations

import argparse
import os
import re
import shlex
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from .. import start

#: Entries of a schedule that say how long it is, beside ``end``: counted from its ``begin``.
_LENGTHS = ('T_max', 'total_iters', 'total_steps')
#: Entries of a schedule that say when something happens in it: a number or several.
_MOMENTS = ('milestones', 'step_size', 'periods')
#: Entries of a config that a test does not read.
_OF_TRAINING = ('train_', 'optim_wrapper', 'param_scheduler')


def lines(runner: Any, args: argparse.Namespace, checkpoint: Path) -> list[str]:
    """The end of what ``amp-wrapper train`` says.

    A resumed run keeps its schedules as they were saved, with their ends. Where one of them ends with the training, further
    epochs would be trained at its last value: then the command is that of a new training, twice as long.

    Args:
        runner: Its training is over.
        args: The options of ``amp-wrapper train``.
        checkpoint: The last one.
    """
    cfg = runner.cfg
    found = []
    if cfg.get('test_dataloader') is not None:
        words = [*_program('test'), args.config, start.short(checkpoint)]
        options = _typed_options(args, ('resume', 'load_from'))
        read = {key: value for key, value in options.items() if not key.startswith(_OF_TRAINING)}
        found += ['Test it:', _line(words, read)]
    by_epoch = cfg.train_cfg.get('by_epoch', 'max_epochs' in cfg.train_cfg)
    key, unit = ('max_epochs', 'epochs') if by_epoch else ('max_iters', 'iters')
    length = 2 * getattr(runner, key)
    schedules = list(_schedules(cfg.get('param_scheduler'), 'param_scheduler'))
    ends = [_end(schedule, runner) for _, schedule in schedules]
    if any(end == total for end, total in ends) and not any(end > total for end, total in ends):
        resumed = args.resume is not None or 'resume' in _typed_options(args)
        options = _typed_options(args, ('resume', 'load_from') if resumed else ())
        options[f'train_cfg.{key}'] = length
        for (name, schedule), (end, total) in zip(schedules, ends):
            if end == total:
                options |= {f'{name}.{entry}': value for entry, value in _doubled(schedule, total).items()}
        # the folder of a training that was such a longer one already
        stem = re.sub(r'_\d+_(epochs|iters)$', '', start.short(runner.work_dir))
        words = [*_train(args), *_flags(args, f'{stem}_{length}_{unit}')]
        title = 'Its schedules are over, and stay so in a resumed run. A new training, twice as long:'
    else:
        options = {**_typed_options(args), f'train_cfg.{key}': length}
        words = [*_train(args), '--resume', start.short(checkpoint), *_flags(args, args.work_dir)]
        title = 'Go on from it, for as long again:'
    return [*found, title, _line(words, options)]


def resuming(args: argparse.Namespace, checkpoint: str | None) -> str:
    """The command that goes on with a training that was interrupted.

    Args:
        args: The options of ``amp-wrapper train``.
        checkpoint: From where; None for the newest.
    """
    options = _typed_options(args, ('resume', 'load_from'))
    place = [] if checkpoint is None else [checkpoint]
    return _line([*_train(args), '--resume', *place, *_flags(args, args.work_dir)], options)


def _schedules(node: Any, name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The schedules of a config, with the keys that lead to them: one, a list, or some for each optimizer."""
    if isinstance(node, Mapping) and 'type' in node:
        yield name, node
    elif isinstance(node, Mapping):
        for key, value in node.items():
            yield from _schedules(value, f'{name}.{key}')
    elif isinstance(node, (list, tuple)):
        for index, value in enumerate(node):
            yield from _schedules(value, f'{name}.{index}')


def _end(schedule: Mapping[str, Any], runner: Any) -> tuple[float, int]:
    """Where a schedule ends, and where the training does, in its unit. mmengine lets those without an end end together."""
    total = runner.max_epochs if schedule.get('by_epoch', True) else runner.max_iters
    return schedule.get('end', total), total


def _doubled(schedule: Mapping[str, Any], total: int) -> dict[str, Any]:
    """The entries of a schedule that have to change, so that it goes on to the end of a training twice as long.

    Args:
        schedule: Ends with the training.
        total: Length of the training, in the unit of the schedule.
    """
    begin = schedule.get('begin', 0)
    found: dict[str, Any] = {'end': 2 * total} if 'end' in schedule else {}
    for key in _LENGTHS:
        if schedule.get(key) == total - begin:
            found[key] = 2 * total - begin
    for key in _MOMENTS:
        value = schedule.get(key)
        if isinstance(value, (list, tuple)):
            found[key] = [2 * each for each in value]
        elif value is not None:
            found[key] = 2 * value
    return found


def _typed_options(args: argparse.Namespace, without: Collection[str] = ()) -> dict[str, Any]:
    """The entries of ``--cfg-options``."""
    return {key: value for key, value in (args.cfg_options or {}).items() if key not in without}


def _flags(args: argparse.Namespace, work_dir: str | None) -> list[str]:
    """The options that were typed, but for ``--resume`` and ``--cfg-options``."""
    found = []
    for flag, value in (('--work-dir', work_dir), ('--opt-level', args.opt_level), ('--seed', args.seed)):
        if value is not None:
            found += [flag, str(value)]
    for flag, is_on in (
        ('--amp', args.amp),
        ('--auto-scale-lr', args.auto_scale_lr),
        ('--save-on-sigterm', args.save_on_sigterm),
    ):
        if is_on:
            found.append(flag)
    return found


def _line(words: list[str], options: Mapping[str, Any]) -> str:
    typed = ['--cfg-options', *(f'{name}={value}' for name, value in options.items())] if options else []
    return f'  {shlex.join([*words, *typed])}'


def _program(name: str) -> list[str]:
    """The words that start another command in the way in which this one was started."""
    words = start.typed(name)
    if not start.script():
        return words
    file = next(file for file, command in start.SCRIPTS.items() if command == name)
    return [*words[:-1], str(Path(words[-1]).with_name(file))]


def _train(args: argparse.Namespace) -> list[str]:
    """The beginning of the command that was typed, with the config, for as many processes: only then it is bit for bit."""
    command = [*start.typed('train'), args.config]
    if args.launcher != 'pytorch':
        return command if args.launcher == 'none' else [*command, '--launcher', args.launcher]
    if start.script():
        folder = start.short(Path(start.script()).resolve().parent)
        return [f'{folder}/dist_train.sh', args.config, str(torch.distributed.get_world_size())]
    # torchrun tells its processes how many it started
    here, machines = (int(os.environ.get(name, 1)) for name in ('LOCAL_WORLD_SIZE', 'GROUP_WORLD_SIZE'))
    launch = ['torchrun', f'--nproc-per-node={here}', *([f'--nnodes={machines}'] if machines > 1 else [])]
    return [*launch, '-m', 'amp_wrapper', 'train', args.config, '--launcher', 'pytorch']
