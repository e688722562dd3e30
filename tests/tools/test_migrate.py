"""``amp-wrapper migrate``: the example on apex trains afterwards, and what is left to do by hand is listed."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
from processes import ROOT, python

from amp_wrapper.cli import main

#: What no rule can decide is left as it is, and named.
LEFT = {
    'from apex.optimizers import FusedLAMB\nFusedLAMB(p)\n': 'apex.optimizers.FusedLAMB',
    'from apex.optimizers import FusedAdam\nFusedAdam(p, bias_correction=False)\n': 'apex.optimizers.FusedAdam',
    'from apex.optimizers import FusedAdam\nFusedAdam(p, **options)\n': 'apex.optimizers.FusedAdam',
    'from apex.optimizers import FusedSGD\nFusedSGD(p, 0.1, wd_after_momentum=True)\n': 'apex.optimizers.FusedSGD',
    'from apex.parallel import DistributedDataParallel as DDP\nDDP(m, gradient_average=False)\n': 'gradient_average',
    'from apex.fp16_utils import FP16_Optimizer\nFP16_Optimizer(o)\n': 'apex.fp16_utils.FP16_Optimizer',
    'from apex.parallel import LARC\nLARC(o)\n': 'apex.parallel.LARC',
    'from apex import amp\namp._amp_state.handle\n': '_amp_state',
}
#: Each would compute something else, or fail where it runs.
UNSEEN = [
    'import functools\nfrom apex.normalization import FusedRMSNorm\nmake = functools.partial(FusedRMSNorm, 8)\n',
    'from apex.normalization import FusedRMSNorm\nM = FusedRMSNorm\nM(8)\n',
    'from apex.parallel import DistributedDataParallel as DDP\nkw = dict(delay_allreduce=True)\nDDP(m, **kw)\n',
    'import amp_C\nimport apex_C\n',
    'from apex.optimizers import FusedSGD\nFusedSGD(p, **options)\n',
]


@pytest.mark.parametrize(
    ('text', 'name'),
    [*LEFT.items(), *(pytest.param(text, '', marks=pytest.mark.xfail(strict=True, reason='cli')) for text in UNSEEN)],
    ids=[text.splitlines()[-1] for text in [*LEFT, *UNSEEN]],
)
def test_what_is_left_is_listed(text: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / 'script.py').write_text(text)
    assert main(['migrate', str(tmp_path)]) == 1
    assert re.search(rf'script\.py:\d+: .*{re.escape(name)}', capsys.readouterr().err)
    assert (tmp_path / 'script.py').read_text() == text


def test_example_runs_after_its_migration(tmp_path: Path) -> None:
    """As the README shows it."""
    script = shutil.copy(ROOT / 'examples' / 'apex_style.py', tmp_path / 'script.py')
    assert main(['migrate', str(script), '--write']) == 0
    done = python(script, '--opt-level', 'O2', env={**os.environ, 'PYTHONPATH': str(ROOT)})
    assert done.returncode == 0, done.stderr
    first, last = map(float, re.findall(r'loss (\S+) to (\S+), loss scale', done.stdout)[0])
    assert last < first / 5


def test_folders_are_searched_but_for_what_others_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = ['a.py', 'deep/er/b.py']
    others = ['.hidden/c.py', 'build/c.py', 'venv/c.py', 'mine/pyvenv.cfg', 'mine/c.py', 'x.egg-info/c.py', 'd.yaml']
    for name in [*mine, *others, 'bad.py', 'locked.py']:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('from apex import amp\n')
    (tmp_path / 'bad.py').write_text('from apex import amp\nprint "two"\n')
    (tmp_path / 'a.py').chmod(0o750)
    (tmp_path / 'locked.py').chmod(0o444)
    assert main(['migrate', str(tmp_path), '--write']) == 2
    said = capsys.readouterr().err
    assert re.search(r'bad\.py:2: ', said) and re.search(r'locked\.py: cannot be written', said)
    changed = {path for path in tmp_path.rglob('*') if path.is_file() and 'amp_wrapper' in path.read_text()}
    assert changed == {tmp_path / name for name in mine}
    assert (tmp_path / 'a.py').stat().st_mode & 0o777 == 0o750
