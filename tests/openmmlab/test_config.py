"""Configs of mmengine: what is built from them, and mistakes in them that are named before anything is built or written."""

from __future__ import annotations

import copy
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toy
from bits import same
from mmengine.config import Config
from mmengine.logging import MMLogger
from mmengine.optim import OptimWrapper, OptimWrapperDict
from mmengine.registry import MODELS, OPTIM_WRAPPER_CONSTRUCTORS, OPTIM_WRAPPERS
from mmengine.runner import Runner
from torch import nn

from amp_wrapper import AmpConfigError, AmpOptimWrapper, MMFullyShard
from amp_wrapper.cli import main

SGD = dict(type='SGD', lr=0.1)
WRAPPER: dict[str, Any] = dict(
    type='AmpOptimWrapper',
    opt_level='O2',
    keep_fp32=['fc'],
    optimizer=dict(type='SGD', lr=0.2, momentum=0.9, weight_decay=1e-3),
    accumulative_counts=2,
    clip_grad=dict(max_norm=0.5),
    paramwise_cfg=dict(bias_decay_mult=0.0, custom_keys=dict(fc=dict(lr_mult=0.5))),
)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config(**overrides: Any) -> str:
    """A file in the current folder."""
    trained_with = overrides.pop('optim_wrapper', WRAPPER)
    words = toy.toy_config('work', copy.deepcopy(trained_with), **overrides).to_dict()
    Path('config.py').write_text(''.join(f'{key} = {value!r}\n' for key, value in words.items()))
    return 'config.py'


def report(*words: str, **overrides: Any) -> dict[str, Any]:
    assert main(['report', config(**overrides), '--json', 'a.json', *words]) == 0
    return json.loads(Path('a.json').read_text())


# -- reports on a config --------------------------------------------------------------------------------------------------


