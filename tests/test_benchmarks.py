"""The benchmarks run, and what they count is right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

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
