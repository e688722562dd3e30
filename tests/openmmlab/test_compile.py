"""``compile`` in a config: what is compiled, what the log says, and that a resumed run is that of an uninterrupted one."""

from __future__ import annotations

import copy
import gc
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import toy
from bits import differences
from grid import but, long
from mmengine.registry import MODELS
from torch import nn
from toy_compiled import fresh

from amp_wrapper import AmpConfigError, AmpOptimWrapper

SGD = dict(type='SGD', lr=0.1, momentum=0.9)
EAGER = dict(backend='eager')
AOT = dict(backend='aot_eager')


def wrapper(level: str, **words: Any) -> dict[str, Any]:
    return dict(type='AmpOptimWrapper', opt_level=level, optimizer=copy.deepcopy(SGD), **words)


@pytest.mark.parametrize('runner', [toy.run, toy.run_flexible])
@pytest.mark.parametrize('level', but(['O1', 'O2', 'O5'], toy.LEVELS, long))
def test_forward_and_loss_are_one_graph(level: str, runner: Any, tmp_path: Path) -> None:
    with toy.run_log() as lines, fresh() as counters:
        compiled = runner(tmp_path / 'compiled', wrapper(level), compile=dict(AOT), log_level='INFO')
        # one for training and one for validation
        assert counters['stats']['unique_graphs'] == 2
        assert not counters['graph_break']
        # Runner asks again before each validation
        compiled.val()
        inner = compiled.model
        assert 'train_step' not in vars(inner) and inner._compiled_call_impl is not None
    said = [line for line in lines if line.startswith('torch.compile')]
    assert len(said) == 2
    assert 'compiles the forward calls of the model (ToyModel), losses included' in said[0]
    assert "backend='aot_eager'" in said[0]
    # the forward call is compiled again for the other mode, in which the validation calls it
    assert said[1] == 'torch.compile after 10 iterations: 2 graphs, 0 breaks, 1 recompilation'
    eager = runner(tmp_path / 'eager', wrapper(level))
    for name, tensor in eager.model.state_dict().items():
        assert torch.allclose(compiled.model.state_dict()[name].double(), tensor.double(), rtol=0.05, atol=0.02), name


