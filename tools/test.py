"""Test a checkpoint."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mmengine.config import Config, DictAction
from options import LEVELS, merge_options


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The options that mmengine users know, and --opt-level."""
    parser = argparse.ArgumentParser(
        description='Test a checkpoint. No optimizer wrapper exists here, so this runs in FP32 unless --opt-level says '
        'otherwise; validation during training runs at the level of the training.',
        epilog='example: python tools/test.py configs/digits/cnn_o2.py work_dirs/cnn_o2/epoch_10.pth --opt-level O2',
    )
    parser.add_argument('config', help='config file, text or pure Python')
    parser.add_argument('checkpoint', help='checkpoint file; its weights are FP32 whatever the level of the training')
    parser.add_argument('--work-dir', help='folder for logs and metrics; default: work_dirs/<name of the config>')
    parser.add_argument('--opt-level', choices=LEVELS, help='run the forward passes at this level (default: FP32)')
    parser.add_argument('--cfg-options', nargs='+', action=DictAction, metavar='KEY=VALUE', help='override the config')
    parser.add_argument(
        '--launcher', choices=('none', 'pytorch', 'slurm', 'mpi'), default='none', help='how processes were started'
    )
    parser.add_argument('--local_rank', '--local-rank', type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    os.environ.setdefault('LOCAL_RANK', str(args.local_rank))
    return args


if __name__ == '__main__':
    # --help and wrong words are answered before the imports below, which take seconds
    parse_args()

from mmengine.runner import Runner
from projects import check

import amp_wrapper
from amp_wrapper.checkpoint import sharded


def main(argv: list[str] | None = None) -> dict:
    """Test; returns the metrics."""
    args = parse_args(argv)
    if not Path(args.checkpoint).is_file() and not sharded.is_folder(args.checkpoint):
        raise SystemExit(f'checkpoint {args.checkpoint!r} does not exist')
    check(args.config)
    cfg = Config.fromfile(args.config)
    merge_options(cfg, args.cfg_options)
    cfg.launcher = args.launcher
    cfg.work_dir = args.work_dir or cfg.get('work_dir') or str(Path('work_dirs') / Path(args.config).stem)
    cfg.load_from = args.checkpoint
    if args.opt_level:
        hooks = list(cfg.get('custom_hooks') or [])
        cfg.custom_hooks = [*hooks, dict(type='amp_wrapper.AmpInferenceHook', opt_level=args.opt_level)]
    try:
        metrics = Runner.from_cfg(cfg).test()
    except amp_wrapper.AmpError as error:
        raise SystemExit(f'{type(error).__name__}: {error}') from None
    print(
        f'\nTested at {args.opt_level or "FP32"}: ' + ', '.join(f'{key} {value:.2f}' for key, value in metrics.items())
    )
    return metrics


if __name__ == '__main__':
    main()
