"""``amp-wrapper plot``: what it writes, what it says, and its errors in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip('matplotlib')

from amp_wrapper import cli


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A work dir with one run, in the current folder."""
    monkeypatch.chdir(tmp_path)
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
    return Path('work_dirs/cnn')


def test_a_picture(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(['plot', str(log)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == 'cnn: iterations 1 to 5, 2 steps skipped'
    assert said[-1] == 'amp_plot.png'
    assert [line for line in said if 'amp_update_lost' in line] == [
        'left out: Updates that 16-bit weights without masters would lose (no amp_update_lost in the log)'
    ]
    assert not [line for line in said if 'grad_norm' in line]
    assert Path('amp_plot.png').read_bytes().startswith(b'\x89PNG')


def test_options(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        '--out',
        'a/b.svg',
        '--format',
        'both',
        '--from',
        '2',
        '--to',
        '3',
        '--panels',
        'scale',
        'small',
        '--title',
        'T',
    ]
    assert cli.main(['plot', str(log), f'{log}/20260101_000000/vis_data/scalars.json', *words]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].endswith('iterations 2 to 3, 1 step skipped')
    assert said[2].startswith('left out: Gradients near zero') and said[3:] == ['a/b.png', 'a/b.svg']
    text = Path('a/b.svg').read_text()
    assert '>T</text>' in text and 'Loss scale' in text and 'Gradient norm' not in text


@pytest.mark.parametrize('words, file', [(['--ranges'], 'amp_ranges.png'), (['--layer', 'fc'], 'amp_layer.png')])
def test_ranges(log: Path, words: list[str], file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(['plot', str(log), *words]) == 0
    assert capsys.readouterr().out == f'{file}\n'
    assert Path(file).read_bytes().startswith(b'\x89PNG')


@pytest.mark.parametrize(
    'words, status, text',
    [
        (['nothing'], 1, "there is no log 'nothing'"),
        (['work_dirs/cnn', '--out', 'a.jpg'], 1, 'written as .png or .svg'),
        (
            ['work_dirs/cnn', '--from', '9'],
            1,
            'nothing to draw from iteration 9 to the end. The logs: cnn: iterations 1 to 5',
        ),
        (['work_dirs/cnn', '--layer', 'fd'], 1, "layer='fd' is no weight or module of this log"),
        (['work_dirs/cnn', 'work_dirs/cnn', '--ranges'], 1, 'here are 2 logs: give one'),
        (['work_dirs/cnn', '--ranges', '--layer', 'fc'], 1, 'two pictures: give one of them'),
        (['work_dirs/cnn', '--ranges', '--panels', 'loss'], 1, '--panels chooses lines'),
        (['work_dirs/cnn', '--member', 'generator'], 1, '--member is for --ranges and --layer'),
        (['work_dirs/cnn', '--ranges', '--member', 'a'], 1, "there is no a_amp_ranges.jsonl beside 'work_dirs/cnn'"),
    ],
)
def test_errors_are_one_line(
    log: Path, words: list[str], status: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(['plot', *words]) == status
    said = capsys.readouterr()
    assert text in said.err and said.err.count('\n') == 1 and said.out == ''
    assert not list(Path().glob('*.png'))


def test_wrong_words(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(['plot', str(log), '--panels', 'los'])
    assert ended.value.code == 2 and "invalid choice: 'los'" in capsys.readouterr().err


def test_it_needs_no_display(log: Path) -> None:
    """And no backend: a display that there is not, and a backend that nobody has, change nothing."""
    environment = {key: value for key, value in os.environ.items() if key != 'DISPLAY'}
    root = str(Path(cli.__file__).parents[2])
    environment |= {'MPLBACKEND': 'module://no.such.backend', 'PYTHONPATH': root, 'OMP_NUM_THREADS': '1'}
    words = [sys.executable, '-m', 'amp_wrapper', 'plot', str(log), '--panels', 'loss']
    done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=120)
    assert (done.returncode, done.stderr) == (0, '') and done.stdout.endswith('amp_plot.png\n')
