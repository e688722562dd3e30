"""Reports the installation, for ``amp-wrapper info``.

Versions, devices, what serves the ops on each and why, and the environment variables that change any of it. Works without
mmengine and without the library.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import platform
from collections.abc import Mapping
from typing import Any

import torch

from . import __version__
from .ops.loader import library

#: What changes the ops at run time: whether there are any, where they are looked for, and the instruction set of torch and of
#: the CPU ops.
VARIABLES = ('AMP_WRAPPER_OPS', 'TORCH_EXTENSIONS_DIR', 'ATEN_CPU_CAPABILITY')


def _version_of(module: str) -> str | None:
    """The version of a package that may be missing; by import, since forks have other names for their distribution."""
    if importlib.util.find_spec(module) is None:
        return None
    try:
        return str(getattr(importlib.import_module(module), '__version__', 'unknown'))
    except Exception as error:
        # the report is read where something does not work, so it does not fail for that
        return f'cannot be imported ({type(error).__name__}: {error})'


def ops() -> dict[str, str]:
    """What serves the ops.

    Returns:
        'cpu' and 'cuda' to 'compiled' or 'torch'; ``library``, its file; ``reason``, why there is none, or none for CUDA, and
        what to type.
    """
    found = library()
    served = {kind: 'compiled' if kind in found.devices else 'torch' for kind in ('cpu', 'cuda')}
    return {**served, 'library': str(found.path or ''), 'reason': found.reason}


def report() -> dict[str, dict[str, Any]]:
    """Collect all of it as plain data: None for a package that is not there, and for a variable that is not set."""
    versions = {
        'amp_wrapper': __version__,
        'Python': platform.python_version(),
        'torch': str(torch.__version__),
        'CUDA of torch': torch.version.cuda,
        **{name: _version_of(name) for name in ('mmengine', 'mmcv')},
    }
    capability = torch.backends.cpu.get_cpu_capability()
    devices = {'cpu': f'{platform.machine()}, instruction set {capability}, {torch.get_num_threads()} threads'}
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        devices[f'cuda:{index}'] = f'{torch.cuda.get_device_name(index)}, sm_{major}{minor}'
    environment = {name: os.environ.get(name) for name in VARIABLES}
    return {'versions': versions, 'devices': devices, 'ops': ops(), 'environment': environment}


def show(facts: Mapping[str, Mapping[str, Any]], as_json: bool = False) -> None:
    """Print facts; a dash stands for None and ''.

    Args:
        facts: Of :func:`report`, or some of them.
        as_json: As one JSON object, for programs.
    """
    if as_json:
        print(json.dumps(facts, indent=1))
        return
    for title, rows in facts.items():
        print(title)
        for name, value in rows.items():
            print(f'  {name:<22}{"-" if value in (None, "") else value}')
