"""The table of levels, every option of it, and every error that a configuration can have."""

from __future__ import annotations

import copy
import dataclasses
import io
import itertools
import math
import pickle
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forwards import CAST, LEVELS, PER_OP
from torch import nn

from amp_wrapper import AmpConfigError, Policy, resolve

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
FIELDS = 'cast_model_type autocast_dtype keep_batchnorm_fp32 master_weights skip_nonfinite'.split()
#: Those fields, and whether the loss scale is dynamic.
TABLE: dict[str, tuple[Any, ...]] = {
    'O0': (F32, None, False, False, False, False),
    'O1': (None, F16, False, False, True, True),
    'O2': (F16, None, True, True, True, True),
    'O3': (F16, None, False, False, True, False),
    'O4': (None, BF16, False, False, True, False),
    'O5': (BF16, None, True, True, True, False),
}
DYNAMIC = dict(growth_factor=2.0, backoff_factor=0.5, growth_interval=2000, hysteresis=1, enabled=True)
DYNAMIC |= dict(dynamic=True, init_scale=2.0**16, min_scale=None, max_scale=2.0**24)
TYPES = {
    F16: ['float16', 'fp16', 'half', 'torch.float16', 'torch.half', 'FP16', ' float16 ', F16],
    BF16: ['bfloat16', 'bf16', 'torch.bfloat16', 'BF16', BF16],
    F32: ['float32', 'fp32', 'float', 'single', 'torch.float32', 'torch.float', F32],
    torch.float64: ['float64', 'fp64', 'double', 'torch.double', torch.float64],
}


def problems(level: Any = 'O2', **options: Any) -> tuple[str, ...]:
    """What is wrong with a configuration, each in one sentence; nothing where it is resolved."""
    try:
        resolve(level, **options)
    except AmpConfigError as error:
        return error.problems
    return ()


def changes(policy: Policy, base: Policy) -> dict[str, Any]:
    """The fields in which a policy differs from another."""
    names = [field.name for field in dataclasses.fields(Policy) if field.compare]
    return {name: getattr(policy, name) for name in names if getattr(policy, name) != getattr(base, name)}


def unexplained(rows: Any) -> list[Any]:
    """Of (level, options, words of its only error): the rows whose error is another."""
    found = [(level, options, words, problems(level, **options)) for level, options, words in rows]
    return [row for row in found if len(row[3]) != 1 or not all(word in row[3][0] for word in row[2])]


# -- levels and their options --------------------------------------------------------------------------------------------


def test_table_of_levels() -> None:
    for level, row in TABLE.items():
        policy, dynamic = resolve(level), row[-1]
        assert tuple(getattr(policy, name) for name in FIELDS) == row[:-1], level
        assert policy.opt_level == level and policy.enabled and policy.casts_model == (level in CAST)
        assert policy.patch_torch_functions == (level in PER_OP) and not policy.split_masters and not policy.from_16bit
        assert (policy.num_losses, policy.verbosity, policy.max_consecutive_skips) == (1, 1, 50)
        assert policy.restore_buffers_on_skip and not policy.accumulate_in_fp32 and policy.cast_model_outputs is None
        scale = {**DYNAMIC, 'dynamic': dynamic, 'init_scale': 2.0**16 if dynamic else 1.0}
        assert dataclasses.asdict(policy.loss_scale) == scale, level
    assert resolve() == resolve('O1')


BOTH = [(value, value) for value in (True, False)]
#: Levels, an option, its values with those of the field of that name.
LEGAL: list[tuple[tuple[str, ...], str, list[tuple[Any, Any]]]] = [
    (('O0', *CAST), 'cast_model_type', [(word, dtype) for dtype in (F16, BF16, F32) for word in TYPES[dtype]]),
    (('O0', *CAST), 'cast_model_type', [(False, None)]),
    (PER_OP, 'cast_model_type', [(word, None) for word in (False, *TYPES[F32])]),
    (('O0', *CAST), 'keep_batchnorm_fp32', [*BOTH, ('True', True), ('False', False)]),
    (('O0', *CAST), 'master_weights', BOTH),
    (LEVELS, 'skip_nonfinite', BOTH),
    (LEVELS, 'keep_fp32', [('head', ('head',)), (['a.*', nn.LayerNorm], ('a.*', nn.LayerNorm)), (nn.GRU, (nn.GRU,))]),
    (LEVELS, 'keep_inputs', [('steps', ('steps',)), (['a', 'b'], ('a', 'b'))]),
    (LEVELS, 'cast_model_outputs', [(word, dtype) for dtype, words in TYPES.items() for word in words]),
    (LEVELS, 'num_losses', [(3, 3), (np.int64(2), 2)]),
    (LEVELS, 'verbosity', [(0, 0), (2, 2)]),
    (LEVELS, 'max_consecutive_skips', [(None, None), (7, 7), (np.int32(5), 5)]),
    *[(LEVELS, name, [*BOTH, (np.bool_(True), True)]) for name in ('from_16bit', 'restore_buffers_on_skip', 'enabled')],
    # sums need masters
    ([level for level in LEVELS if level != 'O3'], 'accumulate_in_fp32', BOTH),
]


