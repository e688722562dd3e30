"""Logs of every kind give the numbers that are in them; what is damaged is left out; runs that were resumed are joined."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from amp_wrapper.diagnostics.log_files import Run, distinct_names, ranges_files, read_run, read_runs
from amp_wrapper.diagnostics.log_rows import NUMBERS, base
from amp_wrapper.errors import AmpUsageError

TEXT = """\
11/24 10:18:54 - mmengine - INFO - loss_scale: 5.0, lr: 3, iter: 99
11/24 10:18:55 - mmengine - INFO - Epoch(train)  [1][10/23]  lr: 1.0e-01  eta: 0:00:05  time: 1.8  grad_norm: 0.5  amp_scale: 65536.0000  amp_skipped: 0.0000  loss: 2.5000
11/24 10:18:56 - mmengine - INFO - Epoch(val) [1][2/2]    accuracy/top1: 97.7778  loss: 9.0000
11/24 10:18:57 - mmengine - INFO - Epoch(train) [12][ 3/23]  lr: 5.0e-02  grad_norm: nan  amp_scale: 32768.0000  amp_skipped: 2.0000  loss: 1.2500
11/24 10:18:58 - mmengine - INFO - Epoch(train) [12][20/2
"""  # noqa: E501


def rows_file(file: Path, rows: Sequence[dict[str, Any]], end: str = '') -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(''.join(json.dumps(row) + '\n' for row in rows) + end)
    return file


def values(run: Run, name: str) -> dict[int, float]:
    series = run.numbers[name]
    assert np.all(np.diff(series.iterations) > 0)
    return dict(zip(series.iterations.tolist(), series.values.tolist()))


def run_folder(work_dir: Path, time: str, places: Sequence[int], resumed: int | None = None, **more: Any) -> Path:
    """As mmengine leaves it: the place is also the loss."""
    folder = work_dir / time
    rows = [{'lr': 0.1, 'loss': float(place), 'epoch': 1, 'iter': place, 'step': place, **more} for place in places]
    rows_file(folder / 'vis_data/scalars.json', rows)
    if resumed is not None:
        (folder / f'{time}.log').write_text(f'INFO - resumed epoch: 3, iter: {resumed}\n')
    return folder


def test_a_folder_of_several_trainings_names_them(tmp_path: Path) -> None:
    run_folder(tmp_path / 'runs/a', '20261124_101854', [1, 2])
    run_folder(tmp_path / 'runs/b', '20261124_101854', [1, 2])
    (tmp_path / 'runs/c').mkdir()
    with pytest.raises(AmpUsageError, match=r'those of 2 trainings below it: give .*runs/a, .*runs/b\.') as caught:
        read_run(tmp_path / 'runs')
    assert 'runs/c' not in str(caught.value)
    with pytest.raises(AmpUsageError, match=r'those of 2 trainings below it: give .*runs/a, .*runs/b\.'):
        read_run(tmp_path)


# -- kinds of files --------------------------------------------------------------------------------------------------------


def test_scalars_of_mmengine(tmp_path: Path) -> None:
    """Validation rows, which count epochs, are no part of it; NaN is kept; a half-written line is left out."""
    rows: list[dict[str, Any]] = [
        {
            'lr': 0.1,
            'loss': 2.0,
            'time': 0.5,
            'amp_scale': 65536.0,
            'amp_skipped': 0.0,
            'epoch': 1,
            'iter': 20,
            'step': 20,
        },
        {'accuracy/top1': 92.0, 'loss': 7.0, 'step': 1},
        {'loss': math.nan, 'amp_scale': 32768.0, 'amp_skipped': 1.0, 'epoch': 2, 'iter': 40, 'step': 40},
    ]
    run = read_run(rows_file(tmp_path / 'scalars.json', rows, '{"loss": 1.0, "iter": 6'))
    assert set(run.numbers) == {'lr', 'loss', 'amp_scale', 'amp_skipped'}
    assert values(run, 'lr') == {20: 0.1}
    assert values(run, 'amp_scale') == {20: 65536.0, 40: 32768.0}
    loss = values(run, 'loss')
    assert loss[20] == 2.0 and math.isnan(loss[40]) and len(loss) == 2
    assert run.name == tmp_path.name


def test_lines_of_a_script(tmp_path: Path) -> None:
    """null is what amp.monitor writes for NaN; damaged lines in the middle cost themselves alone."""
    rows = [
        {'iteration': 1, 'train/loss': 2.0},
        {'iteration': 2, 'train/loss': None},
        {'iteration': 3, 'train/loss': True},
    ]
    file = rows_file(
        tmp_path / 'mine.jsonl', rows, '\x00\xff garbage\n[1, 2]\n7\n{"iteration": 9, "train/loss": "1.5"}\n'
    )
    run = read_run(file)
    loss = values(run, 'loss')
    assert list(loss) == [1, 2, 9] and loss[1] == 2.0 and math.isnan(loss[2]) and loss[9] == 1.5
    assert run.name == 'mine'


def test_one_number_a_line(tmp_path: Path) -> None:
    """A visualizer's ``add_scalar`` writes so, with the step alone."""
    rows = [{'loss': 2.0, 'step': 5}, {'grad_norm': 1.0, 'step': 5}, {'loss': 1.0, 'step': 10}]
    run = read_run(rows_file(tmp_path / 'scalars.json', rows))
    assert values(run, 'loss') == {5: 2.0, 10: 1.0}
    assert values(run, 'grad_norm') == {5: 1.0}


def test_csv(tmp_path: Path) -> None:
    file = tmp_path / 'mine.csv'
    file.write_text('iteration, loss, name, amp_scale\n10, 2.5, a, 8\n20, nan, b,\n30, 1.5, c, 4\n40, 1.')
    run = read_run(file)
    loss = values(run, 'loss')
    assert list(loss) == [10, 20, 30] and math.isnan(loss[20]) and loss[30] == 1.5
    assert values(run, 'amp_scale') == {10: 8.0, 30: 4.0}


def test_text_log(tmp_path: Path) -> None:
    file = tmp_path / '20260101_000000.log'
    file.write_text(TEXT)
    run = read_run(file)
    second = 11 * 23 + 3
    assert values(run, 'loss') == {10: 2.5, second: 1.25}
    assert values(run, 'lr') == {10: 0.1, second: 0.05}
    assert math.isnan(values(run, 'grad_norm')[second])
    assert run.skips[''].iterations.tolist() == [second] and run.skips[''].values.tolist() == [2.0]
    file.write_text('INFO - Iter(train) [ 20/1000]  lr: 1.0e-01  loss: 3.0000\n')
    assert values(read_run(file), 'loss') == {20: 3.0}


def test_members_and_losses(tmp_path: Path) -> None:
    row = {
        'iter': 1,
        'loss_real': 1.0,
        'generator_amp_scale': 8.0,
        'discriminator_amp_scale': 4.0,
        'generator_grad_norm': 0.5,
        'generator.lr': 0.1,
        'generator_amp_skipped': 1.0,
    }
    run = read_run(rows_file(tmp_path / 'a.json', [row]))
    assert set(run.members('amp_scale')) == {'generator', 'discriminator'}
    assert set(run.members('grad_norm')) == set(run.members('lr')) == set(run.skips) == {'generator'}
    assert set(run.losses()) == {'loss_real'}
    whole = read_run(rows_file(tmp_path / 'b.json', [{**row, 'loss': 3.0}]))
    assert set(whole.losses()) == {'loss'} and 'loss_real' not in whole.numbers


def test_base() -> None:
    assert {base(name) for name in NUMBERS} == set(NUMBERS)
    assert base('generator_amp_grad_tiny') == 'amp_grad_tiny'
    assert base('loss_a') == base('my_loss') == base('colour') == ''


# -- skips -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    'places, counts, skipped',
    [
        ([1, 2, 3, 4], [1, 1, 2, 2], {1: 1, 3: 1}),
        ([20, 40, 60], [3, 3, 8], {20: 3, 60: 5}),
        # the beginning is not there: nobody knows when the first 7 were
        ([1020, 1040, 1060], [7, 7, 9], {1060: 2}),
        # a count that begins again
        ([1, 2, 3], [2, 0, 1], {1: 2, 3: 1}),
        ([1, 2, 3], [0, math.nan, 1], {3: 1}),
    ],
)
def test_skips_are_where_the_count_grows(
    tmp_path: Path, places: list[int], counts: list[float], skipped: dict[int, int]
) -> None:
    rows = [{'iter': place, 'amp_skipped': count} for place, count in zip(places, counts)]
    skips = read_run(rows_file(tmp_path / 'a.json', rows)).skips['']
    assert dict(zip(skips.iterations.tolist(), skips.values.tolist())) == skipped


