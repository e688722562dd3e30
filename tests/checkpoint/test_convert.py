"""Files of other kinds: recognised, resumed from, converted; and mmengine without this package goes on from ours."""

from __future__ import annotations

import copy
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import make_foreign
import pytest
import torch
import toy
from mmengine.hooks import Hook
from mmengine.runner import Runner

from amp_wrapper import AmpUsageError, checkpoint
from amp_wrapper.checkpoint import convert
from amp_wrapper.checkpoint import file as checkpoint_file
from amp_wrapper.errors import AmpCheckpointError

ROOT = Path(__file__).resolve().parents[2]
FOREIGN = ROOT / 'tests' / 'data' / 'foreign'
KINDS = {
    'plain_sgd': 'plain',
    'plain_adamw': 'plain',
    'plain_pair': 'plain',
    'ema': 'plain',
    'stock_sgd': 'stock',
    'stock_adamw': 'stock',
    'stock_bf16': 'stock',
    'apex_wrapper': 'apex',
    'raw_apex': 'raw_apex',
    'raw_apex_imagenet': 'raw_apex',
    'weights': 'weights',
    'bare_legacy': 'weights',
}
TRAINING = [name for name, kind in KINDS.items() if kind != 'weights']
RESUMABLE = [name for name in TRAINING if not name.startswith('raw_apex')]
#: What a raw file does not tell.
POSITION = {'raw_apex': dict(epoch=2, iteration=6), 'raw_apex_imagenet': dict(iteration=6)}
ADAMW = {'plain_adamw', 'stock_adamw'}
#: (scale, tracker) of each loss.
SCALES = {
    'stock_sgd': [(2048.0, 2)],
    'stock_adamw': [(2048.0, 2)],
    'apex_wrapper': [(4096.0, 3)],
    'raw_apex': [(4096.0, 3), (512.0, 1017)],
    'raw_apex_imagenet': [(4096.0, 3)],
}
STOCK_KEYS = {'scale', 'growth_factor', 'backoff_factor', 'growth_interval', '_growth_tracker'}
make_foreign.register_pair()


def read(name: str) -> Any:
    return checkpoint_file.load(FOREIGN / f'{name}.pth')


def weights_of(file: Any) -> dict[str, Any]:
    weights = dict(file.get('state_dict', file.get('model', file)))
    return {name.removeprefix('module.'): value for name, value in weights.items()}


def unchanged(call: Callable[[Any], Any], file: Any) -> Any:
    """Call, and see that the argument is what it was, down to bits and keys."""
    before = copy.deepcopy(file)
    result = call(file)
    assert same(file, before)
    return result


