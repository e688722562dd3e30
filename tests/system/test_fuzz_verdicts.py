"""A short run of ``make fuzz-test``'s comparison: damaged files meet the verdicts and messages that were recorded."""

from __future__ import annotations

import json
import lzma
import subprocess
from pathlib import Path

import pytest
from command_line import python
from grid import grid

DATA = next(folder / 'data' for folder in Path(__file__).parents if (folder / 'data' / 'saved').is_dir())
RECORD = DATA / 'fuzz_verdicts.json.xz'


def compared(record: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (fuzz,) = DATA.parent.rglob('fuzz_checkpoints.py')
    return python(fuzz, *arguments, '--compare', record)


@pytest.mark.timeout(600)
def test_verdicts_are_those_of_before() -> None:
    done = compared(RECORD, '--files', '200')
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    # another torch writes other files
    assert 'compared with the record: 200 files' in done.stdout or 'is not compared with' in done.stdout


@grid
@pytest.mark.timeout(600)
def test_another_verdict_is_told(tmp_path: Path) -> None:
    """A test of the test."""
    content = json.loads(lzma.decompress(RECORD.read_bytes()))
    content['verdicts'][3][3] += 'x'
    record = tmp_path / RECORD.name
    record.write_bytes(lzma.compress(json.dumps(content).encode(), preset=0))
    archive = RECORD.name.removesuffix('.json.xz') + '.zip'
    (tmp_path / archive).write_bytes(RECORD.with_name(archive).read_bytes())
    done = compared(record, '--files', '8')
    if 'is not compared with' in done.stdout:
        pytest.skip('the verdicts were recorded with another torch')
    assert done.returncode == 1
    assert 'file 3, ' in done.stdout
    assert '1 in key' in done.stdout
