"""Lets a CUDA build of torchvision be imported beside a CPU torch. Needs nothing of the package, nor of mmengine."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import torch

_SCHEMAS = (
    'nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor',
    'qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor',
)
_torchvision: torch.library.Library | None = None


def declare_torchvision_ops() -> None:
    """Let a CUDA build of torchvision be imported beside a CPU torch, as a plain ``pip install`` brings it.

    Its Python part needs the schemas of two operators that its library, which cannot be loaded there, would declare.
    The operators themselves stay absent. Does nothing where the two builds fit, or where somebody has declared them.
    """
    global _torchvision
    spec = find_spec('torchvision')
    if _torchvision is not None or torch.version.cuda is not None or spec is None or spec.origin is None:
        return
    if hasattr(torch.ops.torchvision, 'nms'):
        return
    if '+cu' in (Path(spec.origin).parent / 'version.py').read_text(encoding='utf-8'):
        _torchvision = torch.library.Library('torchvision', 'FRAGMENT')  # type: ignore[no-untyped-call]
        for schema in _SCHEMAS:
            _torchvision.define(schema)  # type: ignore[no-untyped-call]
