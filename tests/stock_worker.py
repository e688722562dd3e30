"""mmengine without this package goes on from checkpoint files: ``python stock_worker.py FOLDER``.

FOLDER/cases.json maps names to {file, optim_wrapper}; FOLDER/results.pth gets what each run started from and ended with.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import make_foreign
import torch
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import Runner

EPOCHS = 4


@HOOKS.register_module()
class KeepStart(Hook):
    """What the run has when everything is loaded and nothing is trained."""

    priority = 'LOWEST'

    def before_train(self, runner: Any) -> None:
        runner.start = state_of(runner)


def state_of(runner: Any) -> dict[str, Any]:
    wrapper = runner.optim_wrapper
    scaler = getattr(wrapper, 'loss_scaler', None)
    return copy.deepcopy(
        dict(
            iter=runner.iter,
            epoch=runner.epoch,
            weights=runner.model.state_dict(),
            optimizer=wrapper.optimizer.state_dict(),
            scaler=None if scaler is None else scaler.state_dict(),
        )
    )


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    make_foreign.allow_stock_amp_on_cpu()
    results = {}
    for name, case in json.loads((folder / 'cases.json').read_text()).items():
        torch.manual_seed(0)
        cfg = make_foreign.config(
            folder / name,
            case['optim_wrapper'],
            epochs=EPOCHS,
            resume=True,
            load_from=case['file'],
            custom_hooks=[dict(type='KeepStart')],
        )
        runner = Runner.from_cfg(cfg)
        runner.train()
        kind = f'{type(runner.optim_wrapper).__module__}.{type(runner.optim_wrapper).__name__}'
        results[name] = dict(start=runner.start, end=state_of(runner), wrapper=kind)
    assert 'amp_wrapper' not in sys.modules, 'this is to show what mmengine does without the package'
    torch.save(results, folder / 'results.pth')


if __name__ == '__main__':
    main(Path(sys.argv[1]))
