"""setup.py: what is built, when, and what is said where it cannot be.

Nothing here compiles the library anew: ``tests/support/source_tree.py`` says why. ``test_build_without_torch.py`` has the rest.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from grid import grid
from source_tree import RECORD, ROOT, SUFFIXES, Tree, names_in
from torch.utils.cpp_extension import CUDA_HOME

import amp_wrapper


@pytest.fixture(scope='module')
def built(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    """Built in place."""
    if shutil.which('c++') is None:
        pytest.skip('there is no C++ compiler (c++)')
    tree = Tree(tmp_path_factory.mktemp('built'))
    everything = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / 'csrc').rglob('*.cpp'))
    assert tree.build() == [name for name in everything if '/cuda/' not in name]
    return tree


# -- without the ops --------------------------------------------------------------------------------------------------


def missing_headers() -> list[str]:
    """setup.py by an interpreter whose headers lie nowhere."""
    code = (
        'import runpy, sys, sysconfig\n'
        'old = sysconfig.get_path\n'
        "sysconfig.get_path = lambda name, *rest: '/nowhere' if name == 'include' else old(name, *rest)\n"
        "sys.argv = ['setup.py', 'build_ext', '--inplace']\n"
        "runpy.run_path('setup.py', run_name='__main__')"
    )
    return ['-c', code]


@pytest.mark.parametrize('what', ['compiler', 'headers'])
def test_what_is_missing_is_said_once(tree: Tree, what: str) -> None:
    command = ['setup.py', 'build_ext', '--inplace'] if what == 'compiler' else missing_headers()
    variables = {'CXX': '/nowhere/c++'} if what == 'compiler' else {}
    reason = {
        'compiler': 'there is no C++ compiler (/nowhere/c++)',
        'headers': 'the headers of Python are missing (Python.h; python3-dev on Debian and Ubuntu)',
    }[what]
    done = tree.run(*command, **variables)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count('without its compiled ops') == 1
    assert reason in done.stderr and 'To build them: install g++' in done.stderr
    assert tree.record() == {'built': False, 'reason': reason, 'chosen': False}
    if what == 'compiler':
        # pip hides what a build says; this is the warning that its user sees
        assert tree.library() == {'file': None, 'reason': reason, 'changed': None, 'warnings': 1}


def test_a_compiler_may_be_demanded(tree: Tree) -> None:
    for name in ('AMP_WRAPPER_WITH_OPS', 'FORCE_CUDA'):
        done = tree.run('setup.py', 'build_ext', '--inplace', CXX='/nowhere/c++', **{name: '1'})
        assert done.returncode != 0 and done.stdout == ''
        assert done.stderr.strip() == f'{name}=1, but there is no C++ compiler (/nowhere/c++).'
    assert not (tree.root / RECORD).exists()


def test_pure_python_needs_no_torch(tree: Tree) -> None:
    no_torch = str(tree.root.parent / 'no_torch')
    assert tree.build(AMP_WRAPPER_WITH_OPS='0', PYTHONPATH=no_torch) == []
    assert tree.record()['chosen'] is True
    assert tree.library() == {
        'file': None,
        'reason': 'it was installed with AMP_WRAPPER_WITH_OPS=0',
        'changed': None,
        'warnings': 0,
    }


def test_a_torch_with_cuda_is_needed_for_cuda(tree: Tree) -> None:
    if torch.version.cuda is not None:
        pytest.skip('this torch has CUDA')
    done = tree.run('setup.py', 'build_ext', '--inplace', FORCE_CUDA='1')
    assert done.returncode != 0
    assert done.stderr.strip() == 'FORCE_CUDA=1, but the torch that it was built with has no CUDA.'


def test_words_that_mean_nothing_are_refused(tree: Tree) -> None:
    done = tree.run('setup.py', 'build_ext', '--inplace', AMP_WRAPPER_WITH_OPS='no')
    assert done.returncode != 0
    assert 'AMP_WRAPPER_WITH_OPS=no means nothing: 0 leaves the compiled ops out, 1 insists on them.' in done.stderr
    done = tree.run('setup.py', 'build_ext', '--inplace', FORCE_CUDA='yes')
    assert done.returncode != 0
    assert 'FORCE_CUDA=yes means nothing: 0 leaves the CUDA ops out, 1 insists on them.' in done.stderr


# -- in place ---------------------------------------------------------------------------------------------------------


def test_built_in_place(built: Tree) -> None:
    built.build()
    found = built.library()
    # why there are no CUDA ops
    if torch.version.cuda is None:
        reason = 'the torch that it was built with has no CUDA'
    elif not torch.cuda.is_available():
        reason = 'no GPU was seen when it was built; FORCE_CUDA=1 builds the CUDA ops all the same'
    elif CUDA_HOME is None:
        reason = 'nvcc was not found; CUDA_HOME names the folder of a CUDA toolkit'
    else:
        reason = ''
    assert found == {
        'file': found['file'],
        'reason': reason,
        'changed': False,
        'warnings': 0,
    }
    assert Path(found['file']).parent == built.root / 'amp_wrapper/ops'
    facts = built.record()
    assert facts['torch'] == torch.__version__ and facts['python'] == sys.implementation.cache_tag
    assert facts['compiler'] and facts['compiler'] != 'c++'


def users_of(tree: Path, name: str) -> set[str]:
    """The .cpp files that include a file, at any depth, or are it."""
    texts = {path: path.read_text() for path in (tree / 'csrc').rglob('*') if path.suffix in SUFFIXES}
    found = {tree / name}
    for _ in texts:
        found |= {
            path
            for path, text in texts.items()
            if any((path.parent / i).resolve() in found for i in re.findall('#include "(.+)"', text))
        }
    names = {path.relative_to(tree).as_posix() for path in found if path.suffix == '.cpp'}
    return {name for name in names if '/cuda/' not in name}


@grid
def test_what_changed_is_compiled(built: Tree) -> None:
    built.build()
    assert built.build() == []
    everything = {name for name in names_in(built.root) if name.startswith('csrc/') and name.endswith('.cpp')}
    for touched, least in (
        ('csrc/cpu/ops.cpp', 1),
        ('csrc/cpu/vector.inl', 3),
        ('csrc/common/lists.h', 2),
        ('setup.py', 0),
    ):
        users = users_of(built.root.resolve(), touched)
        assert least <= len(users) < len(everything)
        os.utime(built.root / touched)
        assert set(built.build()) == users


@grid
def test_other_flags_compile_everything(built: Tree) -> None:
    flags = built.root / 'amp_wrapper/ops/building.py'
    kept = flags.read_text()
    count = len([name for name in (built.root / 'csrc').rglob('*.cpp') if name.parent.name != 'cuda'])
    flags.write_text(kept.replace("'-ffp-contract=off'", "'-ffp-contract=off', '-DNDEBUG=1'"))
    try:
        assert len(built.build()) == count
    finally:
        flags.write_text(kept)


@grid
def test_a_library_for_another_torch_is_built_anew(built: Tree) -> None:
    """Newer than every source, it would be taken for up to date."""
    library = next((built.root / 'amp_wrapper/ops').glob('_C.*.so'))
    for file in (library, *(built.root / 'build').rglob('_C.*.so')):
        file.write_bytes(b'of another torch')
    built.build()
    assert built.library()['file'] == str(library)


@grid
def test_a_failed_build(built: Tree) -> None:
    """A message without traceback, and a record that says so, though an older library lies there."""
    source = built.root / 'csrc/cpu/kernels_default.cpp'
    kept = source.read_text()
    source.write_text('#error BROKEN on purpose\n')
    try:
        done = built.run('setup.py', 'build_ext', '--inplace')
        assert done.returncode != 0
        assert 'BROKEN on purpose' in done.stdout
        assert 'The compiled ops could not be built' in done.stderr and 'AMP_WRAPPER_WITH_OPS=0' in done.stderr
        assert 'Traceback' not in done.stderr.split('The compiled ops')[-1]
        assert built.record() == {'built': False, 'reason': 'the last build of them failed', 'chosen': False}
        assert list((built.root / 'amp_wrapper/ops').glob('_C.*.so'))
        found = built.library()
        assert found['file'] is None and found['reason'] == 'the last build of them failed' and found['warnings'] == 1
    finally:
        source.write_text(kept)
    built.build()
    assert built.record()['built'] is True


def test_a_library_that_cannot_be_loaded_fails_the_build(built: Tree) -> None:
    """As with a function that no library has; without this, the first step of a training would find out."""
    source = built.root / 'csrc/common/missing.cpp'
    source.write_text(
        'void nobody_has_me(int); // BROKEN\nnamespace { const bool called = (nobody_has_me(1), true); }\n'
    )
    try:
        done = built.run('setup.py', 'build_ext', '--inplace')
        assert done.returncode != 0 and 'nobody_has_me' in done.stderr
        assert built.record()['built'] is False
    finally:
        source.unlink()


@grid
def test_pure_python_over_a_library(built: Tree) -> None:
    """The library of an earlier build stays where it is, and is not loaded."""
    assert built.build(AMP_WRAPPER_WITH_OPS='0') == []
    assert list((built.root / 'amp_wrapper/ops').glob('_C.*.so'))
    assert built.library()['file'] is None


# -- sdist and wheel --------------------------------------------------------------------------------------------------


def pack(tree: Tree, folder: Path) -> Path:
    """The unpacked sdist of a tree in which everything was built; torch is not asked for."""
    done = tree.run('setup.py', '-q', 'sdist', '-d', str(folder), PYTHONPATH=str(tree.root.parent / 'no_torch'))
    assert done.returncode == 0, done.stderr
    archive = next(folder.glob('*.tar.gz'))
    with tarfile.open(archive) as content:
        # Python 3.11.3 and 3.10.11 have no filters yet
        safely: Any = dict(filter='data') if hasattr(tarfile, 'data_filter') else {}
        content.extractall(folder, **safely)
    return folder / archive.name.removesuffix('.tar.gz')


def test_sdist_is_complete_and_holds_nothing_built(built: Tree, tmp_path: Path) -> None:
    names = names_in(pack(built, tmp_path))
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / 'csrc').rglob('*') if path.suffix in SUFFIXES}
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / 'amp_wrapper').rglob('*.py')}
    modules |= {path.relative_to(ROOT).as_posix() for path in (ROOT / 'amp_wrapper').rglob('*.j2')}
    assert sources | modules | {'setup.py', 'Makefile', 'requirements/build.txt', 'amp_wrapper/py.typed'} <= names
    assert not [name for name in names if name.endswith(('.so', '.o', '.pyc')) or 'build.ninja' in name]
    assert RECORD.as_posix() not in names


def test_sdist_to_wheel_to_installed_package(built: Tree, tmp_path: Path) -> None:
    """pip as its users call it; the package that is installed then works outside of any source tree."""
    source = pack(built, tmp_path)
    # the stand-in knows the sources of its own tree, and the objects are of the same ones
    stand_in = built.compiler.read_text().replace(repr(str(built.root)), repr(str(source)))
    compiler = tmp_path / 'c++'
    compiler.write_text(stand_in)
    compiler.chmod(0o755)
    before = built.record()
    pip = [
        '-m',
        'pip',
        '--disable-pip-version-check',
        'install',
        '--no-index',
        '--no-deps',
        '--no-build-isolation',
        '-q',
    ]
    installed = tmp_path / 'installed'
    done = built.run(*pip, '--target', str(installed), str(source), CXX=str(compiler), AMP_WRAPPER_WITH_OPS='1')
    assert done.returncode == 0, done.stdout + done.stderr
    # the source tree was only read
    assert not (source / RECORD).exists() and built.record() == before
    names = names_in(installed)
    assert len([name for name in names if name.startswith('amp_wrapper/ops/_C.') and name.endswith('.so')]) == 1
    assert RECORD.as_posix() in names and 'amp_wrapper/csrc/cpu/ops.cpp' in names
    found = built.library(installed)
    assert found['file'].startswith(str(installed)) and found['changed'] is False and found['warnings'] == 0


def test_the_command_builds_in_an_installed_package(tree: Tree, built: Tree, tmp_path: Path) -> None:
    """From the sources that travel in the wheel, without a source tree; then again where the compiler finds a mistake."""
    installed = tmp_path / 'installed'
    pip = (
        '-m',
        'pip',
        '--disable-pip-version-check',
        'install',
        '-q',
        '--no-index',
        '--no-deps',
        '--no-build-isolation',
    )
    done = tree.run(*pip, '--target', str(installed), '.', AMP_WRAPPER_WITH_OPS='0')
    assert done.returncode == 0, done.stdout + done.stderr
    assert not list(installed.rglob('_C.*')) and (installed / 'bin' / 'amp-wrapper').is_file()
    # the stand-in knows the sources of another tree
    compiler = tmp_path / 'c++'
    compiler.write_text(built.compiler.read_text().replace(repr(str(built.root)), repr(str(installed / 'amp_wrapper'))))
    compiler.chmod(0o755)
    command = (str(installed / 'bin' / 'amp-wrapper'), 'build-ops', '--no-cuda', '--jobs', '2')
    variables = {'CXX': str(compiler), 'PYTHONPATH': str(installed)}
    done = tree.run(*command, cwd=tmp_path, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    count = len([name for name in names_in(installed) if name.endswith('.cpp') and '/cuda/' not in name])
    lines = done.stdout.splitlines()
    assert lines[0] == f'torch     {torch.__version__}, {sys.implementation.cache_tag}'
    assert lines[2:5] == [
        'CUDA      not built: they were left out with --no-cuda or FORCE_CUDA=0',
        f'sources   {installed}/amp_wrapper/csrc',
        f'library   {installed}/amp_wrapper/ops',
    ]
    assert [line.partition(' ')[0] for line in lines[5:-2]] == [f'[{index}/{count}]' for index in range(1, count + 1)]
    assert lines[-1].startswith('CUDA      0 of ') and lines[-1].endswith(
        '(they were left out with --no-cuda or FORCE_CUDA=0)'
    )
    found = built.library(installed)
    assert found['file'].startswith(str(installed)) and found['changed'] is False and found['warnings'] == 0

    (installed / 'amp_wrapper/csrc/cpu/ops.cpp').write_text('#error BROKEN on purpose\n')
    done = tree.run(*command, cwd=tmp_path, **variables)
    assert done.returncode == 1 and 'BROKEN on purpose' in done.stderr and 'Traceback' not in done.stderr
    assert done.stderr.splitlines()[-1].startswith('amp-wrapper build-ops: error: the ops could not be compiled; ')
    # what was there serves
    found = built.library(installed)
    assert found['file'].startswith(str(installed)) and found['changed'] is True


def test_pure_wheel(tree: Tree, tmp_path: Path) -> None:
    """For any platform; what an interrupted or earlier build left does not come along."""
    stale = tree.root / 'build/lib/amp_wrapper/ops/_C.stale.so'
    stale.parent.mkdir(parents=True)
    stale.write_bytes(b'stale')
    no_torch = str(tree.root.parent / 'no_torch')
    tree.build('-q', 'bdist_wheel', '-d', str(tmp_path), AMP_WRAPPER_WITH_OPS='0', PYTHONPATH=no_torch)
    wheel = next(tmp_path.glob('*.whl'))
    assert wheel.name == f'amp_wrapper-{amp_wrapper.__version__}-py3-none-any.whl'
    with zipfile.ZipFile(wheel) as content:
        names = content.namelist()
        assert json.loads(content.read(RECORD.as_posix()))['chosen'] is True
    assert not [name for name in names if name.endswith('.so') or name.startswith('csrc')]
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / 'csrc').rglob('*') if path.suffix in SUFFIXES}
    assert {f'amp_wrapper/{name}' for name in sources} <= set(names)
    templates = {path.relative_to(ROOT).as_posix() for path in (ROOT / 'amp_wrapper').rglob('*.j2')}
    assert templates and templates <= set(names)
    assert 'amp_wrapper/cli/apex_migration/tables.py' in names
    assert not (tree.root / RECORD).exists()


# -- the pieces -------------------------------------------------------------------------------------------------------


def test_versions_of_the_build_tools_are_pinned() -> None:
    build = (ROOT / 'requirements/build.txt').read_text()
    assert 'ninja==' in build and 'setuptools==' in build
    assert 'clang-format==' in (ROOT / 'requirements/constraints.txt').read_text()


def test_make_builds_the_ops_where_sources_changed(tmp_path: Path) -> None:
    """Asked without doing anything: what make would run."""
    if shutil.which('make') is None:
        pytest.skip('there is no make')
    shutil.copy2(ROOT / 'Makefile', tmp_path)
    for name in ('csrc', 'requirements'):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ('setup.py', 'pyproject.toml', 'amp_wrapper/ops/building.py', 'amp_wrapper/ops/cuda_toolkit.py'):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tmp_path / name)
    (tmp_path / '.venv').mkdir()
    for name in ('pyvenv.cfg', '.runtime', '.ops', '.dev'):
        (tmp_path / '.venv' / name).touch()

    def would_run() -> list[list[str]]:
        command = ['make', '-n', '-C', str(tmp_path), 'test']
        env = {k: v for k, v in os.environ.items() if not k.startswith('MAKE')}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=60)
        return [shlex.split(line, comments=True) for line in done.stdout.splitlines()]

    assert not [words for words in would_run() if 'setup.py' in words or 'pip' in words]
    for name in ('csrc/common/planner.h', 'csrc/cpu/ops.cpp', 'amp_wrapper/ops/building.py'):
        for stamp in ('.ops', '.dev'):
            os.utime(tmp_path / '.venv' / stamp, (2e9, 2e9))
        os.utime(tmp_path / name, (2e9 + 1, 2e9 + 1))
        commands = would_run()
        assert [words for words in commands if 'setup.py' in words]
        assert not [words for words in commands if 'pip' in words]
        os.utime(tmp_path / name, (1e9, 1e9))