def test_options_change_their_field_alone() -> None:
    wrong = []
    for levels, name, values in LEGAL:
        for level, (value, expected) in itertools.product(levels, values):
            found, base = resolve(level, **{name: value}), resolve(level)
            change = {} if getattr(base, name) == expected else {name: expected}
            if changes(found, base) != change or type(getattr(found, name)) is not type(expected):
                wrong.append((level, name, value))
            # a report takes them to another level
            assert resolve(level, **found.overrides) == found and bool(found.overrides) == (found != base)
    assert wrong == []
    for level in LEVELS:
        assert resolve(level, patch_torch_functions=level in PER_OP) == resolve(level)
    for level in PER_OP:
        assert changes(resolve(level, patch_torch_functions=False), resolve(level)) == {'autocast_dtype': None}
    for level in CAST:
        split = {'split_masters': True} | ({} if resolve(level).master_weights else {'master_weights': True})
        assert changes(resolve(level, master_weights='split'), resolve(level)) == split


def test_dtype_turns_levels() -> None:
    for word in TYPES[BF16]:
        for level, becomes in (('O1', 'O4'), ('O2', 'O5'), ('O4', 'O4'), ('O5', 'O5')):
            assert (found := resolve(level, dtype=word)) == resolve(becomes) and not found.overrides
        assert changes(found := resolve('O3', dtype=word), resolve('O3')) == {'cast_model_type': BF16}
        assert resolve('O3', **found.overrides) == found
    for level in ('O1', 'O2', 'O3'):
        assert resolve(level, dtype='float16') == resolve(level)
    for level in PER_OP:
        for word in ('float32', 'float64', F32, torch.float64):
            assert changes(found := resolve(level, dtype=word), resolve(level)) == {'autocast_dtype': None}
            assert resolve(level, **found.overrides) == found
    assert resolve('O0', dtype='float32') == resolve('O0')
    assert resolve('O2', dtype='bfloat16', cast_model_type='bf16') == resolve('O5')


def test_option_that_a_level_refuses_names_value_level_and_remedy() -> None:
    rows: list[Any] = []
    for level in PER_OP:
        remedy = {'O1': "opt_level='O2'", 'O4': "opt_level='O5'"}[level]
        values = [('cast_model_type', v) for v in (*TYPES[F16], *TYPES[BF16])]
        values += [('keep_batchnorm_fp32', v) for v in (True, False, 'True', 'False')]
        values += [('master_weights', v) for v in (True, False, 'split')]
        rows += [(level, {name: v}, [f'{name}={v!r}', level, remedy, 'leave it out']) for name, v in values]
    rows += [(lv, {'patch_torch_functions': True}, ['patch_torch_functions', lv, "'O1'"]) for lv in ('O0', *CAST)]
    for row in ('O0 bfloat16 O4', 'O0 float16 O1', 'O4 float16 O1', 'O5 float16 O2', 'O2 float32 O0', 'O5 float64 O0'):
        level, dtype, remedy = row.split()
        rows.append((level, {'dtype': dtype}, [f'dtype={dtype!r}', f'opt_level={level!r}', repr(remedy)]))
    sums = dict(accumulate_in_fp32=True)
    several = dict(num_losses=2, **sums)
    rows += [
        ('O2', dict(dtype='bfloat16', cast_model_type='float16'), ["cast_model_type='float16'", "dtype='bfloat16'"]),
        ('O1', dict(dtype='float32', patch_torch_functions=True), ['patch_torch_functions=True', "dtype='float32'"]),
        ('O0', dict(master_weights='split'), ["'split'", "'O0'", "'O5'"]),
        ('O2', dict(master_weights='split', cast_model_type=False), ["'split'", 'cast_model_type=False']),
        ('O5', dict(master_weights='split', num_losses=2), ["'split'", 'num_losses=2', 'master_weights=True']),
        ('O2', dict(master_weights='split', num_losses=2), ["'split'", 'num_losses=2', 'master_weights=True']),
        ('O3', sums, ['accumulate_in_fp32', "'O3'"]),
        ('O2', dict(master_weights=False, **sums), ['accumulate_in_fp32', "'O2'"]),
    ]
    assert unexplained(rows) == []
    assert not problems('O2', **several) and not problems('O0', **several)