def same(left: Any, right: Any) -> bool:
    """Equal by bits; mmengine's HistoryBuffers, which know no equality, by what they hold."""
    if hasattr(left, '_log_history'):
        return type(left) is type(right) and left._log_history.tolist() == right._log_history.tolist()
    if isinstance(left, dict) and isinstance(right, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return toy.differences(left, right) == []


class KeepStart(Hook):
    """What the run has when everything is loaded and nothing is trained."""

    priority = 'LOWEST'

    def before_train(self, runner: Any) -> None:
        wrapper = runner.optim_wrapper
        parts = dict(wrapper.items()) if hasattr(wrapper, 'optim_wrappers') else {'': wrapper}
        runner.start = copy.deepcopy(
            dict(
                position=(runner.epoch, runner.iter),
                weights=runner.model.state_dict(),
                optimizer={name: part.optimizer.state_dict() for name, part in parts.items()},
                scalers={name: [s.state_dict() for s in part.loss_scalers] for name, part in parts.items()},
                base={name: part.base_param_settings for name, part in parts.items()},
            )
        )


def resume(folder: Path, path: Path, wrapper: dict[str, Any], epochs: int = 3, **overrides: Any) -> Runner:
    """Resume a file with mmengine's Runner, and train on."""
    if 'stem' in wrapper:
        overrides.setdefault('model', dict(type='ForeignPair'))
        overrides.setdefault('param_scheduler', None)
    cfg = make_foreign.config(folder, wrapper, epochs=epochs, resume=True, load_from=str(path), **overrides)
    runner = Runner.from_cfg(cfg)
    runner.register_hook(KeepStart())
    runner.train()
    return runner


def wrapper_for(name: str, level: str, **overrides: Any) -> dict[str, Any]:
    """Our wrapper for a fixture, with a scale that moves at every level, so that there is something to keep."""
    optimizer = make_foreign.ADAMW if name in ADAMW else make_foreign.SGD
    one = dict(type='AmpOptimWrapper', opt_level=level, optimizer=optimizer, **{'loss_scale': 'dynamic', **overrides})
    if name == 'plain_adamw':
        one['paramwise_cfg'] = dict(custom_keys=dict(head=dict(lr_mult=0.5)), norm_decay_mult=0.0)
    if name == 'plain_pair':
        return dict(constructor='ForeignPairConstructor', stem=one, head=dict(one))
    return one


# -- recognised and resumed -------------------------------------------------------------------------------------------


def test_there_is_a_file_of_every_kind() -> None:
    assert {path.stem for path in FOREIGN.glob('*.pth')} == set(KINDS)
    assert {convert.identify(read(name)).kind for name in KINDS} == {'plain', 'stock', 'apex', 'raw_apex', 'weights'}
    assert sum(path.stat().st_size for path in FOREIGN.glob('*.pth')) < 200_000
    assert not any(str(ROOT).encode() in path.read_bytes() for path in FOREIGN.glob('*.pth'))


@pytest.mark.parametrize('name', KINDS)
def test_identify(name: str) -> None:
    content = unchanged(convert.identify, read(name))
    assert content.kind == KINDS[name]
    assert bool(content.optimizers) == (content.kind != 'weights')
    for part in content.optimizers.values():
        assert [(s['scale'], s['_growth_tracker']) for s in part.loss_scalers if s] == SCALES.get(name, [])
    assert set(content.optimizers) == (
        {'stem', 'head'} if name == 'plain_pair' else {''} if content.optimizers else set()
    )


@pytest.mark.parametrize('level', ['O0', 'O1', 'O2', 'O5'])
@pytest.mark.parametrize('name', TRAINING)
def test_every_file_resumes_with_our_wrapper(name: str, level: str, tmp_path: Path) -> None:
    file, path = read(name), FOREIGN / f'{name}.pth'
    if name in POSITION:
        # no mmengine reads these; the new file holds the first loss scale
        path = tmp_path / 'whole.pth'
        checkpoint_file.save(convert.to_stock(file, **POSITION[name])[0], path)
    overrides: dict[str, Any] = {}
    if name == 'ema':
        overrides['custom_hooks'] = [dict(type='EMAHook', momentum=0.1)]
    if KINDS[name] in ('apex', 'raw_apex'):
        overrides['param_scheduler'] = None
    several = dict(num_losses=2) if name == 'raw_apex' else {}
    runner = resume(tmp_path / 'run', path, wrapper_for(name, level, **several), **overrides)
    start = runner.start
    assert start['position'] == (2, 6) and runner.iter == 9
    expected = weights_of(file)
    if name == 'ema':
        expected = {key[len('module.') :]: v for key, v in file['ema_state_dict'].items() if key.startswith('module.')}
        average = runner.hooks[[type(h).__name__ for h in runner.hooks].index('EMAHook')].ema_model
        assert int(average.steps) == 9
    assert toy.differences(dict(start['weights']), dict(expected)) == []
    parts = file['optimizer'] if name == 'plain_pair' else {'': file['optimizer']}
    for part, state in parts.items():
        assert toy.differences(start['optimizer'][part]['state'], state['state']) == []
        for mine, theirs in zip(start['optimizer'][part]['param_groups'], state['param_groups'], strict=True):
            assert {key: mine[key] for key in theirs} == theirs
        base = state.get('base_param_settings')
        assert (base is None) == (name != 'plain_adamw') and start['base'][part] == base
        kept = [(s['scale'], s['_growth_tracker']) for s in start['scalers'][part]]
        expected_scales = SCALES.get(name, [(2.0**16, 0)])
        assert kept == (expected_scales if name != 'raw_apex' else [expected_scales[0], (2.0**16, 0)])
    assert all(value.isfinite().all() for value in runner.model.state_dict().values())
    assert toy.differences(runner.model.state_dict()['stem.weight'], expected['stem.weight']) != []


def test_weights_alone_are_loaded(tmp_path: Path) -> None:
    for name in ('weights', 'bare_legacy'):
        cfg = make_foreign.config(tmp_path / name, wrapper_for(name, 'O2'), load_from=str(FOREIGN / f'{name}.pth'))
        runner = Runner.from_cfg(cfg)
        runner.register_hook(KeepStart())
        runner.train()
        assert toy.differences(dict(runner.start['weights']), weights_of(read(name))) == []


@pytest.mark.parametrize('static, kept', [(False, 4096.0), (True, 128.0)])
def test_the_configuration_decides_whether_an_apex_scale_moves(static: bool, kept: float, tmp_path: Path) -> None:
    wrapper = wrapper_for('apex_wrapper', 'O2', **(dict(loss_scale=128.0) if static else {}))
    runner = resume(tmp_path, FOREIGN / 'apex_wrapper.pth', wrapper, param_scheduler=None)
    assert runner.start['scalers'][''][0]['scale'] == kept


def test_the_files_are_what_the_script_makes(tmp_path: Path) -> None:
    """In a process of its own, which ends with an error if it ever imported amp_wrapper."""
    done = subprocess.run(
        [sys.executable, str(ROOT / 'tests' / 'support' / 'make_foreign.py'), str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, 'OMP_NUM_THREADS': '1'},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert {path.stem for path in tmp_path.glob('*.pth')} == set(KINDS)
    for name in KINDS:
        new, old = checkpoint_file.load(tmp_path / f'{name}.pth'), read(name)
        assert list(new) == list(old)
        for key in ('state_dict', 'model', 'optimizer', 'amp', 'ema_state_dict', 'param_schedulers'):
            if key in old:
                _close(new[key], old[key], f'{name}[{key!r}]')
    bare = [checkpoint_file.load(tmp_path / 'bare_legacy.pth'), read('bare_legacy')]
    _close(bare[0], bare[1], 'bare_legacy')


#: Whether this torch writes what the one writes that the files were made with.
_RECENT = tuple(int(number) for number in torch.__version__.split('.')[:2]) >= (2, 13)


def _close(new: Any, old: Any, path: str) -> None:
    """Equal but for the last bits, which are another processor's choice."""
    if isinstance(old, dict):
        # older versions of torch have fewer settings, in another order
        assert list(new) == list(old) if _RECENT else set(new) <= set(old), path
        for key in new:
            _close(new[key], old[key], f'{path}[{key!r}]')
    elif isinstance(old, (list, tuple)):
        assert len(new) == len(old), path
        for index, (a, b) in enumerate(zip(new, old)):
            _close(a, b, f'{path}[{index}]')
    elif isinstance(old, torch.Tensor):
        # another torch rounds otherwise, of which the first steps of AdamW make much
        near = dict(rtol=1e-4, atol=1e-6) if _RECENT else dict(rtol=0.05, atol=0.02)
        if path.endswith(("stem.bias']", "bn.running_mean']")):
            # a bias in front of a BatchNorm has a gradient of rounding noise, whose sign AdamW takes: six steps of 0.01
            near = dict(rtol=0.0, atol=0.12)
        torch.testing.assert_close(new, old, **near, msg=lambda text: f'{path}: {text}')
    else:
        assert new == old, path


# -- mmengine without this package ------------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def own_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Any]]]:
    """A run of our wrapper at each level: its last file, and what it had in memory when that was written."""
    folder = tmp_path_factory.mktemp('own')
    runs = {}
    for level in toy.LEVELS:
        torch.manual_seed(0)
        scale = dict(loss_scale=make_foreign.SCALER) if level in ('O1', 'O2') else {}
        wrapper = dict(type='AmpOptimWrapper', opt_level=level, optimizer=make_foreign.SGD, **scale)
        runner = Runner.from_cfg(make_foreign.config(folder / level, wrapper))
        runner.train()
        masters = [tensor.detach().clone() for tensor in runner.optim_wrapper.master_params()]
        state = copy.deepcopy(runner.optim_wrapper.optimizer.state_dict()['state'])
        scaler = runner.optim_wrapper.loss_scaler.state_dict()
        runs[level] = (folder / level / 'epoch_2.pth', dict(masters=masters, state=state, scaler=scaler))
    return runs


@pytest.fixture(scope='module')
def own(own_runs: dict[str, tuple[Path, dict[str, Any]]]) -> dict[str, Path]:
    """The files of these runs: scale and tracker on their way where they move."""
    return {level: path for level, (path, _) in own_runs.items()}


def run_stock_worker(folder: Path, cases: dict[str, Any]) -> dict[str, Any]:
    """Resume each case in one process that never imports this package."""
    (folder / 'cases.json').write_text(json.dumps(cases))
    # mmengine's own files hold its HistoryBuffer, which torch refuses without this variable
    environment = {**os.environ, 'OMP_NUM_THREADS': '1', 'TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD': '1'}
    done = subprocess.run(
        [sys.executable, str(ROOT / 'tests' / 'support' / 'stock_worker.py'), str(folder)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return torch.load(folder / 'results.pth', weights_only=True)


def test_mmengine_without_this_package_goes_on(
    own: dict[str, Path], own_runs: dict[str, tuple[Path, dict[str, Any]]], tmp_path: Path
) -> None:
    """Our files as they are, and every conversion to stock; with OptimWrapper, and with AmpOptimWrapper."""
    files = {f'{level}_direct': path for level, path in own.items()}
    for name in [*own, *(name for name in TRAINING if name not in (*ADAMW, 'plain_pair', 'ema'))]:
        file = checkpoint_file.load(own[name]) if name in own else read(name)
        files[f'{name}_stock'] = tmp_path / f'{name}_stock.pth'
        checkpoint_file.save(convert.to_stock(file, **POSITION.get(name, {}))[0], files[f'{name}_stock'])
    wrappers = {
        'plain': dict(type='OptimWrapper', optimizer=make_foreign.SGD),
        'amp': dict(type='AmpOptimWrapper', dtype='bfloat16', optimizer=make_foreign.SGD),
    }
    cases = {
        f'{name}_{kind}': dict(file=str(path), optim_wrapper=wrapper)
        for name, path in files.items()
        for kind, wrapper in wrappers.items()
    }
    results = run_stock_worker(tmp_path, cases)
    assert results.keys() == cases.keys() and len(cases) == 2 * (2 * 6 + 6)
    for name, path in files.items():
        file = checkpoint_file.load(path)
        for kind in wrappers:
            _check_stock_run(results[f'{name}_{kind}'], file, kind, f'{name}_{kind}')
    for level, (_, memory) in own_runs.items():
        for how in ('direct', 'stock'):
            for kind in wrappers:
                start = results[f'{level}_{how}_{kind}']['start']
                names = [name for name in start['weights'] if 'running' not in name and 'num_batches' not in name]
                assert len(memory['masters']) == len(memory['state']) == len(names) == 6
                # at O3 weights and optimizer state are 16-bit, which FP32 holds
                for name, master in zip(names, memory['masters']):
                    assert toy.differences(start['weights'][name], master.float()) == [], (level, how, kind, name)
                for index, entry in memory['state'].items():
                    momentum = start['optimizer']['']['state'][index]['momentum_buffer']
                    assert toy.differences(momentum, entry['momentum_buffer'].float()) == [], (level, how, kind, index)
                if kind == 'amp':
                    assert start['scaler'][''] == {key: memory['scaler'][key] for key in STOCK_KEYS}
    # what the scales were: a file without one starts as stock does
    scales = {name: results[f'{name}_amp']['start']['scaler'][''] for name in files}
    assert {name: (s['scale'], s['_growth_tracker']) for name, s in scales.items()} == {
        **{f'{level}_{how}': (1.0, 0) for level in ('O0', 'O3', 'O4', 'O5') for how in ('direct', 'stock')},
        **{f'{level}_{how}': (2048.0, 2) for level in ('O1', 'O2') for how in ('direct', 'stock')},
        'plain_sgd_stock': (2.0**16, 0),
        'stock_sgd_stock': (2048.0, 2),
        'stock_bf16_stock': (2.0**16, 0),
        'apex_wrapper_stock': (4096.0, 3),
        'raw_apex_stock': (4096.0, 3),
        'raw_apex_imagenet_stock': (4096.0, 3),
    }


def _check_stock_run(result: dict[str, Any], file: Any, kind: str, name: str) -> None:
    start, end = result['start'], result['end']
    words = {'plain': 'optimizer_wrapper.OptimWrapper', 'amp': 'amp_optimizer_wrapper.AmpOptimWrapper'}
    assert result['wrapper'] == f'mmengine.optim.optimizer.{words[kind]}', name
    assert (start['epoch'], start['iter'], end['iter']) == (2, 6, 12), name
    assert toy.differences(dict(start['weights']), dict(file['state_dict'])) == [], name
    # at O3 the optimizer's state is 16-bit; torch casts it to the type of the weights, which loses nothing
    for index, entry in file['optimizer']['state'].items():
        theirs = {key: value.float() for key, value in entry.items()}
        assert theirs and toy.differences(start['optimizer']['']['state'][index], theirs) == [], name
    assert start['optimizer']['']['param_groups'] == file['optimizer']['param_groups'], name
    assert (start['scaler'] == {}) == (kind == 'plain')
    if kind == 'amp' and 'loss_scaler' in file['optimizer']:
        saved, there = file['optimizer']['loss_scaler'], start['scaler']['']
        assert there == {key: saved[key] for key in there}, name
        assert there.keys() == STOCK_KEYS
    changed = toy.differences(dict(start['weights']), dict(end['weights']))
    assert len(changed) == 9, name
    assert all(value.isfinite().all() for value in end['weights'].values()), name


def test_mmengine_goes_on_with_ema_groups_and_several_optimizers(tmp_path: Path) -> None:
    """What mmengine keeps beside one plain optimizer: averages, base_param_settings, OptimWrapperDict."""
    ema = dict(type='EMAHook', momentum=0.1)
    scale = dict(loss_scale=make_foreign.SCALER)
    trained = {
        'groups': (wrapper_for('plain_adamw', 'O2', **scale), dict(custom_hooks=[ema])),
        'pair': (
            wrapper_for('plain_pair', 'O2', **scale),
            dict(model=dict(type='ForeignPair'), param_scheduler=None),
        ),
    }
    files, cases = {}, {}
    for name, (wrapper, overrides) in trained.items():
        torch.manual_seed(0)
        Runner.from_cfg(make_foreign.config(tmp_path / name, copy.deepcopy(wrapper), **overrides)).train()
        stock = copy.deepcopy(wrapper)
        for part in (stock, stock.get('stem'), stock.get('head')):
            if part and 'opt_level' in part:
                part.update(dtype='bfloat16', loss_scale='dynamic')
                del part['opt_level']
        direct, converted = tmp_path / name / 'epoch_2.pth', tmp_path / f'{name}_stock.pth'
        checkpoint_file.save(convert.to_stock(checkpoint_file.load(direct))[0], converted)
        overrides = {key: value for key, value in overrides.items() if key != 'custom_hooks'}
        for how, path in (('direct', direct), ('stock', converted)):
            files[f'{name}_{how}'] = direct
            cases[f'{name}_{how}'] = dict(
                file=str(path), optim_wrapper=stock, overrides=overrides, hooks=[ema] if name == 'groups' else []
            )
    results = run_stock_worker(tmp_path, cases)
    for name, direct in files.items():
        file, start, end = checkpoint_file.load(direct), results[name]['start'], results[name]['end']
        assert results[name]['wrapper'] == 'mmengine.optim.optimizer.amp_optimizer_wrapper.AmpOptimWrapper'
        assert (start['iter'], end['iter']) == (6, 12)
        weights = dict(file['state_dict'])
        if 'groups' in name:
            theirs = {
                key[len('module.') :]: v for key, v in file['ema_state_dict'].items() if key.startswith('module.')
            }
            average = {f'module.{key}': value for key, value in weights.items()}
            assert toy.differences(dict(start['average']), {**average, 'steps': file['ema_state_dict']['steps']}) == []
            assert toy.differences(weights, theirs)
            weights = theirs
        assert toy.differences(dict(start['weights']), weights) == [], name
        parts = file['optimizer'] if 'pair' in name else {'': file['optimizer']}
        for part, state in parts.items():
            assert state['state'] and toy.differences(start['optimizer'][part]['state'], state['state']) == [], name
            assert start['optimizer'][part]['param_groups'] == state['param_groups']
            assert start['scaler'][part] == {key: state['loss_scaler'][key] for key in STOCK_KEYS}
            assert start['scaler'][part]['scale'] != 2.0**16
            assert start['base'][part] == state.get('base_param_settings')
            assert (start['base'][part] is None) == ('pair' in name)


# -- to and fro -------------------------------------------------------------------------------------------------------


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
        assert same(stock[key], file[key]), key
    assert any(level in note for note in notes) and any('exact_resume' in note for note in notes)
    assert any('static' in note for note in notes) == (level not in ('O1', 'O2'))
    assert any('6 steps' in note for note in notes) == (level != 'O0'), notes
    assert convert.identify(stock).kind == 'stock'
    _goes_on_alike(level, own[level], stock, tmp_path)
    again, notes = convert.to_stock(stock)
    assert same(again, stock) and notes == []


def _goes_on_alike(level: str, path: Path, converted: Any, folder: Path) -> None:
    """Our wrapper at that level, from the file and from what it was turned into: the same start and the same end."""
    checkpoint_file.save(converted, folder / 'converted.pth')
    scale = dict(loss_scale=make_foreign.SCALER) if level in ('O1', 'O2') else {}
    wrapper = dict(type='AmpOptimWrapper', opt_level=level, optimizer=make_foreign.SGD, **scale)
    runs = [resume(folder / str(i), p, dict(wrapper)) for i, p in enumerate((path, folder / 'converted.pth'))]
    for key in ('position', 'weights', 'optimizer'):
        assert toy.differences(runs[0].start[key], runs[1].start[key]) == [], key
    assert toy.differences(dict(runs[0].model.state_dict()), dict(runs[1].model.state_dict())) == []
    ends = [run.optim_wrapper.state_dict() for run in runs]
    assert toy.differences(ends[0]['state'], ends[1]['state']) == []
    for run in (0, 1):
        for key in ('steps', 'skips', 'consecutive_skips'):
            # the counters begin anew
            ends[run]['loss_scaler'].pop(key)
        ends[run]['loss_scaler'].pop('amp', None)
    assert ends[0]['loss_scaler'] == ends[1]['loss_scaler']


def losses_file(count: int = 3, window: bool = True) -> dict[str, Any]:
    """Ours at O2 with several losses, an open window and hysteresis, as AmpEngine writes it."""
    file = read('stock_sgd')
    state = dict(file['optimizer'])
    scaler = state.pop('loss_scaler')
    rest = dict(growth_interval=2000, hysteresis_tracker=2, dynamic=True, steps=9)
    scalers = [{**scaler, **rest, 'scale': 2.0**i * 256, '_growth_tracker': i, 'skips': i} for i in range(count)]
    gradients = [torch.ones(2), None, *[torch.ones(2)] * 4]
    opened = checkpoint.Window(gradients, True, [True] * count, [0.0] * count) if window else None
    own = checkpoint.write(state, {'opt_level': 'O2', 'num_losses': count}, scalers, opened, False)
    return {**file, 'optimizer': own}


def test_several_losses_and_a_window_are_told() -> None:
    stock, notes = unchanged(convert.to_stock, losses_file())
    said = '\n'.join(notes)
    for words in (
        'loss 1: 512, loss 2: 1024',
        'open accumulation window (5)',
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
    assert same(dict(stock['state_dict']), weights_of(file))
    assert same({k: v for k, v in stock['optimizer'].items() if k != 'loss_scaler'}, file['optimizer'])
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
    assert same(stock['state_dict'], read('stock_sgd')['state_dict']) and 'model' not in stock


def test_empty_scaler_and_no_scaler() -> None:
    stock, notes = unchanged(convert.to_stock, read('stock_bf16'))
    assert 'loss_scaler' not in stock['optimizer'] and any('disabled' in note for note in notes)
    stock, notes = unchanged(convert.to_stock, read('plain_sgd'))
    assert same(stock, read('plain_sgd')) and notes == []


def test_base_group_and_several_optimizers_are_kept() -> None:
    file = read('plain_adamw')
    assert convert.to_stock(file)[0]['optimizer']['base_param_settings'] == file['optimizer']['base_param_settings']
    pair = read('plain_pair')
    stock, _ = unchanged(convert.to_stock, pair)
    assert same(stock['optimizer'], pair['optimizer'])


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
    assert toy.differences(trained['stem.weight'], file['state_dict']['stem.weight'])
    for word, expected in (('average', file['state_dict']), ('trained', trained)):
        result, notes = unchanged(lambda f, w=word: convert.to_weights(f, torch.float32, w), file)
        assert same(dict(sorted(result['state_dict'].items())), dict(sorted(expected.items()))), word
        assert any('average' in note for note in notes)
    stock, _ = convert.to_stock(file)
    assert same(stock['state_dict'], file['state_dict']) and same(stock['ema_state_dict'], file['ema_state_dict'])
    assert any('EMAHook, which swaps' in note for note in convert.to_stock(file)[1])
    stock, notes = convert.to_stock(file, weights='trained')
    assert not any('EMAHook' in note for note in notes)
    assert 'ema_state_dict' not in stock and same(stock['state_dict']['stem.weight'], trained['stem.weight'])
    result, notes = convert.to_weights(read('plain_sgd'), torch.float32, 'trained')
    assert same(result['state_dict'], read('plain_sgd')['state_dict']) and 'no average' in notes[0]


def test_weights_are_saved_from_a_file_whose_optimizer_is_lost() -> None:
    """apex's scale could fall to 0, which nothing resumes from."""
    for lost in (dict(amp={'loss_scaler0': {'loss_scale': 0.0, 'unskipped': 0}}), dict(optimizer={'state': 3})):
        file = {**read('raw_apex'), **lost}
        with pytest.raises(AmpCheckpointError):
            convert.to_stock(file, 1, 1)
        assert same(convert.to_weights(file, torch.float32)[0]['state_dict'], weights_of(file))
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


# -- the tool ---------------------------------------------------------------------------------------------------------


def load_tool() -> Any:
    spec = importlib.util.spec_from_file_location('convert_checkpoint', ROOT / 'tools' / 'convert_checkpoint.py')
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TOOL = load_tool()


def inspected(capsys: pytest.CaptureFixture[str], path: Path) -> dict[str, str]:
    TOOL.main([str(path), '--inspect'])
    lines = capsys.readouterr().out.splitlines()
    return dict(re.split(r'  +', line, maxsplit=1) for line in lines)


@pytest.mark.parametrize('name', KINDS)
def test_inspect(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / f'{name}.pth'
    shutil.copy(FOREIGN / path.name, path)
    rows = inspected(capsys, path)
    assert list(tmp_path.iterdir()) == [path]
    assert rows['kind'].startswith(f'{KINDS[name]} (')
    assert rows['model'] == 'tensors: 8 of float32 (42 elements, 168 bytes), 1 of int64 (1 element, 8 bytes)'
    assert rows['non-finite'] == 'none' and rows['random'] == 'no states of random generators'
    assert ('no checksums' in rows['file']) == (name == 'bare_legacy')
    assert rows['EMA'].startswith('yes, 6 updates' if name == 'ema' else 'none')
    if KINDS[name] in ('plain', 'stock'):
        assert rows['saved'].startswith('epoch 2, iter 6, at 20') and 'mmengine 0.10.7, seed 0' in rows['saved']
        assert 'amp_wrapper at any level' in rows['resumes']
    expected = {
        'plain_sgd': ('loss scale', 'none'),
        'plain_adamw': ('base group', 'base_param_settings of mmengine'),
        'plain_pair': ('head: groups', '1, 2 parameters, lr 0.125'),
        'ema': ('schedules', '1 state'),
        'stock_sgd': ('loss scale', '2048 (dynamic), 2 clean steps of 4 to the next growth'),
        'stock_adamw': ('optimizer', 'state of 6 parameters; tensors: 18 of float32 (74 elements, 296 bytes)'),
        'stock_bf16': ('loss scale', 'disabled'),
        'apex_wrapper': ('loss scale', '4096 (dynamic by its values), 3 clean steps of 2000 to the next growth'),
        'raw_apex': ('loss scale 1', '512 (dynamic by its values), 1017 clean steps of 2000 to the next growth'),
        'raw_apex_imagenet': ('saved', 'epoch 2'),
        'weights': ('resumes', 'nothing; load the weights with load_from=...'),
        'bare_legacy': ('saved', 'the file does not tell'),
    }
    label, text = expected[name]
    assert rows[label] == text


def test_inspect_our_own(own: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for level, path in own.items():
        rows = inspected(capsys, path)
        assert rows['kind'].startswith('own (') and rows['window'] == 'no open accumulation window'
        changed = (
            " with loss_scale={'dynamic': True, 'init_scale': 1024.0" if level in ('O1', 'O2') else ', no overrides'
        )
        assert rows['level'].startswith(level + changed)
        if level in ('O1', 'O2'):
            assert rows['loss scale'] == '2048 (dynamic), 2 clean steps of 4 to the next growth; 6 steps, 0 skipped'
        else:
            assert rows['loss scale'].startswith('1 (static)')
        assert ('float16' in rows['optimizer']) == (level == 'O3')
    file = {**losses_file(), 'exact_resume': {}}
    file['state_dict'] = {**file['state_dict'], 'stem.bias': torch.full((4,), float('nan'))}
    checkpoint_file.save(file, tmp_path / 'file.pth')
    rows = inspected(capsys, tmp_path / 'file.pth')
    assert rows['window'] == 'open: gradients of 5 parameters, 3 losses so far'
    assert rows['non-finite'] == 'stem.bias' and rows['random'] == 'states of the random generators'
    assert rows['loss scale 2'] == '1024 (dynamic), 2 clean steps of 2000 to the next growth; 9 steps, 2 skipped'
    checkpoint_file.save({key: file[key] for key in ('state_dict', 'optimizer')}, tmp_path / 'bare.pth')
    assert '--to stock' in inspected(capsys, tmp_path / 'bare.pth')['resumes']


@pytest.mark.parametrize('target', TOOL.TARGETS)
@pytest.mark.parametrize('name', KINDS)
def test_tool_converts_every_file(name: str, target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / 'epoch_2.pth'
    shutil.copy(FOREIGN / f'{name}.pth', source)
    before = source.read_bytes()
    words = [str(source), '--to', target]
    if target == 'stock' and name in POSITION:
        words += ['--epoch', '2', '--iter', '6']
    if target == 'stock' and KINDS[name] == 'weights':
        with pytest.raises(SystemExit, match='AmpCheckpointError: this holds weights and no optimizer'):
            TOOL.main(words)
        assert list(tmp_path.iterdir()) == [source]
        return
    TOOL.main(words)
    said = capsys.readouterr().out
    out = tmp_path / f'epoch_2_{target}.pth'
    assert said.startswith(f'epoch_2.pth -> {out} (')
    assert set(tmp_path.iterdir()) == {source, out} and source.read_bytes() == before
    kind = ('stock' if name in SCALES else 'plain') if target == 'stock' else 'weights'
    assert convert.identify(checkpoint_file.load(out)).kind == kind


def test_a_converted_file_is_not_the_newest_of_its_folder(own: dict[str, Path], tmp_path: Path) -> None:
    """``--resume auto`` takes the original, which has the random states."""
    source = tmp_path / 'epoch_2.pth'
    shutil.copy(own['O2'], source)
    TOOL.main([str(source), '--to', 'stock'])
    assert len(list(tmp_path.glob('*.pth'))) == 2
    assert checkpoint_file.find_newest(tmp_path).path == source.resolve()


@pytest.mark.parametrize('words, stem', [([], 'epoch_2'), (['--to', 'fp16'], 'epoch_2_fp16')])
def test_publish(words: list[str], stem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / 'epoch_2.pth'
    shutil.copy(FOREIGN / 'stock_sgd.pth', source)
    TOOL.main([str(source), '--publish', *words])
    (out,) = set(tmp_path.iterdir()) - {source}
    digest = hashlib.sha256(out.read_bytes()).hexdigest()
    assert out.name == f'{stem}-{digest[:8]}.pth' and str(out) in capsys.readouterr().out
    # what load_url(check_hash=True) looks for in the name
    found = torch.hub.HASH_REGEX.search(out.name)
    assert found is not None and digest.startswith(found.group(1)) and len(found.group(1)) == 8
    assert set(torch.load(out, weights_only=True)) == {'meta', 'state_dict'}
    # the same content has the same name, also where the source has a hash in its own
    again = tmp_path / 'again-0123abcd.pth'
    shutil.copy(source, again)
    TOOL.main([str(again), '--publish', *words])
    assert (tmp_path / out.name.replace('epoch_2', 'again')).read_bytes() == out.read_bytes()
    if not words:
        before = set(tmp_path.iterdir())
        with pytest.raises(SystemExit, match='never overwritten'):
            TOOL.main([str(out), '--publish'])
        assert set(tmp_path.iterdir()) == before


def test_tool_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / 'a.pth'
    shutil.copy(FOREIGN / 'stock_sgd.pth', source)
    before = source.read_bytes()
    (tmp_path / 'link.pth').symlink_to(source)
    for out in (source, tmp_path / 'link.pth', tmp_path / '.' / 'a.pth'):
        with pytest.raises(SystemExit, match='never overwritten'):
            TOOL.main([str(source), str(out), '--to', 'fp16'])
    with pytest.raises(SystemExit, match='is a folder'):
        TOOL.main([str(source), str(tmp_path), '--to', 'fp16'])
    assert source.read_bytes() == before
    for words in (
        [],
        ['x.pth', '--inspect'],
        ['--publish', '--to', 'stock'],
        ['--to', 'fp8'],
        ['--publish', '--iter', '1'],
    ):
        with pytest.raises(SystemExit) as caught:
            TOOL.main([str(source), *words])
        assert caught.value.code == 2
        capsys.readouterr()
    # one flipped bit in a weight
    damaged = bytearray(before)
    position = before.index(read('stock_sgd')['state_dict']['stem.weight'].numpy().tobytes())
    damaged[position] ^= 1
    source.write_bytes(bytes(damaged))
    with pytest.raises(SystemExit, match='checksum'):
        TOOL.main([str(source), '--inspect'])


def test_the_page_shows_what_the_tool_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / 'docs' / 'converting.md').read_text()
    source, out = FOREIGN / 'raw_apex_imagenet.pth', tmp_path / 'epoch_2.pth'
    with pytest.raises(SystemExit) as caught:
        TOOL.main([str(source), str(out), '--to', 'stock'])
    assert f'```text\n{caught.value}\n```' in page
    TOOL.main([str(source), str(out), '--to', 'stock', '--iter', '10010'])
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith('  note: ')]
    assert len(notes) == 3 and '\n'.join(notes) + '\n```' in page
    # every kind has its row
    assert set(re.findall(r'^\| `(\w+)` \|', page, re.MULTILINE)) == set(TOOL.KINDS)


def test_errors_are_one_line_and_exit_1(tmp_path: Path) -> None:
    (tmp_path / 'half.pth').write_bytes((FOREIGN / 'ema.pth').read_bytes()[:5000])
    for path, words in (('half.pth', 'is truncated'), ('none.pth', 'is not there')):
        done = subprocess.run(
            [sys.executable, 'tools/convert_checkpoint.py', str(tmp_path / path), '--inspect'],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 1 and done.stdout == ''
        lines = [line for line in done.stderr.splitlines() if 'Warning' not in line and line.strip()]
        assert len(lines) == 1 and words in lines[0] and lines[0].startswith('AmpCheckpointError: '), done.stderr


# -- found by a reviewer ----------------------------------------------------------------------------------------------


def _tool(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / 'tools/convert_checkpoint.py'), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)


@pytest.mark.parametrize(
    ('change', 'words'),
    [
        (dict(ema_state_dict=[1]), "'ema_state_dict' must be a dict, but is list"),
        (dict(param_schedulers=3), "'param_schedulers' must be a list, but is int"),
        (dict(state_dict={'w': torch.ones(2, 2).to_sparse()}), "'state_dict'['w'] is no plain tensor"),
        (dict(state_dict={7: torch.ones(2)}), "'state_dict' has the key 7, which is no name"),
    ],
)
def test_odd_files_end_in_a_line(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    file = {**torch.load(FOREIGN / 'plain_sgd.pth', weights_only=False), **change}
    torch.save(file, tmp_path / 'odd.pth')
    done = _tool(str(tmp_path / 'odd.pth'), '--inspect')
    assert done.returncode == 1 and words in done.stderr and 'Traceback' not in done.stderr


def test_out_may_stand_behind_the_options(tmp_path: Path) -> None:
    done = _tool(str(FOREIGN / 'plain_sgd.pth'), '--to', 'fp32', str(tmp_path / 'out.pth'))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / 'out.pth').is_file()


def test_the_config_of_mmcv_1_is_left_out() -> None:
    file = torch.load(FOREIGN / 'plain_sgd.pth', weights_only=False)
    file['meta']['config'] = 'import os'
    converted, notes = convert.to_stock(file)
    assert 'config' not in converted['meta'] and file['meta']['config'] == 'import os'
    assert any('without' in note and 'execute' in note for note in notes)
