"""The command ``amp-wrapper``: help, each verb once, the user's own modules, and errors in one line."""

from __future__ import annotations

import functools
import http.server
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from bits import differences
from mmengine.config import Config
from mmengine.optim import OptimWrapper
from mmengine.registry import DATASETS, OPTIM_WRAPPERS, RUNNERS
from processes import ROOT

import amp_wrapper
from amp_wrapper import AmpOptimWrapper, AmpUsageError
from amp_wrapper.cli import main

VERBS = ('info', 'train', 'test', 'migrate', 'convert', 'report', 'suggest-level', 'plot', 'build-ops')


def fresh(*words: str) -> subprocess.CompletedProcess[str]:
    """In an interpreter of its own."""
    return subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


def config(folder: Path, kind: str = 'AmpOptimWrapper', name: str = 'config.py', **overrides: Any) -> str:
    wrapper = dict(type=kind, optimizer=dict(type='SGD', lr=0.1))
    case: dict[str, Any] = dict(
        train_dataloader=toy.loader(length=8),
        val_dataloader=toy.loader(length=4, shuffle=False),
        test_dataloader=toy.loader(length=4, shuffle=False),
        test_evaluator=dict(type='ToyScore'),
        test_cfg=dict(),
    )
    path = folder / name
    toy.toy_config(folder / 'work', wrapper, **{**case, **overrides}).dump(str(path))
    return str(path)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder where the user stands."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, 'path', list(sys.path))
    return tmp_path


def error(capsys: pytest.CaptureFixture[str], *words: str, status: int = 1) -> str:
    """The line in which a command ends."""
    capsys.readouterr()
    if status == 2:
        with pytest.raises(SystemExit) as caught:
            main([*words])
        assert caught.value.code == 2
    else:
        assert main([*words]) == status
    lines = capsys.readouterr().err.splitlines()
    assert lines and (status == 2 or len(lines) == 1), lines
    start = f'amp-wrapper {words[0]}: error: '
    assert lines[-1].startswith(start), lines
    return lines[-1].removeprefix(start)


# -- help -------------------------------------------------------------------------------------------------------------


def test_help_needs_neither_torch_nor_mmengine() -> None:
    # the command that pip installs
    script = Path(sys.executable).with_name('amp-wrapper')
    program = [str(script)] if script.exists() else ['-m', 'amp_wrapper']
    done = fresh('-X', 'importtime', *program, 'train', '--help')
    assert done.returncode == 0, done.stderr
    loaded = set(re.findall(r'\| +([\w.]+)$', done.stderr, re.MULTILINE))
    assert 'argparse' in loaded and not {'torch', 'numpy', 'mmengine', 'rich', 'matplotlib'} & loaded
    words = '--work-dir --resume --amp --opt-level --cfg-options --launcher --seed --monitor'.split()
    assert all(word in done.stdout for word in words) and 'FP32 masters' in done.stdout
    assert fresh('-m', 'amp_wrapper', '--version').stdout == f'amp-wrapper {amp_wrapper.__version__}\n'


def test_overview_names_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    said = capsys.readouterr()
    assert said.out == '' and all(f'  {name} ' in said.err for name in VERBS)
    for name in VERBS:
        with pytest.raises(SystemExit) as caught:
            main([name, '--help'])
        assert caught.value.code == 0 and f'usage: amp-wrapper {name}' in capsys.readouterr().out
    for words, text in ((['trian'], "'trian'"), (['--quick'], '--quick')):
        with pytest.raises(SystemExit) as caught:
            main(words)
        assert caught.value.code == 2 and text in capsys.readouterr().err


