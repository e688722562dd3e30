"""setup.py where there is no torch, as in an isolated build of pip: pure Python, or an error where ops are demanded."""

from __future__ import annotations

import json
import re
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from source_tree import RECORD, Tree

import amp_wrapper

# setup.py where setuptools can be imported and torch is not found at all
ISOLATED = """
import importlib.util, runpy, sys
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == 'torch' else found(name, *rest)
sys.argv = ['setup.py', *sys.argv[1:]]
runpy.run_path('setup.py', run_name='__main__')
"""


NO_TORCH = 'no torch was there when the package was built, as in isolated builds of pip and in py3-none-any wheels'


def test_without_torch_the_package_is_pure_python(tree: Tree, tmp_path: Path) -> None:
    """As pip builds it, isolated; the line is hidden by pip, so the record, the report and a warning say it again."""
    no_torch = str(tree.root.parent / 'no_torch')
    done = tree.run('setup.py', '-q', 'bdist_wheel', '-d', str(tmp_path), PYTHONPATH=no_torch)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if 'compiled ops' in line]
    assert said == [
        f'warning: amp_wrapper is built without its compiled ops, since {NO_TORCH}. It computes the same, slower. '
        'To build them: where torch is installed run amp-wrapper build-ops.'
    ]
    wheel = next(tmp_path.glob('*.whl'))
    assert wheel.name == f'amp_wrapper-{amp_wrapper.__version__}-py3-none-any.whl'
    with zipfile.ZipFile(wheel) as content:
        content.extractall(tmp_path / 'installed')
    assert json.loads((tmp_path / 'installed' / RECORD).read_text())['chosen'] is False
    assert tree.library(tmp_path / 'installed') == {'file': None, 'reason': NO_TORCH, 'changed': None, 'warnings': 1}
    done = tree.run('-m', 'amp_wrapper', 'info', cwd=tmp_path / 'installed')
    assert done.returncode == 0, done.stderr
    assert f'none, since {NO_TORCH}' in done.stdout and 'build it    amp-wrapper build-ops' in done.stdout


@pytest.mark.parametrize('name', ['AMP_WRAPPER_WITH_OPS', 'FORCE_CUDA'])
@pytest.mark.parametrize('command', ['dist_info', 'build_ext', 'bdist_wheel'])
def test_ops_that_are_demanded_need_torch(tree: Tree, tmp_path: Path, command: str, name: str) -> None:
    """Before pip has fetched anything: it asks for dist_info first."""
    words = ['-c', ISOLATED, command] if command == 'dist_info' else ['setup.py', command]
    done = tree.run(
        *words, PYTHONPATH=str(tree.root.parent / 'no_torch') if command != 'dist_info' else '', **{name: '1'}
    )
    assert done.returncode != 0 and 'Traceback' not in done.stderr
    assert done.stderr.strip().splitlines()[-1] == (
        f'{name}=1, but this build sees no torch, as isolated builds of pip do not. Install torch, and build in that '
        'environment: pip install torch, then pip install --no-build-isolation .'
    )
    assert not (tree.root / RECORD).exists()


def test_a_torch_that_cannot_be_imported_is_an_error(tree: Tree, tmp_path: Path) -> None:
    (tmp_path / 'torch.py').write_text("raise ImportError('libcudart.so.99: cannot open shared object file')")
    done = tree.run('setup.py', 'build_ext', '--inplace', PYTHONPATH=str(tmp_path))
    assert done.returncode != 0 and done.stderr.count('\n') == 1
    assert 'the torch that is installed cannot be imported (libcudart.so.99: cannot open' in done.stderr
    assert 'AMP_WRAPPER_WITH_OPS=0' in done.stderr and not (tree.root / RECORD).exists()


def test_an_isolated_build_leaves_the_library_of_a_checkout_alone(tree: Tree) -> None:
    no_torch = str(tree.root.parent / 'no_torch')
    record = {'built': True, 'torch': torch.__version__, 'cuda': None, 'python': sys.implementation.cache_tag}
    (tree.root / RECORD).write_text(json.dumps(record))
    tree.build('build_ext', '--inplace', PYTHONPATH=no_torch)
    assert tree.record() == record
    (tree.root / RECORD).write_text(json.dumps({'built': False, 'reason': 'the last build of them failed'}))
    tree.build('build_ext', '--inplace', PYTHONPATH=no_torch)
    assert tree.record()['reason'] == NO_TORCH


def test_the_local_version_of_a_wheel(tree: Tree, tmp_path: Path) -> None:
    no_torch = str(tree.root.parent / 'no_torch')
    variables = {'PYTHONPATH': no_torch, 'AMP_WRAPPER_LOCAL_VERSION': 'torch2.13cpu'}
    # as in a source distribution
    config = tree.root / 'setup.cfg'
    config.write_text('[egg_info]\ntag_build = \ntag_date = 0\n')
    try:
        tree.build('-q', 'bdist_wheel', '-d', str(tmp_path), **variables)
    finally:
        config.unlink()
    name = f'amp_wrapper-{amp_wrapper.__version__}+torch2.13cpu'
    with zipfile.ZipFile(tmp_path / f'{name}-py3-none-any.whl') as content:
        metadata = content.read(f'{name}.dist-info/METADATA').decode()
    assert f'\nVersion: {amp_wrapper.__version__}+torch2.13cpu\n' in metadata
    # the readme, for a package index: no link to a file that does not lie there
    assert '## Three lines in a script' in metadata and re.findall(r'\]\([^)]*\)', metadata) == []
    assert 'first config (`docs/first_config.md`)' in metadata
    done = tree.run('setup.py', 'dist_info', **{**variables, 'AMP_WRAPPER_LOCAL_VERSION': 'torch 2.13'})
    assert done.returncode != 0
    assert done.stderr.strip() == (
        'AMP_WRAPPER_LOCAL_VERSION=torch 2.13 is no local version: small letters, digits and dots, as in torch2.13cpu.'
    )
