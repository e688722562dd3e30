"""A runner that stands at one checkpoint and resumes from others."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any

import mmengine.runner.runner
import torch
import toy
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import Runner

mmengine.runner.runner.collect_env = dict


class Built(Exception):
    """The runner is built, and has loaded nothing."""


@HOOKS.register_module()
class StopWhenBuilt(Hook):
    """Ends ``Runner.train`` before it loads."""

    priority = 'LOWEST'

    def before_run(self, runner: Any) -> None:
        raise Built


class Target:
    """A runner that resumes again and again.

    Args:
        level: The opt level.
        folder: For its files.
        attached: Whether its model is cast before it resumes.
        files: Checkpoints to take, by name; without them, a run makes its own.
    """

    def __init__(self, level: str, folder: Path, attached: bool, files: dict[str, bytes] | None = None) -> None:
        self.case = toy.everything(level)
        first = folder / f'{level}-{attached}'
        self.names = dict(here=first / 'epoch_2.pth', there=first / 'epoch_3.pth')
        if files is None:
            # an open accumulation is among the things that can be damaged: 7 iterations an epoch, accumulations of 2
            toy.run(
                first, **copy.deepcopy(dict(self.case, train_cfg=dict(by_epoch=True, max_epochs=3, val_interval=1)))
            )
        else:
            first.mkdir()
            for name in self.names.values():
                name.write_bytes(files[f'{level}/{name.name}'])
        case = dict(copy.deepcopy(self.case), resume=True, load_from=str(self.names['here']))
        case['custom_hooks'] = [*case['custom_hooks'], dict(type='StopWhenBuilt')]
        self.runner = Runner.from_cfg(toy.toy_config(first / 'target', **case))
        with contextlib.suppress(Built):
            self.runner.train()
        if attached:
            self.runner.optim_wrapper.initialize_count_status(self.runner.model, 0, 28)
        self.bytes = self.names['there'].read_bytes()
        self.content = torch.load(self.names['there'], weights_only=True)
        self.here = self.resumed(self.names['here'])
        self.there = self.resumed(self.names['there'])
        self.resumed(self.names['here'])

    def resumed(self, path: Path) -> dict[str, Any]:
        """The state after a resume."""
        self.runner.resume(str(path))
        return self.state()

    def state(self) -> dict[str, Any]:
        """Everything a resume changes."""
        runner = self.runner
        hooks = {type(hook).__name__: hook for hook in runner.hooks}
        hub = runner.message_hub
        state = {
            'model': runner.model.state_dict(),
            'optimizer': runner.optim_wrapper.state_dict(),
            'schedulers': [scheduler.state_dict() for scheduler in runner.param_schedulers],
            'place': [runner.epoch, runner.iter, runner.seed],
            'average': hooks['EMAHook'].ema_model.state_dict(),
            'random': hooks['ExactResumeHook']._resumed,
            'logged': {name: buffer.data[0].tolist() for name, buffer in hub.log_scalars.items()},
            'info': {key: repr(value) for key, value in hub.runtime_info.items()},
        }
        return copy.deepcopy(state)

    def can_go_on(self) -> None:
        """One iteration, as the loop would run it; raises what the loop would raise."""
        runner = self.runner
        runner.optim_wrapper.initialize_count_status(runner.model, runner.iter, 10**9)
        for batch in runner.train_loop.dataloader:
            runner.model.train_step(batch, runner.optim_wrapper)
            break
        for scheduler in runner.param_schedulers:
            scheduler.step()
