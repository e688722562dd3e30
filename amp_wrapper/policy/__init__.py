"""What an opt level means: the table of levels, their overrides, and the lists of what computes in which type."""

from .policy import LEVELS, OptLevel, Policy, dtype_name, parse_dtype
from .resolution import OPTIONS, Fp32Names, PolicyOptions, SharedOptions, resolve

__all__ = [
    'LEVELS',
    'OPTIONS',
    'Fp32Names',
    'OptLevel',
    'Policy',
    'PolicyOptions',
    'SharedOptions',
    'dtype_name',
    'parse_dtype',
    'resolve',
]
