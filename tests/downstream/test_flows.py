"""Every model at every level through the projects' own tools: train, validate, save, resume, test, and hand over."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import data
import pytest
import torch
from flows import Original, run_tool, small_config, tool, write_config
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import Runner
from zoo import Case, register

from amp_wrapper.nested import HALF_TYPES

CAST = {'O2': torch.float16, 'O5': torch.bfloat16}


@pytest.fixture(scope='session')
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp('pictures')


@pytest.fixture(scope='session')
def original() -> Iterator[Original]:
    process = Original()
    yield process
    process.close()


@HOOKS.register_module()
class Witness(Hook):
    """Remembers what a run was like from the inside."""

    seen: dict[str, Any] = {}

    def before_train(self, runner: Runner) -> None:
        self.seen['resumed'] = {key: value.clone() for key, value in runner.model.state_dict().items()}
        self.seen['start'] = runner.iter

    def after_train_iter(self, runner: Runner, *_: Any, **__: Any) -> None:
        types = {p.dtype for p in runner.model.parameters()}
        self.seen['types'] = types
        self.seen['wrapper'] = type(runner.optim_wrapper).__module__
        self.seen['level'] = runner.optim_wrapper.opt_level

    def after_val_epoch(self, runner: Runner, metrics: dict[str, float] | None = None) -> None:
        self.seen['val'] = dict(metrics or {})

    def after_test_epoch(self, runner: Runner, metrics: dict[str, float] | None = None) -> None:
        self.seen['test'] = dict(metrics or {})


@pytest.fixture(autouse=True)
def witness() -> dict[str, Any]:
    Witness.seen = {}
    return Witness.seen


def prepare(case: Case, pictures: Path, tmp_path: Path) -> Config:
    register(case.project)
    cfg = small_config(case, data.write(pictures, case.size), tmp_path / 'run')
    cfg.custom_hooks = [*cfg.custom_hooks, dict(type='mmengine.Witness')]
    return cfg


def load(path: Path) -> dict[str, Any]:
    return torch.load(path, map_location='cpu', weights_only=True)


def extra(project: str) -> list[str]:
    return ['--no-pin-memory', '--no-persistent-workers'] if project == 'mmpretrain' else []


def trained_weights(checkpoint: dict[str, Any]) -> dict[str, torch.Tensor]:
    """With EMAHook, mmengine saves the average as ``state_dict`` and the weights as those of the average."""
    ema = checkpoint.get('ema_state_dict')
    if ema is None:
        return checkpoint['state_dict']
    return {key.removeprefix('module.'): value for key, value in ema.items() if key.startswith('module.')}


def check_run(seen: dict[str, Any], level: str, validates: bool) -> None:
    assert seen['wrapper'] == 'amp_wrapper.optim_wrapper' and seen['level'] == level
    assert (CAST[level] in seen['types']) if level in CAST else (seen['types'] == {torch.float32})
    if validates:
        assert seen['val']['types/narrow'] == 0 and seen['val']['types/seen'] > 0
        assert len(seen['val']) > 2


def test_projects_own_tools(
    case: Case, level: str, pictures: Path, tmp_path: Path, witness: dict[str, Any], original: Original
) -> None:
    """``tools/train.py`` with the level from the command line, ``--resume``, ``tools/test.py``, the project alone."""
    cfg = prepare(case, pictures, tmp_path)
    path = write_config(cfg, tmp_path / f'{case.slug}.py')
    validates = cfg.val_dataloader is not None
    line = ['--cfg-options', 'optim_wrapper.type=amp_wrapper.AmpOptimWrapper', f'optim_wrapper.opt_level={level}']
    if level in ('O1', 'O2'):
        # the search for a dynamic scale would skip the few steps there are
        line.append('optim_wrapper.loss_scale=64')

    run_tool(tool(case.project, 'train.py'), str(path), *extra(case.project), *line)
    check_run(witness, level, validates)
    first = load(tmp_path / 'run' / 'epoch_1.pth')
    assert not any(value.dtype in HALF_TYPES for value in first['state_dict'].values())

    witness.clear()
    longer = 'train_cfg.max_epochs=2'
    run_tool(tool(case.project, 'train.py'), str(path), *extra(case.project), '--resume', *line, longer)
    check_run(witness, level, validates)
    assert witness['start'] == 2
    for key, value in trained_weights(first).items():
        assert witness['resumed'][key].equal(value), key
    last = tmp_path / 'run' / 'epoch_2.pth'
    second = load(last)
    assert second['meta']['iter'] == 4
    assert any(not second['state_dict'][key].equal(value) for key, value in first['state_dict'].items())
    assert all(torch.isfinite(v).all() for v in second['state_dict'].values() if v.is_floating_point())

    answer = original.evaluate(path, last, case.project)
    assert answer['types'] and not {'torch.float16', 'torch.bfloat16'} & set(answer['types'])
    if validates:
        witness.clear()
        run_tool(tool(case.project, 'test.py'), str(path), str(last))
        assert witness['test']['types/narrow'] == 0
        assert {key: float(value) for key, value in witness['test'].items()} == answer['metrics']


def test_amp_flag(case: Case, pictures: Path, tmp_path: Path, witness: dict[str, Any]) -> None:
    """``--amp`` alone is O1 with a dynamic scale, by this package, on a CPU."""
    path = write_config(prepare(case, pictures, tmp_path), tmp_path / f'{case.slug}.py')
    run_tool(tool(case.project, 'train.py'), str(path), *extra(case.project), '--amp')
    assert witness['wrapper'] == 'amp_wrapper.optim_wrapper' and witness['level'] == 'O1'
    state = load(tmp_path / 'run' / 'epoch_1.pth')['optimizer']
    assert state['loss_scaler']['scale'] > 0


def test_runner_and_inference_at_the_level(
    case: Case, level: str, pictures: Path, tmp_path: Path, witness: dict[str, Any]
) -> None:
    """The config line, mmengine's Runner, and a test at the level itself."""
    cfg = prepare(case, pictures, tmp_path)
    cfg.optim_wrapper.update(type='AmpOptimWrapper', opt_level=level)
    cfg.optim_wrapper.pop('loss_scale', None)
    cfg.experiment_name = f'{case.slug}_{level}_train'
    Runner.from_cfg(cfg).train()
    check_run(witness, level, cfg.val_dataloader is not None)
    if cfg.val_dataloader is None:
        return
    cfg = prepare(case, pictures, tmp_path)
    cfg.load_from = str(tmp_path / 'run' / 'epoch_1.pth')
    cfg.custom_hooks = [*cfg.custom_hooks, dict(type='amp_wrapper.AmpInferenceHook', opt_level=level)]
    cfg.experiment_name = f'{case.slug}_{level}_test'
    runner = Runner.from_cfg(cfg)
    metrics = runner.test()
    assert metrics['types/narrow'] == 0 and metrics['types/seen'] > 0
    if level in CAST:
        assert CAST[level] in {p.dtype for p in runner.model.parameters()}
