"""The configs that inherit from the projects: parsed, built with their full-size models, and attached."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import skip_without_ops
from mmengine.config import Config
from mmengine.model import revert_sync_batchnorm
from mmengine.optim import build_optim_wrapper
from mmengine.registry import MODELS, init_default_scope
from zoo import CASES, register

from amp_wrapper import AmpOptimWrapper
from amp_wrapper.openmmlab.projects import inherited, problems

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / 'configs').glob('mm*/*.py'))


def test_there_is_one_for_every_model() -> None:
    bases = {Config.fromfile(path).filename and _base(path) for path in CONFIGS}
    wanted = {f'{case.project}::{case.config}' for case in CASES if case.name != 'YOLOX'}
    assert wanted <= bases and any('yolox' in base for base in bases)


def _base(path: Path) -> str:
    line = next(line for line in path.read_text().splitlines() if line.startswith('_base_'))
    return line.split("'")[1]


@pytest.mark.parametrize('path', CONFIGS, ids=lambda path: f'{path.parent.name}/{path.stem}')
def test_config(path: Path) -> None:
    project = path.parent.name
    skip_without_ops(project)
    assert inherited(path) == [project] and problems(project) == []
    level = path.stem[-2:].upper()
    cfg = Config.fromfile(path)
    register(project)
    init_default_scope(cfg.default_scope)
    if 'data_preprocessor' in cfg:
        cfg.model.setdefault('data_preprocessor', cfg.data_preprocessor)
    model = revert_sync_batchnorm(MODELS.build(cfg.model))
    wrapper = build_optim_wrapper(model, cfg.optim_wrapper)
    assert type(wrapper) is AmpOptimWrapper and wrapper.opt_level == level
    wrapper.initialize_count_status(model, 0, 10)
    types = {p.dtype for p in model.parameters()}
    narrow = {'O2': torch.float16, 'O5': torch.bfloat16}.get(level)
    assert (narrow in types) if narrow else (types == {torch.float32})
    # a base of ours must not lose what the project's optimizer was told
    assert wrapper.param_groups[0]['lr'] > 0 and wrapper.optimizer.__class__.__name__ in ('SGD', 'AdamW', 'RMSprop')
