"""The table of levels, every override of it, and every error that a configuration can have."""

from __future__ import annotations

import copy
import dataclasses
import io
import math
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from amp_wrapper.errors import AmpConfigError, nearest
from amp_wrapper.policy import LEVELS, Policy, dtype_name, parse_dtype, resolve
from amp_wrapper.policy.loss_scale import LossScaleConfig
from amp_wrapper.policy.options import is_number

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
CAST_LEVELS, PER_OP_LEVELS = ('O0', 'O2', 'O3', 'O5'), ('O1', 'O4')

# level: cast_model_type, patch_torch_functions, autocast, keep_batchnorm_fp32, master_weights, dynamic, skip_nonfinite
TABLE: dict[str, tuple[Any, ...]] = {
    'O0': (F32, False, None, False, False, False, False),
    'O1': (None, True, F16, False, False, True, True),
    'O2': (F16, False, None, True, True, True, True),
    'O3': (F16, False, None, False, False, False, True),
    'O4': (None, True, BF16, False, False, False, True),
    'O5': (BF16, False, None, True, True, False, True),
}


def problems(*args: Any, **kwargs: Any) -> tuple[str, ...]:
    with pytest.raises(AmpConfigError) as caught:
        resolve(*args, **kwargs)
    assert isinstance(caught.value, ValueError)
    for problem in caught.value.problems:
        assert problem in str(caught.value)
    return caught.value.problems


def only_problem(*args: Any, **kwargs: Any) -> str:
    found = problems(*args, **kwargs)
    assert len(found) == 1, found
    return found[0]


def row(policy: Policy) -> tuple[Any, ...]:
    return (
        policy.cast_model_type,
        policy.patch_torch_functions,
        policy.autocast_dtype,
        policy.keep_batchnorm_fp32,
        policy.master_weights,
        policy.loss_scale.dynamic,
        policy.skip_nonfinite,
    )


@pytest.mark.parametrize('level', LEVELS)
def test_table(level: str) -> None:
    policy = resolve(level)
    assert policy.opt_level == level and policy.enabled and policy.num_losses == 1 and policy.verbosity == 1
    assert row(policy) == TABLE[level]
    assert policy.casts_model == (level in ('O2', 'O3', 'O5'))
    assert policy.max_consecutive_skips == 50
    dynamic = TABLE[level][5]
    scale = LossScaleConfig(dynamic=dynamic, init_scale=2.0**16 if dynamic else 1.0)
    assert policy.loss_scale == scale
    assert (scale.growth_factor, scale.backoff_factor, scale.growth_interval) == (2.0, 0.5, 2000)
    assert (scale.min_scale, scale.max_scale, scale.hysteresis) == (None, 2.0**24, 1)


def test_levels_are_six_and_o1_is_the_default() -> None:
    assert LEVELS == ('O0', 'O1', 'O2', 'O3', 'O4', 'O5') == tuple(TABLE)
    assert resolve() == resolve('O1')


# -- overrides: every cell ----------------------------------------------------------------------------------------

NO_CAST = [False, 'float32', 'fp32', 'torch.float32', F32]
HALVES = ['float16', 'half', F16, 'bfloat16', 'bf16', BF16]


@pytest.mark.parametrize('value', NO_CAST, ids=str)
@pytest.mark.parametrize('level', LEVELS)
def test_cast_model_type_without_a_cast_is_legal_everywhere(level: str, value: Any) -> None:
    policy = resolve(level, cast_model_type=value)
    assert not policy.casts_model
    expected = None if value is False or level in PER_OP_LEVELS else F32
    assert policy.cast_model_type is expected
    assert policy.patch_torch_functions == (level in PER_OP_LEVELS)


@pytest.mark.parametrize('value', HALVES, ids=str)
@pytest.mark.parametrize('level', CAST_LEVELS)
def test_cast_model_type_16_bit_is_legal_where_the_model_is_cast(level: str, value: Any) -> None:
    policy = resolve(level, cast_model_type=value)
    assert policy.cast_model_type is parse_dtype(value) and policy.casts_model
    assert policy.opt_level == level


