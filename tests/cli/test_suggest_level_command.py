"""``amp-wrapper suggest-level`` from a config to the recommendation, its files and its errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from amp_wrapper.cli import main
from amp_wrapper.openmmlab.from_config import from_config
from amp_wrapper.openmmlab.suggesting import suggest_for

ROOT = Path(__file__).resolve().parents[2]
CONFIG = 'configs/digits/cnn_o2.py'
SMALL = ['--cfg-options', 'train_dataloader.batch_size=32', 'model.backbone.channels=[8,8]', 'model.in_channels=8']


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT))


def test_a_config_gets_a_level(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, data = tmp_path / 'new' / 'level.html', tmp_path / 'level.json'
    words = [
        CONFIG,
        '--levels',
        'O2,O5',
        '--steps',
        '4',
        '--prefer',
        'memory',
        '--html',
        str(page),
        '--json',
        str(data),
    ]
    assert main(['suggest-level', *words, *SMALL]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith('O5 (bfloat16 model with FP32 masters) takes ')
    assert "optim_wrapper = dict(type='amp_wrapper.AmpOptimWrapper', opt_level='O5')" in shown.out
    assert 'SGD of the config, with a learning rate of 0.1' in shown.out
    assert shown.err == ''
    assert shown.out.endswith(f'Written: {page}\nWritten: {data}\n')
    assert 'Recommended level: O5' in page.read_text()
    found = json.loads(data.read_text())
    assert [each['level'] for each in found['levels']] == ['O0', 'O2', 'O5']
    o5 = found['levels'][2]
    assert o5['loss']['values'] == pytest.approx(found['levels'][0]['loss']['values'], rel=0.02)
    assert len(set(o5['loss']['values'])) == 4
    # preprocessors are not cast
    modules = {module['name']: module for module in o5['modules']}
    assert modules['data_preprocessor']['outputs'] == 0.0


def test_generated_data_and_options_of_the_wrapper(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        'train_dataloader.batch_size': 8,
        'optim_wrapper.loss_scale': 128.0,
        'optim_wrapper.keep_fp32': ['fc'],
        'optim_wrapper.master_weights': True,
    }
    built = from_config(CONFIG, options, device='cpu', input_shape=(1, 8, 8))
    found = suggest_for(built, levels=['O1', 'O2'], steps=4, prefer='memory', progress=False)
    # masters are no option that O1 could have
    assert found.data['overrides'] == {'loss_scale': 128.0, 'keep_fp32': ['fc']}
    assert {each['level']: each['loss_scale'] for each in found.data['levels']} == {
        'O0': None,
        'O1': 128.0,
        'O2': 128.0,
    }
    assert found.config == (
        "optim_wrapper = dict(type='amp_wrapper.AmpOptimWrapper', opt_level='O2', loss_scale=128.0, keep_fp32=['fc'])"
    )


def test_files_that_cannot_be_written_are_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def never(*args: object, **words: object) -> None:
        raise AssertionError

    monkeypatch.setattr('amp_wrapper.openmmlab.suggesting.from_config', never)
    assert main(['suggest-level', CONFIG, '--html', str(tmp_path)]) == 1
    assert capsys.readouterr().err.endswith(f'{tmp_path} is a folder.\n')


def test_an_interruption_shows_what_is_known(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from amp_wrapper.diagnostics import level_phases

    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(level_phases, 'train_side_by_side', interrupted)
    assert main(['suggest-level', CONFIG, '--levels', 'O5', '--steps', '4', *SMALL]) == 130
    assert capsys.readouterr().out.startswith('Interrupted; not tried: O5. No level can be recommended')


@pytest.mark.parametrize(
    ('words', 'status', 'text'),
    [
        (['--levels', 'O7'], 2, "argument --levels: 'O7' must be levels with commas between them"),
        (['--steps', '2'], 1, 'steps=2 must be a whole number of at least 4'),
        (['--json', '{file}/x.json'], 1, 'cannot be written'),
        (['--html', ''], 1, "--html '' names no file"),
        (['--html', '{file}/..'], 1, 'cannot be written: '),
        (['--levels', 'O5', '--steps', '4', '--input-shape', '5', '8', '8'], 1, 'with --input-shape 5 8 8'),
    ],
)
def test_errors_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], status: int, text: str
) -> None:
    (tmp_path / 'file').write_text('')
    words = [word.format(file=tmp_path / 'file') for word in words]
    if status == 2:
        with pytest.raises(SystemExit, match='2'):
            main(['suggest-level', CONFIG, *words, *SMALL])
    else:
        assert main(['suggest-level', CONFIG, *words, *SMALL]) == status
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith('amp-wrapper suggest-level: error: ')
    assert text in last
