"""The CUDA kernels without a GPU: run on a CPU under sanitizers, compiled for every architecture, and their reports read.

``tests/cuda_shim`` gives CUDA's words a meaning on a CPU. The kernels are the files that nvcc compiles, unchanged, and their
results are compared with those of the CPU kernels, bit for bit. Planted faults show that the checks can fail.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from grid import but, grid, long
from native import CSRC, ROOT, SHIM, compile_cpp, compiler, nvcc
from ops_models import in_fresh_process
from torch.utils.cpp_extension import include_paths, library_paths

ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120)
#: 256 threads and no more than 64 registers each: four blocks fit on any of the architectures at once.
MOST_REGISTERS = 64
ADDRESS = ('-fsanitize=address,undefined', '-fno-sanitize-recover=all')
THREAD = ('-fsanitize=thread',)

JOIN = """  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
"""
CLEARED = '  __syncthreads();\n  unsigned* own'
TAIL = 'i < count; i += kThreads) target[i] = from_float<T>(to_float(source[i]))'
ALIGNED = """__device__ inline void convert_elements(const S* source, T* target, int count) {
  int done = 0;
  if (is_aligned(source) && is_aligned(target)) {
"""


def plant(path: Path, piece: str, fault: str) -> None:
    """Put a fault into a copy of a file."""
    text = path.read_text()
    assert text.count(piece) == 1, f'the piece that the fault replaces is there {text.count(piece)} times'
    path.write_text(text.replace(piece, fault))


def build(
    folder: Path, sanitizer: tuple[str, ...], *plants: tuple[str, str, str], harness: str = 'harness.cpp'
) -> Path:
    """A harness as a program; each of ``plants``, (file, piece, fault), replaces a piece of a copy of the kernels."""
    shutil.copytree(CSRC, folder / 'csrc', dirs_exist_ok=True)
    shutil.copytree(SHIM, folder / 'tests' / 'cuda_shim', dirs_exist_ok=True)
    for name, piece, fault in plants:
        plant(folder / 'csrc' / 'cuda' / name, piece, fault)
    # the other one has the arithmetic of a step in itself
    kernels = [folder / 'csrc' / 'cpu' / 'kernels_default.cpp'] if harness == 'harness.cpp' else []
    return compile_cpp(
        folder / 'harness',
        [folder / 'tests' / 'cuda_shim' / harness, *kernels],
        *('-O1', '-g1', '-fno-strict-aliasing', '-ffp-contract=off'),
        # so little that a few tensors need several launches
        '-DAMP_ARGUMENT_BYTES=512',
        *sanitizer,
    )


def run(program: Path, seed: int, rounds: int) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, 'TSAN_OPTIONS': 'halt_on_error=1', 'ASAN_OPTIONS': 'detect_leaks=0'}
    return subprocess.run(
        [program, str(seed), str(rounds)], capture_output=True, text=True, timeout=500, env=env, check=False
    )


def skip_without(sanitizer: tuple[str, ...], folder: Path) -> None:
    """A machine may have a compiler without the sanitizer's library, or forbid what it needs."""
    source = folder / 'probe.cpp'
    source.write_text('int main() { return 0; }\n')
    command = [*compiler(), str(source), '-o', str(folder / 'probe'), *sanitizer]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip(f'the compiler cannot link {sanitizer[0]}')
    if subprocess.run([folder / 'probe'], capture_output=True, check=False).returncode:
        pytest.skip(f'programs with {sanitizer[0]} do not run on this machine')


@pytest.mark.parametrize(
    ('sanitizer', 'rounds'),
    but([(THREAD, 1)], [(THREAD, 1), (ADDRESS, 8), (THREAD, 4)], long),
    ids=['one-round', 'address-undefined', 'thread'],
)
def test_kernels_equal_the_cpu_ops_and_the_sanitizers_are_silent(
    sanitizer: tuple[str, ...], rounds: int, tmp_path: Path
) -> None:
    skip_without(sanitizer, tmp_path)
    done = run(build(tmp_path, sanitizer), 0, rounds)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert f'{rounds} rounds, 0 wrong' in done.stdout


FAULTS = {
    'a missing barrier': (THREAD, ('norm_kernels.cuh', JOIN, JOIN.replace('  __syncthreads();\n', '')), 'data race'),
    'columns that are cleared while they count': (
        THREAD,
        ('exponents_kernel.cuh', CLEARED, CLEARED.split('\n')[1]),
        'data race',
    ),
    'a write out of bounds': (
        ADDRESS,
        ('elementwise_kernels.cuh', TAIL, TAIL.replace('i < count', 'i <= count')),
        'heap-buffer-overflow',
    ),
    'a misaligned vector': (
        ADDRESS,
        (
            'elementwise_kernels.cuh',
            ALIGNED,
            ALIGNED.replace('is_aligned(source) && is_aligned(target)', 'is_aligned(target)'),
        ),
        'misaligned address',
    ),
}
#: Those that show in the results, each in those of another op: one program is enough for all.
WRONG_RESULTS = {
    'WRONG: scale': (
        'elementwise_kernels.cuh',
        'scale_kernel(const __grid_constant__ Work<2> work, const float* scale, float* found_inf) {\n'
        '  const auto place = place_of(work);\n  const Scale function{scale == nullptr ? 1.0f',
        'scale_kernel(const __grid_constant__ Work<2> work, const float* scale, float* found_inf) {\n'
        '  const auto place = place_of(work);\n  const Scale function{scale == nullptr ? 0.0f',
    ),
    'WRONG: scale and sum': (
        'norm_kernels.cuh',
        '        x.values[i] = function(value);\n',
        '        x.values[i] = value;\n',
    ),
    'WRONG: l2norm': (
        'norm_kernels.cuh',
        'join_block<Sum>(join_warp<Sum>(sums[0], 8))',
        'join_block<Sum>(join_warp<Sum>(sums[0], 16))',
    ),
    'WRONG: the begin of a block': (
        'device.cuh',
        'static_cast<std::int64_t>(chunk - starts[place.entry]) * kChunk',
        'static_cast<std::int32_t>((chunk - starts[place.entry]) * static_cast<std::uint32_t>(kChunk))',
    ),
    'WRONG: exponents': ('exponents_kernel.cuh', 'for (int warp = 0; warp', 'for (int warp = 1; warp'),
    'WRONG: the largest beside exponents': ('exponents_kernel.cuh', 'if (magnitude < kExponent) most', 'most'),
    # the payload of a NaN
    'WRONG: copy': (
        'elementwise_kernels.cuh',
        'if constexpr (std::is_same_v<S, T>) {',
        'if constexpr (std::is_same_v<S, T> && false) {',
    ),
}


@long
@pytest.mark.parametrize('fault', FAULTS)
def test_a_planted_fault_is_caught(fault: str, tmp_path: Path) -> None:
    """Without this, a check that never says anything would look like a check that finds nothing."""
    sanitizer, planted, message = FAULTS[fault]
    skip_without(sanitizer, tmp_path)
    done = run(build(tmp_path, sanitizer, planted), 0, 16)
    assert done.returncode != 0
    assert message in done.stdout + done.stderr, done.stdout[-500:] + done.stderr[-1000:]


@long
def test_planted_faults_show_in_the_results(tmp_path: Path) -> None:
    done = run(build(tmp_path, (), *WRONG_RESULTS.values()), 0, 8)
    assert done.returncode != 0
    assert [message for message in WRONG_RESULTS if message not in done.stdout] == []


# -- an optimizer step -------------------------------------------------------------------------------------------

COMMON = """    for (int i = 0; i < kDecision; ++i) common->decision[i] = decision[i];
  }
  __syncthreads();
"""
SKIP = """  if (decision[kSkip] != 0.0f) return;
  __shared__ Common<kAdamLists> common;
"""
REMAINDERS = 'store_raw(in_global(common.data[partner]), common.types[partner], turn, remainders);'
#: As WRONG_RESULTS.
WRONG_STEPS = {
    'WRONG: a skipped step': ('step_kernels.cuh', SKIP, SKIP.split('\n', 1)[1]),
    'WRONG: a partner of sgd': ('step_kernels.cuh', REMAINDERS, REMAINDERS.replace('remainders', 'weights')),
    'WRONG: a maximum': ('step_kernels.cuh', 'if constexpr (kAmsgrad) common.store(kAdamMost, turn, x);', ''),
    # the tail
    'WRONG: the last element of sgd': (
        'device.cuh',
        'return {first, left, aligned',
        'return {first, left - 1, aligned',
    ),
    # the scale moves in each of several launches
    'WRONG: a decision': ('step_kernels.cuh', 'if (i == 0 && work.decides)', 'if (i == 0)'),
    'WRONG: a row': ('step_kernels.cuh', 'work.hyper(group)', 'work.hyper(0)'),
}


@long
@pytest.mark.parametrize(('sanitizer', 'rounds'), [(ADDRESS, 5), (THREAD, 2)], ids=['address-undefined', 'thread'])
def test_steps_equal_their_arithmetic_and_the_sanitizers_are_silent(
    sanitizer: tuple[str, ...], rounds: int, tmp_path: Path
) -> None:
    skip_without(sanitizer, tmp_path)
    done = run(build(tmp_path, sanitizer, harness='step_harness.cpp'), 0, rounds)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert f'{rounds} rounds, 0 wrong' in done.stdout


def test_a_missing_barrier_in_a_step_is_caught(tmp_path: Path) -> None:
    skip_without(THREAD, tmp_path)
    planted = ('step_kernels.cuh', COMMON, COMMON.replace('  __syncthreads();\n', ''))
    done = run(build(tmp_path, THREAD, planted, harness='step_harness.cpp'), 0, 1)
    assert done.returncode != 0 and 'data race' in done.stderr, done.stdout[-500:] + done.stderr[-1000:]


@long
def test_planted_faults_show_in_a_step(tmp_path: Path) -> None:
    done = run(build(tmp_path, (), *WRONG_STEPS.values(), harness='step_harness.cpp'), 0, 5)
    assert done.returncode != 0
    assert [message for message in WRONG_STEPS if message not in done.stdout] == []


# -- the code that starts them -------------------------------------------------------------------------------------

SOURCES = ('kernels.cu', 'step_kernels.cu')
KERNELS = ('elementwise_kernels.cuh', 'exponents_kernel.cuh', 'norm_kernels.cuh', 'step_kernels.cuh')
LAUNCH = re.compile(r'(\w+(?:<\w+>)?)<<<(.+?), (\w+), 0, stream>>>\((.*?)\);')


def build_host(folder: Path, *plants: tuple[str, str, str]) -> Path:
    """The ops and launches of csrc/cuda as a library that serves tensors of the CPU; ``plants`` are (file, piece, fault)."""
    shutil.copytree(CSRC, folder / 'csrc')
    shutil.copytree(SHIM, folder / 'tests' / 'cuda_shim')
    for name, piece, fault in plants:
        plant(folder / 'csrc' / 'cuda' / name, piece, fault)
    launches, count = LAUNCH.subn(
        r'TORCH_INTERNAL_ASSERT(shim::guards == 1 && stream == &shim::a_stream); '
        r'shim::launch(\2, \3, [&] { \1(\4); });',
        ''.join((folder / 'csrc' / 'cuda' / name).read_text() for name in SOURCES),
    )
    assert count == 18
    text = '#include <c10/cuda/CUDAGuard.h>\n#include <c10/cuda/CUDAStream.h>\n' + launches
    (folder / 'csrc' / 'cuda' / 'launches.inl').write_text(text)
    includes = [f'-I{path}' for path in (folder / 'tests' / 'cuda_shim' / 'include', *include_paths())]
    return compile_cpp(
        folder / 'host.so',
        [folder / 'tests' / 'cuda_shim' / 'host.cpp'],
        *('-O1', '-fPIC', '-shared', '-fno-strict-aliasing', '-ffp-contract=off', '-DAMP_ARGUMENT_BYTES=512'),
        f'-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}',
        *includes,
        '-Wl,--no-as-needed',
        *(f'-L{path}' for path in library_paths()),
        *('-ltorch_cpu', '-lc10'),
    )


def differences(library: Path) -> list[str]:
    """Calls in which the CUDA ops differ from the reference, in a process in which they serve the CPU."""
    worker = str(ROOT / 'tests' / 'cuda_shim' / 'compare.py')
    found: list[str] = in_fresh_process(worker, str(library), environment={'AMP_WRAPPER_OPS': 'reference'})
    return found


@long
def test_host_code_and_kernels_together_equal_the_reference(tmp_path: Path) -> None:
    assert differences(build_host(tmp_path)) == []


#: By the op whose results they change.
HOST_FAULTS = {
    # results that stay in temporaries
    'multi_tensor_scale': ('ops.cpp', '  flat.finish();\n}\n\nvoid multi_tensor_axpby', '}\n\nvoid multi_tensor_axpby'),
    'multi_tensor_axpby': ('ops.cpp', 'value_of(a), value_of(b)', 'value_of(b), value_of(a)'),
    # later launches write over the chunks of earlier ones
    'multi_tensor_l2norm': (
        'ops.cpp',
        'launch_sum_of_squares(work, chunks + before,',
        'launch_sum_of_squares(work, chunks,',
    ),
    'multi_tensor_scale_l2norm': (
        'ops.cpp',
        'launch_scale_and_sum(work, value_of(scale), chunk_data + before,',
        'launch_scale_and_sum(work, value_of(scale), chunk_data,',
    ),
    # all tensors in the first row
    'multi_tensor_exponents': ('ops.cpp', 'return rows + tensor * kExponents;', 'return rows;'),
    'multi_tensor_maxnorm': ('kernels.cu', 'total, each, found_inf);', 'total, each, nullptr);'),
    # later launches write over the rows of earlier ones
    'step_prologue': ('step_kernel_args.h', 'prologue.rows = rows + first * kRow;', 'prologue.rows = rows;'),
    'fused_adam': ('step_ops.cpp', 'update.states[0], update.states[1],', 'update.states[1], update.states[0],'),
    'fused_sgd': ('step_ops.cpp', 'const bool momentums = update.states[0] >= 0;', 'const bool momentums = false;'),
}


@long
def test_faults_in_the_host_code_are_caught(tmp_path: Path) -> None:
    found = differences(build_host(tmp_path, *HOST_FAULTS.values()))
    assert {line.split()[0] for line in found} == set(HOST_FAULTS)


# -- what nvcc says ------------------------------------------------------------------------------------------------


def supported(program: str) -> list[int]:
    done = subprocess.run([program, '--list-gpu-code'], capture_output=True, text=True, check=True)
    return [int(name) for name in re.findall(r'sm_(\d+)$', done.stdout, re.MULTILINE)]


def flags() -> list[str]:
    """Those of the build, so that a flag that is lost there is missed here."""
    found = re.search(r"'nvcc': (\[.*?\])", (ROOT / 'amp_wrapper/ops/building.py').read_text())
    assert found is not None
    return ['-std=c++17', *ast.literal_eval(found[1])]


def compile_reports(folder: Path) -> dict[int, dict[str, str]]:
    """What ptxas says about each kernel on each architecture."""
    # nvcc calls it
    compiler()
    program = nvcc()
    missing = [name for name in ARCHITECTURES if name not in supported(program)]
    if missing:
        pytest.skip(f'this nvcc does not know sm_{", sm_".join(map(str, missing))}')
    codes = [f'-gencode=arch=compute_{name},code=sm_{name}' for name in ARCHITECTURES]
    sources = [str(CSRC / 'cuda' / name) for name in SOURCES]
    command = [program, *flags(), *codes, '-Xptxas', '-v', '--threads', '2', '-c', *sources]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert 'warning' not in done.stderr, done.stderr
    found: dict[int, dict[str, str]] = {name: {} for name in ARCHITECTURES}
    pieces = re.split(r"Compiling entry function '(\w+)' for 'sm_(\d+)'", done.stderr)
    for kernel, architecture, report in zip(pieces[1::3], pieces[2::3], pieces[3::3]):
        found[int(architecture)][kernel] = report
    return found


def mangled(name: str) -> str:
    """How a kernel's name stands inside its symbol."""
    return f'{len(name)}{name}'


# one test for all that is read from one compilation: tests of one file run in several processes
@long
def test_every_kernel_compiles_for_every_architecture_without_spills(tmp_path: Path) -> None:
    reports = compile_reports(tmp_path)
    text = ''.join((CSRC / 'cuda' / name).read_text() for name in KERNELS)
    names = re.findall(r'__global__ void\s+(?:__launch_bounds__\([\w, ]+\)\s+)?(\w+)\(', text)
    assert len(names) == text.count('__global__') == 14
    for architecture, found in reports.items():
        for name in names:
            assert any(mangled(name) in kernel for kernel in found), name
        for kernel, report in found.items():
            where = f'{kernel} on sm_{architecture}: {report}'
            # a stack would mean that the arguments are copied to memory, since they are indexed
            frame = re.search(r'(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads', report)
            assert frame is not None and set(frame.groups()) == {'0'}, where
            registers = re.search(r'Used (\d+) registers', report)
            assert registers is not None and int(registers[1]) <= MOST_REGISTERS, where
    assert len({tuple(sorted(found)) for found in reports.values()}) == 1


MOVED = ('scale', 'copy', 'axpby', 'refresh', 'exponents', 'sum_of_squares', 'largest', 'scale_and_sum', 'adam', 'sgd')


def test_instructions_have_no_double_precision_and_move_128_bits(tmp_path: Path) -> None:
    """Products and sums are fused where the arithmetic of a step names fmaf, and nowhere else."""
    compiler()
    shutil.copytree(CSRC, tmp_path / 'csrc')
    # with two roundings in its place, nothing is left that may be fused
    plant(tmp_path / 'csrc/common/step_prologue.h', '__fmaf_rn(a, b, c)', '__fadd_rn(__fmul_rn(a, b), c)')
    ptx: dict[str, str] = {}
    for name in SOURCES:
        target = tmp_path / 'kernels.ptx'
        command = [nvcc(), *flags(), '-arch=compute_75', '-ptx', str(tmp_path / 'csrc/cuda' / name), '-o', str(target)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        pieces = re.split(r'\.entry (\w+)\(', target.read_text())
        ptx.update(zip(pieces[1::2], pieces[2::2]))
    assert len(ptx) == 18
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


@grid
def test_the_host_part_compiles_against_torch(tmp_path: Path) -> None:
    """Also with a torch without CUDA: its headers are there. ``ATen/cuda`` would need more than they have."""
    home = Path(nvcc()).resolve().parents[2]
    include = next((p for p in (Path('/usr/local/cuda/include'), home / 'include') if p.is_dir()), None)
    if include is None:
        pytest.skip('the headers of CUDA are not beside nvcc')
    parts = [CSRC / 'cuda' / name for name in ('ops.cpp', 'step_ops.cpp')]
    text = ''.join(path.read_text() for path in (CSRC / 'cuda').iterdir())
    assert '#include <c10/cuda/' in text and 'ATen/cuda' not in text
    # at once, since torch's headers take most of the time
    source = tmp_path / 'both.cpp'
    source.write_text(''.join(f'#include "{path}"\n' for path in parts))
    flags = [f'-I{path}' for path in [*include_paths(), str(include)]]
    define = [] if torch.version.cuda else ['-DC10_CUDA_NO_CMAKE_CONFIGURE_FILE']
    command = [*compiler(), '-std=c++20', '-Wall', '-fsyntax-only', *define, *flags, str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
