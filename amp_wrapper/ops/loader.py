"""Finds the compiled library, or says why there is none and how to get it."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.machinery
import importlib.util
import json
import os
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ..errors import AmpConfigError, nearest
from . import building

_FOLDER = Path(__file__).parent
HOW_TO_BUILD = 'amp-wrapper build-ops, with a C++ compiler'


@dataclasses.dataclass(frozen=True)
class Library:
    """What was found.

    Attributes:
        module: The compiled functions; None where the reference runs.
        devices: Device types that they serve: 'cpu', 'cuda'.
        reason: Why there is no library, or none for CUDA; empty where nothing is missing.
        chosen: Whether somebody asked for the reference; then nothing is said about it.
        facts: What the build noted: versions of torch and CUDA, architectures, compiler.
    """

    module: ModuleType | None
    devices: frozenset[str] = frozenset()
    reason: str = ''
    chosen: bool = False
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)


def _missing(reason: str, facts: dict[str, Any] | None = None, chosen: bool = False) -> Library:
    return Library(module=None, reason=reason, chosen=chosen, facts=facts or {})


def _same_release(one: str, other: str) -> bool:
    """Whether torch promises the two one binary interface: it does for patch releases."""
    return one.split('+')[0].split('.')[:2] == other.split('+')[0].split('.')[:2]


def _find(folder: Path) -> Library:
    wanted = os.environ.get('AMP_WRAPPER_OPS', '')
    if wanted == 'reference':
        return _missing('AMP_WRAPPER_OPS=reference is set', chosen=True)
    if wanted and not Path(wanted).is_dir():
        # a misspelt value must not silently leave the compiled ops on
        raise AmpConfigError(
            [
                f'AMP_WRAPPER_OPS={wanted!r} means nothing{nearest(wanted, ["reference"])}, and is no folder that '
                '"amp-wrapper build-ops --out" wrote: unset it.'
            ]
        )
    folder = Path(wanted) if wanted else folder
    try:
        text = (folder / building.RECORD).read_text(encoding='utf-8')
    except OSError:
        return _missing('they were never built here')
    try:
        facts = json.loads(text)
        record = {name: facts[name] for name in ('torch', 'cuda', 'python')} if facts.get('built') else {}
    except (ValueError, KeyError, TypeError, AttributeError):
        # written by another version, or cut short
        return _missing(f'the record of their build cannot be understood ({folder / building.RECORD})')
    if not record:
        return _missing(str(facts.get('reason', 'the build failed')), facts, bool(facts.get('chosen')))
    if not _same_release(str(record['torch']), torch.__version__):
        # loading it could crash: the layout of torch's classes changes between releases
        return _missing(f'they were built for torch {record["torch"]}, and this is torch {torch.__version__}', facts)
    if record['cuda'] and record['cuda'] != torch.version.cuda:
        return _missing(f'they were built for CUDA {record["cuda"]}, and this torch has {torch.version.cuda}', facts)
    if record['python'] != sys.implementation.cache_tag:
        return _missing(f'they were built for {record["python"]}, and this is {sys.implementation.cache_tag}', facts)
    try:
        module = _module(folder) if wanted else importlib.import_module(building.MODULE)
    except (ImportError, OSError, RuntimeError) as error:
        return _missing(f'the library could not be loaded ({error})', facts)
    devices = {'cpu', 'cuda'} if record['cuda'] else {'cpu'}
    return Library(module=module, devices=frozenset(devices), reason=str(facts.get('without_cuda', '')), facts=facts)


def _module(folder: Path) -> ModuleType:
    """The library of another folder, under its own name."""
    path = folder / f'{building.MODULE.rpartition(".")[2]}{importlib.machinery.EXTENSION_SUFFIXES[0]}'
    spec = importlib.util.spec_from_file_location(building.MODULE, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise ImportError(f'there is none in {folder}')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def library() -> Library:
    """The compiled library, loaded at the first call."""
    return _find(_FOLDER)


@functools.cache
def warn_if_missing() -> None:
    """Say once in a process why the reference runs, where nobody asked for it."""
    found = library()
    if found.module is None and not found.chosen:
        warnings.warn(
            f'amp_wrapper runs without its compiled ops, since {found.reason}. It computes the same, slower. To build them: '
            f'{HOW_TO_BUILD}. AMP_WRAPPER_OPS=reference in the environment silences this.',
            stacklevel=3,
        )


@functools.cache
def warn_if_cuda_is_missing() -> None:
    """Say once in a process why the reference runs on a GPU, where there is a library that serves the CPU alone."""
    found = library()
    if found.module is not None and 'cuda' not in found.devices:
        # a torch without CUDA that has GPUs is one for ROCm: there is nothing to build
        how = (
            ' To build them: amp-wrapper build-ops --cuda, with a C++ compiler and nvcc.' if torch.version.cuda else ''
        )
        warnings.warn(
            f'amp_wrapper runs without its compiled ops on GPUs, since {found.reason}. It computes the same, slower.{how} '
            'AMP_WRAPPER_OPS=reference in the environment silences this.',
            stacklevel=4,
        )


def sources_root() -> Path | None:
    """The folder that ``csrc`` lies in: that of a checkout, or the installed package; None where neither has it."""
    package = _FOLDER.parent
    return next((root for root in (package.parent, package) if (root / 'csrc' / 'common').is_dir()), None)


def changed_sources() -> bool | None:
    """Whether ``csrc`` differs from what the library was built of; None where that is unknown."""
    root, built_of = sources_root(), library().facts.get('sources')
    if built_of is None or root is None:
        return None
    return building.digest(root, bool(library().facts.get('cuda'))) != str(built_of)
