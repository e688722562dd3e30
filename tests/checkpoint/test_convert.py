"""Converting files: ours to stock ones and back, those of apex, weights alone; and what is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import make_foreign
import pytest
import torch
import toy
from bits import differences, same
from foreign_files import KINDS, STOCK_KEYS, losses_file, read, resume, unchanged, weights_of

from amp_wrapper import AmpUsageError
from amp_wrapper.checkpoint import convert
from amp_wrapper.checkpoint import file as checkpoint_file
from amp_wrapper.errors import AmpCheckpointError

# -- to and fro -------------------------------------------------------------------------------------------------------

#: A converted file has plain dicts in place of others.
same_in_order = functools.partial(same, ordered=True)


def strange(value: Any, path: str = '') -> list[str]:
    """Everything in a file that only this package could have put there."""
    found = []
    if isinstance(value, dict):
        for key, item in value.items():
            if key in ('amp', 'exact_resume', 'hysteresis_tracker', 'consecutive_skips', 'inner_count', 'properties'):
                found.append(f'{path}[{key!r}]')
            found += strange(item, f'{path}[{key!r}]')
    return found


@pytest.mark.parametrize('level', toy.LEVELS)
def test_own_to_stock_and_back(level: str, own: dict[str, Path], tmp_path: Path) -> None:
    file = {**checkpoint_file.load(own[level]), 'exact_resume': {'random': [1]}}
    assert strange(file)
    stock, notes = unchanged(convert.to_stock, file)
    assert strange(stock) == [] and stock.keys() == file.keys() - {'exact_resume'}
    assert stock['optimizer'].keys() == {'state', 'param_groups', 'loss_scaler'}
    assert stock['optimizer']['loss_scaler'].keys() == STOCK_KEYS
    for key in ('meta', 'state_dict', 'message_hub', 'param_schedulers'):
        assert same_in_order(stock[key], file[key]), key
    assert any(level in note for note in notes) and any('exact_resume' in note for note in notes)
    assert any('static' in note for note in notes) == (level not in ('O1', 'O2'))
    assert any('6 steps' in note for note in notes) == (level != 'O0'), notes
    assert convert.identify(stock).kind == 'stock'
    _goes_on_alike(level, own[level], stock, tmp_path)
    again, notes = convert.to_stock(stock)
    assert same_in_order(again, stock) and notes == []


def _goes_on_alike(level: str, path: Path, converted: Any, folder: Path) -> None:
    """Our wrapper at that level, from the file and from what it was turned into: the same start and the same end."""
    checkpoint_file.save(converted, folder / 'converted.pth')
    scale = dict(loss_scale=make_foreign.SCALER) if level in ('O1', 'O2') else {}
    wrapper = dict(type='AmpOptimWrapper', opt_level=level, optimizer=make_foreign.SGD, **scale)
    runs = [resume(folder / str(i), p, dict(wrapper)) for i, p in enumerate((path, folder / 'converted.pth'))]
    for key in ('position', 'weights', 'optimizer'):
        assert differences(runs[0].start[key], runs[1].start[key]) == [], key
    assert differences(dict(runs[0].model.state_dict()), dict(runs[1].model.state_dict())) == []
    ends = [run.optim_wrapper.state_dict() for run in runs]
    assert differences(ends[0]['state'], ends[1]['state']) == []
    for run in (0, 1):
        for key in ('steps', 'skips', 'consecutive_skips'):
            # the counters begin anew
            ends[run]['loss_scaler'].pop(key)
        ends[run]['loss_scaler'].pop('amp', None)
    assert ends[0]['loss_scaler'] == ends[1]['loss_scaler']


def test_several_losses_and_accumulated_gradients_are_told() -> None:
    stock, notes = unchanged(convert.to_stock, losses_file())
    said = '\n'.join(notes)
    for words in (
        'loss 1: 512, loss 2: 1024',
        'unfinished accumulation (5)',
        'hysteresis of loss 2 (2)',
        '9 steps, 1 skipped',
    ):
        assert words in said, words
    assert stock['optimizer']['loss_scaler']['scale'] == 256.0


def test_raw_apex_to_stock() -> None:
    file = read('raw_apex')
    stock, notes = unchanged(lambda f: convert.to_stock(f, epoch=4, iteration=70), file)
    assert (stock['meta'], stock['message_hub']) == (
        {'epoch': 4, 'iter': 70},
        {'log_scalars': {}, 'runtime_info': {}, 'resumed_keys': {}},
    )
    assert stock.keys() == {'meta', 'state_dict', 'message_hub', 'optimizer'}
    assert same_in_order(dict(stock['state_dict']), weights_of(file))
    assert same_in_order({k: v for k, v in stock['optimizer'].items() if k != 'loss_scaler'}, file['optimizer'])
    assert stock['optimizer']['loss_scaler'] == {
        'scale': 4096.0,
        'growth_factor': 2.0,
        'backoff_factor': 0.5,
        'growth_interval': 2000,
        '_growth_tracker': 3,
    }
    assert any('loss 1: 512' in note for note in notes) and any('param_schedulers' in note for note in notes)
    stock, notes = convert.to_stock(read('raw_apex_imagenet'), iteration=6)
    assert stock['meta'] == {'epoch': 2, 'iter': 6} and (stock['arch'], stock['best_prec1']) == ('tiny', 75.0)
    assert set(stock['state_dict']) == set(weights_of(file)) and any('module.' in note for note in notes)
    with_step, _ = convert.to_stock({**file, 'epoch': 1, 'global_step': 33})
    assert with_step['meta'] == {'epoch': 1, 'iter': 33}


def test_a_static_scale_of_apex_is_told_by_its_counter() -> None:
    file = read('raw_apex')
    file['amp'] = {'loss_scaler0': {'loss_scale': 128.0, 'unskipped': 5000}}
    scaler = convert.identify(file).optimizers[''].loss_scalers[0]
    assert scaler['dynamic'] is False and scaler['_growth_tracker'] == 5000
    stock, notes = convert.to_stock(file, 1, 2)
    # GradScaler grows at equality: past the interval it never would
    assert stock['optimizer']['loss_scaler']['_growth_tracker'] == 0
    assert any('5000' in note for note in notes) and any('static' in note for note in notes)


def test_a_second_model_is_told() -> None:
    file = read('stock_sgd')
    file['model'] = file['state_dict']
    assert not any("'model'" in note for note in convert.to_stock(file)[1])
    file['model'] = {**file['model'], 'stem.bias': torch.zeros(4)}
    stock, notes = convert.to_stock(file)
    assert "left out: 'model', which is not the same as 'state_dict'" in notes
    assert same_in_order(stock['state_dict'], read('stock_sgd')['state_dict']) and 'model' not in stock


def test_empty_scaler_and_no_scaler() -> None:
    stock, notes = unchanged(convert.to_stock, read('stock_bf16'))
    assert 'loss_scaler' not in stock['optimizer'] and any('disabled' in note for note in notes)
    stock, notes = unchanged(convert.to_stock, read('plain_sgd'))
    assert same_in_order(stock, read('plain_sgd')) and notes == []


def test_base_group_and_several_optimizers_are_kept() -> None:
    file = read('plain_adamw')
    assert convert.to_stock(file)[0]['optimizer']['base_param_settings'] == file['optimizer']['base_param_settings']
    pair = read('plain_pair')
    stock, _ = unchanged(convert.to_stock, pair)
    assert same_in_order(stock['optimizer'], pair['optimizer'])


# -- weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('word', convert.WEIGHT_TYPES)
@pytest.mark.parametrize('name', KINDS)
def test_weights_of_every_file(name: str, word: str) -> None:
    dtype, file = convert.WEIGHT_TYPES[word], read(name)
    result, _ = unchanged(lambda f: convert.to_weights(f, dtype), file)
    assert list(result) == ['meta', 'state_dict']
    assert result['meta'] == file.get('meta', {})
    expected = weights_of(file)
    assert list(result['state_dict']) == list(expected)
    for key, value in result['state_dict'].items():
        if key == 'bn.num_batches_tracked':
            target = torch.int64
        elif word == 'fp16' and 'running' in key:
            target = torch.float32
        else:
            target = dtype
        assert value.dtype == target, key
        assert torch.equal(value, expected[key].to(target)), key


def test_types_that_are_left_alone_and_values_that_do_not_fit() -> None:
    tied = torch.tensor([1.5, 1e-9, 0.0])
    file = {
        'state_dict': {
            'a': tied,
            'b': tied,
            'large': torch.tensor([1.0, 70000.0]),
            'infinite': torch.tensor([float('inf'), float('nan')]),
            'double': torch.tensor([1e300], dtype=torch.float64),
            'complex': torch.tensor([1j]),
            'flag': torch.tensor([True]),
            'half': torch.tensor([0.5], dtype=torch.float16),
            'brain': torch.tensor([0.5], dtype=torch.bfloat16),
            'empty': torch.zeros(0),
            'x._extra_state': {'any': 'thing'},
        },
        'meta': {'classes': ['a']},
    }
    result, notes = unchanged(lambda f: convert.to_weights(f, torch.float16), file)
    kinds = {key: value.dtype for key, value in result['state_dict'].items() if isinstance(value, torch.Tensor)}
    f16, f32 = torch.float16, torch.float32
    assert kinds == {
        'a': f16, 'b': f16, 'large': f32, 'infinite': f16, 'double': torch.float64, 'complex': torch.complex64,
        'flag': torch.bool, 'half': f16, 'brain': f16, 'empty': f16,
    }  # fmt: skip
    assert result['state_dict']['large'][1] == 70000.0
    assert result['state_dict']['a'] is result['state_dict']['b']
    assert result['state_dict']['x._extra_state'] == {'any': 'thing'}
    assert notes == [
        'too large for float16, kept in float32: large',
        '1 elements were too small for float16 and are 0 now',
    ]
    result, notes = convert.to_weights(file, torch.bfloat16)
    assert result['state_dict']['large'].dtype == torch.bfloat16 and notes == []
    result, notes = convert.to_weights(file, torch.float32)
    assert result['state_dict']['half'].dtype == result['state_dict']['brain'].dtype == f32 and notes == []


def test_average_or_trained() -> None:
    file = read('ema')
    trained = {key[len('module.') :]: v for key, v in file['ema_state_dict'].items() if key.startswith('module.')}
    assert differences(trained['stem.weight'], file['state_dict']['stem.weight'])
    for word, expected in (('average', file['state_dict']), ('trained', trained)):
        result, notes = unchanged(lambda f, w=word: convert.to_weights(f, torch.float32, w), file)
        assert same_in_order(dict(sorted(result['state_dict'].items())), dict(sorted(expected.items()))), word
        assert any('average' in note for note in notes)
    stock, _ = convert.to_stock(file)
    assert same_in_order(stock['state_dict'], file['state_dict']) and same_in_order(
        stock['ema_state_dict'], file['ema_state_dict']
    )
    assert any('EMAHook, which swaps' in note for note in convert.to_stock(file)[1])
    stock, notes = convert.to_stock(file, weights='trained')
    assert not any('EMAHook' in note for note in notes)
    assert 'ema_state_dict' not in stock and same_in_order(stock['state_dict']['stem.weight'], trained['stem.weight'])
    result, notes = convert.to_weights(read('plain_sgd'), torch.float32, 'trained')
    assert same_in_order(result['state_dict'], read('plain_sgd')['state_dict']) and 'no average' in notes[0]


def test_weights_are_saved_from_a_file_whose_optimizer_is_lost() -> None:
    """apex's scale could fall to 0, which nothing resumes from."""
    for lost in (dict(amp={'loss_scaler0': {'loss_scale': 0.0, 'unskipped': 0}}), dict(optimizer={'state': 3})):
        file = {**read('raw_apex'), **lost}
        with pytest.raises(AmpCheckpointError):
            convert.to_stock(file, 1, 1)
        assert same_in_order(convert.to_weights(file, torch.float32)[0]['state_dict'], weights_of(file))
    assert convert.identify({**read('weights'), 'optimizer': None}).kind == 'weights'


