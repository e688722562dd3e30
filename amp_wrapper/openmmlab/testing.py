"""What ``amp-wrapper test`` does: the metrics of a checkpoint, in FP32 or at a level."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from mmengine.hooks import Hook
from mmengine.runner import Runner
from torch import Tensor

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
    if not config_checks.is_url(args.checkpoint) and not path.is_file() and not sharded.is_folder(path):
        beside = [other.stem for other in path.parent.glob('*.pth')] if path.parent.is_dir() else []
        problem = 'is a folder, and no checkpoint' if path.is_dir() else f'does not exist{nearest(path.stem, beside)}'
        raise AmpUsageError(f'the checkpoint {args.checkpoint!r} {problem}.')
    cfg = read_config(args.config, args.cfg_options)
    config_checks.check_loops(cfg, 'test_cfg')
    config_checks.check_checkpoint(args.checkpoint)
    config_checks.check_parts(cfg, 'model', 'test_dataloader', 'test_cfg', 'test_evaluator')
    cfg.launcher = args.launcher
    cfg.work_dir = args.work_dir or cfg.get('work_dir') or str(Path('work_dirs') / Path(args.config).stem)
    cfg.load_from = args.checkpoint
    if args.opt_level:
        hooks = list(cfg.get('custom_hooks') or [])
        cfg.custom_hooks = [*hooks, dict(type='amp_wrapper.AmpInferenceHook', opt_level=args.opt_level)]
    with nested_keys(cfg, args.cfg_options), config_errors.typed(cfg):
        runner = Runner.from_cfg(cfg)
        config_checks.say_where_data_are_missing(runner)
        fit = _Fit()
        runner.register_hook(fit)
        metrics: dict[str, float] = runner.test()
    if fit.others:
        shown = ', '.join(fit.others[:3]) + (', ...' if len(fit.others) > 3 else '')
        print(
            f'\n{len(fit.others)} of the {fit.count} parameters and buffers of the model are not those of the checkpoint, '
            f'which lacks them or has them in another shape ({shown}): what was tested is not the model that was trained.'
        )
    return metrics


class _Fit(Hook):
    """Looks which parameters and buffers of the model a checkpoint has; mmengine loads what fits, and goes on.

    Attributes:
        others: The names of those that it has not.
        count: Of all.
    """

    # before one casts the model
    priority = 'HIGHEST'

    def __init__(self) -> None:
        self.others: list[str] = []
        self.count = 0
        # those of the model that the checkpoint lacks under this name or in this shape, and their versions
        self._missing: dict[str, tuple[Tensor, int]] = {}

    def after_load_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        """Called by mmengine before the model takes the values.

        Args:
            runner: With the model.
            checkpoint: As it was read.
        """
        values = checkpoint.get('state_dict', checkpoint)
        shapes = {re.sub(r'^module\.', '', name): getattr(value, 'shape', None) for name, value in values.items()}
        own = _tensors(runner.model)
        self.count = len(own)
        self._missing = {
            name: (value, value._version) for name, value in own.items() if shapes.get(name) != value.shape
        }

    def before_test(self, runner: Any) -> None:
        """Called by mmengine after the model has taken the values: a module may have renamed or resized some.

        Args:
            runner: With the model.
        """
        own = _tensors(runner.model)
        self.others = [
            name
            for name, (value, version) in self._missing.items()
            # mmengine and torch go without this one
            if own.get(name) is value and value._version == version and not name.endswith('num_batches_tracked')
        ]
        self._missing = {}


def _tensors(model: Any) -> dict[str, Tensor]:
    """Parameters and buffers that checkpoints hold, without the name of a wrapper."""
    found = model.state_dict(keep_vars=True)
    return {re.sub(r'^module\.', '', name): value for name, value in found.items() if isinstance(value, Tensor)}