LEGAL = [
    (level, {'keep_batchnorm_fp32': value}, 'keep_batchnorm_fp32', value in (True, 'True'))
    for level in CAST_LEVELS
    for value in (True, False, 'True', 'False')
]
LEGAL += [(lv, {'master_weights': value}, 'master_weights', value) for lv in CAST_LEVELS for value in (True, False)]
LEGAL += [(lv, {'master_weights': 'split'}, 'split_masters', True) for lv in ('O2', 'O3', 'O5')]
LEGAL += [(lv, {'patch_torch_functions': v}, 'patch_torch_functions', v) for lv in PER_OP_LEVELS for v in (True, False)]
LEGAL += [(lv, {'patch_torch_functions': False}, 'patch_torch_functions', False) for lv in CAST_LEVELS]


@pytest.mark.parametrize(('level', 'override', 'field', 'expected'), LEGAL, ids=str)
def test_legal_override(level: str, override: dict[str, Any], field: str, expected: Any) -> None:
    policy = resolve(level, **override)
    assert getattr(policy, field) is expected
    rest = dict(zip(('cast', 'patch', 'auto', 'keep_batchnorm_fp32', 'master_weights', 'dynamic'), row(policy)))
    usual = dict(zip(rest, TABLE[level]))
    if field == 'split_masters':
        assert policy.master_weights is True
        rest.pop('master_weights'), usual.pop('master_weights')
        assert rest == usual
    elif field != 'patch_torch_functions':
        rest.pop(field), usual.pop(field)
        assert rest == usual


ILLEGAL = [
    (level, name, value)
    for level in PER_OP_LEVELS
    for name, values in (
        ('cast_model_type', HALVES),
        ('keep_batchnorm_fp32', [True, False, 'True', 'False']),
        ('master_weights', [True, False, 'split']),
    )
    for value in values
]
ILLEGAL += [(level, 'patch_torch_functions', True) for level in CAST_LEVELS]


@pytest.mark.parametrize(('level', 'name', 'value'), ILLEGAL, ids=str)
def test_illegal_override_names_property_value_level_and_remedy(level: str, name: str, value: Any) -> None:
    text = only_problem(level, **{name: value})
    assert f'{name}={value!r}' in text and f'opt_level={level!r}' in text
    remedy = {'O1': "opt_level='O2'", 'O4': "opt_level='O5'"}.get(level, "opt_level='O1'")
    assert 'write' in text and remedy in text and 'leave it out' in text


@pytest.mark.parametrize(
    ('name', 'value'),
    [
        ('cast_model_type', True),
        ('cast_model_type', 'float64'),
        ('cast_model_type', torch.int8),
        ('cast_model_type', 'fp15'),
        ('cast_model_type', 16),
        ('keep_batchnorm_fp32', 'true'),
        ('keep_batchnorm_fp32', 'None'),
        ('keep_batchnorm_fp32', 1),
        ('keep_batchnorm_fp32', 0),
        ('master_weights', 'True'),
        ('master_weights', 'Split'),
        ('master_weights', 1),
        ('patch_torch_functions', 'False'),
        ('patch_torch_functions', 0),
        ('cast_model_outputs', 'int8'),
        ('cast_model_outputs', torch.int64),
        ('cast_model_outputs', True),
        ('num_losses', 0),
        ('num_losses', -1),
        ('num_losses', 1.0),
        ('num_losses', True),
        ('num_losses', '2'),
        ('verbosity', 3),
        ('verbosity', True),
        ('verbosity', 'loud'),
        ('max_consecutive_skips', 0),
        ('max_consecutive_skips', 2.5),
        ('max_consecutive_skips', True),
        ('enabled', 1),
        ('enabled', None),
        ('enabled', 'False'),
        ('skip_nonfinite', 'yes'),
        ('skip_nonfinite', 1),
        ('keep_fp32', 3),
        ('keep_fp32', ['']),
        ('keep_fp32', [None]),
        ('keep_fp32', {'head': True}),
        ('keep_fp32', nn.Linear(1, 1)),
        ('dtype', 'int8'),
        ('dtype', 16),
        ('dtype', torch.complex64),
    ],
    ids=str,
)
def test_value_that_means_nothing_at_any_level(name: str, value: Any) -> None:
    for level in ('O2', 'O3'):
        assert f'{name}={value!r}' in only_problem(level, **{name: value})


