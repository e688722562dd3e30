"""The canary knows every private name that the package uses, and tells what has become of it."""

from __future__ import annotations

import json
from pathlib import Path

import canary
import pytest
import torch
from canary import RECORD, ROOT, Use, all_uses, definitions, is_there, main, moved, uses_in

SOURCE = """
import torch
from torch import nn
from torch.optim.optimizer import _hooks
from torch.utils import checkpoint


def ours(module):
    torch._C._current()
    module._forward_hooks
    getattr(module, '_join_config', None)
    getattr(checkpoint, '_Function', None)
    nn.modules.loss._Loss
    self._mine = module._theirs
    return self._mine
"""


def test_the_names_of_a_file() -> None:
    found = {(use.name, use.path, use.optional) for use in uses_in(SOURCE, 'file.py')}
    assert found == {
        ('_hooks', 'torch.optim.optimizer._hooks', False),
        ('_C', 'torch._C', False),
        ('_current', 'torch._C._current', False),
        ('_forward_hooks', '', False),
        ('_join_config', '', True),
        ('_Function', 'torch.utils.checkpoint._Function', True),
        ('_Loss', 'torch.nn.modules.loss._Loss', False),
        ('_theirs', '', False),
    }


def test_the_record_has_the_names_of_the_package() -> None:
    """A name that is added belongs there: ``python tests/system/canary.py --record``, on the torch that is pinned."""
    names = {use.name for use in all_uses(ROOT / 'amp_wrapper')}
    record = json.loads(RECORD.read_text())
    assert len(names) > 50 and set(record['names']) == names
    assert f'torch=={record["torch"]}\n' in (ROOT / 'requirements' / 'runtime.txt').read_text()
    # only these are nowhere in that version, and the package asks for them with a default
    assert {name for name, places in record['names'].items() if not places} <= {'_CheckpointedFunction'}


def a_torch(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_where_torch_defines_names(tmp_path: Path) -> None:
    files = {
        'a.py': 'class _Loss(Module):\n    def __init__(self):\n        self._hooks: dict = {}\n',
        'nn/b.py': 'def _apply(self, fn, recurse=True):\n    other._mark = 1\n    assert self._asked == 1\n',
        'testing/c.py': '_Loss = 1',
        '_package/__init__.py': '',
    }
    (tmp_path / 'lib').mkdir()
    (tmp_path / 'lib' / 'libtorch_python.so').write_bytes(b'x\0_bound\0_bound_too')
    names = {'_Loss', '_hooks', '_apply', '_mark', '_asked', '_bound', '_bound_too', '_package'}
    assert definitions(names, a_torch(tmp_path, files)) == {
        '_Loss': {'a.py': ''},
        '_hooks': {'a.py': ''},
        '_apply': {'nn/b.py': 'self, fn, recurse=True'},
        '_mark': {'nn/b.py': ''},
        '_asked': {},
        '_bound': {canary.COMPILED: ''},
        '_bound_too': {},
        '_package': {'_package/__init__.py': ''},
    }


@pytest.mark.parametrize(
    ('now', 'line'),
    [
        ({'a.py': 'self, fn'}, ''),
        ({'a.py': 'self, fn', 'b.py': ''}, ''),
        ({'b.py': 'self, fn'}, 'MOVED: _apply, from a.py to b.py [file.py:3]'),
        ({}, 'GONE: _apply, from a.py [file.py:3]'),
        ({'a.py': 'self, other'}, 'other arguments: _apply in a.py: (self, fn) is now (self, other) [file.py:3]'),
    ],
)
def test_what_is_said_of_an_attribute(now: dict[str, str], line: str) -> None:
    said = moved([Use('_apply', '', False, 'file.py:3')], {'_apply': now}, {'_apply': {'a.py': 'self, fn'}})
    assert said == ([line] if line else [])


def test_what_is_said_of_a_name_in_a_module() -> None:
    assert is_there('torch._C._current_graph_task_id') and is_there('torch.nn.modules.loss._Loss')
    assert not is_there('torch._C._no_such_name') and not is_there('torch._no_such_module.name')
    uses = [Use('_gone', 'torch.nn._gone', False, 'file.py:3'), Use('_new', 'torch.nn._new', True, 'file.py:4')]
    assert moved(uses, {'_gone': {'nn/other.py': ''}, '_new': {}}, {}) == [
        'GONE: torch.nn._gone; defined in nn/other.py [file.py:3]',
        'not there (asked for with a default): torch.nn._new [file.py:4]',
    ]


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On the recorded version nothing has moved; on another the findings are printed, and counted with ``--strict``."""
    record = json.loads(RECORD.read_text())
    status = main(['--strict'])
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith(f'torch {torch.__version__}, beside torch {record["torch"]}: ')
    bad = [line for line in said if line.startswith(('GONE', 'MOVED'))]
    assert status == (1 if bad else 0)
    if torch.__version__.split('+')[0] == record['torch']:
        assert bad == []
    record['names']['_current_graph_task_id'] = {'elsewhere.py': ''}
    monkeypatch.setattr(canary, 'RECORD', tmp_path / 'record.json')
    (tmp_path / 'record.json').write_text(json.dumps(record))
    assert main(['--strict']) == 1 and main([]) == 0
    assert 'MOVED: _current_graph_task_id, from elsewhere.py to ' in capsys.readouterr().out
