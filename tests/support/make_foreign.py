"""Checkpoint files that this package did not write, small, one of each kind.

``python tests/support/make_foreign.py`` makes them anew.

Those of mmengine come from real runs of mmengine's Runner in a process that never imports amp_wrapper. Those of apex are
put together in apex's documented format, around the optimizer state of a real torch run: apex.amp is gone and does not
install. Everything is seeded; times in the logs differ from run to run.
"""

from __future__ import annotations

import functools
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault('OMP_NUM_THREADS', '1')
import torch
import torch.nn.functional as F
from mmengine.config import Config
from mmengine.model import BaseModel
from mmengine.optim.optimizer import amp_optimizer_wrapper
from mmengine.registry import DATASETS, MODELS
from mmengine.runner import Runner
from torch import Tensor, nn
from torch.utils.data import Dataset

FOLDER = Path(__file__).parents[1] / 'data' / 'foreign'
SGD = dict(type='SGD', lr=0.125, momentum=0.9, weight_decay=0.01)
ADAMW = dict(type='AdamW', lr=0.01, weight_decay=0.05)
SCHEDULE = dict(type='MultiStepLR', milestones=[1], gamma=0.5)
#: Scale and tracker move within six steps.
SCALER = dict(init_scale=1024.0, growth_interval=4)


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
        for name in ('stem', 'head'):
            with optim_wrapper[name].optim_context(self):
                loss = self(**data, mode='loss')['loss']
            optim_wrapper[name].update_params(loss)
            losses[name] = loss.detach()
        return losses


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


def config(work_dir: Path | str, optim_wrapper: dict[str, Any], epochs: int = 2, **overrides: Any) -> Config:
    """A whole config: three iterations an epoch, no validation."""
    cfg: dict[str, Any] = dict(
        model=dict(type='ForeignNet'),
        work_dir=str(work_dir),
        default_scope='mmengine',
        train_dataloader=dict(
            batch_size=4,
            num_workers=0,
            dataset=dict(type='ForeignData'),
            sampler=dict(type='DefaultSampler', shuffle=True),
            collate_fn=dict(type='default_collate'),
        ),
        train_cfg=dict(by_epoch=True, max_epochs=epochs),
        optim_wrapper=optim_wrapper,
        param_scheduler=[SCHEDULE],
        default_hooks=dict(logger=dict(type='LoggerHook', interval=1)),
        log_level='ERROR',
        randomness=dict(seed=0, deterministic=True),
        experiment_name=f'foreign_{abs(hash(str(work_dir)))}',
    )
    cfg.update(overrides)
    return Config(cfg)


def allow_stock_amp_on_cpu() -> None:
    """Let mmengine's own AmpOptimWrapper run here: it asserts a GPU, and its GradScaler disables itself without one.

    Only these two are replaced; class, state and the order of its calls are mmengine's.
    """
    amp_optimizer_wrapper.is_cuda_available = lambda: True
    amp_optimizer_wrapper.GradScaler = functools.partial(torch.amp.GradScaler, 'cpu')


def train(name: str, optim_wrapper: dict[str, Any], **overrides: Any) -> None:
    """Train in a folder of its own, so that no path of this machine gets into the file, and keep its last checkpoint."""
    torch.manual_seed(0)
    overrides.setdefault('experiment_name', name)
    here = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            runner = Runner.from_cfg(config('work', optim_wrapper, **overrides))
            # mmengine makes it absolute, and saves it
            runner._work_dir = 'work'
            runner.train()
            (FOLDER / f'{name}.pth').write_bytes(Path('work', 'epoch_2.pth').read_bytes())
        finally:
            os.chdir(here)