#: Values that mean nothing at any level.
MEANINGLESS: dict[str, list[Any]] = {
    'cast_model_type': [True, 'float64', torch.int8, 'fp15', 16],
    'keep_batchnorm_fp32': ['true', 'None', 1, 0],
    'master_weights': ['True', 'Split', 1],
    'patch_torch_functions': ['False', 0],
    'cast_model_outputs': ['int8', torch.int64, True, ''],
    'num_losses': [0, -1, 1.0, True, '2', np.bool_(True), np.float64(2.0), torch.tensor(True), np.int64(0)],
    'verbosity': [3, True, 'loud'],
    'max_consecutive_skips': [0, 2.5, True],
    'enabled': [1, None, 'False'],
    'skip_nonfinite': ['yes', 1],
    **{key: [None, 1] for key in ('accumulate_in_fp32', 'from_16bit', 'restore_buffers_on_skip')},
    'keep_fp32': [3, [''], [None], {'head': True}, nn.Linear(1, 1)],
    'keep_inputs': [3, [''], [nn.Linear]],
    'dtype': ['int8', 16, torch.complex64, 'torch.', ''],
    'fp32_ops': [3, [3], ['']],
}


def test_value_that_means_nothing_is_refused_at_each_level() -> None:
    refused = [(level, {name: value}) for name in MEANINGLESS for value in MEANINGLESS[name] for level in ('O2', 'O3')]
    rows = [(level, options, [f'{name}={options[name]!r}' for name in options]) for level, options in refused]
    assert unexplained(rows) == []
    for name in ('dtype', 'cast_model_type', 'cast_model_outputs'):
        (text,) = problems(**{name: 'fp15'})
        assert "'float16'" in text and "'bfloat16'" in text
    with pytest.raises(TypeError, match='no_such_option'):
        resolve('O2', no_such_option=1)  # type: ignore[call-arg]


def test_level_that_does_not_exist() -> None:
    meant = {'o2': 'O2', ' O4 ': 'O4', '05': 'O5', 1: 'O1', '1': 'O1'}
    rows = [(value, {}, [f'opt_level={value!r}', 'O0 (', 'O5 (', f"did you mean '{meant[value]}'?"]) for value in meant]
    meaningless = ('O6', 'O', '', True, None, ['O1'], 1.0)
    rows += [(value, {}, [f'opt_level={value!r}', 'O0 (', 'O5 (']) for value in meaningless]
    assert unexplained(rows) == []


def test_all_conflicts_come_in_one_error() -> None:
    words = dict(cast_model_type='float16', keep_batchnorm_fp32='maybe', master_weights=True, loss_scale=-1)
    words |= dict(num_losses=0, min_loss_scale=8.0, max_loss_scale=4.0, verbosity=9, fp32_ops=['nms', 'torch.sofmax'])
    found = problems('O1', **words)
    assert sorted(each.partition('=')[0] for each in found) == sorted([*words.keys() - {'max_loss_scale'}, 'fp32_ops'])
    error = pickle.loads(pickle.dumps(AmpConfigError(found)))
    assert error.problems == found and str(error).startswith(f'{len(found)} conflicts') and '\n  9. ' in str(error)


# -- loss scales ---------------------------------------------------------------------------------------------------------

EVERY = dict(init_scale=64.0, growth_factor=3, backoff_factor=0.25, growth_interval=np.int64(7), hysteresis=3)
EVERY |= dict(min_scale=2.0, max_scale=256.0, enabled=False)
#: Options, and the fields that differ from those of 'dynamic'.
SCALES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({'loss_scale': 'dynamic'}, {}),
    *[({'loss_scale': v}, dict(dynamic=False, init_scale=float(v))) for v in (128, 0.5, '128.0', '1e3', np.float32(4))],
    ({'loss_scale': EVERY}, EVERY),
    ({'loss_scale': {'growth_interval': 1, 'hysteresis': 1}}, {'growth_interval': 1}),
    ({'loss_scale': 'dynamic', 'min_loss_scale': 2.0}, {'min_scale': 2.0}),
    # the default first scale moves to the bounds
    ({'loss_scale': 'dynamic', 'max_loss_scale': 1024.0}, {'max_scale': 1024.0, 'init_scale': 1024.0}),
    ({'loss_scale': 'dynamic', 'min_loss_scale': 2.0**20}, {'min_scale': 2.0**20, 'init_scale': 2.0**20}),
    ({'loss_scale': {'init_scale': 2.0**30}, 'max_loss_scale': None}, dict(init_scale=2.0**30, max_scale=None)),
    ({'loss_scale': dict(min_scale=2.0, init_scale=2.0)}, dict(min_scale=2.0, init_scale=2.0)),
    ({'loss_scale': 2.0**30}, dict(dynamic=False, init_scale=2.0**30)),
    ({'loss_scale': 8.0, 'max_loss_scale': None}, dict(dynamic=False, init_scale=8.0, max_scale=None)),
    ({'loss_scale': {'init_scale': 2.0**30, 'enabled': False}}, dict(init_scale=2.0**24, enabled=False)),
]


