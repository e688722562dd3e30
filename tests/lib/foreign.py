"""Trainings without this package, beside the checkpoints of other programs in ``tests/data/foreign``.

``python tests/lib/foreign.py FOLDER`` goes on from the files that FOLDER/cases.json names, by mmengine alone, and writes what
each run had at its start and its end to FOLDER/results.pth.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault('OMP_NUM_THREADS', '1')
import mmengine.runner.runner
import torch
import torch.nn.functional as F
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.optim import OptimWrapperDict, build_optim_wrapper
from mmengine.optim.optimizer import amp_optimizer_wrapper
from mmengine.registry import DATASETS, HOOKS, MODELS, OPTIM_WRAPPER_CONSTRUCTORS
from mmengine.runner import Runner
from torch import Tensor, nn
from torch.utils.data import Dataset

FOLDER = Path(__file__).parents[1] / 'data' / 'foreign'
SGD = dict(type='SGD', lr=0.125, momentum=0.9, weight_decay=0.01)
ADAMW = dict(type='AdamW', lr=0.01, weight_decay=0.05)
#: Scale and tracker move within six steps.
SCALER = dict(init_scale=1024.0, growth_interval=4)
PAIR = ('stem', 'head')


def read(path: Path | str) -> Any:
    """A checkpoint; of those in FOLDER, the name is enough."""
    return torch.load(FOLDER / path, weights_only=True)


@MODELS.register_module()
class ForeignNet(BaseModel):
    """A few dozen weights, with BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(3, 4)
        self.bn = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 2)

    def forward(self, inputs: Tensor, labels: Tensor | None = None, mode: str = 'tensor') -> Any:
        logits = self.head(F.relu(self.bn(self.stem(inputs))))
        return dict(loss=F.cross_entropy(logits.float(), labels)) if mode == 'loss' else logits


@MODELS.register_module()
class ForeignPair(ForeignNet):
    """One optimizer for the stem and one for the head, as in a GAN."""

    def train_step(self, data: Any, optim_wrapper: Any) -> Any:
        data = self.data_preprocessor(data, True)
        losses = {}
        for name in PAIR:
            with optim_wrapper[name].optim_context(self):
                loss = self(**data, mode='loss')['loss']
            optim_wrapper[name].update_params(loss)
            losses[name] = loss.detach()
        return losses


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class ForeignPairConstructor:
    def __init__(self, optim_wrapper_cfg: dict[str, Any], paramwise_cfg: Any = None) -> None:
        self.cfg = {name: dict(optim_wrapper_cfg[name]) for name in PAIR}

    def __call__(self, model: nn.Module) -> Any:
        members = {name: build_optim_wrapper(getattr(model, name), cfg) for name, cfg in self.cfg.items()}
        return OptimWrapperDict(**members)


@DATASETS.register_module()
class ForeignData(Dataset):
    """Twelve points of two classes."""

    metainfo = dict(classes=('a', 'b'))

    def __init__(self) -> None:
        self.labels = torch.arange(12) % 2
        self.points = torch.randn(12, 3, generator=torch.Generator().manual_seed(1)) + self.labels[:, None]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return dict(inputs=self.points[index], labels=self.labels[index])


@HOOKS.register_module()
class KeepStart(Hook):
    """What a run has when everything is loaded and nothing is trained."""

    priority = 'LOWEST'

    def before_train(self, runner: Any) -> None:
        runner.start = state_of(runner)


def state_of(runner: Any) -> dict[str, Any]:
    wrapper = runner.optim_wrapper
    parts = dict(wrapper.items()) if isinstance(wrapper, OptimWrapperDict) else {'': wrapper}
    schedules = runner.param_schedulers or []
    schedules = schedules if isinstance(schedules, dict) else {'': schedules}
    averages = [hook.ema_model.state_dict() for hook in runner.hooks if type(hook).__name__ == 'EMAHook']
    found = dict(
        position=(runner.epoch, runner.iter),
        weights=dict(runner.model.state_dict()),
        average=dict(averages[0]) if averages else None,
        optimizer={name: part.optimizer.state_dict() for name, part in parts.items()},
        scale={name: part.loss_scaler.state_dict() for name, part in parts.items() if hasattr(part, 'loss_scaler')},
        schedules={name: [schedule.last_step for schedule in part] for name, part in schedules.items()},
        base={name: part.base_param_settings for name, part in parts.items()},
    )
    return copy.deepcopy(found)


def config(work_dir: Path | str, optim_wrapper: dict[str, Any], epochs: int = 2, **overrides: Any) -> Config:
    """A whole config: three iterations an epoch, no validation."""
    loader = dict(batch_size=4, num_workers=0, dataset=dict(type='ForeignData'))
    cfg: dict[str, Any] = dict(
        model=dict(type='ForeignPair' if 'stem' in optim_wrapper else 'ForeignNet'),
        work_dir=str(work_dir),
        default_scope='mmengine',
        train_dataloader=dict(
            loader, sampler=dict(type='DefaultSampler', shuffle=True), collate_fn=dict(type='default_collate')
        ),
        train_cfg=dict(by_epoch=True, max_epochs=epochs),
        optim_wrapper=optim_wrapper,
        param_scheduler=None if 'stem' in optim_wrapper else [dict(type='MultiStepLR', milestones=[1], gamma=0.5)],
        default_hooks=dict(logger=dict(type='LoggerHook', interval=1)),
        log_level='ERROR',
        randomness=dict(seed=0, deterministic=True),
        experiment_name=f'foreign_{abs(hash(str(work_dir)))}',
    )
    return Config({**cfg, **overrides})


def run(work_dir: Path | str, optim_wrapper: dict[str, Any], path: Path | str = '', **overrides: Any) -> Any:
    """Train two epochs, or go on from a file."""
    torch.manual_seed(0)
    resumed = dict(resume=True, load_from=str(path)) if path else {}
    runner: Any = Runner.from_cfg(config(work_dir, copy.deepcopy(optim_wrapper), **{**resumed, **overrides}))
    runner.register_hook(KeepStart())
    runner.train()
    return runner


def allow_stock_amp_on_cpu() -> None:
    """Let mmengine's own AmpOptimWrapper run here: it asserts a GPU, and its GradScaler disables itself without one."""
    amp_optimizer_wrapper.is_cuda_available = lambda: True
    amp_optimizer_wrapper.GradScaler = functools.partial(torch.amp.GradScaler, 'cpu')


def resume(folder: Path) -> None:
    """Without this package, each case of FOLDER/cases.json: {file, optim_wrapper, and overrides of the config}."""
    allow_stock_amp_on_cpu()
    # which looks for compilers at each start
    mmengine.runner.runner.collect_env = dict
    results = {}
    for name, case in json.loads((folder / 'cases.json').read_text()).items():
        runner = run(folder / name, case.pop('optim_wrapper'), case.pop('file'), epochs=3, **case)
        results[name] = dict(start=runner.start, end=state_of(runner))
    torch.save(results, folder / 'results.pth')


if __name__ == '__main__':
    torch.set_num_threads(1)
    resume(Path(sys.argv[1]))
    assert 'amp_wrapper' not in sys.modules, 'these runs are to be without the package'
