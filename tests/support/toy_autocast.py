"""Models at O1 and O4 without an engine."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from amp_wrapper.casting.cast_handle import CastHandle
from amp_wrapper.casting.plan import CastPlan
from amp_wrapper.policy import resolve

TYPES = {'O1': torch.float16, 'O4': torch.bfloat16}
LEVELS = sorted(TYPES)
HALVES = list(TYPES.values())


def attach(model: nn.Module, level: str = 'O1', **overrides: Any) -> CastHandle:
    return CastPlan([('', model)], resolve(opt_level=level, **overrides), covers_forward=True).apply()