def test_loss_scale() -> None:
    for options, fields in SCALES:
        given = copy.deepcopy(options)
        for level in LEVELS:
            policy = resolve(level, **options)
            found = dataclasses.asdict(policy.loss_scale)
            assert found == {**DYNAMIC, **fields}, (level, options)
            assert changes(policy, resolve(level)).keys() <= {'loss_scale'}
            assert list(map(type, found.values()))[:4] == [bool, float, float, float]
        assert options == given
    # of the scale that a level has by itself
    assert resolve('O2', max_loss_scale=1024.0).loss_scale.init_scale == 1024.0
    assert resolve('O3', min_loss_scale=8.0).loss_scale.init_scale == 1.0


#: What is refused, and words of the error.
BAD_SCALES: list[tuple[Any, list[str]]] = [
    *[(value, ['positive finite', 'float32']) for value in (0, -1, math.nan, math.inf, 1e39, 1e-60, '0', '-2', 'inf')],
    (True, ['loss_scale=True', "'dynamic'"]),
    ('dynamc', ["loss_scale='dynamc'", "did you mean 'dynamic'?"]),
    ({'int_scale': 1.0}, ["'int_scale'", "did you mean 'init_scale'?", 'backoff_factor']),
    *[({'init_scale': value}, [f"loss_scale['init_scale']={value!r}"]) for value in (0, math.nan, None)],
    *[({'growth_factor': value}, ["['growth_factor']", 'above 1']) for value in (1.0, math.inf, math.nan)],
    *[({'backoff_factor': value}, ["['backoff_factor']"]) for value in (1.0, 0, 2)],
    *[({key: v}, [key]) for key in ('growth_interval', 'hysteresis') for v in (0, 2.5, True, 2**31)],
    ({'min_scale': -1.0}, ["loss_scale['min_scale']=-1.0"]),
    ({'min_scale': 8.0, 'max_scale': 4.0}, ['8', '4', 'above']),
    ({'enabled': 1}, ["loss_scale['enabled']=1"]),
]


BAD_BOUNDS: list[dict[str, Any]] = [
    *[{'min_loss_scale': value} for value in (0.0, math.nan, 2.0**25)],
    *[{'max_loss_scale': value} for value in (True, math.inf)],
    dict(min_loss_scale=2.0, max_loss_scale=1.0),
    dict(loss_scale={'min_scale': 2.0}, min_loss_scale=4.0),
    dict(loss_scale={'max_scale': 2.0}, max_loss_scale=4.0),
]


def test_bad_loss_scale() -> None:
    rows = [(level, {'loss_scale': value}, words) for value, words in BAD_SCALES for level in ('O0', 'O1', 'O5')]
    rows += [('O2', options, ['loss_scale']) for options in BAD_BOUNDS]
    assert unexplained(rows) == []
    assert not problems(min_loss_scale=2.0**24) and not problems(loss_scale={'growth_interval': 2**31 - 1})


def test_scale_that_its_bounds_would_change_is_refused() -> None:
    assert problems('O2', loss_scale={'init_scale': 2.0**30})
    assert problems('O2', loss_scale={'init_scale': 1.0, 'min_scale': 4.0})
    assert problems('O2', loss_scale=64.0, max_loss_scale=1024.0)
    assert problems('O2', loss_scale=64.0, min_loss_scale=1.0)


# -- the record ----------------------------------------------------------------------------------------------------------