@OPTIM_WRAPPERS.register_module()
class FixedLevel(AmpOptimWrapper):
    """A wrapper of a user, which chooses its level itself."""

    def __init__(self, warm: int = 3, **kwargs: Any) -> None:
        super().__init__(opt_level='O2', keep_fp32=['fc'], **kwargs)
        self.warm = warm


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class Constructor:
    """Of a user: builds a wrapper that the config does not name."""

    def __init__(self, optim_wrapper_cfg: Any, paramwise_cfg: Any = None) -> None: ...

    def __call__(self, model: nn.Module) -> OptimWrapper:
        return AmpOptimWrapper(opt_level='O5', optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class Reading(Constructor):
    """Has an entry of its own in the config."""

    def __init__(self, optim_wrapper_cfg: Any, paramwise_cfg: Any = None) -> None:
        self.own = optim_wrapper_cfg['own']


@pytest.mark.parametrize(
    ('words', 'level'),
    [
        (dict(), 'O0'),
        (dict(type='AmpOptimWrapper', loss_scale='dynamic'), 'O1'),
        (dict(type='AmpOptimWrapper', dtype='bfloat16'), 'O4'),
        (dict(type='ApexOptimWrapper', opt_level='O3'), 'O3'),
        (dict(type='TorchAmpOptimWrapper', dtype='bfloat16', loss_scale=dict(init_scale=2.0**30)), 'O4'),
        (dict(type='TorchAmpOptimWrapper', loss_scale=512.0), 'O1'),
        (dict(type='FixedLevel', warm=2), 'O2'),
        (dict(constructor='Constructor'), 'O5'),
        (dict(constructor='Reading', own=3), 'O5'),
    ],
    ids=str,
)
def test_report_is_at_the_level_of_the_config(words: dict[str, Any], level: str, here: Path) -> None:
    found = report(optim_wrapper={'optimizer': SGD, **words})
    assert found['level'] == level
    assert words.get('loss_scale') != 512.0 or '512' in found['policy']


def test_stock_wrapper_that_the_config_imports(here: Path) -> None:
    """It needs apex, and is reported on without."""
    words = toy.toy_config('work', {}).to_dict()
    rows = [f'{key} = {value!r}\n' for key, value in words.items() if key != 'optim_wrapper']
    rows += ["optim_wrapper = dict(type=ApexOptimWrapper, opt_level='O2', optimizer=dict(type='SGD', lr=0.1))\n"]
    Path('config.py').write_text('from mmengine.optim import ApexOptimWrapper\n' + ''.join(rows))
    assert main(['report', 'config.py', '--json', 'a.json']) == 0
    assert json.loads(Path('a.json').read_text())['level'] == 'O2'


def rules(found: dict[str, Any], name: str) -> set[tuple[str, str]]:
    """The ops of a module that run in FP32, and why."""
    (module,) = [module for module in found['modules'] if module['name'] == name]
    return {(op['op'], op['rule']) for op in module['fp32_ops']}


def test_report_is_about_the_model_and_the_data_of_the_config(here: Path) -> None:
    model, data = toy.ToyModel(), toy.ToyData()
    torch.save({'state_dict': {f'module.{name}': value for name, value in model.state_dict().items()}}, 'trained.pth')
    loader = {**toy.loader(shuffle=False, num_workers=2), 'persistent_workers': True, 'prefetch_factor': 2}
    # the images of the first batch, whose mean the preprocessor takes off
    with torch.no_grad():
        wanted = model(data.images[:4] - model.data_preprocessor.mean, data.labels[:4], 'loss')['loss'].item()
    for words, more in ((('--checkpoint', 'trained.pth'), {}), ((), dict(load_from='trained.pth'))):
        found = report(*words, train_dataloader=loader, **more)
        assert found['loss']['fp32'] == pytest.approx(wanted, rel=1e-6)
    assert rules(found, 'fc') == {('addmm', 'keep_fp32')}
    assert rules(found, 'bn') == {('native_batch_norm', 'batchnorm')}
    # the loss is inside of forward
    assert ('nll_loss_forward', 'registry') in rules(found, '')
    outputs = {module['name']: module['outputs'] for module in found['modules']}
    assert outputs['data_preprocessor'] == ['float32'] and outputs['conv'] == ['float16']


@pytest.mark.filterwarnings('ignore:torch.utils.checkpoint')
def test_reports_draw_the_same_random_numbers_and_leave_nothing(here: Path, caplog: pytest.LogCaptureFixture) -> None:
    logger = MMLogger.get_current_instance()
    logger.setLevel('INFO')
    logger.addHandler(caplog.handler)
    words = dict(model=dict(type='Writing', dropout=0.5), activation_checkpointing=['norm'])
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        np.random.seed(seed)
        before = torch.get_rng_state(), np.random.get_state()[1].copy()
        found.append(report(**words))
        assert same(before, (torch.get_rng_state(), np.random.get_state()[1].copy()))
    assert found[0] == found[1]
    assert found[0]['loss']['level'] == pytest.approx(found[0]['loss']['fp32'], rel=0.01)
    assert sorted(os.listdir(here)) == ['a.json', 'config.py']
    # mmengine logs how each parameter was initialised
    assert {record.name for record in caplog.records} <= {'amp_wrapper'} and logger.level == logging.INFO
    logger.removeHandler(caplog.handler)


@MODELS.register_module()
class WritingPreprocessor(toy.ToyPreprocessor):
    """Writes into what it is given, as those of some projects do."""

    def forward(self, data: dict[str, Any], training: bool = False) -> dict[str, Any]:
        data['inputs'] += 1
        return super().forward(data, training)


@MODELS.register_module()
class Writing(toy.ToyModel):
    def __init__(self, **words: Any) -> None:
        super().__init__(**words)
        self.data_preprocessor = MODELS.build(dict(type='WritingPreprocessor'))


def test_levels_are_tried_with_the_optimizer_and_batches_of_the_config(here: Path) -> None:
    """Each batch as it was read; rates of 0, and gradients that are clipped to nothing, leave the loss where it is."""
    still, clipped = copy.deepcopy(WRAPPER), copy.deepcopy(WRAPPER)
    still['paramwise_cfg']['custom_keys'] = {name: dict(lr_mult=0.0) for name in ('conv', 'bn', 'norm', 'fc')}
    clipped['clip_grad'] = dict(max_norm=1e-12)
    clipped['optimizer']['weight_decay'] = 0.0
    for words in (still, clipped, WRAPPER):
        loader = toy.loader() if words is WRAPPER else toy.loader(length=4, shuffle=False)
        path = config(optim_wrapper=words, train_dataloader=loader, model=dict(type='Writing'))
        assert main(['suggest-level', path, '--levels', 'O4', '--steps', '4', '--json', 'a.json']) == 0
        o0, o4 = (level['losses'] for level in json.loads(Path('a.json').read_text())['levels'])
        assert o4 == pytest.approx(o0, rel=0.02) and len(set(o0)) == (4 if words is WRAPPER else 1)


# -- mistakes -------------------------------------------------------------------------------------------------------------


@MODELS.register_module()
class OwnStep(toy.ToyModel):
    def train_step(self, data: Any, optim_wrapper: Any) -> Any:
        return super().train_step(data, optim_wrapper)


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class TwoOptimizers(Constructor):
    """Builds two wrappers although the config looks like one."""

    def __call__(self, model: Any) -> Any:
        parts = {name: torch.optim.SGD(getattr(model, name).parameters(), lr=0.1) for name in ('conv', 'fc')}
        return OptimWrapperDict(**{name: OptimWrapper(optimizer) for name, optimizer in parts.items()})


def wrapper(**words: Any) -> dict[str, Any]:
    return dict(optim_wrapper=dict(type='AmpOptimWrapper', opt_level='O2', optimizer=SGD) | words)


#: What is wrong in a config, and what the error of ``report`` names.
MISTAKES: list[tuple[dict[str, Any], str]] = [
    (dict(optim_wrapper=None), 'must have one optimizer'),
    (dict(optim_wrapper=dict(a=dict(optimizer=SGD), b=dict(optimizer=SGD))), 'must have one optimizer'),
    (dict(optim_wrapper=dict(constructor='TwoOptimizers', optimizer=SGD)), 'must have one optimizer'),
    (wrapper(opt_level='O9'), 'O9'),
    (wrapper(clip_grad=dict(max_norm=1.0, max_nrm=1.0)), 'max_nrm'),
    (dict(model=dict(type='OwnStep')), 'train_step of its own'),
    (dict(load_from='nothing.pth'), 'nothing.pth'),
    (dict(train_dataloader=None), 'data cannot be read'),
    (dict(train_dataloader={**toy.loader(), 'dataset': dict(type='ToyData', length='many')}), 'data cannot be read'),
    (dict(train_dataloader={**toy.loader(length=2), 'drop_last': True}), 'data set is empty'),
]


def test_mistakes_are_named_in_one_line(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = []
    for overrides, text in MISTAKES:
        status, said = main(['report', config(**overrides)]), capsys.readouterr()
        if status != 1 or text not in said.err or said.err.count('\n') != 1 or said.out.strip():
            wrong.append((overrides, status, said.err))
    assert wrong == []


def test_conflicts_are_found_before_a_training_writes_anything(here: Path) -> None:
    """Without the command, too. A registry of mmengine keeps the message, and not always the type."""
    runner = Runner.from_cfg(Config.fromfile(config(**wrapper(patch_torch_functions=True, master_weights=False))))
    with pytest.raises(Exception, match='patch_torch_functions=True conflicts'):
        runner.train()
    assert not list(here.glob('work/*.pth'))


# -- configs that are right -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('words', [dict(type='FixedLevel', warm=2), dict(constructor='Reading', own=3)], ids=str)
def test_wrappers_of_the_user_are_trained_with(words: dict[str, Any], here: Path) -> None:
    path = config(optim_wrapper=dict(optimizer=SGD, **words), train_cfg=dict(by_epoch=True, max_epochs=1))
    assert main(['train', path]) == 0
    assert (here / 'work' / 'epoch_1.pth').exists()


LATE = """
import sys, torch
from mmengine.dataset import default_collate
from mmengine.model import BaseModel
from mmengine.runner import Runner
class Model(BaseModel):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(2, 2)
    def forward(self, x, mode='tensor'):
        return dict(loss=self.fc(x).square().mean())
data = dict(dataset=[dict(x=torch.randn(2)) for _ in range(4)], batch_size=2, collate_fn=default_collate,
            sampler=dict(type='DefaultSampler', shuffle=False))
wrapper = dict(type='amp_wrapper.AmpOptimWrapper', opt_level='O2', optimizer=dict(type='SGD', lr=0.1))
for resume in (False, True):
    runner = Runner(model=Model(), work_dir=sys.argv[1], train_dataloader=data, optim_wrapper=wrapper, resume=resume,
                    train_cfg=dict(by_epoch=True, max_epochs=1 + resume), log_level='ERROR', experiment_name=str(resume))
    assert resume or 'amp_wrapper' not in sys.modules
    runner.train()
    assert (runner.iter, runner.model.fc.weight.dtype) == (2 + 2 * resume, torch.float16), runner.iter
"""


def test_scoped_name_needs_no_import(tmp_path: Path) -> None:
    """The package is imported when the runner is there already."""
    done = subprocess.run([sys.executable, '-c', LATE, str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    saved = toy.checkpoint(tmp_path)
    assert {value.dtype for value in saved['state_dict'].values()} == {torch.float32}
    assert saved['optimizer']['loss_scaler']['scale'] > 0 and saved['optimizer']['amp']['opt_level'] == 'O2'


# -- sharding ---------------------------------------------------------------------------------------------------------------


def test_sizes_of_meshes() -> None:
    torch.distributed.init_process_group('gloo', store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        for wrong in (0, True, '1', (1, True), np.int64(2), [], (1, 1, 1)):
            with pytest.raises(AmpConfigError, match='mesh='):
                MMFullyShard(nn.Linear(2, 2), mesh=wrong)
        for sizes in (None, 1, [1], (np.int32(1), np.int64(1))):
            MMFullyShard(nn.Linear(2, 2), mesh=sizes, reshard_after_forward=np.int64(1))
    finally:
        torch.distributed.destroy_process_group()
