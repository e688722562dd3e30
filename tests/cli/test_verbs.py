"""``amp-wrapper report``, ``suggest-level`` and ``plot``: from a config or a log to tables, pages, numbers and pictures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import toy

from amp_wrapper.cli import main

CONFIG = """
model = dict(type='ToyModel')
train_dataloader = dict(batch_size=4, num_workers=0, dataset=dict(type='ToyData'),
    sampler=dict(type='DefaultSampler', shuffle=True), collate_fn=dict(type='default_collate'))
optim_wrapper = dict(type='AmpOptimWrapper', opt_level='O2', optimizer=dict(type='Adam', lr=0.01))
"""
assert toy.ToyModel


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv('COLUMNS', '80')
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'toy_o2.py').write_text(CONFIG)
    return 'toy_o2.py'


def test_report(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(['report', config, '--opt-level', 'O5', '--html', 'new/a.html', '--json', 'a.json']) == 0
    shown = capsys.readouterr().out
    assert shown.startswith('Precision of toy_o2.py at O5') and 'Conv2d' in shown
    assert max(map(len, shown.splitlines())) <= 80
    data = json.loads(Path('a.json').read_text())
    assert (data['level'], data['optimizer']) == ('O5', 'Adam')
    assert '<title>Precision of toy_o2.py at O5</title>' in Path('new/a.html').read_text()
    # neither a work_dir nor a log
    assert sorted(path.name for path in tmp_path.iterdir()) == ['a.json', 'new', 'toy_o2.py']
    assert main(['report', config, '--depth', '0', '--cfg-options', 'optim_wrapper.keep_fp32=[fc]']) == 0
    shown = capsys.readouterr().out
    assert shown.startswith('Precision of toy_o2.py at O2') and 'conv Conv2d' not in shown


def test_suggest_level(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ['--levels', 'O2,O5', '--steps', '4', '--prefer', 'memory', '--html', 'a.html', '--json', 'a.json']
    assert main(['suggest-level', config, *words, '--cfg-options', 'optim_wrapper.keep_fp32=[fc]']) == 0
    shown = capsys.readouterr().out
    found = json.loads(Path('a.json').read_text())
    assert [each['level'] for each in found['levels']] == ['O0', 'O2', 'O5'] and found['overrides'] == {
        'keep_fp32': ['fc']
    }
    o5 = found['levels'][2]
    assert o5['loss']['values'] == pytest.approx(found['levels'][0]['loss']['values'], rel=0.02)
    assert len(set(o5['loss']['values'])) == 4
    # preprocessors are not cast
    assert {each['name']: each['outputs'] for each in o5['modules']}['data_preprocessor'] == 0.0
    assert f"opt_level='{found['level']}'" in shown and "keep_fp32=['fc']" in shown
    assert f'Recommended level: {found["level"]}' in Path('a.html').read_text()


# -- plots ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A work dir with one run, in the current folder."""
    pytest.importorskip('matplotlib')
    monkeypatch.chdir(tmp_path)
    # a backend that nobody has, and no display, change nothing
    monkeypatch.setenv('MPLBACKEND', 'module://no.such.backend')
    monkeypatch.delenv('DISPLAY', raising=False)
    shown = tmp_path / 'work_dirs/cnn/20260101_000000/vis_data'
    shown.mkdir(parents=True)
    rows = [
        {'loss': 1 / at, 'grad_norm': 1.0, 'amp_scale': 8.0 / at, 'amp_skipped': at // 2, 'iter': at, 'step': at}
        for at in range(1, 6)
    ]
    (shown / 'scalars.json').write_text(''.join(json.dumps(row) + '\n' for row in rows))
    counted = {'fc.weight': {'elements': 4, 'largest': 1.0, 'zeros': 1, 'nonfinite': 0, 'powers': {'-3': 3}}}
    ranges = {'iteration': 1, 'dtype': 'float16', 'loss_scale': 8.0, 'gradients': counted, 'weights': counted}
    (shown / 'amp_ranges.jsonl').write_text(json.dumps(ranges) + '\n')
    return 'work_dirs/cnn'


def test_plot(log: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(['plot', log]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == 'cnn: iterations 1 to 5, 2 steps skipped' and said[-1] == 'amp_plot.png'
    assert Path('amp_plot.png').read_bytes().startswith(b'\x89PNG')
    words = ['--out', 'a/b.svg', '--format', 'both', '--from', '2', '--to', '3', '--panels', 'scale', '--title', 'T']
    assert main(['plot', log, f'{log}/20260101_000000/vis_data/scalars.json', *words]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].endswith('iterations 2 to 3, 1 step skipped') and said[-2:] == ['a/b.png', 'a/b.svg']
    text = Path('a/b.svg').read_text()
    assert '>T</text>' in text and 'Loss scale' in text and 'Gradient norm' not in text


@pytest.mark.parametrize(('words', 'file'), [(['--ranges'], 'amp_ranges.png'), (['--layer', 'fc'], 'amp_layer.png')])
def test_ranges_are_drawn(words: list[str], file: str, log: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(['plot', log, *words]) == 0
    assert capsys.readouterr().out == f'{file}\n' and Path(file).read_bytes().startswith(b'\x89PNG')


@pytest.mark.parametrize(
    ('words', 'text'),
    [
        (['--out', 'a.jpg'], '.png or .svg'),
        (['--from', '9'], 'nothing to draw from iteration 9'),
        (['--layer', 'fd'], "layer='fd'"),
        (['work_dirs/cnn', '--ranges'], 'give one'),
        (['--ranges', '--layer', 'fc'], 'give one'),
        (['--ranges', '--panels', 'loss'], '--panels'),
    ],
)
def test_plot_refuses_and_draws_nothing(
    words: list[str], text: str, log: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(['plot', log, *words]) == 1
    said = capsys.readouterr()
    assert text in said.err and said.err.count('\n') == 1 and said.out == '' and not list(Path().glob('*.png'))
