"""The command-line tools, typed as users type them."""

from __future__ import annotations

import re
import shlex
import socket
from pathlib import Path

import pytest
import torch
import toy
from bits import differences
from command_line import ROOT, tool
from fsdp import skip_without_fsdp
from grid import but, grid, long
from mmengine.config import Config

from amp_wrapper import AmpConfigError
from amp_wrapper.openmmlab import training
from amp_wrapper.openmmlab.config_options import merge_options

SHORT = ['--cfg-options', 'train_cfg.max_epochs=2', 'log_level=WARNING']


def test_train_resume_and_test(tmp_path: Path) -> None:
    config = 'configs/digits/cnn_o2.py'
    work = ['--work-dir', str(tmp_path / 'whole')]
    said = tool('tools/train.py', config, *work, *SHORT)
    assert 'accuracy/top1' in said
    assert 'epoch_2.pth' in said

    # a run cut in two equals the run in one piece
    parts = ['--work-dir', str(tmp_path / 'parts')]
    tool('tools/train.py', config, *parts, '--resume', str(tmp_path / 'whole' / 'epoch_1.pth'), *SHORT)
    left, right = (toy.checkpoint(tmp_path / name, 'epoch_2.pth') for name in ('whole', 'parts'))
    for key in ('state_dict', 'optimizer', 'param_schedulers'):
        assert differences(left[key], right[key]) == [], key

    checkpoint = str(tmp_path / 'whole' / 'epoch_2.pth')
    testing = ['--work-dir', str(tmp_path / 'test'), '--cfg-options', 'log_level=WARNING']
    said = tool('tools/test.py', config, checkpoint, '--opt-level', 'O4', *testing)
    assert 'Tested at O4: accuracy/top1 ' in said
    assert 'what was tested is not the model' not in said
    said = tool(
        'tools/test.py', config, checkpoint, *testing, 'model.backbone.channels=[16,32,48]', 'model.in_channels=48'
    )
    told = re.search(r'\n(\d+) of the (\d+) parameters and buffers of the model are not those of the checkpoint', said)
    assert told is not None and 0 < int(told[1]) < int(told[2]) and said.index('Tested at FP32') > told.start()


@grid
def test_level_from_the_command_line_and_seed_from_the_checkpoint(tmp_path: Path) -> None:
    config = tmp_path / 'plain.py'
    config.write_text(
        f'_base_ = {str(ROOT / "configs/digits/cnn_o0.py")!r}\n'
        "optim_wrapper = dict(_delete_=True, type='OptimWrapper', optimizer=dict(type='SGD', lr=0.1))\n"
        'randomness = dict(_delete_=True, seed=None)\n'
    )
    work = ['--work-dir', str(tmp_path / 'work'), '--cfg-options', 'log_level=INFO']
    said = tool('tools/train.py', str(config), '--opt-level', 'O5', *work, 'train_cfg.max_epochs=1')
    assert 'O5 (bfloat16 weights' in said
    seed = toy.checkpoint(tmp_path / 'work')['meta']['seed']
    said = tool('tools/train.py', str(config), '--amp', '--resume', *work, 'train_cfg.max_epochs=2')
    assert 'O1 (FP32 weights' in said
    assert 'saved at O5, resumed at O1' in said
    assert toy.checkpoint(tmp_path / 'work')['meta']['seed'] == seed
    # samplers are built before mmengine reads the checkpoint, so the seed must be there from the start
    assert f'seed: {seed}' in said[: said.index('Config:')]


def free_port() -> str:
    with socket.socket() as listener:
        listener.bind(('127.0.0.1', 0))
        return str(listener.getsockname()[1])


@pytest.mark.parametrize(
    ('name', 'words'),
    [
        pytest.param('cnn_o2', [], marks=long),
        ('cnn_o2_ddp', []),
        pytest.param('cnn_o5_fsdp', [], marks=grid),
        pytest.param('vit_o5_fsdp', ['train_cfg.val_interval=1'], marks=long),
        pytest.param(
            'gan_o2_o5',
            ['model.generator.width=4', 'model.discriminator.width=4', 'train_cfg.val_interval=2'],
            marks=long,
        ),
    ],
)
def test_two_processes_on_a_cpu(name: str, words: list[str], tmp_path: Path) -> None:
    if name.endswith('_fsdp'):
        skip_without_fsdp()
    cpu = dict(CUDA_VISIBLE_DEVICES='')
    config = f'configs/digits/{name}.py'
    work = ['--work-dir', str(tmp_path / 'work')]
    said = tool('tools/dist_train.sh', config, '2', *work, *SHORT, *words, **cpu, PORT=free_port())
    assert 'Finished: epoch 2' in said
    if name in ('cnn_o2', 'vit_o5_fsdp'):
        # the command that was printed trains with two processes
        command = shlex.split(said[said.index('tools/dist_train.sh', said.index('A new training')) :].splitlines()[0])
        assert command[:3] == ['tools/dist_train.sh', config, '2']
        said = tool(*command, **cpu, PORT=free_port())
        assert 'Finished: epoch 4' in said
    if name == 'vit_o5_fsdp':
        folder = tmp_path / 'work_4_epochs' / 'epoch_4.pth'
        said = tool('tools/convert_checkpoint.py', str(folder), '--inspect', '--to', 'stock')
        assert 'a folder of shards, checksums agree' in said and 'make a file of it: --to stock' in said
        scores = [
            re.findall(r'accuracy/top1 [\d.]+', tool('tools/test.py', config, str(path)))[-1]
            for path in (folder, folder.with_name('epoch_4_stock.pth'))
        ]
        assert scores[0] == scores[1]
    if name == 'gan_o2_o5':
        assert (tmp_path / 'work' / 'samples' / 'epoch_2.png').is_file()