@pytest.mark.parametrize(
    ('level', 'override', 'words'),
    [
        ('O0', {}, "opt_level='O0', where no weight is 16-bit"),
        ('O2', {'cast_model_type': False}, "opt_level='O2' and cast_model_type=False, where no weight is 16-bit"),
        ('O5', {'num_losses': 2}, 'num_losses=2: several losses'),
        ('O2', {'num_losses': 2, 'accumulate_in_fp32': True}, 'num_losses=2: several losses'),
    ],
    ids=str,
)
def test_split_masters_need_16_bit_weights_and_one_loss(level: str, override: dict[str, Any], words: str) -> None:
    text = only_problem(level, master_weights='split', **override)
    assert f"master_weights='split' conflicts with {words}" in text and 'Write ' in text


def test_all_conflicts_come_in_one_error() -> None:
    found = problems(
        'O1',
        cast_model_type='float16',
        keep_batchnorm_fp32='maybe',
        master_weights=True,
        loss_scale=-1,
        num_losses=0,
        min_loss_scale=8.0,
        max_loss_scale=4.0,
        verbosity=9,
    )
    words = (
        'cast_model_type',
        'keep_batchnorm_fp32',
        'master_weights',
        'loss_scale=-1',
        'num_losses',
        'min_loss_scale',
    )
    for word in (*words, 'verbosity'):
        assert sum(word in problem for problem in found) == 1, word
    assert len(found) == 7
    text = str(AmpConfigError(found))
    assert text.startswith('7 conflicts') and '\n  7. ' in text


def test_error_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(AmpConfigError(['a is wrong.', 'b too.'])))
    assert error.problems == ('a is wrong.', 'b too.') and str(error).startswith('2 conflicts')


# -- levels -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('value', 'hint'),
    [
        ('o2', "'O2'"),
        ('O4 ', "'O4'"),
        (' O4', "'O4'"),
        ('01', "'O1' with the letter O"),
        ('05', "'O5' with the letter O"),
        (1, "'O1'"),
        ('1', "'O1'"),
        ('O6', ''),
        ('O', ''),
        ('', ''),
        (True, ''),
        (None, ''),
        (['O1'], ''),
        (1.0, ''),
    ],
)
def test_wrong_level(value: Any, hint: str) -> None:
    text = only_problem(value)
    assert f'opt_level={value!r}' in text
    if hint:
        assert f'Write {hint}' in text
    else:
        assert 'Write' not in text
    for level in LEVELS:
        assert f'{level}: ' in text


def test_wrong_level_does_not_hide_conflicts_of_the_one_that_was_meant() -> None:
    found = problems('o1', master_weights=True)
    assert len(found) == 2 and "opt_level='o1'" in found[0] and 'master_weights=True' in found[1]


# -- dtypes -------------------------------------------------------------------------------------------------------

DTYPE_WORDS = {
    F16: ['float16', 'fp16', 'half', 'torch.float16', 'torch.half', 'FP16', ' float16 ', F16],
    BF16: ['bfloat16', 'bf16', 'torch.bfloat16', 'BF16', BF16],
    F32: ['float32', 'fp32', 'float', 'single', 'torch.float32', 'torch.float', F32],
    torch.float64: ['float64', 'fp64', 'double', 'torch.double', torch.float64],
}


@pytest.mark.parametrize(('dtype', 'word'), [(d, w) for d, words in DTYPE_WORDS.items() for w in words], ids=str)
def test_parse_dtype(dtype: torch.dtype, word: Any) -> None:
    assert parse_dtype(word) is dtype
    assert parse_dtype(dtype_name(dtype)) is dtype


@pytest.mark.parametrize('name', ['dtype', 'cast_model_type', 'cast_model_outputs'])
def test_an_error_about_a_type_lists_its_spellings(name: str) -> None:
    text = only_problem('O2', **{name: 'fp15'})
    for dtype in (F16, BF16, F32):
        first, *others = (
            word for word in DTYPE_WORDS[dtype] if isinstance(word, str) and word.islower() and word.isalnum()
        )
        assert f"'{first}' ({', '.join(map(repr, others))})" in text
        for word in (first, *others):
            assert resolve('O2' if dtype is F16 else 'O5', cast_model_type=word).cast_model_type is dtype


