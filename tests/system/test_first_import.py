"""What an import of the package does to a script: nothing to mmengine, nothing to its log, whatever is installed."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
needs_mmengine = pytest.mark.skipif(find_spec('mmengine') is None, reason='needs mmengine, which is not installed')
WITHOUT = 'import sys\nfor name in {names}: sys.modules[name] = None\n'
REGISTERED = """
from mmengine.registry import OPTIM_WRAPPERS, OPTIMIZERS
print([OPTIM_WRAPPERS.get(name).__module__ for name in ('AmpOptimWrapper', 'ApexOptimWrapper')], OPTIMIZERS.get('FusedAdamW'))
"""
#: A training whose first step is skipped.
SKIPPED = """
import torch
from amp_wrapper import amp
{then}
model = torch.nn.Linear(2, 2)
model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), 0.1), opt_level='O2', verbosity=1, loss_scale=8)
with amp.scale_loss(model(torch.ones(1, 2)).sum() * float('inf'), optimizer) as loss:
    loss.backward()
optimizer.step()
"""


def run(code: str) -> tuple[str, str]:
    """What a script prints, and writes to stderr."""
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.parametrize('words', ['import amp_wrapper', 'from amp_wrapper import amp, nonfinite_watch, FusedAdamW'])
def test_importing_the_package_leaves_mmengine_alone(words: str) -> None:
    loaded, _ = run(f'{words}\nimport sys; print("torch" in sys.modules, "mmengine" in sys.modules)')
    assert loaded == 'True False\n'


@needs_mmengine
@pytest.mark.parametrize(
    'words',
    [
        'import amp_wrapper, mmengine',
        'import mmengine, amp_wrapper',
        'from amp_wrapper import amp\nfrom mmengine.runner import Runner',
        'from amp_wrapper import AmpMonitorHook',
        'import amp_wrapper.openmmlab.optim_wrapper',
        'import amp_wrapper.registry',
        'from mmengine import Config\nConfig.fromstring("custom_imports = dict(imports=[\'amp_wrapper\'])", ".py")',
        'from mmengine.registry import HOOKS\nHOOKS.get("amp_wrapper.AmpInferenceHook")',
        # is there an mmengine? That is no import of it
        'import amp_wrapper\nfrom importlib.util import find_spec\nfind_spec("mmengine")\nimport mmengine.optim',
    ],
)
def test_the_names_are_registered_whichever_is_imported_first(words: str) -> None:
    """A config may say ``type='AmpOptimWrapper'`` then."""
    found, _ = run(words + REGISTERED)
    ours = [f'amp_wrapper.openmmlab.{name}_optim_wrapper'.replace('amp_optim', 'optim') for name in ('amp', 'apex')]
    assert found == f"{ours} <class 'amp_wrapper.optim.adam.FusedAdamW'>\n"


LOOKS = """
import inspect
import amp_wrapper
name = 'AmpOptimWrapper'
print(hasattr(amp_wrapper, name), name in dict(inspect.getmembers(amp_wrapper)), name in dir(amp_wrapper))
from amp_wrapper import *
amp.initialize, Policy, FusedAdamW
print(name in globals())
"""


@pytest.mark.parametrize('installed', [pytest.param(True, marks=needs_mmengine), False])
def test_names_that_need_mmengine_are_offered_where_it_is_installed(installed: bool) -> None:
    begin = '' if installed else WITHOUT.format(names=['mmengine', 'mmcv'])
    assert run(begin + LOOKS)[0].split() == [str(installed)] * 4


@pytest.mark.parametrize('words', ['from amp_wrapper import {}', 'import amp_wrapper; amp_wrapper.{}'])
def test_without_mmengine_such_a_name_says_what_to_install(words: str) -> None:
    code = 'try:\n    {}\nexcept (ImportError, AttributeError) as error: print(error)'.format(
        words.format('AmpMonitorHook')
    )
    said, _ = run(WITHOUT.format(names=['mmengine', 'mmcv']) + code)
    assert said.startswith('amp_wrapper.AmpMonitorHook needs mmengine, which is not installed: pip install mmengine')


@needs_mmengine
@pytest.mark.parametrize('then', ['', 'import mmengine'])
@pytest.mark.parametrize('level', ['INFO', 'ERROR', None])
def test_lines_go_where_the_script_says(then: str, level: str | None) -> None:
    """A script without configuration sees warnings on stderr; ``logging.basicConfig`` sees each line once."""
    begin = '' if level is None else f'import logging, sys; logging.basicConfig(level="{level}", stream=sys.stdout)'
    out, err = run(f'{begin}\n{SKIPPED.format(then=then)}')
    seen = {name: text.count('optimizer step skipped') for name, text in (('out', out), ('err', err))}
    assert seen == {'out': int(level == 'INFO'), 'err': int(level is None)}


IN_A_RUNNER = """
import json, logging, sys
import amp_wrapper
from support import toy
lines = []
class Keep(logging.Handler):
    def emit(self, record):
        lines.append(record.getMessage())
logging.basicConfig(level='INFO', handlers=[Keep()])
with toy.run_log() as told:
    wrapper = dict(type='AmpOptimWrapper', opt_level='O2', optimizer=dict(type='SGD', lr=0.1), loss_scale='dynamic')
    toy.run(sys.argv[1], wrapper, log_level='INFO', model=dict(type='ToyModel'))
ours = [line for line in told if 'AmpOptimWrapper of amp_wrapper' in line]
print(json.dumps([len(ours), [line for line in lines if 'amp' in line]]))
"""


@needs_mmengine
def test_in_a_runner_they_are_in_its_log(tmp_path: Path) -> None:
    code = IN_A_RUNNER.replace('sys.argv[1]', repr(str(tmp_path)))
    out, _ = run(f'import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]\n{code}')
    assert json.loads(out.splitlines()[-1]) == [1, []]
