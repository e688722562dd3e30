"""Optimizers of other packages, in our own words: SAM, schedule-free SGD, Lookahead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import SGD, Optimizer


class Sam(Optimizer):
    """Two steps: to the worst point near by, and from its gradient back and down. Restores through ``.data``."""

    def __init__(self, parameters: Any, base: Callable[..., Optimizer], rho: float = 0.5, **kwargs: Any) -> None:
        super().__init__(parameters, dict(rho=rho, **kwargs))
        self.base_optimizer = base(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        found = [p for group in self.param_groups for p in group['params'] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in found]).norm()
        for p in found:
            self.state[p]['old'] = p.data.clone()
            p.add_(p.grad * (0.5 / (norm + 1e-12)))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for p in group['params']:
                p.data = self.state[p]['old']
        self.base_optimizer.step()
        self.zero_grad()

    def step(self, closure: Any = None) -> None:
        raise NotImplementedError


class ScheduleFree(SGD):
    """Keeps z beside the point y that gradients belong to, and shows the average x to those who evaluate."""

    mode = 'y'

    @torch.no_grad()
    def _go(self, mode: str, weight: float) -> None:
        if self.mode != mode:
            self.mode = mode
            for group in self.param_groups:
                for p in group['params']:
                    if 'z' in self.state[p]:
                        p.lerp_(self.state[p]['z'], weight)

    def eval(self) -> None:
        self._go('x', 1 - 1 / 0.5)

    def train(self) -> None:
        self._go('y', 0.5)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group['params']:
                state = self.state[p]
                z = state.setdefault('z', p.detach().clone())
                state['k'] = state.get('k', 0) + 1
                p.lerp_(z, 1 / state['k'])
                p.add_(p.grad, alpha=group['lr'] * (0.5 * (1 - 1 / state['k']) - 1))
                z.sub_(p.grad, alpha=group['lr'])


class Lookahead:
    """Around an optimizer: every other step, half-way back to where it was."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.slow = [[p.detach().clone() for p in group['params']] for group in optimizer.param_groups]
        self.count = 0

    @torch.no_grad()
    def step(self) -> None:
        self.optimizer.step()
        self.count += 1
        if self.count % 2 == 0:
            for group, slow in zip(self.optimizer.param_groups, self.slow):
                for p, kept in zip(group['params'], slow):
                    kept.lerp_(p, 0.5)
                    p.copy_(kept)
