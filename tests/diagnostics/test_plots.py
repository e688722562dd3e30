"""Pictures show the numbers of the log: lines, skipped steps, resumes, heat maps are read back from the figures."""

from __future__ import annotations

import builtins
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip('matplotlib')
import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from amp_wrapper.diagnostics import plot_style
from amp_wrapper.diagnostics.log_files import Run
from amp_wrapper.diagnostics.panels import PANELS
from amp_wrapper.diagnostics.plots import plot_runs
from amp_wrapper.diagnostics.range_files import Counts, read_ranges
from amp_wrapper.diagnostics.range_plots import MOST_COLUMNS, grouped, plot_layer, plot_ranges
from amp_wrapper.diagnostics.run_choice import missing
from amp_wrapper.diagnostics.series import Series, smoothed, thinned
from amp_wrapper.errors import AmpConfigError, AmpUsageError

NAN = math.nan


def series(places: list[int], numbers: list[float]) -> Series:
    return Series(np.array(places, dtype=np.int64), np.array(numbers, dtype=np.float64))


def training(name: str = 'cnn', count: int = 6, **more: Any) -> Run:
    places = list(range(1, count + 1))
    numbers = {
        'loss': series(places, [2.0 / place for place in places]),
        'grad_norm': series(places[1:], [1.0 + place for place in places[1:]]),
        'amp_scale': series(places, [2.0 ** (16 - place) for place in places]),
        'amp_skipped': series(places, [1.0, 1.0, *[3.0] * (count - 2)]),
        'amp_grad_underflow': series(places, [0.01 * place for place in places]),
    }
    return Run(name, numbers, {'': series([1, 3], [1.0, 2.0])}, **more)


def panel(figure: Figure, *numbers: str) -> Axes:
    (found,) = (axes for axes in figure.axes if axes.get_gid() == 'panel_' + '_'.join(numbers))
    return found


def drawn(axes: Axes, gid: str) -> list[dict[float, float]]:
    """The points of each line with a name."""
    return [
        dict(zip(np.asarray(line.get_xdata()).tolist(), np.asarray(line.get_ydata()).tolist()))
        for line in axes.lines
        if line.get_gid() == gid
    ]


# -- lines -----------------------------------------------------------------------------------------------------------------


def test_lines_are_those_of_the_log() -> None:
    run = training()
    figure = plot_runs([run])
    titles = [axes.get_title('left') for axes in figure.axes]
    assert [title.split('  (')[0] for title in titles] == [
        PANELS[name].title for name in ('loss', 'grad_norm', 'scale', 'small')
    ]
    for name, key in (('loss', 'loss'), ('grad_norm', 'grad_norm'), ('amp_grad_underflow', 'amp_grad_underflow')):
        expected = run.numbers[key]
        assert drawn(panel(figure, name), name) == [dict(zip(expected.iterations.tolist(), expected.values.tolist()))]
    scale = panel(figure, 'amp_scale', 'amp_skipped')
    assert drawn(scale, 'amp_scale') == [{place: 2.0 ** (16 - place) for place in range(1, 7)}]
    assert [line.get_drawstyle() for line in scale.lines if line.get_gid() == 'amp_scale'] == ['steps-post']
    assert scale.get_yscale() == 'log' and panel(figure, 'grad_norm').get_yscale() == 'log'
    assert panel(figure, 'loss').get_yscale() == 'linear'
    assert figure.get_suptitle() == 'cnn' and figure.legends == []


def test_skips_are_marked_at_their_iterations_and_heights() -> None:
    scale = panel(plot_runs([training()]), 'amp_scale', 'amp_skipped')
    assert drawn(scale, 'skips') == [{1: 2.0**15, 3: 2.0**13}]
    # how many, where there are several
    assert [text.get_text() for text in scale.texts] == ['2']
    part = panel(plot_runs([training()], first=2), 'amp_scale', 'amp_skipped')
    assert drawn(part, 'skips') == [{3: 2.0**13}]


def test_skips_without_a_scale() -> None:
    run = training()
    del run.numbers['amp_scale']  # type: ignore[attr-defined]
    axes = panel(plot_runs([run]), 'amp_skipped')
    assert [list(points) for points in drawn(axes, 'skips')] == [[1, 3]]
    assert axes.get_title('left').startswith('Skipped steps')


