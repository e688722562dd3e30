"""The CUDA kernels without a GPU: run on a CPU under sanitizers, compiled for every architecture, and their reports read.

``tests/cuda_shim`` gives CUDA's words a meaning on a CPU. The kernels are the files that nvcc compiles, unchanged, and their
results are compared with those of the CPU kernels. Planted faults show that the checks can fail. What takes a sanitizer or nvcc
runs with ``--full``.
"""

from __future__ import annotations

import ctypes
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
from op_lists import skip_without_library
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
SOURCES = ('kernels.cu', 'step_kernels.cu')
KERNELS = ('elementwise_kernels.cuh', 'exponents_kernel.cuh', 'norm_kernels.cuh', 'step_kernels.cuh')
#: As the build gives them to nvcc. Fused products and sums would round otherwise than the CPU.
FLAGS = ('-std=c++20', '-O3', '--fmad=false')


class Fault(TypedDict):
    """A row of ``faults.toml``."""

    name: str
    by: str
    harness: str
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
    command = [*compiler(), '-std=c++20', '-Wall', '-Wno-unknown-pragmas', '-Wno-psabi', '-pthread', *flags]
    command += [*map(str, sources), '-o', str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target


def plant(path: Path, piece: str, fault: str) -> None:
    text = path.read_text()
    assert text.count(piece) == 1, f'the piece that the fault replaces is there {text.count(piece)} times'
    path.write_text(text.replace(piece, fault))


def copy_sources(folder: Path, plants: Sequence[Fault]) -> None:
    shutil.copytree(CSRC, folder / 'csrc', dirs_exist_ok=True)
    shutil.copytree(SHIM, folder / 'tests' / 'cuda_shim', dirs_exist_ok=True)
    for fault in plants:
        plant(folder / 'csrc' / 'cuda' / fault['file'], fault['old'], fault['new'])


def run(folder: Path, harness: str, rounds: int, flags: Sequence[str], *plants: Fault) -> tuple[int, str]:
    """Compile a harness and run it: its exit status, and what it said. A machine may have no such sanitizer."""
    probe = folder / 'probe.cpp'
    probe.write_text('int main() { return 0; }\n')
    command = [*compiler(), str(probe), '-o', str(folder / 'probe'), *flags]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip(f'the compiler cannot link {flags[0]}')
    if subprocess.run([folder / 'probe'], capture_output=True, check=False).returncode:
        pytest.skip(f'programs with {flags[0]} do not run on this machine')
    copy_sources(folder, plants)
    sources = [folder / 'tests' / 'cuda_shim' / f'{harness}.cpp']
    if harness == 'harness':
        # the other one has the arithmetic of a step in itself
        sources.append(folder / 'csrc' / 'cpu' / 'kernels_default.cpp')
    # so little room for arguments that a few tensors need several launches
    program = compile_cpp(
        folder / harness, sources, '-fno-strict-aliasing', '-ffp-contract=off', '-DAMP_ARGUMENT_BYTES=512', *flags
    )
    env = {**os.environ, 'TSAN_OPTIONS': 'halt_on_error=1', 'ASAN_OPTIONS': 'detect_leaks=0'}
    words = [str(program), '0', str(rounds)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=500, env=env, check=False)
    return done.returncode, done.stdout + done.stderr


def test_kernels_of_a_step_equal_its_arithmetic(tmp_path: Path) -> None:
    code, said = run(tmp_path, 'step_harness', 3, ['-O0'])
    assert code == 0 and '3 rounds, 0 wrong' in said, said


@pytest.mark.long
@pytest.mark.parametrize('harness', ['harness', 'step_harness'])
@pytest.mark.parametrize(('sanitizer', 'rounds'), [('address', 5), ('thread', 2)])
def test_kernels_equal_the_cpu_and_sanitizers_are_silent(
    harness: str, sanitizer: str, rounds: int, tmp_path: Path
) -> None:
    code, said = run(tmp_path, harness, rounds, ['-O1', '-g1', *SANITIZERS[sanitizer]])
    assert code == 0 and f'{rounds} rounds, 0 wrong' in said, said


FAULTS: list[Fault] = tomllib.loads((SHIM / 'faults.toml').read_text())['fault']


@pytest.mark.long
@pytest.mark.parametrize('fault', [f for f in FAULTS if f['by'] in SANITIZERS], ids=lambda fault: fault['name'])
def test_sanitizers_catch_planted_faults(fault: Fault, tmp_path: Path) -> None:
    """Without this, a check that never says anything would look like a check that finds nothing."""
    rounds = 16 if fault['harness'] == 'harness' else 1
    code, said = run(tmp_path, fault['harness'], rounds, ['-O1', '-g1', *SANITIZERS[fault['by']]], fault)
    assert code != 0 and fault['shows'] in said, said[-4000:]


@pytest.mark.long
@pytest.mark.parametrize('harness', ['harness', 'step_harness'])
def test_planted_faults_show_in_the_results(harness: str, tmp_path: Path) -> None:
    """Each in those of another op: one program is enough for all."""
    mine = [fault for fault in FAULTS if fault['by'] == 'results' and fault['harness'] == harness]
    code, said = run(tmp_path, harness, 8, ['-O1'], *mine)
    assert code != 0 and [fault['name'] for fault in mine if f'WRONG: {fault["shows"]}' not in said] == []


# -- the code that starts them -------------------------------------------------------------------------------------

LAUNCH = re.compile(r'(\w+(?:<\w+>)?)<<<(.+?), (\w+), 0, stream>>>\((.*?)\);')


def build_host(folder: Path, *plants: Fault) -> Path:
    """The ops and launches of csrc/cuda as a library that serves tensors of the CPU."""
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
        [folder / 'tests' / 'cuda_shim' / 'host.cpp'],
        *('-O1', '-fPIC', '-shared', '-fno-strict-aliasing', '-ffp-contract=off', '-DAMP_ARGUMENT_BYTES=512'),
        f'-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}',
        *(f'-I{path}' for path in (folder / 'tests' / 'cuda_shim' / 'include', *include_paths())),
        *('-Wl,--no-as-needed', *(f'-L{path}' for path in library_paths()), '-ltorch_cpu', '-lc10'),
    )


