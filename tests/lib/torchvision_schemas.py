"""Lets a CUDA build of torchvision be imported beside a CPU torch, as a plain ``pip install`` brings it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import torch

# the schemas end with this object
_kept: list[torch.library.Library] = []


def declare_torchvision_ops() -> None:
    """Declare two operators whose schemas its Python part needs, if its library cannot be loaded. They stay absent."""
    spec = find_spec('torchvision')
    if torch.version.cuda is not None or spec is None or spec.origin is None or hasattr(torch.ops.torchvision, 'nms'):
        return
    if '+cu' in (Path(spec.origin).parent / 'version.py').read_text(encoding='utf-8'):
        _kept.append(torch.library.Library('torchvision', 'FRAGMENT'))
        for name in ('nms', 'qnms'):
            _kept[0].define(f'{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor')
