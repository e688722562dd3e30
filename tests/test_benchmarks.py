"""The benchmarks run, and what they count is right."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from amp_wrapper.ops.schemas import SCHEMAS

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason='this torch was built without torch.distributed')
def test_bytes_of_the_gradient_exchange(tmp_path: Path) -> None:
    """Two gloo processes: O2 hands half the bytes of O0 to the all-reduce, and BatchNorm stays FP32."""
    report, numbers = tmp_path / 'report.md', tmp_path / 'numbers.json'
    words = ['--quick', '--backend', 'gloo', '--report', str(report), '--json', str(numbers), '--timeout', '150']
    done = subprocess.run(
        [sys.executable, '-m', 'benchmarks.distributed', *words],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=180,
        env={**os.environ, 'OMP_NUM_THREADS': '1'},
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    result = json.loads(numbers.read_text())
    assert report.read_text().count('\n| small transformer') > 20

    def handed(model: str, variant: str, passes: int) -> dict[str, Any]:
        """Bytes per type; with views of the buckets they are the same."""
        found = [
            one['bytes']
            for one in result['counts']
            if (one['model'], one['variant'], one['passes']) == (model, variant, passes)
        ]
        assert found and all(one == found[0] for one in found)
        return found[0]

    for passes in (1, 4):
        whole = handed('small transformer', 'O0', passes)
        assert list(whole) == ['float32']
        for variant, dtype in (('O2', 'float16'), ('O3', 'float16'), ('O5', 'bfloat16')):
            assert handed('small transformer', variant, passes) == {dtype: whole['float32'] / 2}, variant
        for variant in ('plain DDP', 'stock AMP, float16', 'O1', 'O4'):
            assert handed('small transformer', variant, passes) == whole, variant
        # weight and bias of one BatchNorm of 16 channels
        kept = 2 * 16 * 4
        rest = handed('small CNN', 'O0', passes)['float32'] - kept
        assert handed('small CNN', 'O2', passes) == {'float32': kept, 'float16': rest / 2}
        assert handed('small CNN', 'O5', passes) == {'float32': kept, 'bfloat16': rest / 2}
        assert handed('small CNN', 'O3', passes) == {'float16': (rest + kept) / 2}


def test_lists_of_the_ops_benchmark_are_those_of_the_models() -> None:
    """The numbers that the papers give: 25.6 and 28.3 million parameters."""
    sys.path.insert(0, str(ROOT))
    from benchmarks.ops import lists_of

    counted = {name: (len(shapes), sum(map(math.prod, shapes))) for name, shapes in lists_of(7).items()}
    assert counted['ResNet-50'] == (161, 25_557_032)
    assert counted['Swin-T'] == (173, 28_288_354)
    assert counted['one huge tensor'] == (1, 7)
    assert counted['2,000 tiny tensors'][0] == 2000


def test_ops_benchmark_compares_what_means_the_same() -> None:
    """Every op has rows, and what is written by a sequence of torch is what the op writes."""
    sys.path.insert(0, str(ROOT))
    from benchmarks.ops import cases, scale_case

    def results(index: int, peer: str | None) -> list[torch.Tensor]:
        case = cases([(3,), (2, 5), (70,)], torch.device('cpu'))[index]
        outcome = case.ours() if peer is None else case.peers[peer]()
        return [t.clone() for t in (*case.written, *([] if case.written else [outcome]))]

    found = cases([(3,)], torch.device('cpu'))
    assert {case.op for case in found} | {scale_case(torch.device('cpu')).op} == set(SCHEMAS)
    for index, case in enumerate(found):
        wanted = results(index, None)
        for peer in case.peers:
            for ours, theirs in zip(wanted, results(index, peer)):
                torch.testing.assert_close(
                    theirs.float(), ours.float(), rtol=2e-3, atol=1e-6, msg=f'{case.op}, {case.what}, {peer}'
                )