def test_record_is_plain_frozen_and_independent_of_what_was_given() -> None:
    given: dict[str, Any] = dict(keep_batchnorm_fp32=False, cast_model_outputs='float16', keep_inputs=['step'])
    given |= dict(keep_fp32=['head.*', nn.LayerNorm], loss_scale={'init_scale': 64.0})
    policy = resolve('O5', **given)
    given['keep_fp32'].append('body')
    given['loss_scale']['init_scale'] = 1.0
    assert policy.keep_fp32 == ('head.*', nn.LayerNorm) and policy.loss_scale.init_scale == 64.0
    plain = policy.to_dict()
    assert set(plain) == {field.name for field in dataclasses.fields(Policy) if field.compare}
    assert plain['keep_fp32'] == ['head.*', 'LayerNorm'] and plain['keep_inputs'] == ['step']
    assert (plain['cast_model_type'], plain['cast_model_outputs']) == ('bfloat16', 'float16')
    assert plain['loss_scale'] == dataclasses.asdict(policy.loss_scale)
    torch.save(plain, buffer := io.BytesIO())
    assert torch.load(io.BytesIO(buffer.getvalue()), weights_only=True) == plain
    for record, name in ((policy, 'opt_level'), (policy.loss_scale, 'init_scale')):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(record, name, 'O3')


def test_description_is_one_line_with_what_matters() -> None:
    found = resolve('O2', loss_scale=8, num_losses=3).describe()
    assert found == 'O2 (float16 weights, FP32 BatchNorm, FP32 masters, loss scale 8, 3 losses)'
    # what is disabled is still checked, and casts nothing
    assert problems('O2', enabled=False, num_losses=0)
    policy = resolve('O2', enabled=False)
    assert not policy.enabled and not policy.casts_model and 'does nothing' in policy.describe()


# -- names of functions ---------------------------------------------------------------------------------------------------


class Plain:
    """Neither a module nor an autograd Function."""

    value = 3

    def decode(self) -> None: ...


class Doubled(torch.autograd.Function): ...


def test_names_and_objects() -> None:
    fine = ['torch.nn.LayerNorm', 'torch.Tensor.sum', f'{__name__}.Doubled', f'{__name__}.Plain.decode']
    assert [op.name for op in resolve('O2', fp32_ops=fine).fp32_ops] == fine
    policy = resolve('O2', fp32_ops=['torch.softmax', nn.LayerNorm, torch.softmax, Plain.decode])
    names = ['torch.softmax', 'torch.nn.modules.normalization.LayerNorm', f'{__name__}.Plain.decode']
    assert policy.to_dict()['fp32_ops'] == [{'name': name, 'output': 'caller'} for name in names]
    wide = [dict(name='torch.softmax', output='float32'), {'name': 'torch.cumsum'}]
    assert [op.output for op in resolve('O2', fp32_ops=wide).fp32_ops] == ['float32', 'caller']
    assert resolve('O2').fp32_ops == () and len(resolve('O2', fp32_ops='torch.softmax').fp32_ops) == 1


WRONG: list[tuple[Any, list[str]]] = [
    ('softmax', ['dotted name']),
    ('.torch.softmax', ['dotted name']),
    ('torch.nn.functional.sofmax', ['does not exist', "did you mean 'softmax'?"]),
    ('no_such_package.ops.nms', ['no_such_package is not installed']),
    ('torch.nn.functional', ['is a module']),
    ('torch.Size.numel', ['built-in type', 'cannot be replaced']),
    (f'{__name__}.Plain', ['is a class', 'one of its methods']),
    (f'{__name__}.Plain.value', ['cannot be called', 'int']),
    (lambda x: x, ['dotted name']),
    ({'output': 'float32'}, ['dotted name']),
    ({'name': 'torch.softmax', 'output': 'float16'}, ['must be dict']),
]


def test_wrong_names_are_explained() -> None:
    # this mmcv may have its ops
    without = [('mmcv.ops.nms', ['mmcv-lite', 'install mmcv (full)'])] if find_spec('mmcv._ext') is None else []
    assert unexplained([('O2', {'fp32_ops': [name]}, ['fp32_ops=', *words]) for name, words in WRONG + without]) == []


def test_failing_packages_and_functions_named_like_their_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchvision of another build raises RuntimeError; mmcv.ops.nms is a module and a function of its package."""
    files = {
        'breaks/__init__.py': 'raise RuntimeError("no library")',
        'shadowing/__init__.py': 'from .nms import nms',
        'shadowing/nms.py': 'class NMSop: pass\n\ndef nms(): pass',
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    wrong = [('breaks.ops.nms', ['no library']), ('shadowing.nms.NMSop', ['is a class'])]
    assert unexplained([('O2', {'fp32_ops': [name]}, words) for name, words in wrong]) == []
    names = ['shadowing.nms', 'shadowing.nms.nms']
    assert [op.name for op in resolve('O2', fp32_ops=names).fp32_ops] == names
