"""``amp-wrapper train``, ``test``, ``report`` and ``suggest-level`` with an mmengine config."""

from __future__ import annotations

import argparse
import functools
import gc
import os
from pathlib import Path
from typing import Any

import torch
from mmengine.config import Config
from mmengine.registry import RUNNERS

from ..checkpoint.file import replacing
from ..diagnostics.page import Page
from ..diagnostics.report import report_on
from ..diagnostics.sandbox import Task
from ..diagnostics.suggest import suggest
from ..engine.clipping import GradientClip
from ..errors import AmpConfigError, AmpUsageError
from ..policy import resolve
from .from_config import FromConfig, check_exists, read_config, seeded

#: Wrappers that ``--amp`` and ``--opt-level`` may replace.
_WRAPPERS = ('OptimWrapper', 'AmpOptimWrapper', 'ApexOptimWrapper', 'TorchAmpOptimWrapper')
#: Options of a config that every level takes, beside the loss scale and its bounds.
_SHARED = ('keep_fp32', 'fp32_ops', 'keep_inputs', 'skip_nonfinite', 'restore_buffers_on_skip', 'from_16bit')


def train(args: argparse.Namespace) -> None:
    """Train, and print the metrics and the last checkpoint.

    Args:
        args: The options of ``amp-wrapper train``.

    Raises:
        AmpError: Config, options or checkpoint cannot be used.
    """
    cfg = _read(args)
    if args.amp or args.opt_level:
        _choose_wrapper(cfg, args.opt_level)
    if args.auto_scale_lr:
        if 'base_batch_size' not in (cfg.get('auto_scale_lr') or {}):
            raise AmpConfigError(['--auto-scale-lr: the config has no auto_scale_lr=dict(base_batch_size=...).'])
        cfg.auto_scale_lr.enable = True
    if args.resume is not None:
        cfg.resume = True
        cfg.load_from = None if args.resume == 'auto' else args.resume
    if cfg.get('load_from') is not None:
        check_exists(cfg.load_from)
    if args.seed is not None:
        cfg.randomness = {**(cfg.get('randomness') or {}), 'seed': args.seed}
    _add_hook(cfg, 'ExactResumeHook')
    # None leaves it out, as for the hooks of mmengine
    if args.monitor is not None or (cfg.get('default_hooks') or {}).get('amp_monitor', '') is not None:
        _add_hook(cfg, 'AmpMonitorHook', **({} if args.monitor is None else {'interval': args.monitor}))
    runner = _build_runner(cfg)
    runner.train()
    if runner.rank == 0:
        _print_result(runner)
    del runner
    _end_processes()


def test(args: argparse.Namespace) -> None:
    """Test a checkpoint, and print the metrics.

    Args:
        args: The options of ``amp-wrapper test``.

    Raises:
        AmpError: Config, options or checkpoint cannot be used.
    """
    check_exists(args.checkpoint)
    cfg = _read(args)
    cfg.load_from = args.checkpoint
    if args.opt_level:
        _add_hook(cfg, 'AmpInferenceHook', opt_level=args.opt_level)
    runner = _build_runner(cfg)
    metrics = runner.test()
    if runner.rank == 0:
        shown = ', '.join(f'{name} {value:.2f}' for name, value in metrics.items())
        print(f'\nTested at {args.opt_level or "FP32"}: {shown}')
    del runner
    _end_processes()


def _read(args: argparse.Namespace) -> Config:
    cfg = read_config(args.config, args.cfg_options)
    cfg.launcher = args.launcher
    cfg.work_dir = args.work_dir or cfg.get('work_dir') or str(Path('work_dirs') / Path(args.config).stem)
    return cfg


def _choose_wrapper(cfg: Config, opt_level: str | None) -> None:
    """Make the wrapper of a config ``AmpOptimWrapper``, at a level or, for ``--amp``, at its default, O1.

    Raises:
        AmpConfigError: It has several optimizers, or is a class of the user's.
    """
    option = '--opt-level' if opt_level else '--amp'
    wrapper: Any = cfg.get('optim_wrapper') or {}
    if 'optimizer' not in wrapper:
        raise AmpConfigError([f'{option} needs a config with a single optimizer (optim_wrapper=dict(optimizer=...)).'])
    kind = wrapper.get('type', 'OptimWrapper')
    name = (kind if isinstance(kind, str) else kind.__name__).split('.')[-1]
    if name not in _WRAPPERS:
        raise AmpConfigError([f'{option} cannot replace optim_wrapper.type={name!r}: change the config.'])
    if opt_level:
        wrapper.update(type='AmpOptimWrapper', opt_level=opt_level)
    elif name == 'OptimWrapper':
        wrapper.type = 'AmpOptimWrapper'
    else:
        print(f'--amp: the config trains with {name} already', flush=True)


def _add_hook(cfg: Config, name: str, **settings: Any) -> None:
    """Add a hook of this package, or change the one that the config has."""
    hooks = list(cfg.get('custom_hooks') or [])
    for hook in [*hooks, *(cfg.get('default_hooks') or {}).values()]:
        kind = hook.get('type') if isinstance(hook, dict) else type(hook)
        if str(getattr(kind, '__name__', kind)).split('.')[-1] == name:
            if settings:
                hook.update(settings)
            return
    cfg.custom_hooks = [*hooks, dict(type=f'amp_wrapper.{name}', **settings)]