@pytest.mark.parametrize('value', ['', 'float15', 'torch.', None, True, 16, 'int8'])
def test_parse_dtype_of_something_else(value: Any) -> None:
    assert parse_dtype(value) is None


@pytest.mark.parametrize('word', DTYPE_WORDS[BF16], ids=str)
@pytest.mark.parametrize(('level', 'becomes'), [('O1', 'O4'), ('O2', 'O5'), ('O4', 'O4'), ('O5', 'O5')])
def test_bfloat16_turns_levels(level: str, becomes: str, word: Any) -> None:
    assert resolve(level, dtype=word) == resolve(becomes)


def test_bfloat16_turns_o3_into_pure_bfloat16() -> None:
    policy = resolve('O3', dtype='bfloat16')
    assert policy == dataclasses.replace(resolve('O3'), cast_model_type=BF16)


@pytest.mark.parametrize('level', ['O1', 'O2', 'O3'])
def test_float16_is_what_the_float16_levels_are(level: str) -> None:
    assert resolve(level, dtype='float16') == resolve(level)


@pytest.mark.parametrize('word', ['float32', 'float64', F32, torch.float64], ids=str)
@pytest.mark.parametrize('level', PER_OP_LEVELS)
def test_wide_dtype_is_no_autocast(level: str, word: Any) -> None:
    policy = resolve(level, dtype=word)
    assert policy == dataclasses.replace(resolve(level), autocast_dtype=None)


@pytest.mark.parametrize(
    ('level', 'dtype', 'remedy'),
    [
        ('O0', 'bfloat16', "'O4'"),
        ('O0', 'float16', "'O1'"),
        ('O4', 'float16', "'O1'"),
        ('O5', 'float16', "'O2'"),
        ('O2', 'float32', "'O0'"),
        ('O3', 'float32', "'O0'"),
        ('O5', 'float64', "'O0'"),
    ],
)
def test_dtype_that_contradicts_the_level(level: str, dtype: str, remedy: str) -> None:
    text = only_problem(level, dtype=dtype)
    assert f'dtype={dtype!r}' in text and f'opt_level={level!r}' in text and remedy in text


def test_dtype_against_cast_model_type() -> None:
    text = only_problem('O2', dtype='bfloat16', cast_model_type='float16')
    assert "cast_model_type='float16'" in text and "dtype='bfloat16'" in text
    assert resolve('O2', dtype='bfloat16', cast_model_type='bf16') == resolve('O5')


# -- loss scale ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('level', LEVELS)
@pytest.mark.parametrize(
    ('value', 'expected'),
    [
        ('dynamic', LossScaleConfig()),
        (128, LossScaleConfig(dynamic=False, init_scale=128.0)),
        (0.5, LossScaleConfig(dynamic=False, init_scale=0.5)),
        ('128.0', LossScaleConfig(dynamic=False, init_scale=128.0)),
        ('1e3', LossScaleConfig(dynamic=False, init_scale=1000.0)),
        ({}, LossScaleConfig()),
        ({'init_scale': 512}, LossScaleConfig(init_scale=512.0)),
        ({'enabled': False}, LossScaleConfig(enabled=False)),
        (
            {
                'init_scale': 64.0,
                'growth_factor': 3,
                'backoff_factor': 0.25,
                'growth_interval': 7,
                'min_scale': 2.0,
                'max_scale': 256.0,
                'hysteresis': 3,
                'enabled': True,
            },
            LossScaleConfig(True, 64.0, 3.0, 0.25, 7, 2.0, 256.0, 3, True),
        ),
        ({'max_scale': None}, LossScaleConfig(max_scale=None)),
    ],
    ids=str,
)
def test_loss_scale(level: str, value: Any, expected: LossScaleConfig) -> None:
    before = copy.deepcopy(value)
    policy = resolve(level, loss_scale=value)
    assert policy.loss_scale == expected
    assert value == before
    assert row(policy)[:5] == TABLE[level][:5]