def test_there_is_no_panel_for_a_scale_that_is_always_1() -> None:
    """As at O5, where the log has a count of skipped steps, and no step was skipped."""
    whole = training()
    run = Run('O5', {name: line for name, line in whole.numbers.items() if name != 'amp_scale'}, {'': series([], [])})
    ids = [axes.get_gid() for axes in plot_runs([run]).axes]
    assert 'panel_loss' in ids and not any('amp_skipped' in (gid or '') for gid in ids)
    # unless it is all that was asked for
    for panels in (['scale'], ['scale', 'lost'], ['scale', 'scale']):
        assert len(plot_runs([run], panels=panels).axes) == 1, panels
    only = Run('O5', {'amp_skipped': series([1, 2], [0.0, 0.0])}, {'': series([], [])})
    assert len(plot_runs([only]).axes) == 1


def test_nonfinite_numbers_have_marks_and_leave_gaps() -> None:
    run = training()
    run.numbers['loss'].values[[1, 3]] = NAN, math.inf
    axes = panel(plot_runs([run]), 'loss')
    (points,) = drawn(axes, 'loss')
    assert [place for place, value in points.items() if math.isnan(value)] == [2, 4]
    assert [list(marks) for marks in drawn(axes, 'nonfinite')] == [[2, 4]]
    assert 'NaN' in axes.get_title('left')


def test_resumes_are_marked_in_each_panel() -> None:
    figure = plot_runs([training(resumed=(4,))])
    for axes in figure.axes:
        assert [list(points) for points in drawn(axes, 'resumed')] == [[4]]


def test_limits_of_iterations() -> None:
    figure = plot_runs([training()], first=3, last=5, title='some')
    assert drawn(panel(figure, 'loss'), 'loss') == [{3: 2 / 3, 4: 0.5, 5: 0.4}]
    assert figure.get_suptitle() == 'some'


def test_several_runs_differ_without_colours() -> None:
    runs = [training('a'), training('b'), training('a')]
    runs[1].numbers.pop('amp_scale')  # type: ignore[attr-defined]
    figure = plot_runs(runs)
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ['a (1)', 'b', 'a (2)']
    lines = [line for line in panel(figure, 'loss').lines if line.get_gid() == 'loss']
    looks = {(line.get_color(), str(line.get_linestyle()), str(line._dash_pattern)) for line in lines}  # type: ignore[attr-defined]
    assert len(lines) == 3 and len({look[1:] for look in looks}) == 3 and len({look[0] for look in looks}) == 3
    assert len(drawn(panel(figure, 'amp_scale', 'amp_skipped'), 'amp_scale')) == 2


def test_members_and_losses_have_lines_of_their_own() -> None:
    numbers = {
        'loss_real': series([1, 2], [1.0, 2.0]),
        'loss_fake': series([1, 2], [3.0, 4.0]),
        'generator_amp_scale': series([1, 2], [8.0, 4.0]),
        'discriminator_amp_scale': series([1, 2], [16.0, 16.0]),
        'generator_amp_skipped': series([1, 2], [0.0, 1.0]),
    }
    figure = plot_runs([Run('gan', numbers, {'generator': series([2], [1.0])})])
    (legend,) = figure.legends
    names = ['loss_real', 'loss_fake', 'generator', 'discriminator']
    assert [text.get_text() for text in legend.get_texts()] == names
    assert drawn(panel(figure, 'loss'), 'loss') == [{1: 1.0, 2: 2.0}, {1: 3.0, 2: 4.0}]
    scale = panel(figure, 'amp_scale', 'amp_skipped')
    assert drawn(scale, 'amp_scale') == [{1: 8.0, 2: 4.0}, {1: 16.0, 2: 16.0}]
    assert drawn(scale, 'skips') == [{2: 4.0}]
    (mark,) = (line for line in scale.lines if line.get_gid() == 'skips')
    assert mark.get_color() == plot_style.COLOURS[2]