@pytest.mark.parametrize('words', [True, False, None, {}])
def test_bool_none_and_a_dict(words: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(nn.Module, 'compile', lambda self, **options: seen.append(options))
    config = dict(words) if isinstance(words, dict) else words
    toy.run(tmp_path, wrapper('O5'), compile=config)
    assert seen == ([{}] if words or words == {} else [])


@pytest.mark.parametrize(
    ('words', 'message'),
    [
        ('yes', r"compile='yes' must be a bool, or a dict"),
        (dict(backend='inducto'), r"compile=.*there is no backend 'inducto'; torch has .*inductor"),
        (dict(speed=9), r'compile=.*is not what torch.compile takes'),
        (dict(options=dict(freezing=True)), r'freezing makes constants of weights'),
    ],
)
def test_bad_words(words: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(AmpConfigError, match=message):
        toy.run(tmp_path, wrapper('O5'), compile=words)


def test_without_a_compiler(tmp_path: Path) -> None:
    from torch._inductor import config, cpp_builder

    forget = getattr(cpp_builder.get_cpp_compiler, 'cache_clear', lambda: None)
    forget()
    try:
        with config.patch({'cpp.cxx': ('no-such-compiler',)}):
            with pytest.raises(AmpConfigError, match=r'needs a C\+\+ compiler.*Install g\+\+.*aot_eager'):
                toy.run(tmp_path, wrapper('O5'), compile=True)
    finally:
        forget()


def test_o0_equals_mmengine(tmp_path: Path) -> None:
    """Compiled by the backend that runs graphs as they are, and plain."""
    # another model of the same class is attached, which wraps methods of the class, and goes away in between
    other = [toy.ToyModel() for _ in range(3)]
    for model in other:
        AmpOptimWrapper(opt_level='O2', optimizer=torch.optim.SGD(model.parameters(), lr=0.1)).attach(model)
    stock = dict(type='OptimWrapper', optimizer=copy.deepcopy(SGD))
    expected = toy.run(tmp_path / 'stock', stock).model.state_dict()
    for name, words in dict(plain={}, compiled=dict(compile=EAGER)).items():
        found = toy.run(tmp_path / name, wrapper('O0'), **copy.deepcopy(words)).model.state_dict()
        assert differences(found, expected) == []
        other.pop()
        gc.collect()
    # mmengine compiles the step of the optimizer as well, which some versions of torch write in another way
    stock = dict(type='OptimWrapper', optimizer=copy.deepcopy(SGD))
    found = toy.run(tmp_path / 'stock compiled', stock, compile=copy.deepcopy(EAGER)).model.state_dict()
    for key, tensor in expected.items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('level', but(['O1', 'O5'], ['O1', 'O2', 'O4', 'O5'], long))
def test_resumed_equals_uninterrupted(level: str, tmp_path: Path) -> None:
    """With the averages of EMAHook, and validations in between."""
    words: dict[str, Any] = dict(
        compile=dict(AOT),
        custom_hooks=[
            dict(type='EMAHook', ema_type='ExponentialMovingAverage', momentum=0.1),
            dict(type='amp_wrapper.ExactResumeHook'),
        ],
        default_hooks=dict(
            checkpoint=dict(type='CheckpointHook', interval=1), logger=dict(type='LoggerHook', interval=1)
        ),
    )
    cycle = dict(by_epoch=True, max_epochs=3, val_interval=1)
    with fresh():
        toy.run(tmp_path / 'whole', wrapper(level), train_cfg=dict(cycle), **copy.deepcopy(words))
    (tmp_path / 'again').mkdir()
    shutil.copy(tmp_path / 'whole' / 'epoch_1.pth', tmp_path / 'again' / 'epoch_1.pth')
    with fresh():
        toy.run(
            tmp_path / 'again',
            wrapper(level),
            train_cfg=dict(cycle),
            resume=True,
            load_from=str(tmp_path / 'again' / 'epoch_1.pth'),
            **copy.deepcopy(words),
        )
    files = [torch.load(tmp_path / name / 'epoch_3.pth', weights_only=False) for name in ('whole', 'again')]
    for part in ('state_dict', 'ema_state_dict'):
        assert differences(*[file[part] for file in files]) == []
    assert differences(*[file['optimizer']['state'] for file in files]) == []
    assert files[0]['optimizer'].get('loss_scaler') == files[1]['optimizer'].get('loss_scaler')


def test_a_level_that_changes_on_resume(tmp_path: Path) -> None:
    words: dict[str, Any] = dict(
        compile=dict(AOT), default_hooks=dict(checkpoint=dict(type='CheckpointHook', interval=1))
    )
    with fresh():
        toy.run(tmp_path, wrapper('O5'), **copy.deepcopy(words))
        cycle = dict(by_epoch=True, max_epochs=4, val_interval=1)
        for level in ('O4', 'O2', 'O0'):
            cycle['max_epochs'] += 1
            runner = toy.run(tmp_path, wrapper(level), resume=True, train_cfg=dict(cycle), **copy.deepcopy(words))
            assert runner.epoch == cycle['max_epochs']
            types = {parameter.dtype for parameter in runner.model.parameters()}
            assert (torch.float16 in types) == (level == 'O2')


@MODELS.register_module()
class TwoForwards(toy.ToyModel):
    """A train_step of its own that calls its parts, as a GAN has it."""

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, torch.Tensor]:
        with optim_wrapper.optim_context(self):
            data = self.data_preprocessor(data, True)
            losses = self(**data, mode='loss') if isinstance(data, dict) else self(*data, mode='loss')
        parsed, log = self.parse_losses(losses)
        optim_wrapper.update_params(parsed)
        return log


def test_a_train_step_of_its_own(tmp_path: Path) -> None:
    with toy.run_log() as lines, fresh():
        toy.run(tmp_path, wrapper('O5'), compile=dict(EAGER), model=dict(type='TwoForwards'), log_level='INFO')
    said = next(line for line in lines if line.startswith('torch.compile compiles'))
    assert 'the model (TwoForwards), ' in said and said.count('(') > 2


def test_other_wrappers_are_left_to_mmengine(tmp_path: Path) -> None:
    with fresh():
        runner = toy.run(tmp_path, dict(type='OptimWrapper', optimizer=copy.deepcopy(SGD)), compile=dict(EAGER))
        assert 'train_step' in vars(runner.model)
