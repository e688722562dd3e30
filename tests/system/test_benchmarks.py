"""Each benchmark runs in a quick form and prints a row; bytes that a step moves are those that the pages promise."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from processes import python

from amp_wrapper import ops

ROOT = Path(__file__).resolve().parents[2]
#: Module and words of the quick form.
QUICK = {
    'buffers': '--rounds 1 --batch 2 --size 32',
    'monitoring': '--rounds 1',
    'host': '--levels O2 --rounds 1 --processes 1 --steps 2',
    'checkpoints': '--millions 1',
    'distributed': '--quick --backend gloo',
    'ops': '--only tiny --seconds 0.01 --huge 1000 --threads 1',
    'step': '--models tiny --optimizers AdamW --clip on --threads 1 --rounds 1',
    'fidelity': '--tasks cnn --variants O0 O5 --seeds 3 --quick',
    'gpu_check': '--dry',
    'one_rank': '--backend gloo',
}


@pytest.mark.parametrize(
    'name', ['gpu_check', *(pytest.param(n, marks=pytest.mark.long) for n in QUICK if n != 'gpu_check')]
)
def test_benchmark_prints_its_rows(name: str, tmp_path: Path) -> None:
    words = QUICK[name].split()
    if name == 'fidelity':
        words += ['--records', str(tmp_path / 'runs.jsonl')]
    done = python('-m', f'benchmarks.{name}', *words, timeout=900)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert '\n| ' in done.stdout or name in ('gpu_check', 'one_rank')


@pytest.mark.skipif(ops.backend_of('cpu') == 'reference', reason='the reference moves as many bytes as it likes')
@pytest.mark.parametrize(
    ('optimizer', 'name', 'moved'),
    [
        ('AdamW', 'this package, O2, fused', 30),
        ('AdamW', 'this package, O2, fused, split masters', 28),
        ('AdamW', 'torch ops, unscale', 60),
        ('SGD', 'this package, O2, fused', 22),
        ('SGD', 'this package, O2, fused, split masters', 20),
    ],
)
def test_bytes_for_each_parameter_are_those_of_the_pages(
    optimizer: str, name: str, moved: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no step reads from the device."""
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks.step import start
    from benchmarks.step_counting import counts_of
    from benchmarks.step_ways import Case, ways

    case = Case(optimizer, True, torch.float16, torch.device('cpu'))
    way = next(way for way in ways(case) if way.name == name)
    # enough elements that tables and counters do not show
    step = start(way, case, [(1024, 64), (512, 128), (1000,)])
    counts = counts_of(step.run, [tensor.data_ptr() for tensor in step.host_tensors()])
    assert counts.bytes / 132_072 == pytest.approx(moved, abs=0.1) and counts.reads == 0
