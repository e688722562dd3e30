"""What an import of the package loads, and does to a script: no more than is needed, whatever is installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from missing import missing

import amp_wrapper

ROOT = Path(__file__).resolve().parents[2]
needs_mmengine = pytest.mark.skipif('mmengine' in missing(), reason='needs mmengine, which is not installed')
NO_MMENGINE = """
import sys, importlib.util as util
sys.modules.update(mmengine=None, mmcv=None)
find_spec = util.find_spec
util.find_spec = lambda name, *rest: None if name in ('mmengine', 'mmcv') else find_spec(name, *rest)
"""


def run(*words: str) -> tuple[str, str]:
    """What a new interpreter prints, and writes to stderr."""
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


# torch 2.6 does not import its own checkpoint
LOADED = """
import sys, torch, torch.utils.checkpoint
before = set(sys.modules)
from amp_wrapper import amp, nonfinite_watch, FusedAdamW
print(sorted(name for name in set(sys.modules) - before if name.split('.')[0] != 'amp_wrapper'))
"""


def test_package_loads_torch_alone() -> None:
    assert run('-c', LOADED)[0] == run('-c', NO_MMENGINE + LOADED)[0] == '[]\n'


NAMES = (*amp_wrapper.__all__, 'AmpOptimWrapper', 'AmpMonitorHook')
WITHOUT = f"""{NO_MMENGINE}
import amp_wrapper
refused = []
for name in {NAMES}:
    try:
        getattr(amp_wrapper, name)
    except AttributeError as error:
        assert str(error).startswith(f'amp_wrapper.{{name}} needs mmengine, which is not installed: pip install'), error
        refused.append(name)
for names in (dir(amp_wrapper), amp_wrapper.__all__):
    assert not set(refused) & set(names)
try:
    from amp_wrapper import AmpMonitorHook
except ImportError as error:
    assert 'needs mmengine, which is not installed: pip install mmengine' in str(error)
print(*refused)
"""


def test_without_mmengine_names_that_need_it_say_what_to_install() -> None:
    refused = set(run('-c', WITHOUT)[0].split())
    assert {'AmpOptimWrapper', 'AmpMonitorHook'} <= refused
    assert not {'Policy', 'resolve', 'plot_runs', 'PrecisionReport', 'LossScaler', 'amp', 'FusedSGD'} & refused


@needs_mmengine
def test_with_mmengine_every_public_name_can_be_imported() -> None:
    assert [name for name in NAMES if not hasattr(amp_wrapper, name)] == []
    assert not hasattr(amp_wrapper, 'AmpMonitorHok')


REGISTERED = """
from mmengine.registry import OPTIM_WRAPPERS, OPTIMIZERS
import amp_wrapper
for name in ('AmpOptimWrapper', 'ApexOptimWrapper'):
    assert OPTIM_WRAPPERS.get(name) is getattr(amp_wrapper, name), name
for name in ('FusedAdamW', 'FusedSGD'):
    assert OPTIMIZERS.get(name) is getattr(amp_wrapper, name), name
# DeepSpeed's name
assert OPTIMIZERS.get('FusedAdam') is None and OPTIMIZERS.get('amp_wrapper.FusedAdam') is amp_wrapper.FusedAdam
"""


@needs_mmengine
@pytest.mark.parametrize(
    'order',
    [
        'import mmengine, amp_wrapper',
        'from mmengine import Config\nConfig.fromstring("custom_imports = dict(imports=[\'amp_wrapper\'])", ".py")',
        # to look for mmengine is no import of it
        'import amp_wrapper\nfrom importlib.util import find_spec\nfind_spec("mmengine")\nimport mmengine.optim',
    ],
)
def test_names_are_registered_whichever_package_is_imported_first(order: str) -> None:
    """A config may say ``type='AmpOptimWrapper'`` then."""
    assert run('-c', f'{order}\n{REGISTERED}')[0] == ''


#: A training whose first step is skipped.
SKIPPED = """
import torch
from amp_wrapper import amp
model = torch.nn.Linear(2, 2)
model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), 0.1), opt_level='O2', verbosity=1, loss_scale=8)
with amp.scale_loss(model(torch.ones(1, 2)).sum() * float('inf'), optimizer) as loss:
    loss.backward()
optimizer.step()
"""


RUNNER = 'from mmengine.logging import MMLogger; MMLogger.get_instance("a", log_level="ERROR"); import amp_wrapper'


@needs_mmengine
@pytest.mark.parametrize(
    ('level', 'first'),
    [('INFO', 'import mmengine'), ('INFO', RUNNER), ('ERROR', ''), ('', ''), ('', 'import mmengine')],
)
def test_messages_go_where_the_script_says(level: str, first: str) -> None:
    """A script without configuration sees warnings on stderr; ``logging.basicConfig`` sees each line once."""
    setting = f'import logging, sys; logging.basicConfig(level="{level}", stream=sys.stdout)\n' if level else ''
    texts = run('-c', f'{setting}{first}\n{SKIPPED}')
    assert [text.count('optimizer step skipped') for text in texts] == [level == 'INFO', level == '']
