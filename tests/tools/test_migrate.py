"""``amp-wrapper migrate``: what becomes of scripts on apex, that they train afterwards, and what is left to do by hand."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import ROOT, python

from amp_wrapper.cli import main

#: Lines of a script, what becomes of them, and the class of ``made`` when they have been run.
PAIRS: dict[str, tuple[str, str, type | None]] = {
    'the loop of the documentation': (
        'from apex import amp\n'
        "model, optimizer = amp.initialize(model, optimizer, opt_level='O2', loss_scale='128.0', verbosity=0)\n"
        'with amp.scale_loss(model(x).sum(), optimizer) as scaled_loss:\n'
        '    scaled_loss.backward()\n'
        'torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)\n'
        'optimizer.step()\n'
        'made = amp._amp_state.loss_scalers[0].loss_scale()\n',
        'from amp_wrapper import amp\n'
        "model, optimizer = amp.initialize(model, optimizer, opt_level='O2', loss_scale='128.0', verbosity=0)\n"
        'with amp.scale_loss(model(x).sum(), optimizer) as scaled_loss:\n'
        '    scaled_loss.backward()\n'
        'torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)\n'
        'optimizer.step()\n'
        "made = amp.state_dict()['loss_scaler0']['loss_scale']\n",
        float,
    ),
    'what only looks like apex': (
        "apex = 'apex'\n# from apex import amp\nmade = [apex]\n",
        "apex = 'apex'\n# from apex import amp\nmade = [apex]\n",
        list,
    ),
}
HEAD = 'import torch\n'


@pytest.mark.parametrize('name', PAIRS)
def test_script_becomes_what_stands_beside_it_and_runs(name: str, tmp_path: Path) -> None:
    before, after, kind = PAIRS[name]
    path = tmp_path / 'script.py'
    path.write_text(HEAD + before)
    assert main(['migrate', str(path), '--write']) == 0
    # quotes of what is put in are not part of the promise
    assert path.read_text().replace('"', "'") == HEAD + after
    model = torch.nn.Linear(4, 2)
    names: dict[str, Any] = dict(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), x=torch.ones(3, 4))
    exec(compile(path.read_text(), str(path), 'exec'), names)
    assert kind is None or isinstance(names['made'], kind)
    assert name != 'the loop of the documentation' or names['made'] == 128.0
    # a second time, there is nothing to do
    before = path.read_text()
    assert main(['migrate', str(path), '--write']) == 0 and path.read_text() == before


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
    [
        *LEFT.items(),
        *(pytest.param(text, '', marks=pytest.mark.xfail(strict=True, reason='cli')) for text in UNSEEN),
    ],
    ids=[text.splitlines()[-1] for text in [*LEFT, *UNSEEN]],
)
def test_what_is_left_is_listed_with_file_and_line(
    text: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
