"""What ``amp-wrapper test`` does: the metrics of a checkpoint, in FP32 or at a level."""

from __future__ import annotations

import argparse
from pathlib import Path

from mmengine.runner import Runner

from ..checkpoint import sharded
from ..errors import AmpUsageError, nearest
from . import config_checks, config_errors
from .config_options import nested_keys, read_config


def test(args: argparse.Namespace) -> dict[str, float]:
    """Test.

    Args:
        args: The options of ``amp-wrapper test``.

    Returns:
        The metrics.

    Raises:
        AmpConfigError: The config cannot be read, or an option does not go with it.
        AmpUsageError: Config or checkpoint are not there.
        AmpCheckpointError: The checkpoint is damaged.
    """
    path = Path(args.checkpoint)
    if not path.is_file() and not sharded.is_folder(path):
        beside = [other.stem for other in path.parent.glob('*.pth')] if path.parent.is_dir() else []
        problem = 'is a folder, and no checkpoint' if path.is_dir() else f'does not exist{nearest(path.stem, beside)}'
        raise AmpUsageError(f'the checkpoint {args.checkpoint!r} {problem}.')
    cfg = read_config(args.config, args.cfg_options)
    config_checks.check_loops(cfg, 'test_cfg')
    config_checks.check_checkpoint(args.checkpoint)
    cfg.launcher = args.launcher
    cfg.work_dir = args.work_dir or cfg.get('work_dir') or str(Path('work_dirs') / Path(args.config).stem)
    cfg.load_from = args.checkpoint
    if args.opt_level:
        hooks = list(cfg.get('custom_hooks') or [])
        cfg.custom_hooks = [*hooks, dict(type='amp_wrapper.AmpInferenceHook', opt_level=args.opt_level)]
    with nested_keys(cfg, args.cfg_options), config_errors.typed(cfg):
        runner = Runner.from_cfg(cfg)
        config_checks.say_where_data_are_missing(runner)
        metrics: dict[str, float] = runner.test()
    return metrics
