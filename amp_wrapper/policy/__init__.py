"""What an opt level means: the table of levels, their overrides, and the lists of what computes in which type."""

from .levels import LEVELS, OptLevel, Policy, dtype_name
from .options import OPTIONS, PolicyOptions, SharedOptions, resolve

__all__ = ['LEVELS', 'OPTIONS', 'OptLevel', 'Policy', 'PolicyOptions', 'SharedOptions', 'dtype_name', 'resolve']
