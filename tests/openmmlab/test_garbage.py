"""What training steps leave to Python's search for cycles: no tensor. One that waited for it would take memory meanwhile."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from grid import but
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.checkpoint import checkpoint

from amp_wrapper import AmpOptimWrapper, FusedAdamW, amp
from amp_wrapper.diagnostics.sandbox import attach_whole, sandbox
from amp_wrapper.engine import AmpEngine
from amp_wrapper.errors import AmpAttachError
from amp_wrapper.policy import LEVELS, resolve

Step = Callable[[int], None]
OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    'SGD': lambda net: SGD(net.parameters(), lr=0.01, momentum=0.9),
    'AdamW': lambda net: AdamW(net.parameters(), lr=0.01),
    'FusedAdamW': lambda net: FusedAdamW(net.parameters(), lr=0.01),
}


class Net(nn.Module):
    """Buffers, random numbers, layers that run again in the backward pass, and functions that autocast knows."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
        self.again = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.ReLU())
        self.norm, self.rnn, self.fc = nn.LayerNorm(4), nn.GRU(4, 4), nn.Linear(4, 3)

    def forward(self, images: Tensor) -> Tensor:
        x = self.bn(self.conv(images)).mean((2, 3))
        x = checkpoint(self.again, x, use_reentrant=False) + checkpoint(self.again, x, use_reentrant=True)
        states, _ = self.rnn(self.norm(x)[None])
        return self.fc(states[0])


def loss_of(net: nn.Module, index: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(index)
    images = torch.randn(6, 1, 5, 5, generator=generator).to(device)
    if index % 3 == 2:
        # an overflow where losses are scaled
        images[0, 0, 0, 0] = float('inf')
    return nn.functional.cross_entropy(net(images), torch.arange(6, device=device) % 3)


@contextmanager
def uncollected() -> Iterator[list[Tensor]]:
    """Fills the list with the tensors that only a search for cycles would have freed."""
    found: list[Tensor] = []
    gc.collect()
    gc.disable()
    try:
        yield found
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found += [thing for thing in gc.garbage if isinstance(thing, Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def functional(net: nn.Module, optimizer: Optimizer, level: str, clip: str, device: torch.device) -> Step:
    amp.initialize(net, optimizer, opt_level=level, verbosity=0)

    def step(index: int) -> None:
        optimizer.zero_grad()
        for part in range(2):
            with amp.scale_loss(loss_of(net, index + part, device), optimizer, delay_unscale=not part) as scaled:
                scaled.backward()
        if clip != 'none':
            whose = net.parameters() if clip.startswith('model') else amp.master_params(optimizer)
            clip_grad_value_(whose, 0.1) if clip.endswith('value') else clip_grad_norm_(whose, 1.0)
        optimizer.step()

    return step


def wrapper(net: nn.Module, optimizer: Optimizer, level: str, clip: str, device: torch.device) -> Step:
    words = {'none': None, 'value': dict(type='value', clip_value=0.1), 'norm': dict(max_norm=1.0)}[clip.split(' ')[-1]]
    wrapped = AmpOptimWrapper(optimizer=optimizer, opt_level=level, accumulative_counts=2, clip_grad=words)
    wrapped.initialize_count_status(net, 0, 100)

    def step(index: int) -> None:
        with wrapped.optim_context(net):
            loss = loss_of(net, index, device)
        wrapped.update_params(loss)

    return step


WAYS = [(functional, clip) for clip in ('none', 'model norm', 'model value', 'masters norm', 'masters value')]
WAYS += [(wrapper, clip) for clip in ('none', 'norm', 'value')]


@pytest.mark.parametrize('kind', OPTIMIZERS)
@pytest.mark.parametrize('way, clip', WAYS, ids=lambda what: getattr(what, '__name__', what))
@pytest.mark.parametrize('level', LEVELS)
def test_steps_leave_no_tensor_to_the_search_for_cycles(
    level: str, way: Callable[..., Step], clip: str, kind: str, device: torch.device
) -> None:
    """With overflows, gradients of several backward passes, and all ways to clip them."""
    torch.manual_seed(0)
    net = Net().to(device)
    step = way(net, OPTIMIZERS[kind](net), level, clip, device)
    for index in range(3):
        step(index)
    with uncollected() as found:
        for index in range(3, 9):
            step(index)
    assert [tuple(tensor.shape) for tensor in found] == []


@HOOKS.register_module()
class Uncollected(Hook):
    """Looks at what iterations leave behind, with validation and saving between them."""

    def __init__(self, begin: int, end: int) -> None:
        self.begin, self.end, self.found = begin, end, None
        self._stack = ExitStack()

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        if runner.iter == self.begin:
            self.found = self._stack.enter_context(uncollected())
        if runner.iter == self.end:
            self._stack.close()

    def after_run(self, runner: Any) -> None:
        self._stack.close()


@pytest.mark.parametrize('level', but(['O0', 'O2', 'O5'], LEVELS))
def test_a_runner_leaves_none(level: str, tmp_path: Path) -> None:
    """With a monitor, which runs copies of the model after an overflow, an average of weights, validations and checkpoints."""
    config = toy.everything(level)
    config['custom_hooks'] += [dict(type='amp_wrapper.AmpMonitorHook'), dict(type='Uncollected', begin=5, end=25)]
    runner = toy.run(tmp_path, config.pop('optim_wrapper'), **config)
    hook = next(hook for hook in runner.hooks if isinstance(hook, Uncollected))
    assert hook.found is not None and [tuple(tensor.shape) for tensor in hook.found] == []
    # O2 begins with a scale that is too large, which copies are run to see
    assert 'train/amp_skipped' in runner.message_hub.log_scalars or level != 'O2'


@pytest.mark.parametrize('kind', OPTIMIZERS)
@pytest.mark.parametrize('level', LEVELS)
def test_copies_that_were_tried_leave_none(level: str, kind: str, device: torch.device) -> None:
    """Neither weights nor FP32 masters nor optimizer state: there may be no memory for another copy."""
    net = Net().to(device)
    with uncollected() as found:
        with sandbox(net, resolve(level), OPTIMIZERS[kind]) as box:
            with box.forward():
                loss = loss_of(box.model, 0, device)
            box.engine.backward(loss)
            box.engine.step()
        del box, loss
    assert [tuple(tensor.shape) for tensor in found] == []


def test_reports_leave_none(device: torch.device) -> None:
    """Nor a level that is refused when a part of the copy has its hooks already."""
    net = Net().to(device)
    with uncollected() as found:
        amp.report(net, (torch.randn(6, 1, 5, 5, device=device),), opt_level='O2')
    assert [tuple(tensor.shape) for tensor in found] == []

    def refuse(engine: AmpEngine, model: nn.Module) -> None:
        attach_whole(engine, model)
        raise AmpAttachError('this level is refused')

    with uncollected() as found:
        with pytest.raises(AmpAttachError), sandbox(net, resolve('O2'), OPTIMIZERS['SGD'], refuse):
            pass
    assert [tuple(tensor.shape) for tensor in found] == []
