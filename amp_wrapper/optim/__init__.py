"""Optimizers whose step is one pass: ``torch.optim``'s own in every respect but how they compute it."""

from .adam import FusedAdam, FusedAdamW
from .fused import FusedOptimizer, Update
from .sgd import FusedSGD

__all__ = ['FusedAdam', 'FusedAdamW', 'FusedOptimizer', 'FusedSGD', 'Update']
