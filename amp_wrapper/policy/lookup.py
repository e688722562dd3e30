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
    """Find the object behind a dotted name, among the modules that are imported already.

    A package may shadow a module of its own with a function (``mmcv.ops.nms``): what is no module wins.

    Args:
        name: Such as 'mmcv.ops.nms' or 'torch.nn.LayerNorm'.

    Returns:
        The object, or None where there is none.
    """
    return _find(name)[0]


def parent_of(name: str) -> tuple[Any, str]:
    """Find where the last part of ``name`` is an attribute: (module or class, attribute name)."""
    return _find(name)[1], name.rpartition('.')[2]


def name_of(value: Any) -> str:
    """Give the dotted name under which an object is found, or ''; a name as it is."""
    if isinstance(value, str):
        return value
    # builtins of torch name a private class, or no module
    names = [f'{getattr(value, "__module__", None)}.{getattr(value, "__qualname__", None)}']
    names += [f'{module}.{getattr(value, "__name__", None)}' for module in ('torch', 'torch.nn.functional')]
    return next((name for name in names if find(name) is value), '')


def _find(name: str) -> tuple[Any, Any]:
    parts = name.split('.')
    for cut in range(len(parts) - 1, 0, -1):
        parent, value = None, sys.modules.get('.'.join(parts[:cut]))
        for part in parts[cut:]:
            parent, value = value, getattr(value, part, None)
        if value is not None and not isinstance(value, ModuleType):
            return value, parent
    return None, None


def is_function_class(value: Any) -> bool:
    """Whether ``value`` is a :class:`torch.autograd.Function` subclass."""
    return isinstance(value, type) and issubclass(value, torch.autograd.Function)


def is_module_class(value: Any) -> bool:
    """Whether ``value`` is an ``nn.Module`` subclass."""
    return isinstance(value, type) and issubclass(value, nn.Module)


def problem_of(name: str) -> str:
    """Say what is wrong with a name from a configuration, or ''; imports the modules that it names."""
    first, *others = name.split('.')
    if not others or not all(part.isidentifier() for part in (first, *others)):
        return "must be a dotted name, such as 'mmcv.ops.nms' or 'torch.nn.functional.softmax'"
    missing = 'is a module: name a function or a class in it'
    try:
        pkgutil.resolve_name(name)
    except AttributeError as error:
        missing = f'does not exist{nearest(error.name or "", dir(error.obj))}'
        if (first, error.name) == ('mmcv', 'ops'):
            missing = 'does not exist: mmcv-lite has no mmcv.ops, install mmcv (full) in its place'
    except Exception as error:  # a package may fail in any way
        missing = f'does not exist: {first} is not installed, or cannot be imported ({type(error).__name__}: {error})'
    value = find(name)
    if value is None:
        return missing
    if isinstance(value, type) and not is_function_class(value) and not is_module_class(value):
        return 'is a class but no nn.Module and no autograd Function: name one of its methods'
    if value is nn.Module or value is torch.autograd.Function:
        return 'is the base of every class of its kind: name one of them'
    if not callable(value):
        return f'cannot be called: it is a {type(value).__name__}. Name a function, a method or a class'
    if not isinstance(value, type) and not can_be_replaced(*parent_of(name)):
        return 'belongs to a built-in type and cannot be replaced: name the function that calls it'
    return ''


def can_be_replaced(parent: Any, attribute: str) -> bool:
    """Whether an attribute may be set on a module, class or object; tried with what is there."""
    try:
        own = attribute in vars(parent)
        setattr(parent, attribute, vars(parent)[attribute] if own else getattr(parent, attribute))
        if not own:
            delattr(parent, attribute)
    except (AttributeError, TypeError):
        return False
    return True
