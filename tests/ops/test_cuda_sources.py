"""The CUDA kernels without a GPU: run on a CPU under sanitizers, compiled for every architecture, and their reports read.

``tests/cuda_shim`` gives CUDA's words a meaning on a CPU. The kernels are the files that nvcc compiles, unchanged, and their
results are compared with those of the CPU kernels. Planted faults show that the checks can fail. What takes a sanitizer, many
blocks or nvcc runs with ``--full``.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

import pytest
import torch
from torch.utils.cpp_extension import include_paths, library_paths

try:
    import tomllib
except ImportError:  # Python 3.10, where pytest brings it
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
CSRC, SHIM = ROOT / 'csrc', ROOT / 'tests' / 'cuda_shim'
ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120)
#: 256 threads and no more than 64 registers each: four blocks fit on any of the architectures at once.
MOST_REGISTERS = 64
SANITIZERS = {'address': ['-fsanitize=address,undefined', '-fno-sanitize-recover=all'], 'thread': ['-fsanitize=thread']}
SOURCES = ('list_kernels.cu', 'step_kernels.cu')
KERNELS = ('list_kernels.cuh', 'step_kernels.cuh')
#: torch chooses the standard. Fused products and sums would round otherwise than the CPU.
FLAGS = ('-O3', '--fmad=false')
STANDARDS = ('c++17', 'c++20')
#: Versions of CUDA that pass 4,096 and 32,764 bytes of arguments.
SMALL, LARGE = '-DCUDART_VERSION=12080', '-DCUDART_VERSION=13000'


class Fault(TypedDict):
    """A row of ``faults.toml``."""

    name: str
    by: str
    shows: str
    file: str
    old: str
    new: str


def compiler() -> list[str]:
    command = shlex.split(os.environ.get('CXX', 'c++'))
    if shutil.which(command[0]) is None:
        pytest.skip(f'there is no C++ compiler ({command[0]})')
    return command


def nvcc() -> str:
    home = os.environ.get('CUDA_HOME', '/usr/local/cuda')
    found = shutil.which('nvcc') or shutil.which('nvcc', path=os.path.join(home, 'bin'))
    if found is None:
        pytest.skip(f'there is no nvcc, neither in PATH nor in {home}/bin')
    # nvcc calls it
    compiler()
    return found


def compile_cpp(target: Path, sources: Sequence[Path], *flags: str) -> Path:
    command = [*compiler(), '-std=c++20', '-Wall', '-Wno-unknown-pragmas', '-Wno-psabi', '-pthread']
    # before torch's headers of the same names
    command += ['-fno-strict-aliasing', '-ffp-contract=off', f'-I{SHIM / "include"}', *flags]
    command += [*map(str, sources), '-o', str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target


def plant(path: Path, piece: str, fault: str) -> None:
    text = path.read_text()
    assert text.count(piece) == 1, f'the piece that the fault replaces is there {text.count(piece)} times: {piece}'
    path.write_text(text.replace(piece, fault))


def copy_sources(folder: Path, plants: Sequence[Fault]) -> None:
    shutil.copytree(CSRC, folder / 'csrc', dirs_exist_ok=True)
    shutil.copytree(SHIM, folder / 'tests' / 'cuda_shim', dirs_exist_ok=True)
    for fault in plants:
        plant(folder / 'csrc' / fault['file'], fault['old'], fault['new'])


def run(folder: Path, rounds: int, flags: Sequence[str], *plants: Fault) -> tuple[int, str]:
    """Compile the harness and run it: its exit status, and what it said. A machine may have no such sanitizer."""
    probe = folder / 'probe.cpp'
    probe.write_text('int main() { return 0; }\n')
    command = [*compiler(), str(probe), '-o', str(folder / 'probe'), *flags]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip(f'the compiler cannot link {flags[0]}')
    if subprocess.run([folder / 'probe'], capture_output=True, check=False).returncode:
        pytest.skip(f'programs with {flags[0]} do not run on this machine')
    copy_sources(folder, plants)
    sources = [folder / 'tests' / 'cuda_shim' / 'harness.cpp', folder / 'csrc' / 'cpu' / 'kernels_default.cpp']
    program = compile_cpp(folder / 'harness', sources, *flags)
    env = {**os.environ, 'TSAN_OPTIONS': 'halt_on_error=1', 'ASAN_OPTIONS': 'detect_leaks=0'}
    words = [str(program), '0', str(rounds)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=500, env=env, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.parametrize(('arguments', 'rounds'), [(SMALL, 3), (LARGE, 1)])
def test_kernels_equal_the_cpu(arguments: str, rounds: int, tmp_path: Path) -> None:
    """With more tensors than a launch of 4,096 or 32,764 bytes has room for, and blocks in an order by chance."""
    code, said = run(tmp_path, rounds, ['-O1', arguments])
    assert code == 0 and f'{rounds} rounds, 0 wrong' in said, said


@pytest.mark.long
@pytest.mark.parametrize(('sanitizer', 'rounds'), [('address', 3), ('thread', 1)])
def test_sanitizers_are_silent(sanitizer: str, rounds: int, tmp_path: Path) -> None:
    code, said = run(tmp_path, rounds, ['-O1', '-g1', SMALL, *SANITIZERS[sanitizer]])
    assert code == 0 and f'{rounds} rounds, 0 wrong' in said, said


FAULTS: list[Fault] = tomllib.loads((SHIM / 'faults.toml').read_text())['fault']


@pytest.mark.long
@pytest.mark.parametrize('fault', [f for f in FAULTS if f['by'] in SANITIZERS], ids=lambda fault: fault['name'])
def test_sanitizers_catch_planted_faults(fault: Fault, tmp_path: Path) -> None:
    """Without this, a check that never says anything would look like a check that finds nothing."""
    code, said = run(tmp_path, 2, ['-O1', '-g1', SMALL, *SANITIZERS[fault['by']]], fault)
    assert code != 0 and fault['shows'] in said, said[-4000:]


@pytest.mark.long
@pytest.mark.parametrize('fault', [f for f in FAULTS if f['by'] == 'results'], ids=lambda fault: fault['name'])
def test_planted_faults_show_in_the_results(fault: Fault, tmp_path: Path) -> None:
    code, said = run(tmp_path, 2, ['-O1', SMALL], fault)
    assert code != 0 and f'WRONG: {fault["shows"]}, ' in said, said[-4000:]


# -- the code that starts them -------------------------------------------------------------------------------------

LAUNCH = re.compile(r'(\w+(?:<\w+>)?)<<<(.+?), (\w+), 0, stream>>>\((.*?)\);')


def build_host(folder: Path, *plants: Fault) -> Path:
    """The ops of csrc/cpu, and those of csrc/cuda on the shim, as one library."""
    copy_sources(folder, plants)
    texts = ''.join((folder / 'csrc' / 'cuda' / name).read_text() for name in SOURCES)
    call = (
        r'TORCH_INTERNAL_ASSERT(shim::guards == 1 && stream == &shim::a_stream); '
        r'shim::launch(\2, \3, [&] { \1(\4); });'
    )
    launches = LAUNCH.sub(call, texts)
    assert '<<<' not in launches
    text = '#include <c10/cuda/CUDAGuard.h>\n#include <c10/cuda/CUDAStream.h>\n' + launches
    (folder / 'csrc' / 'cuda' / 'launches.inl').write_text(text)
    return compile_cpp(
        folder / 'host.so',
        [folder / 'tests' / 'cuda_shim' / 'host.cpp', *sorted((folder / 'csrc' / 'cpu').glob('kernels_*.cpp'))],
        *('-O1', '-fPIC', '-shared', '-fopenmp', SMALL),
        f'-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}',
        *(f'-I{path}' for path in include_paths()),
        *('-Wl,--no-as-needed', *(f'-L{path}' for path in library_paths()), '-ltorch_cpu', '-lc10'),
    )


def differences(library: Path) -> list[str]:
    """Calls in which the CUDA ops differ from those of the CPU."""
    env = {**os.environ, 'PYTHONPATH': os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, str(SHIM / 'compare.py'), str(library)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.long
def test_host_code_and_kernels_together_equal_the_cpu_ops(tmp_path: Path) -> None:
    assert differences(build_host(tmp_path)) == []


@pytest.mark.long
def test_planted_faults_in_the_host_code_are_caught(tmp_path: Path) -> None:
    """Each in another op: one library is enough for all."""
    mine = [fault for fault in FAULTS if fault['by'] == 'host']
    found = differences(build_host(tmp_path, *mine))
    assert {line.split()[0] for line in found} == {fault['shows'] for fault in mine}


# -- the planner ---------------------------------------------------------------------------------------------------

Numbers = ctypes.POINTER(ctypes.c_int64)


def planner(folder: Path) -> ctypes.CDLL:
    target = compile_cpp(folder / 'planner.so', [SHIM / 'planner.cpp'], '-O0', '-shared', '-fPIC', '-ftrapv')
    library = ctypes.CDLL(str(target))
    library.chunk_size.restype = ctypes.c_int64
    library.plan.argtypes = [Numbers, *[ctypes.c_int64] * 2, Numbers, Numbers]
    library.launch_rows.argtypes = [Numbers, ctypes.c_int64, ctypes.c_int, Numbers]
    return library


def numbers(values: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * max(len(values), 1))(*values)


def test_threads_share_out_every_chunk_once(tmp_path: Path) -> None:
    """Also of sizes that no memory holds, and with costs about equal."""
    library = planner(tmp_path)
    size = library.chunk_size()
    chooser = random.Random(0)
    sizes = [0, 1, 5, size - 1, size, size + 1, 7 * size, 10**6, 2**31 - 1, 2**31 + 1, 2**40 + 1]
    for case in range(300):
        counts = [chooser.choice(sizes[: 8 if case % 3 else None]) for _ in range(chooser.randrange(12))]
        parts = chooser.randrange(1, 9)
        bounds, starts = numbers([0] * (parts + 1)), numbers([0] * len(counts))
        library.plan(numbers(counts), len(counts), parts, bounds, starts)
        chunks = [-(-count // size) for count in counts]
        assert list(starts)[: len(counts)] == [0, *itertools.accumulate(chunks)][: len(counts)]
        assert bounds[0] == 0 and bounds[parts] == sum(chunks) and sorted(bounds) == list(bounds)
        cost = sum(counts) + 64 * len(counts)
        for first, last in itertools.pairwise(bounds):
            # chunks at the bounds, and tensors that are shorter than a chunk
            assert (last - first - 2 - len(counts)) * size <= cost / parts


@pytest.mark.parametrize('lists', [1, 2, 4, 6])
def test_launches_have_every_tensor_once(lists: int, tmp_path: Path) -> None:
    library = planner(tmp_path)
    size = library.chunk_size()
    most = library.most_tensors(lists)
    assert most > 440
    for count in (0, 1, 50, most, most + 1, 2 * most + 1):
        counts = [1 + 40_000 * (i % 3) + (i == 7) * 2**40 for i in range(count)]
        rows = numbers([0] * 4 * (count + 1))
        launches = library.launch_rows(numbers(counts), count, lists, rows)
        assert launches == -(-count // most)
        found = [tuple(rows[4 * i : 4 * i + 4]) for i in range(launches)]
        # first tensor, tensors, chunks before, blocks
        chunks = [0, *itertools.accumulate(-(-one // size) for one in counts)]
        wanted = [(i, min(most, count - i)) for i in range(0, count, most)]
        assert found == [(i, n, chunks[i], chunks[i + n] - chunks[i]) for i, n in wanted]


# -- what nvcc says ------------------------------------------------------------------------------------------------


def mangled(name: str) -> str:
    """How a kernel's name stands inside its symbol."""
    return f'{len(name)}{name}'