@pytest.mark.parametrize(
    ('value', 'words'),
    [
        (0, ('loss_scale=0', 'positive finite')),
        (-1, ('loss_scale=-1', 'positive finite')),
        (math.nan, ('loss_scale=nan', 'positive finite')),
        (math.inf, ('loss_scale=inf', 'positive finite')),
        (1e39, ('positive finite', 'float32')),
        (1e-60, ('positive finite', 'float32')),
        ('0', ('positive finite',)),
        ('-2', ('positive finite',)),
        ('nan', ('positive finite',)),
        ('inf', ('positive finite',)),
        (True, ('loss_scale=True', "'dynamic'")),
        ('dynamc', ("loss_scale='dynamc'", "did you mean 'dynamic'?")),
        ('', ("loss_scale=''", "'dynamic'")),
        ([], ('loss_scale=[]', "'dynamic'")),
        ({'int_scale': 1.0}, ("'int_scale'", "did you mean 'init_scale'?", 'backoff_factor')),
        ({3: 1.0}, ('unknown key 3',)),
        ({'init_scale': 0}, ("loss_scale['init_scale']=0",)),
        ({'init_scale': math.nan}, ("loss_scale['init_scale']=nan",)),
        ({'init_scale': None}, ("loss_scale['init_scale']=None",)),
        ({'growth_factor': 1.0}, ("loss_scale['growth_factor']=1.0", 'above 1')),
        ({'growth_factor': math.inf}, ('growth_factor',)),
        ({'growth_factor': math.nan}, ('growth_factor',)),
        ({'backoff_factor': 1.0}, ("loss_scale['backoff_factor']=1.0",)),
        ({'backoff_factor': 0}, ('backoff_factor',)),
        ({'growth_interval': 0}, ("loss_scale['growth_interval']=0",)),
        ({'growth_interval': 2.5}, ('growth_interval',)),
        ({'growth_interval': True}, ('growth_interval',)),
        ({'growth_interval': 2**31}, ('growth_interval',)),
        ({'hysteresis': 0}, ("loss_scale['hysteresis']=0",)),
        ({'min_scale': -1.0}, ("loss_scale['min_scale']=-1.0",)),
        ({'min_scale': 8.0, 'max_scale': 4.0}, ('8', '4', 'above')),
        ({'enabled': 1}, ("loss_scale['enabled']=1",)),
    ],
    ids=str,
)
@pytest.mark.parametrize('level', ['O0', 'O1', 'O5'])
def test_bad_loss_scale(level: str, value: Any, words: tuple[str, ...]) -> None:
    text = only_problem(level, loss_scale=value)
    for word in words:
        assert word in text


@pytest.mark.parametrize(
    'override',
    [
        {'min_loss_scale': 0.0},
        {'min_loss_scale': math.nan},
        {'max_loss_scale': math.inf},
        {'max_loss_scale': True},
        {'min_loss_scale': 2.0, 'max_loss_scale': 1.0},
        {'min_loss_scale': 2.0**25},
        {'loss_scale': {'min_scale': 2.0}, 'min_loss_scale': 4.0},
        {'loss_scale': {'max_scale': 2.0}, 'max_loss_scale': 4.0},
    ],
    ids=str,
)
def test_bad_bounds(override: dict[str, Any]) -> None:
    text = only_problem('O2', **override)
    assert 'loss_scale' in text


@pytest.mark.parametrize(
    ('override', 'first'),
    [
        ({'max_loss_scale': 1024.0}, 1024.0),
        ({'min_loss_scale': 2.0**20}, 2.0**20),
        ({'loss_scale': {'init_scale': 2.0**30}}, 2.0**24),
        ({'loss_scale': {'init_scale': 2.0**30}, 'max_loss_scale': None}, 2.0**30),
        ({'loss_scale': {'init_scale': 1.0, 'min_scale': 4.0}}, 4.0),
        ({'loss_scale': {'init_scale': 64.0, 'min_scale': 4.0, 'max_scale': 128.0}}, 64.0),
        # a static scale ignores both bounds
        ({'loss_scale': 2.0**30}, 2.0**30),
        ({'loss_scale': 1.0, 'min_loss_scale': 8.0}, 1.0),
    ],
    ids=str,
)
def test_first_scale_is_clamped(override: dict[str, Any], first: float) -> None:
    assert resolve('O2', **override).loss_scale.init_scale == first


