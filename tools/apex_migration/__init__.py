"""From apex to this package: what ``tools/migrate_from_apex.py`` does to the text of a Python file."""

from . import files
from .migrate import Result, migrate
from .source import Note

__all__ = ['Note', 'Result', 'files', 'migrate']
