"""Files that earlier versions of this package have saved, under ``tests/data/saved``: they are read, and trainings go on from
them bit for bit. ``tests/data/make_saved.py`` wrote them and says how to add some.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import differences

DATA = next(folder / 'data' for folder in Path(__file__).parents if (folder / 'data' / 'saved').is_dir())
sys.path.insert(0, str(DATA))
import saved_runs
from saved_runs import SCRIPTS, WRAPPED, Script, Wrapped, nearest, read

#: Of torch, with which all files were written: another one may save other settings of its optimizers.
WRITER = '2.13.0'
other_torch = pytest.mark.skipif(
    not torch.__version__.startswith(WRITER), reason=f'the files were written with torch {WRITER}'
)


def files(kind: str) -> dict[str, bytes]:
    return saved_runs.unpack(DATA / 'saved' / f'{kind}.tar.xz')


def names(kind: str) -> list[str]:
    return list(json.loads(files(kind)['versions.json']))


def kept(kind: str, name: str) -> tuple[Any, Any]:
    """What was saved, and what the uninterrupted run became, both read anew: torch takes tensors over as they are."""
    return read(files(kind)[f'{name}.pth']), read(files(kind)[f'{name}.after.pth'])


def go_on(kind: type[Script] | type[Wrapped], case: Any, saved: Any, after: Any, early: bool) -> None:
    training = kind(case, read(saved_runs.written(saved)), early)
    # what is loaded is there, and is what is saved again
    if not early or kind is Script:
        assert differences(after['then'], read(saved_runs.written(training.state())), strict=True) == []
    assert differences(saved, read(saved_runs.written(training.save())), strict=True) == []
    training.train(case.first, case.first + case.then)
    end = read(saved_runs.written({'then': after['then'], 'saved': training.save(), 'state': training.state()}))
    if not case.exact:
        end = nearest(end, after)
    assert differences(after, end, strict=True) == []


def both_ways(cases: dict[str, Any], kind: str) -> list[Any]:
    """Loaded late, and early; a model that was 16-bit before it is initialised would round what is loaded early."""
    pairs = [(name, early) for name in names(kind) for early in (False, True)]
    return [
        pytest.param(name, early, id=f'{name}-{"early" if early else "late"}')
        for name, early in pairs
        if not early or cases[name].sixteen is None
    ]


@pytest.mark.parametrize(('name', 'early'), both_ways(SCRIPTS, 'scripts'))
def test_scripts_go_on(name: str, early: bool) -> None:
    go_on(Script, SCRIPTS[name], *kept('scripts', name), early)


@pytest.mark.parametrize(('name', 'early'), both_ways(WRAPPED, 'wrapped'))
def test_wrappers_go_on(name: str, early: bool) -> None:
    pytest.importorskip('mmengine')
    go_on(Wrapped, WRAPPED[name], *kept('wrapped', name), early)


@pytest.mark.parametrize('name', names('runners'))
def test_runners_go_on(name: str, tmp_path: Path) -> None:
    import saved_runners

    again, end = saved_runners.resume(tmp_path, saved_runners.RUNNERS[name], files('runners')[f'{name}.pth'])
    saved, after = kept('runners', name)
    there, here = (saved_runners.comparable(file, at_once=True) for file in (saved, read(again)))
    assert differences(there, here, strict=True) == []
    assert differences(*(saved_runners.comparable(file) for file in (after, read(end))), strict=True) == []


# -- what is written now is what was written then --------------------------------------------------------------------


@other_torch
@pytest.mark.parametrize('name', names('scripts'))
def test_scripts_save_the_same(name: str) -> None:
    case = SCRIPTS[name]
    same(case, kept('scripts', name), saved_runs.run(Script, case))


@other_torch
@pytest.mark.parametrize('name', names('wrapped'))
def test_wrappers_save_the_same(name: str) -> None:
    pytest.importorskip('mmengine')
    case = WRAPPED[name]
    same(case, kept('wrapped', name), saved_runs.run(Wrapped, case))


def same(case: Any, before: tuple[Any, Any], now: tuple[bytes, bytes]) -> None:
    for there, file in zip(before, now):
        here = read(file)
        assert differences(there, here if case.exact else nearest(here, there), strict=True) == []


@other_torch
@pytest.mark.parametrize('name', names('runners'))
def test_runners_save_the_same(name: str, tmp_path: Path) -> None:
    import saved_runners

    now = saved_runners.run(tmp_path, saved_runners.RUNNERS[name])
    for there, file in zip(kept('runners', name), now):
        assert differences(*(saved_runners.comparable(one) for one in (there, read(file))), strict=True) == []


# -- the files themselves --------------------------------------------------------------------------------------------


def paths(node: Any, path: str = '') -> Iterator[str]:
    """Where something lies in a file, with ``*`` for any number."""
    yield path
    if isinstance(node, dict):
        for key, value in node.items():
            yield from paths(value, f'{path}/{key if isinstance(key, str) else "*"}')
    elif isinstance(node, (list, tuple)):
        for value in node:
            yield from paths(value, f'{path}/*')


def test_every_part_of_the_formats_is_in_some_file() -> None:
    found = {path for kind in ('scripts', 'wrapped') for name in names(kind) for path in paths(kept(kind, name)[0])}
    window = ('gradients/*', 'unscaled', 'used/*', 'found_inf/*', 'foreign_found_inf', 'buffers/0.seen')
    scaler = ('scale', '_growth_tracker', 'hysteresis_tracker', 'dynamic', 'steps', 'skips', 'consecutive_skips')
    expected = {
        *(f'/amp/loss_scaler0/{key}' for key in ('loss_scale', 'unskipped', 'dynamic', 'hysteresis_tracker')),
        '/amp/loss_scaler2/loss_scale',
        *(f'/optimizer/amp/{key}' for key in ('version', 'opt_level', 'properties/keep_fp32', 'inner_count')),
        *(f'/optimizer/loss_scaler/amp/{key}' for key in ('version', 'opt_level', 'window/gradients/*')),
        *(f'/optimizer/amp/window/{key}' for key in window if key != 'foreign_found_inf'),
        *(f'/optimizer/amp/loss_scalers/*/{key}' for key in scaler),
        '/optimizer/part1/loss_scaler/amp/window/foreign_found_inf',
        *(
            f'/optimizer/state/*/{key}'
            for key in ('step', 'exp_avg', 'exp_avg_sq', 'max_exp_avg_sq', 'momentum_buffer')
        ),
    }
    assert expected - found == set()


def test_every_part_of_checkpoints_is_in_some_file() -> None:
    pytest.importorskip('mmengine')
    found = {path for name in names('runners') for path in paths(kept('runners', name)[0])}
    rank = ('now/python', 'now/numpy', 'now/torch', 'begin/python', 'start/torch', 'seeds/sampler', 'statistics')
    expected = {
        '/ema_state_dict/steps',
        '/message_hub/runtime_info/amp_saves/*',
        *(f'/exact_resume/{key}' for key in ('version', 'batches', 'length', 'validated', 'stop_training')),
        *(f'/exact_resume/early_stopping/*/{key}' for key in ('wait_count', 'best_score', 'settings')),
        *(f'/exact_resume/ranks/*/{key}' for key in rank),
        *(f'/optimizer/amp/window/averages/*/{key}' for key in ('before', 'now')),
        '/optimizer/part1/amp/version',
        '/optimizer/part0/loss_scaler/amp/version',
        '/param_schedulers/part0/*/last_step',
    }
    assert expected - found == set()
    assert kept('runners', 'within_O5_ema')[0]['exact_resume']['batches'] == 3
