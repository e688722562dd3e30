"""Pictures show the numbers of the log: lines, skipped steps and resumes are read back from the figures."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip('matplotlib')
import matplotlib
from matplotlib.axes import Axes

from amp_wrapper import AmpConfigError, cli, plot_runs

Points = list[tuple[float, float]]
NAN = math.nan


def write(file: Path, rows: Sequence[dict[str, Any]], end: str = '') -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(''.join(json.dumps(row) + '\n' for row in rows) + end)
    return file


def training(count: int = 6, first: int = 1) -> list[dict[str, Any]]:
    """Rows of a log: one step is skipped at iteration 1, two at iteration 3."""
    numbers = ('iter', 'step', 'loss', 'grad_norm', 'amp_scale', 'amp_skipped')
    places = range(first, first + count)
    return [dict(zip(numbers, (at, at, 2.0 / at, 1.0 + at, 2.0 ** (16 - at), 1 if at < 3 else 3))) for at in places]


def title(axes: Axes) -> str:
    return ''.join(axes.get_title(place) for place in ('left', 'center', 'right'))


def lines(axes: Axes, marks: bool = False) -> list[Points]:
    """The points of each line, or of the marks that no line connects."""
    there = [line for line in axes.lines if len(np.asarray(line.get_xdata()))]
    chosen = [line for line in there if (line.get_linestyle() == 'None') == marks]
    return [list(zip(np.asarray(line.get_xdata()).tolist(), np.asarray(line.get_ydata()).tolist())) for line in chosen]


# -- lines -----------------------------------------------------------------------------------------------------------


def test_lines_and_skipped_steps_are_those_of_the_log(tmp_path: Path) -> None:
    """Validation rows, which count epochs, are no part of it; a half-written line and a damaged one are left out."""
    rows = [*training(3), {'accuracy/top1': 92.0, 'loss': 7.0, 'step': 1}]
    later = ''.join(json.dumps({**row, 'loss_name': 'ce'}) + '\n' for row in training(3, 4))
    end = '\x00\xff garbage\n[1, 2]\n' + later + '{"loss": 1.0, "iter": 9'
    figure = plot_runs([write(tmp_path / 'cnn/scalars.json', rows, end)])
    assert [title(axes).split('  (')[0] for axes in figure.axes] == ['Loss', 'Gradient norm', 'Loss scale']
    assert lines(figure.axes[0]) == [[(at, 2.0 / at) for at in range(1, 7)]]
    assert lines(figure.axes[1]) == [[(at, 1.0 + at) for at in range(1, 7)]]
    scale = figure.axes[2]
    assert lines(scale) == [[(at, 2.0 ** (16 - at)) for at in range(1, 7)]]
    # it holds until the next row
    assert scale.lines[0].get_drawstyle() == 'steps-post'
    assert lines(scale, marks=True) == [[(1, 2.0**15), (3, 2.0**13)]]
    part = plot_runs([tmp_path / 'cnn/scalars.json'], first=2, last=4, title='some', panels=['scale'])
    (axes,) = part.axes
    assert lines(axes) == [[(at, 2.0 ** (16 - at)) for at in range(2, 5)]]
    assert lines(axes, marks=True) == [[(3, 2.0**13)]] and part.get_suptitle() == 'some'


def test_skips_are_where_the_count_grows(tmp_path: Path) -> None:
    rows: list[tuple[list[int], list[float], list[int]]] = [
        ([1, 2, 3, 4], [1, 1, 2, 2], [1, 3]),
        # the beginning is not there: nobody knows when the first 7 were
        ([1020, 1040, 1060], [7, 7, 9], [1060]),
        # a count that begins again
        ([1, 2, 3], [2, 0, 1], [1, 3]),
        ([1, 2, 3], [0, NAN, 1], [3]),
    ]
    for places, counts, skipped in rows:
        log = [{'iter': at, 'amp_scale': 8.0, 'amp_skipped': count} for at, count in zip(places, counts)]
        (axes,) = plot_runs([write(tmp_path / 'a.json', log)]).axes
        assert [[at for at, _ in points] for points in lines(axes, marks=True)] == [skipped]


def test_nonfinite_losses_have_marks_and_leave_gaps(tmp_path: Path) -> None:
    """null is what amp.monitor writes for NaN. A level without a loss scale has no panel for it."""
    losses = enumerate([2.0, None, -1.0, math.inf, 0.0], 1)
    log = write(tmp_path / 'mine.jsonl', [{'iteration': at, 'loss': loss, 'amp_skipped': 0} for at, loss in losses])
    (axes,) = plot_runs(log).axes
    (points,) = lines(axes)
    assert [at for at, value in points if not math.isfinite(value)] == [2, 4]
    assert [[at for at, _ in marks] for marks in lines(axes, marks=True)] == [[2, 4]]


def test_members_and_losses_have_lines_of_their_own(tmp_path: Path) -> None:
    rows = [
        dict(iter=1, loss_real=1.0, loss_fake=3.0, g_amp_scale=8.0, d_amp_scale=16.0, g_amp_skipped=0),
        dict(iter=2, loss_real=2.0, loss_fake=4.0, g_amp_scale=4.0, d_amp_scale=16.0, g_amp_skipped=1),
    ]
    figure = plot_runs([write(tmp_path / 'a.json', rows)])
    assert lines(figure.axes[0]) == [[(1, 1.0), (2, 2.0)], [(1, 3.0), (2, 4.0)]]
    assert lines(figure.axes[1]) == [[(1, 8.0), (2, 4.0)], [(1, 16.0), (2, 16.0)]]
    assert lines(figure.axes[1], marks=True) == [[(2, 4.0)]]
    assert {text.get_text() for text in figure.legends[0].get_texts()} == {'loss_real', 'loss_fake', 'g', 'd'}


def test_measured_numbers_and_skips_without_a_loss_scale(tmp_path: Path) -> None:
    """Lines of the monitor have a step alone, and may come late; the loss scale is 1 where the log has none."""
    rows = [dict(iter=1, loss=1.0), dict(iter=3, loss=1.0), dict(step=2, amp_grad_subnormal=0.25, amp_grad_peak=-3.0)]
    log = write(tmp_path / 'a.json', [*rows, dict(iter=4, loss=1.0, amp_skipped=1)])
    scale, subnormal, peak = plot_runs([log], panels=['peak', 'subnormal', 'scale']).axes
    assert lines(scale, marks=True) == [[(4, 1.0)]]
    assert lines(subnormal) == [[(2, 0.25)]] and lines(peak) == [[(2, -3.0)]]


def test_wide_losses_have_a_log_axis(tmp_path: Path) -> None:
    for losses, axis in (([0.9, 0.9, 1e-5, 1e-5], 'log'), ([2.0, 1.0], 'linear'), ([1.0, 1.0, 0.0, 0.0], 'linear')):
        log = write(tmp_path / 'a.json', [{'iter': at, 'loss': loss} for at, loss in enumerate(losses, 1)])
        assert plot_runs([log]).axes[0].get_yscale() == axis


# -- folders ---------------------------------------------------------------------------------------------------------


def run_folder(work_dir: Path, time: str, places: Sequence[int], scale: float) -> Path:
    """As mmengine leaves it."""
    rows = [{'iter': at, 'step': at, 'amp_scale': scale} for at in places]
    return write(work_dir / time / 'vis_data/scalars.json', rows)


def test_newest_training_of_a_work_dir_with_the_runs_that_it_resumed(tmp_path: Path) -> None:
    run_folder(tmp_path, '20260101_000000', range(2, 100, 2), 8.0)
    run_folder(tmp_path, '20260102_000000', range(10, 200, 10), 1.0)
    (tmp_path / '20260103_000000').mkdir()
    (axes,) = plot_runs([tmp_path]).axes
    assert {value for _, value in lines(axes)[0]} == {1.0}
    assert {value for _, value in lines(plot_runs([tmp_path / '20260101_000000']).axes[0])[0]} == {8.0}
    run_folder(tmp_path, '20260104_000000', [50], 2.0)
    run_folder(tmp_path, '20260105_000000', range(50, 130, 10), 2.0)
    (axes,) = plot_runs([tmp_path], panels=['scale']).axes
    drawn = lines(axes)
    # iterations that were run twice are those of the later run, which a run with a single row does not hide; a vertical line
    # is at the first row after the resume
    assert [point for points in drawn for point in points if point[1] > 1][:1] == [(50, 2.0)]
    assert (10, 1.0) in drawn[0] and drawn[0][-1] == (120, 2.0)
    assert {at for points in drawn[1:] for at, _ in points} == {50}
    assert len(lines(plot_runs([tmp_path], first=60).axes[0])) == 1


def test_file_that_goes_on_after_a_resume(tmp_path: Path) -> None:
    losses = [(1, 1.0), (2, 1.0), (3, 1.0), (4, 1.0), (3, 2.0), (4, 2.0), (5, 2.0)]
    write(tmp_path / 'amp_monitor.jsonl', [{'iteration': at, 'loss': loss} for at, loss in losses])
    (axes,) = plot_runs([tmp_path]).axes
    assert lines(axes)[0] == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0), (5, 2.0)]
    assert {at for at, _ in lines(axes)[1]} == {3}


# -- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with a work dir; a backend that nobody has, and no display, change nothing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('MPLBACKEND', 'module://no.such.backend')
    monkeypatch.delenv('DISPLAY', raising=False)
    monkeypatch.setitem(matplotlib.rcParams, 'font.size', 17.0)
    write(tmp_path / 'work_dirs/cnn/20260101_000000/vis_data/scalars.json', training())
    return tmp_path


def test_files_and_what_is_left_out(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """SVG has its words as text, and the same picture is the same file; settings of matplotlib stay as they are."""
    before = dict(matplotlib.rcParams)
    for words in ([], ['--out', 'new/a.svg'], ['--out', 'b.svg']):
        assert cli.main(['plot', 'work_dirs/cnn', *words]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == 'work_dirs/cnn: iterations 1 to 6, 3 steps skipped'
    assert 'left out: ' in said[1] and 'amp_plot.png' in said and said[-1] == 'b.svg'
    assert (here / 'amp_plot.png').read_bytes().startswith(b'\x89PNG')
    text = (here / 'new/a.svg').read_text()
    for part in ('Loss', 'Gradient norm', 'skipped step', 'iteration'):
        assert re.search(f'>[^<]*{part}[^<]*</t', text), part
    assert (here / 'b.svg').read_text() == text and dict(matplotlib.rcParams) == before
    options = '--out a/b.svg --from 2 --to 3 --panels scale --title T'.split()
    assert cli.main(['plot', 'work_dirs/cnn', *map(str, here.rglob('scalars.json')), *options]) == 0
    said = capsys.readouterr().out.splitlines()
    assert (
        said[0].startswith('work_dirs/cnn: ')
        and said[0].endswith('iterations 2 to 3, 2 steps skipped')
        and said[2:] == ['a/b.svg']
    )
    text = (here / 'a/b.svg').read_text()
    assert '>T</text>' in text and 'Loss scale' in text and 'Gradient norm' not in text


#: What follows ``plot``, and a part of the error.
REFUSED = {
    'work_dirs/cnn --from 5 --to 4': 'from=5 to=4',
    'work_dirs/cnn --from 70': 'nothing to draw from=70',
    'work_dirs/cnn --panels peak': "nothing to draw for panels=['peak']",
    'two': "'two' has no JSON lines",
    'empty': "'empty' has no JSON lines",
    'other.json': "'other.json' has no JSON lines",
    'log.csv': 'CSV and text logs are not read',
    'run.log': "'run.log' has no JSON lines",
    'work_dirs/cnn --out a.jpg': '.png or .svg',
}


def test_wrong_words_and_logs_without_numbers_draw_nothing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AmpConfigError, match=r'runs=\[\] is empty'):
        plot_runs([])
    with pytest.raises(AmpConfigError, match="panels='los' is none of loss, grad_norm"):
        plot_runs(['work_dirs/cnn'], panels=['los'])
    for name in 'ab':
        run_folder(Path('two') / name, '20260101_000000', [1, 2], 1.0)
    write(Path('other.json'), [{'iteration': 1, 'other': 2}, {'iter': None}])
    Path('empty').mkdir()
    Path('log.csv').write_text('iteration,loss\n1,0.5\n2,0.25\n')
    Path('run.log').write_text('INFO - Iter(train) [ 10/100]  lr: 1.0000e-02  loss: 0.5000\n')
    for words, text in REFUSED.items():
        assert cli.main(['plot', *words.split()]) == 1
        said = capsys.readouterr()
        assert text in said.err and said.err.count('\n') == 1 and said.out == '', words
    assert not [*here.glob('*.png'), *here.glob('*.svg')]
    assert cli.main(['plot', 'work_dirs/cnn', '--out', 'log.csv/c.svg']) == 1
    assert 'log.csv/c.svg' in capsys.readouterr().err