def test_what_a_config_says_about_ddp_holds_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, 'init_process_group', lambda backend: None)
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    plain = dict(type='MMDistributedDataParallel', broadcast_buffers=False, device_ids=None)
    own = dict(type='MMSeparateDistributedDataParallel', find_unused_parameters=True)
    for words, expected in (
        (dict(), dict(plain, find_unused_parameters=False)),
        (dict(find_unused_parameters=True), dict(plain, find_unused_parameters=True)),
        (dict(model_wrapper_cfg=dict(own)), dict(own, device_ids=None)),
    ):
        cfg = Config(dict(launcher='pytorch', **words))
        training.start_processes_on_cpu(cfg)
        assert dict(cfg.model_wrapper_cfg) == expected
    cfg = Config(dict(launcher='none'))
    training.start_processes_on_cpu(cfg)
    assert 'model_wrapper_cfg' not in cfg


def test_mistakes_are_answered_in_a_line(tmp_path: Path) -> None:
    work = ['--work-dir', str(tmp_path)]
    said = tool('tools/train.py', 'configs/digits/cnn_o2.py', *work, '--opt-level', 'O9', ok=False)
    assert "invalid choice: 'O9'" in said
    said = tool(
        'tools/train.py', 'configs/digits/cnn_o2.py', *work, '--cfg-options', 'optim_wrapper.opt_level=o2', ok=False
    )
    assert said.startswith("AmpConfigError: opt_level='o2' is no opt level. Write 'O2'") and said.count('\n') == 1
    assert 'PARTITION JOB_NAME CONFIG WORK_DIR' in tool('tools/slurm_train.sh', ok=False)
    assert 'CONFIG PROCESSES' in tool('tools/dist_train.sh', ok=False)


def test_help_teaches() -> None:
    said = tool('tools/train.py', '--help')
    for word in (
        '--work-dir',
        '--resume',
        '--amp',
        '--opt-level',
        '--cfg-options',
        '--auto-scale-lr',
        '--launcher',
        '--seed',
    ):
        assert word in said
    assert 'FP32 masters' in said
    assert '--opt-level' in tool('tools/test.py', '--help')


@pytest.mark.parametrize('name', but(['cifar10'], ['cifar10', 'imagenet']))
@pytest.mark.parametrize('script', but(['tools/test.py'], ['tools/train.py', 'tools/test.py']))
def test_one_data_path_moves_every_data_set(name: str, script: str, tmp_path: Path) -> None:
    """The data are not there, so each tool ends by naming where it looked: below the path that was typed."""
    config = f'configs/{name}/resnet50_o2.py'
    weights = tmp_path / 'weights.pth'
    torch.save(dict(state_dict={}), weights)
    words = [config] if script == 'tools/train.py' else [config, str(weights)]
    root = tmp_path / 'elsewhere'
    said = tool(
        script,
        *words,
        '--work-dir',
        str(tmp_path / 'work'),
        '--cfg-options',
        f'data_root={root}',
        'log_level=ERROR',
        ok=False,
    )
    assert said.splitlines()[-1].startswith(f'AmpUsageError: the data cannot be read: {root}/')


def test_data_path_moves_nested_data_sets_and_annotations() -> None:
    """mmdetection keeps data sets inside others and annotations in evaluators; mmpretrain names no root at the top."""
    inner = dict(type='CocoDataset', data_root='data/coco/', ann_file='annotations/a.json')
    cfg = Config(
        dict(
            data_root='data/coco/',
            train_dataloader=dict(dataset=dict(type='MultiImageMixDataset', dataset=inner)),
            val_dataloader=None,
            val_evaluator=[dict(type='CocoMetric', ann_file='data/coco/annotations/v.json'), dict(name='data/cocoa')],
        )
    )
    merge_options(cfg, dict(data_root='/new/'))
    assert cfg.train_dataloader.dataset.dataset.data_root == '/new/'
    assert cfg.val_evaluator[0].ann_file == '/new/annotations/v.json' and cfg.val_evaluator[1].name == 'data/cocoa'
    cfg = Config(dict(train_dataloader=dict(dataset=inner), test_dataloader=dict(dataset=dict(data_root='data/coco'))))
    merge_options(cfg, dict(data_root='/new'))
    assert cfg.train_dataloader.dataset.data_root == '/new/' and cfg.test_dataloader.dataset.data_root == '/new'
    with pytest.raises(AmpConfigError, match='names no data_root'):
        merge_options(Config(dict(train_dataloader=dict(dataset=dict(type='X')))), dict(data_root='/new'))


@grid
def test_a_config_without_randomness(tmp_path: Path) -> None:
    """The configs of mmdetection and mmsegmentation have none."""
    text = (ROOT / 'configs/digits/cnn_o2.py').read_text().replace("'../", f"'{ROOT}/configs/")
    (tmp_path / 'config.py').write_text(text + '\nrandomness = dict(_delete_=True)\n')
    said = tool('tools/train.py', str(tmp_path / 'config.py'), '--work-dir', str(tmp_path / 'work'), *SHORT)
    assert 'Finished: epoch 2' in said
