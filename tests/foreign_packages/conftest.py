"""Runs in an environment of its own: see ``nox -s foreign``."""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
import types

from torchvision_schemas import declare_torchvision_ops

declare_torchvision_ops()
logging.getLogger('mmengine').setLevel(logging.ERROR)

# the wheel of xtcocotools does not load beside numpy 2.4: pycocotools under its name
try:
    importlib.import_module('xtcocotools')
except ImportError:
    sys.modules['xtcocotools'] = types.ModuleType('xtcocotools')
    sys.modules['xtcocotools'].__path__ = []
    with contextlib.suppress(ImportError):
        for part in ('coco', 'cocoeval', 'mask'):
            sys.modules[f'xtcocotools.{part}'] = importlib.import_module(f'pycocotools.{part}')
# the wheel of mmaction2 lacks a folder that its own __init__ imports; its models of pictures and words want an old transformers
for name in ('localizers.drn', 'localizers.drn.drn', 'multimodal'):
    sys.modules.setdefault(f'mmaction.models.{name}', types.ModuleType(name))
sys.modules['mmaction.models.localizers.drn.drn'].DRN = type('DRN', (), {})  # type: ignore[attr-defined]
