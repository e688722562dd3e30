"""Loads the compiled library, or says why there is none and what to type."""

from __future__ import annotations

import dataclasses
import functools
import os
from pathlib import Path

import torch

from .. import torch_internals
from ..errors import AmpConfigError, nearest
from . import building


@dataclasses.dataclass(frozen=True)
class Library:
    """The compiled library of this process.

    Attributes:
        devices: Types of the devices that it serves: 'cpu', 'cuda'.
        path: Its file; None where torch's own operations serve all devices.
        reason: Why there is none, or none for CUDA, and what to type; empty where nothing is missing.
    """

    devices: frozenset[str] = frozenset()
    path: Path | None = None
    reason: str = ''


@functools.cache
def library() -> Library:
    """Find and load the library, at the first call.

    It lies beside this file, where ``setup.py`` builds it, or in the cache, where ``amp-wrapper build-ops`` does. Of both, the
    one that was built last serves. One for another torch, or from other sources, has another name.

    Raises:
        AmpConfigError: ``AMP_WRAPPER_OPS`` is set to something else than 'torch'.
    """
    setting = os.environ.get('AMP_WRAPPER_OPS', '')
    if setting == 'torch':
        return Library(reason='AMP_WRAPPER_OPS=torch is set: unset it to use compiled ops')
    if setting:
        # a misspelt value must not silently leave the compiled ops on
        hint = nearest(setting, ['torch'])
        raise AmpConfigError(
            [f"AMP_WRAPPER_OPS={setting!r} means nothing{hint}: 'torch' turns the compiled ops off; or unset it."]
        )
    name, here, cache = building.name(), Path(__file__).parent, building.cache()
    built = [path for path in (here / f'{name}.so', cache / name / f'{name}.so') if path.is_file()]
    if not built:
        others = [*here.glob('amp_ops_*.so'), *cache.glob('amp_ops_*/*.so')]
        missing = f'not built for torch {torch.__version__} and these sources' if others else 'never built here'
        return Library(reason=f'{missing}: amp-wrapper build-ops')
    path = max(built, key=os.path.getmtime)
    try:
        torch.ops.load_library(path)  # type: ignore[no-untyped-call]
        serves_cuda = torch_internals.has_kernel('amp_wrapper::multi_tensor_scale', 'CUDA')
    except (OSError, RuntimeError) as error:
        return Library(reason=f'cannot be loaded ({error}): amp-wrapper build-ops')
    if serves_cuda:
        return Library(frozenset({'cpu', 'cuda'}), path)
    without = 'built without CUDA: amp-wrapper build-ops --cuda' if torch.version.cuda else 'this torch has no CUDA'
    return Library(frozenset({'cpu'}), path, without)
