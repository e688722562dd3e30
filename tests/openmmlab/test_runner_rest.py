"""Numbers in the log of mmengine's ``Runner``, reports of skipped steps, ``compile`` in configs, tests beside trainings."""

from __future__ import annotations

import copy
import json
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo
import toy
from bits import differences
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.registry import HOOKS, MODELS
from mmengine.runner import Runner
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from amp_wrapper import AmpConfigError, AmpMonitorHook, NonfiniteHook, OverflowStreakError
from amp_wrapper.cli import main
from amp_wrapper.engine.flags import LateRead

EACH = dict(type='LoggerHook', interval=1)
ALONE: dict[str, Any] = dict(val_cfg=None, val_dataloader=None, val_evaluator=None)
BY_ITERATION = dict(
    train_cfg=dict(by_epoch=False, max_iters=20, val_interval=50),
    train_dataloader=toy.loader(sampler='InfiniteSampler'),
)
TESTED = dict(test_dataloader=toy.loader(shuffle=False), test_evaluator=dict(type='ToyScore'), test_cfg=dict())


def wrapper(level: str = 'O2', **words: Any) -> dict[str, Any]:
    return dict(type='AmpOptimWrapper', opt_level=level, optimizer=dict(type='SGD', lr=0.01), verbosity=0) | words


def monitor(**words: Any) -> list[dict[str, Any]]:
    return [dict(type='amp_wrapper.AmpMonitorHook', **words)]


def poisoned(*iterations: int) -> dict[str, Any]:
    return dict(model=dict(type='PoisonedModel', poisoned=iterations))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def rows(runner: Runner) -> list[dict[str, Any]]:
    """Of the log of the training."""
    return [line for line in lines(Path(runner.log_dir) / 'vis_data' / 'scalars.json') if 'loss' in line]


# -- numbers in the log -----------------------------------------------------------------------------------------------


@HOOKS.register_module()
class SkipsOne(Hook):
    """NaN in the gradients of the fourth step."""

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        if runner.iter == 3:
            data_batch['inputs'].fill_(float('nan'))


