"""Files of version 0.2.0, mmengine, apex and plain torch are read; mmengine alone goes on from the files of this package."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import foreign
import pytest
import torch
from bits import differences
from foreign import read
from mmengine.hooks import EMAHook
from mmengine.runner import Runner
from torch import Tensor

from amp_wrapper import AmpCheckpointError, AmpOptimWrapper, amp

sys.path.insert(0, str(Path(__file__).parents[1] / 'data'))
import saved_runs

LEVELS = ('O0', 'O1', 'O2', 'O5')
#: Of each loss in a file: scale, and steps since it last changed.
SCALES = {
    'stock_sgd': [(2048.0, 2)],
    'stock_adamw': [(2048.0, 2)],
    'apex_wrapper': [(4096.0, 3)],
    'raw_apex': [(4096.0, 3), (512.0, 1017)],
    'raw_apex_imagenet': [(4096.0, 3)],
}
RUNS = ('plain_sgd', 'plain_adamw', 'plain_pair', 'ema', 'stock_sgd', 'stock_adamw', 'stock_bf16', 'apex_wrapper')
STOCK_KEYS = {'scale', 'growth_factor', 'backoff_factor', 'growth_interval', '_growth_tracker'}


def weights_of(file: Any) -> dict[str, Any]:
    weights = dict(file.get('state_dict', file.get('model', file)))
    return {name.removeprefix('module.'): value for name, value in weights.items()}


def without_prefix(average: Any) -> dict[str, Any]:
    return {key[len('module.') :]: value for key, value in average.items() if key.startswith('module.')}


# -- of version 0.2.0 -------------------------------------------------------------------------------------------------


def nearest(left: Any, right: Any) -> Any:
    """``left`` with the floating tensors of ``right`` where they are as close as the roots and squares of two processors."""
    if isinstance(left, Tensor) and isinstance(right, Tensor) and left.dtype is right.dtype:
        eps = 16 * torch.finfo(left.dtype).eps if left.is_floating_point() else 0.0
        return right if left.shape == right.shape and torch.allclose(left, right, rtol=eps, atol=eps) else left
    if isinstance(left, dict) and isinstance(right, dict):
        return {key: nearest(value, right.get(key)) for key, value in left.items()}
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)) and len(left) == len(right):
        return list(map(nearest, left, right))
    return left


@pytest.mark.parametrize('name', saved_runs.CASES)
def test_trainings_of_0_2_0_go_on(name: str, tmp_path: Path) -> None:
    """As the training went on that saved the file, and what is written today has its form."""
    case = saved_runs.CASES[name]
    saved, after = (read(saved_runs.FOLDER / f'{name}{ending}') for ending in ('.pth', '.after.pth'))
    training = saved_runs.Training(case, read(saved_runs.FOLDER / f'{name}.pth'))
    torch.save(training.save(), tmp_path / 'again.pth')
    assert differences(saved, read(tmp_path / 'again.pth')) == []
    training.train(range(case.first, case.first + case.then))
    torch.save(training.save(), tmp_path / 'end.pth')
    end = read(tmp_path / 'end.pth')
    assert differences(after, end if case.make is saved_runs.sgd else nearest(end, after)) == []


@pytest.mark.parametrize('name', ['within_O5_ema', 'dict_O1_ema'])
def test_runs_of_0_2_0_go_on(name: str, tmp_path: Path) -> None:
    """Saved in the middle of an epoch and of an accumulation, with an average; and with two optimizers."""
    path = saved_runs.FOLDER / f'{name}.pth'
    config = saved_runs.runner_config(name, tmp_path / 'work')
    config.update(resume=True, load_from=str(path))
    runner = Runner.from_cfg(config)
    runner.register_hook(foreign.KeepStart())
    runner.train()
    file, start = read(path), runner.start
    # the average and the trained weights change places while a file is written
    assert differences(start['weights'], without_prefix(file['ema_state_dict'])) == []
    assert differences(without_prefix(start['average']), dict(file['state_dict'])) == []
    assert start['position'][1] == file['meta']['iter'] < runner.iter == (11 if name == 'dict_O1_ema' else 21)
    parts = file['optimizer'] if name == 'dict_O1_ema' else {'': file['optimizer']}
    for part, state in parts.items():
        assert differences(start['optimizer'][part]['state'], state['state']) == []
        assert start['scale'][part]['scale'] == state['loss_scaler']['scale']
    saved = file['param_schedulers'] if name == 'dict_O1_ema' else {'': file['param_schedulers']}
    assert start['schedules'] == {part: [each['last_step'] for each in states] for part, states in saved.items()}
    end = runner.model.state_dict()
    assert all(value.isfinite().all() for value in end.values())
    assert differences(start['weights'], dict(end)) != []


# -- of others --------------------------------------------------------------------------------------------------------


def wrapper_for(name: str, level: str, **more: Any) -> dict[str, Any]:
    """Our wrapper for a file, with a scale that moves at every level, so that there is something to keep."""
    optimizer = foreign.ADAMW if name.endswith('adamw') else foreign.SGD
    one = dict(type='AmpOptimWrapper', opt_level=level, optimizer=optimizer, **{'loss_scale': 'dynamic', **more})
    if name == 'plain_adamw':
        one['paramwise_cfg'] = dict(custom_keys=dict(head=dict(lr_mult=0.5)), norm_decay_mult=0.0)
    if name == 'plain_pair':
        return dict(constructor='ForeignPairConstructor', stem=one, head=dict(one))
    return one


def averaged(name: str) -> dict[str, Any]:
    return dict(custom_hooks=[dict(type='EMAHook', momentum=0.1)]) if name == 'ema' else {}


@pytest.mark.parametrize(
    ('name', 'level'), [(name, LEVELS[(i + j) % 4]) for i, name in enumerate(RUNS) for j in (0, 2)]
)
def test_files_of_mmengine_are_resumed(name: str, level: str, tmp_path: Path) -> None:
    path = foreign.FOLDER / f'{name}.pth'
    file = read(path)
    overrides = {**averaged(name), **(dict(param_scheduler=None) if name == 'apex_wrapper' else {})}
    runner = foreign.run(tmp_path, wrapper_for(name, level), path, epochs=3, **overrides)
    start, weights = runner.start, weights_of(file)
    assert start['position'] == (2, 6) and runner.iter == 9
    if name == 'ema':
        assert differences(without_prefix(start['average']), weights) == []
        weights = without_prefix(file['ema_state_dict'])
        assert [int(hook.ema_model.steps) for hook in runner.hooks if isinstance(hook, EMAHook)] == [9]
    assert differences(start['weights'], weights) == []
    for part, state in (file['optimizer'] if name == 'plain_pair' else {'': file['optimizer']}).items():
        assert differences(start['optimizer'][part]['state'], state['state']) == []
        for mine, theirs in zip(start['optimizer'][part]['param_groups'], state['param_groups'], strict=True):
            assert {key: mine[key] for key in theirs} == theirs
        base = state.get('base_param_settings')
        assert (base is None) == (name != 'plain_adamw') and start['base'][part] == base
        scale = start['scale'][part]
        assert [(scale['scale'], scale['_growth_tracker'])] == SCALES.get(name, [(2.0**16, 0)])
    assert all(value.isfinite().all() for value in runner.model.state_dict().values())


@pytest.mark.parametrize('name', ['weights', 'bare_legacy'])
def test_weights_alone_are_loaded(name: str, tmp_path: Path) -> None:
    runner = foreign.run(tmp_path, wrapper_for(name, 'O2'), load_from=str(foreign.FOLDER / f'{name}.pth'))
    assert differences(runner.start['weights'], weights_of(read(f'{name}.pth'))) == []


def test_checkpoints_of_scripts_on_apex_are_resumed() -> None:
    for name, level in itertools.product(('raw_apex', 'raw_apex_imagenet'), LEVELS):
        file = read(f'{name}.pth')
        model, losses = foreign.ForeignNet(), len(file['amp'])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.9)
        amp.initialize(model, optimizer, opt_level=level, loss_scale='dynamic', num_losses=losses, verbosity=0)
        model.load_state_dict(weights_of(file))
        optimizer.load_state_dict(file['optimizer'])
        amp.load_state_dict(file['amp'], optimizers=[optimizer])
        state = amp.state_dict(optimizers=[optimizer])
        found = [state[f'loss_scaler{index}'] for index in range(losses)]
        assert [(each['loss_scale'], each['unskipped']) for each in found] == SCALES[name], level
        assert differences(dict(model.state_dict()), weights_of(file)) == [], (name, level)
        with amp.scale_loss(model(torch.ones(4, 3), torch.arange(4) % 2, mode='loss')['loss'], optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        assert all(value.isfinite().all() for value in model.state_dict().values())


def apex_state(scale: float, unskipped: int) -> dict[str, Any]:
    return dict(apex_amp={'loss_scaler0': {'loss_scale': scale, 'unskipped': unskipped}})


MOVES = dict(init_scale=32.0)
#: What a file has for a scale, the scale of the config, and the one that is kept.
KEPT: dict[str, tuple[dict[str, Any], Any, float]] = {
    # a dynamic scale of apex grows after 2000 steps, and would not stay at 1
    'a static scale of apex': (apex_state(1.0, 3), MOVES, 32.0),
    'another static scale of apex': (apex_state(128.0, 2000), MOVES, 32.0),
    'a dynamic scale of apex': (apex_state(128.0, 1999), MOVES, 128.0),
    'a new dynamic scale of apex': (apex_state(65536, 0), MOVES, 65536.0),
    'a configured static scale wins': (apex_state(4096.0, 3), 128.0, 128.0),
    # as mmengine's stock wrapper saves it for bfloat16, or without a GPU
    'a disabled GradScaler': (dict(loss_scaler=torch.amp.GradScaler(enabled=False).state_dict()), MOVES, 32.0),
}


def test_static_scale_of_apex_is_not_taken_for_one_that_moves() -> None:
    for name, (saved, scale, kept) in KEPT.items():
        optimizers = [torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), 0.1) for _ in range(2)]
        wrapper = AmpOptimWrapper(opt_level='O2', optimizer=optimizers[0], loss_scale=scale)
        wrapper.load_state_dict({**optimizers[1].state_dict(), **saved})
        assert wrapper.loss_scaler.get_scale() == kept, name


def test_scripts_keep_a_scale_that_moves_and_no_static_one() -> None:
    def script(scale: Any) -> torch.optim.Optimizer:
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        amp.initialize(model, optimizer, opt_level='O2', loss_scale=scale, verbosity=0)
        return optimizer

    for saved, kept in ((1.0, 32.0), (dict(init_scale=1.0), 1.0), (dict(init_scale=128.0), 128.0)):
        again, state = script(MOVES), amp.state_dict(optimizers=[script(saved)])
        amp.load_state_dict(state, optimizers=[again])
        assert amp.state_dict(optimizers=[again])['loss_scaler0']['loss_scale'] == kept


# -- mmengine alone ---------------------------------------------------------------------------------------------------


def test_mmengine_alone_goes_on_from_our_files(own_runs: dict[str, Any], tmp_path: Path) -> None:
    """With OptimWrapper and AmpOptimWrapper, from the weights and the state that this package had in memory, in FP32."""
    wrappers = {
        'plain': dict(type='OptimWrapper', optimizer=foreign.SGD),
        'stock': dict(type='AmpOptimWrapper', dtype='bfloat16', optimizer=foreign.SGD),
    }
    cases: dict[str, Any] = {
        f'{level}_{kind}': dict(file=str(path), optim_wrapper=wrappers[kind])
        for (level, (path, _)), kind in zip(own_runs.items(), itertools.cycle(wrappers))
    }
    for name, source in (('average', 'ema'), ('groups', 'plain_adamw'), ('pair', 'plain_pair')):
        ours = wrapper_for(source, 'O2', loss_scale=foreign.SCALER)
        foreign.run(tmp_path / 'ours' / name, ours, **averaged(source))
        for part in [ours, *(ours.get(key, {}) for key in foreign.PAIR)]:
            if part.pop('opt_level', None):
                part.update(dtype='bfloat16', loss_scale='dynamic')
        path = tmp_path / 'ours' / name / 'epoch_2.pth'
        cases[name] = dict(file=str(path), optim_wrapper=ours, **averaged(source))
    (tmp_path / 'cases.json').write_text(json.dumps(cases))
    # mmengine's own files hold its HistoryBuffer, which torch refuses without this variable
    environment = {**os.environ, 'TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD': '1'}
    command = [sys.executable, foreign.__file__, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    results = read(tmp_path / 'results.pth')
    for name, case in cases.items():
        check_stock_run(name, read(Path(case['file'])), **results[name])
    for name, (_, memory) in zip(cases, own_runs.values()):
        start = results[name]['start']
        trained = [v for key, v in start['weights'].items() if 'running' not in key and 'num_batches' not in key]
        # at O3 weights and state are 16-bit, which FP32 holds
        assert differences(trained, [master.float() for master in memory['masters']]) == [], name
        for index, entry in memory['state'].items():
            momentum = start['optimizer']['']['state'][index]['momentum_buffer']
            assert differences(momentum, entry['momentum_buffer'].float()) == [], (name, index)


def check_stock_run(name: str, file: Any, start: Any, end: Any) -> None:
    """mmengine's run had at its start what is in the file, and trained."""
    assert tuple(start['position']) == (2, 6) and tuple(end['position']) == (3, 9), name
    weights = dict(file['state_dict'])
    if name == 'average':
        assert differences(without_prefix(start['average']), weights) == []
        weights = without_prefix(file['ema_state_dict'])
    assert differences(start['weights'], weights) == [], name
    # no optimizer of the pair has the BatchNorm's parameters
    assert len(differences(start['weights'], end['weights'])) == (7 if name == 'pair' else 9), name
    assert all(value.isfinite().all() for value in end['weights'].values()), name
    for part, state in (file['optimizer'] if name == 'pair' else {'': file['optimizer']}).items():
        groups = start['optimizer'][part]['param_groups']
        assert groups == state['param_groups'] and start['base'][part] == state.get('base_param_settings'), name
        if not name.endswith('plain'):
            assert start['scale'][part] == {key: state['loss_scaler'][key] for key in STOCK_KEYS}, name
            assert (state['loss_scaler']['scale'] != 1) == (name not in ('O3_stock', 'O5_stock')), name


# -- the form ---------------------------------------------------------------------------------------------------------


def test_state_has_the_form_of_stock_classes(device: torch.device) -> None:
    """Stock classes read ``loss_scaler``; at O1 and O4 they take all of the state, and this package finds its part in it."""
    for level in ('O1', 'O4', 'O2', 'O5'):
        optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).to(device).parameters(), 0.1)
        wrapper = AmpOptimWrapper(opt_level=level, optimizer=optimizer, loss_scale=64.0)
        state = wrapper.state_dict()
        assert ('amp' in state) == (level in ('O2', 'O5'))
        part = state['amp'] if 'amp' in state else state['loss_scaler']['amp']
        assert part['version'] == 1 and part['opt_level'] == level
        theirs = torch.amp.GradScaler(device.type)
        theirs.load_state_dict(state['loss_scaler'])
        assert theirs.get_scale() == 64.0
        part['version'] = 7
        with pytest.raises(AmpCheckpointError, match='upgrade'):
            wrapper.load_state_dict(state)
