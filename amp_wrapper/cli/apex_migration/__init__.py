"""From apex to this package: what ``amp-wrapper migrate`` does to the text of a Python file."""

from . import files
from .migrate import Result, migrate
from .source import Note

__all__ = ['Note', 'Result', 'files', 'migrate']
