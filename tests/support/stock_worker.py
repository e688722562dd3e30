"""mmengine without this package goes on from checkpoint files: ``python stock_worker.py FOLDER``.

FOLDER/cases.json maps names to {file, optim_wrapper, hooks, overrides}; FOLDER/results.pth gets what each run started from
and ended with.
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
    parts = dict(wrapper.items()) if hasattr(wrapper, 'optim_wrappers') else {'': wrapper}
    averages = [hook.ema_model.state_dict() for hook in runner.hooks if type(hook).__name__ == 'EMAHook']
    return copy.deepcopy(
        dict(
            iter=runner.iter,
            epoch=runner.epoch,
            weights=runner.model.state_dict(),
            average=averages[0] if averages else None,
            optimizer={name: part.optimizer.state_dict() for name, part in parts.items()},
            scaler={
                name: part.loss_scaler.state_dict() for name, part in parts.items() if hasattr(part, 'loss_scaler')
            },
            base={name: part.base_param_settings for name, part in parts.items()},
        )
    )


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    make_foreign.allow_stock_amp_on_cpu()
    make_foreign.register_pair()
    results = {}
    for name, case in json.loads((folder / 'cases.json').read_text()).items():
        torch.manual_seed(0)
        cfg = make_foreign.config(
            folder / name,
            case['optim_wrapper'],
            epochs=EPOCHS,
            resume=True,
            load_from=case['file'],
            custom_hooks=[*case.get('hooks', []), dict(type='KeepStart')],
            **case.get('overrides', {}),
        )
        runner = Runner.from_cfg(cfg)
        runner.train()
        kind = type(getattr(runner.optim_wrapper, 'optim_wrappers', {}).get('stem', runner.optim_wrapper))
        results[name] = dict(start=runner.start, end=state_of(runner), wrapper=f'{kind.__module__}.{kind.__name__}')
    assert 'amp_wrapper' not in sys.modules, 'this is to show what mmengine does without the package'
    torch.save(results, folder / 'results.pth')


if __name__ == '__main__':
    main(Path(sys.argv[1]))
