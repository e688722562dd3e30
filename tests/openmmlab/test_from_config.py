"""What a config trains, built without a runner: the same as a runner would build, and nothing is left behind."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toy
from bits import differences
from mmengine.optim import OptimWrapper
from mmengine.registry import MODELS, OPTIM_WRAPPER_CONSTRUCTORS, OPTIM_WRAPPERS, DefaultScope
from mmengine.runner import Runner
from torch import Tensor

from amp_wrapper import AmpOptimWrapper
from amp_wrapper.checkpoint import random_state
from amp_wrapper.diagnostics.sandbox import sandbox
from amp_wrapper.errors import AmpCheckpointError, AmpConfigError, AmpUsageError
from amp_wrapper.openmmlab import reporting, suggesting
from amp_wrapper.openmmlab.from_config import from_config

WRAPPER = dict(
    type='AmpOptimWrapper',
    opt_level='O2',
    keep_fp32=['fc'],
    optimizer=dict(type='SGD', lr=0.2, momentum=0.9, weight_decay=1e-3),
    accumulative_counts=2,
    clip_grad=dict(max_norm=0.5),
    paramwise_cfg=dict(bias_decay_mult=0.0, custom_keys=dict(fc=dict(lr_mult=0.5))),
)


@MODELS.register_module()
class OwnStep(toy.ToyModel):
    """A model with a ``train_step`` of its own."""

    def train_step(self, data: Any, optim_wrapper: Any) -> Any:
        return super().train_step(data, optim_wrapper)


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class TwoOptimizers:
    """Builds two wrappers although the config looks like one."""

    def __init__(self, optim_wrapper_cfg: Any, paramwise_cfg: Any = None) -> None:
        self.words = optim_wrapper_cfg

    def __call__(self, model: Any) -> Any:
        from mmengine.optim import OptimWrapperDict

        parts = {name: torch.optim.SGD(getattr(model, name).parameters(), lr=0.1) for name in ('conv', 'fc')}
        return OptimWrapperDict(**{name: OptimWrapper(optimizer) for name, optimizer in parts.items()})


@OPTIM_WRAPPERS.register_module()
class FixedLevel(AmpOptimWrapper):
    """Chooses its level, clipping and accumulation itself."""

    def __init__(self, warm: int = 3, **kwargs: Any) -> None:
        words = dict(clip_grad=dict(type='value', clip_value=0.5), accumulative_counts=3)
        super().__init__(opt_level='O2', keep_fp32=['fc'], **words, **kwargs)
        self.warm = warm


@OPTIM_WRAPPERS.register_module()
class PlainWithWord(OptimWrapper):
    """A wrapper without mixed precision, with a word of its own."""

    def __init__(self, *args: Any, extra: int = 1, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class FixedByConstructor:
    """Builds a wrapper that the config does not name."""

    def __init__(self, optim_wrapper_cfg: Any, paramwise_cfg: Any = None) -> None:
        self.words = optim_wrapper_cfg

    def __call__(self, model: Any) -> Any:
        return AmpOptimWrapper(opt_level='O5', optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


BUILT = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)


@pytest.fixture
def config(tmp_path: Path) -> Any:
    return toy.toy_config(tmp_path / 'work', copy.deepcopy(WRAPPER))


def test_model_optimizer_batches_and_loss_are_those_of_a_runner(config: Any) -> None:
    built = from_config(config)
    runner = Runner.from_cfg(copy.deepcopy(config))
    runner.model.load_state_dict(built.model.state_dict())
    wrapper = runner.build_optim_wrapper(copy.deepcopy(config.optim_wrapper))
    theirs, ours = wrapper.optimizer, built.make_optimizer(built.model)
    assert type(ours) is type(theirs)
    names = {id(p): name for model in (runner.model, built.model) for name, p in model.named_parameters()}

    def groups(optimizer: torch.optim.Optimizer) -> list[Any]:
        return [{**group, 'params': [names[id(p)] for p in group['params']]} for group in optimizer.param_groups]

    # mmengine appends a group without parameters to what it keeps of several groups
    assert groups(ours) == groups(theirs)[: len(groups(ours))]
    assert [group['lr'] for group in ours.param_groups][-2:] == [0.1, 0.1]
    batch = built.batches(1)[0]
    data = runner.model.data_preprocessor(copy.deepcopy(batch), True)
    loss = runner.model.parse_losses(runner.model._run_forward(data, mode='loss'))[0]
    assert differences(loss, built.loss_fn(built.model, batch)) == []
    assert built.model.training


def test_settings(config: Any) -> None:
    settings = from_config(config).settings
    assert (settings.opt_level, dict(settings.overrides)) == ('O2', dict(keep_fp32=['fc']))
    assert settings.clip_grad == dict(max_norm=0.5)
    assert settings.accumulative_counts == 2
    assert settings.policy('O5').cast_model_type is torch.bfloat16
    assert settings.policy('O5').keep_fp32 == ('fc',)


@pytest.mark.parametrize(
    'words, level, overrides',
    [
        (dict(), 'O0', {}),
        (dict(type='OptimWrapper'), 'O0', {}),
        (dict(type='AmpOptimWrapper'), 'O1', {}),
        (dict(type='ApexOptimWrapper', opt_level='O3'), 'O3', dict(loss_scale='dynamic')),
        (dict(type='TorchAmpOptimWrapper', dtype='bfloat16'), 'O4', {}),
        (dict(type='TorchAmpOptimWrapper', loss_scale=512.0), 'O1', dict(loss_scale=512.0)),
        (dict(type='AmpOptimWrapper', dtype='bfloat16'), 'O4', {}),
        (dict(type='AmpOptimWrapper', loss_scale='dynamic'), 'O1', {}),
        (dict(type='FixedLevel'), 'O2', dict(keep_fp32=['fc'])),
        (dict(constructor='FixedByConstructor'), 'O5', {}),
    ],
)
def test_levels_of_other_wrappers(config: Any, words: Any, level: str, overrides: Any) -> None:
    config.optim_wrapper = dict(optimizer=dict(type='SGD', lr=0.1), **words)
    settings = from_config(config).settings
    assert (settings.opt_level, dict(settings.overrides)) == (level, overrides)


def test_what_a_class_of_the_user_fixes_is_what_is_tried(config: Any) -> None:
    config.optim_wrapper = dict(type='FixedLevel', warm=2, optimizer=dict(type='SGD', lr=0.1))
    built = from_config(config)
    assert built.settings.clip_grad == dict(type='value', clip_value=0.5)
    assert built.settings.accumulative_counts == 3
    found = reporting.report_of(built, 'toy.py')
    assert found.data['policy'].startswith('O2')
    assert [module['kept']['rule'] for module in found.data['modules'] if module['name'] == 'fc'] == ['keep_fp32']
    config.optim_wrapper.wram = 2
    with pytest.raises(AmpConfigError, match="'wram'"):
        from_config(config)
    config.optim_wrapper = dict(type='PlainWithWord', extras=2, optimizer=dict(type='SGD', lr=0.1))
    with pytest.raises(AmpConfigError, match="'extras'"):
        from_config(config)


def test_an_optimizer_whose_state_is_divided_among_processes_is_the_one_inside_of_it(config: Any) -> None:
    inner = dict(type='ZeroRedundancyOptimizer', optimizer_type='AdamW', lr=0.25, parameters_as_bucket_view=True)
    config.optim_wrapper = dict(type='OptimWrapper', optimizer=inner, accumulative_counts=np.int64(2))
    built = from_config(config)
    made = built.make_optimizer(built.model)
    assert type(made) is torch.optim.AdamW
    assert made.param_groups[0]['lr'] == 0.25
    assert built.settings.accumulative_counts == 2


def test_nothing_is_left_behind(config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before, words = random_state.capture(), copy.deepcopy(config)
    scope = vars(DefaultScope.get_current_instance())
    built = from_config(config)
    batch = built.batches(2)[1]
    kept = copy.deepcopy(batch)
    built.loss_fn(built.model, batch)
    built.make_optimizer(built.model)
    assert differences(before, random_state.capture()) == []
    assert os.listdir(tmp_path) == []
    assert config.to_dict() == words.to_dict() == built.config.to_dict()
    # mmengine puts a copy of it back
    assert vars(DefaultScope.get_current_instance()) == scope
    assert differences(kept, batch) == []


@MODELS.register_module()
class WritingPreprocessor(toy.ToyPreprocessor):
    """Writes into what it is given, as those of some projects do."""

    def forward(self, data: dict[str, Any], training: bool = False) -> dict[str, Any]:
        data['inputs'] += 1
        return super().forward(data, training)


def test_a_batch_serves_several_times(config: Any) -> None:
    built = from_config(config)
    built.model.data_preprocessor = WritingPreprocessor()
    batch = built.batches(1)[0]
    kept = copy.deepcopy(batch)
    first = built.loss_fn(built.model, batch).detach()
    assert differences(first, built.loss_fn(built.model, batch).detach()) == []
    assert differences(kept, batch) == []


def test_batches_are_the_first_ones_and_the_data_begins_anew(config: Any) -> None:
    config.train_dataloader = toy.loader(shuffle=False, length=6, num_workers=2)
    found = from_config(config).batches(3)
    assert [batch['labels'].tolist() for batch in found] == [[0, 1, 2, 0], [1, 2], [0, 1, 2, 0]]
    again = from_config(toy.toy_config('nowhere', copy.deepcopy(WRAPPER)))
    assert differences(again.batches(2), again.batches(2)) == []


def test_a_checkpoint_is_loaded(config: Any, tmp_path: Path) -> None:
    weights = {name: tensor + 1 for name, tensor in from_config(config).model.state_dict().items()}
    place = tmp_path / 'trained.pth'
    torch.save({'state_dict': {f'module.{name}': tensor for name, tensor in weights.items()}}, place)
    for built in (
        from_config(config, checkpoint=place),
        from_config(config, {'load_from': str(place)}, checkpoint=place),
    ):
        assert differences(weights, dict(built.model.state_dict())) == []
    config.load_from = str(place)
    assert differences(weights, dict(from_config(config).model.state_dict())) == []
    place.write_bytes(b'damaged')
    with pytest.raises(AmpCheckpointError):
        from_config(config)


@pytest.mark.filterwarnings('ignore:torch.utils.checkpoint')
def test_activation_checkpointing_is_turned_on_for_copies_alone(config: Any) -> None:
    config.activation_checkpointing = ['norm']
    built = from_config(config)
    batch = built.batches(1)[0]
    with sandbox(built.model, built.settings.policy(), built.make_optimizer, built.attach) as box:
        with box.forward():
            loss = built.loss_fn(box.model, batch)
        assert 'forward' in vars(box.model.norm)
        loss.backward()
        assert box.model.norm.weight.grad is not None
    assert 'forward' not in vars(built.model.norm)
    assert built.model.norm.weight.grad is None


def test_generated_batches(config: Any) -> None:
    built = from_config(config, input_shape=(1, 5, 7))
    first, second = built.batches(2)
    assert first['inputs'].shape == (4, 1, 5, 7)
    assert not torch.equal(first['inputs'], second['inputs'])
    assert 0 <= int(first['labels'].min()) <= int(first['labels'].max()) < 3
    assert built.loss_fn(built.model, first).isfinite()
    assert from_config(config, input_shape=(2, 1, 5, 7)).batches(1)[0]['inputs'].shape == (2, 1, 5, 7)


@MODELS.register_module()
class OtherInputs(toy.ToyModel):
    """A model whose data cannot be guessed."""

    def forward(self, points: Tensor, mode: str = 'tensor') -> Any:
        return points


@pytest.mark.parametrize(
    'change, error, words',
    [
        (dict(optim_wrapper=None), AmpConfigError, 'no optim_wrapper'),
        (
            dict(
                optim_wrapper=dict(a=dict(optimizer=dict(type='SGD', lr=1)), b=dict(optimizer=dict(type='SGD', lr=1)))
            ),
            AmpConfigError,
            r'several optimizers \(a, b\).*amp\.report',
        ),
        (dict(optim_wrapper=dict(optimizer={}, type='Nothing')), AmpConfigError, "'Nothing' is not registered"),
        (
            dict(optim_wrapper=dict(optimizer=dict(type='SGD', lr=1), type='AmpOptimWrapper', opt_level='O9')),
            AmpConfigError,
            'O9',
        ),
        (dict(optim_wrapper=dict(optimizer='AdamW')), AmpConfigError, "optimizer='AdamW' must be a dict: write"),
        (dict(optim_wrapper=dict(optimizer=None)), AmpConfigError, 'optimizer=None must be a dict: write'),
        (dict(optim_wrapper=dict(optimizer=dict(lr=1))), AmpConfigError, r"optimizer=\{'lr': 1\} has no type: write"),
        (dict(optim_wrapper=dict(optimizer=BUILT)), AmpConfigError, 'optimizer=SGD is built already'),
        (dict(optim_wrapper=OptimWrapper(BUILT)), AmpConfigError, 'optim_wrapper=OptimWrapper is built already'),
        (dict(optim_wrapper=[dict(optimizer={})]), AmpConfigError, 'optim_wrapper=list must be a dict: write'),
        (
            dict(optim_wrapper=dict(optimizer=dict(type='SGD', lr=1), type='OptimWraper')),
            AmpConfigError,
            r"type='OptimWraper' is not registered \(did you mean 'OptimWrapper'\?\)",
        ),
        (dict(model=dict(type='OwnStep')), AmpConfigError, 'OwnStep has a train_step of its own'),
        (dict(model=dict(type='ToyPreprocessor')), AmpConfigError, 'no mmengine BaseModel'),
        (dict(model=dict(type='ToyModel', width=-1)), AmpConfigError, 'cannot be built'),
        (dict(load_from='nothing.pth'), AmpUsageError, "checkpoint 'nothing.pth' does not exist"),
    ],
)
def test_configs_that_cannot_be_used(config: Any, change: Any, error: type[Exception], words: str) -> None:
    for key, value in change.items():
        config[key] = value
    with pytest.raises(error, match=words):
        from_config(config)


def test_data_that_cannot_be_read(config: Any) -> None:
    config.train_dataloader.dataset = dict(type='ToyData', length='many')
    with pytest.raises(AmpUsageError, match=r'training data cannot be read.*--input-shape 3 224 224'):
        from_config(config).batches(1)
    config.train_dataloader = None
    with pytest.raises(AmpUsageError, match='no train_dataloader: give --input-shape'):
        from_config(config).batches(1)
    with pytest.raises(AmpUsageError, match='--input-shape 3 224: must be C H W'):
        from_config(config, input_shape=(3, 224))
    config.model = dict(type='OtherInputs')
    with pytest.raises(AmpUsageError, match='no data can be generated for OtherInputs'):
        from_config(config, input_shape=(3, 8, 8)).batches(1)


def test_a_constructor_that_makes_several_optimizers(config: Any) -> None:
    config.optim_wrapper = dict(constructor='TwoOptimizers', optimizer=dict(type='SGD', lr=0.1))
    with pytest.raises(AmpConfigError, match='builds 2 optimizers'):
        from_config(config)


@pytest.mark.parametrize(
    'words, text',
    [
        (dict(optimizer=dict(type='SGDD', lr=0.1)), "type='SGDD' is not registered (did you mean 'SGD'?)"),
        (dict(optimizer=dict(type='SGD', lr=-1.0)), 'Invalid learning rate: -1.0'),
        (dict(optimizer=dict(type='SGD', lr=0.1, betas=1)), "'betas'"),
        (dict(paramwise_cfg=dict(custom_keys=3)), 'custom_keys'),
        (dict(constructor='Nobody'), 'Nobody'),
        (dict(opt_levl='O5'), 'opt_levl'),
        (dict(clip_grad=dict(max_nrm=1.0)), 'max_nrm'),
        (dict(accumulative_counts='two'), "accumulative_counts='two'"),
        (dict(type='OptimWrapper', opt_level='O2'), 'opt_level'),
    ],
)
def test_mistakes_in_the_optimizer_wrapper_come_first_and_in_a_line(config: Any, words: Any, text: str) -> None:
    config.optim_wrapper.update(words)
    if words.get('type') == 'OptimWrapper':
        config.optim_wrapper.pop('keep_fp32')
    with pytest.raises(AmpConfigError) as caught:
        from_config(config)
    assert text in str(caught.value)
    assert '\n' not in str(caught.value)


def test_mistakes_in_activation_checkpointing(config: Any) -> None:
    config.activation_checkpointing = ['convolution']
    with pytest.raises(AmpConfigError, match=r'activation_checkpointing=.*convolution.* does not fit the model'):
        reporting.report_of(from_config(config), 'toy.py')


def test_a_model_that_fails_on_the_data(config: Any) -> None:
    built = from_config(config, input_shape=(7, 6, 6))
    with pytest.raises(AmpUsageError, match=r'fails at O0 \(RuntimeError: .*with --input-shape 7 6 6') as caught:
        reporting.report_of(built, 'toy.py')
    assert '\n' not in str(caught.value)
    assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(AmpUsageError, match=r'fails at O0 .*with --input-shape 7 6 6'):
        suggesting.suggest_for(built, levels=['O5'], steps=4, progress=False)


def test_the_report_of_a_config(config: Any) -> None:
    found = reporting.report_of(from_config(config), 'toy.py')
    modules = {module['name']: module for module in found.data['modules']}
    assert (found.data['title'], found.data['level'], found.data['optimizer']) == ('toy.py', 'O2', 'SGD')
    assert [(op['op'], op['rule']) for op in modules['fc']['fp32_ops']] == [('addmm', 'keep_fp32')]
    assert [(op['op'], op['rule']) for op in modules['bn']['fp32_ops']] == [('native_batch_norm', 'batchnorm')]
    assert modules['conv']['weights']['masters'] == 'float32'
    # the loss is inside of forward
    assert {('_log_softmax', 'registry'), ('nll_loss_forward', 'registry')} <= {
        (op['op'], op['rule']) for op in modules['']['fp32_ops']
    }
    # preprocessors are left alone
    assert modules['data_preprocessor']['outputs']['computed'] == ['float32']
    assert [level for level, counted in found.data['memory'].items() if 'error' in counted] == []
    assert reporting.report_of(from_config(config), 'toy.py', 'O4').data['policy'].startswith('O4')


def test_two_reports_are_the_same(config: Any) -> None:
    config.model = dict(type='ToyModel', dropout=0.5)
    torch.manual_seed(1)
    first = reporting.report_of(from_config(config), 'toy.py')
    torch.manual_seed(2)
    assert reporting.report_of(from_config(config), 'toy.py').json() == first.json()
