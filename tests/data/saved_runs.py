"""Trainings that saved the files in ``tests/data/saved`` with version 0.2.0, and that later versions go on from.

``python tests/data/saved_runs.py NAME`` writes NAME.pth, what a training saves in the middle, and NAME.after.pth, what it
saves at its end. What is there stays: it stands for what lies on the disks of users. So only a new case is written.

A training here gives the same bits on every CPU, but for roots and squares of an Adam: products are elementwise, sums are
added up in the order of the program, and what torch's SGD multiplies with are powers of two.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from mmengine.config import Config
from mmengine.evaluator import BaseMetric
from mmengine.model import BaseModel
from mmengine.optim import DefaultOptimWrapperConstructor, OptimWrapperDict
from mmengine.registry import DATASETS, METRICS, MODELS, OPTIM_WRAPPER_CONSTRUCTORS
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from amp_wrapper import AmpOptimWrapper, FusedAdamW, amp

FOLDER = Path(__file__).with_name('saved')
#: Overflows, and grows, within a few steps of :class:`Exact`.
MOVING = dict(init_scale=2.0**15, growth_interval=2)


class Exact(nn.Module):
    """Products of six numbers: a linear layer, a bare parameter, a frozen one, and a BatchNorm that is not called."""

    def __init__(self, unique: int = 0) -> None:
        super().__init__()
        steps = torch.arange(6) / 8 + unique / 16
        self.fc = nn.Linear(1, 6, bias=False)
        self.gain = nn.Parameter(1.0 + steps)
        self.bn = nn.BatchNorm1d(6)
        self.frozen = nn.Parameter(0.5 + steps, requires_grad=False)
        self.register_buffer('seen', torch.zeros((), dtype=torch.int64))
        with torch.no_grad():
            # more bits than 16-bit weights have
            self.fc.weight.copy_((0.75 - steps + 2.0**-20).view(6, 1))
            self.bn.weight.copy_(1.25 - steps / 2 + 2.0**-18)
            self.bn.bias.copy_(steps - 0.25)

    def forward(self, x: Tensor) -> Tensor:
        """(1, 1) to a scalar."""
        y = self.fc(x) * self.gain * self.frozen
        if self.training:
            with torch.no_grad():
                self.seen += 1
                mean = self.bn.running_mean
                assert mean is not None
                mean.mul_(0.5).add_(y[0].to(mean.dtype))
        y = y.float() * self.bn.weight + self.bn.bias
        return added(y * y)


def added(values: Tensor) -> Tensor:
    """The sum of all elements, one after the other."""
    total, *rest = values.reshape(-1).unbind()
    for value in rest:
        total = total + value
    return total


def data(index: int) -> Tensor:
    """(1, 1); some are large enough for float16 gradients to overflow."""
    return torch.tensor([[(0.5, -0.25, 1.0, 0.125, -1.5, 0.75, 2.0)[index % 7]]])


def adamw(groups: Any) -> Optimizer:
    return FusedAdamW(groups, lr=2.0**-6)


def sgd(groups: Any) -> Optimizer:
    return torch.optim.SGD(groups, lr=2.0**-8, momentum=0.5, weight_decay=2.0**-6, nesterov=True)


@dataclasses.dataclass(frozen=True)
class Case:
    """A training without a runner.

    Attributes:
        level: The opt level.
        make: Its optimizer.
        words: Further options of ``amp.initialize`` or of ``AmpOptimWrapper``.
        losses: How many losses.
        first: Passes before it is saved.
        then: Passes after that.
        wrapped: Whether with ``AmpOptimWrapper``, or in a script.
    """

    level: str
    make: Callable[[Any], Optimizer]
    words: dict[str, Any]
    losses: int = 1
    first: int = 7
    then: int = 6
    wrapped: bool = True


CASES = {
    # after each step
    'O2_losses': Case('O2', adamw, dict(loss_scale=MOVING), losses=3, first=6, then=5, wrapped=False),
    # seven passes in accumulations of three, or of four: gradients wait
    'O1_open': Case('O1', adamw, dict(loss_scale=MOVING, accumulative_counts=3)),
    'O2_torch_open': Case('O2', sgd, dict(loss_scale=MOVING, accumulative_counts=4)),
}


class Training:
    """One of :data:`CASES`, from its start or from what :meth:`save` gave."""

    def __init__(self, case: Case, saved: dict[str, Any] | None = None) -> None:
        self.case, self.net = case, Exact()
        model = self.model = nn.ModuleList([self.net])
        groups = [
            {'params': [self.net.fc.weight, self.net.gain, self.net.frozen]},
            {'params': list(self.net.bn.parameters()), 'weight_decay': 0.0},
        ]
        self.optimizer = case.make(groups)
        words: Any = dict(opt_level=case.level, num_losses=case.losses, verbosity=0, **case.words)
        if not case.wrapped:
            amp.initialize(self.net, self.optimizer, **words)
            if saved is not None:
                self.net.load_state_dict(saved['models'][0])
                self.optimizer.load_state_dict(saved['optimizers'][0])
                amp.load_state_dict(saved['amp'], optimizers=[self.optimizer])
            return
        self.wrapper = AmpOptimWrapper(optimizer=self.optimizer, **words)
        self.wrapper.initialize_count_status(model, 0, case.first + case.then)
        if saved is not None:
            model.load_state_dict(saved['state_dict'])
            self.wrapper.load_state_dict(saved['optimizer'])
            self.wrapper.initialize_count_status(model, case.first, case.first + case.then)

    def train(self, passes: range) -> None:
        for index in passes:
            if self.case.wrapped:
                with self.wrapper.optim_context(self.model):
                    loss = self.net(data(index))
                self.wrapper.update_params(loss)
                continue
            self.optimizer.zero_grad()
            for loss_id in range(self.case.losses):
                loss = self.net(data(index + 3 * loss_id)) * (loss_id + 1)
                with amp.scale_loss(loss, self.optimizer, loss_id=loss_id) as scaled:
                    scaled.backward()
            self.optimizer.step()

    def save(self) -> dict[str, Any]:
        """What scripts and mmengine put into a checkpoint."""
        if self.case.wrapped:
            return {'state_dict': self.model.state_dict(), 'optimizer': self.wrapper.state_dict()}
        return {
            'models': [self.net.state_dict()],
            'optimizers': [self.optimizer.state_dict()],
            'amp': amp.state_dict(optimizers=[self.optimizer]),
        }


# -- mmengine's runners -----------------------------------------------------------------------------------------------


@MODELS.register_module()
class SavedModel(BaseModel):
    def __init__(self, nets: int = 1) -> None:
        super().__init__()
        self.nets = nn.ModuleList(Exact(unique) for unique in range(nets))

    def forward(self, inputs: Tensor, mode: str = 'tensor', **words: Any) -> Any:
        value = added(torch.stack([net(inputs.view(1, 1)) for net in self.nets]))
        return dict(loss=value) if mode == 'loss' else [dict(value=value)]

    def train_step(self, data: Any, optim_wrapper: Any) -> Any:
        if not isinstance(optim_wrapper, OptimWrapperDict):
            return super().train_step(data, optim_wrapper)
        losses = {}
        for name, wrapper in optim_wrapper.items():
            with wrapper.optim_context(self):
                loss = self(**data, mode='loss')['loss']
            wrapper.update_params(loss)
            losses[name] = loss.detach()
        return losses


@DATASETS.register_module()
class SavedData(Dataset):
    """Seven small dyadic numbers."""

    metainfo: dict[str, Any] = {}

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return dict(inputs=torch.tensor((index - 3) / 4))


@METRICS.register_module()
class SavedScore(BaseMetric):
    default_prefix = 'saved'

    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.results += [float(sample['value']) for sample in data_samples]

    def compute_metrics(self, results: list[float]) -> dict[str, float]:
        return dict(score=sum(results))


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class SavedPair:
    """A wrapper for each of two models."""

    def __init__(self, optim_wrapper_cfg: dict[str, Any], paramwise_cfg: Any = None) -> None:
        self.words = optim_wrapper_cfg

    def __call__(self, model: Any) -> OptimWrapperDict:
        constructors = [DefaultOptimWrapperConstructor(copy.deepcopy(self.words['member'])) for _ in model.nets]
        members = {f'part{i}': make(net) for i, (make, net) in enumerate(zip(constructors, model.nets))}
        return OptimWrapperDict(**members)


def runner_config(name: str, work_dir: Path) -> Config:
    """The training that saved ``NAME.pth``: in the middle of an epoch and of an accumulation, or with two optimizers."""
    pair = name == 'dict_O1_ema'
    member = dict(
        type='AmpOptimWrapper',
        opt_level='O1',
        optimizer=dict(type='FusedSGD', lr=2.0**-7, momentum=0.9, weight_decay=0.01),
    )
    alone = dict(
        type='AmpOptimWrapper', opt_level='O5', optimizer=dict(type='FusedAdamW', lr=2.0**-6), accumulative_counts=3
    )
    schedule = [
        dict(type='LinearLR', start_factor=0.25, by_epoch=False, begin=0, end=9),
        dict(type='MultiStepLR', milestones=[12], gamma=0.5, by_epoch=False),
    ]
    loader = dict(batch_size=1, num_workers=0, dataset=dict(type='SavedData'), collate_fn=dict(type='default_collate'))
    sampler = 'InfiniteSampler' if pair else 'DefaultSampler'
    early = dict(type='EarlyStoppingHook', monitor='saved/score', rule='less', patience=50)
    checkpoint = dict(type='CheckpointHook', interval=5, by_epoch=False, save_best='saved/score', rule='less')
    ema = dict(type='EMAHook', momentum=0.25, begin_iter=2)
    return Config(
        dict(
            model=dict(type='SavedModel', nets=2 if pair else 1),
            work_dir=str(work_dir),
            default_scope='mmengine',
            train_dataloader=dict(loader, sampler=dict(type=sampler, shuffle=True)),
            val_dataloader=dict(loader, sampler=dict(type='DefaultSampler', shuffle=False)),
            val_evaluator=dict(type='SavedScore'),
            val_cfg=dict(),
            train_cfg=dict(by_epoch=False, max_iters=11, val_interval=4) if pair else dict(by_epoch=True, max_epochs=3),
            optim_wrapper=dict(constructor='SavedPair', member=dict(member, loss_scale=MOVING)) if pair else alone,
            param_scheduler=dict(part0=schedule, part1=schedule) if pair else schedule,
            default_hooks=dict(logger=dict(type='LoggerHook', interval=2), checkpoint=checkpoint),
            custom_hooks=[dict(type='amp_wrapper.ExactResumeHook'), ema, *([] if pair else [early])],
            log_level='ERROR',
            randomness=dict(seed=0, deterministic=True),
            experiment_name=f'saved_{abs(hash(str(work_dir)))}',
        )
    )


if __name__ == '__main__':
    torch.use_deterministic_algorithms(True)
    name = sys.argv[1]
    assert not (FOLDER / f'{name}.pth').exists()
    training = Training(CASES[name])
    training.train(range(CASES[name].first))
    torch.save(training.save(), FOLDER / f'{name}.pth')
    training.train(range(CASES[name].first, CASES[name].first + CASES[name].then))
    torch.save(training.save(), FOLDER / f'{name}.after.pth')
