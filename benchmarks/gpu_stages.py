"""What ``python -m benchmarks.gpu_check`` runs: stages of steps, steps of jobs, and what each of them needs."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
STAGES = ('ops', 'step', 'engine', 'end-to-end', 'sanitizer', 'ddp')
#: The folders of tests of a stage; ``engine`` has all others that take a device.
TESTS = {'ops': ('ops',), 'step': ('optim', 'engine'), 'ddp': ('distributed',)}
SANITIZERS = ('memcheck', 'racecheck', 'initcheck', 'synccheck')
#: What may be missing, and what to do about it.
REMEDIES = {
    'gpu': 'torch sees no GPU',
    'second gpu': 'fewer than two GPUs: two ranks of nccl need them, gloo runs on the processor',
    'nvcc': 'no CUDA compiler (nvcc): the CUDA toolkit has it',
    'compute-sanitizer': 'no compute-sanitizer: the CUDA toolkit has it (package cuda-sanitizer)',
    'pytest': 'pip install pytest',
    'hypothesis': 'pip install hypothesis',
    'mmengine': 'pip install mmengine==0.10.7',
    'ninja': 'pip install ninja (the build works without, with one compiler at a time)',
}


@dataclasses.dataclass(frozen=True)
class Job:
    """One process.

    Attributes:
        name: In the report.
        command: Its words; the first is the interpreter or a tool.
        needs: Keys of :data:`REMEDIES` without which it is left out.
        env: Variables beside the present ones.
    """

    name: str
    command: tuple[str, ...]
    needs: tuple[str, ...] = ('gpu',)
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Step:
    """Jobs that may run at the same time.

    Attributes:
        name: In the report.
        jobs: The processes.
        share: Of the time of the stage, beside those of the steps that follow it.
        workers: How many run at once; 0 for as many as the processor allows.
    """

    name: str
    jobs: tuple[Job, ...]
    share: float = 1.0
    workers: int = 1


def missing(find: Mapping[str, str | None] | None = None) -> dict[str, str]:
    """What this machine lacks: key of :data:`REMEDIES` to the remedy.

    Args:
        find: Tools by name, where they are known already.
    """
    try:
        import torch

        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    except ImportError:
        gpus = 0
    tools = {name: tool(name) for name in ('nvcc', 'compute-sanitizer')} if find is None else find
    there = {
        'gpu': gpus > 0,
        'second gpu': gpus > 1,
        **{name: path is not None for name, path in tools.items()},
        **{name: importlib.util.find_spec(name) is not None for name in ('pytest', 'hypothesis', 'mmengine', 'ninja')},
    }
    return {name: remedy for name, remedy in REMEDIES.items() if not there[name]}


def tool(name: str) -> str | None:
    """The path of a program of the CUDA toolkit; None where there is none."""
    places = [os.environ.get('CUDA_HOME'), os.environ.get('CUDA_PATH'), '/usr/local/cuda']
    found = [Path(place) / folder / name for place in places if place for folder in ('bin', name)]
    return shutil.which(name) or next((str(path) for path in found if path.is_file()), None)


def files_of(stage: str) -> list[str]:
    """The test files of a stage that take a device, by their paths from the root."""
    elsewhere = {'downstream', 'foreign_packages'}.union(
        *(folders for other, folders in TESTS.items() if other != stage)
    )
    found = []
    for path in sorted((ROOT / 'tests').rglob('test_*.py')):
        folder, text = path.parent.name, path.read_text(encoding='utf-8')
        # ranks get their device from a fixture; scripts of steps make their tensors where --device says
        takes = folder in ('amp', 'engine') or re.search(r'def \w+\([^)]*\bdevice\b|from on_ranks import', text)
        if takes and folder not in elsewhere and folder in TESTS.get(stage, (folder,)):
            found.append(path.relative_to(ROOT).as_posix())
    return found


def _python(*words: str) -> tuple[str, ...]:
    return (sys.executable, *words)


def _tests(stage: str, device: str = 'cuda', needs: Sequence[str] = ('gpu',)) -> Step:
    words = ('-m', 'pytest', '-q', '-rs', '-p', 'no:cacheprovider', '--device', device)
    jobs = [
        Job(
            f'{Path(file).stem} ({device})',
            _python(*words, file),
            (*needs, 'pytest', 'hypothesis'),
            {'OMP_NUM_THREADS': '1'},
        )
        for file in files_of(stage)
    ]
    return Step(f'tests with --device {device}', tuple(jobs), 3.0, 0)


def _bench(name: str, *words: str, needs: Sequence[str] = ('gpu',)) -> Job:
    return Job(f'benchmarks.{name}', _python('-m', f'benchmarks.{name}', *words), tuple(needs))


def beside_a_gpu(name: str) -> str:
    """Where a benchmark of the host puts its page on such a machine."""
    return f'benchmarks/results/{name}_beside_a_gpu.md'


def steps(stage: str, arch: str = '') -> list[Step]:
    """What a stage does, in order.

    Args:
        stage: One of :data:`STAGES`.
        arch: ``TORCH_CUDA_ARCH_LIST`` of the build, such as '9.0'; torch's own choice where empty.

    Raises:
        KeyError: No such stage.
    """
    if stage == 'ops':
        words = {'FORCE_CUDA': '1', **({'TORCH_CUDA_ARCH_LIST': arch} if arch else {})}
        build = Job('build', _python('setup.py', 'build_ext', '--inplace'), ('gpu', 'nvcc'), words)
        info = Job('amp_wrapper.info', _python('-m', 'amp_wrapper.info'), ())
        bench = _bench('ops', '--device', 'cuda', '--threads', '1', '--seconds', '0.2', '--write')
        return [
            Step('build', (build,), 3.0),
            Step('what runs here', (info,), 0.2),
            _tests(stage),
            Step('bench', (bench,), 2.0),
        ]
    if stage == 'step':
        few = _bench('step', '--device', 'cuda', '--threads', '1', '--rounds', '5', '--write')
        buffers = _bench('buffers', '--device', 'cuda', '--write', needs=('gpu', 'mmengine'))
        watched = _bench('monitoring', '--device', 'cuda', '--write', needs=('gpu', 'mmengine'))
        return [_tests(stage), Step('bench', (few,), 3.0), Step('buffers and monitoring', (buffers, watched), 1.0)]
    if stage == 'engine':
        host = _bench('hooks', '--write', beside_a_gpu('hooks'), needs=())
        files = _bench('checkpoints', '--write', beside_a_gpu('checkpoints'), needs=('mmengine',))
        calls = _bench('host', '--write', beside_a_gpu('host'), needs=('mmengine',))
        return [_tests(stage), Step('bench', (host, files, calls), 0.5)]
    if stage == 'end-to-end':
        bench = _bench('step', '--device', 'cuda', '--end-to-end', '--rounds', '5', '--write')
        compiled = _bench('compiled', '--device', 'cuda', '--batch', '32', '--size', '128', '--write')
        return [
            Step('whole training steps beside torch.amp and stock AMP', (bench,), 3.0),
            Step('compiled training steps', (compiled,), 2.0),
        ]
    if stage == 'sanitizer':
        program = tool('compute-sanitizer') or 'compute-sanitizer'
        parity = _python(
            *('-m', 'pytest', '-q', '-x', '-p', 'no:cacheprovider', '--device', 'cuda'),
            *('tests/ops/test_lists.py', 'tests/ops/test_steps.py'),
        )
        jobs = [
            Job(name, (program, '--tool', name, '--error-exitcode', '99', *parity),
                ('gpu', 'compute-sanitizer', 'pytest', 'hypothesis'), {'PYTORCH_NO_CUDA_MEMORY_CACHING': '1'})
            for name in SANITIZERS
        ]  # fmt: skip
        return [Step('compute-sanitizer', tuple(jobs), 1.0, len(jobs))]
    if stage == 'ddp':
        one = Job('one rank, nccl', _python('-m', 'benchmarks.one_rank', '--backend', 'nccl'), ('gpu',))
        ranks = _bench('distributed', '--quick', '--report', beside_a_gpu('distributed'), needs=('gpu', 'mmengine'))
        counts = _bench('sharding', '--write', beside_a_gpu('sharding'))
        memory = _bench('sharding_memory', '--device', 'cuda', '--write', beside_a_gpu('sharding_memory'))
        several = _tests(stage, 'cuda', ('gpu', 'second gpu'))
        # nccl takes no two ranks on one GPU; gloo takes them on the processor
        gloo = _tests(stage, 'cpu', ('mmengine',))
        return [Step('a process group', (one,), 0.5), several, gloo, Step('bench', (ranks, counts, memory), 2.0)]
    raise KeyError(stage)
