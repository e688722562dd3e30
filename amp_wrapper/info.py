"""Reports the installation: ``python -m amp_wrapper.info`` prints it, ``--json`` for programs.

Versions, devices, what serves each op on each device, how the compiled library was built or why there is none, and the
environment variables that change any of it. Works without mmengine and without the library.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import platform
from collections.abc import Sequence
from typing import Any

import torch

from . import __version__, torch_internals
from .errors import AmpError
from .ops import loader, schemas

#: What changes the ops at run time, and how.
VARIABLES = {
    'AMP_WRAPPER_OPS': "'reference' runs plain torch in place of the compiled ops, a folder has other ones",
    'ATEN_CPU_CAPABILITY': "'avx2' or 'default' lowers the instruction set of torch and of the CPU ops",
}
# The instruction sets that csrc/cpu has kernels for; every other processor gets the third.
_INSTRUCTION_SETS = {'AVX512': 'AVX-512', 'AVX2': 'AVX2'}


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
    kernels = _INSTRUCTION_SETS.get(capability, 'any processor') if platform.machine() in ('x86_64', 'AMD64') else None
    found = {
        'cpu': f'{platform.machine()}, kernels for {kernels or "any processor"}, {torch.get_num_threads()} threads'
    }
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            major, minor = torch.cuda.get_device_capability(index)
            found[f'cuda:{index}'] = f'{torch.cuda.get_device_name(index)}, sm_{major}{minor}'
    return found


def backends() -> dict[str, dict[str, str]]:
    """Op to device type to what serves it: 'CPU op', 'CUDA op' or 'reference'.

    Read from torch's dispatcher. Tensors of other dtypes than the compiled ones are left to the reference on every device.
    """
    compiled = loader.library().module is not None
    table: dict[str, dict[str, str]] = {}
    for name in schemas.SCHEMAS:
        table[name] = {}
        for kind in ('CPU', 'CUDA'):
            has = compiled and torch_internals.has_kernel(f'{schemas.NAMESPACE}::{name}', kind)
            table[name][kind.lower()] = f'{kind} op' if has else 'reference'
    return table


def build() -> dict[str, Any]:
    """How the library was built.

    Returns:
        ``loaded``; ``reason``, why there is no library or none for CUDA; ``how``, what to do where it is missing and nobody
        chose that; ``sources_changed`` since the build, None where it is unknown; and what the build noted.
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


def report() -> dict[str, Any]:
    """All of it, as plain data."""
    return {
        'versions': versions(),
        'devices': devices(),
        'ops': backends(),
        'build': build(),
        'environment': environment(),
    }


def _build_lines(facts: dict[str, Any]) -> list[str]:
    if facts['loaded']:
        lines = [f'built for   torch {facts["torch"]}, {facts["python"]}', f'compiler    {facts["compiler"]}']
        if facts['cuda']:
            lines.append(f'CUDA        {facts["cuda"]}, architectures {facts["architectures"]}, {facts["nvcc"]}')
        else:
            lines.append(f'CUDA        not built: {facts["reason"]}')
    else:
        lines = [f'none, since {facts["reason"]}; the reference computes the same, slower']
        if facts['how']:
            lines.append(f'build it    {facts["how"]}')
    if facts['sources_changed']:
        lines.append('csrc        was changed after the build: build again')
    elif facts['sources_changed'] is False:
        lines.append('csrc        matches the library')
    return lines


def text(facts: dict[str, Any]) -> str:
    """The report as lines for a reader.

    Args:
        facts: What :func:`report` returns.
    """
    lines = ['versions']
    lines += [f'  {name:<14}{value or "none"}' for name, value in facts['versions'].items()]
    lines.append('devices')
    lines += [f'  {name:<14}{value}' for name, value in facts['devices'].items()]
    kinds = list(next(iter(facts['ops'].values())))
    lines.append('ops')
    lines.append('  ' + f'{"":<26}' + ''.join(f'{kind:<11}' for kind in kinds).rstrip())
    for name, served in facts['ops'].items():
        lines.append('  ' + f'{name:<26}' + ''.join(f'{served[kind]:<11}' for kind in kinds).rstrip())
    lines.append('compiled library')
    lines += [f'  {line}' for line in _build_lines(facts['build'])]
    lines.append('environment')
    for name, value in facts['environment'].items():
        lines.append(f'  {name:<21}{"not set" if value is None else value} ({VARIABLES[name]})')
    return '\n'.join(lines)


def show(as_json: bool = False) -> None:
    """Print the report.

    Args:
        as_json: As one JSON object, for programs.

    Raises:
        AmpConfigError: An environment variable has a value that means nothing.
    """
    facts = report()
    print(json.dumps(facts, indent=1) if as_json else text(facts))


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line.

    Args:
        arguments: Words after the program's name; those of the process if None.
    """
    parser = argparse.ArgumentParser(prog='python -m amp_wrapper.info', description=(__doc__ or '').splitlines()[0])
    parser.add_argument('--json', action='store_true', help='print one JSON object')
    wanted = parser.parse_args(arguments)
    try:
        show(wanted.json)
    except AmpError as error:
        raise SystemExit(str(error)) from None


if __name__ == '__main__':
    main()
