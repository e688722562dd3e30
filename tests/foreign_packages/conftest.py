"""Runs in an environment of its own: see ``make test-foreign``."""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / 'support')]

from torchvision_schemas import declare_torchvision_ops

declare_torchvision_ops()

import torch


def _stand_in(name: str, real: str) -> None:
    """``real`` under the name of a package that does not load here."""
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
        return
    module = types.ModuleType(name)
    module.__path__ = []  # type: ignore[attr-defined]
    sys.modules[name] = module
    for part in ('coco', 'cocoeval', 'mask'):
        found = importlib.import_module(f'{real}.{part}')
        sys.modules[f'{name}.{part}'] = found
        setattr(module, part, found)


# the wheel of xtcocotools does not load beside numpy 2.4
_stand_in('xtcocotools', 'pycocotools')
# the wheel of mmaction2 lacks a folder that its own __init__ imports
sys.modules.setdefault('mmaction.models.localizers.drn', types.ModuleType('drn'))
sys.modules.setdefault('mmaction.models.localizers.drn.drn', types.ModuleType('drn'))
# and its models of pictures and words want a transformers of long ago
sys.modules.setdefault('mmaction.models.multimodal', types.ModuleType('multimodal'))
sys.modules['mmaction.models.localizers.drn.drn'].DRN = type('DRN', (), {})  # type: ignore[attr-defined]


@pytest.fixture(scope='module', autouse=True)
def quick_collections() -> Iterator[None]:
    """Each session of ``amp`` looks for dead ones before it, among what is new since here alone."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def one_thread_and_quiet() -> Iterator[None]:
    # two workers share two cores
    torch.set_num_threads(1)
    logging.getLogger('mmengine').setLevel(logging.ERROR)
    random = torch.get_rng_state()
    yield
    torch.set_rng_state(random)