def test_info(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(['info', '--json']) == 0
    versions = json.loads(capsys.readouterr().out)['versions']
    assert versions['amp_wrapper'] == amp_wrapper.__version__ and versions['torch'] == torch.__version__
    assert main(['info']) == 0
    assert amp_wrapper.__version__ in capsys.readouterr().out


# -- training and testing ---------------------------------------------------------------------------------------------


@pytest.fixture
def url(here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where the current folder is served."""
    monkeypatch.setenv('TORCH_HOME', str(here / 'home'))
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(here))
    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f'http://127.0.0.1:{server.server_address[1]}'
        server.shutdown()


def test_train_resume_and_test_from_files_and_urls(here: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = config(here)
    assert main(['train', path, '--opt-level', 'O5', '--work-dir', 'a']) == 0
    last = capsys.readouterr().out.splitlines()[-2:]
    assert last[0].startswith('Finished: epoch 2, iteration 4') and last[1].endswith('a/epoch_2.pth')
    assert main(['report', path, '--json', 'report.json']) == 0
    untrained = json.loads(Path('report.json').read_text())['loss']['fp32']
    shown, losses = set(), set()
    for place in ('a/epoch_1.pth', f'{url}/a/epoch_1.pth'):
        assert main(['test', path, place, '--opt-level', 'O5', '--work-dir', 'tested']) == 0
        shown |= set(re.findall(r'Tested at O5: (toy/score \S+)', capsys.readouterr().out))
        used = Config.fromfile('tested/config.py')
        assert (used.load_from, used.custom_hooks[-1]) == (
            place,
            dict(type='amp_wrapper.AmpInferenceHook', opt_level='O5'),
        )
        assert main(['report', path, '--checkpoint', place, '--json', 'report.json']) == 0
        assert capsys.readouterr().out.startswith('Precision of')
        losses.add(json.loads(Path('report.json').read_text())['loss']['fp32'])
    assert len(shown) == len(losses) == 1 and untrained not in losses
    assert main(['train', path, '--opt-level', 'O5', '--work-dir', 'b', '--resume', f'{url}/a/epoch_1.pth']) == 0
    whole, resumed = toy.checkpoint(here / 'a'), toy.checkpoint(here / 'b')
    assert differences(whole['state_dict'], resumed['state_dict']) == []
    assert main(['train', config(here, load_from=f'{url}/a/epoch_2.pth'), '--work-dir', 'c']) == 0


def test_level_and_seed(here: Path) -> None:
    """The seed is that of samplers, too; ``--amp`` is O1."""
    path = config(here, 'OptimWrapper', randomness=dict(seed=None))
    again = ['--seed', '7', '--resume', 'a/epoch_1.pth']
    assert main(['train', path, '--opt-level', 'O5', '--seed', '7', '--work-dir', 'a']) == 0
    assert main(['train', path, '--opt-level', 'O5', '--work-dir', 'b', *again]) == 0
    whole, resumed = toy.checkpoint('a', 'epoch_2.pth'), toy.checkpoint('b', 'epoch_2.pth')
    assert differences(whole['state_dict'], resumed['state_dict']) == []
    assert resumed['meta']['seed'] == 7 and resumed['optimizer']['amp']['opt_level'] == 'O5'
    assert main(['train', path, '--amp', '--work-dir', 'c', *again]) == 0
    resumed = toy.checkpoint('c', 'epoch_2.pth')
    assert resumed['meta']['seed'] == 7 and resumed['optimizer']['loss_scaler']['amp']['opt_level'] == 'O1'


@OPTIM_WRAPPERS.register_module()
class GradNoise(OptimWrapper):
    """A wrapper of a user."""


@OPTIM_WRAPPERS.register_module()
class OwnAmp(AmpOptimWrapper):
    """A wrapper of a user, on ours."""


@pytest.mark.parametrize('option', [['--opt-level', 'O2'], ['--amp']])
@pytest.mark.parametrize('kind', ['GradNoise', 'OwnAmp'])
def test_wrapper_of_a_user_stays(kind: str, option: list[str], here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = error(capsys, 'train', config(here, kind), *option)
    assert option[0] in said and kind in said and not (here / 'work').exists()


@pytest.mark.parametrize('kind', ['OptimWrapper', 'ApexOptimWrapper', 'TorchAmpOptimWrapper'])
def test_stock_wrapper_is_replaced(kind: str, here: Path) -> None:
    assert main(['train', config(here, kind), '--opt-level', 'O5']) == 0
    assert toy.checkpoint(here / 'work')['optimizer']['amp']['opt_level'] == 'O5'


PROJECT = """
import amp_wrapper, toy
from mmengine.registry import DATASETS, OPTIM_WRAPPERS

@DATASETS.register_module()
class Ramp(toy.ToyData):
    def __getitem__(self, index):
        # in a spawned worker, too
        assert OPTIM_WRAPPERS.get('AmpOptimWrapper') is amp_wrapper.AmpOptimWrapper
        return super().__getitem__(index)
"""


def test_project_of_the_user_is_imported_also_in_workers(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path('my_project.py').write_text(PROJECT)
    data = dict(
        toy.loader(length=8), dataset=dict(type='Ramp', length=8), num_workers=1, multiprocessing_context='spawn'
    )
    path = config(here, custom_imports=dict(imports=['my_project']), train_dataloader=data)
    assert main(['train', path, '--cfg-options', 'optim_wrapper.loss_scale=8', 'work_dir=None']) == 0
    last = capsys.readouterr().out.splitlines()[-2:]
    assert last[0].startswith('Finished: epoch 2, iteration 4')
    assert last[1] == f'Checkpoint: {Path("work_dirs/config/epoch_2.pth")}'
    assert toy.checkpoint('work_dirs/config', 'epoch_2.pth')['optimizer']['loss_scaler']['scale'] == 8.0


def test_processes_on_a_cpu_train_and_test(here: Path) -> None:
    """mmengine by itself asks for a GPU for each."""
    path = config(here, custom_imports=dict(imports=['toy']))
    start = [sys.executable, *'-m torch.distributed.run --standalone --nproc-per-node 2 -m amp_wrapper'.split()]
    for words in (['train', path], ['test', path, 'work/epoch_2.pth']):
        done = subprocess.run([*start, *words, '--launcher', 'pytorch'], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count('Finished: epoch 2, iteration 2') + done.stdout.count('Tested at FP32') == 1


EXACT, WATCH = (dict(type=f'amp_wrapper.{name}') for name in ('ExactResumeHook', 'AmpMonitorHook'))
#: Hooks of a config, options, and which hooks there are then.
HOOKS: list[tuple[dict[str, Any], list[str], list[dict[str, Any]]]] = [
    (dict(custom_hooks=[EXACT]), [], [EXACT, WATCH]),
    (dict(custom_hooks=[WATCH], runner_type='FlexibleRunner', env_cfg={}), [], [WATCH, EXACT]),
    ({}, ['--monitor'], [EXACT, {**WATCH, 'interval': 50}]),
    (dict(custom_hooks=[{**WATCH, 'interval': 7}]), ['--monitor', '20'], [{**WATCH, 'interval': 20}, EXACT]),
    (dict(default_hooks=dict(amp_monitor=WATCH)), ['--monitor', '20'], [{**WATCH, 'interval': 20}, EXACT]),
    (dict(default_hooks=dict(amp_monitor=None)), [], [EXACT]),
    (dict(default_hooks=dict(amp_monitor=None)), ['--monitor'], [EXACT, {**WATCH, 'interval': 50}]),
]


@pytest.mark.parametrize(('given', 'words', 'hooks'), HOOKS)
def test_runner_and_hooks_are_of_the_config(given: Any, words: Any, hooks: Any, here: Path, monkeypatch: Any) -> None:
    """A hook that is there is not added a second time; None leaves it out."""
    kind, trained = given.get('runner_type', 'Runner'), list[Any]()
    monkeypatch.setattr(RUNNERS.get(kind), 'train', lambda runner: trained.append(runner))
    assert main(['train', config(here, **given), *words]) == 0
    cfg = trained[0].cfg
    assert [type(runner).__name__ for runner in trained] == [kind]
    found = [*cfg.default_hooks.values(), *cfg.custom_hooks]
    assert [hook for hook in found if hook['type'].startswith('amp_wrapper.')] == hooks


def test_learning_rate_follows_the_batch_size(here: Path) -> None:
    assert main(['train', config(here, auto_scale_lr=dict(base_batch_size=16)), '--auto-scale-lr']) == 0
    assert toy.checkpoint(here / 'work')['optimizer']['param_groups'][0]['lr'] == pytest.approx(0.1 * 4 / 16)


# -- errors -----------------------------------------------------------------------------------------------------------


def test_errors_are_one_line(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config(here)
    (here / 'broken.py').write_text('model = dict(\n')
    (here / 'raises.py').write_text('x = undefined\n')
    for line, text in (
        ('train none.py', "'none.py' is no file"),
        ('train broken.py', 'broken.py'),
        ('train raises.py', 'undefined'),
        ('train config.py --cfg-options model.type.x=3', 'KEY=VALUE that fit'),
        ('train config.py --cfg-options lr', 'must be KEY=VALUE'),
        ('train config.py --cfg-options a=[1,(2]', 'balanced brackets'),
        ('train config.py --cfg-options optim_wrapper.opt_level=O7', "opt_level='O7'"),
        ('train config.py --cfg-options load_from=none.pth', 'none.pth'),
        ('train config.py --cfg-options load_from=config.py', 'config.py is no checkpoint'),
        ('train config.py --resume none.pth', "the checkpoint 'none.pth' does not exist"),
        ('train config.py --resume config.py', 'config.py is no checkpoint'),
        ('train config.py --auto-scale-lr', '--auto-scale-lr'),
        ('test config.py none.pth', "'none.pth' does not exist"),
        ('report none.py', "'none.py' is no file"),
        ('report config.py --checkpoint none.pth', "'none.pth' does not exist"),
        ('report config.py --html config.py/a.html', "'config.py/a.html' cannot be written"),
        ('report config.py --cfg-options train_dataloader.dataset.length=a', 'data cannot be read'),
        ('suggest-level config.py --steps 2', 'steps=2'),
        ('suggest-level config.py --device nothing', '--device nothing'),
        ('suggest-level config.py --html .', "--html '.' cannot be written"),
        ('plot nothing', "no log 'nothing'"),
    ):
        assert text in error(capsys, *line.split()), line
    assert not list(here.glob('work*/*.pth'))


WRONG = (
    'train | train c.py --opt-level O9 | train c.py --seed -1 | train c.py --seed 4294967296 | train c.py --opt-levle O2 | '
    'train c.py --monitor 0 | report c.py --depth=-1 | suggest-level c.py --levels O7 | plot log --panels los | '
    'build-ops --job 2 | migrate | migrate none.py'
)


@pytest.mark.parametrize('line', WRONG.split(' | '))
def test_wrong_words_end_with_status_2(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ("did you mean '--opt-level'?" in error(capsys, *line.split(), status=2)) == ('--opt-levle' in line)


def test_interrupts_defects_and_what_is_not_installed(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    (here / 'interrupted.py').write_text('raise KeyboardInterrupt\n')
    assert main(['train', 'interrupted.py']) == 130 and capsys.readouterr().err == ''
    (here / 'imports.py').write_text("custom_imports = dict(imports=['nobody_has_this'])\n")
    with pytest.raises(ImportError, match='nobody_has_this'):
        main(['train', 'imports.py'])
    with pytest.raises(KeyError, match='Tinny is not in'):
        main(['train', config(here), '--cfg-options', 'model.type=Tinny'])
    monkeypatch.setattr(DATASETS.get('ToyData'), '__getitem__', lambda self, index: {}['a defect'])
    with pytest.raises(Exception, match='a defect'):
        main(['train', config(here)])
    monkeypatch.setitem(sys.modules, 'matplotlib', None)
    (here / 'scalars.json').write_text('{"loss": 1.0, "step": 1}\n')
    assert 'pip install matplotlib' in error(capsys, 'plot', 'scalars.json')
    monkeypatch.setenv('AMP_WRAPPER_DEBUG', '1')
    with pytest.raises(AmpUsageError, match=r'none\.py'):
        main(['train', 'none.py'])
