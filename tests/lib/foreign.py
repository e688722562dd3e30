"""Checkpoints of other programs, in ``tests/data/foreign``: who makes them, and trainings without this package.

``python tests/lib/foreign.py make`` makes the files anew. Those of mmengine come from real runs of its Runner in a process
that never imports amp_wrapper. Those of apex are put together in apex's documented format, around the optimizer state of a
real torch run: apex.amp is gone and does not install. ``python tests/lib/foreign.py resume FOLDER`` goes on from the files that
FOLDER/cases.json names, by mmengine alone, and writes what each run had at its start and its end to FOLDER/results.pth.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import sys
import tempfile
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
    averages = [hook.ema_model.state_dict() for hook in runner.hooks if type(hook).__name__ == 'EMAHook']
    found = dict(
        position=(runner.epoch, runner.iter),
        weights=dict(runner.model.state_dict()),
        average=dict(averages[0]) if averages else None,
        optimizer={name: part.optimizer.state_dict() for name, part in parts.items()},
        scale={name: part.loss_scaler.state_dict() for name, part in parts.items() if hasattr(part, 'loss_scaler')},
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


def make_mmengine(folder: Path) -> None:
    """mmengine's OptimWrapper, AmpOptimWrapper, OptimWrapperDict and EMAHook."""
    several = dict(custom_keys=dict(head=dict(lr_mult=0.5)), norm_decay_mult=0.0)
    weights = dict(type='CheckpointHook', save_optimizer=False, save_param_scheduler=False)
    pair = {name: dict(type='OptimWrapper', optimizer=SGD) for name in PAIR}
    alone = dict(checkpoint=dict(type='CheckpointHook', save_param_scheduler=False))
    amp = dict(type='AmpOptimWrapper', dtype='bfloat16')
    cases: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        'plain_sgd': (dict(type='OptimWrapper', optimizer=SGD), {}),
        # several groups: mmengine appends base_param_settings
        'plain_adamw': (dict(type='OptimWrapper', optimizer=ADAMW, paramwise_cfg=several), {}),
        'ema': (
            dict(type='OptimWrapper', optimizer=SGD),
            dict(custom_hooks=[dict(type='EMAHook', momentum=0.1)]),
        ),
        'plain_pair': (dict(constructor='ForeignPairConstructor', **pair), dict(default_hooks=alone)),
        'weights': (dict(type='OptimWrapper', optimizer=SGD), dict(default_hooks=dict(checkpoint=weights))),
        # its scaler finds no GPU, disables itself and saves {}
        'stock_bf16': (dict(amp, optimizer=SGD), {}),
        'stock_sgd': (dict(amp, loss_scale=SCALER, optimizer=SGD), {}),
        'stock_adamw': (dict(amp, loss_scale=SCALER, optimizer=ADAMW), {}),
    }
    amp_optimizer_wrapper.is_cuda_available = lambda: True
    for name, (wrapper, overrides) in cases.items():
        if name == 'stock_sgd':
            allow_stock_amp_on_cpu()
        # in a folder of its own, so that no path of this machine gets into the file
        with tempfile.TemporaryDirectory() as work:
            os.chdir(work)
            runner = Runner.from_cfg(config('work', wrapper, **{'experiment_name': name, **overrides}))
            runner._work_dir = 'work'
            runner.train()
            (folder / f'{name}.pth').write_bytes(Path('work', 'epoch_2.pth').read_bytes())


def make_apex(folder: Path) -> None:
    """As at O2: FP32 copies of rounded weights, optimizer state of FP32 masters."""
    torch.manual_seed(0)
    model, data = ForeignNet(), ForeignData()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.9, weight_decay=0.01)
    for _ in range(6):
        optimizer.zero_grad()
        model(data.points, data.labels, mode='loss')['loss'].backward()
        optimizer.step()
    for name, parameter in model.named_parameters():
        if not name.startswith('bn'):
            parameter.data = parameter.data.half().float()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    state, one = optimizer.state_dict(), {'loss_scaler0': {'loss_scale': 4096.0, 'unskipped': 3}}
    two = {**one, 'loss_scaler1': {'loss_scale': 512.0, 'unskipped': 1017}}
    # mmengine's ApexOptimWrapper.state_dict: the optimizer's own, and apex_amp; no base_param_settings
    meta = dict(epoch=2, iter=6, seed=0, mmengine_version='0.10.7', time='20250401_120000')
    hub: dict[str, Any] = dict(log_scalars={}, runtime_info={}, resumed_keys={})
    wrapper = dict(meta=meta, state_dict=weights, message_hub=hub, optimizer={**state, 'apex_amp': one})
    torch.save(wrapper, folder / 'apex_wrapper.pth')
    # the README of apex
    torch.save(dict(model=weights, optimizer=state, amp=two), folder / 'raw_apex.pth')
    # apex's examples/imagenet/main_amp.py, under DDP, with the line that its README asks for
    wrapped = {f'module.{name}': value for name, value in weights.items()}
    imagenet = dict(epoch=2, arch='tiny', state_dict=wrapped, best_prec1=75.0, optimizer=state, amp=one)
    torch.save(imagenet, folder / 'raw_apex_imagenet.pth')
    # tensors by name and nothing else, as torch before 1.6 wrote files
    torch.save(weights, folder / 'bare_legacy.pth', _use_new_zipfile_serialization=False)


if __name__ == '__main__':
    torch.set_num_threads(1)
    if sys.argv[1] == 'make':
        make_mmengine(FOLDER)
        make_apex(FOLDER)
    else:
        resume(Path(sys.argv[2]))
    assert 'amp_wrapper' not in sys.modules, 'these files and runs are to be without the package'