def kernel_names() -> list[str]:
    text = ''.join((CSRC / 'cuda' / name).read_text() for name in KERNELS)
    names = re.findall(r'__global__ void\s+(?:__launch_bounds__\([\w, ]+\)\s+)?(\w+)\(', text)
    assert len(names) == text.count('__global__') > 0
    return names


def test_build_gives_nvcc_the_flags_of_these_tests() -> None:
    texts = [path.read_text() for path in [*(ROOT / 'amp_wrapper').rglob('*.py'), ROOT / 'setup.py']]
    assert any('--fmad=false' in text for text in texts) and not any('use_fast_math' in text for text in texts)


@pytest.mark.long
@pytest.mark.parametrize('standard', STANDARDS)
def test_every_kernel_compiles_for_every_architecture_without_spills(standard: str, tmp_path: Path) -> None:
    program = nvcc()
    listed = subprocess.run([program, '--list-gpu-code'], capture_output=True, text=True, check=True).stdout
    missing = [name for name in ARCHITECTURES if f'sm_{name}\n' not in f'{listed}\n']
    if missing:
        pytest.skip(f'this nvcc does not know sm_{", sm_".join(map(str, missing))}')
    codes = [f'-gencode=arch=compute_{name},code=sm_{name}' for name in ARCHITECTURES]
    command = [program, *FLAGS, f'-std={standard}', *codes, '-Xptxas', '-v', '--threads', '2', '-c']
    command += [str(CSRC / 'cuda' / name) for name in SOURCES]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0 and 'warning' not in done.stderr, done.stderr
    pieces = re.split(r"Compiling entry function '(\w+)' for 'sm_(\d+)'", done.stderr)
    reports = {(int(sm), kernel): report for kernel, sm, report in zip(pieces[1::3], pieces[2::3], pieces[3::3])}
    for architecture in ARCHITECTURES:
        kernels = [kernel for sm, kernel in reports if sm == architecture]
        assert not [name for name in kernel_names() if not any(mangled(name) in kernel for kernel in kernels)]
    for where, report in reports.items():
        # a stack would mean that the arguments are copied to memory, since they are indexed
        frame = re.search(r'(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads', report)
        registers = re.search(r'Used (\d+) registers', report)
        assert frame is not None and set(frame.groups()) == {'0'}, (where, report)
        assert registers is not None and int(registers[1]) <= MOST_REGISTERS, (where, report)


