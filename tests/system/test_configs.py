"""The configs of the digits are parsed, built and stepped in one process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from mmengine.config import Config
from mmengine.optim import OptimWrapperDict
from mmengine.runner import Runner

from amp_wrapper import AmpOptimWrapper

CONFIGS = Path(__file__).resolve().parents[2] / 'configs'


@pytest.fixture(autouse=True)
def _examples_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(CONFIGS.parent))
    sys.modules.pop('examples', None)


def step_once(cfg: Config, work_dir: Path, batch_size: int) -> Runner:
    """One iteration and one validation, as the runner does them."""
    cfg.work_dir, cfg.experiment_name, cfg.log_level = str(work_dir), f'config_{work_dir.parent.name}', 'WARNING'
    cfg.train_cfg = dict(by_epoch=False, max_iters=1, val_interval=1)
    cfg.param_scheduler = dict(type='ConstantLR', factor=1.0, by_epoch=False)
    for loader in (cfg.train_dataloader, cfg.val_dataloader):
        loader.update(batch_size=batch_size, num_workers=0, persistent_workers=False)
    runner = Runner.from_cfg(cfg)
    runner.train()
    return runner


@pytest.mark.parametrize('name', sorted(path.stem for path in (CONFIGS / 'digits').glob('*.py')))
def test_digits_configs_train_at_their_level(name: str, tmp_path: Path) -> None:
    runner = step_once(Config.fromfile(CONFIGS / 'digits' / f'{name}.py'), tmp_path, 64)
    found = runner.optim_wrapper
    wrappers = list(found.values()) if isinstance(found, OptimWrapperDict) else [found]
    assert all(type(wrapper) is AmpOptimWrapper for wrapper in wrappers)
    # cnn_o2_ema, gan_o2_o5
    levels = [part.upper() for part in name.split('_') if part[0] == 'o' and part[1:].isdigit()]
    assert [wrapper.opt_level for wrapper in wrappers] == levels
    assert all(weight.isfinite().all() for weight in runner.model.parameters())
