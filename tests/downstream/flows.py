"""Whole runs: a config file for a case, the projects' own tools, and an evaluation without this package."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import data
import schedule
import torch
from mmengine.config import Config
from mmengine.logging import MessageHub, MMLogger
from mmengine.utils import ManagerMixin
from mmengine.visualization import Visualizer
from zoo import Case, configs_folder, load_config, register

HERE = Path(__file__).parent


def small_config(case: Case, folder: Path, work_dir: Path, epochs: int = 1) -> Config:
    """The project's config with a small model, the generated data, a few short epochs, and a line that imports us.

    Dropout, stochastic depth, Mixup, CutMix and YOLOX's random sizes, which a run on one batch does without, are on here.
    ``optim_wrapper``, schedulers and hooks are what the project wrote; the ranges of the schedulers are shorter.

    Args:
        case: The model.
        folder: With the data.
        work_dir: Of the runs.
        epochs: How many; the schedules go over :data:`schedule.EPOCHS` in any case.
    """
    cfg = load_config(case, augment=True)
    cfg.param_scheduler = schedule.shortened(cfg)
    for key in ('train_dataloader', 'val_dataloader', 'test_dataloader', 'val_evaluator', 'test_evaluator'):
        cfg.pop(key, None)
    for key in ('val_cfg', 'test_cfg', 'resume', 'load_from', 'train_pipeline', 'test_pipeline'):
        cfg.pop(key, None)
    cfg.update(copy.deepcopy(data.loaders(case, folder)))
    cfg.train_cfg = dict(by_epoch=True, max_epochs=epochs, val_interval=1)
    validates = cfg.val_dataloader is not None
    cfg.val_cfg = dict() if validates else None
    cfg.test_cfg = dict() if validates else None
    cfg.default_hooks = dict(
        logger=dict(type='LoggerHook', interval=1), checkpoint=dict(type='CheckpointHook', interval=1, by_epoch=True)
    )
    cfg.log_processor = dict(by_epoch=True)
    cfg.custom_imports = dict(imports=['amp_wrapper'], allow_failed_imports=False)
    cfg.custom_hooks = [hook for hook in cfg.get('custom_hooks', []) if hook['type'] != 'YOLOXModeSwitchHook']
    cfg.env_cfg = dict(cudnn_benchmark=False, dist_cfg=dict(backend='gloo'))
    cfg.visualizer = None
    cfg.vis_backends = []
    cfg.work_dir = str(work_dir)
    cfg.log_level = 'ERROR'
    cfg.randomness = dict(seed=0)
    cfg.launcher = 'none'
    return cfg


def write_config(cfg: Config, path: Path) -> Path:
    """Keep a config as a file, as the tools want it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    cfg.dump(path)
    return path


def tool(project: str, name: str) -> Path:
    """A project's own ``tools/train.py`` or ``tools/test.py``."""
    return configs_folder(project).parent / 'tools' / name


@contextlib.contextmanager
def fresh_globals() -> Iterator[None]:
    """mmengine keeps loggers, hubs and visualizers by name; every run of a process of its own starts without them."""
    yield
    for cls in (MMLogger, MessageHub, Visualizer):
        instances = cls._instance_dict
        for key in list(instances):
            if issubclass(cls, ManagerMixin) and key != 'mmengine':
                for handler in getattr(instances[key], 'handlers', []):
                    handler.close()
                del instances[key]


def run_tool(path: Path, *arguments: str) -> str:
    """Run a tool in this process, as ``python tools/x.py arguments`` would.

    Returns:
        What it printed.
    """
    before = sys.argv, os.environ.get('LOCAL_RANK'), torch.backends.cudnn.benchmark
    printed = io.StringIO()
    sys.argv = [str(path), *arguments]
    try:
        with fresh_globals(), contextlib.redirect_stdout(printed):
            runpy.run_path(str(path), run_name='__main__')
    finally:
        sys.argv = before[0]
    return printed.getvalue()


class Original:
    """A process that never imports this package, and evaluates checkpoints with the project alone."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, '-u', str(HERE / 'without_us.py')],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd='/',
        )

    def evaluate(self, config: Path, checkpoint: Path, project: str) -> dict[str, Any]:
        """Metrics of a checkpoint, and the types of its weights, by the project's own code.

        Raises:
            RuntimeError: What went wrong over there.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        request = dict(config=str(config), checkpoint=str(checkpoint), project=project)
        self._process.stdin.write(json.dumps(request) + '\n')
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith('RESULT '):
                answer = json.loads(line[7:])
                if 'error' in answer:
                    raise RuntimeError(answer['error'])
                return answer
        raise RuntimeError(f'the process ended with {self._process.wait()}')

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


__all__ = ['Original', 'register', 'run_tool', 'small_config', 'tool', 'write_config']