@pytest.fixture(scope='module')
def wanted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with what the library of the package gives for all calls."""
    skip_without_library(torch.device('cpu'))
    target = tmp_path_factory.mktemp('wanted') / 'results.pt'
    compare({}, target)
    return target


def compare(environment: dict[str, str], *words: Path) -> str:
    env = {**os.environ, 'PYTHONPATH': os.pathsep.join(filter(None, sys.path)), **environment}
    command = [sys.executable, str(SHIM / 'compare.py'), *map(str, words)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def differences(library: Path, wanted: Path) -> list[str]:
    """Calls in which the CUDA ops differ from those of the CPU."""
    found: list[str] = json.loads(compare({'AMP_WRAPPER_OPS': str(library.parent)}, wanted, library).splitlines()[-1])
    return found


@pytest.mark.long
def test_host_code_and_kernels_together_equal_the_cpu_ops(wanted: Path, tmp_path: Path) -> None:
    assert differences(build_host(tmp_path), wanted) == []


@pytest.mark.long
def test_planted_faults_in_the_host_code_are_caught(wanted: Path, tmp_path: Path) -> None:
    mine = [fault for fault in FAULTS if fault['by'] == 'host']
    found = differences(build_host(tmp_path, *mine), wanted)
    assert {line.split()[0] for line in found} == {fault['shows'] for fault in mine}


# -- the planner ---------------------------------------------------------------------------------------------------

Numbers = ctypes.POINTER(ctypes.c_int64)


@pytest.mark.long
def test_plan_of_launches_has_every_element_once(tmp_path: Path) -> None:
    """Also with sizes that no memory holds: a grid has at most 2^31 - 1 blocks, and a tensor may need several."""
    target = compile_cpp(tmp_path / 'planner.so', [SHIM / 'planner.cpp'], '-O0', '-shared', '-fPIC', '-ftrapv')
    library = ctypes.CDLL(str(target))
    for name in ('chunk_size', 'most_chunks', 'plan_rows'):
        getattr(library, name).restype = ctypes.c_int64
    library.plan_rows.argtypes = [Numbers, *[ctypes.c_int64] * 3, Numbers, ctypes.c_int64]
    library.launches_of.argtypes = [Numbers, ctypes.c_int64, ctypes.c_int]
    size, most = library.chunk_size(), library.most_chunks()
    chooser = random.Random(0)
    sizes = [0, 1, 5, size - 1, size, size + 1, 7 * size, 10**6, 2**31 - 1, 2**31 + 1, 2**40 + 1, size * (most + 10)]
    for case in range(300):
        counts = [chooser.choice(sizes[: 8 if case % 3 else None]) for _ in range(chooser.randrange(12))]
        entries, chunks = chooser.randrange(1, 7), chooser.choice([1, 2, 3, 7]) if case % 3 else most
        rows = (ctypes.c_int64 * (5 * 4096))()
        used = library.plan_rows(
            (ctypes.c_int64 * max(len(counts), 1))(*counts), len(counts), entries, chunks, rows, 4096
        )
        assert used <= 4096
        planned = [rows[5 * i : 5 * i + 5] for i in range(used)]
        covered = [0] * len(counts)
        launches: dict[int, list[list[int]]] = {}
        for launch, tensor, begin, count, before in planned:
            assert begin == covered[tensor] and begin % size == 0 and count > 0
            covered[tensor] += count
            # chunks of the launch before this entry
            assert before == sum(-(-row[3] // size) for row in launches.get(launch, []))
            launches.setdefault(launch, []).append([launch, tensor, begin, count])
        assert covered == counts and list(launches) == list(range(len(launches)))
        for group in launches.values():
            assert len(group) <= entries and sum(-(-row[3] // size) for row in group) <= chunks
    # the number of launches does not grow with that of the tensors, up to the room of the arguments
    for lists in (1, 2, 3):
        room = library.most_tensors(lists)
        for count, launches_wanted in ((0, 0), (1, 1), (161, 1), (room, 1), (2 * room + 1, 3)):
            counts = [1 + 40_000 * (i % 3) for i in range(count)]
            assert (
                room > 800
                and library.launches_of((ctypes.c_int64 * max(count, 1))(*counts), count, lists) == launches_wanted
            )


# -- what nvcc says ------------------------------------------------------------------------------------------------


def mangled(name: str) -> str:
    """How a kernel's name stands inside its symbol."""
    return f'{len(name)}{name}'


