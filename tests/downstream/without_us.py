"""Evaluates checkpoints as somebody does who has never heard of this package: one JSON request a line on stdin."""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

# torch refuses mmengine's own checkpoints since 2.6; without us, this is how people load them
os.environ['TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD'] = '1'
# importing the package fails from here on
sys.modules['amp_wrapper'] = None  # type: ignore[assignment]
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / 'support')]

from torchvision_schemas import declare_torchvision_ops

declare_torchvision_ops()

import torch
import types_seen  # noqa: F401  (registers the evaluator)
from mmengine.config import Config
from mmengine.runner import Runner
from zoo import register

torch.set_num_threads(1)


def evaluate(request: dict[str, Any]) -> dict[str, Any]:
    """Look at the types, and evaluate as the project's ``tools/test.py`` does."""
    register(request['project'])
    cfg = Config.fromfile(request['config'], import_custom_modules=False)
    cfg.pop('custom_imports')
    cfg.custom_hooks = []
    file = torch.load(request['checkpoint'], map_location='cpu', weights_only=False)
    types = sorted({str(value.dtype) for value in file['state_dict'].values()})
    metrics: dict[str, Any] = {}
    if cfg.get('test_dataloader') is not None:
        cfg.load_from = request['checkpoint']
        cfg.optim_wrapper = None
        cfg.param_scheduler = None
        cfg.train_cfg = None
        cfg.train_dataloader = None
        runner = Runner.from_cfg(cfg)
        metrics = runner.test()
        loaded = runner.model.state_dict()
        assert loaded.keys() == file['state_dict'].keys()
        assert all(value.cpu().equal(file['state_dict'][key]) for key, value in loaded.items())
    return dict(types=types, metrics={key: float(value) for key, value in metrics.items()})


for line in sys.stdin:
    try:
        answer = evaluate(json.loads(line))
    except Exception:
        answer = dict(error=traceback.format_exc())
    print('RESULT ' + json.dumps(answer), flush=True)
