"""Checks a DDP training from inside its ranks. A config names it in ``custom_imports`` and ``custom_hooks``.

Every verdict is reached together: a rank that fails alone would leave the others waiting in a collective.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mmengine.hooks import EMAHook, Hook
from mmengine.registry import HOOKS
from mmengine.runner import Runner
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

#: Set, it makes the rebuilding of DDP after a cast do nothing: the fault that this module must see.
FAULT = 'RANK_WITNESS_NO_REBUILD'
#: Roundings between local gradients and what the optimizer gets: sums of micro-batches and ranks, unscaling, clipping.
ROUNDINGS = 4


def plant_fault() -> None:
    """Put a function that does nothing in the place of ``rebuild_ddp``, wherever the package holds it.

    Raises:
        RuntimeError: It has no such function any more; then the fault has to be planted elsewhere.
    """
    import amp_wrapper  # noqa: F401

    holders = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith('amp_wrapper.') and hasattr(module, 'rebuild_ddp')
    ]
    if not holders:
        raise RuntimeError('amp_wrapper has no rebuild_ddp: plant the fault where DDP is rebuilt now')
    for module in holders:
        module.rebuild_ddp = lambda model: 0


if FAULT in os.environ:
    plant_fault()


@HOOKS.register_module()
class RankWitness(Hook):
    """Ends the training with an error unless the ranks saw different data, averaged their gradients and agree at the end.

    They must agree in every bit of weights, masters, optimizer state, loss scales and averaged weights. Buffers are each
    rank's own, as ``broadcast_buffers=False`` says. A weight that no rank has a gradient for must stay as it was.

    Args:
        report: File for what was seen; rank 0 writes it.
        judge_gradients: Whether the gradients of every step are compared with the mean of what the ranks computed.
    """

    priority = 'LOWEST'

    def __init__(self, report: str, judge_gradients: bool = True) -> None:
        self.report = report
        self.judge_gradients = judge_gradients
        self.seen: dict[str, Any] = dict(steps=0, told_apart=1.0, roundings=0.0)
        self.batches: list[str] = []
        self.start: dict[str, str] = {}
        self.weights: dict[str, str] = {}
        self.handles: list[RemovableHandle] = []
        self.places: dict[str, tuple[int, int]] = {}
        self.sums: dict[str, Tensor] = {}
        self.sizes: dict[str, Tensor] = {}
        self.reached: set[str] = set()

    def before_run(self, runner: Runner) -> None:
        # masters will stand where the weights stand now
        names = {id(p): name for name, p in _model(runner).named_parameters()}
        for group, entry in enumerate(runner.optim_wrapper.optimizer.param_groups):
            self.places.update({names[id(p)]: (group, index) for index, p in enumerate(entry['params'])})

    def before_train(self, runner: Runner) -> None:
        self.runner = runner
        self.start = self._state()
        _agree('start', self.start)
        self.weights = {name: _digest([p]) for name, p in _model(runner).named_parameters()}
        if not self.judge_gradients:
            return
        for name, parameter in _model(runner).named_parameters():
            if parameter.requires_grad:
                # called before DDP sees the gradient
                handle = parameter.register_hook(lambda gradient, name=name: self._collect(name, gradient))
                self.handles.append(handle)
        self.handles.append(runner.optim_wrapper.optimizer.register_step_pre_hook(self._before_step))

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None) -> None:
        inputs = data_batch['inputs']
        self.batches.append(_digest(inputs if isinstance(inputs, list) else [inputs]))

    def after_train_iter(self, runner: Runner, *_: Any, **__: Any) -> None:
        # a skipped step ends an accumulation, too
        if not runner.optim_wrapper.in_window:
            self.sums, self.sizes = {}, {}

    def after_train(self, runner: Runner) -> None:
        wrapper = runner.optim_wrapper
        end = self._state()
        _agree('end', end)
        _verdict(same_data(_gather(self.batches)))
        _verdict(['the weights never moved'] if end['weights'] == self.start['weights'] else [])
        idle = {}
        if self.judge_gradients:
            _verdict([] if self.seen['steps'] else ['no optimizer step was taken'])
            reached = set().union(*_gather(sorted(self.reached)))
            named = _model(runner).named_parameters()
            idle = {name: p for name, p in named if p.requires_grad and name not in reached}
            moved = [name for name, p in idle.items() if _digest([p]) != self.weights[name]]
            _verdict([f'{name} moved without a gradient' for name in moved])
        self.seen.update(
            world=dist.get_world_size(),
            model=type(runner.model).__name__,
            unused=runner.model.find_unused_parameters,
            wrapper=f'{type(wrapper).__module__}.{type(wrapper).__name__}',
            level=wrapper.opt_level,
            types=sorted({str(p.dtype) for p in runner.model.parameters()}),
            masters=sorted({str(p.dtype) for p in wrapper.master_params()}),
            iterations=len(self.batches),
            first=runner.iter - len(self.batches),
            idle=sorted(idle),
            compared=sorted(end),
        )
        # what a weight's hook holds is never collected: the runner, its DDP, and gloo's threads until the process ends
        for handle in self.handles:
            handle.remove()
        if dist.get_rank() == 0:
            Path(self.report).write_text(json.dumps(self.seen))

    def _state(self) -> dict[str, str]:
        """Digests of everything that must be the same on every rank."""
        wrapper = self.runner.optim_wrapper
        state = {
            'weights': _digest(_model(self.runner).parameters()),
            'masters': _digest(wrapper.master_params()),
            'optimizer': _digest(_tensors(wrapper.optimizer.state.values())),
            'scale': repr([(s.get_scale(), s.counts.tolist()) for s in wrapper.loss_scalers]),
        }
        for hook in self.runner.hooks:
            if isinstance(hook, EMAHook):
                state['average'] = _digest(hook.ema_model.module.parameters())
        return state

    def _collect(self, name: str, gradient: Tensor) -> None:
        self.reached.add(name)
        local = gradient.detach().double()
        if name in self.sums:
            self.sums[name] += local
            self.sizes[name] += local.abs()
        else:
            self.sums[name], self.sizes[name] = local.clone(), local.abs()

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """The gradients that the optimizer is about to use, against the mean of those that the ranks computed."""
        wrapper = self.runner.optim_wrapper
        scale = wrapper.loss_scaler.get_scale()
        used = _gather(sorted(self.sums))
        problems = []
        names, stepped, sums, sizes, units = [], [], [], [], []
        for name, parameter in _model(self.runner).named_parameters():
            if name not in self.places:
                continue
            group, index = self.places[name]
            gradient = optimizer.param_groups[group]['params'][index].grad
            wanted = any(name in one for one in used)
            if wanted != (gradient is not None):
                problems.append(f'{name}: {"no" if wanted else "a"} gradient for the optimizer')
            if not wanted or gradient is None:
                continue
            names.append(name)
            nothing = torch.zeros(parameter.shape, dtype=torch.float64)
            stepped.append(gradient.double().flatten())
            sums.append(self.sums.get(name, nothing).flatten() / scale)
            sizes.append(self.sizes.get(name, nothing).flatten() / scale)
            kind = torch.finfo(parameter.dtype)
            units.append(torch.tensor([kind.eps / 2, kind.smallest_normal * kind.eps / scale]).double())
        _verdict(problems)
        lengths = torch.tensor([len(one) for one in stepped])
        unit, least = torch.stack(units).repeat_interleave(lengths, dim=0).unbind(1)
        own, mean, size = torch.cat(sums), torch.cat(sums), torch.cat(sizes)
        for tensor in (mean, size):
            dist.all_reduce(tensor)
            tensor /= dist.get_world_size()
        clip = wrapper.clip_grad_kwargs
        factor = min(1.0, clip['max_norm'] / (float(mean.norm()) + 1e-6)) if clip else 1.0
        bound = ROUNDINGS * (unit * size * factor + least)
        distance = (torch.cat(stepped) - factor * mean).abs()
        wrong = ~(distance <= bound)
        by_name = dict(zip(names, [int(part.sum()) for part in wrong.split(lengths.tolist())]))
        _verdict([f'{name}: {count} numbers are not the mean over ranks' for name, count in by_name.items() if count])
        # how much of the gradient would have shown that a rank kept its own; zeros on all ranks show nothing
        live = size > 0
        apart = ((factor * (own - mean)).abs() > bound)[live].double().mean()
        self.seen['told_apart'] = min(self.seen['told_apart'], float(apart))
        self.seen['roundings'] = max(self.seen['roundings'], ROUNDINGS * float((distance / bound)[live].max()))
        self.seen['steps'] += 1


def same_data(batches: list[list[str]]) -> list[str]:
    """The problem, if the ranks trained on the same data at any time: then equal weights prove nothing.

    Args:
        batches: For each rank, a digest of each batch.
    """
    everyone = list(zip(*batches))
    same = sum(len(set(one)) < len(one) for one in everyone)
    return [f'the ranks saw the same data in {same} of {len(everyone)} iterations'] if same or not everyone else []


def _model(runner: Runner) -> nn.Module:
    return runner.model.module


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            yield from _tensors(value[key])
    elif not isinstance(value, (str, int, float, type(None))):
        for item in value:
            yield from _tensors(item)


def _digest(tensors: Iterable[Tensor]) -> str:
    """One number for the types, shapes and bits of tensors."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f'{tensor.dtype} {tuple(tensor.shape)}'.encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _gather(value: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def _agree(when: str, state: dict[str, str]) -> None:
    first, *others = _gather(state)
    _verdict([f'{when}: the ranks differ in {key}' for key in first if any(one[key] != first[key] for one in others)])


def _verdict(problems: list[str]) -> None:
    """Raise on every rank what any of them found."""
    found = sorted({problem for one in _gather(problems) for problem in one})
    if found:
        raise AssertionError(f'RankWitness: {len(found)} problems: ' + '; '.join(found[:6]))
