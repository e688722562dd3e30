"""``amp-wrapper report`` as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import toy  # noqa: F401  (registers the model and the data)

from amp_wrapper import cli

CONFIG = """
model = dict(type='ToyModel')
train_dataloader = dict(
    batch_size=4, num_workers=0, dataset=dict(type='ToyData'), sampler=dict(type='DefaultSampler', shuffle=True),
    collate_fn=dict(type='default_collate'))
optim_wrapper = dict(type='AmpOptimWrapper', opt_level='O2', optimizer=dict(type='Adam', lr=0.1))
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv('COLUMNS', '80')
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'toy_o2.py').write_text(CONFIG)
    return 'toy_o2.py'


def test_tables_page_and_json(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(['report', config, '--opt-level', 'O5', '--html', 'new/a.html', '--json', 'a.json']) == 0
    shown = capsys.readouterr().out
    assert shown.startswith('Precision of toy_o2.py at O5')
    assert max(map(len, shown.splitlines())) <= 80
    assert shown.endswith('Written: new/a.html\nWritten: a.json\n')
    data = json.loads((tmp_path / 'a.json').read_text())
    assert (data['level'], data['optimizer']) == ('O5', 'Adam')
    assert '<title>Precision of toy_o2.py at O5</title>' in (tmp_path / 'new/a.html').read_text()
    # neither a work_dir nor a log
    assert sorted(path.name for path in tmp_path.iterdir()) == ['a.json', 'new', 'toy_o2.py']


@pytest.mark.parametrize('depth', ['-1', 'all'])
def test_a_depth_is_a_number(config: str, depth: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match='2'):
        cli.main(['report', config, f'--depth={depth}'])
    assert f"argument --depth: '{depth}' must be a whole number of at least 0" in capsys.readouterr().err


def test_files_are_written_before_the_tables_are_shown(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader of the tables, such as head, may go at any moment."""

    def gone(*args: object, **words: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr('rich.console.Console.print', gone)
    monkeypatch.setattr('amp_wrapper.cli._quietly', lambda work: work())
    with pytest.raises(BrokenPipeError):
        cli.main(['report', config, '--json', 'a.json'])
    assert json.loads((tmp_path / 'a.json').read_text())['level'] == 'O2'


def test_tables_are_shown_where_a_file_cannot_be_written_after_all(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*args: object) -> None:
        raise OSError(28, 'No space left on device')

    monkeypatch.setattr('amp_wrapper.diagnostics.pages.write_text', full)
    assert cli.main(['report', config, '--html', 'a.html']) == 1
    shown = capsys.readouterr()
    assert shown.out.startswith('Precision of toy_o2.py at O2')
    assert shown.err == 'amp-wrapper report: error: a.html cannot be written: No space left on device.\n'


def test_generated_data_options_and_depth(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ['--input-shape', '1', '6', '6', '--depth', '0', '--cfg-options', 'optim_wrapper.keep_fp32=[fc]']
    assert cli.main(['report', config, *words]) == 0
    shown = capsys.readouterr().out
    assert 'ToyModel' in shown
    assert 'conv Conv2d' not in shown


@pytest.mark.parametrize(
    'words, error',
    [
        (['nothing.py'], "the config 'nothing.py' is no file"),
        (['toy_o2.py', '--checkpoint', 'nothing.pth'], "the checkpoint 'nothing.pth' does not exist"),
        (['toy_o2.py', '--input-shape', '3'], '--input-shape 3: must be C H W or N C H W'),
        (['toy_o2.py', '--html', 'toy_o2.py/a.html'], 'toy_o2.py/a.html cannot be written'),
        (['toy_o2.py', '--cfg-options', 'train_dataloader.dataset.length=a'], 'the training data cannot be read'),
        (['toy_o2.py', '--input-shape', '7', '6', '6'], 'a training step of the model fails at O0 (RuntimeError'),
        (['toy_o2.py', '--cfg-options', 'optim_wrapper.optimizer.type=SGDD'], 'optim_wrapper.optimizer.type='),
    ],
)
def test_errors_are_one_line(config: str, words: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(['report', *words]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith(f'amp-wrapper report: error: {error}')
    assert shown.count('\n') == 1
