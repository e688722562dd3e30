"""Finds the objects behind dotted names of a configuration or of the FP32 registry, and explains names that have none."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import torch
from torch import nn

from ..errors import nearest


def find(name: str, load: bool) -> Any:
    """The object behind a dotted name.

    A package may shadow a module of its own with a function (``mmcv.ops.nms``): what is no module wins.

    Args:
        name: Such as 'mmcv.ops.nms' or 'torch.nn.LayerNorm'.
        load: Whether modules on the way may be imported; False finds only what is imported already.

    Returns:
        The object, or None where there is none.
    """
    return _find(name, load)[0]


def parent_of(name: str) -> tuple[Any, str]:
    """Where the last part of ``name`` is an attribute: (module or class, attribute name)."""
    return _find(name, load=False)[1], name.rpartition('.')[2]


def _find(name: str, load: bool) -> tuple[Any, Any]:
    parts = name.split('.')
    if not all(parts):
        return None, None
    for cut in range(len(parts) - 1, 0, -1):
        value: Any = _module('.'.join(parts[:cut]), load)
        if value is None:
            continue
        parent = value
        for part in parts[cut:]:
            parent, value = value, getattr(value, part, None)
        if value is not None and not isinstance(value, ModuleType):
            return value, parent
    return None, None


def _module(name: str, load: bool) -> ModuleType | None:
    module = sys.modules.get(name)
    if module is None and load:
        try:
            module = importlib.import_module(name)
        except Exception:  # a package may fail in any way; problem_of says which
            return None
    return module


def is_function_class(value: Any) -> bool:
    """Whether ``value`` is a :class:`torch.autograd.Function` subclass."""
    return isinstance(value, type) and issubclass(value, torch.autograd.Function)


def is_module_class(value: Any) -> bool:
    """Whether ``value`` is an ``nn.Module`` subclass."""
    return isinstance(value, type) and issubclass(value, nn.Module)


def problem_of(name: str) -> str:
    """What is wrong with a name from a configuration, or ''; imports the modules that it names."""
    if '.' not in name.strip('.'):
        return "must be a dotted name, such as 'mmcv.ops.nms' or 'torch.nn.functional.softmax'"
    value = find(name, load=True)
    if value is None:
        return _why_missing(name)
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


def _why_missing(name: str) -> str:
    package, *parts = name.split('.')
    if not all((package, *parts)):
        return 'has an empty part: write the name without double, leading or trailing dots'
    found, failure = _import(package)
    if found is None:
        return f'does not exist{failure or f": {package} is not installed"}'
    prefix = package
    for part in parts:
        inner, failure = getattr(found, part, None), ''
        if inner is None and isinstance(found, ModuleType):
            inner, failure = _import(f'{prefix}.{part}')
        if inner is None and failure and f'{prefix}.{part}' == 'mmcv.ops':
            failure += '. Without its compiled ops it is mmcv-lite: install mmcv (full) in its place'
        if inner is None:
            return f'does not exist{failure or nearest(part, [key for key in dir(found) if key[0] != "_"])}'
        found, prefix = inner, f'{prefix}.{part}'
    return 'is a module: name a function or a class in it'


def _import(name: str) -> tuple[Any, str]:
    """A module, or None and why it cannot be imported; '' where there is none of that name."""
    try:
        return importlib.import_module(name), ''
    except ModuleNotFoundError as error:
        return None, '' if error.name == name else f': {error}'
    except Exception as error:  # a package may fail in any way
        return None, f': {name} cannot be imported ({type(error).__name__}: {error})'
