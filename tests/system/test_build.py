"""Building the ops, by ``amp-wrapper build-ops`` and by ``setup.py``: what is built, which library is loaded, what is said."""

from __future__ import annotations

import shutil
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from source_tree import ROOT, SOURCE, Tree, names_in

import amp_wrapper

BUILD = ('-m', 'amp_wrapper', 'build-ops')
PIP = '-m pip --disable-pip-version-check install -q --no-index --no-deps --no-build-isolation --target'.split()


@pytest.fixture(scope='module')
def tree(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    """All sources; never built."""
    return Tree(tmp_path_factory.mktemp('plain'))


@pytest.fixture(scope='module')
def small(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    """Two small files in place of ``csrc``, built by ``build-ops``."""
    if shutil.which('c++') is None:
        pytest.skip('there is no C++ compiler (c++)')
    tree = Tree(tmp_path_factory.mktemp('small'))
    tree.shrink()
    assert tree.ops() == {
        'cpu': 'torch',
        'cuda': 'torch',
        'library': '',
        'reason': 'never built here: amp-wrapper build-ops',
    }
    said = tree.run(*BUILD, '--no-cuda').stdout
    assert 'empty.cpp' in said and 'cpu                   compiled' in said
    return tree


def test_library_of_build_ops_is_loaded_where_it_fits(small: Tree) -> None:
    """It is for one torch and the present sources; what else lies there is not even opened."""
    found = small.ops()
    assert found['cpu'] == 'compiled' and found['library'].startswith(str(small.cache))
    assert 'CUDA' in found['reason'] and found['cuda'] == 'torch'
    assert 'ninja: no work to do' in small.run(*BUILD, '--no-cuda').stdout
    source, library = small.root / 'csrc/cpu/empty.cpp', Path(found['library'])
    source.write_text('int changed;')
    assert 'not built for torch' in small.ops()['reason']
    source.write_text('')
    content = library.read_bytes()
    library.write_text('no library')
    assert 'cannot be loaded' in small.ops()['reason']
    library.write_bytes(content)
    other = library.parent.with_name(library.parent.name.replace('torch2', 'torch1'))
    library.parent.rename(other)
    assert 'not built for torch' in small.ops()['reason']
    other.rename(library.parent)
    assert small.ops() == found


def test_build_that_fails_is_one_line_after_what_the_compiler_says(small: Tree) -> None:
    source = small.root / 'csrc/library.cpp'
    source.write_text('#error BROKEN on purpose\n')
    done = small.run(*BUILD, '--no-cuda', ok=False)
    source.write_text(SOURCE)
    assert 'BROKEN on purpose' in done.stdout and 'Traceback' not in done.stderr
    assert done.stderr.splitlines()[-1].startswith('amp-wrapper build-ops: error: the ops cannot be built')
    assert small.ops()['cpu'] == 'compiled'


def test_sdist_to_wheel_with_ops_to_installed_package(small: Tree, tmp_path: Path) -> None:
    """As users of pip call it; of the wheel's library and that of ``build-ops``, the later one is loaded."""
    small.run('setup.py', '-q', 'sdist', '-d', str(tmp_path), AMP_WRAPPER_WITH_OPS='0')
    archive = next(tmp_path.glob('*.tar.gz'))
    # Python 3.11.3 and 3.10.11 have no filters yet
    safely: Any = dict(filter='data') if hasattr(tarfile, 'data_filter') else {}
    with tarfile.open(archive) as content:
        content.extractall(tmp_path, **safely)
    source = tmp_path / archive.name.removesuffix('.tar.gz')
    names = names_in(source)
    assert {'setup.py', 'csrc/library.cpp', 'amp_wrapper/py.typed'} <= names
    assert not [name for name in names if name.endswith(('.so', '.o', '.pyc', 'build.ninja'))]
    stale = source / 'build/lib/amp_wrapper/ops/amp_ops_stale.so'
    stale.parent.mkdir(parents=True)
    stale.write_bytes(b'stale')
    installed = tmp_path / 'installed'
    small.run(*PIP, str(installed), str(source), AMP_WRAPPER_WITH_OPS='1', FORCE_CUDA='0')
    assert small.ops(installed)['library'].startswith(str(installed)) and not list(installed.rglob('*stale*'))
    small.run(*BUILD, '--no-cuda', cwd=tmp_path, PYTHONPATH=str(installed))
    assert small.ops(installed)['library'].startswith(str(small.cache))


def test_build_without_torch_is_a_pure_wheel_that_says_how_to_get_the_ops(tree: Tree, tmp_path: Path) -> None:
    """As pip builds it, isolated. The sources of the ops travel with it."""
    stale = tree.root / 'build/lib/amp_wrapper/ops/amp_ops_stale.so'
    stale.parent.mkdir(parents=True)
    stale.write_bytes(b'stale')
    done = tree.run('setup.py', '-q', 'bdist_wheel', '-d', str(tmp_path), **tree.no_torch)
    assert 'this build sees no torch' in done.stderr and 'amp-wrapper build-ops' in done.stderr
    with zipfile.ZipFile(tmp_path / f'amp_wrapper-{amp_wrapper.__version__}-py3-none-any.whl') as content:
        names = set(content.namelist())
    sources = {f'amp_wrapper/{name}' for name in names_in(tree.root / 'amp_wrapper') if name.endswith(('.py', '.j2'))}
    csrc = {f'amp_wrapper/csrc/{name}' for name in names_in(ROOT / 'csrc')}
    assert sources | csrc <= names and not [name for name in names if name.endswith('.so')]


def test_installation_that_cannot_do_what_is_demanded_fails_in_one_line(tree: Tree, tmp_path: Path) -> None:
    (tmp_path / 'torch').mkdir()
    (tmp_path / 'torch/__init__.py').write_text("raise ImportError('libcudart.so.99: cannot open shared object file')")
    rows: list[tuple[dict[str, str], str]] = [
        (dict(CXX='/nowhere/c++', AMP_WRAPPER_WITH_OPS='1'), 'demanded, and there is no C++ compiler (/nowhere/c++)'),
        (dict(FORCE_CUDA='1', **tree.no_torch), 'demanded, and this build sees no torch'),
        (dict(AMP_WRAPPER_WITH_OPS='no', **tree.no_torch), 'AMP_WRAPPER_WITH_OPS=no means nothing'),
        (dict(FORCE_CUDA='yes', **tree.no_torch), 'FORCE_CUDA=yes means nothing'),
        (dict(PYTHONPATH=str(tmp_path)), 'libcudart.so.99: cannot open'),
    ]
    if torch.version.cuda is None:
        rows.append((dict(FORCE_CUDA='1'), 'CUDA ops need a torch with CUDA'))
    for variables, words in rows:
        # pip asks for this first, before it downloads anything
        done = tree.run('setup.py', '-q', 'dist_info', ok=False, **variables)
        assert words in done.stderr.splitlines()[-1] and 'Traceback' not in done.stderr, done.stderr
        assert 'AMP_WRAPPER_WITH_OPS=0' in done.stderr


def test_missing_compiler_or_a_wish_gives_pure_python(tree: Tree) -> None:
    done = tree.run('setup.py', '-q', 'build_ext', '--inplace', CXX='/nowhere/c++')
    assert 'warning: no compiled ops, since there is no C++ compiler' in done.stderr
    done = tree.run('setup.py', '-q', 'build_ext', '--inplace', AMP_WRAPPER_WITH_OPS='0', **tree.no_torch)
    assert 'warning' not in done.stderr and not list(tree.root.glob('amp_wrapper/ops/*.so'))
