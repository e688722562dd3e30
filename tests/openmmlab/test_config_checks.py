"""What is checked in a config before anything is built: keys of the command line, wrappers, loops, checkpoints, data."""

from __future__ import annotations

import copy
import inspect
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mmengine.runner
import pytest
import torch
from mmengine.config import Config
from mmengine.registry import LOOPS, MODELS, OPTIM_WRAPPERS
from mmengine.runner import EpochBasedTrainLoop

from amp_wrapper import AmpCheckpointError, AmpConfigError, AmpOptimWrapper, AmpUsageError, cli
from amp_wrapper.checkpoint import sharded
from amp_wrapper.openmmlab import config_checks, testing, training
from amp_wrapper.openmmlab.config_options import known_keys, merge_options, nested_keys, read_config

ROOT = Path(__file__).resolve().parents[2]
SGD = dict(type='SGD', lr=0.1)


# -- keys of --cfg-options --------------------------------------------------------------------------------------------


def small_config() -> Config:
    return Config(dict(model=dict(type='X'), optim_wrapper=dict(optimizer=SGD), my_own_switch=1, train_pipeline=[]))


@pytest.mark.parametrize(
    ('option', 'near'),
    [
        ('optim_wraper.opt_level', 'optim_wrapper'),
        ('train_dataloder.batch_size', 'train_dataloader'),
        ('param_schedulers.T_max', 'param_scheduler'),
        ('custom_hook.0.interval', 'custom_hooks'),
        ('load_form', 'load_from'),
        ('rseume', 'resume'),
        ('compile_', 'compile'),
        ('my_own_swich', 'my_own_switch'),
    ],
)
def test_a_misspelt_key_is_refused(option: str, near: str) -> None:
    cfg = small_config()
    before = copy.deepcopy(cfg.to_dict())
    with pytest.raises(AmpConfigError) as caught:
        merge_options(cfg, {'model.type': 'Y', option: 1})
    assert f'--cfg-options {option}: ' in str(caught.value) and f"(did you mean '{near}'?)" in str(caught.value)
    assert cfg.to_dict() == before


def test_keys_that_mmengine_reads_are_legitimate_where_the_config_has_none(capsys: pytest.CaptureFixture[str]) -> None:
    cfg = small_config()
    options = {key: None for key in known_keys() if key not in cfg and key != 'data_root'}
    assert len(options) > 20
    merge_options(cfg, options)
    assert set(options) <= set(cfg) and capsys.readouterr().err == ''


