"""Evaluates checkpoints as somebody does who has never heard of this package: one JSON request a line on stdin."""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import Any

# importing the package fails from here on
sys.modules['amp_wrapper'] = None  # type: ignore[assignment]
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / 'tools')]

from projects import declare_torchvision_ops

declare_torchvision_ops()

import torch
import types_seen  # noqa: F401  (registers the evaluator)
from mmengine.config import Config
from mmengine.runner import Runner
from zoo import register


def evaluate(request: dict[str, Any]) -> dict[str, Any]:
    """Load strictly, look at the types, evaluate."""
    register(request['project'])
    cfg = Config.fromfile(request['config'], import_custom_modules=False)
    cfg.pop('custom_imports')
    cfg.custom_hooks = []
    # mmengine's files hold objects of its own, which it alone does not admit under weights_only
    file = torch.load(request['checkpoint'], map_location='cpu', weights_only=False)
    types = sorted({str(value.dtype) for value in file['state_dict'].values()})
    metrics: dict[str, Any] = {}
    if cfg.get('test_dataloader') is not None:
        cfg.optim_wrapper = None
        cfg.train_cfg = None
        cfg.train_dataloader = None
        runner = Runner.from_cfg(cfg)
        runner.model.load_state_dict(file['state_dict'], strict=True)
        metrics = runner.test()
    return dict(types=types, metrics={key: float(value) for key, value in metrics.items()})


for line in sys.stdin:
    try:
        answer = evaluate(json.loads(line))
    except Exception:
        answer = dict(error=traceback.format_exc())
    print('RESULT ' + json.dumps(answer), flush=True)
