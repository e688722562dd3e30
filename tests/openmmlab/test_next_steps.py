"""The commands that a training ends with: a resumed run keeps its schedules, so a longer one is a new training."""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mmengine.config import Config
from mmengine.registry import PARAM_SCHEDULERS

from amp_wrapper import cli
from amp_wrapper.openmmlab import next_steps, training
from amp_wrapper.openmmlab.config_options import merge_options, parse_options

EPOCHS, LENGTH = 6, 5


def config(schedules: Any, **words: Any) -> Config:
    return Config(dict(train_cfg=dict(by_epoch=True, max_epochs=EPOCHS), param_scheduler=schedules, **words))


def lines(
    cfg: Config, *typed: str, epochs: int = EPOCHS, iters: int = EPOCHS * LENGTH, folder: str = 'work'
) -> list[str]:
    args = cli.parser_of('train')[1].parse_args(['config.py', *typed])
    runner = SimpleNamespace(cfg=cfg, max_epochs=epochs, max_iters=iters, work_dir=str(Path(folder).resolve()))
    return next_steps.lines(runner, args, Path('work/epoch_6.pth').resolve())


def parsed(line: str) -> argparse.Namespace:
    program, name, *words = shlex.split(line)
    assert program == 'amp-wrapper'
    args = cli.parser_of(name)[1].parse_args(words)
    args.command = name
    return args


