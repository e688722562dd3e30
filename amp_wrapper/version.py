"""The version of the package, for files below ``amp_wrapper/__init__.py``."""

__version__ = '0.2.0'
