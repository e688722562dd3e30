"""Imports point downward between the folders of the package, and form no cycle inside one; tests have the same folders."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import amp_wrapper

PACKAGE = 'amp_wrapper'
#: What a folder, or a file beside the folders, may import: whatever stands in a lower line.
ORDER: tuple[frozenset[str], ...] = (
    frozenset({'errors', 'late_names', 'start', 'version', 'torch_internals'}),
    frozenset({'compiler_internals', 'graph_internals', 'fsdp_internals', 'ddp_internals'}),
    frozenset({'policy', 'shards'}),
    frozenset({'ops', 'autocast', 'checkpoint'}),
    frozenset({'casting', 'optim'}),
    frozenset({'engine'}),
    frozenset({'diagnostics'}),
    frozenset({'amp', 'registry'}),
    frozenset({'openmmlab'}),
    # the package itself
    frozenset({''}),
    frozenset({'info'}),
    frozenset({'cli'}),
    frozenset({'__main__'}),
)
#: Who may import mmengine and mmcv.
FRAMEWORKS, INTEGRATIONS = {'mmengine', 'mmcv'}, {'openmmlab', 'registry', 'info'}


def room(module: str) -> str:
    """The folder of a dotted module name inside the package, or the name of a file beside the folders."""
    return module.split('.')[0]


def height(module: str) -> int:
    """The line of :data:`ORDER` that a module belongs to."""
    return next(line for line, rooms in enumerate(ORDER) if room(module) in rooms)


def imports(module: str, source: str, is_package: bool) -> Iterator[str]:
    """Absolute dotted names that ``source`` imports, wherever in the file; ``from x import y`` gives ``x.y``."""
    parts = [PACKAGE, *(part for part in module.split('.') if part)]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
        elif isinstance(node, ast.ImportFrom):
            base = []
            if node.level:
                up = node.level - 1 if is_package else node.level
                base = parts[: len(parts) - up]
            base += node.module.split('.') if node.module else []
            for alias in node.names:
                yield '.'.join([*base, alias.name])


def file_of(target: str, modules: Mapping[str, str]) -> str:
    """The module of the package in which an imported name is found: the longest beginning of it that is a file."""
    parts = target.split('.')[1:]
    return next(name for end in range(len(parts), -1, -1) if (name := '.'.join(parts[:end])) in modules)


def violations(modules: Mapping[str, str], packages: frozenset[str]) -> list[str]:
    """One line for each import that does not point downward, each cycle inside a folder, and each stray framework.

    Args:
        modules: Dotted name below the package to source.
        packages: Those that are the ``__init__`` of a folder.
    """
    found: list[str] = []
    inside: dict[str, set[str]] = {module: set() for module in modules}
    for module, source in modules.items():
        for target in imports(module, source, module in packages):
            first = target.split('.')[0]
            if first in FRAMEWORKS and room(module) not in INTEGRATIONS:
                found.append(f'{module} imports {first}')
            if first != PACKAGE:
                continue
            other = file_of(target, modules)
            if room(other) == room(module):
                inside[module].add(other)
            elif height(other) >= height(module):
                found.append(f'{module} imports {other}')
    return found + [f'{" -> ".join(cycle)}' for cycle in cycles(inside)]


def cycles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """One cycle for each module that is reached again from itself first."""
    found, done = [], set()

    def visit(module: str, path: list[str]) -> None:
        if module in path:
            found.append([*path[path.index(module) :], module])
        elif module not in done:
            for other in sorted(graph[module]):
                visit(other, [*path, module])
            done.add(module)

    for module in sorted(graph):
        visit(module, [])
    return found


@pytest.fixture(scope='module')
def packages() -> frozenset[str]:
    root = Path(amp_wrapper.__file__).parent
    names = ('.'.join(path.parent.relative_to(root).parts) for path in root.rglob('__init__.py'))
    return frozenset(names)


@pytest.fixture(scope='module')
def sources() -> dict[str, str]:
    root = Path(amp_wrapper.__file__).parent
    result = {}
    for path in root.rglob('*.py'):
        parts = list(path.relative_to(root).with_suffix('').parts)
        if parts[-1] == '__init__':
            parts.pop()
        result['.'.join(parts)] = path.read_text(encoding='utf-8')
    return result


def test_every_import_points_downward_and_no_folder_has_a_cycle(
    sources: dict[str, str], packages: frozenset[str]
) -> None:
    assert violations(sources, packages) == []


def test_every_folder_has_its_place(sources: dict[str, str]) -> None:
    assert {room(module) for module in sources} == set().union(*ORDER)


@pytest.mark.parametrize(
    ('module', 'line', 'words'),
    [
        ('casting.plan', 'from ..engine import AmpEngine', 'imports engine'),
        ('casting.plan', 'from amp_wrapper.engine import AmpEngine', 'imports engine'),
        ('casting.plan', 'import amp_wrapper.openmmlab.optim_wrapper', 'imports openmmlab'),
        ('checkpoint.format', 'def f():\n    from ..casting.plan import pair', 'imports casting.plan'),
        ('errors', 'from .policy import Policy', 'imports policy'),
        ('torch_internals', 'from .fsdp_internals import completes_groups', 'imports fsdp_internals'),
        ('fsdp_internals', 'from .compiler_internals import untraced', 'imports compiler_internals'),
        ('ops.reference', 'from ..autocast import call', 'imports autocast.call'),
        ('ops.checks', 'from . import reference', 'ops.checks -> ops.reference -> ops.checks'),
        ('policy.nested', 'from . import Policy', 'policy.nested'),
        ('engine.loss_scale', 'from mmengine.optim import OptimWrapper', 'imports mmengine'),
        ('engine.loss_scale', 'try:\n    import mmcv.ops\nexcept ImportError:\n    pass', 'imports mmcv'),
        ('policy.policy', 'import amp_wrapper', 'policy.policy imports '),
    ],
)
def test_checker_catches_a_planted_violation(
    sources: dict[str, str], packages: frozenset[str], module: str, line: str, words: str
) -> None:
    found = violations({**sources, module: sources[module] + '\n' + line + '\n'}, packages)
    assert found
    assert words in found[0]


@pytest.mark.parametrize(
    ('module', 'line'),
    [
        (
            'casting.plan',
            'from ..policy.nested import cast_tensors\nfrom .. import ops\nfrom ..autocast import patching',
        ),
        ('engine.step', 'from ..casting import plan\nfrom amp_wrapper.policy import Policy'),
        ('openmmlab.hooks', 'import mmengine\nfrom ..engine import AmpEngine'),
    ],
)
def test_checker_allows_what_points_downward(
    sources: dict[str, str], packages: frozenset[str], module: str, line: str
) -> None:
    assert violations({**sources, module: sources[module] + '\n' + line + '\n'}, packages) == []


# -- the tests -------------------------------------------------------------------------------------------------------

TESTS = Path(__file__).parents[1]
#: Folders beside those that mirror the package: what they hold is of no single one of its folders.
BESIDE = frozenset(
    {
        'compiled',
        'distributed',
        'system',
        'tools',
        'downstream',
        'foreign_packages',
        'support',
        'data',
        'cuda_shim',
        '__pycache__',
    }
)
#: Lines of a file of the package, and of the tests.
LONGEST = {Path(amp_wrapper.__file__).parent: 400, TESTS: 600}


def test_tests_have_the_folders_of_the_package() -> None:
    root = Path(amp_wrapper.__file__).parent
    rooms = {path.parent.name for path in root.glob('*/__init__.py')}
    assert {path.name for path in TESTS.iterdir() if path.is_dir()} - BESIDE == rooms
    for name in rooms:
        assert list((TESTS / name).glob('test_*.py')), name
    # what is tested has a folder
    assert [path.name for path in TESTS.glob('*.py')] == ['conftest.py']


@pytest.mark.parametrize('folder', LONGEST, ids=lambda folder: folder.name)
def test_no_file_is_long(folder: Path) -> None:
    lines = {path: path.read_text(encoding='utf-8').count('\n') for path in folder.rglob('*.py')}
    assert len(lines) > 100
    assert [f'{path.relative_to(folder)}: {count}' for path, count in lines.items() if count > LONGEST[folder]] == []


def test_no_test_file_is_imported() -> None:
    """What several files share lies in ``support``; a file of tests has a name that no other has."""
    files = [path for path in TESTS.rglob('test_*.py') if path.parent.name not in ('downstream', 'foreign_packages')]
    names = [path.stem for path in files]
    assert sorted(names) == sorted(set(names))
    found = []
    for path in TESTS.rglob('*.py'):
        if 'migration_scripts' not in path.parts and path.parent.name != 'foreign_packages':
            tree = ast.parse(path.read_text(encoding='utf-8'))
            imported = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
            imported += [node.module or '' for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
            found += [f'{path.relative_to(TESTS)} imports {name}' for name in imported if name in names]
    assert found == []