MOVED = ('scale', 'axpby', 'nonfinite', 'sum_of_squares', 'adam', 'sgd')


@pytest.mark.long
def test_instructions_have_no_double_precision_and_move_128_bits(tmp_path: Path) -> None:
    """Products and sums are fused where the arithmetic of a step names fmaf, and nowhere else."""
    program = nvcc()
    shutil.copytree(CSRC, tmp_path / 'csrc')
    # with two roundings in its place, nothing is left that may be fused
    plant(tmp_path / 'csrc/common/step_prologue.h', '__fmaf_rn(a, b, c)', '__fadd_rn(__fmul_rn(a, b), c)')
    ptx: dict[str, str] = {}
    for name in SOURCES:
        target = tmp_path / 'kernels.ptx'
        command = [program, *FLAGS, '-std=c++20', '-arch=compute_75', '-ptx', '-o', str(target)]
        command.append(str(tmp_path / 'csrc/cuda' / name))
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        pieces = re.split(r'\.entry (\w+)\(', target.read_text())
        ptx.update(zip(pieces[1::2], pieces[2::2]))
    for kernel, text in ptx.items():
        # a few numbers for each parameter
        assert '.f64' not in text or mangled('prologue_kernel') in kernel, (kernel, re.findall('.*f64.*', text))
        # one rounding where the CPU has two
        assert 'fma.' not in text, kernel
    for name in MOVED:
        texts = [text for kernel, text in ptx.items() if mangled(f'{name}_kernel') in kernel]
        assert texts
        for text in texts:
            assert re.search(r'ld\.global(\.cs)?\.v4\.(u|b)32', text), name
            if name not in ('nonfinite', 'sum_of_squares'):
                assert re.search(r'st\.global\.v4\.(u|b|f)32', text), name
            # gradients and sources are read once
            assert ('ld.global.cs.v4' in text) == (name not in ('nonfinite', 'sum_of_squares')), name


@pytest.mark.long
def test_host_part_compiles_against_torch(tmp_path: Path) -> None:
    """Also with a torch without CUDA: its headers are there. ``ATen/cuda`` would need more than they have."""
    home = Path(nvcc()).resolve().parents[2]
    include = next((p for p in (Path('/usr/local/cuda/include'), home / 'include') if p.is_dir()), None)
    if include is None:
        pytest.skip('the headers of CUDA are not beside nvcc')
    text = ''.join(path.read_text() for path in (CSRC / 'cuda').iterdir())
    assert '#include <c10/cuda/' in text and 'ATen/cuda' not in text
    # at once, since torch's headers take most of the time
    source = tmp_path / 'both.cpp'
    source.write_text(''.join(f'#include "{path}"\n' for path in sorted((CSRC / 'cuda').glob('*ops_cuda.cpp'))))
    flags = [f'-I{path}' for path in [*include_paths(), str(include)]]
    flags += [] if torch.version.cuda else ['-DC10_CUDA_NO_CMAKE_CONFIGURE_FILE']
    command = [*compiler(), '-std=c++20', '-Wall', '-fsyntax-only', *flags, str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
