"""Optimizers of ``torch.optim`` whose step is one pass over memory where the compiled ops serve; all else is torch's."""

from .adam import FusedAdam, FusedAdamW
from .fused import FusedOptimizer, Update
from .sgd import FusedSGD

__all__ = ['FusedAdam', 'FusedAdamW', 'FusedOptimizer', 'FusedSGD', 'Update']