def _build_runner(cfg: Config) -> Any:
    """Build the runner of the class that the config asks for. Without a GPU, processes are started with gloo."""
    if cfg.launcher == 'pytorch' and not torch.cuda.is_available():
        # mmengine sets a CUDA device when it starts processes
        torch.distributed.init_process_group('gloo')
        if cfg.get('model_wrapper_cfg') is None:
            # what mmengine takes, which reads find_unused_parameters in this case only
            cfg.model_wrapper_cfg = dict(
                type='MMDistributedDataParallel',
                broadcast_buffers=False,
                find_unused_parameters=cfg.get('find_unused_parameters', False),
            )
        if 'DistributedDataParallel' in str(cfg.model_wrapper_cfg.get('type', 'MMDistributedDataParallel')):
            # mmengine gives DDP a GPU otherwise
            cfg.model_wrapper_cfg.setdefault('device_ids', None)
    if (cfg.get('default_hooks') or {}).get('amp_monitor', '') is None:
        # mmengine takes None for its own hooks alone
        del cfg.default_hooks['amp_monitor']
    return RUNNERS.build(cfg)


def _end_processes() -> None:
    """End gloo, whose threads abort a process that ends under them, also those of groups that a dead model still holds."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        gc.collect()
        torch.distributed.destroy_process_group()


def _print_result(runner: Any) -> None:
    metrics = ''.join(
        f', {name[4:]} {values.current():.2f}'
        for name, values in runner.message_hub.log_scalars.items()
        if name.startswith('val/') and not name.endswith('time')
    )
    print(f'\nFinished: epoch {runner.epoch}, iteration {runner.iter}{metrics}')
    last = Path(runner.work_dir) / 'last_checkpoint'
    if last.is_file():
        checkpoint, here = Path(last.read_text().strip()), Path.cwd()
        print(f'Checkpoint: {checkpoint.relative_to(here) if checkpoint.is_relative_to(here) else checkpoint}')


def report(args: argparse.Namespace) -> None:
    """Report on the model of a config with the first batch of its training data: in the terminal, and in files.

    Args:
        args: The options of ``amp-wrapper report``.

    Raises:
        AmpError: Config, options, checkpoint or data cannot be used; a file cannot be written.
    """
    _check_files(args)
    built = FromConfig(args.config, args.cfg_options, args.checkpoint)
    policy = resolve(args.opt_level or built.policy.opt_level, **built.policy.overrides)
    run = functools.partial(built.loss_fn, batch=built.batches(1)[0])
    with seeded(built.config):
        found = report_on(_task_of(built), run, policy, args.config)
    _show(found, args, args.depth)


def suggest_level(args: argparse.Namespace) -> int:
    """Try the levels on what a config trains: its model, data, optimizer, clipping, and the options of its wrapper.

    Args:
        args: The options of ``amp-wrapper suggest-level``.

    Returns:
        The exit status: 130 where it was interrupted.

    Raises:
        AmpError: Config, data or options cannot be used; a file cannot be written.
    """
    _check_files(args)
    built = FromConfig(args.config, args.cfg_options, args.checkpoint, args.device)
    optimizer, given = built.make_optimizer(built.model), built.policy.overrides
    label = f'{type(optimizer).__name__} of the config, with a learning rate of {optimizer.defaults.get("lr")}'
    shared = {name: given[name] for name in given if name in _SHARED or name.endswith('loss_scale')}
    batches, options = built.batches(max(args.steps, 1)), dict(steps=args.steps, seed=args.seed, prefer=args.prefer)
    found = suggest(_task_of(built), built.loss_fn, batches, shared, args.levels, label, **options)
    _show(found, args)
    return 130 if found.data['interrupted'] else 0


def _task_of(built: FromConfig) -> Task:
    clip = GradientClip.parse(built.config.optim_wrapper.get('clip_grad'))
    return Task(built.model, built.make_optimizer, built.attach, surrounds=True, clip=clip)


def _check_files(args: argparse.Namespace) -> None:
    """Refuse ``--html`` and ``--json`` that cannot be written, before the work that fills them.

    Raises:
        AmpUsageError: A folder, an empty name, or a file in a folder that cannot be written to.
    """
    for option, path in (('html', args.html), ('json', args.json)):
        if path is not None:
            place = next(above for above in Path(path).absolute().parents if above.exists())
            if not path or Path(path).is_dir() or not place.is_dir() or not os.access(place, os.W_OK):
                raise AmpUsageError(f'--{option} {path!r} cannot be written: give a file in a folder that is writable.')


def _show(found: Page, args: argparse.Namespace, depth: int | None = None) -> None:
    """Write the files that were asked for, and print what was found."""
    written = {args.html: found.html, args.json: found.json}
    try:
        # first: whoever reads the text may go
        for path, make in written.items():
            if path is not None:
                with replacing(path) as part:
                    part.write_text(make(), encoding='utf-8')
    finally:
        print(found.text(depth))
    for path in filter(None, written):
        print(f'Written: {path}')
