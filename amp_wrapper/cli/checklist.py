"""``amp-wrapper migrate``: what scripts and configs for apex need, place by place. Files are read, and never changed."""

from __future__ import annotations

import argparse
import ast
import shlex
import sys
import tokenize
import warnings
from collections.abc import Iterator, Mapping, Sequence
from inspect import getattr_static
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from .. import apex

#: Changes the imports of apex.
SED = r"sed -i -E 's/^(\s*(from|import) )apex\b/\1amp_wrapper.apex/; s/^(\s*import amp_wrapper.apex)\S*( *#.*)?$/\1 as apex/'"
#: Folders that are not entered, beside hidden ones.
_FOREIGN = {'build', 'dist', 'venv', 'env', 'node_modules', 'site-packages'}


class Place(NamedTuple):
    """A line of a file, and what to do there: by hand, or by :data:`SED`."""

    line: int
    text: str
    by_hand: bool = True


def migrate(args: argparse.Namespace) -> int:
    """List the places, and print the command that changes imports.

    Args:
        args: The options of ``amp-wrapper migrate``.

    Returns:
        1 where something is left to do by hand, 0 otherwise.
    """
    # of escapes in other people's strings
    warnings.simplefilter('ignore', SyntaxWarning)
    found = {file: sorted(find_places(file)) for file in _files(args.paths)}
    for file, places in found.items():
        for place in places:
            print(f'{file}:{place.line}: {place.text}')
    imports = [str(file) for file, places in found.items() if any(not place.by_hand for place in places)]
    if imports:
        print(f'\nThe imports: call amp_wrapper.apex.install() before them, or run\n{SED} {shlex.join(imports)}')
    by_hand = sum(place.by_hand for places in found.values() for place in places)
    print(f'\nFiles: {len(found)}. Places left to do by hand: {by_hand}.')
    return 1 if by_hand else 0


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    for path in paths:
        for file in [path] if path.is_file() else filter(Path.is_file, sorted(path.rglob('*.py'))):
            folders = file.relative_to(path).parts
            if not _FOREIGN.intersection(folders) and not any(folder.startswith('.') for folder in folders):
                yield file


def find_places(file: Path) -> Iterator[Place]:
    """Find the places of a Python file, by what its imports call the names of apex. One that cannot be read is a place."""
    try:
        with tokenize.open(file) as opened:
            text = opened.read()
        nodes = list(ast.walk(ast.parse(text)))
    except (OSError, SyntaxError, ValueError, RecursionError) as error:
        yield Place(getattr(error, 'lineno', None) or 1, f'the file cannot be read: {error}')
        return
    names, lines = dict[str, str](), text.splitlines()
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom) and (bound := dict(_bindings(node))):
            # import apex.amp binds apex
            names.update({name: 'apex' if name == 'apex' else path for name, path in bound.items()})
            gone = [path for path in bound.values() if _missing(path) not in ('', path)]
            yield from (Place(node.lineno, apex.advice(path)) for path in gone)
            if 'amp_wrapper' not in (code := ast.unparse(node)):
                # which sed leaves alone, or changes by half
                is_joint = isinstance(node, ast.Import) and (len(node.names) > 1 or ';' in lines[node.lineno - 1])
                yield Place(node.lineno, f'{code}: write one import a line' if is_joint else code, by_hand=is_joint)
    for node in nodes:
        if isinstance(node, ast.Name | ast.Attribute):
            path = _path(node, names)
            if path and _missing(path) == path:
                yield Place(node.lineno, apex.advice(path))
        elif isinstance(node, ast.Call):
            given = {each.arg or '': each.value.value for each in node.keywords if isinstance(each.value, ast.Constant)}
            yield from (Place(node.lineno, each) for each in apex.problems(_path(node.func, names), given))
        elif isinstance(node, ast.Constant) and node.value == 'ApexOptimWrapper' and 'amp_wrapper' not in text:
            yield Place(node.lineno, "ApexOptimWrapper: write custom_imports = dict(imports=['amp_wrapper']).")


def _bindings(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str]]:
    """Yield what an import binds to names of apex: the name in the file, and that of apex."""
    module = f'{"." * node.level}{node.module}.' if isinstance(node, ast.ImportFrom) else ''
    for alias in node.names:
        path = f'{module}{alias.name}'.removeprefix('amp_wrapper.')
        if path.split('.')[0] == 'apex' and alias.name == '*':
            names = vars(sys.modules.get(f'amp_wrapper.{path[:-2]}', apex))
            yield from ((name, f'{path[:-1]}{name}') for name in names)
        elif path.split('.')[0] == 'apex':
            yield alias.asname or (alias.name if module else 'apex'), path


def _missing(path: str) -> str:
    """Return the beginning of a name such as ``apex.contrib.xentropy`` that has no counterpart here, or ''."""
    value, parts = sys.modules[apex.__name__], path.split('.')
    for count, part in enumerate(parts[1:], 2):
        if not isinstance(value, ModuleType | apex.AmpState):
            break
        value = getattr_static(value, part, apex.MissingName)
        if isinstance(value, type) and issubclass(value, apex.MissingName):
            return '.'.join(parts[:count])
    return ''


def _path(node: ast.expr, names: Mapping[str, str]) -> str:
    """Return the name of apex that an expression means, or ''."""
    if isinstance(node, ast.Attribute):
        base = _path(node.value, names)
        return base and f'{base}.{node.attr}'
    return names.get(node.id, '') if isinstance(node, ast.Name) else ''
