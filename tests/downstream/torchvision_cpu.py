"""Lets PyPI's torchvision, a CUDA build, be imported beside a CPU torch: its Python part needs two schemas.

Its compiled operators stay absent; nothing here calls them.
"""

from __future__ import annotations

import torch

_SCHEMAS = (
    'nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor',
    'qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor',
)
_library: torch.library.Library | None = None


def declare() -> None:
    """Declare the schemas; does nothing the second time, or where torch has a GPU of its own."""
    global _library
    if _library is None and torch.version.cuda is None and torch.version.hip is None:
        _library = torch.library.Library('torchvision', 'FRAGMENT')
        for schema in _SCHEMAS:
            _library.define(schema)
