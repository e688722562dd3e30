"""``amp-wrapper report`` and ``suggest-level``: from a config to tables, pages and numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import toy  # noqa: F401

from amp_wrapper.cli import main

CONFIG = """
model = dict(type='ToyModel')
train_dataloader = dict(batch_size=4, num_workers=0, dataset=dict(type='ToyData'),
    sampler=dict(type='DefaultSampler', shuffle=True), collate_fn=dict(type='default_collate'))
optim_wrapper = dict(type='AmpOptimWrapper', opt_level='O2', optimizer=dict(type='Adam', lr=0.01))
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv('COLUMNS', '140')
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'toy_o2.py').write_text(CONFIG)
    return 'toy_o2.py'


def test_report(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(['report', config, '--opt-level', 'O5', '--html', 'new/a.html', '--json', 'a.json']) == 0
    shown = capsys.readouterr().out
    assert shown.startswith('Precision of toy_o2.py at O5') and 'Conv2d' in shown
    assert max(map(len, shown.splitlines())) <= 140
    data = json.loads(Path('a.json').read_text())
    assert data['level'] == 'O5' and data['loss']['level'] > 0
    assert '<title>Precision of toy_o2.py at O5</title>' in Path('new/a.html').read_text()
    # neither a work_dir nor a log
    assert sorted(path.name for path in tmp_path.iterdir()) == ['a.json', 'new', 'toy_o2.py']
    assert main(['report', config, '--depth', '0', '--cfg-options', 'optim_wrapper.keep_fp32=[fc]']) == 0
    shown = capsys.readouterr().out
    assert shown.startswith('Precision of toy_o2.py at O2') and 'Conv2d' not in shown


def test_suggest_level(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ['--levels', 'O1,O4,O5', '--steps', '4', '--prefer', 'memory', '--html', 'a.html', '--json', 'a.json']
    assert main(['suggest-level', config, *words, '--cfg-options', 'optim_wrapper.keep_fp32=[fc]']) == 0
    shown = capsys.readouterr().out
    found = json.loads(Path('a.json').read_text())
    assert [each['level'] for each in found['levels']] == ['O0', 'O1', 'O4', 'O5']
    assert found['overrides'] == {'keep_fp32': ['fc']}
    for each in found['levels']:
        assert each['losses'] == pytest.approx(found['levels'][0]['losses'], rel=0.05) and len(set(each['losses'])) == 4
    assert f"opt_level='{found['level']}'" in shown and "keep_fp32=['fc']" in shown
    assert f'Recommended level: {found["level"]}' in Path('a.html').read_text()