def rates(cfg: Config, epochs: int) -> list[float]:
    """The learning rate of each iteration, by mmengine's own schedules, as a runner builds them."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    built = []
    nodes = cfg.param_scheduler if isinstance(cfg.param_scheduler, list) else [cfg.param_scheduler]
    for node in nodes:
        words = dict(node)
        words.setdefault('end', epochs if words.get('by_epoch', True) else epochs * LENGTH)
        built.append(PARAM_SCHEDULERS.build(words, default_args=dict(optimizer=optimizer, epoch_length=LENGTH)))
    found = []
    for index in range(epochs * LENGTH):
        found.append(optimizer.param_groups[0]['lr'])
        optimizer.step()
        for each in built:
            if not each.by_epoch or (index + 1) % LENGTH == 0:
                each.step()
    return found


@pytest.mark.parametrize(
    'schedule',
    [
        dict(type='CosineAnnealingLR', T_max=EPOCHS),
        dict(type='CosineAnnealingLR', T_max=EPOCHS, end=EPOCHS),
        dict(type='CosineAnnealingLR', T_max=EPOCHS * LENGTH, by_epoch=False),
        dict(type='MultiStepLR', milestones=[3, 5]),
        dict(type='StepLR', step_size=2),
        dict(type='CosineRestartLR', periods=[2, 4], restart_weights=[1, 0.5], eta_min=0),
    ],
    ids=str,
)
def test_a_longer_training_has_the_same_schedule_stretched(schedule: dict[str, Any]) -> None:
    cfg = config(schedule)
    title, line = lines(cfg)
    assert title == 'Its schedules are over, and stay so in a resumed run. A new training, twice as long:'
    args = parsed(line)
    assert args.command == 'train' and args.resume is None and args.work_dir == f'work_{2 * EPOCHS}_epochs'
    longer = config(schedule)
    merge_options(longer, args.cfg_options)
    assert longer.train_cfg.max_epochs == 2 * EPOCHS
    assert parsed(lines(cfg, folder=f'work_{EPOCHS}_epochs')[-1]).work_dir == args.work_dir
    before, after = rates(cfg, EPOCHS), rates(longer, 2 * EPOCHS)
    if not schedule.get('by_epoch', True):
        assert after[::2] == pytest.approx(before, abs=1e-6)
    else:
        assert after[:: 2 * LENGTH] == pytest.approx(before[::LENGTH], abs=1e-6)
    # what a resumed run would have stayed at is not where this one spends its second half
    assert after[EPOCHS * LENGTH] != pytest.approx(after[-1])


def test_a_warm_up_stays_as_long_as_it_was() -> None:
    warm_up = dict(type='LinearLR', start_factor=0.1, end=1, convert_to_iter_based=True)
    cfg = config([warm_up, dict(type='CosineAnnealingLR', begin=1, T_max=EPOCHS - 1, convert_to_iter_based=True)])
    args = parsed(lines(cfg)[-1])
    assert args.cfg_options == {'train_cfg.max_epochs': 2 * EPOCHS, 'param_scheduler.1.T_max': 2 * EPOCHS - 1}
    merge_options(cfg, args.cfg_options)
    found = rates(cfg, 2 * EPOCHS)
    assert found[:LENGTH] == sorted(found[:LENGTH]) and found[LENGTH:] == sorted(found[LENGTH:], reverse=True)
    assert found[-1] < 0.01


def test_schedules_of_several_optimizers() -> None:
    cfg = config(
        dict(head=dict(type='MultiStepLR', milestones=[4]), body=[dict(type='CosineAnnealingLR', T_max=EPOCHS)])
    )
    assert parsed(lines(cfg)[-1]).cfg_options == {
        'train_cfg.max_epochs': 2 * EPOCHS,
        'param_scheduler.head.milestones': [8],
        'param_scheduler.body.0.T_max': 2 * EPOCHS,
    }


@pytest.mark.parametrize(
    'schedules',
    [
        None,
        # a constant rate after a warm-up
        [dict(type='LinearLR', start_factor=0.1, end=1)],
        [dict(type='LinearLR', start_factor=0.1, by_epoch=False, end=LENGTH)],
        # one that was planned for a longer training
        dict(type='CosineAnnealingLR', T_max=2 * EPOCHS, end=2 * EPOCHS),
    ],
    ids=str,
)
def test_a_run_whose_schedules_do_not_end_with_it_goes_on(schedules: Any) -> None:
    title, line = lines(config(schedules), '--opt-level', 'O5', '--auto-scale-lr', '--cfg-options', 'a.b=[1,2]')
    assert title == 'Go on from it, for as long again:'
    args = parsed(line)
    assert Path(args.resume) == Path('work/epoch_6.pth') and args.opt_level == 'O5' and args.auto_scale_lr
    assert args.cfg_options == {'a.b': [1, 2], 'train_cfg.max_epochs': 2 * EPOCHS} and args.work_dir is None


def test_iterations() -> None:
    cfg = Config(
        dict(
            train_cfg=dict(by_epoch=False, max_iters=30),
            param_scheduler=dict(type='PolyLR', by_epoch=False, begin=0, end=30, power=0.9),
        )
    )
    args = parsed(lines(cfg, '--work-dir', 'mine', epochs=1, iters=30)[-1])
    assert (
        args.cfg_options == {'train_cfg.max_iters': 60, 'param_scheduler.end': 60} and args.work_dir == 'work_60_iters'
    )


@pytest.mark.parametrize('typed', [('--resume', 'old.pth'), ('--cfg-options', 'resume=True', 'load_from=old.pth')])
def test_a_new_training_is_not_resumed(typed: tuple[str, ...]) -> None:
    cfg = config(dict(type='CosineAnnealingLR', T_max=EPOCHS), test_dataloader=dict())
    testing, line = lines(cfg, *typed)[1::2]
    args = parsed(line)
    assert args.resume is None and not {'resume', 'load_from'} & set(args.cfg_options)
    # weights that a training begins with are kept
    assert parsed(lines(cfg, '--cfg-options', 'load_from=w.pth')[-1]).cfg_options['load_from'] == 'w.pth'
    assert parsed(testing).cfg_options is None


@pytest.mark.parametrize(
    ('resume', 'saves', 'words', 'again'),
    [
        (None, True, 'The newest checkpoint is work/epoch_2.pth. Go on from it:', 'work/epoch_2.pth'),
        ('work/epoch_1.pth', True, 'The newest checkpoint is work/epoch_2.pth. Go on from it:', 'work/epoch_2.pth'),
        ('work/epoch_1.pth', False, 'No checkpoint was saved since it was resumed.', 'work/epoch_1.pth'),
        ('auto', False, 'No checkpoint was saved since it was resumed.', 'auto'),
        (None, False, 'No checkpoint was saved.', None),
    ],
)
def test_what_an_interrupted_training_says(
    resume: str | None,
    saves: bool,
    words: str,
    again: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Ctrl-C: what this training has saved, not an earlier one in the same folder, and a command with what was typed."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / 'work'
    folder.mkdir()
    last = folder / 'last_checkpoint'
    last.write_text(str(folder / 'epoch_9.pth'))
    os.utime(last, (1e9, 1e9))

    class Interrupted:
        rank, epoch, iter, work_dir = 0, 2, 12, str(folder)
        cfg = Config(dict(train_cfg=dict(by_epoch=True)))
        model, message_hub = torch.nn.Linear(1, 1), SimpleNamespace(log_scalars={})

        def train(self) -> None:
            if saves:
                last.write_text(str(folder / 'epoch_2.pth'))
            raise KeyboardInterrupt

    typed = ['config.py', '--work-dir', 'work', '--cfg-options', 'seed=1']
    typed += [] if resume is None else ['--resume', *([] if resume == 'auto' else [resume])]
    args = cli.parser_of('train')[1].parse_args(typed)
    monkeypatch.setattr(training, 'load_config', lambda args: Config(dict(work_dir='work', launcher='none')))
    monkeypatch.setattr(training, 'build_runner', lambda cfg: Interrupted())
    monkeypatch.setattr(training.config_checks, 'say_where_data_are_missing', lambda runner: None)
    with pytest.raises(KeyboardInterrupt):
        training.train(args)
    said = capsys.readouterr().out
    assert f'Interrupted after 2 epochs, 12 iterations. {words}' in said
    if again is None:
        assert said.endswith(f'{words}\n')
        return
    command = parsed(said.splitlines()[-1])
    assert (command.command, command.config, command.resume, command.work_dir) == ('train', 'config.py', again, 'work')
    assert command.cfg_options == {'seed': 1}


@pytest.mark.parametrize('launcher', ['slurm', 'mpi'])
def test_the_launcher_is_kept(launcher: str) -> None:
    args = cli.parser_of('train')[1].parse_args(['config.py', '--launcher', launcher])
    assert parsed(next_steps.resuming(args, None)).launcher == launcher


def test_what_to_test() -> None:
    cfg = config(None, test_dataloader=dict())
    options = ['data_root=/data', 'train_cfg.max_epochs=3', 'optim_wrapper.loss_scale=8', 'model.width=4']
    title, line = lines(cfg, '--cfg-options', *options)[:2]
    assert title == 'Test it:'
    args = parsed(line)
    assert args.command == 'test' and Path(args.checkpoint) == Path('work/epoch_6.pth')
    assert args.cfg_options == parse_options(['data_root=/data', 'model.width=4'])
