"""Every config is parsed, built and stepped; the recipes for other data run on generated images."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from grid import long
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.runner import Runner
from torch import Tensor, nn

from amp_wrapper import AmpOptimWrapper

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / 'configs'
# tests/system/test_gan_example.py has the GANs
DIGITS = sorted(path.name for path in (CONFIGS / 'digits').glob('*.py') if not path.name.startswith('gan_'))


@pytest.fixture(autouse=True)
def _examples_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    sys.modules.pop('examples', None)


def step_once(cfg: Config, tmp_path: Path, batch_size: int) -> Runner:
    """One iteration and one validation, as the runner does them."""
    cfg.work_dir = str(tmp_path)
    cfg.experiment_name = f'{tmp_path.parent.name}_{tmp_path.name}'
    cfg.log_level = 'WARNING'
    cfg.train_cfg = dict(by_epoch=False, max_iters=1, val_interval=1)
    cfg.param_scheduler = dict(type='ConstantLR', factor=1.0, by_epoch=False)
    for loader in (cfg.train_dataloader, cfg.val_dataloader):
        loader.batch_size = batch_size
        loader.num_workers = 0
        loader.persistent_workers = False
    runner = Runner.from_cfg(cfg)
    runner.train()
    return runner


@pytest.mark.parametrize('name', DIGITS)
def test_digits_configs(name: str, tmp_path: Path) -> None:
    runner = step_once(Config.fromfile(CONFIGS / 'digits' / name), tmp_path, 64)
    assert type(runner.optim_wrapper) is AmpOptimWrapper
    assert runner.optim_wrapper.opt_level == name[4:6].upper()
    assert isinstance(runner.model.data_preprocessor.mean, Tensor)
    assert runner.message_hub.get_scalar('val/accuracy/top1').current() >= 0


def test_the_ema_config_averages_masters(tmp_path: Path) -> None:
    cfg = Config.fromfile(CONFIGS / 'digits' / 'cnn_o2_ema.py')
    plain = Config.fromfile(CONFIGS / 'digits' / 'cnn_o2.py')
    (hook,) = cfg.custom_hooks
    cfg.train_cfg.max_epochs = 2
    cfg.train_dataloader.batch_size = 479
    cfg.work_dir, cfg.experiment_name, cfg.log_level = str(tmp_path), f'{tmp_path.parent.name}_ema', 'WARNING'
    runner = Runner.from_cfg(cfg)
    seen: list[dict[str, Tensor]] = []

    class Watch(Hook):
        priority = 'VERY_LOW'

        def after_train_iter(self, runner: Runner, *args: object, **kwargs: object) -> None:
            seen.append({name: value.clone() for name, value in runner.model.state_dict().items()})

    runner.register_hook(Watch())
    runner.train()
    assert runner.model.fc.weight.dtype is torch.float16
    # what a state dict of the model shows are the masters: the average of these is made anew here
    average = seen[0]['fc.weight']
    for weights in seen[1:]:
        average = torch.lerp(average, weights['fc.weight'], hook.momentum)
    file = torch.load(tmp_path / 'epoch_2.pth', weights_only=True)
    assert file['state_dict']['fc.weight'].dtype is torch.float32
    torch.testing.assert_close(file['state_dict']['fc.weight'], average, rtol=1e-5, atol=1e-7)
    assert torch.equal(file['ema_state_dict']['module.fc.weight'], seen[-1]['fc.weight'])
    cfg_text, plain_text = (
        {key: value for key, value in c.to_dict().items() if key in ('model', 'optim_wrapper', 'train_dataloader')}
        for c in (Config.fromfile(CONFIGS / 'digits' / 'cnn_o2_ema.py'), plain)
    )
    assert cfg_text == plain_text


def test_the_ddp_config_keeps_the_learning_rate_per_image() -> None:
    plain = Config.fromfile(CONFIGS / 'digits' / 'cnn_o2.py')
    cfg = Config.fromfile(CONFIGS / 'digits' / 'cnn_o2_ddp.py')
    loader, rule, counts = cfg.train_dataloader, cfg.auto_scale_lr, cfg.optim_wrapper.accumulative_counts
    assert rule.enable and counts > 1
    for processes in (1, 2, 8):
        lr = cfg.optim_wrapper.optimizer.lr * processes * loader.batch_size / rule.base_batch_size
        images = processes * loader.batch_size * counts
        assert lr / images == pytest.approx(plain.optim_wrapper.optimizer.lr / plain.train_dataloader.batch_size)


def test_the_ddp_config_runs_in_one_process(tmp_path: Path) -> None:
    cfg = Config.fromfile(CONFIGS / 'digits' / 'cnn_o2_ddp.py')
    cfg.work_dir, cfg.experiment_name, cfg.log_level = str(tmp_path), f'{tmp_path.parent.name}_ddp', 'WARNING'
    cfg.train_cfg = dict(by_epoch=False, max_iters=4, val_interval=4)
    cfg.param_scheduler = None
    # a first scale of 2^16 may overflow, and the steps are counted here
    cfg.optim_wrapper.loss_scale = 1024.0
    runner = Runner.from_cfg(cfg)
    steps: list[bool] = []

    class Watch(Hook):
        def before_train_iter(self, runner: Runner, *args: object, **kwargs: object) -> None:
            self.before = runner.model.state_dict()['fc.weight'].clone()

        def after_train_iter(self, runner: Runner, *args: object, **kwargs: object) -> None:
            steps.append(not torch.equal(self.before, runner.model.state_dict()['fc.weight']))

    runner.register_hook(Watch())
    runner.train()
    assert steps == [False, True, False, True]
    assert runner.optim_wrapper.get_lr()['lr'] == [pytest.approx(0.1)]


def test_the_six_levels_differ_by_their_level_alone() -> None:
    texts = []
    for level in range(6):
        cfg = Config.fromfile(CONFIGS / 'digits' / f'cnn_o{level}.py')
        assert cfg.optim_wrapper.pop('opt_level') == f'O{level}'
        texts.append(cfg.pretty_text)
    assert len(set(texts)) == 1


def test_pure_python_config_is_the_text_config() -> None:
    text = Config.fromfile(CONFIGS / 'digits' / 'cnn_o2.py')
    pure = Config.fromfile(CONFIGS / 'digits' / 'cnn_o2_pure.py')

    def plain(value: object) -> object:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(item) for item in value]
        # a class is written as its dotted path there, and by its bare name here
        return value.split('.')[-1] if isinstance(value, str) else value

    for key in ('model', 'train_dataloader', 'val_dataloader', 'optim_wrapper', 'param_scheduler', 'train_cfg'):
        assert plain(text.to_dict()[key]) == plain(pure.to_dict()[key]), key


@long
def test_cifar10_recipe(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).integers(0, 256, (2, 1 + 3072), np.uint8)
    rows[:, 0] = [3, 7]
    for name in (*(f'data_batch_{i}.bin' for i in range(1, 6)), 'test_batch.bin'):
        rows.tofile(tmp_path / name)
    cfg = Config.fromfile(CONFIGS / 'cifar10' / 'resnet50_o2.py')
    for loader in (cfg.train_dataloader, cfg.val_dataloader):
        loader.dataset.data_root = str(tmp_path)
    # a width that float16 on a CPU finishes; what is stepped is still the whole recipe
    runner = step_once(cfg, tmp_path / 'work', 2)
    convolutions = [m for m in runner.model.modules() if isinstance(m, nn.Conv2d)]
    assert len(convolutions) == 53
    assert {m.weight.dtype for m in convolutions} == {torch.float16}
    assert runner.train_dataloader.dataset[0]['labels'] == 3


def test_imagenet_recipe(tmp_path: Path) -> None:
    import mmcv

    for part in ('train', 'val'):
        for name in ('n01', 'n02'):
            image = np.random.default_rng(1).integers(0, 256, (80, 60, 3), np.uint8)
            mmcv.imwrite(image, str(tmp_path / part / name / 'one.png'))
    cfg = Config.fromfile(CONFIGS / 'imagenet' / 'resnet50_o2.py')
    cfg.train_dataloader.dataset.data_root = str(tmp_path / 'train')
    cfg.val_dataloader.dataset.data_root = str(tmp_path / 'val')
    # 224 pixels cost a minute in float16 on a CPU
    cfg.train_dataloader.dataset.pipeline[0].size = 64
    cfg.val_dataloader.dataset.pipeline = [dict(type='Resize', scale=(72, 72)), dict(type='CenterCrop', crop_size=64)]
    runner = step_once(cfg, tmp_path / 'work', 2)
    wrapper = runner.optim_wrapper
    assert len(wrapper.optimizer.param_groups) > 100
    assert runner.train_dataloader.dataset.metainfo['classes'] == ['n01', 'n02']
    decays = {group['weight_decay'] for group in wrapper.optimizer.param_groups}
    assert decays == {0.0, 1e-4}


@pytest.mark.parametrize(('name', 'words'), [('cifar10', 'binary version'), ('imagenet', 'class folders')])
def test_missing_data_says_where_it_belongs(name: str, words: str, tmp_path: Path) -> None:
    cfg = Config.fromfile(CONFIGS / name / 'resnet50_o2.py')
    cfg.train_dataloader.dataset.data_root = str(tmp_path / 'nowhere')
    with pytest.raises(FileNotFoundError, match=words):
        Runner.build_dataloader(cfg.train_dataloader)
