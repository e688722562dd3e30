"""The old name of what other tests take from :mod:`op_lists`."""

from op_lists import NoHostRead

__all__ = ['NoHostRead']