def make_mmengine() -> None:
    """mmengine's OptimWrapper, AmpOptimWrapper, OptimWrapperDict and EMAHook."""
    scaler, available = amp_optimizer_wrapper.GradScaler, amp_optimizer_wrapper.is_cuda_available
    train('plain_sgd', dict(type='OptimWrapper', optimizer=SGD))
    # several groups: mmengine appends base_param_settings
    several = dict(custom_keys=dict(head=dict(lr_mult=0.5)), norm_decay_mult=0.0)
    train('plain_adamw', dict(type='OptimWrapper', optimizer=ADAMW, paramwise_cfg=several))
    train('ema', dict(type='OptimWrapper', optimizer=SGD), custom_hooks=[dict(type='EMAHook', momentum=0.1)])
    pair = {name: dict(type='OptimWrapper', optimizer=SGD) for name in ('stem', 'head')}
    train(
        'plain_pair',
        dict(constructor='ForeignPairConstructor', **pair),
        model=dict(type='ForeignPair'),
        param_scheduler=None,
        default_hooks=dict(checkpoint=dict(type='CheckpointHook', save_param_scheduler=False)),
    )
    weights = dict(type='CheckpointHook', save_optimizer=False, save_param_scheduler=False)
    train('weights', dict(type='OptimWrapper', optimizer=SGD), default_hooks=dict(checkpoint=weights))
    # the scaler as it comes: it finds no GPU, disables itself and saves {}
    amp_optimizer_wrapper.is_cuda_available = lambda: True
    train('stock_bf16', dict(type='AmpOptimWrapper', dtype='bfloat16', optimizer=SGD))
    allow_stock_amp_on_cpu()
    train('stock_sgd', dict(type='AmpOptimWrapper', dtype='bfloat16', loss_scale=SCALER, optimizer=SGD))
    train('stock_adamw', dict(type='AmpOptimWrapper', dtype='bfloat16', loss_scale=SCALER, optimizer=ADAMW))
    amp_optimizer_wrapper.GradScaler, amp_optimizer_wrapper.is_cuda_available = scaler, available


def register_pair() -> None:
    """A constructor of two optimizers, which mmengine leaves to projects."""
    from mmengine.optim import OptimWrapperDict, build_optim_wrapper
    from mmengine.registry import OPTIM_WRAPPER_CONSTRUCTORS

    @OPTIM_WRAPPER_CONSTRUCTORS.register_module(force=True)
    class ForeignPairConstructor:
        def __init__(self, optim_wrapper_cfg: dict[str, Any], paramwise_cfg: Any = None) -> None:
            self.cfg = {key: dict(value) for key, value in optim_wrapper_cfg.items() if key in ('stem', 'head')}

        def __call__(self, model: nn.Module) -> Any:
            return OptimWrapperDict(
                **{name: build_optim_wrapper(getattr(model, name), cfg) for name, cfg in self.cfg.items()}
            )


def make_apex() -> None:
    """In apex's documented format, as at O2: FP32 copies of rounded weights, optimizer state of FP32 masters."""
    torch.manual_seed(0)
    model = ForeignNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.9, weight_decay=0.01)
    data = ForeignData()
    for _ in range(6):
        optimizer.zero_grad()
        model(data.points, data.labels, mode='loss')['loss'].backward()
        optimizer.step()
    for name, parameter in model.named_parameters():
        if not name.startswith('bn'):
            parameter.data = parameter.data.half().float()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    one = {'loss_scaler0': {'loss_scale': 4096.0, 'unskipped': 3}}
    two = {**one, 'loss_scaler1': {'loss_scale': 512.0, 'unskipped': 1017}}
    # mmengine's ApexOptimWrapper.state_dict: the optimizer's own, and apex_amp; no base_param_settings
    wrapper = {
        'meta': dict(epoch=2, iter=6, seed=0, mmengine_version='0.10.7', time='20250401_120000'),
        'state_dict': weights,
        'message_hub': dict(log_scalars={}, runtime_info={}, resumed_keys={}),
        'optimizer': {**optimizer.state_dict(), 'apex_amp': one},
    }
    torch.save(wrapper, FOLDER / 'apex_wrapper.pth')
    # the README of apex
    readme = {'model': weights, 'optimizer': optimizer.state_dict(), 'amp': two}
    torch.save(readme, FOLDER / 'raw_apex.pth')
    # apex's examples/imagenet/main_amp.py, under DDP, with the line that its README asks for
    imagenet = {
        'epoch': 2,
        'arch': 'tiny',
        'state_dict': {f'module.{name}': value for name, value in weights.items()},
        'best_prec1': 75.0,
        'optimizer': optimizer.state_dict(),
        'amp': one,
    }
    torch.save(imagenet, FOLDER / 'raw_apex_imagenet.pth')
    # tensors by name and nothing else, as torch before 1.6 wrote files
    torch.save(weights, FOLDER / 'bare_legacy.pth', _use_new_zipfile_serialization=False)


def main() -> None:
    """Write the files."""
    FOLDER.mkdir(exist_ok=True)
    torch.set_num_threads(1)
    register_pair()
    make_mmengine()
    make_apex()
    assert 'amp_wrapper' not in sys.modules, 'these files must come from the real producers'


if __name__ == '__main__':
    # a folder to write into, for the test that compares
    FOLDER = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else FOLDER
    main()
