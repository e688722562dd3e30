"""What is loaded by importing the package, by the report and by the answers to ``--help``: no more than they need."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from amp_wrapper import cli, start
from amp_wrapper.checkpoint import convert
from amp_wrapper.cli import convert as convert_command
from amp_wrapper.cli import options
from amp_wrapper.policy import LEVELS

ROOT = Path(__file__).resolve().parents[2]
#: What torch loads itself in 2.13, and in 2.6 loads sympy; mmengine brings torch._dynamo into 2.6.
OLD = ['torch.utils.checkpoint'] if torch.__version__ < (2, 13) else []
LOADED = """
import importlib, json, sys
import torch
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
before = set(sys.modules)
from amp_wrapper import amp
print(json.dumps(sorted(set(sys.modules) - before)))
"""
WITHOUT_MMENGINE = """
import sys
import importlib.util as util
for name in ('mmengine', 'mmcv'):
    sys.modules[name] = None
find_spec = util.find_spec
util.find_spec = lambda name, *rest: None if name in ('mmengine', 'mmcv') else find_spec(name, *rest)
"""


def run(*words: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    return done


def others(code: str, first: list[str]) -> list[str]:
    """Modules that ``from amp_wrapper import amp`` loads beside the package's own, after torch and others."""
    found = json.loads(run('-c', code, json.dumps(first)).stdout)
    assert 'amp_wrapper.amp' in found
    return [name for name in found if name.partition('.')[0] != 'amp_wrapper']


def test_the_package_loads_nothing_beside_torch() -> None:
    assert others(WITHOUT_MMENGINE + LOADED, OLD) == []


def test_the_package_loads_nothing_beside_torch_and_mmengine() -> None:
    import mmengine  # noqa: F401

    # where mmengine is merely installed; then, where it is imported, the parts of it that are patched
    assert others(LOADED, OLD) == []
    found = others(LOADED, [*OLD, 'mmengine'])
    assert 'torch._dynamo' not in found or OLD
    assert others(LOADED, [*OLD, *(name for name in found if name.partition('.')[0] == 'mmengine')]) == []


def imported(*words: str) -> set[str]:
    """What a command imports, with its parents."""
    lines = run('-X', 'importtime', *words).stderr.splitlines()
    return {found[1] for line in lines if (found := re.fullmatch(r'import time:[ \d|]+\| +([\w.]+)', line))}


def test_the_report_does_without_what_takes_long() -> None:
    found = imported('-m', 'amp_wrapper.info')
    assert {'torch', 'amp_wrapper', 'argparse'} <= found
    assert not {'torch._dynamo', 'mmengine.optim', 'mmengine.runner', 'amp_wrapper.openmmlab.optim_wrapper'} & found
    assert 'mmengine' not in imported('-m', 'amp_wrapper.info', '--help')


PUBLIC = """
import sys
import amp_wrapper
late = [name for name in amp_wrapper._LATE if name not in vars(amp_wrapper)]
assert {'AmpMonitorHook', 'ExactResumeHook', 'PreemptionHook', 'NonfiniteHook', 'AmpInferenceHook', 'MMFullyShard'} <= set(late)
assert set(amp_wrapper.__all__) <= set(dir(amp_wrapper))
refused = []
for name in late:
    before = set(sys.modules)
    try:
        value = getattr(amp_wrapper, name)
    except AttributeError as error:
        assert f'amp_wrapper.{name} needs mmengine, which is not installed: pip install' in str(error), error
        assert '\\n' not in str(error) and set(sys.modules) == before
        refused.append(name)
    else:
        assert name.endswith(getattr(value, '__name__', name)) or name == 'OptLevel', name
try:
    amp_wrapper.AmpMonitorHok
except AttributeError:
    print(*refused)
"""


def test_every_public_name_is_imported_when_it_is_asked_for() -> None:
    assert run('-c', PUBLIC).stdout == '\n'


def test_without_mmengine_the_names_that_need_it_say_so() -> None:
    refused = run('-c', WITHOUT_MMENGINE + PUBLIC).stdout.split()
    assert {'AmpOptimWrapper', 'AmpMonitorHook', 'ExactResumeHook', 'PreemptionHook', 'MMFullyShard'} <= set(refused)
    assert not {'Policy', 'resolve', 'plot_runs', 'PrecisionReport', 'LossScaler'} & set(refused)


def test_a_command_finds_the_names_too() -> None:
    """Commands leave most of the package out until a name is asked for."""
    code = (
        "import sys; sys.argv = ['-m']; sys.orig_argv = ['python', '-m', 'amp_wrapper'];"
        'import amp_wrapper; assert not {"torch", "mmengine"} & set(sys.modules);'
        'from amp_wrapper import ExactResumeHook, OptLevel;'
        'from amp_wrapper.openmmlab.resume import exact_resume; assert ExactResumeHook is exact_resume.ExactResumeHook'
    )
    run('-c', code)


@pytest.mark.parametrize('name', sorted(start.SCRIPTS))
def test_help_does_without_what_takes_long(name: str) -> None:
    found = imported(f'tools/{name}', '--help')
    assert {'argparse', 'amp_wrapper'} <= found
    assert not {'torch', 'numpy', 'mmengine', 'libcst'} & found


def test_every_tool_is_tried() -> None:
    # what make runs for maintainers is no command
    maintenance = {'build_wheels.py', 'interpreters.py', 'run_matrix.py', 'site_hooks.py'}
    assert {path.name for path in (ROOT / 'tools').glob('*.py')} - maintenance == set(start.SCRIPTS)
    assert set(start.SCRIPTS.values()) <= set(cli.COMMANDS)


def test_what_the_commands_offer_is_what_there_is() -> None:
    """They read their options before they import what the options are about."""
    assert tuple(convert.WEIGHT_TYPES) == convert_command.WEIGHT_TYPES
    assert convert_command.WEIGHTS == convert.WEIGHTS
    assert options.LEVELS == LEVELS
