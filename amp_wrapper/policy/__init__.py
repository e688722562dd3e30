"""What an opt level means: the table of levels, their overrides, and the lists of what computes in which type."""

from .levels import LEVELS, OptLevel, Policy, dtype_name, parse_dtype
from .options import OPTIONS, Fp32Names, PolicyOptions, SharedOptions
from .resolution import resolve

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