def test_what_is_missing_is_told() -> None:
    plain = Run('o0', {'loss': series([1], [1.0])}, {})
    assert [axes.get_gid() for axes in plot_runs([plain]).axes] == ['panel_loss']
    assert missing([plain], ['loss', 'scale', 'small']) == {
        'scale': ['amp_scale', 'amp_skipped'],
        'small': ['amp_grad_underflow', 'amp_grad_tiny'],
    }
    assert missing([plain, training()], ['small']) == {'small': ['amp_grad_tiny']}


@pytest.mark.parametrize(
    'arguments, error, text',
    [
        ({'runs': []}, AmpConfigError, 'runs=[] is empty'),
        ({'panels': ['los']}, AmpConfigError, "panels='los' is none of loss, grad_norm"),
        ({'first': 5, 'last': 4}, AmpConfigError, 'from=5 is after to=4'),
        (
            {'first': 70},
            AmpUsageError,
            'nothing to draw from iteration 70 to the end. The logs: cnn: iterations 1 to 6',
        ),
        (
            {'panels': ['lost']},
            AmpUsageError,
            'nothing to draw: cnn has none of amp_update_lost, but amp_grad_underflow',
        ),
    ],
)
def test_wrong_arguments(arguments: Mapping[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        plot_runs(**{'runs': [training()], **arguments})


def test_long_trainings_keep_their_extremes() -> None:
    values = np.sin(np.arange(100_000) / 3)
    values[[77_777, 12_345]] = 50.0, -50.0
    long = Series(np.arange(100_000), values)
    short = thinned(long)
    assert len(short.values) <= 4000 and np.all(np.diff(short.iterations) > 0)
    assert {0, 99_999, 77_777, 12_345} <= set(short.iterations.tolist())
    assert np.array_equal(values[short.iterations], short.values)
    same = series([1, 2], [1.0, 2.0])
    assert thinned(same) is same
    run = Run(
        'long', {'loss': long, 'amp_scale': Series(long.iterations, np.where(long.iterations < 60_001, 8.0, 4.0))}, {}
    )
    figure = plot_runs([run])
    assert drawn(panel(figure, 'loss'), 'loss')[0][77_777] == 50.0
    (scale,) = drawn(panel(figure, 'amp_scale'), 'amp_scale')
    assert scale == {0: 8.0, 60_001: 4.0, 99_999: 4.0}


def test_smoothing_is_a_mean_around_each_point() -> None:
    assert smoothed(series(list(range(19)), [1.0] * 19)) is None
    numbers = [float(place % 2) for place in range(120)]
    numbers[50] = NAN
    smooth = smoothed(series(list(range(120)), numbers))
    assert smooth is not None
    assert smooth.values[10] == pytest.approx(np.mean(numbers[8:13]))
    assert smooth.values[0] == pytest.approx(np.mean(numbers[:3]))
    assert math.isnan(smooth.values[50])
    assert smooth.values[51] == pytest.approx(np.nanmean(numbers[49:54]))


# -- ranges per layer ------------------------------------------------------------------------------------------------------


def counts(powers: dict[int, int], zeros: int = 0, nonfinite: int = 0) -> dict[str, Any]:
    return {
        'elements': sum(powers.values()) + zeros + nonfinite,
        'largest': 1.0,
        'zeros': zeros,
        'nonfinite': nonfinite,
        'powers': {str(power): count for power, count in powers.items()},
    }


@pytest.fixture
def ranges(tmp_path: Path) -> Path:
    """Two layers at three steps, measured without the loss scale; the last one is measured again after a resume."""
    weights = {'body.weight': counts({-5: 4}), 'head.weight': counts({-3: 4})}
    steps = [
        {'body.weight': counts({-20: 1, -18: 5, -10: 2}, zeros=2), 'head.weight': counts({-16: 1})},
        {'body.weight': counts({}, nonfinite=4), 'head.weight': counts({-12: 3}, nonfinite=1)},
        {'body.weight': counts({0: 1}), 'head.weight': counts({0: 1})},
        {'body.weight': counts({-19: 3}), 'head.weight': counts({}, zeros=7)},
    ]
    lines = [
        json.dumps(
            {
                'iteration': at,
                'dtype': 'float16',
                'loss_scale': 1024.0,
                'without_scale': True,
                'gradients': step,
                'weights': weights,
            }
        )
        for at, step in zip((1, 11, 21, 21), steps)
    ]
    file = tmp_path / 'amp_ranges.jsonl'
    file.write_text('\n'.join([*lines, 'damaged', '{"iteration": 31}', lines[0][:-30]]))
    return file


def cells(figure: Figure, kind: str) -> np.ndarray[Any, Any]:
    (mesh,) = (each for axes in figure.axes for each in axes.collections if each.get_gid() == kind)
    return np.ma.filled(mesh.get_array().astype(float), NAN)  # type: ignore[union-attr]


def test_one_measurement_has_one_iteration_on_its_axis(ranges: Path) -> None:
    axis = plot_ranges(ranges, last=1).axes[1].xaxis
    axis.figure.draw_without_rendering()
    low, high = axis.get_view_interval()
    assert [label.get_text() for label in axis.get_ticklabels() if low <= label.get_position()[0] <= high] == ['1']


def test_the_heat_map_has_the_medians(ranges: Path) -> None:
    figure = plot_ranges(ranges)
    expected = [[-8, NAN, -9], [-6, -2, NAN]]
    assert np.array_equal(cells(figure, 'gradients'), expected, equal_nan=True)
    assert np.array_equal(cells(figure, 'weights'), [[-5] * 3, [-3] * 3])
    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ['body.weight', 'head.weight']
    crosses = [(x, y) for line in axes.lines if line.get_gid() == 'nonfinite' for x, y in line.get_xydata()]  # type: ignore[union-attr]
    assert crosses == [(11.0, 0.0), (11.0, 1.0)]
    bar = figure.axes[2]
    assert [line.get_ydata()[0] for line in bar.lines if line.get_gid() == 'limit'] == [-14]  # type: ignore[index]
    assert any('fewer digits' in label.get_text() for label in bar.get_yticklabels())


def test_the_median_of_counts() -> None:
    """Between two powers of two it is the lower one; zeros and infinities do not count."""
    assert Counts(9, 3, 2, {-3: 2, -5: 2}).median() == -5
    assert Counts(9, 0, 0, {-3: 3, -5: 2}).median() == -3
    assert Counts(5, 3, 2, {}).median() is None


def test_gradients_that_have_the_scale_are_taken_as_they_are(ranges: Path) -> None:
    ranges.write_text(ranges.read_text().replace('"without_scale": true', '"without_scale": false'))
    assert cells(plot_ranges(ranges, last=1), 'gradients').tolist() == [[-18], [-16]]
    (step,) = read_ranges(ranges)[:1]
    assert (step.iteration, step.loss_scale, step.gradients['body.weight'].zeros) == (1, 1024.0, 2)


def test_one_layer_has_its_shares(ranges: Path) -> None:
    figure = plot_layer(ranges, 'body.weight')
    axes = figure.axes[0]
    assert axes.get_gid() is None and figure.get_suptitle() == 'body.weight'
    shares = cells(figure, 'gradients')
    low = float(axes.get_ylim()[0]) + 2
    rows = {power: int(power - low) + 2 for power in (-10, -9, -8, 0)}
    assert shares[0].tolist()[0] == 0.2
    assert shares[rows[-8]].tolist()[0] == 0.5 and shares[rows[0]].tolist()[0] == 0.2
    assert shares[rows[-9]].tolist()[2] == 1.0
    assert shares[-1].tolist()[1] == 1.0 and np.isnan(shares[-1].tolist()[0])
    assert -14 in [line.get_ydata()[0] for line in axes.lines if line.get_gid() == 'limit']  # type: ignore[index]


def test_a_module_is_its_weights_together(ranges: Path) -> None:
    ranges.write_text(ranges.read_text().replace('head.weight', 'body.bias'))
    # 4 and 4 elements at different powers
    assert np.nanmax(cells(plot_layer(ranges, 'body'), 'weights')) == 0.5
    with pytest.raises(AmpConfigError, match=r"layer='bod' is no weight or module .*It has body\.weight, body\.bias"):
        plot_layer(ranges, 'bod')


def test_many_layers_are_grouped_by_modules() -> None:
    names = [f'net.{stage}.{block}.{kind}' for stage in 'abc' for block in range(10) for kind in ('weight', 'bias')]
    groups = grouped([*names, 'head.weight'])
    assert len(groups) == 31 and next(iter(groups)) == 'net.a.0 (2)' and list(groups)[-1] == 'head.weight'
    assert [name for group in groups.values() for name in group] == [*names, 'head.weight']
    assert grouped(names[:3]) == {name: [name] for name in names[:3]}
    flat = grouped([f'w{number}' for number in range(90)])
    assert len(flat) == 40 and sum(map(len, flat.values())) == 90


def test_many_steps_share_columns(ranges: Path) -> None:
    (first, *_) = read_ranges(ranges)
    steps = [type(first)(at, 'bfloat16', 1.0, first.gradients, first.weights) for at in range(1000)]
    assert cells(plot_ranges(steps), 'gradients').shape == (2, MOST_COLUMNS)
    # its limits are far away
    bars = plot_ranges(steps).axes[2:]
    assert len(bars) == 2 and not any(line.get_gid() == 'limit' for bar in bars for line in bar.lines)


def test_nothing_to_draw_of_ranges(ranges: Path, tmp_path: Path) -> None:
    with pytest.raises(AmpUsageError, match='ranges of iterations 1 to 21'):
        plot_ranges(ranges, first=100)
    with pytest.raises(AmpConfigError, match='from=2 is after to=1'):
        plot_ranges(ranges, first=2, last=1)
    ranges.write_text('{"iteration": 1}\n')
    with pytest.raises(AmpUsageError, match='has no line with "iteration", "gradients"'):
        plot_ranges(ranges)


# -- files -----------------------------------------------------------------------------------------------------------------


def test_files(tmp_path: Path) -> None:
    """SVG has its words as text, PNG twice the usual number of dots; the same picture is the same file."""
    before = dict(matplotlib.rcParams)
    files = [tmp_path / 'new/a.png', tmp_path / 'new/a.svg', tmp_path / 'b.svg']
    plot_style.save(plot_runs([training('a run')]), files[1::-1])
    plot_style.save(plot_runs([training('a run')]), files[2:])
    text = files[1].read_text()
    for words in ('a run', 'Loss', 'Gradient norm', 'skipped step', 'iteration'):
        assert re.search(f'>[^<]*{words}[^<]*</t', text), words
    assert files[2].read_text() == text
    with Image.open(files[0]) as image:
        assert image.width == 1600
    assert sorted(path.name for path in tmp_path.rglob('*') if path.is_file()) == ['a.png', 'a.svg', 'b.svg']
    assert dict(matplotlib.rcParams) == before


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / 'taken').write_text('')
    with pytest.raises(AmpUsageError, match='cannot be written'):
        plot_style.save(plot_runs([training()]), [tmp_path / 'taken/a.png'])


@pytest.mark.parametrize(
    'out, form, files',
    [
        (None, None, ['amp_plot.png']),
        (None, 'svg', ['amp_plot.svg']),
        ('a.svg', None, ['a.svg']),
        ('a.svg', 'both', ['a.png', 'a.svg']),
        ('v1', None, ['v1.png']),
        ('run.2/v1', 'both', ['run.2/v1.png', 'run.2/v1.svg']),
    ],
)
def test_names_of_files(out: str | None, form: str | None, files: list[str]) -> None:
    assert list(map(str, plot_style.chosen_files(out, form, 'amp_plot'))) == files


@pytest.mark.parametrize('out, form, text', [('a.jpg', None, '.png or .svg'), ('a.png', 'svg', 'does not end in .svg')])
def test_wrong_names_of_files(out: str, form: str | None, text: str) -> None:
    with pytest.raises(AmpConfigError, match=re.escape(text)):
        plot_style.chosen_files(out, form, 'amp_plot')


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def absent(name: str, *more: Any) -> Any:
        if name.partition('.')[0] == 'matplotlib':
            raise ModuleNotFoundError(f'No module named {name!r}', name=name)
        return original(name, *more)

    monkeypatch.setattr(builtins, '__import__', absent)
    with pytest.raises(AmpUsageError, match='pip install matplotlib'):
        plot_runs([training()])
