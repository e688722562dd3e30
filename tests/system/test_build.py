"""setup.py: what is built, when, and what is said where it cannot be. Nothing here compiles the library anew."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from source_tree import RECORD, ROOT, SUFFIXES, Tree, names_in

import amp_wrapper

PIP = '-m pip --disable-pip-version-check install -q --no-index --no-deps --no-build-isolation --target'.split()
IN_PLACE = ('setup.py', 'build_ext', '--inplace')


@pytest.fixture(scope='module')
def tree(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    """Never built with ops."""
    return Tree(tmp_path_factory.mktemp('plain'))


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


def test_missing_compiler_gives_pure_python_that_warns_once(tree: Tree) -> None:
    done = tree.run(*IN_PLACE, CXX='/nowhere/c++')
    reason = 'there is no C++ compiler (/nowhere/c++)'
    assert done.returncode == 0 and done.stderr.count('without its compiled ops') == 1
    assert reason in done.stderr and 'To build them: install g++' in done.stderr
    assert tree.record() == {'built': False, 'reason': reason, 'chosen': False}
    # pip hides what a build says; this is the warning that its user sees
    found = tree.library()
    assert (found['loaded'], found['reason'], found['warnings']) == (False, reason, 1)


def test_pure_python_on_request_needs_no_torch_and_does_not_warn(tree: Tree) -> None:
    assert tree.build(AMP_WRAPPER_WITH_OPS='0', PYTHONPATH=str(tree.no_torch)) == []
    assert tree.record()['chosen'] is True and tree.library()['warnings'] == 0


def test_build_that_cannot_do_what_is_demanded_fails_in_one_line(tree: Tree, tmp_path: Path) -> None:
    (tmp_path / 'torch.py').write_text("raise ImportError('libcudart.so.99: cannot open shared object file')")
    (tree.root / RECORD).unlink(missing_ok=True)
    no_torch = dict(PYTHONPATH=str(tree.no_torch))
    rows: list[tuple[dict[str, str], str]] = [
        (dict(CXX='/nowhere/c++', AMP_WRAPPER_WITH_OPS='1'), 'AMP_WRAPPER_WITH_OPS=1, but there is no C++ compiler'),
        (dict(CXX='/nowhere/c++', FORCE_CUDA='1'), 'FORCE_CUDA=1, but there is no C++ compiler'),
        (
            dict(AMP_WRAPPER_WITH_OPS='no', **no_torch),
            'AMP_WRAPPER_WITH_OPS=no means nothing: 0 leaves the compiled ops out',
        ),
        (dict(FORCE_CUDA='yes', **no_torch), 'FORCE_CUDA=yes means nothing: 0 leaves the CUDA ops out'),
        (dict(AMP_WRAPPER_WITH_OPS='1', **no_torch), 'pip install torch, then pip install --no-build-isolation .'),
        (dict(FORCE_CUDA='1', **no_torch), 'FORCE_CUDA=1, but this build sees no torch'),
        (dict(PYTHONPATH=str(tmp_path)), 'cannot be imported (libcudart.so.99: cannot open'),
        (dict(AMP_WRAPPER_LOCAL_VERSION='torch 2.13', **no_torch), 'is no local version'),
    ]
    if torch.version.cuda is None:
        rows.append((dict(FORCE_CUDA='1'), 'FORCE_CUDA=1, but the torch that it was built with has no CUDA'))
    wrong = []
    for variables, words in rows:
        done = tree.run(*IN_PLACE, **variables)
        last = done.stderr.strip().splitlines()[-1:]
        if (
            done.returncode == 0
            or words not in str(last)
            or 'Traceback' in done.stderr
            or (tree.root / RECORD).exists()
        ):
            wrong.append((words, done.stderr[-500:]))
    assert wrong == []


def test_build_without_torch_is_a_pure_wheel_that_says_how_to_get_the_ops(tree: Tree, tmp_path: Path) -> None:
    """As pip builds it, isolated; what an earlier build left does not come along, and a library of the checkout stays."""
    stale = tree.root / 'build/lib/amp_wrapper/ops/_C.stale.so'
    stale.parent.mkdir(parents=True)
    stale.write_bytes(b'stale')
    variables = {'PYTHONPATH': str(tree.no_torch), 'AMP_WRAPPER_LOCAL_VERSION': 'torch2.13cpu'}
    done = tree.run('setup.py', '-q', 'bdist_wheel', '-d', str(tmp_path), **variables)
    assert done.returncode == 0 and 'where torch is installed run amp-wrapper build-ops' in done.stderr
    name = f'amp_wrapper-{amp_wrapper.__version__}+torch2.13cpu'
    with zipfile.ZipFile(tmp_path / f'{name}-py3-none-any.whl') as content:
        names, metadata = set(content.namelist()), content.read(f'{name}.dist-info/METADATA').decode()
        content.extractall(tmp_path / 'installed')
    # the readme, for a package index: no link to a file that does not lie there
    assert '## Three lines in a script' in metadata and '](' not in metadata
    sources = {path for path in names_in(ROOT / 'amp_wrapper') if path.endswith(('.py', '.j2', '.typed'))}
    csrc = {f'csrc/{path}' for path in names_in(ROOT / 'csrc') if path.endswith(SUFFIXES)}
    assert {f'amp_wrapper/{path}' for path in sources | csrc} <= names and not [
        path for path in names if path.endswith('.so')
    ]
    found = tree.library(tmp_path / 'installed')
    assert (found['loaded'], found['warnings']) == (False, 1) and 'no torch was there when' in found['reason']
    assert 'amp-wrapper build-ops' in found['how']

    record = {'built': True, 'torch': torch.__version__, 'cuda': None, 'python': sys.implementation.cache_tag}
    (tree.root / RECORD).write_text(json.dumps(record))
    tree.build('build_ext', '--inplace', PYTHONPATH=str(tree.no_torch))
    assert tree.record() == record


# -- with them --------------------------------------------------------------------------------------------------------


def test_build_in_place_compiles_what_has_changed(built: Tree) -> None:
    found = built.library()
    assert Path(found['file']).parent == built.root / 'amp_wrapper/ops'
    assert (found['loaded'], found['sources_changed'], found['warnings']) == (True, False, 0)
    assert found['torch'] == torch.__version__ and found['compiler'] not in (None, '', 'c++')
    assert torch.version.cuda is not None or 'has no CUDA' in found['reason']
    everything = {name for name in names_in(built.root) if name.startswith('csrc/') and name.endswith('.cpp')}
    os.utime(built.root / 'csrc/common/lists.h')
    assert 2 <= len(built.build()) < len(everything)
    # newer than every source, a library for another torch would be taken for up to date
    for file in built.root.rglob('_C.*.so'):
        file.write_bytes(b'of another torch')
    assert built.build() == [] and built.library()['loaded']


def test_failed_build_is_an_error_and_is_remembered(built: Tree) -> None:
    """Though an older library lies there."""
    source = built.root / 'csrc/cpu/ops.cpp'
    kept = source.read_text()
    source.write_text('#error BROKEN on purpose\n')
    try:
        done = built.run(*IN_PLACE)
        assert done.returncode != 0 and 'on purpose' in done.stdout + done.stderr
        assert 'Traceback' not in done.stderr.split('The compiled ops')[-1]
        assert built.record() == {'built': False, 'reason': 'the last build of them failed', 'chosen': False}
        assert not built.library()['loaded']
    finally:
        source.write_text(kept)
        built.build()


def test_sdist_to_wheel_to_installed_package(built: Tree, tmp_path: Path) -> None:
    """As users of pip call it; the package that is installed then works outside of any source tree."""
    done = built.run('setup.py', '-q', 'sdist', '-d', str(tmp_path), PYTHONPATH=str(built.no_torch))
    assert done.returncode == 0, done.stderr
    archive = next(tmp_path.glob('*.tar.gz'))
    # Python 3.11.3 and 3.10.11 have no filters yet
    safely: Any = dict(filter='data') if hasattr(tarfile, 'data_filter') else {}
    with tarfile.open(archive) as content:
        content.extractall(tmp_path, **safely)
    source = tmp_path / archive.name.removesuffix('.tar.gz')
    names = names_in(source)
    wanted = {f'csrc/{path}' for path in names_in(ROOT / 'csrc') if path.endswith(SUFFIXES)}
    assert wanted | {'setup.py', 'Makefile', 'requirements/build.txt', 'amp_wrapper/py.typed'} <= names
    assert not [name for name in names if name.endswith(('.so', '.o', '.pyc', 'build.ninja', RECORD.name))]

    installed = tmp_path / 'installed'
    done = built.run(*PIP, str(installed), str(source), AMP_WRAPPER_WITH_OPS='1')
    assert done.returncode == 0, done.stdout + done.stderr
    assert names_in(source) >= names and not (source / RECORD).exists(), 'the source tree was only read'
    found = built.library(installed)
    assert found['file'].startswith(str(installed)) and found['sources_changed'] is False and found['warnings'] == 0


@pytest.mark.long
def test_build_ops_builds_in_an_installed_package(tree: Tree, built: Tree, tmp_path: Path) -> None:
    """From the sources that travel in the wheel; and again where the compiler finds a mistake."""
    installed = tmp_path / 'installed'
    done = tree.run(*PIP, str(installed), '.', AMP_WRAPPER_WITH_OPS='0')
    assert done.returncode == 0, done.stdout + done.stderr
    command = (str(installed / 'bin' / 'amp-wrapper'), 'build-ops', '--no-cuda', '--jobs', '2')
    done = built.run(*command, cwd=tmp_path, PYTHONPATH=str(installed))
    assert done.returncode == 0, done.stdout + done.stderr
    found = built.library(installed)
    assert found['file'].startswith(str(installed)) and found['sources_changed'] is False
    (installed / 'amp_wrapper/csrc/cpu/ops.cpp').write_text('#error BROKEN on purpose\n')
    done = built.run(*command, cwd=tmp_path, PYTHONPATH=str(installed))
    assert done.returncode == 1 and 'BROKEN on purpose' in done.stderr and 'Traceback' not in done.stderr
    # what was there serves
    assert built.library(installed)['loaded']
