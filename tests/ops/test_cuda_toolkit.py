"""The look for a CUDA toolkit, in trees that have an ``nvcc`` and more or less of the rest."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
from native import nvcc as real_nvcc

from amp_wrapper.ops import building, cuda_toolkit
from amp_wrapper.ops.cuda_toolkit import HEADERS, RUNTIME, Toolkit

#: What the torch of these tests has.
CUDA = '13.2'


def find_toolkit(cuda_home: str | None) -> tuple[Toolkit | None, str]:
    return cuda_toolkit.find_toolkit(cuda_home, CUDA)


@pytest.fixture(autouse=True)
def no_other_places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ('CUDA_INC_PATH', 'CPATH', 'LIBRARY_PATH', 'CUDA_HOME'):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cuda_toolkit, '_packages', lambda *parts: [])


def touch(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def a_compiler(home: Path, *, top: Path | None = None, release: str = '13.0') -> Path:
    """An nvcc that says its folders as the real one does, on stderr."""
    program = home / 'bin' / 'nvcc'
    touch(program)
    said = top or home / 'bin' / '..'
    program.write_text(
        '#!/bin/sh\n'
        f'test "$1" = --version && echo "Cuda compilation tools, release {release}, V{release}.88" && exit\n'
        f'echo "#\\$ _HERE_={home}/bin" >&2\necho "#\\$ TOP={said}" >&2\n'
    )
    program.chmod(0o755)
    return program


def a_toolkit(home: Path) -> Path:
    """All that a build asks for."""
    a_compiler(home)
    touch(*(home / 'include' / name for name in HEADERS), home / 'lib64' / RUNTIME)
    return home


def test_a_whole_toolkit_is_taken_as_it_is(tmp_path: Path) -> None:
    home = a_toolkit(tmp_path / 'cuda')
    assert find_toolkit(str(home)) == (Toolkit(home, (home / 'include',), (home / 'lib64',)), '')


def test_headers_and_libraries_of_a_target(tmp_path: Path) -> None:
    home, target = tmp_path / 'cuda', tmp_path / 'cuda' / 'targets' / 'x86_64-linux'
    a_compiler(home)
    touch(*(target / 'include' / name for name in HEADERS), target / 'lib' / RUNTIME)
    assert find_toolkit(str(home)) == (Toolkit(home, (target / 'include',), (target / 'lib',)), '')


@pytest.mark.parametrize('how', ['link', 'script', 'script that says it on stdout'])
def test_the_toolkit_behind_an_nvcc_in_the_path(how: str, tmp_path: Path) -> None:
    """torch takes the folder above that of the ``nvcc`` for the toolkit, here ``/usr/local`` or a folder of the user's."""
    home = a_toolkit(tmp_path / 'cuda-13.0')
    program = tmp_path / 'local' / 'bin' / 'nvcc'
    touch(program)
    if how == 'link':
        program.unlink()
        program.symlink_to(home / 'bin' / 'nvcc')
        # it may say whatever it likes
        (home / 'bin' / 'nvcc').write_text('#!/bin/sh\nexit 1\n')
    else:
        program.write_text(f'#!/bin/sh\nexec {home}/bin/nvcc "$@"{" 2>&1" if "stdout" in how else ""}\n')
        program.chmod(0o755)
    found, why = find_toolkit(str(tmp_path / 'local'))
    assert (found, why) == (Toolkit(home, (home / 'include',), (home / 'lib64',)), '')


def test_without_nvcc(tmp_path: Path) -> None:
    assert find_toolkit(None) == (None, 'nvcc was not found; CUDA_HOME names the folder of a whole CUDA toolkit')
    assert find_toolkit(str(tmp_path)) == (
        None,
        f'nvcc was not found below CUDA_HOME, which is {tmp_path}; CUDA_HOME names the folder of a whole CUDA toolkit',
    )


@pytest.mark.parametrize('name', HEADERS)
def test_headers_that_are_missing_are_named(name: str, tmp_path: Path) -> None:
    home = a_toolkit(tmp_path / 'cuda')
    (home / 'include' / name).unlink()
    found, why = find_toolkit(str(home))
    assert found is None and why == (
        f'the headers of CUDA are missing ({name}), in {home} and in the packages of pip; CUDA_HOME names the folder of a '
        'whole CUDA toolkit'
    )


def test_a_compiler_of_another_release(tmp_path: Path) -> None:
    """torch refuses another major release, in the middle of the build; a minor one does."""
    home = a_toolkit(tmp_path / 'cuda')
    a_compiler(home, release='12.9')
    found, why = find_toolkit(str(home))
    assert found is None and why == (
        f'nvcc is of another CUDA (12.9 in {home}) than torch, which has 13.2; CUDA_HOME names the folder of a whole '
        'CUDA toolkit'
    )


