"""Finds the objects behind dotted names of a configuration or of the FP32 registry, and explains names that have none."""

from __future__ import annotations

import pkgutil
import sys
from types import ModuleType
from typing import Any

import torch
from torch import nn

from ..errors import nearest


def find(name: str) -> Any:
    """Find the object behind a dotted name, among the modules that are imported already; None where there is none.

    A package may shadow a module of its own with a function (``mmcv.ops.nms``): what is no module wins.

    Args:
        name: Such as 'mmcv.ops.nms' or 'torch.nn.LayerNorm'.
    """
    return getattr(*parent_of(name), None)


def parent_of(name: str) -> tuple[Any, str]:
    """Find where the last part of ``name`` is an attribute: (module or class, attribute name); (None, '') where it is none."""
    *path, last = name.split('.')
    for cut in range(len(path), 0, -1):
        parent: Any = sys.modules.get('.'.join(path[:cut]))
        for part in path[cut:]:
            parent = getattr(parent, part, None)
        if not isinstance(getattr(parent, last, None), (ModuleType, type(None))):
            return parent, last
    return None, ''


def name_of(value: Any) -> str:
    """Give the dotted name under which an object is found, or ''; a name as it is."""
    if isinstance(value, str):
        return value
    # builtins of torch name a private class, or no module
    names = [f'{getattr(value, "__module__", None)}.{getattr(value, "__qualname__", None)}']
    names += [f'{module}.{getattr(value, "__name__", None)}' for module in ('torch', 'torch.nn.functional')]
    return next((name for name in names if find(name) is value), '')


def is_class(value: Any, *bases: type) -> bool:
    """Whether ``value`` is a subclass of one of some classes, such as :class:`torch.autograd.Function`."""
    return isinstance(value, type) and issubclass(value, bases)


def problem_of(name: str) -> str:
    """Say what is wrong with a name from a configuration, or ''; imports the modules that it names."""
    if '.' not in name or not all(map(str.isidentifier, name.split('.'))):
        return "must be a dotted name, such as 'mmcv.ops.nms' or 'torch.nn.functional.softmax'"
    try:
        pkgutil.resolve_name(name)
        missing = 'is a module: name a function or a class in it'
    except AttributeError as error:
        missing = f'does not exist{nearest(error.name or "", dir(error.obj))}'
        if name.startswith('mmcv.ops.'):
            missing += ': mmcv-lite has no mmcv.ops, install mmcv (full) in its place'
    except Exception as error:  # a package may fail in any way
        first = name.partition('.')[0]
        missing = f'does not exist: {first} is not installed, or cannot be imported ({type(error).__name__}: {error})'
    value = find(name)
    if value is None:
        return missing
    return '' if is_class(value, torch.autograd.Function, nn.Module) else unusable(value, parent_of(name)[0])


def unusable(value: Any, holder: Any) -> str:
    """Say why no function can take the place of an attribute, or ''.

    Args:
        value: The attribute.
        holder: The module, class or object that has it.
    """
    if isinstance(value, type):
        return 'is a class: name one of its methods'
    if not callable(value):
        return f'cannot be called: it is a {type(value).__name__}. Name a function or a method'
    # Py_TPFLAGS_IMMUTABLETYPE
    if isinstance(holder, type) and holder.__flags__ & 1 << 8:
        return 'belongs to a built-in type and cannot be replaced: name the function that calls it'
    return ''
