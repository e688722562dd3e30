"""What ``amp-wrapper train`` does with an mmengine config: command line into the config, the run, and how to go on from it."""

from __future__ import annotations

import argparse
import gc
import os
import time
from pathlib import Path
from typing import Any

import torch
from mmengine.config import Config
from mmengine.runner import Runner

from ..checkpoint import file as checkpoint_file
from ..checkpoint import newest, sharded
from ..errors import AmpConfigError, AmpUsageError
from . import config_checks, config_errors
from .config_options import nested_keys, read_config


def train(args: argparse.Namespace) -> None:
    """Train, and say how to go on.

    Args:
        args: The options of ``amp-wrapper train``.

    Raises:
        AmpError: Config, options or checkpoint cannot be used; nothing has been written.
        SystemExit: With 0, after a SIGTERM for which everything has been saved.
        KeyboardInterrupt: Ctrl-C, after it was said how to go on.
    """
    cfg = load_config(args)
    runner, began = None, time.time()
    if '://' not in cfg.work_dir and os.environ.get('RANK', '0') == '0':
        checkpoint_file.check_writable(cfg.work_dir)
    start_processes_on_cpu(cfg)
    try:
        with nested_keys(cfg, args.cfg_options), config_errors.typed(cfg):
            runner = build_runner(cfg)
            config_checks.say_where_data_are_missing(runner)
            config_errors.say_misspelt_keys(runner, cfg)
            runner.train()
    except SystemExit as ended:
        # saved on SIGTERM: a clean end as well
        if ended.code == 0:
            end_processes()
        raise
    except KeyboardInterrupt:
        if runner is not None and runner.rank == 0:
            say_interrupted(runner, began)
        raise
    report(runner)
    del runner
    end_processes()


def load_config(args: argparse.Namespace) -> Config:
    """The config with the command line's words in it.

    Args:
        args: The options of ``amp-wrapper train``.

    Raises:
        AmpConfigError: The config cannot be read, an option does not go with it, or its wrapper or loops cannot be built.
        AmpUsageError: A file that the options name is not there.
        AmpCheckpointError: The checkpoint is not there, or is none.
    """
    cfg = read_config(args.config, args.cfg_options)
    config_checks.check_parts(cfg, 'model', 'train_dataloader', 'train_cfg', 'optim_wrapper')
    cfg.launcher = args.launcher
    cfg.work_dir = args.work_dir or cfg.get('work_dir') or str(Path('work_dirs') / Path(args.config).stem)
    if args.amp or args.opt_level:
        _choose_wrapper(cfg, args)
    if args.auto_scale_lr:
        if not cfg.get('auto_scale_lr') or 'base_batch_size' not in cfg.auto_scale_lr:
            raise AmpConfigError(
                ['--auto-scale-lr: the config has no auto_scale_lr=dict(base_batch_size=...) to scale by.']
            )
        cfg.auto_scale_lr.enable = True
    if args.resume is not None:
        if args.resume != 'auto' and not config_checks.is_url(args.resume) and not Path(args.resume).exists():
            raise AmpUsageError(
                f'--resume {args.resume}: there is no such checkpoint. Without a path, the newest is taken.'
            )
        if args.resume != 'auto' and Path(args.resume).is_dir() and not sharded.is_folder(args.resume):
            beside = sorted(Path(args.resume).glob('*.pth'), key=lambda path: path.stat().st_mtime)
            remedy = f'--resume {beside[-1]}, or ' if beside else ''
            raise AmpUsageError(
                f'--resume {args.resume} is a folder, and no checkpoint: write {remedy}--work-dir {args.resume} --resume for '
                'the newest in it.'
            )
        cfg.resume = True
        cfg.load_from = None if args.resume == 'auto' else args.resume
    config_checks.check_wrappers(cfg)
    config_checks.check_loops(cfg, 'train_cfg', 'val_cfg')
    if not cfg.get('resume'):
        config_checks.check_checkpoint(cfg.get('load_from'))
    _choose_seed(cfg, args)
    _add_hook(cfg, 'ExactResumeHook')
    _add_hook(cfg, 'AmpMonitorHook')
    if args.save_on_sigterm:
        _add_hook(cfg, 'PreemptionHook')
    return cfg


def _add_hook(cfg: Config, name: str) -> None:
    """Add a hook of ours, unless the config has one with settings of its own."""
    hooks = list(cfg.get('custom_hooks') or [])
    default = [hook for hook in (cfg.get('default_hooks') or {}).values() if hook is not None]
    types = [hook.get('type') if isinstance(hook, dict) else type(hook) for hook in [*default, *hooks]]
    names = [kind if isinstance(kind, str) else getattr(kind, '__name__', '') for kind in types]
    if not any(str(kind).split('.')[-1] == name for kind in names):
        cfg.custom_hooks = [*hooks, dict(type=f'amp_wrapper.{name}')]