def test_a_script_that_leads_nowhere(tmp_path: Path) -> None:
    """Both places are named, and a program that prints nothing, fails or cannot be started is no accident."""
    a_compiler(tmp_path / 'local', top=tmp_path / 'gone')
    found, why = find_toolkit(str(tmp_path / 'local'))
    assert found is None and f'in {tmp_path / "local"} and in' in why
    (tmp_path / 'local' / 'bin' / 'nvcc').write_text('no program')
    assert find_toolkit(str(tmp_path / 'local')) == (None, why)


@pytest.mark.parametrize('variable', ['CUDA_INC_PATH', 'CPATH'])
def test_headers_that_a_variable_names(variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, elsewhere = a_toolkit(tmp_path / 'cuda'), tmp_path / 'elsewhere'
    (home / 'include').rename(elsewhere)
    monkeypatch.setenv(variable, f'/nowhere{os.pathsep}{elsewhere}')
    assert find_toolkit(str(home)) == (Toolkit(home, (elsewhere,), (home / 'lib64',)), '')


def test_headers_and_runtime_of_the_packages_of_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As pip installs them with torch, for CUDA 12 in a folder for each package; the library has its version in its name."""
    monkeypatch.undo()
    site = tmp_path / 'site'
    for name in HEADERS[:2]:
        touch(site / 'nvidia' / 'cuda_runtime' / 'include' / name)
    touch(site / 'nvidia' / 'cuda_runtime' / 'lib' / f'{RUNTIME}.12')
    touch(site / 'nvidia' / 'cuda_nvcc' / 'include' / HEADERS[2], site / 'nvidia' / '__init__.py')
    monkeypatch.syspath_prepend(str(site))
    home = tmp_path / 'local'
    a_compiler(home)
    found, why = find_toolkit(str(home))
    assert why == '' and found is not None and found.home == home and found.libraries == ()
    assert {site / 'nvidia' / 'cuda_runtime' / 'include', site / 'nvidia' / 'cuda_nvcc' / 'include'} <= set(
        found.include
    )
    assert found.runtime == site / 'nvidia' / 'cuda_runtime' / 'lib' / f'{RUNTIME}.12'
    for _ in range(2):
        folder = cuda_toolkit.link_runtime(found.runtime, tmp_path / 'objects')
    assert (folder / RUNTIME).resolve() == found.runtime.resolve()


def test_a_runtime_that_is_missing(tmp_path: Path) -> None:
    home = a_toolkit(tmp_path / 'cuda')
    (home / 'lib64' / RUNTIME).unlink()
    found, why = find_toolkit(str(home))
    assert found is None and why == (
        f'the runtime of CUDA is missing ({RUNTIME}), in {home} and in the packages of pip; CUDA_HOME names the folder of a '
        'whole CUDA toolkit'
    )


def test_the_plan_tells_torch_and_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is found replaces torch's guess; what is not found is an error where it was asked for, and nothing is compiled."""
    from torch.utils import cpp_extension

    if building.what_is_missing():
        pytest.skip(building.what_is_missing())
    monkeypatch.setattr(torch.version, 'cuda', '13.0')
    monkeypatch.setenv('CUDA_HOME', str(tmp_path / 'local'))
    monkeypatch.setattr(cpp_extension, 'CUDA_HOME', str(tmp_path / 'local'))
    for name in ('CXX', 'TORCH_CUDA_ARCH_LIST', 'PATH'):
        monkeypatch.setenv(name, os.environ.get(name, ''))
    # the script has its own name for its folder
    monkeypatch.setattr(building, '_cuda_toolkit', lambda: cuda_toolkit)
    home = a_toolkit(tmp_path / 'cuda-13.0')
    a_compiler(tmp_path / 'local', top=home)
    what = building.plan(building.Path(__file__).parents[2], cuda=True)
    assert what.toolkit is not None and what.toolkit.home == home and what.with_cuda
    assert cpp_extension.CUDA_HOME == os.environ['CUDA_HOME'] == str(home)
    (home / 'include' / HEADERS[0]).unlink()
    with pytest.raises(
        building.BuildError, match=rf'^--cuda, but the headers of CUDA are missing \({HEADERS[0]}\), in '
    ):
        building.plan(building.Path(__file__).parents[2], cuda=True, asked_by='--cuda')


def test_the_nvcc_of_this_machine() -> None:
    """Whatever way it is started, its own folder is found."""
    program = real_nvcc()
    header = 'cuda_runtime_api.h'
    told = subprocess.run([program, '--version'], capture_output=True, text=True, check=True).stdout
    release = re.search(r'release (\S+),', told)
    assert release is not None, told
    found, why = cuda_toolkit.find_toolkit(str(Path(program).parent.parent), release[1])
    if found is None:
        pytest.skip(why)
    assert any((folder / header).is_file() for folder in found.include)
