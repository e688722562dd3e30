"""What an opt level means: the table of levels, their overrides, and the lists of what computes in which type."""

from .policy import LEVELS, Policy, dtype_name, parse_dtype, resolve

__all__ = ['LEVELS', 'Policy', 'dtype_name', 'parse_dtype', 'resolve']
