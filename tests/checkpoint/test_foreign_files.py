"""Files of other kinds are recognised and resumed from; mmengine without this package goes on from ours."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import make_foreign
import pytest
import torch
from bits import differences
from command_line import python
from foreign_files import (
    FOREIGN,
    KINDS,
    POSITION,
    ROOT,
    SCALES,
    STOCK_KEYS,
    KeepStart,
    read,
    resume,
    unchanged,
    weights_of,
)
from mmengine.runner import Runner

from amp_wrapper.checkpoint import convert
from amp_wrapper.checkpoint import file as checkpoint_file

TRAINING = [name for name, kind in KINDS.items() if kind != 'weights']
ADAMW = {'plain_adamw', 'stock_adamw'}


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
    assert differences(dict(start['weights']), dict(expected)) == []
    parts = file['optimizer'] if name == 'plain_pair' else {'': file['optimizer']}
    for part, state in parts.items():
        assert differences(start['optimizer'][part]['state'], state['state']) == []
        for mine, theirs in zip(start['optimizer'][part]['param_groups'], state['param_groups'], strict=True):
            assert {key: mine[key] for key in theirs} == theirs
        base = state.get('base_param_settings')
        assert (base is None) == (name != 'plain_adamw') and start['base'][part] == base
        kept = [(s['scale'], s['_growth_tracker']) for s in start['scalers'][part]]
        expected_scales = SCALES.get(name, [(2.0**16, 0)])
        assert kept == (expected_scales if name != 'raw_apex' else [expected_scales[0], (2.0**16, 0)])
    assert all(value.isfinite().all() for value in runner.model.state_dict().values())
    assert differences(runner.model.state_dict()['stem.weight'], expected['stem.weight']) != []


def test_weights_alone_are_loaded(tmp_path: Path) -> None:
    for name in ('weights', 'bare_legacy'):
        cfg = make_foreign.config(tmp_path / name, wrapper_for(name, 'O2'), load_from=str(FOREIGN / f'{name}.pth'))
        runner = Runner.from_cfg(cfg)
        runner.register_hook(KeepStart())
        runner.train()
        assert differences(dict(runner.start['weights']), weights_of(read(name))) == []


@pytest.mark.parametrize('static, kept', [(False, 4096.0), (True, 128.0)])
def test_the_configuration_decides_whether_an_apex_scale_moves(static: bool, kept: float, tmp_path: Path) -> None:
    wrapper = wrapper_for('apex_wrapper', 'O2', **(dict(loss_scale=128.0) if static else {}))
    runner = resume(tmp_path, FOREIGN / 'apex_wrapper.pth', wrapper, param_scheduler=None)
    assert runner.start['scalers'][''][0]['scale'] == kept


def test_the_files_are_what_the_script_makes(tmp_path: Path) -> None:
    """In a process of its own, which ends with an error if it ever imported amp_wrapper."""
    done = python(ROOT / 'tests' / 'support' / 'make_foreign.py', tmp_path)
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
_RECENT = torch.__version__ >= (2, 13)


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


def run_stock_worker(folder: Path, cases: dict[str, Any]) -> dict[str, Any]:
    """Resume each case in one process that never imports this package."""
    (folder / 'cases.json').write_text(json.dumps(cases))
    # mmengine's own files hold its HistoryBuffer, which torch refuses without this variable
    environment = {**os.environ, 'TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD': '1'}
    done = python(ROOT / 'tests' / 'support' / 'stock_worker.py', folder, env=environment)
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
                    assert differences(start['weights'][name], master.float()) == [], (level, how, kind, name)
                for index, entry in memory['state'].items():
                    momentum = start['optimizer']['']['state'][index]['momentum_buffer']
                    assert differences(momentum, entry['momentum_buffer'].float()) == [], (level, how, kind, index)
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
    assert differences(dict(start['weights']), dict(file['state_dict'])) == [], name
    # at O3 the optimizer's state is 16-bit; torch casts it to the type of the weights, which loses nothing
    for index, entry in file['optimizer']['state'].items():
        theirs = {key: value.float() for key, value in entry.items()}
        assert theirs and differences(start['optimizer']['']['state'][index], theirs) == [], name
    assert start['optimizer']['']['param_groups'] == file['optimizer']['param_groups'], name
    assert (start['scaler'] == {}) == (kind == 'plain')
    if kind == 'amp' and 'loss_scaler' in file['optimizer']:
        saved, there = file['optimizer']['loss_scaler'], start['scaler']['']
        assert there == {key: saved[key] for key in there}, name
        assert there.keys() == STOCK_KEYS
    changed = differences(dict(start['weights']), dict(end['weights']))
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
            assert differences(dict(start['average']), {**average, 'steps': file['ema_state_dict']['steps']}) == []
            assert differences(weights, theirs)
            weights = theirs
        assert differences(dict(start['weights']), weights) == [], name
        parts = file['optimizer'] if 'pair' in name else {'': file['optimizer']}
        for part, state in parts.items():
            assert state['state'] and differences(start['optimizer'][part]['state'], state['state']) == [], name
            assert start['optimizer'][part]['param_groups'] == state['param_groups']
            assert start['scaler'][part] == {key: state['loss_scaler'][key] for key in STOCK_KEYS}
            assert start['scaler'][part]['scale'] != 2.0**16
            assert start['base'][part] == state.get('base_param_settings')
            assert (start['base'][part] is None) == ('pair' in name)