def test_a_part_keeps_its_skips(tmp_path: Path) -> None:
    rows = [{'iter': place, 'amp_skipped': place // 2, 'lr': 1.0} for place in range(1, 9)]
    part = read_run(rows_file(tmp_path / 'a.json', rows)).between(4, 7)
    assert part.skips[''].iterations.tolist() == [4, 6] and part.skips[''].values.tolist() == [1.0, 1.0]
    assert part.numbers['lr'].iterations.tolist() == [4, 5, 6, 7]


# -- folders ---------------------------------------------------------------------------------------------------------------


def test_the_newest_training_of_a_work_dir(tmp_path: Path) -> None:
    work_dir = tmp_path / 'cnn'
    run_folder(work_dir, '20260101_000000', range(10, 100, 10))
    newest = run_folder(work_dir, '20260102_000000', range(10, 60, 10))
    (work_dir / '20260103_000000').mkdir()
    (work_dir / 'amp_diagnosis').mkdir()
    run = read_run(work_dir)
    assert run.name == 'cnn' and run.resumed == ()
    assert run.files == (newest / 'vis_data/scalars.json',)
    assert list(values(run, 'loss')) == [10, 20, 30, 40, 50]
    assert list(values(read_run(work_dir / '20260101_000000'), 'loss')) == list(range(10, 100, 10))


@pytest.mark.parametrize('said', [True, False])
def test_a_resumed_training_is_joined(tmp_path: Path, said: bool) -> None:
    """By the place that its text log tells, and without one by its first row."""
    run_folder(tmp_path, '20260101_000000', range(10, 60, 10))
    run_folder(tmp_path, '20260102_000000', range(10, 100, 10), amp_scale=1.0)
    run_folder(tmp_path, '20260103_000000', range(60, 130, 10), 45 if said else None, amp_scale=2.0)
    run_folder(tmp_path, '20260104_000000', range(110, 150, 10), 100 if said else None, amp_scale=4.0)
    run = read_run(tmp_path)
    scale = values(run, 'amp_scale')
    missing = {50} if said else set()
    assert list(scale) == [place for place in range(10, 150, 10) if place not in missing]
    assert (scale[40], scale[60], scale[100], scale[110]) == (1.0, 2.0, 2.0, 4.0)
    assert run.resumed == ((45, 100) if said else (60, 110))
    assert len(run.files) == 3
    assert run.between(50, 105).resumed == ((100,) if said else (60,))


def test_a_file_that_goes_on_after_a_resume(tmp_path: Path) -> None:
    rows = [{'iteration': place, 'loss': 1.0} for place in (1, 2, 3, 4)]
    rows += [{'iteration': place, 'loss': 2.0} for place in (3, 4, 5)]
    run = read_run(rows_file(tmp_path / 'amp_monitor.jsonl', rows).parent)
    assert values(run, 'loss') == {1: 1.0, 2: 1.0, 3: 2.0, 4: 2.0, 5: 2.0}
    assert run.resumed == (3,)


def test_a_run_without_scalars_has_its_text(tmp_path: Path) -> None:
    folder = tmp_path / '20260101_000000'
    rows_file(folder / 'vis_data/scalars.json', [{'accuracy/top1': 1.0, 'step': 1}])
    (folder / '20260101_000000_host_device1_rank1.log').write_text(TEXT.replace('2.5000', '7.0000'))
    (folder / '20260101_000000.log').write_text(TEXT)
    assert values(read_run(tmp_path), 'loss')[10] == 2.5


def test_files_of_ranges(tmp_path: Path) -> None:
    first = run_folder(tmp_path, '20260101_000000', range(10, 100, 10))
    second = run_folder(tmp_path, '20260102_000000', range(50, 100, 10), 40)
    files = [rows_file(folder / 'vis_data/amp_ranges.jsonl', []) for folder in (first, second)]
    assert ranges_files(tmp_path) == files
    assert ranges_files(first) == ranges_files(files[0]) == files[:1]
    member = files[1].rename(files[1].with_name('generator_amp_ranges.jsonl'))
    assert ranges_files(second, 'generator') == [member]
    with pytest.raises(AmpUsageError, match=r'generator_amp_ranges\.jsonl: give the member'):
        ranges_files(second)


# -- names and errors ------------------------------------------------------------------------------------------------------


def test_names_differ(tmp_path: Path) -> None:
    paths = [
        run_folder(tmp_path / where, f'2026010{day}_000000', [1, 2]) for where in ('a/cnn', 'b/cnn') for day in (1, 2)
    ]
    assert [run.name for run in read_runs([tmp_path / 'a/cnn', tmp_path / 'b/cnn'])] == ['a/cnn', 'b/cnn']
    # a time alone says little, but tells runs of one work dir apart
    assert [run.name for run in read_runs(paths[:2])] == ['cnn/20260101_000000', 'cnn/20260102_000000']
    assert [run.name for run in read_runs([paths[0], tmp_path / 'b/cnn'])] == ['cnn/20260101_000000', 'b/cnn']
    assert len({run.name for run in read_runs([paths[0], paths[0]])}) == 2
    assert distinct_names([['x'], ['y'], ['x']]) == ['x (1)', 'y', 'x (2)']
    # one log twice: longer names would not tell them apart
    assert distinct_names([['x', 'a/x', 'b/a/x'], ['x', 'a/x', 'b/a/x']]) == ['x (1)', 'x (2)']
    assert distinct_names([['x', 'a/x'], ['x', 'a/x'], ['x', 'b/x']]) == ['a/x (1)', 'a/x (2)', 'b/x']


@pytest.mark.parametrize(
    'content',
    ['', 'no log\n', '{"iteration": 1, "other": 2}\n', '{"loss": 2}\n', 'iteration,other\n1,2\n', '{"iter": null}\n{'],
)
def test_a_file_without_the_numbers(tmp_path: Path, content: str) -> None:
    file = tmp_path / 'some.json'
    file.write_text(content)
    with pytest.raises(AmpUsageError) as raised:
        read_run(file)
    text = str(raised.value)
    assert '\n' not in text and 'some.json' in text and all(number in text for number in NUMBERS)


def test_a_folder_without_logs(tmp_path: Path) -> None:
    (tmp_path / 'empty').mkdir()
    with pytest.raises(AmpUsageError, match='has none of the numbers'):
        read_run(tmp_path / 'empty')
    with pytest.raises(AmpUsageError, match=r"there is no log .*'empty'"):
        read_run(tmp_path / 'emty')