def test_build_gives_nvcc_the_flags_of_these_tests() -> None:
    texts = [path.read_text() for path in [*(ROOT / 'amp_wrapper').rglob('*.py'), ROOT / 'setup.py']]
    assert any('--fmad=false' in text for text in texts) and not any('use_fast_math' in text for text in texts)


@pytest.mark.long
def test_every_kernel_compiles_for_every_architecture_without_spills(tmp_path: Path) -> None:
    program = nvcc()
    listed = subprocess.run([program, '--list-gpu-code'], capture_output=True, text=True, check=True).stdout
    missing = [name for name in ARCHITECTURES if f'sm_{name}\n' not in f'{listed}\n']
    if missing:
        pytest.skip(f'this nvcc does not know sm_{", sm_".join(map(str, missing))}')
    codes = [f'-gencode=arch=compute_{name},code=sm_{name}' for name in ARCHITECTURES]
    command = [program, *FLAGS, *codes, '-Xptxas', '-v', '--threads', '2', '-c']
    command += [str(CSRC / 'cuda' / name) for name in SOURCES]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0 and 'warning' not in done.stderr, done.stderr
    pieces = re.split(r"Compiling entry function '(\w+)' for 'sm_(\d+)'", done.stderr)
    reports = {(int(sm), kernel): report for kernel, sm, report in zip(pieces[1::3], pieces[2::3], pieces[3::3])}
    text = ''.join((CSRC / 'cuda' / name).read_text() for name in KERNELS)
    names = re.findall(r'__global__ void\s+(?:__launch_bounds__\([\w, ]+\)\s+)?(\w+)\(', text)
    assert len(names) == text.count('__global__') > 0
    for architecture in ARCHITECTURES:
        kernels = [kernel for sm, kernel in reports if sm == architecture]
        assert not [name for name in names if not any(mangled(name) in kernel for kernel in kernels)]
    for where, report in reports.items():
        # a stack would mean that the arguments are copied to memory, since they are indexed
        frame = re.search(r'(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads', report)
        registers = re.search(r'Used (\d+) registers', report)
        assert frame is not None and set(frame.groups()) == {'0'}, (where, report)
        assert registers is not None and int(registers[1]) <= MOST_REGISTERS, (where, report)


MOVED = ('scale', 'copy', 'axpby', 'refresh', 'exponents', 'sum_of_squares', 'largest', 'scale_and_sum', 'adam', 'sgd')


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
        command = [program, *FLAGS, '-arch=compute_75', '-ptx', str(tmp_path / 'csrc/cuda' / name), '-o', str(target)]
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
            assert re.search(r'ld\.global(\.nc)?\.v4\.(u|b)32', text), name
            if name not in ('exponents', 'sum_of_squares', 'largest'):
                assert re.search(r'st\.global\.v4\.(u|b|f)32', text), name


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
    source.write_text(''.join(f'#include "{path}"\n' for path in sorted((CSRC / 'cuda').glob('*ops.cpp'))))
    flags = [f'-I{path}' for path in [*include_paths(), str(include)]]
    flags += [] if torch.version.cuda else ['-DC10_CUDA_NO_CMAKE_CONFIGURE_FILE']
    command = [*compiler(), '-std=c++20', '-Wall', '-fsyntax-only', *flags, str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
