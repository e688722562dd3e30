"""The names under which wrappers are built, and the arguments that they take."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from command_line import python
from mmengine.config import Config
from mmengine.optim import build_optim_wrapper
from mmengine.registry import OPTIM_WRAPPERS, DefaultScope
from toy_wrapper import net, one_step, wrap

from amp_wrapper import (
    AmpAttachError,
    AmpConfigError,
    AmpOptimWrapper,
    ApexOptimWrapper,
    TorchAmpOptimWrapper,
    ops,
)

# -- registry ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('scope', [None, 'mmengine', 'mmdet', 'amp_wrapper'])
def test_the_bare_name_is_ours_under_every_scope(scope: str | None) -> None:
    with DefaultScope.overwrite_default_scope(scope):
        assert OPTIM_WRAPPERS.get('AmpOptimWrapper') is AmpOptimWrapper
        assert OPTIM_WRAPPERS.get('ApexOptimWrapper') is ApexOptimWrapper
        assert OPTIM_WRAPPERS.get('TorchAmpOptimWrapper') is TorchAmpOptimWrapper
        assert TorchAmpOptimWrapper.__module__.startswith('mmengine.')


def test_the_scoped_name_needs_no_import() -> None:
    code = (
        'import sys, torch\n'
        'from mmengine.optim import build_optim_wrapper\n'
        "assert 'amp_wrapper' not in sys.modules\n"
        "cfg = dict(type='amp_wrapper.AmpOptimWrapper', opt_level='O2', optimizer=dict(type='SGD', lr=0.1))\n"
        'wrapper = build_optim_wrapper(torch.nn.Linear(2, 2), cfg)\n'
        "assert type(wrapper).__module__ == 'amp_wrapper.openmmlab.optim_wrapper', type(wrapper)\n"
        "assert wrapper.opt_level == 'O2'\n"
    )
    done = python('-c', code)
    assert done.returncode == 0, done.stderr


def test_without_mmengine_the_import_works_and_says_what_is_missing() -> None:
    code = (
        'import importlib.util as u, sys\n'
        'find = u.find_spec\n'
        "u.find_spec = lambda name, *a: None if name.startswith('mm') else find(name, *a)\n"
        'import amp_wrapper\n'
        'from amp_wrapper.engine import AmpEngine\n'
        "assert not any(name.startswith('mmengine') for name in sys.modules)\n"
        'try:\n    amp_wrapper.AmpOptimWrapper\n'
        "except AttributeError as error:\n    assert 'pip install mmengine' in str(error)\n"
        'else:\n    raise SystemExit(1)\n'
    )
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_pure_python_config_builds_ours(tmp_path: Path) -> None:
    file = tmp_path / 'pure.py'
    file.write_text(
        'from torch.optim import SGD\nfrom amp_wrapper import AmpOptimWrapper\n'
        "optim_wrapper = dict(type=AmpOptimWrapper, opt_level='O5', optimizer=dict(type=SGD, lr=0.1))\n"
    )
    wrapper = build_optim_wrapper(net(), Config.fromfile(file).optim_wrapper)
    assert type(wrapper) is AmpOptimWrapper
    assert wrapper.opt_level == 'O5'


def test_one_line_names_class_level_and_backend() -> None:
    with toy.captured_log() as lines:
        wrap(net(), opt_level='O2')
    assert len(lines) == 1
    assert all(word in lines[0] for word in ('AmpOptimWrapper', 'amp_wrapper', 'O2', 'float16', ops.backend()))


# -- arguments ---------------------------------------------------------------------------------------------------------

ACCEPTED: list[tuple[tuple[Any, ...], dict[str, Any], str, float]] = [
    ((), {}, 'O1', 2.0**16),
    (('dynamic',), {}, 'O1', 2.0**16),
    ((512.0,), {}, 'O1', 512.0),
    ((512,), {}, 'O1', 512.0),
    (('128.0',), {}, 'O1', 128.0),
    ((dict(init_scale=64.0, growth_factor=1.5, backoff_factor=0.25, growth_interval=7, enabled=True),), {}, 'O1', 64.0),
    (('dynamic', 'float16'), {}, 'O1', 2.0**16),
    (('dynamic', torch.bfloat16), {}, 'O4', 2.0**16),
    (('dynamic', 'bfloat16', False), {}, 'O4', 2.0**16),
    (('dynamic', 'float32'), {}, 'O1', 2.0**16),
    ((), dict(dtype='bfloat16'), 'O4', 1.0),
    ((), dict(opt_level='O2', dtype='bf16'), 'O5', 1.0),
    ((), dict(opt_level='O2', keep_batchnorm_fp32='False', loss_scale='256'), 'O2', 256.0),
    ((), dict(opt_level='O3', cast_model_outputs='half'), 'O3', 1.0),
    (
        (),
        dict(accumulative_counts=3, clip_grad=dict(max_norm=1.0, norm_type='inf', error_if_nonfinite=False)),
        'O1',
        2.0**16,
    ),
]


@pytest.mark.parametrize(('args', 'words', 'level', 'scale'), ACCEPTED, ids=range(len(ACCEPTED)))
def test_what_stock_wrappers_accept(args: tuple[Any, ...], words: dict[str, Any], level: str, scale: float) -> None:
    model = net()
    before = copy.deepcopy((args, words))
    wrapper = AmpOptimWrapper(*args, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), **words)
    assert (wrapper.opt_level, wrapper.loss_scaler.get_scale()) == (level, scale)
    assert (args, words) == before
    for _ in range(3):
        one_step(model, wrapper)


def test_apex_alias_keeps_its_positional_order_and_default() -> None:
    optimizer = torch.optim.SGD(net().parameters(), lr=0.1)
    wrapper = ApexOptimWrapper(
        'O2', 128.0, True, torch.bfloat16, None, 'False', True, torch.float16, 2, 0, 1.0, 512.0, optimizer=optimizer
    )
    resolved = wrapper.policy
    assert (resolved.opt_level, resolved.cast_model_type, resolved.keep_batchnorm_fp32) == ('O2', torch.bfloat16, False)
    assert (resolved.cast_model_outputs, resolved.num_losses, resolved.verbosity) == (torch.float16, 2, 0)
    assert resolved.loss_scale.init_scale == 128.0
    assert ApexOptimWrapper('O3', optimizer=optimizer).policy.loss_scale.dynamic


@pytest.mark.parametrize(
    ('words', 'parts'),
    [
        (dict(opt_level='o2'), ["'o2'", "'O2'"]),
        (dict(opt_levl='O2'), ['opt_levl', "'opt_level'"]),
        (
            dict(opt_level='O1', master_weights=True, keep_batchnorm_fp32=True, num_losses=0),
            ['3 conflicts', 'num_losses=0'],
        ),
        (dict(accumulative_counts=0), ['accumulative_counts=0']),
        (dict(clip_grad=dict(max_nrm=1.0)), ['max_nrm', "'max_norm'"]),
        (dict(clip_grad=dict(type='global', max_norm=1.0)), ["'global'", "'norm' or 'value'"]),
        (dict(clip_grad={}), ['clip_grad={}']),
        (dict(use_fsdp=True), ['use_fsdp=True', 'MMFullyShard']),
        (dict(optimizer=None), ['optimizer is missing']),
        (dict(loss_scale=True, clip_grad=dict(clip_value=1.0)), ['conflicts', 'loss_scale=True', 'clip_value']),
    ],
)
def test_bad_arguments_come_in_one_typed_error(words: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(AmpConfigError) as error:
        wrap(net(), **words)
    assert all(part in str(error.value) for part in parts), str(error.value)


def test_optimizers_that_cannot_be_wrapped() -> None:
    with pytest.raises(AmpAttachError, match='LBFGS'):
        wrap(net(), optimizer=torch.optim.LBFGS(net().parameters()))
    with pytest.raises(AmpConfigError, match='optimizer='):
        wrap(net(), optimizer='SGD')


def test_callers_clip_grad_is_left_alone() -> None:
    clip = dict(type='value', clip_value=0.5)
    wrap(net(), clip_grad=clip)
    assert clip == dict(type='value', clip_value=0.5)
