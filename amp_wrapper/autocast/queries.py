"""What ``torch.is_autocast_enabled`` and its relatives answer where a graph is traced inside of a region.

torch answers what is on outside of the graph, where the casts of a region are part of the graph alone. Code that asks, such as
:func:`torch.amp.custom_fwd`, would take the wrong branch. The functions are replaced as long as there are graphs with regions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..compiler_internals import never_compiled
from . import graph_region


def _in_graph(default: str, device_type: str | None = None) -> graph_region.GraphRegion | None:
    """The region that says what autocast is on a device where a graph is traced; None where none does.

    Args:
        default: The type of the device that a function of torch is about.
        device_type: The one that it was called with, if it was.
    """
    # not where torch itself asks while it makes the graph
    region = graph_region.innermost() if torch.compiler.is_dynamo_compiling() else None
    device = default if device_type is None else device_type
    return region if region is not None and region.device == device and region.sets_autocast() else None


def _enabled(original: Callable[..., bool], default: str) -> Callable[..., bool]:
    def is_enabled(*args: Any, **kwargs: Any) -> bool:
        region = _in_graph(default, *args, **kwargs)
        return original(*args, **kwargs) if region is None else region.dtype is not None

    return is_enabled


def _dtype(original: Callable[..., torch.dtype], default: str) -> Callable[..., torch.dtype]:
    def get_dtype(*args: Any, **kwargs: Any) -> torch.dtype:
        region = _in_graph(default, *args, **kwargs)
        return original(*args, **kwargs) if region is None or region.dtype is None else region.dtype

    return get_dtype


# with the device that each is about where none is named
_ORIGINALS = {
    name: (getattr(torch, name), make, device)
    for name, make, device in (
        ('is_autocast_enabled', _enabled, 'cuda'),
        ('is_autocast_cpu_enabled', _enabled, 'cpu'),
        ('get_autocast_dtype', _dtype, 'cuda'),
        ('get_autocast_cpu_dtype', _dtype, 'cpu'),
        ('get_autocast_gpu_dtype', _dtype, 'cuda'),
    )
    if hasattr(torch, name)
}
_replacements: dict[str, Callable[..., Any]] = {}


def install() -> bool:
    """Replace the functions of torch.

    Returns:
        Whether one was not replaced before.
    """
    changed = False
    for name, (original, make, device) in _ORIGINALS.items():
        if name not in _replacements:
            function = make(original, device)
            function.__name__ = name
            never_compiled(function)
            _replacements[name] = function
        if getattr(torch, name) is original:
            setattr(torch, name, _replacements[name])
            changed = True
    return changed


def remove() -> None:
    """The counterpart of :func:`install`."""
    for name, function in _replacements.items():
        if getattr(torch, name) is function:
            setattr(torch, name, _ORIGINALS[name][0])
