"""Optimizers of ``torch.optim`` whose step is one pass over memory; all else is as in ``torch.optim``."""

from .adam import FusedAdam, FusedAdamW
from .fused import FusedOptimizer, Update
from .sgd import FusedSGD

__all__ = ['FusedAdam', 'FusedAdamW', 'FusedOptimizer', 'FusedSGD', 'Update']