# -- refusals ---------------------------------------------------------------------------------------------------------


def with_amp(amp: Any) -> dict[str, Any]:
    return {**read('raw_apex'), 'amp': amp}


@pytest.mark.parametrize(
    ('call', 'words'),
    [
        (lambda: convert.identify([1]), ['dict', 'list']),
        (lambda: convert.identify({}), ["'state_dict'", "'model'"]),
        (lambda: convert.identify({'weights': 3}), ["'state_dict'", 'weights']),
        (lambda: convert.identify({'state_dict': 3}), ["'state_dict'", 'int']),
        (lambda: convert.identify({'state_dict': {'a': 3}}), ["'state_dict'['a']", 'int']),
        (lambda: convert.identify({'model': {}, 'optimizer': []}), ["'optimizer'", 'list']),
        (lambda: convert.identify({'model': {}, 'optimizer': {}}), ["'optimizer'", "'state'"]),
        (lambda: convert.identify(with_amp({})), ["amp['loss_scaler0']"]),
        (lambda: convert.identify(with_amp(3)), ['amp', 'int']),
        (
            lambda: convert.identify(with_amp({'loss_scaler0': {'loss_scale': 0.0, 'unskipped': 1}})),
            ["amp['loss_scaler0']['loss_scale']=0.0"],
        ),
        (lambda: convert.to_stock(read('weights')), ['load_from', 'resume=False']),
        (lambda: convert.to_stock(read('bare_legacy')), ['no optimizer']),
        (lambda: convert.to_stock(read('raw_apex')), ['epochs', '--epoch']),
        (lambda: convert.to_stock(read('raw_apex_imagenet')), ['iterations', '--iter', 'global_step']),
        (lambda: convert.to_stock(read('raw_apex'), 1, -2), ['iter=-2', '--iter']),
        (lambda: convert.to_stock({**read('raw_apex'), 'epoch': 1.5}, None, 2), ['epoch=1.5']),
        (lambda: convert.to_stock({**read('plain_sgd'), 'message_hub': {}}), ["'message_hub'", 'log_scalars']),
        (lambda: convert.to_stock({**read('plain_sgd'), 'meta': 3}), ["'meta'", 'int']),
        (lambda: convert.to_weights({**read('ema'), 'ema_state_dict': 3}, torch.float16), ["'ema_state_dict'", 'int']),
        (
            lambda: convert.to_weights(
                {**read('ema'), 'ema_state_dict': {'module.x': torch.ones(1)}}, torch.float32, 'trained'
            ),
            ["'module.x'", 'no counterpart'],
        ),
        (lambda: convert.to_weights(read('ema'), torch.float64), ['float64']),
        (lambda: convert.to_weights(read('ema'), torch.float32, 'mean'), ["'mean'", "'average'"]),
    ],
)
def test_refusals_name_key_and_remedy(call: Callable[[], Any], words: list[str]) -> None:
    with pytest.raises((AmpCheckpointError, AmpUsageError)) as caught:
        call()
    for word in words:
        assert word in str(caught.value), str(caught.value)
