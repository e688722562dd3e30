"""Imports point downward between the folders of the package, and form no cycle inside one; files are short."""

from __future__ import annotations

import ast
import functools
import graphlib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

import amp_wrapper

PACKAGE = Path(amp_wrapper.__file__).parent
#: What a folder, or a file beside the folders, may import: whatever stands in a lower line.
ORDER: tuple[frozenset[str], ...] = (
    frozenset({'errors', 'late_names', 'version', 'torch_internals'}),
    frozenset({'compiler_internals', 'distributed_internals'}),
    frozenset({'policy', 'shards'}),
    frozenset({'ops', 'checkpoint'}),
    frozenset({'casting', 'optim'}),
    frozenset({'engine'}),
    frozenset({'diagnostics'}),
    frozenset({'amp', 'registry'}),
    frozenset({'openmmlab', 'apex'}),
    frozenset({'__init__'}),
    frozenset({'info'}),
    frozenset({'cli'}),
    frozenset({'__main__'}),
)
#: Who may import mmengine and mmcv.
FRAMEWORKS, INTEGRATIONS = {'mmengine', 'mmcv'}, {'openmmlab', 'registry', 'info'}
SOURCES = {path.relative_to(PACKAGE).as_posix(): path.read_text(encoding='utf-8') for path in PACKAGE.rglob('*.py')}


def room(path: str) -> str:
    return path.split('/')[0].removesuffix('.py')


def height(path: str) -> int:
    return next(line for line, rooms in enumerate(ORDER) if room(path) in rooms)


@functools.cache
def imports(path: str, source: str) -> list[list[str]]:
    """The parts of each absolute name that a file imports, wherever in it; ``from x import y`` gives x, y."""
    folder = ['amp_wrapper', *PurePosixPath(path).parent.parts]
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name.split('.') for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = folder[: len(folder) - node.level + 1] if node.level else []
            base = base + (node.module.split('.') if node.module else [])
            found += [[*base, alias.name] for alias in node.names]
    return found


def file_of(parts: list[str], sources: Mapping[str, str]) -> str:
    """The file of the package in which an imported name is found: that of the longest beginning of it."""
    beginnings = ('/'.join(parts[1:end]) for end in range(len(parts), 0, -1))
    candidates = (name for beginning in beginnings for name in (f'{beginning}.py', f'{beginning}/__init__.py'))
    return next(name for candidate in candidates if (name := candidate.lstrip('/')) in sources)


def violations(sources: Mapping[str, str]) -> list[str]:
    """A line for each import that does not point downward, for a cycle inside a folder, and for each stray framework."""
    found: list[str] = []
    inside: dict[str, set[str]] = {path: set() for path in sources}
    for path, source in sources.items():
        for parts in imports(path, source):
            if parts[0] in FRAMEWORKS and room(path) not in INTEGRATIONS:
                found.append(f'{path} imports {parts[0]}')
            if parts[0] != 'amp_wrapper':
                continue
            other = file_of(parts, sources)
            if room(other) == room(path):
                inside[path].add(other)
            elif height(other) >= height(path):
                found.append(f'{path} imports {other}')
    try:
        graphlib.TopologicalSorter(inside).prepare()
    except graphlib.CycleError as error:
        found.append(' -> '.join(error.args[1]))
    return found


def test_imports_point_downward_and_no_folder_has_a_cycle() -> None:
    assert {room(path) for path in SOURCES} == set().union(*ORDER)
    assert violations(SOURCES) == []


def test_files_are_short() -> None:
    assert [path for path, text in SOURCES.items() if text.count('\n') > 400] == []