@pytest.mark.parametrize(
    ('level', 'skips', 'hooks'),
    [
        *((level, level != 'O0', []) for level in toy.LEVELS),
        ('O2', False, []),
        ('O5', False, []),
        ('O5', True, monitor(interval=3)),
        ('O1', True, monitor(interval=3)),
    ],
)
def test_log_has_few_numbers(
    level: str, skips: bool, hooks: list[Any], tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # as in a new process
    monkeypatch.setattr(logging.getLogger('amp_wrapper'), 'handlers', [])
    scaled = level in ('O1', 'O2')
    config = toy.toy_config(
        tmp_path / 'work',
        wrapper(level, verbosity=1, **(dict(loss_scale=dict(init_scale=2.0**8)) if scaled else {})),
        custom_hooks=[*([dict(type='SkipsOne')] if skips else []), *hooks],
        train_cfg=dict(by_epoch=True, max_epochs=1, val_interval=1),
        log_level='INFO',
    )
    config.dump(str(tmp_path / 'config.py'))
    assert main(['train', str(tmp_path / 'config.py')]) == 0
    (text,) = (tmp_path / 'work').glob('*/*.log')
    assert f'AmpOptimWrapper of amp_wrapper: {level} (' in text.read_text()
    (log,) = (tmp_path / 'work').glob('*/vis_data/scalars.json')
    found = [{key for key in row if key.startswith('amp_')} for row in lines(log) if 'loss' in row]
    always = {'amp_scale'} if scaled else set()
    assert found[:3] == [always] * 3 and found[3:] == [always | ({'amp_skipped'} if skips else set())] * 4
    assert ('amp_skipped' in capsys.readouterr().out) == skips


@pytest.mark.parametrize('level', ['O1', 'O2', 'O5'])
def test_numbers_are_shown_at_the_iterations_at_which_they_were_measured(level: str, tmp_path: Path) -> None:
    hooks = monitor(interval=5, diagnose_overflow=False)
    runner = toy.run(tmp_path, wrapper(level, accumulative_counts=2), custom_hooks=hooks, **poisoned(10))
    folder = Path(runner.log_dir) / 'vis_data'
    shown = [line for line in lines(folder / 'scalars.json') if 'amp_grad_peak' in line or 'amp_grad_subnormal' in line]
    # of steps, which come at each second iteration; in the last one nothing was finite
    assert [line['iter'] for line in shown] == ([] if level == 'O5' else [2, 6])
    assert all(line['step'] == line['iter'] and 0 <= line['amp_grad_subnormal'] <= 1 for line in shown)
    assert not any(name.startswith('amp_grad') for row in rows(runner) for name in row)


class OwnReads(TorchDispatchMode):
    """Notes the iterations in which code of the package reads the device; what mmengine reads by itself is not noted."""

    def __init__(self) -> None:
        super().__init__()
        self.runner: Any = None
        self.found: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self.note()
        return func(*args, **(kwargs or {}))

    def note(self) -> None:
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and not str(frame.f_globals['__name__']).startswith(('amp_wrapper', 'mmengine')):
            frame = frame.f_back
        name = '' if frame is None else frame.f_globals['__name__']
        # the ops of the package are told apart from it: without a library, they look at tables that lie on the host
        if self.runner is not None and name.startswith('amp_wrapper') and not name.startswith('amp_wrapper.ops'):
            self.found.add(self.runner.iter + 1)


@HOOKS.register_module()
class NoteReads(Hook):
    """Lets :class:`OwnReads` know the iteration."""

    reads: OwnReads

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        self.reads.runner = runner

    def after_train_epoch(self, runner: Any) -> None:
        self.reads.runner = None


@pytest.mark.parametrize(('level', 'skipped'), [('O2', ()), ('O4', (1,)), ('O5', ())])
def test_device_is_read_with_logs_alone(
    level: str, skipped: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scales, skips and norms of clipping."""
    reads = OwnReads()
    monkeypatch.setattr(NoteReads, 'reads', reads, raising=False)
    tolist = torch.Tensor.tolist

    def noted(tensor: Tensor) -> Any:
        # on a CPU it goes past the mode
        reads.note()
        return tolist(tensor)

    monkeypatch.setattr(torch.Tensor, 'tolist', noted)
    with reads:
        runner = toy.run(
            tmp_path,
            wrapper(level, optimizer=dict(type='FusedSGD', lr=0.01), clip_grad=dict(max_norm=1.0)),
            custom_hooks=[dict(type='NoteReads')],
            default_hooks=dict(logger=EACH | dict(interval=10), checkpoint=dict(type='CheckpointHook', interval=-1)),
            **BY_ITERATION,
            **ALONE,
            **poisoned(*skipped),
        )
    logged = rows(runner)
    # the end of the data at iteration 7 is logged, too
    assert reads.found == {row['iter'] for row in logged} == {7, 10, 20}
    assert all('grad_norm' in row for row in logged)


def test_saved_log_needs_no_package_and_lacks_norms_of_skipped_steps(tmp_path: Path) -> None:
    custom = [dict(data_src='grad_norm', method_name='max', window_size='global', log_name='gn')]
    runner = toy.run(
        tmp_path,
        wrapper('O5', clip_grad=dict(max_norm=1.0)),
        default_hooks=dict(logger=EACH),
        log_processor=dict(custom_cfg=custom),
        **poisoned(1, 3),
    )
    assert b'amp_wrapper' not in (tmp_path / 'epoch_2.pth').read_bytes()
    saved = toy.checkpoint(tmp_path)['message_hub']['log_scalars']
    assert type(saved['train/grad_norm']).__module__ == 'mmengine.logging.history_buffer'
    norms = saved['train/grad_norm'].data[0]
    assert len(norms) == 12 and bool(torch.tensor(norms).isfinite().all())
    # those of skipped steps would be infinite
    assert ['grad_norm' in row for row in rows(runner)][:2] == [False, True]
    assert saved['train/amp_skipped'].current() == 2


def test_file_that_is_saved_between_two_lines_has_all_numbers(tmp_path: Path) -> None:
    hooks = dict(logger=EACH | dict(interval=5), checkpoint=dict(type='CheckpointHook', interval=3, by_epoch=False))
    toy.run(tmp_path, wrapper('O5', clip_grad=dict(max_norm=1.0)), default_hooks=hooks)
    saved = toy.checkpoint(tmp_path, 'iter_6.pth')['message_hub']
    assert len(saved['log_scalars']['train/grad_norm'].data[0]) == 6 and saved['resumed_keys']['train/grad_norm']


def test_members_of_a_dict_have_their_names_in_front(tmp_path: Path) -> None:
    config = Config.fromfile(Path(__file__).resolve().parents[2] / 'configs' / 'digits' / 'gan_o2_o5.py')
    config.work_dir = str(tmp_path)
    config.train_cfg = dict(by_epoch=False, max_iters=3, val_interval=50)
    config.param_scheduler = None
    config.model.generator.width = config.model.discriminator.width = 4
    config.custom_hooks = monitor(interval=2)
    config.default_hooks = dict(logger=EACH)
    config.log_level = 'WARNING'
    runner = Runner.from_cfg(config)
    runner.train()
    folder = Path(runner.log_dir) / 'vis_data'
    shown = [line for line in lines(folder / 'scalars.json') if 'generator_amp_grad_peak' in line]
    assert [line['iter'] for line in shown] == [1, 2]


@pytest.mark.parametrize(
    'words', [dict(interval=0), dict(interval=-1), dict(diagnose_overflow='yes'), dict(interval=True)], ids=str
)
def test_wrong_arguments_of_the_monitor(words: dict[str, Any]) -> None:
    with pytest.raises(AmpConfigError, match=next(iter(words))):
        AmpMonitorHook(**words)


# -- reports of skipped steps -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(('counts', 'at'), [(1, (3, 4, 9)), (2, (4, 10))])
def test_reports_beside_checkpoints_change_nothing(counts: int, at: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """Also where the device is slow, and tells of a skip when the next iteration has begun."""
    monkeypatch.setattr(LateRead, 'is_there', False)
    ends = []
    for name, hooks in (('plain', []), ('watched', monitor(interval=2))):
        words = wrapper(accumulative_counts=counts, optimizer=dict(type='FusedSGD', lr=0.01))
        runner = toy.run(tmp_path / name, words, custom_hooks=hooks, **poisoned(3, 4, 9))
        ends.append([runner.model.state_dict(), runner.optim_wrapper.state_dict()])
    assert differences(*ends) == []
    folder = tmp_path / 'watched' / 'amp_diagnosis'
    assert {path.name for path in folder.glob('*.json')} == {f'iter_{iteration}.json' for iteration in at}
    found = json.loads((folder / f'iter_{at[0]}.json').read_text())
    assert found['level'].startswith('O2') and found['rank'] == 0
    page = (folder / f'iter_{at[0]}.html').read_text().replace('&#39;', "'")
    assert found['text'].split('.')[0] in page


@pytest.mark.parametrize('most', [1, 4])
def test_streak_of_skips_ends_the_run_with_its_cause(most: int, tmp_path: Path) -> None:
    """Skips begin at the third iteration, and the log is read at each second one. After one the cause is not known yet."""
    case = dict(custom_hooks=monitor(), default_hooks=dict(logger=dict(type='LoggerHook', interval=2)))
    fused = dict(type='FusedAdamW', lr=0.02)
    with pytest.raises(OverflowStreakError, match=r'(?s)fc\.weight.*Report: .*amp_diagnosis.*iter_\d+\.html') as caught:
        toy.run(tmp_path, wrapper(optimizer=fused, max_consecutive_skips=most), **case, **poisoned(*range(3, 15)))
    assert 'steps in a row' in str(caught.value)
    assert not (tmp_path / 'epoch_2.pth').exists()


def test_skip_that_is_decided_on_the_device_is_warned_of_with_the_log(tmp_path: Path) -> None:
    words = wrapper('O5', optimizer=dict(type='FusedAdamW', lr=0.02), verbosity=1)
    with toy.run_log() as said:
        toy.run(tmp_path, words, default_hooks=dict(logger=EACH), log_level='INFO', **poisoned(3, 9))
    skips = [line for line in said if 'optimizer step skipped' in line]
    assert len(skips) == 2 and '(2 so far, 1 in a row)' in skips[1]


def test_watch_of_a_training_that_an_exception_ended_is_removed() -> None:
    model, hook = nn.Sequential(nn.Linear(2, 2)), NonfiniteHook()
    runner = SimpleNamespace(model=model)
    hook.before_train(runner)
    hook.before_train(runner)
    assert type(model).__mro__[1] is not nn.Sequential.__mro__[1]
    hook.after_train(runner)
    assert [type(module) for module in model.modules()] == [nn.Sequential, nn.Linear]


# -- torch.compile ----------------------------------------------------------------------------------------------------


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """Which classes of modules are told to compile themselves, and how; none does."""
    found: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(nn.Module, 'compile', lambda self, **words: found.append((type(self).__name__, words)))
    return found


def test_forward_and_loss_are_one_graph_and_training_is_the_same(tmp_path: Path) -> None:
    for level in ('O0', 'O1', 'O5'):
        torch._dynamo.reset()
        counters = torch._dynamo.utils.counters
        counters.clear()
        ends = {
            name: toy.run(tmp_path / f'{level} {name}', wrapper(level), **words).model
            for name, words in {'compiled': dict(compile=dict(backend='eager')), 'eager': {}}.items()
        }
        # one for training and one for validation
        assert counters['stats']['unique_graphs'] == 2 and not counters['graph_break'], level
        # mmengine would compile the step of the optimizer, too
        assert 'train_step' not in vars(ends['compiled'])
        states = [model.state_dict() for model in ends.values()]
        if level == 'O0':
            stock = dict(type='OptimWrapper', optimizer=dict(type='SGD', lr=0.01))
            states.append(toy.run(tmp_path / 'stock', stock).model.state_dict())
        assert all(differences(states[0], other) == [] for other in states[1:]), level


@pytest.mark.parametrize('words', [True, False, None, {}, dict(mode='reduce-overhead')])
def test_compile_takes_a_bool_none_or_a_dict(words: Any, compiled: list[Any], tmp_path: Path) -> None:
    toy.run(tmp_path, wrapper('O5'), compile=copy.copy(words))
    wanted = words if isinstance(words, dict) else {}
    assert compiled == ([] if words in (False, None) else [('ToyModel', wanted)])


@MODELS.register_module()
class OwnTrainStep(toy.ToyModel):
    """Calls its parts in a ``train_step`` of its own, as a GAN does."""

    def __init__(self) -> None:
        super().__init__()
        # nothing to compile: no weights, and no forward
        self.act, self.blocks = nn.ReLU(), nn.ModuleList([nn.Linear(4, 4)])

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        data = self.data_preprocessor(data, True)
        with optim_wrapper.optim_context(self):
            loss = nn.functional.cross_entropy(self.fc(self.extract_feat(data['inputs'])), data['labels'])
        optim_wrapper.update_params(loss)
        return dict(loss=loss.detach())


def test_parts_are_compiled_where_train_step_calls_them(compiled: list[Any], tmp_path: Path) -> None:
    toy.run(tmp_path, wrapper('O5'), compile=True, model=dict(type='OwnTrainStep'))
    assert {name for name, _ in compiled} == {'OwnTrainStep', 'Conv2d', 'BatchNorm2d', 'LayerNorm', 'Linear'}


def test_mmengine_compiles_its_stock_wrapper(
    compiled: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    targets: list[str] = []
    monkeypatch.setattr(torch, 'compile', lambda target, **words: targets.append(target.__name__) or target)
    stock = dict(type='OptimWrapper', optimizer=dict(type='SGD', lr=0.01))
    toy.run(tmp_path, stock, compile=True, **ALONE)
    assert targets == ['train_step'] and compiled == []


# -- AmpInferenceHook in a process that trains as well ----------------------------------------------------------------


@HOOKS.register_module()
class TestsInBetween(Hook):
    """Tests after each epoch, as some projects do."""

    def after_train_epoch(self, runner: Any) -> None:
        runner.test()


def called(folder: Path, calls: str, level: str, tested_at: str, *hooks: str) -> tuple[dict[str, Tensor], list[Any]]:
    """Weights and buffers after some calls of a runner, and what its tests gave."""
    own = dict(type='amp_wrapper.AmpInferenceHook', opt_level=tested_at)
    words = wrapper(level, optimizer=dict(type='SGD', lr=0.1, momentum=0.9))
    config = toy.toy_config(folder, words, custom_hooks=[own, *(dict(type=hook) for hook in hooks)], **TESTED)
    runner = Runner.from_cfg(config)
    found = []
    for call in calls.split():
        torch.manual_seed(0)
        result = getattr(runner, call)()
        if call == 'test':
            found.append(result['toy/score'])
    return copy.deepcopy(dict(runner.model.state_dict())), found


@pytest.mark.parametrize(('level', 'tested_at'), zip(toy.LEVELS, ('O2', 'O5', 'O2', 'O4', 'O0', 'O1')))
def test_test_before_after_or_between_changes_no_bit_of_training(level: str, tested_at: str, tmp_path: Path) -> None:
    alone, _ = called(tmp_path / 'alone', 'train', level, tested_at)
    # mmengine swaps averages in for a test
    for calls, hook in ('test train', 'EMAHook'), ('train test test', 'EMAHook'), ('train', 'TestsInBetween'):
        state, results = called(tmp_path / calls, calls, level, tested_at, hook)
        assert differences(alone, state) == [], calls
        assert calls != 'train test test' or results[0] == results[1]


def test_level_of_the_test_is_that_of_the_hook(tmp_path: Path) -> None:
    scores = [called(tmp_path / level, 'train test', 'O2', level)[1][0] for level in ('O0', 'O2', 'O5')]
    assert len(set(scores)) == 3 and max(scores) - min(scores) < 0.05


def test_test_that_an_exception_ended_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone, _ = called(tmp_path / 'alone', 'train', 'O2', 'O5')
    original: Callable[[Runner], Any] = Runner.test

    def interrupted(*_: Any) -> Iterator[None]:
        raise KeyboardInterrupt

    def test(runner: Runner) -> dict[str, float]:
        with monkeypatch.context() as patch:
            patch.setattr(toy.ToyScore, 'process', interrupted)
            with pytest.raises(KeyboardInterrupt):
                original(runner)
        return {'toy/score': 0.0}

    monkeypatch.setattr(Runner, 'test', test)
    state, results = called(tmp_path / 'failed', 'test train', 'O2', 'O5')
    assert results == [0.0] and differences(alone, state) == []


def test_model_gives_what_it_gave_before_a_test(tmp_path: Path) -> None:
    inputs, labels = torch.randn(2, 1, 6, 6), torch.tensor([0, 1])
    for level in toy.LEVELS:
        hooks = [dict(type='amp_wrapper.AmpInferenceHook', opt_level=level)]
        stock = dict(type='OptimWrapper', optimizer=dict(type='SGD', lr=0.1))
        runner = Runner.from_cfg(toy.toy_config(tmp_path / level, stock, custom_hooks=hooks, **TESTED))
        runner.model.eval()
        before = runner.model(inputs, labels, mode='loss')['loss'], runner.model(inputs)
        runner.test()
        after = runner.model(inputs, labels, mode='loss')['loss'], runner.model(inputs)
        assert differences(before, after) == [], level