def _choose_wrapper(cfg: Config, args: argparse.Namespace) -> None:
    wrapper = cfg.get('optim_wrapper')
    if not wrapper or 'optimizer' not in wrapper:
        raise AmpConfigError(
            ['--amp and --opt-level need a config with a single optimizer (optim_wrapper=dict(optimizer=...)).']
        )
    name = wrapper.get('type', 'OptimWrapper')
    name = name if isinstance(name, str) else name.__name__
    name = name.split('.')[-1]
    if name not in ('OptimWrapper', 'AmpOptimWrapper', 'ApexOptimWrapper', 'TorchAmpOptimWrapper'):
        word = '--opt-level' if args.opt_level else '--amp'
        raise AmpConfigError(
            [f'{word} cannot turn optim_wrapper.type={name!r} into AmpOptimWrapper: change the config.']
        )
    if args.opt_level:
        wrapper.type = 'AmpOptimWrapper'
        wrapper.opt_level = args.opt_level
    elif name == 'OptimWrapper':
        wrapper.type = 'AmpOptimWrapper'
        wrapper.setdefault('loss_scale', 'dynamic')
    else:
        print(f'--amp: the config trains with {name} already', flush=True)


def _choose_seed(cfg: Config, args: argparse.Namespace) -> None:
    """Samplers are built before mmengine reads a checkpoint, so a resumed run needs its seed now."""
    randomness = dict(cfg.get('randomness') or {})
    if args.seed is not None:
        randomness['seed'] = args.seed
    if cfg.get('resume'):
        seed = _saved_seed(cfg)
        if seed is not None and args.seed not in (None, seed):
            print(f'--seed {args.seed}: the checkpoint was trained with seed {seed}, which a resumed run keeps')
        if seed is not None:
            randomness['seed'] = seed
    # mmengine takes an empty dict for a call without its seed
    cfg.pop('randomness', None)
    if randomness:
        cfg.randomness = randomness


def _saved_seed(cfg: Config) -> int | None:
    saving = (cfg.get('default_hooks') or {}).get('checkpoint') or {}
    out_dir = saving.get('out_dir')
    more = [Path(out_dir) / Path(cfg.work_dir).name] if out_dir and '://' not in out_dir else []
    path = cfg.get('load_from') or newest.find_newest(cfg.work_dir, more).path
    if path is None or config_checks.is_url(str(path)):
        return None
    file = newest.load_without_shards(path)
    meta = file.get('meta') if isinstance(file, dict) else None
    seed = meta.get('seed') if isinstance(meta, dict) else None
    return seed if isinstance(seed, int) else None


def start_processes_on_cpu(cfg: Config) -> None:
    """mmengine sets a CUDA device when it starts processes; without a GPU, gloo is started here instead."""
    if cfg.launcher != 'pytorch' or torch.cuda.is_available():
        return
    torch.distributed.init_process_group('gloo')
    if cfg.get('model_wrapper_cfg') is None:
        # what mmengine would take, which reads find_unused_parameters in this case only
        cfg.model_wrapper_cfg = dict(
            type='MMDistributedDataParallel',
            broadcast_buffers=False,
            find_unused_parameters=cfg.get('find_unused_parameters', False),
        )
    if 'DistributedDataParallel' in str(cfg.model_wrapper_cfg.get('type', 'MMDistributedDataParallel')):
        # mmengine hands DDP a GPU otherwise
        cfg.model_wrapper_cfg.setdefault('device_ids', None)


def build_runner(cfg: Config) -> Any:
    """The runner class the config asks for."""
    if 'runner_type' not in cfg:
        return Runner.from_cfg(cfg)
    from mmengine.registry import RUNNERS

    return RUNNERS.build(cfg)


def say_interrupted(runner: Any, began: float) -> None:
    """What an interrupted training has left, and how to go on from it.

    Args:
        runner: Of the training.
        began: When it began: checkpoints that are older are not of this training.
    """
    epochs = '' if runner.cfg.train_cfg.get('by_epoch') is False else f'{runner.epoch} epochs, '
    print(f'\nInterrupted after {epochs}{runner.iter} iterations.', end=' ')
    last = Path(runner.work_dir) / 'last_checkpoint'
    if last.is_file() and last.stat().st_mtime >= began:
        saved = Path(last.read_text().strip())
        print(f'Go on with the same command and --resume {_short(saved)}', flush=True)
    else:
        print('No checkpoint was saved.', flush=True)


def report(runner: Any) -> None:
    """End with what was reached."""
    if runner.rank != 0:
        return
    scalars = runner.message_hub.log_scalars
    metrics = [
        f'{name[4:]} {buffer.current():.2f}'
        for name, buffer in scalars.items()
        if name.startswith('val/') and not name.endswith('time')
    ]
    print(f'\nFinished: epoch {runner.epoch}, iteration {runner.iter}' + ''.join(f', {metric}' for metric in metrics))
    last = Path(runner.work_dir) / 'last_checkpoint'
    if not last.is_file():
        return
    checkpoint = Path(last.read_text().strip())
    print(f'Checkpoint: {_short(checkpoint)}')


def end_processes() -> None:
    """gloo's threads abort a process that ends under them, and so do those of groups that a dead model still holds."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        gc.collect()
        torch.distributed.destroy_process_group()


def _short(path: str | Path) -> str:
    """A path as one would type it here: relative to the current folder where it lies below."""
    path, here = Path(path), Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
