"""The command ``amp-wrapper``, typed as users type it: help, each command once, errors, the user's own modules."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import ROOT, python
from grid import grid
from mmengine.config import Config
from toy import checkpoint

import amp_wrapper
from amp_wrapper import AmpConfigError, AmpUsageError, cli, start
from amp_wrapper.cli import info as info_command
from amp_wrapper.openmmlab.config_options import parse_options, read_config

SCRIPT = Path(sys.executable).with_name('amp-wrapper')
FOREIGN = ROOT / 'tests' / 'data' / 'foreign'


def typed(*words: str, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the installed command."""
    if not SCRIPT.exists():
        pytest.skip('the package is not installed here: pip install --no-deps --no-build-isolation -e .')
    # as in a shell where the environment is active
    path = f'{SCRIPT.parent}{os.pathsep}{os.environ["PATH"]}'
    env = {**os.environ, 'OMP_NUM_THREADS': '1', 'PATH': path, **variables}
    return python(SCRIPT, *words, cwd=cwd, env=env)


def loaded(*words: str) -> set[str]:
    """What a command imports, with its parents."""
    done = subprocess.run(
        [sys.executable, '-X', 'importtime', *words], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    return {found[1] for line in lines if (found := re.fullmatch(r'import time:[ \d|]+\| +([\w.]+)', line))}


@pytest.mark.parametrize('words', [[], *([name] for name in cli.COMMANDS)], ids=lambda words: ' '.join(words) or 'none')
def test_help_needs_neither_torch_nor_mmengine(words: list[str]) -> None:
    program = [str(SCRIPT)] if SCRIPT.exists() else ['-m', 'amp_wrapper']
    found = loaded(*program, *words, '--help')
    assert 'amp_wrapper.cli' in found and 'argparse' in found
    assert not {'torch', 'numpy', 'mmengine', 'libcst', 'rich', 'matplotlib', 'jinja2'} & found


def test_the_module_is_the_same_command() -> None:
    done = subprocess.run(
        [sys.executable, '-m', 'amp_wrapper', '--version'], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == (f'amp-wrapper {amp_wrapper.__version__}\n', '')


def test_the_overview(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    said = capsys.readouterr()
    assert said.out == '' and 'usage: amp-wrapper' in said.err
    for name in cli.COMMANDS:
        module, parser = cli.parser_of(name)
        assert f'  {name} ' in said.err and module.HELP in said.err
        assert parser.description and parser.prog == f'amp-wrapper {name}'
        assert (parser.epilog or '').count(parser.prog) == 1, name
    for words, text in ((['trian'], "there is no command 'trian' (did you mean 'train'?)"), (['--quick'], '--quick')):
        with pytest.raises(SystemExit) as caught:
            cli.main(words)
        assert caught.value.code == 2 and text in capsys.readouterr().err


def test_info() -> None:
    done = typed('info', '--json')
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)['versions']['amp_wrapper'] == amp_wrapper.__version__


# -- training, away from the checkout ---------------------------------------------------------------------------------

PROJECT = """
import torch
from mmengine.model import BaseModel
from mmengine.registry import DATASETS, MODELS, OPTIM_WRAPPERS
from torch.utils.data import Dataset

import amp_wrapper


@DATASETS.register_module()
class Ramp(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        # in a spawned worker, too
        assert OPTIM_WRAPPERS.get('AmpOptimWrapper') is amp_wrapper.AmpOptimWrapper
        return dict(x=torch.full((4,), index / 8), y=torch.tensor(index % 2))


@MODELS.register_module()
class Tiny(BaseModel):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(4, 2)

    def forward(self, x, y, mode='loss'):
        out = self.fc(x)
        return dict(loss=torch.nn.functional.cross_entropy(out, y)) if mode == 'loss' else [out]
"""
CONFIG = """
custom_imports = dict(imports=['my_project'])
model = dict(type='Tiny')
train_dataloader = dict(
    batch_size=4,
    num_workers=1,
    multiprocessing_context='spawn',
    sampler=dict(type='DefaultSampler', shuffle=True),
    dataset=dict(type='Ramp'),
    collate_fn=dict(type='default_collate'),
)
train_cfg = dict(by_epoch=True, max_epochs=1)
optim_wrapper = dict(type='AmpOptimWrapper', opt_level='O2', optimizer=dict(type='FusedSGD', lr=0.1))
randomness = dict(seed=0)
log_level = 'WARNING'
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / 'my_project.py').write_text(PROJECT)
    (tmp_path / 'config.py').write_text(CONFIG)
    return tmp_path


def test_train_in_a_folder_of_the_users(project: Path) -> None:
    done = typed('train', 'config.py', '--cfg-options', 'optim_wrapper.loss_scale=8', cwd=project)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == [
        'Finished: epoch 1, iteration 2',
        f'Checkpoint: {Path("work_dirs/config/epoch_1.pth")}',
    ]
    assert checkpoint(project / 'work_dirs' / 'config')['meta']['iter'] == 2


@grid
def test_train_in_two_processes(project: Path) -> None:
    with socket.socket() as listener:
        listener.bind(('127.0.0.1', 0))
        port = listener.getsockname()[1]
    launch = [
        '-m',
        'torch.distributed.run',
        '--nproc-per-node=2',
        f'--master-port={port}',
        '-m',
        'amp_wrapper',
        'train',
    ]
    options = ['train_dataloader.num_workers=0', 'train_dataloader.multiprocessing_context=None']
    done = subprocess.run(
        [sys.executable, *launch, 'config.py', '--launcher', 'pytorch', '--cfg-options', *options],
        cwd=project,
        env={**os.environ, 'OMP_NUM_THREADS': '1', 'CUDA_VISIBLE_DEVICES': '', 'PYTHONPATH': str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert 'Finished: epoch 1, iteration 1\n' in done.stdout


def test_errors_of_train_and_test(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They come before anything is built, so one process tries them all."""
    (project / 'broken.py').write_text('model = dict(\n')
    (project / 'inherits.py').write_text("_base_ = './broken.py'\n")
    (project / 'imports.py').write_text("custom_imports = dict(imports=['nobody_has_this'])\n")
    (project / 'raises.py').write_text('x = undefined\n')
    (project / 'unknown.txt').write_text('x = 1\n')
    monkeypatch.chdir(project)
    monkeypatch.syspath_prepend(str(project))
    for name, words in (
        ('confg.py', "the config 'confg.py' is no file (did you mean 'config.py'?)."),
        ('confg', "the config 'confg' is no file (did you mean 'config.py'?)."),
        ('config.**', "the config 'config.**' is no file."),
        ('broken.py', "broken.py cannot be read as a config: line 1: '(' was never closed."),
        ('inherits.py', 'inherits.py cannot be read as a config: in a config that it inherits from: '),
        ('imports.py', "imports.py imports what cannot be imported: No module named 'nobody_has_this'."),
        ('raises.py', "raises.py cannot be read as a config: NameError: name 'undefined' is not defined"),
        ('unknown.txt', 'unknown.txt cannot be read as a config: OSError: '),
    ):
        with pytest.raises((AmpConfigError, AmpUsageError)) as caught:
            read_config(name)
        text = str(caught.value)
        assert text.startswith(words) and '\n' not in text, text
    with pytest.raises(AmpConfigError, match='--cfg-options do not fit the config: TypeError'):
        read_config('config.py', {'model.type.x': 3})
    assert read_config('config.py', {'model.type': 'Other'}).model == Config(dict(model=dict(type='Other'))).model


def test_errors_of_mmengine_are_one_line(project: Path) -> None:
    """What it notices while it builds and trains: a type that nothing registers, and a metric that there is not."""
    (project / 'argument.py').write_text(CONFIG.replace('lr=0.1', 'lr=0.1, momentun=0.9'))
    (project / 'metric.py').write_text(
        CONFIG.replace('num_workers=1', 'num_workers=0').replace("multiprocessing_context='spawn',", '')
        + """
val_dataloader = {**train_dataloader, 'sampler': dict(type='DefaultSampler', shuffle=False)}
val_evaluator = dict(type='Counted')
val_cfg = dict()
default_hooks = dict(checkpoint=dict(type='CheckpointHook', save_best='acuracy', rule='greater'))
"""
    )
    (project / 'my_project.py').write_text(
        PROJECT
        + """
from mmengine.evaluator import BaseMetric
from mmengine.registry import METRICS


@METRICS.register_module()
class Counted(BaseMetric):
    def process(self, data_batch, data_samples):
        self.results += [1]

    def compute_metrics(self, results):
        return dict(accuracy=float(len(results)), extra=0.0)
"""
    )
    for config, option, text in (
        (
            'config.py',
            'model.type=Tinny',
            "type='Tinny' is not in the registry of mmengine for model (did you mean 'Tiny'?): ",
        ),
        (
            'config.py',
            'train_dataloader.dataset.type=Ram',
            "type='Ram' is not in the registry of mmengine for dataset ",
        ),
        (
            'argument.py',
            'randomness.seed=1',
            "the config: FusedSGD takes no 'momentun' (did you mean 'momentum'?).",
        ),
        (
            'config.py',
            'optim_wrapper.optimizer.type=AdmW',
            "optimizer.type='AdmW' is not in the registry of mmengine for ",
        ),
        (
            'metric.py',
            'val_dataloader.num_workers=0',
            "save_best='acuracy' (did you mean 'accuracy'?): the validation gives",
        ),
    ):
        done = typed('train', config, '--cfg-options', option, cwd=project)
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1].startswith(f'amp-wrapper train: error: {text}'), done.stderr
        assert 'Traceback' not in done.stderr
    done = typed('test', 'metric.py', 'metric.py', '--cfg-options', 'test_cfg={}', cwd=project)
    assert done.returncode == 1 and 'Traceback' not in done.stderr


def test_misspelt_keys_of_parameters_are_told(project: Path) -> None:
    typed_keys = ['optim_wrapper.paramwise_cfg.custom_keys.fcc.lr_mult=2', 'log_level=WARNING']
    done = typed('train', 'config.py', '--cfg-options', *typed_keys, cwd=project)
    assert done.returncode == 0, done.stderr
    assert "custom_keys has 'fcc' (did you mean 'fc'?), which is in no name of a parameter" in done.stdout + done.stderr


def test_values_of_cfg_options() -> None:
    assert parse_options(['a.b=1', 'c=[1,2]', 'd=x=y']) == {'a.b': 1, 'c': [1, 2], 'd': 'x=y'}
    for word in ('a', 'a=[1,2'):
        with pytest.raises(ValueError):
            parse_options([word])


def test_errors_are_one_line(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(project)
    monkeypatch.setattr(sys, 'path', list(sys.path))
    # which pickle would read as an instruction to import something
    (project / 'text.py').write_text(CONFIG.lstrip())
    (project / 'bare.py').write_text('a = 1\n')
    (project / 'empty').mkdir()
    (project / 'old').mkdir()
    for number in (9, 10):
        checkpoint = project / 'old' / f'epoch_{number}.pth'
        checkpoint.write_bytes(b'')
        os.utime(checkpoint, (number, number))
    newest = Path('old', 'epoch_10.pth')
    for line, text in (
        ('train none.py', "the config 'none.py' is no file."),
        ('train config.py --resume none.pth', '--resume none.pth: there is no such checkpoint.'),
        ('train config.py --resume old', f'--resume old is a folder, and no checkpoint: write --resume {newest}, or '),
        (
            'train config.py --resume empty',
            '--resume empty is a folder, and no checkpoint: write --work-dir empty --resume ',
        ),
        ('train bare.py', 'the config has no model, train_dataloader, train_cfg, optim_wrapper: a config of mmengine'),
        ('train config.py --auto-scale-lr', '--auto-scale-lr: the config has no auto_scale_lr'),
        ('train config.py --resume config.py', 'config.py is no checkpoint, or a damaged one ('),
        ('train config.py --cfg-options load_from=none.pth', 'none.pth is not there, or no file: check the path.'),
        ('train config.py --cfg-options load_from=config.py', 'config.py is no checkpoint, or a damaged one ('),
        ('train config.py --cfg-options optim_wrapper.opt_level=O7', "opt_level='O7' is no opt level."),
        (
            'train config.py --cfg-options optim_wraper.opt_level=O2',
            '--cfg-options optim_wraper.opt_level: neither the config',
        ),
        (
            'train config.py --cfg-options train_cfg.max_epoch=2',
            "train_cfg has an unknown key 'max_epoch' (did you mean ",
        ),
        (
            'train config.py --cfg-options optim_wrapper.paramwise_cfg.norm_deca_mult=0',
            "paramwise_cfg has an unknown key 'norm_deca_mult' (did you mean 'norm_decay_mult'?)",
        ),
        ('test config.py none.pth', "the checkpoint 'none.pth' does not exist."),
        ('test config.py config.py', 'config.py is no checkpoint, or a damaged one ('),
        ('test config.py text.py', 'text.py is no checkpoint, or a damaged one ('),
        ('test config.py .', "the checkpoint '.' is a folder, and no checkpoint."),
        ('convert none.pth --inspect', 'none.pth is not there, or no file: check the path.'),
        ('convert config.py --inspect', 'config.py is no checkpoint, or a damaged one ('),
        ('convert . --inspect', '. is no complete checkpoint: it has no files.json.'),
    ):
        assert cli.main(line.split()) == 1
        said = capsys.readouterr().err
        assert said.count('\n') == 1 and said.startswith(f'amp-wrapper {line.split()[0]}: error: {text}'), said
    for line in ('train', 'train config.py --opt-level O9', 'train config.py --cfg-options lr', 'convert x.pth'):
        with pytest.raises(SystemExit) as caught:
            cli.main(line.split())
        assert caught.value.code == 2
        last = capsys.readouterr().err.splitlines()[-1]
        assert last.startswith(f'amp-wrapper {line.split()[0]}: error: '), last
    for line, text in (
        ('train config.py --opt-levle O2', "unrecognized arguments: --opt-levle O2 (did you mean '--opt-level'?)"),
        ('convert x.pth --inpsect', "unrecognized arguments: --inpsect (did you mean '--inspect'?)"),
        ('train config.py --xyzzy', 'unrecognized arguments: --xyzzy'),
        ('convert x.pth -x', 'unrecognized arguments: -x'),
        ('train config.py --seed -1', "argument --seed: '-1' must be a whole number of at least 0"),
        ('train config.py --seed 4294967296', "argument --seed: '4294967296' must be a whole number below 2**32"),
        ('suggest-level config.py --seed -1', "argument --seed: '-1' must be a whole number of at least 0"),
        ('convert x.pth', 'nothing to do with x.pth: give --inspect'),
    ):
        with pytest.raises(SystemExit):
            cli.main(line.split())
        said = capsys.readouterr().err.splitlines()[-1].partition('error: ')[2]
        assert said.startswith(text) and ('did you mean' in said) == ('did you mean' in text), said
    assert not (project / 'work_dirs').exists()


def test_the_traceback_can_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv('AMP_WRAPPER_DEBUG', '1')
    with pytest.raises(AmpUsageError, match=r'none\.py'):
        cli.main(['train', 'none.py'])


@pytest.mark.parametrize(
    ('error', 'status', 'said'),
    [
        (KeyboardInterrupt(), 130, ''),
        (BrokenPipeError(), 141, ''),
        (AmpUsageError('No.'), 1, 'amp-wrapper info: error: No.\n'),
        (
            ModuleNotFoundError('No module named', name='matplotlib.pyplot'),
            1,
            'amp-wrapper info: error: this needs matplotlib, which is not installed: pip install matplotlib\n',
        ),
    ],
)
def test_how_a_command_ends(
    error: BaseException, status: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(args: object) -> int:
        raise error

    monkeypatch.setattr(info_command, 'run', run)
    monkeypatch.setattr(cli.os, 'dup2', lambda old, new: None)
    monkeypatch.setattr(sys.stdout, 'fileno', lambda: 1, raising=False)
    assert cli.main(['info']) == status
    assert capsys.readouterr().err == said
    monkeypatch.setenv('AMP_WRAPPER_DEBUG', '1')
    with pytest.raises(type(error)):
        cli.main(['info'])


def test_a_defect_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(args: object) -> int:
        raise ModuleNotFoundError('No module named', name='nobody_has_this')

    monkeypatch.setattr(info_command, 'run', run)
    with pytest.raises(ModuleNotFoundError):
        cli.main(['info'])


def test_every_optional_package_is_installed_here() -> None:
    """So that its name is right, and its words for pip are those of the project."""
    import importlib.util

    assert [name for name in cli.OPTIONAL if importlib.util.find_spec(name) is None] == []


def test_a_reader_that_has_enough(tmp_path: Path) -> None:
    for index in range(50):
        (tmp_path / f'{index}.py').write_text('from apex import amp\n' + f'# {index}\n' * 200)
    with subprocess.Popen(
        [str(SCRIPT), 'migrate', str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ''
    assert process.returncode == 141


def test_migrate_and_convert(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / 'train.py'
    script.write_text('from apex import amp\n')
    assert cli.main(['migrate', str(script), '--write']) == 0
    assert script.read_text() == 'from amp_wrapper import amp\n'
    assert cli.main(['convert', str(FOREIGN / 'ema.pth'), '--to', 'fp16', str(tmp_path / 'out.pth')]) == 0
    assert 'ema.pth -> ' in capsys.readouterr().out and (tmp_path / 'out.pth').is_file()


def test_the_scripts_are_doors() -> None:
    """A script in ``tools`` does nothing but call the command."""
    texts = {(ROOT / 'tools' / name).read_text().partition('"""\n\n')[2] for name in start.SCRIPTS}
    assert len(texts) == 1 and 'sys.exit(script(__file__))' in texts.pop()
