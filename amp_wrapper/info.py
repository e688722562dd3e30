"""Reports the installation: ``python -m amp_wrapper.info`` prints it, ``--json`` for programs.

Versions, devices, what serves the ops on each, how the compiled library was built or why there is none, and the environment
variables that change any of it. Works without mmengine and without the library.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import platform
from typing import Any

import torch

from . import __version__, ops
from .errors import AmpError
from .ops import loader

#: What changes the ops at run time: the first chooses them, the second lowers the instruction set of torch and of the CPU ops.
VARIABLES = ('AMP_WRAPPER_OPS', 'ATEN_CPU_CAPABILITY')


def _version_of(module: str) -> str | None:
    """The version of a package that may be missing; by import, since forks have other names for their distribution."""
    if importlib.util.find_spec(module) is None:
        return None
    try:
        return str(getattr(importlib.import_module(module), '__version__', 'unknown'))
    except Exception as error:
        # the report is read where something does not work, so it does not fail for that
        return f'cannot be imported ({type(error).__name__}: {error})'


def versions() -> dict[str, str | None]:
    """Name to version; None for what is not there."""
    return {
        'amp_wrapper': __version__,
        'Python': platform.python_version(),
        'torch': str(torch.__version__),
        'CUDA of torch': torch.version.cuda,
        'mmengine': _version_of('mmengine'),
        'mmcv': _version_of('mmcv'),
    }


def devices() -> dict[str, str]:
    """Device to its description: the CPU, and every GPU that torch sees."""
    capability = torch.backends.cpu.get_cpu_capability()
    found = {'cpu': f'{platform.machine()}, instruction set {capability}, {torch.get_num_threads()} threads'}
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        found[f'cuda:{index}'] = f'{torch.cuda.get_device_name(index)}, sm_{major}{minor}'
    return found


def backends() -> dict[str, str]:
    """Device type to what serves the ops there: 'CPU op', 'CUDA op' or 'reference'.

    Tensors of other dtypes than the compiled ones are left to the reference on every device.
    """
    return {kind: ops.backend_of(kind) for kind in ('cpu', 'cuda')}


def build() -> dict[str, Any]:
    """How the library was built.

    Returns:
        ``loaded``; ``file``; ``reason``, why there is no library or none for CUDA; ``how``, what to do where it is missing and
        nobody chose that; ``sources_changed`` since the build, None where it is unknown; and what the build noted.
    """
    found = loader.library()
    loaded = found.module is not None
    noted = ('torch', 'cuda', 'architectures', 'compiler', 'nvcc', 'python')
    return {
        'loaded': loaded,
        'file': getattr(found.module, '__file__', None),
        'reason': found.reason,
        'how': '' if loaded or found.chosen else loader.HOW_TO_BUILD,
        'sources_changed': loader.changed_sources(),
        **{key: found.facts.get(key) for key in noted},
    }


def environment() -> dict[str, str | None]:
    """Variables that change the ops, and their values; None where one is not set."""
    return {name: os.environ.get(name) for name in VARIABLES}


def report() -> dict[str, dict[str, Any]]:
    """All of it, as plain data."""
    return {
        'versions': versions(),
        'devices': devices(),
        'ops': backends(),
        'build': build(),
        'environment': environment(),
    }


def show(as_json: bool = False) -> None:
    """Print the report.

    Args:
        as_json: As one JSON object, for programs.

    Raises:
        AmpConfigError: An environment variable has a value that means nothing.
    """
    facts = report()
    if as_json:
        print(json.dumps(facts, indent=1))
        return
    for title, rows in facts.items():
        print(title)
        for name, value in rows.items():
            print(f'  {name:<20}{"-" if value in (None, "") else value}')


def main() -> None:
    """The command line of ``python -m amp_wrapper.info``."""
    parser = argparse.ArgumentParser(prog='python -m amp_wrapper.info', description=(__doc__ or '').splitlines()[0])
    parser.add_argument('--json', action='store_true', help='print one JSON object')
    try:
        show(parser.parse_args().json)
    except AmpError as error:
        raise SystemExit(str(error)) from None


if __name__ == '__main__':
    main()