# -- the record ---------------------------------------------------------------------------------------------------

NON_DEFAULT = {
    'opt_level': 'O2',
    'cast_model_type': 'bfloat16',
    'keep_batchnorm_fp32': False,
    'master_weights': False,
    'loss_scale': {'init_scale': 64.0, 'growth_interval': 7, 'hysteresis': 3, 'min_scale': 2.0, 'max_scale': 256.0},
    'cast_model_outputs': 'float16',
    'keep_fp32': ['head.*', nn.LayerNorm],
    'keep_inputs': ['timestep'],
    'num_losses': 3,
    'verbosity': 2,
    'skip_nonfinite': False,
    'max_consecutive_skips': 5,
}


@pytest.mark.parametrize('override', [{}, {'master_weights': 'split', 'num_losses': 1}], ids=['whole', 'split'])
def test_to_dict_is_plain_and_whole(override: dict[str, Any]) -> None:
    policy = resolve(**{**NON_DEFAULT, **override})
    plain = policy.to_dict()
    assert set(plain) == {field.name for field in dataclasses.fields(Policy)}
    assert plain['keep_fp32'] == ['head.*', 'LayerNorm'] and plain['cast_model_type'] == 'bfloat16'
    assert plain['split_masters'] is policy.split_masters is bool(override)
    assert plain['loss_scale'] == dataclasses.asdict(policy.loss_scale)
    buffer = io.BytesIO()
    torch.save(plain, buffer)
    buffer.seek(0)
    assert torch.load(buffer, weights_only=True) == plain


def test_record_is_frozen() -> None:
    policy = resolve('O2')
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.opt_level = 'O3'  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.loss_scale.init_scale = 2.0  # type: ignore[misc]
    assert resolve('O2') == policy


def test_callers_objects_are_not_changed() -> None:
    given = copy.deepcopy(NON_DEFAULT)
    policy = resolve(**given)
    assert given == NON_DEFAULT
    given['keep_fp32'].append('body')
    assert policy.keep_fp32 == ('head.*', nn.LayerNorm)


@pytest.mark.parametrize('value', ['head', nn.LayerNorm, ('head', nn.LayerNorm), ['head']], ids=str)
def test_keep_fp32_forms(value: Any) -> None:
    assert resolve('O2', keep_fp32=value).keep_fp32 == (tuple(value) if isinstance(value, (list, tuple)) else (value,))


def test_disabled_is_still_checked_and_casts_nothing() -> None:
    assert 'num_losses' in only_problem('O2', enabled=False, num_losses=0)
    policy = resolve('O2', enabled=False)
    assert not policy.enabled and not policy.casts_model
    assert 'does nothing' in policy.describe()


@pytest.mark.parametrize(
    ('level', 'overrides', 'words'),
    [
        ('O0', {}, ('O0', 'float32 weights', 'loss scale 1')),
        ('O1', {}, ('O1', 'autocast to float16', 'dynamic loss scale from 65536')),
        ('O2', {}, ('O2', 'float16 weights', 'FP32 BatchNorm', 'FP32 masters')),
        ('O2', {'master_weights': 'split'}, ('split FP32 masters',)),
        ('O3', {}, ('O3', 'no masters')),
        ('O4', {'num_losses': 3}, ('O4', 'FP32 weights', 'autocast to bfloat16', '3 losses')),
        ('O2', {'loss_scale': {'enabled': False}}, ('no loss scale',)),
    ],
)
def test_describe(level: str, overrides: dict[str, Any], words: tuple[str, ...]) -> None:
    text = resolve(level, **overrides).describe()
    assert '\n' not in text
    for word in words:
        assert word in text


@pytest.mark.parametrize(('value', 'expected'), [(1, True), (0.5, True), (True, False), ('1', False), (1j, False)])
def test_is_number(value: Any, expected: bool) -> None:
    assert is_number(value) is expected


def test_nearest() -> None:
    assert nearest('int_scale', ['init_scale', 'enabled']) == " (did you mean 'init_scale'?)"
    assert nearest('zzz', ['init_scale']) == ''
