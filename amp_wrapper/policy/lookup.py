"""Finds the objects behind dotted names of a configuration or of the FP32 registry, and explains names that have none."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import torch
from torch import nn


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
        except Exception:  # a package may fail in any way; problems_of says which
            return None
    return module


def is_function_class(value: Any) -> bool:
    """Whether ``value`` is a :class:`torch.autograd.Function` subclass."""
    return isinstance(value, type) and issubclass(value, torch.autograd.Function)


def is_module_class(value: Any) -> bool:
    """Whether ``value`` is an ``nn.Module`` subclass."""
    return isinstance(value, type) and issubclass(value, nn.Module)


def problems_of(names: Iterable[str]) -> list[str]:
    """What is wrong with names from a configuration, one sentence each; imports the modules that they name."""
    found = ((name, _problem_of(name)) for name in names)
    return [f'fp32_ops={name!r} {problem}.' for name, problem in found if problem]


def _problem_of(name: str) -> str:
    if '.' not in name.strip('.'):
        return "must be a dotted name, such as 'mmcv.ops.nms' or 'torch.nn.functional.softmax'"
    value = find(name, load=True)
    if value is None:
        return _why_missing(name)
    if isinstance(value, type) and not is_function_class(value) and not is_module_class(value):
        methods = [key for key in vars(value) if callable(getattr(value, key)) and not key.startswith('_')]
        example = f', such as {name}.{methods[0]!s}' if methods else ''
        return f'is a class but no nn.Module and no autograd Function: name one of its methods{example}'
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
    """Why a name was not found, with near misses where there are some."""
    parts = name.split('.')
    if not all(parts):
        return 'has an empty part: write the name without double, leading or trailing dots'
    if isinstance(_module(name, load=True), ModuleType):
        return 'is a module: name a function or a class in it'
    try:
        installed = parts[0] in sys.modules or importlib.util.find_spec(parts[0]) is not None
    except ValueError:
        installed = True
    if not installed:
        return f'does not exist: {parts[0]} is not installed'
    for cut in range(len(parts) - 1, 0, -1):
        prefix = '.'.join(parts[:cut])
        parent: Any = _module(prefix, load=True) or find(prefix, load=True)
        if parent is not None:
            break
    else:
        return f'does not exist{_import_failure(parts[0])}'
    missing = parts[cut]
    failure = _import_failure(f'{prefix}.{missing}') if isinstance(parent, ModuleType) and cut < len(parts) - 1 else ''
    if parts[0] == 'mmcv' and missing == 'ops':
        remedy = 'this mmcv comes without its compiled ops (mmcv-lite). Install mmcv (full) in its place'
        return f'does not exist{failure}: {remedy}'
    close = difflib.get_close_matches(missing, dir(parent), n=3, cutoff=0.5)
    hint = f' (did you mean {" or ".join(repr(f"{prefix}.{key}") for key in close)}?)' if close else ''
    return f'does not exist{failure or hint}'


def _import_failure(module: str) -> str:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        return '' if error.name == module else f': {error}'
    except Exception as error:
        return f': {module} cannot be imported ({type(error).__name__}: {error})'
    return ''
