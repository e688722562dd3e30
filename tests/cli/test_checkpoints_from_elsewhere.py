"""Checkpoints that mmengine fetches by URL, and ``--opt-level`` for a config with a wrapper class of its own."""

from __future__ import annotations

import functools
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import toy
from mmengine.optim import OptimWrapper
from mmengine.registry import OPTIM_WRAPPERS

from amp_wrapper import AmpOptimWrapper, cli


@OPTIM_WRAPPERS.register_module()
class GradNoise(OptimWrapper):
    """A wrapper of a user."""


@OPTIM_WRAPPERS.register_module()
class OwnAmp(AmpOptimWrapper):
    """A wrapper of a user, on ours."""


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where the folder ``tmp_path`` is served."""
    monkeypatch.setenv('TORCH_HOME', str(tmp_path / 'home'))
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f'http://127.0.0.1:{server.server_address[1]}'
        server.shutdown()


def config(folder: Path, kind: str = 'AmpOptimWrapper', **overrides: object) -> str:
    wrapper = dict(type=kind, optimizer=dict(type='SGD', lr=0.1))
    tested = dict(test_dataloader=toy.loader(shuffle=False), test_evaluator=dict(type='ToyScore'), test_cfg=dict())
    path = folder / 'config.py'
    toy.toy_config(folder / 'work', wrapper, **tested, **overrides).dump(str(path))
    return str(path)


def run(*words: str) -> int:
    return cli.main([*words])


def saved(folder: Path) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = torch.load(folder / 'epoch_2.pth', weights_only=True)['state_dict']
    return weights


def test_what_takes_a_file_takes_a_url(tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = config(tmp_path)
    assert run('train', path, '--work-dir', str(tmp_path / 'a')) == 0
    shown = []
    for place in (str(tmp_path / 'a/epoch_1.pth'), f'{url}/a/epoch_1.pth'):
        capsys.readouterr()
        assert run('test', path, place, '--opt-level', 'O5', '--work-dir', str(tmp_path / 'tested')) == 0
        shown.append([word for word in capsys.readouterr().out.split() if word.startswith('toy/')])
        assert run('report', path, '--checkpoint', place, '--json', str(tmp_path / 'report.json')) == 0
    assert shown[0] == shown[1]
    assert run('train', path, '--work-dir', str(tmp_path / 'b'), '--resume', f'{url}/a/epoch_1.pth') == 0
    first, resumed = saved(tmp_path / 'a'), saved(tmp_path / 'b')
    assert all(torch.equal(first[name], resumed[name]) for name in first)
    begins = config(tmp_path, load_from=f'{url}/a/epoch_2.pth')
    assert run('train', begins, '--work-dir', str(tmp_path / 'c')) == 0


def test_a_file_that_is_not_there_is_still_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = config(tmp_path)
    for words in (['test', path, 'gone.pth'], ['report', path, '--checkpoint', 'gone.pth']):
        assert run(*words) == 1
        assert "the checkpoint 'gone.pth' does not exist" in capsys.readouterr().err


@pytest.mark.parametrize('option', [['--opt-level', 'O2'], ['--opt-level', 'O5'], ['--amp']])
@pytest.mark.parametrize('kind', ['GradNoise', 'OwnAmp'])
def test_a_wrapper_of_the_user_is_not_replaced(
    kind: str, option: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run('train', config(tmp_path, kind), *option) == 1
    said = capsys.readouterr().err
    assert f"{option[0]} cannot turn optim_wrapper.type='{kind}' into AmpOptimWrapper: change the config." in said
    assert said.count('\n') == 1 and not (tmp_path / 'work').exists()


@pytest.mark.parametrize('kind', ['OptimWrapper', 'AmpOptimWrapper', 'ApexOptimWrapper', 'TorchAmpOptimWrapper'])
def test_stock_classes_are(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run('train', config(tmp_path, kind, log_level='INFO'), '--opt-level', 'O5') == 0
    assert 'AmpOptimWrapper of amp_wrapper: O5' in capsys.readouterr().out
