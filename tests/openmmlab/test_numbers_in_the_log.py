"""Which numbers of mixed precision stand in the log of a training by ``tools/train.py``: few, and all of them on request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from mmengine.registry import HOOKS
from torch import Tensor

from amp_wrapper import cli
from amp_wrapper.diagnostics.measured_numbers import NUMBERS

LEVELS = ('O0', 'O1', 'O2', 'O3', 'O4', 'O5')


@HOOKS.register_module()
class SkipsOne(toy.Hook):
    """NaN in the gradients of the fourth step."""

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        if runner.iter == 3:
            data_batch['inputs'].fill_(float('nan'))


def train(folder: Path, level: str, hooks: list[Any], **options: Any) -> list[dict[str, float]]:
    """The rows of the log, with the ``amp_`` numbers alone, after ``amp-wrapper train``."""
    wrapper = dict(type='AmpOptimWrapper', opt_level=level, optimizer=dict(type='SGD', lr=0.01), **options)
    config = toy.toy_config(folder / 'work', wrapper, custom_hooks=hooks, log_level='INFO')
    config.train_cfg.max_epochs = 1
    config.dump(str(folder / 'config.py'))
    assert cli.main(['train', str(folder / 'config.py')]) == 0
    (log,) = (folder / 'work').glob('*/vis_data/scalars.json')
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    return [{key: value for key, value in row.items() if key.startswith('amp_')} for row in rows if 'loss' in row]


@pytest.mark.parametrize('level', LEVELS)
@pytest.mark.parametrize('skips', [True, False])
def test_by_default_the_scale_and_what_was_skipped(
    level: str, skips: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {'loss_scale': {'init_scale': 2.0**8}} if level in ('O1', 'O2') else {}
    rows = train(tmp_path, level, [dict(type='SkipsOne')] if skips and level != 'O0' else [], **options)
    always = {'amp_scale'} if level in ('O1', 'O2') else set()
    later = always | ({'amp_skipped'} if skips and level != 'O0' else set())
    assert [set(row) for row in rows] == [always] * 3 + [later] * (len(rows) - 3)
    assert all(row.get('amp_skipped', 1.0) == 1.0 for row in rows)
    assert ('amp_skipped' in capsys.readouterr().out) == ('amp_skipped' in later)
    assert cli.main(['plot', str(tmp_path / 'work'), '--out', str(tmp_path / 'plot.png')]) == 0


@pytest.mark.parametrize('level', ['O1', 'O5'])
def test_all_of_them_on_request(level: str, tmp_path: Path) -> None:
    monitor = dict(type='amp_wrapper.AmpMonitorHook', interval=1, ranges_interval=1)
    rows = train(tmp_path, level, [dict(type='SkipsOne'), monitor])
    missing = {'amp_update_lost', 'amp_update_spacing'} if level == 'O1' else {'amp_scale'}
    assert set(rows[-1]) == {*NUMBERS, 'amp_scale', 'amp_skipped'} - missing
    assert list((tmp_path / 'work').glob('*/vis_data/amp_ranges.jsonl'))
    for more in ([], ['--ranges']):
        assert cli.main(['plot', str(tmp_path / 'work'), '--out', str(tmp_path / 'plot.png'), *more]) == 0


@pytest.mark.parametrize('words', [{}, {'interval': 3}, {'ranges_interval': 3}])
def test_without_an_interval_nothing_is_measured(words: dict[str, int], tmp_path: Path) -> None:
    rows = train(tmp_path, 'O5', [dict(type='amp_wrapper.AmpMonitorHook', **words)])
    assert (set(NUMBERS) <= set(rows[-1])) == bool(words)
    assert bool(list((tmp_path / 'work').glob('*/vis_data/amp_ranges.jsonl'))) == ('ranges_interval' in words)


def test_a_resumed_run_goes_on_counting(tmp_path: Path) -> None:
    wrapper: dict[str, Any] = dict(type='AmpOptimWrapper', opt_level='O5', optimizer=dict(type='SGD', lr=0.01))
    first = toy.run(tmp_path, wrapper, custom_hooks=[dict(type='SkipsOne')])
    resumed = toy.run(
        tmp_path, wrapper, load_from=str(tmp_path / 'epoch_1.pth'), resume=True, custom_hooks=[dict(type='SkipsOne')]
    )
    counts: list[Tensor] = [
        torch.tensor(runner.message_hub.get_scalar('train/amp_skipped').data[0]) for runner in (first, resumed)
    ]
    assert counts[0].tolist() == [1.0] * 11 and torch.equal(counts[0], counts[1])
