"""Lets torchvision be imported, without an import of the package: some processes must not have it, others not yet."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

_PATH = Path(__file__).resolve().parents[2] / 'amp_wrapper' / 'openmmlab' / 'torchvision_ops.py'
# the schemas end with the object that has declared them
_kept: list[ModuleType] = []


def declare_torchvision_ops() -> None:
    """See the function of the same name in ``amp_wrapper/openmmlab/torchvision_ops.py``."""
    if _kept:
        return
    spec = importlib.util.spec_from_file_location('torchvision_ops_by_path', _PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.declare_torchvision_ops()
    _kept.append(module)