@pytest.mark.parametrize('key', ['seed', 'val_pipeline', 'dataset_type', 'my_hook_reads_this', 'tta_model'])
def test_a_key_for_code_of_the_user_gets_a_warning(
    key: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = small_config()
    merge_options(cfg, {f'{key}.x': 3})
    assert cfg[key] == dict(x=3)
    said = capsys.readouterr().err
    assert said.startswith(f'warning: --cfg-options {key}.x: ') and said.count('\n') == 1
    # once, not on every rank
    monkeypatch.setenv('RANK', '1')
    merge_options(small_config(), {key: 3})
    assert capsys.readouterr().err == ''


def test_the_keys_are_all_that_mmengine_reads() -> None:
    found = set()
    for name in ('runner', '_flexible_runner'):
        path = Path(inspect.getfile(mmengine.runner)).with_name(f'{name}.py')
        found |= set(re.findall(r"\bcfg(?:\.get\(\s*|\[)'(\w+)'", path.read_text()))
    assert {'sync_bn', 'compile', 'train_dataloader'} <= found
    assert found <= set(known_keys())


# -- wrappers ---------------------------------------------------------------------------------------------------------


def problems(check: Any, *args: Any) -> tuple[str, ...]:
    with pytest.raises(AmpConfigError) as caught:
        check(*args)
    return caught.value.problems


@pytest.mark.parametrize(
    'kind', ['AmpOptimWrapper', 'amp_wrapper.AmpOptimWrapper', 'ApexOptimWrapper', AmpOptimWrapper]
)
@pytest.mark.parametrize(
    ('words', 'text'),
    [
        (dict(opt_level='O7'), "opt_level='O7' is no opt level."),
        (dict(opt_level='o2'), "Write 'O2'"),
        (dict(opt_levl='O2'), "unknown argument 'opt_levl' (did you mean 'opt_level'?)"),
        (dict(loss_scale=-1), 'loss_scale=-1 must be'),
        (dict(opt_level='O1', master_weights=True), 'master_weights=True conflicts'),
        (dict(on_skip='wait'), "on_skip='wait' must be"),
        (dict(clip_grad=dict(max_nrm=1)), "clip_grad has an unknown key 'max_nrm'"),
        (dict(accumulative_counts=0), 'accumulative_counts=0 must be'),
    ],
    ids=str,
)
def test_a_wrapper_is_read_as_its_constructor_will(kind: Any, words: dict[str, Any], text: str) -> None:
    """The messages are those of the constructor."""
    wrapper = dict(type=kind, optimizer=SGD, paramwise_cfg=dict(norm_decay_mult=0), **words)
    cfg = Config(dict(optim_wrapper=wrapper))
    before = copy.deepcopy(cfg.to_dict())
    found = problems(config_checks.check_wrappers, cfg)
    assert cfg.to_dict() == before and any(text in problem for problem in found)
    model = torch.nn.Linear(2, 2)
    built = dict(wrapper, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    del built['paramwise_cfg']
    assert found == problems(OPTIM_WRAPPERS.build, built)


def test_wrappers_that_are_right_or_of_others_pass() -> None:
    class MyWrapper(AmpOptimWrapper):
        def __init__(self, own: int, **words: Any) -> None:
            super().__init__(**words)

    for wrapper in (
        dict(type='AmpOptimWrapper', opt_level='O2', dtype='bf16', optimizer=SGD, clip_grad=dict(max_norm=1.0)),
        dict(type='ApexOptimWrapper', opt_level='O2', optimizer=SGD),
        dict(type='OptimWrapper', opt_level='O9', optimizer=SGD),
        dict(type=MyWrapper, own=3, optimizer=SGD),
        dict(type='AmpOptimWrapper', constructor='Mine', optimizer=SGD, what_mine_reads=3),
        dict(type='Nobody', optimizer=SGD),
    ):
        config_checks.check_wrappers(Config(dict(optim_wrapper=wrapper)))
    config_checks.check_wrappers(Config(dict(optim_wrapper=None)))
    for path in sorted((ROOT / 'configs' / 'digits').glob('*.py')):
        cfg = read_config(path)
        config_checks.check_wrappers(cfg)
        config_checks.check_loops(cfg, 'train_cfg', 'val_cfg', 'test_cfg')
    # as a base of another project gives it
    config_checks.check_loops(Config(dict(val_cfg=dict(type='ValLoop', _scope_='mmseg'))), 'val_cfg')


def test_members_are_named() -> None:
    right, wrong = (dict(type='AmpOptimWrapper', opt_level=level, optimizer=SGD) for level in ('O2', 'O8'))
    found = problems(config_checks.check_wrappers, Config(dict(optim_wrapper=dict(constructor='C', a=right, b=wrong))))
    assert len(found) == 1 and found[0].startswith("optim_wrapper.b: opt_level='O8' is no opt level.")
    # a constructor of the user's may take entries of its own, but a level is a level
    one = dict(wrong, constructor='C', own=3)
    assert len(problems(config_checks.check_wrappers, Config(dict(optim_wrapper=one)))) == 1


# -- loops ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('words', 'text'),
    [
        (
            dict(by_epoch=True, max_epoch=3),
            "'max_epoch' (did you mean 'max_epochs'?): EpochBasedTrainLoop takes max_epochs, ",
        ),
        (dict(by_epoch=False, max_iter=3), "'max_iter' (did you mean 'max_iters'?): IterBasedTrainLoop takes"),
        (
            dict(type='EpochBasedTrainLoop', max_epochs=3, val_intervall=1),
            "'val_intervall' (did you mean 'val_interval'?)",
        ),
        (dict(type=EpochBasedTrainLoop, max_epochs=3, foo=1), "'foo': EpochBasedTrainLoop takes"),
    ],
    ids=str,
)
def test_an_entry_that_a_loop_does_not_take(words: dict[str, Any], text: str) -> None:
    (found,) = problems(config_checks.check_loops, Config(dict(train_cfg=words)), 'train_cfg')
    assert found.startswith('train_cfg has an unknown key ') and text in found


def test_loops_that_are_right_or_of_others_pass() -> None:
    @LOOPS.register_module(force=True)
    class AnyLoop:
        def __init__(self, runner: Any, dataloader: Any, **words: Any) -> None: ...

    for words in (
        dict(by_epoch=True, max_epochs=3, val_interval=2, val_begin=1, dynamic_intervals=[(2, 1)]),
        dict(by_epoch=False, max_iters=3),
        dict(type='AnyLoop', whatever=1),
        dict(type='Nobody', whatever=1),
        None,
    ):
        config_checks.check_loops(Config(dict(train_cfg=words)), 'train_cfg')
    config_checks.check_loops(Config(dict(val_cfg=dict(fp16=True), test_cfg=dict())), 'val_cfg', 'test_cfg')
    found = problems(config_checks.check_loops, Config(dict(test_cfg=dict(fp_16=True))), 'test_cfg')
    assert "test_cfg has an unknown key 'fp_16' (did you mean 'fp16'?): TestLoop takes fp16" in found[0]


# -- checkpoints and data ---------------------------------------------------------------------------------------------


def test_checkpoints(tmp_path: Path) -> None:
    torch.save(dict(state_dict={}), tmp_path / 'good.pth')
    sharded.save(dict(state_dict=dict(weight=torch.ones(3))), tmp_path / 'folder')
    for good in (None, 'https://nobody.invalid/x.pth', 'torchvision://resnet50', 's3:bucket/x.pth'):
        config_checks.check_checkpoint(good)
    for name in ('good.pth', 'folder'):
        config_checks.check_checkpoint(str(tmp_path / name))
    (tmp_path / 'text.pth').write_text('# no checkpoint\n')
    (tmp_path / 'cut.pth').write_bytes((tmp_path / 'good.pth').read_bytes()[:200])
    (tmp_path / 'empty').mkdir()
    for name, text in (
        ('none.pth', 'none.pth is not there'),
        ('text.pth', 'text.pth is no checkpoint, or a damaged one'),
        ('cut.pth', 'cut.pth is truncated'),
        ('empty', 'empty is no complete checkpoint'),
    ):
        with pytest.raises(AmpCheckpointError) as caught:
            config_checks.check_checkpoint(str(tmp_path / name))
        assert text in str(caught.value) and '\n' not in str(caught.value) and 'weights_only' not in str(caught.value)


def test_missing_data_are_one_line() -> None:
    raised: list[Exception] = [FileNotFoundError(2, 'No such file or directory', '/nowhere/a.json')]

    def build(config: Any, seed: int = 0) -> str:
        if raised:
            raise raised.pop()
        return f'{config} {seed}'

    runner = SimpleNamespace(build_dataloader=build, build_evaluator=build)
    config_checks.say_where_data_are_missing(runner)
    with pytest.raises(AmpUsageError) as caught:
        runner.build_dataloader({})
    text = str(caught.value)
    assert text.startswith('the data cannot be read: ') and "'/nowhere/a.json'" in text and 'data_root=PATH' in text
    assert '\n' not in text
    assert runner.build_evaluator('x', seed=3) == 'x 3'
    # a defect of a data set keeps its traceback
    raised.append(KeyError('image'))
    with pytest.raises(KeyError):
        runner.build_dataloader({})


TRAINED = 'configs/digits/cnn_o2.py'


@pytest.mark.parametrize(
    ('option', 'text'),
    [
        ('optim_wrapper.optimizer.lrr', "SGD takes no 'lrr' (did you mean 'lr'?)."),
        ('train_dataloader.batchsize', "DataLoader takes no 'batchsize' (did you mean 'batch_size'?)."),
        ('train_dataloader.sampler.shufle', "DefaultSampler takes no 'shufle' (did you mean 'shuffle'?)."),
        ('model.bakbone', "ImageClassifier takes no 'bakbone' (did you mean 'backbone'?)."),
        (
            'default_hooks.checkpoint.intervall',
            "Runner.save_checkpoint takes no 'intervall' (did you mean 'interval'?).",
        ),
    ],
)
def test_an_entry_that_a_class_refuses(option: str, text: str, tmp_path: Path) -> None:
    words = ['--work-dir', str(tmp_path), '--cfg-options', f'{option}=1', 'train_cfg.max_epochs=1']
    parser = cli.parser_of('train')[1]
    with pytest.raises(AmpConfigError) as caught:
        training.train(parser.parse_args([str(ROOT / TRAINED), *words]))
    assert str(caught.value) == f'--cfg-options {option}: {text}'


def test_an_entry_that_a_class_refuses_when_a_model_is_tested(tmp_path: Path) -> None:
    checkpoint = tmp_path / 'model.pth'
    torch.save({'state_dict': {}}, checkpoint)
    words = ['--work-dir', str(tmp_path), '--cfg-options', 'test_dataloader.batchsize=1']
    with pytest.raises(AmpConfigError) as caught:
        testing.test(cli.parser_of('test')[1].parse_args([str(ROOT / TRAINED), str(checkpoint), *words]))
    assert str(caught.value) == (
        "--cfg-options test_dataloader.batchsize: DataLoader takes no 'batchsize' (did you mean 'batch_size'?)."
    )


def test_errors_of_user_code_keep_their_traceback() -> None:
    def takes_little(a: int) -> None:
        """Of the user's project: its caller hands on too much."""

    cfg = Config(dict(model=dict(type='X', width=1)))
    for options in ({'model.depth': 3}, {'model.width': 2}, None):
        with pytest.raises(TypeError, match='depth') as caught, nested_keys(cfg, options):
            takes_little(depth=3)  # type: ignore[call-arg]
        assert not isinstance(caught.value, AmpConfigError)
    # mmengine's own call, of something that neither an option nor the file has brought
    for options in ({'model.width': 2}, {'depth': 3}, None):
        with pytest.raises(TypeError, match='depth') as caught, nested_keys(cfg, options):
            MODELS.build(dict(type=torch.nn.ReLU, depth=3))
        assert not isinstance(caught.value, AmpConfigError)
    with (
        pytest.raises(AmpConfigError, match=r"--cfg-options model.depth: ReLU takes no 'depth'"),
        nested_keys(cfg, {'model.depth': 3}),
    ):
        MODELS.build(dict(type=torch.nn.ReLU, depth=3))
    cfg.model.parts = [dict(depth=3)]
    with pytest.raises(AmpConfigError, match="the config: ReLU takes no 'depth'"), nested_keys(cfg, {'model.width': 2}):
        MODELS.build(dict(type=torch.nn.ReLU, depth=3))
    # other errors are nobody's matter here
    with pytest.raises(TypeError, match='something else'), nested_keys(cfg, {'model.depth': 3}):
        raise TypeError('something else')
