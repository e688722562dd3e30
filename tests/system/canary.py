"""Which private names of torch have moved in the torch that is installed: ``make canary``.

The names are those of the ``*_internals.py`` of the package. Two things are asked of each:

* Where the source spells it from a module on (``torch._C._current_graph_task_id``): is it there?
* Is it still defined, with the same arguments, in the files of torch in which the recorded torch defines it
  (``tests/data/private_names.json``)? This is the only question for attributes of modules, optimizers and the like.

Neither imports the package, which a missing name may keep from being imported. That the names still *do* what they did is the
matter of ``test_torch_internals.py``, ``test_compiler_internals.py`` and ``tests/distributed/test_fsdp.py``.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import importlib.util
import json
import mmap
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
#: The files of the package that have the private names of torch.
INTERNALS = (
    'torch_internals.py',
    'compiler_internals.py',
    'graph_internals.py',
    'fsdp_internals.py',
    'ddp_internals.py',
)
RECORD = ROOT / 'tests' / 'data' / 'private_names.json'
#: Where a name is that only the compiled part of torch has.
COMPILED = 'C++'


# -- names in sources -------------------------------------------------------------------------------------------------


def is_private(name: str) -> bool:
    """Whether a name, or a part of a dotted one, begins with one underscore."""
    return any(re.fullmatch(r'_(?!_)\w+', part) for part in name.split('.'))


def names_in(node: ast.AST) -> Iterator[str]:
    """The names that a node asks something else for: an attribute, an import, the words of a string.

    A string counts where it is nothing but names, as for ``getattr``: documentation and messages are none.
    """
    if isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.ImportFrom) and not node.level:
        yield from (f'{node.module}.{alias.name}' for alias in node.names)
    elif isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        words = node.value.split()
        if all(re.fullmatch(r'[\w.]+', word) for word in words):
            yield from words


def given_by(node: ast.AST) -> str | None:
    """The name that a node gives to something of the package's own: a function, a class, a variable, ``self.name``."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return node.name
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return node.id
    return node.attr if is_of_self(node) and isinstance(node.ctx, ast.Store) else None


def is_of_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ('self', 'cls')


@dataclasses.dataclass(frozen=True)
class Use:
    """A private name in a file of ours.

    Attributes:
        name: The last private part of it.
        path: From a module of torch on, where the source spells that; else empty.
        optional: Whether the file asks with a default, so that a torch may lack it.
        where: File and line.
    """

    name: str
    path: str
    optional: bool
    where: str


