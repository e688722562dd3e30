"""``amp-wrapper migrate``: move scripts and configs from apex to this package, and list what is left to do by hand."""

from __future__ import annotations

import argparse
import difflib
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .apex_migration import Note

HELP = 'move scripts and configs from apex: show the edits, or apply them'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options.

    Args:
        parser: Gets them.
    """
    parser.description = (
        'Move Python files from apex.amp, apex.parallel, apex.fp16_utils, apex.optimizers and ApexOptimWrapper to '
        'amp_wrapper and torch. Shows the edits as a diff on stdout, and what is left to do by hand on stderr.'
    )
    parser.epilog = (
        'exit status: 0 nothing is left to do by hand, 1 something is, 2 wrong arguments, or a file that cannot be '
        f'read or written. example: {parser.prog} train.py configs/'
    )
    parser.add_argument('paths', metavar='PATH', nargs='+', type=Path, help='Python file, or folder with Python files')
    parser.add_argument('--write', action='store_true', help='apply the edits; without it nothing is written')


def parse_args(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """The options; every path exists.

    Args:
        parser: With :func:`add_arguments`.
        words: Of the command line.
    """
    args = parser.parse_args(words)
    for path in args.paths:
        if not path.exists():
            parser.error(f'{path} does not exist')
        if path.is_file() and path.suffix != '.py':
            parser.error(f'{path} is no Python file: its name must end in .py')
    return args


def run(args: argparse.Namespace) -> int:
    """Show the edits, or apply them, and list what is left to do by hand.

    Args:
        args: From :func:`parse_args`.

    Returns:
        0 where nothing is left to do by hand, 1 where something is, 2 for a file that cannot be read or written.
    """
    from .apex_migration import files, migrate

    by_hand: list[str] = []
    remarks: list[str] = []
    failed: list[str] = []
    changed = 0
    try:
        paths = list(files.find(args.paths))
    except OSError as error:
        print(f'{error.filename}: cannot be read: {error.strerror}', file=sys.stderr)
        return 2
    progress = Progress(len(paths))
    for done, path in enumerate(paths, 1):
        progress.show(done)
        try:
            result = migrate(path.read_bytes(), package=path.name == '__init__.py')
        except OSError as error:
            failed.append(f'{path}: cannot be read: {error.strerror}')
            continue
        except (SyntaxError, UnicodeDecodeError) as error:
            line = getattr(error, 'lineno', None) or 1
            by_hand.append(
                f'{path}:{line}: the file: is left as it is, since it is no Python that can be parsed: {error}'
            )
            continue
        except Exception as error:  # a defect of this tool in one file is no reason to leave the others
            failed.append(f'{path}: is left as it is, by a defect of this tool: {type(error).__name__}: {error}')
            continue
        by_hand += [say(path, note) for note in result.notes if note.by_hand]
        remarks += [say(path, note) for note in result.notes if not note.by_hand]
        if not result.changed:
            continue
        if not args.write:
            sys.stdout.write(diff(path, result.before, result.after))
        else:
            try:
                files.write(path, result.data)
            except OSError as error:
                failed.append(f'{path}: cannot be written: {error.strerror or error}')
                continue
            print(f'{path}: written')
        changed += 1
    sys.stdout.flush()
    for title, lines in (('Done, and worth knowing:', remarks), ('Left to do by hand:', by_hand), ('Failed:', failed)):
        if lines:
            print(f'\n{title}', *lines, sep='\n', file=sys.stderr)
    verb = 'changed' if args.write else 'would change'
    print(f'\nFiles: {len(paths)}, {verb}: {changed}. Places left to do by hand: {len(by_hand)}.', file=sys.stderr)
    return 2 if failed else 1 if by_hand else 0


def say(path: Path, note: Note) -> str:
    """A line of the report."""
    return f'{path}:{note.line}: {note.name}: {note.text}'


def diff(path: Path, before: str, after: str) -> str:
    """The edits of a file as ``patch`` takes them."""
    name = str(path).lstrip('/')
    # a form feed ends a line for splitlines, and none for patch
    old, new = (list(io.StringIO(text, newline='\n')) for text in (before, after))
    lines = difflib.unified_diff(old, new, f'a/{name}', f'b/{name}')
    return ''.join(line if line.endswith('\n') else f'{line}\n\\ No newline at end of file\n' for line in lines)


class Progress:
    """A line on a terminal that counts the files; nothing elsewhere.

    Args:
        total: How many there are.
    """

    def __init__(self, total: int) -> None:
        self._total = total if sys.stderr.isatty() and total > 20 else 0

    def show(self, done: int) -> None:
        if self._total:
            end = '\n' if done == self._total else ''
            print(f'\r{done} of {self._total} files', end=end, file=sys.stderr, flush=True)
