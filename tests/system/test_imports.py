"""What an import of the package loads, and does to a script: no more than is needed, whatever is installed."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from missing import missing

import amp_wrapper

ROOT = Path(__file__).resolve().parents[2]
needs_mmengine = pytest.mark.skipif('mmengine' in missing(), reason='needs mmengine, which is not installed')
# one interpreter that has imported something; it forks for each piece of code
FORK_FOR_EACH = """
import importlib, json, os, sys, traceback
for name in sys.argv[2:]:
    importlib.import_module(name)
for number, code in enumerate(json.load(sys.stdin)):
    if not os.fork():
        for stream, name in ((1, 'out'), (2, 'err')):
            os.dup2(os.open(f'{sys.argv[1]}/{number}.{name}', os.O_WRONLY | os.O_CREAT), stream)
        try:
            exec(compile(code, 'code', 'exec'), {'__name__': '__main__'})
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(0)
    os.wait()
"""
NO_MMENGINE = """
import sys, importlib.util as util
sys.modules.update(mmengine=None, mmcv=None)
find_spec = util.find_spec
util.find_spec = lambda name, *rest: None if name in ('mmengine', 'mmcv') else find_spec(name, *rest)
"""


#: What mmengine, and a training, import of other packages.
SLOW = (
    'torch._dynamo',
    'torch.distributed.fsdp',
    'torch.distributed.optim',
    *(name for name in ('matplotlib.pyplot', 'cv2', 'yaml') if find_spec(name)),
)


@functools.cache
def run(*codes: str, first: tuple[str, ...] = SLOW) -> list[tuple[str, str]]:
    """What each script prints, and writes to stderr, in an interpreter that has imported some modules."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, '-c', FORK_FOR_EACH, folder, *first]
        subprocess.run(words, input=json.dumps(codes), text=True, cwd=ROOT, timeout=300, check=True)
        texts = [
            [Path(folder, f'{number}.{name}').read_text() for name in ('out', 'err')] for number in range(len(codes))
        ]
    errors = [f'{code}\n{err}' for code, (_, err) in zip(codes, texts) if 'Traceback' in err]
    assert errors == []
    return [(out, err) for out, err in texts]


LOADED = """
import sys
before = set(sys.modules)
from amp_wrapper import amp, nonfinite_watch, FusedAdamW
print(sorted(name for name in set(sys.modules) - before if name.split('.')[0] != 'amp_wrapper'))
"""
#: Which public names cannot be had; each refusal says what to install.
REFUSED = f"""
import sys
import amp_wrapper
refused = []
for name in {[*amp_wrapper.__all__, 'AmpOptimWrapper', 'AmpMonitorHook']}:
    try:
        getattr(amp_wrapper, name)
    except AttributeError as error:
        assert str(error).startswith(f'amp_wrapper.{{name}} needs mmengine, which is not installed: pip install'), error
        refused.append(name)
for names in (dir(amp_wrapper), amp_wrapper.__all__):
    assert not set(refused) & set(names)
assert not hasattr(amp_wrapper, 'AmpMonitorHok')
print(*refused)
"""
NEEDS_IT = NO_MMENGINE + 'try:\n    from amp_wrapper import AmpMonitorHook\nexcept ImportError as error: print(error)'


def test_package_loads_torch_alone() -> None:
    # torch 2.6 does not import its own checkpoint
    (loaded, _), (loaded_without, _) = run(LOADED, NO_MMENGINE + LOADED, first=('torch', 'torch.utils.checkpoint'))
    assert loaded == loaded_without == '[]\n'


def test_without_mmengine_names_that_need_it_say_what_to_install() -> None:
    (refused, _), (said, _) = run(*SCRIPTS)[:2]
    assert {'AmpOptimWrapper', 'AmpMonitorHook'} <= set(refused.split())
    assert not {'Policy', 'resolve', 'plot_runs', 'PrecisionReport', 'LossScaler', 'amp', 'FusedSGD'} & set(
        refused.split()
    )
    assert said.startswith('amp_wrapper.AmpMonitorHook needs mmengine, which is not installed: pip install mmengine')


@needs_mmengine
def test_with_mmengine_every_public_name_can_be_imported() -> None:
    assert run(*SCRIPTS)[2] == ('\n', '')


ORDERS = (
    'import mmengine, amp_wrapper',
    'from mmengine import Config\nConfig.fromstring("custom_imports = dict(imports=[\'amp_wrapper\'])", ".py")',
    # to look for mmengine is no import of it
    'import amp_wrapper\nfrom importlib.util import find_spec\nfind_spec("mmengine")\nimport mmengine.optim',
)
REGISTERED = """
from mmengine.registry import OPTIM_WRAPPERS, OPTIMIZERS
import amp_wrapper
for name in ('AmpOptimWrapper', 'ApexOptimWrapper'):
    assert OPTIM_WRAPPERS.get(name) is getattr(amp_wrapper, name), name
for name in ('FusedAdam', 'FusedAdamW', 'FusedSGD'):
    assert OPTIMIZERS.get(name) is getattr(amp_wrapper, name), name
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


CASES = [('INFO', 'import mmengine'), ('ERROR', ''), ('', ''), ('', 'import mmengine')]
LOGGED = 'import logging, sys; logging.basicConfig(level="{}", stream=sys.stdout)\n'
#: All that can do with one interpreter that has imported what takes long.
SCRIPTS = (
    NO_MMENGINE + REFUSED,
    NEEDS_IT,
    REFUSED,
    *((LOGGED.format(level) if level else '') + SKIPPED.format(then=then) for level, then in CASES),
    *(f'{order}\n{REGISTERED}' for order in ORDERS),
)
if 'mmengine' in missing():
    SCRIPTS = SCRIPTS[:2]


@needs_mmengine
def test_names_are_registered_whichever_package_is_imported_first() -> None:
    """A config may say ``type='AmpOptimWrapper'`` then."""
    assert [out for out, _ in run(*SCRIPTS)[-len(ORDERS) :]] == [''] * len(ORDERS)


@needs_mmengine
def test_messages_go_where_the_script_says() -> None:
    """A script without configuration sees warnings on stderr; ``logging.basicConfig`` sees each line once."""
    seen = [
        tuple(text.count('optimizer step skipped') for text in texts) for texts in run(*SCRIPTS)[3 : 3 + len(CASES)]
    ]
    assert seen == [(int(level == 'INFO'), int(level == '')) for level, _ in CASES]


def test_help_of_the_tools_loads_neither_torch_nor_mmengine() -> None:
    for name in ('train', 'test', 'convert_checkpoint', 'migrate_from_apex'):
        words = [sys.executable, '-X', 'importtime', f'tools/{name}.py', '--help']
        done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, timeout=120, check=True)
        found = set(re.findall(r'\| +([\w.]+)$', done.stderr, re.MULTILINE))
        assert {'argparse', 'amp_wrapper'} <= found and not {'torch', 'numpy', 'mmengine', 'libcst'} & found, name