def _aliases(tree: ast.AST) -> dict[str, str]:
    """What the imports of a file call the modules and members of torch."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            ours = [alias for alias in node.names if alias.name.split('.')[0] == 'torch']
            found.update({alias.asname or 'torch': alias.name if alias.asname else 'torch' for alias in ours})
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split('.')[0] == 'torch':
            found.update({alias.asname or alias.name: f'{node.module}.{alias.name}' for alias in node.names})
    return found


def _dotted(node: ast.AST, aliases: Mapping[str, str]) -> str:
    """``a.b.c`` from a module of torch on; empty where it begins with anything else."""
    if isinstance(node, ast.Name):
        return aliases.get(node.id, '')
    if isinstance(node, ast.Attribute):
        before = _dotted(node.value, aliases)
        return f'{before}.{node.attr}' if before else ''
    return ''


def uses_in(source: str, file: str) -> Iterator[Use]:
    """The private names of torch in a file of ours.

    Args:
        source: Its text.
        file: Its name.
    """
    tree = ast.parse(source)
    aliases = _aliases(tree)
    own = {name for name in map(given_by, ast.walk(tree)) if name is not None}
    asked = {
        id(node.args[1]): (_dotted(node.args[0], aliases), len(node.args) > 2)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ('getattr', 'hasattr')
        if len(node.args) > 1
    }
    for node in ast.walk(tree):
        before, has_default = asked.get(id(node), ('', isinstance(node, ast.Constant)))
        for name in filter(is_private, names_in(node)):
            last = next(part for part in reversed(name.split('.')) if is_private(part))
            if last in own or (is_of_self(node) and name in own):
                continue
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                path = name if name.startswith('torch.') else ''
            elif isinstance(node, ast.Constant):
                path = f'{before}.{name}' if before else ''
            else:
                path = _dotted(node, aliases)
            yield Use(last, path, has_default, f'{file}:{getattr(node, "lineno", 0)}')


def all_uses(folder: Path) -> list[Use]:
    """The private names in all files of the package that may have some."""
    return [use for name in INTERNALS for use in uses_in((folder / name).read_text(encoding='utf-8'), name)]


# -- the torch that is installed --------------------------------------------------------------------------------------


def is_there(path: str) -> bool:
    """Whether a dotted path leads somewhere: modules are imported as far as they go, then attributes are taken."""
    parts = path.split('.')
    found: Any = None
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        for index, part in enumerate(parts):
            if hasattr(found, part):
                found = getattr(found, part)
                continue
            try:
                found = importlib.import_module('.'.join(parts[: index + 1]))
            except ImportError:
                return False
    return True


def definitions(names: set[str], torch: Path) -> dict[str, dict[str, str]]:
    """Where torch defines names.

    Args:
        names: Without dots.
        torch: The folder of the package.

    Returns:
        For each name, the files that define it, each with the arguments if it is a function there.
    """
    found: dict[str, dict[str, str]] = {name: {} for name in names}
    choice = '|'.join(sorted(names))
    function = rf'(?:async )?(?P<kind>def|class)[ ]+(?P<named>{choice})\b'
    variable = rf'(?:[\w.]+\.)?(?P<set>{choice})\s*(?::[^=\n]*)?=[^=]'
    pattern = re.compile(rf'^[ \t]*(?:{function}|{variable})', re.MULTILINE)
    for file in sorted(torch.rglob('*.py')):
        place = file.relative_to(torch).as_posix()
        if place.startswith('testing/'):
            continue
        if file.name == '__init__.py' and file.parent.name in names:
            found[file.parent.name][place] = ''
        text = file.read_text(encoding='utf-8', errors='replace')
        hits = list(pattern.finditer(text))
        arguments = _arguments(text) if any(hit['kind'] == 'def' for hit in hits) else {}
        for hit in hits:
            name = hit['named'] or hit['set']
            found[name][place] = arguments.get(name, '')
    missing = [name for name, places in found.items() if not places]
    for library in sorted((torch / 'lib').glob('libtorch_python.*')) if missing else ():
        with library.open('rb') as file_object, mmap.mmap(file_object.fileno(), 0, access=mmap.ACCESS_READ) as content:
            for name in missing:
                if content.find(b'\0' + name.encode() + b'\0') >= 0:
                    found[name][COMPILED] = ''
    return found


def _arguments(text: str) -> dict[str, str]:
    return {
        node.name: ast.unparse(node.args) if node.name.startswith('_') else ''
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }


def torch_folder() -> Path:
    """The folder of the torch that is installed; it is not imported for that."""
    spec = importlib.util.find_spec('torch')
    assert spec is not None, 'there is no torch'
    assert spec.origin is not None
    return Path(spec.origin).parent


# -- the comparison ---------------------------------------------------------------------------------------------------


def moved(
    uses: Sequence[Use], now: Mapping[str, Mapping[str, str]], before: Mapping[str, Mapping[str, str]]
) -> list[str]:
    """A line for each name that is not what, or not where, it was.

    Args:
        uses: From :func:`all_uses`.
        now: From :func:`definitions`, for the torch that is installed.
        before: The same for the recorded one.
    """
    lines = []
    by_name: dict[str, list[Use]] = {}
    for use in uses:
        by_name.setdefault(use.name, []).append(use)
    for name, group in sorted(by_name.items()):
        where = ', '.join(dict.fromkeys(use.where for use in group))
        old, new = before.get(name, {}), now.get(name, {})
        for path in dict.fromkeys(use.path for use in group if use.path and not is_there(use.path)):
            optional = all(use.optional for use in group if use.path == path)
            elsewhere = f'; defined in {_places(new)}' if new else ''
            lines.append(
                f'{"not there (asked for with a default)" if optional else "GONE"}: {path}{elsewhere} [{where}]'
            )
        if old and not set(old) & set(new):
            verdict, target = ('MOVED', f' to {_places(new)}') if new else ('GONE', '')
            lines.append(f'{verdict}: {name}, from {_places(old)}{target} [{where}]')
        lines += [
            f'other arguments: {name} in {place}: ({old[place]}) is now ({new[place]}) [{where}]'
            for place in sorted(set(old) & set(new))
            if old[place] != new[place]
        ]
    return lines


def _places(files: Mapping[str, str]) -> str:
    return ', '.join(sorted(files)[:4]) + (', ...' if len(files) > 4 else '')


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what has moved; with ``--strict``, 1 where anything has."""
    parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
    parser.add_argument('--strict', action='store_true', help='exit with 1 where a name is gone or has moved')
    parser.add_argument('--record', action='store_true', help='compare later versions with the torch that is installed')
    args = parser.parse_args(arguments)
    folder = torch_folder()
    version = re.search(r"__version__ = '([^']+)'", (folder / 'version.py').read_text())
    assert version is not None
    uses = all_uses(ROOT / 'amp_wrapper')
    now = definitions({use.name for use in uses}, folder)
    if args.record:
        RECORD.write_text(
            json.dumps({'torch': version[1].split('+')[0], 'names': now}, indent=1, sort_keys=True) + '\n'
        )
    record = json.loads(RECORD.read_text())
    lines = moved(uses, now, record['names'])
    print(f'torch {version[1]}, beside torch {record["torch"]}: {len(now)} private names, {len(lines)} findings')
    print('\n'.join(lines) if lines else 'all of them are where they were, with the same arguments')
    return 1 if args.strict and any(line.startswith(('GONE', 'MOVED')) for line in lines) else 0


if __name__ == '__main__':
    sys.exit(main())
