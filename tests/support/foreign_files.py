"""The files under tests/data/foreign that this package did not write, and runs that go on from them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import make_foreign
import torch
from bits import identical
from mmengine.hooks import Hook
from mmengine.runner import Runner

from amp_wrapper import checkpoint
from amp_wrapper.checkpoint import file as checkpoint_file

ROOT = Path(__file__).resolve().parents[2]
FOREIGN = ROOT / 'tests' / 'data' / 'foreign'
KINDS = {
    'plain_sgd': 'plain',
    'plain_adamw': 'plain',
    'plain_pair': 'plain',
    'ema': 'plain',
    'stock_sgd': 'stock',
    'stock_adamw': 'stock',
    'stock_bf16': 'stock',
    'apex_wrapper': 'apex',
    'raw_apex': 'raw_apex',
    'raw_apex_imagenet': 'raw_apex',
    'weights': 'weights',
    'bare_legacy': 'weights',
}
#: What a raw file does not tell.
POSITION = {'raw_apex': dict(epoch=2, iteration=6), 'raw_apex_imagenet': dict(iteration=6)}
#: (scale, tracker) of each loss.
SCALES = {
    'stock_sgd': [(2048.0, 2)],
    'stock_adamw': [(2048.0, 2)],
    'apex_wrapper': [(4096.0, 3)],
    'raw_apex': [(4096.0, 3), (512.0, 1017)],
    'raw_apex_imagenet': [(4096.0, 3)],
}
STOCK_KEYS = {'scale', 'growth_factor', 'backoff_factor', 'growth_interval', '_growth_tracker'}
make_foreign.register_pair()


def read(name: str) -> Any:
    return checkpoint_file.load(FOREIGN / f'{name}.pth')


def weights_of(file: Any) -> dict[str, Any]:
    weights = dict(file.get('state_dict', file.get('model', file)))
    return {name.removeprefix('module.'): value for name, value in weights.items()}


def unchanged(call: Callable[[Any], Any], file: Any) -> Any:
    """Call, and see that the argument is what it was, down to bits and keys."""
    before = copy.deepcopy(file)
    result = call(file)
    assert identical(file, before)
    return result


class KeepStart(Hook):
    """What the run has when everything is loaded and nothing is trained."""

    priority = 'LOWEST'

    def before_train(self, runner: Any) -> None:
        wrapper = runner.optim_wrapper
        parts = dict(wrapper.items()) if hasattr(wrapper, 'optim_wrappers') else {'': wrapper}
        runner.start = copy.deepcopy(
            dict(
                position=(runner.epoch, runner.iter),
                weights=runner.model.state_dict(),
                optimizer={name: part.optimizer.state_dict() for name, part in parts.items()},
                scalers={name: [s.state_dict() for s in part.loss_scalers] for name, part in parts.items()},
                base={name: part.base_param_settings for name, part in parts.items()},
            )
        )


def resume(folder: Path, path: Path, wrapper: dict[str, Any], epochs: int = 3, **overrides: Any) -> Runner:
    """Resume a file with mmengine's Runner, and train on."""
    if 'stem' in wrapper:
        overrides.setdefault('model', dict(type='ForeignPair'))
        overrides.setdefault('param_scheduler', None)
    cfg = make_foreign.config(folder, wrapper, epochs=epochs, resume=True, load_from=str(path), **overrides)
    runner = Runner.from_cfg(cfg)
    runner.register_hook(KeepStart())
    runner.train()
    return runner


def losses_file(count: int = 3, window: bool = True) -> dict[str, Any]:
    """Ours at O2 with several losses, an open accumulation and hysteresis, as AmpEngine writes it."""
    file = read('stock_sgd')
    state = dict(file['optimizer'])
    scaler = state.pop('loss_scaler')
    rest = dict(growth_interval=2000, hysteresis_tracker=2, dynamic=True, steps=9)
    scalers = [{**scaler, **rest, 'scale': 2.0**i * 256, '_growth_tracker': i, 'skips': i} for i in range(count)]
    gradients = [torch.ones(2), None, *[torch.ones(2)] * 4]
    opened = checkpoint.Window(gradients, True, [True] * count, [0.0] * count) if window else None
    own = checkpoint.write(state, {'opt_level': 'O2', 'num_losses': count}, scalers, opened, False)
    return {**file, 'optimizer': own}
