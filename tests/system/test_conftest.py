"""A test that ends badly, as where a compiler of torch fails in the middle of a forward pass, leaves nothing to the next."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

TESTS = """
import pytest
import torch
from torch import nn

from amp_wrapper import amp
from amp_wrapper.autocast import patching, regions, state
from amp_wrapper.autocast.op_set import OpSet
from amp_wrapper.autocast.patching import patches


held = []


def fails(graph, inputs):
    raise KeyError('the compiler failed')


def test_a_compiler_that_fails():
    model = amp.initialize(nn.Sequential(nn.Linear(2, 2), nn.Softmax(-1)), opt_level='O4', verbosity=0)
    torch.compile(model, backend=fails)(torch.ones(1, 2))


def test_the_next():
    assert regions.count() == 0
    assert not torch.is_autocast_enabled('cpu')


def test_everything_at_once():
    ops = OpSet(casts=True)
    for context in (state.suspended(), state.overruling(), patching.in_backward(ops.keys), torch.autocast('cpu')):
        context.__enter__()
        held.append(context)
    regions.enter(ops.keys)
    torch.set_grad_enabled(False)


def test_the_next_again():
    assert torch.nn.functional.mse_loss(torch.ones(1), torch.ones(1, requires_grad=True)).requires_grad
    assert not state.depth() and not state.is_suspended() and not patches.in_place
"""


def test_what_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    tests = Path(__file__).parents[1]
    (tmp_path / 'conftest.py').write_text((tests / 'conftest.py').read_text(encoding='utf-8'))
    (tmp_path / 'test_planted.py').write_text(TESTS)
    # the interpreter's own path has this tree, wherever it was installed from
    done = subprocess.run(
        [
            sys.executable,
            '-m',
            'pytest',
            '-q',
            '-p',
            'no:cacheprovider',
            '--tb=short',
            '--show-capture=no',
            str(tmp_path),
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=tests.parent,
        # what the file imports lies beside it
        env={
            **os.environ,
            'PYTHONPATH': os.pathsep.join(
                [str(tests / 'support'), str(tests.parent), os.environ.get('PYTHONPATH', '')]
            ),
        },
    )
    words = done.stdout
    assert 'FAILED' in words and 'test_a_compiler_that_fails' in words, words + done.stderr
    assert re.search(r'1 failed, 3 passed.* [12] error', words), words
    assert 'forward passes, suspended casts, an overruled registry' in words, words
