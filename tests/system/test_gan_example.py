"""The GAN of the examples: two networks, two wrappers, any pair of levels; its metric, its picture, its resume."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import mmcv
import numpy as np
import pytest
import torch
from grid import but
from mmengine.config import Config
from mmengine.optim import OptimWrapperDict, build_optim_wrapper
from mmengine.registry import MODELS
from mmengine.runner import Runner
from torch import nn

from amp_wrapper import AmpOptimWrapper
from amp_wrapper.policy import LEVELS, resolve

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / 'configs' / 'digits' / 'gan_o2_o5.py'


@pytest.fixture(autouse=True)
def _examples_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    if 'examples.gan' not in sys.modules:
        sys.modules.pop('examples', None)


def config(generator: str = 'O2', discriminator: str = 'O5') -> Config:
    cfg = Config.fromfile(CONFIG)
    cfg.optim_wrapper.generator.opt_level = generator
    cfg.optim_wrapper.discriminator.opt_level = discriminator
    return cfg


def parts(generator: str, discriminator: str, **words: Any) -> tuple[nn.Module, OptimWrapperDict]:
    cfg = config(generator, discriminator)
    for wrapper in cfg.optim_wrapper.values():
        if isinstance(wrapper, dict):
            wrapper.update(words)
            # the usual 1e-8 is 0 in float16, in which Adam steps at O3
            wrapper.optimizer.eps = 1e-4
    torch.manual_seed(0)
    model = MODELS.build(cfg.model)
    model.init_weights()
    wrappers = build_optim_wrapper(model, cfg.optim_wrapper)
    wrappers.initialize_count_status(model, 0, 10)
    return model, wrappers


def batch(fill: float | None = None) -> dict[str, torch.Tensor]:
    images = torch.rand(4, 1, 8, 8) * 16 if fill is None else torch.full((4, 1, 8, 8), fill)
    return dict(inputs=images, labels=torch.tensor([0, 3, 5, 9]))


def values(module: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().float().clone() for parameter in module.parameters()]


def changed(before: list[torch.Tensor], module: nn.Module) -> list[bool]:
    return [not torch.equal(a, b) for a, b in zip(before, values(module))]


def matrix_types(module: nn.Module) -> set[torch.dtype]:
    kinds = (nn.Linear, nn.Conv2d, nn.ConvTranspose2d, nn.Embedding)
    return {m.weight.dtype for m in module.modules() if isinstance(m, kinds)}


@pytest.mark.parametrize('discriminator', but(['O2', 'O4'], LEVELS))
@pytest.mark.parametrize('generator', but(['O1', 'O5'], LEVELS))
def test_every_pair_of_levels(generator: str, discriminator: str) -> None:
    # the usual first scale of 2^16 may overflow, and what is asked here is whether a step moves the weights
    model, wrappers = parts(generator, discriminator, loss_scale=128.0)
    inside: dict[str, set[torch.dtype]] = dict(generator=set(), discriminator=set())
    first = dict(generator=model.generator.layers[2], discriminator=model.discriminator.layers[0])
    for name, module in first.items():
        module.register_forward_hook(lambda m, i, o, name=name: inside[name].add(o.dtype))
    before = {name: values(getattr(model, name)) for name in first}
    losses = model.train_step(batch(), wrappers)
    assert set(losses) == {'loss_real', 'loss_fake', 'loss_generator'}
    for name, level in (('generator', generator), ('discriminator', discriminator)):
        module, policy = getattr(model, name), resolve(level)
        assert any(changed(before[name], module)), name
        assert matrix_types(module) == {policy.cast_model_type or torch.float32}
        # each network computes in the type of its own level in both turns, whoever called it
        assert inside[name] == {policy.cast_model_type or policy.autocast_dtype or torch.float32}
        assert all(parameter.requires_grad for parameter in module.parameters())
    assert all(loss.dtype is torch.float32 and loss.isfinite() for loss in losses.values())
    norms = {m.weight.dtype for m in model.modules() if isinstance(m, nn.BatchNorm2d)}
    assert norms == {torch.float16 if generator == 'O3' else torch.float32}
    results = model.val_step(dict(**batch(), noise=torch.randn(4, 32)))
    assert len(results) == 4 and results[0]['fake'].dtype is torch.float32


def test_a_turn_changes_one_network() -> None:
    model, wrappers = parts('O5', 'O5')
    data = model.data_preprocessor(batch(), training=True)
    for turn, moved, still in (
        (lambda: model.train_discriminator(*data.values(), wrappers), model.discriminator, model.generator),
        (lambda: model.train_generator(data['labels'], wrappers), model.generator, model.discriminator),
    ):
        before_moved, before_still = values(moved), values(still)
        turn()
        assert any(changed(before_moved, moved))
        assert not any(changed(before_still, still))
        assert all(parameter.grad is None for parameter in still.parameters())


def test_each_network_has_a_scale_of_its_own() -> None:
    model, wrappers = parts('O2', 'O2')
    scales = [wrappers[name].loss_scaler.get_scale() for name in ('generator', 'discriminator')]
    model.train_discriminator(*model.data_preprocessor(batch(float('nan'))).values(), wrappers)
    after = [wrappers[name].loss_scaler.get_scale() for name in ('generator', 'discriminator')]
    assert after == [scales[0], scales[1] / 2]


def test_a_wrong_child_is_named() -> None:
    cfg = config()
    cfg.optim_wrapper.critic = cfg.optim_wrapper.pop('discriminator')
    with pytest.raises(ValueError, match=r'optim_wrapper\.critic .* generator, discriminator'):
        build_optim_wrapper(MODELS.build(cfg.model), cfg.optim_wrapper)
    with pytest.raises(ValueError, match='paramwise_cfg'):
        build_optim_wrapper(nn.Linear(1, 1), dict(constructor='WrapperPerModule', paramwise_cfg=dict(bias_lr_mult=2)))


# -- metric -----------------------------------------------------------------------------------------------------------


def score(fakes: np.ndarray) -> dict[str, float]:
    from examples.gan import DigitQuality, DigitsWithNoise

    metric, digits = DigitQuality(), DigitsWithNoise(train=False)
    samples = [digits[index] for index in range(len(digits))]
    metric.process(
        None,
        [
            dict(fake=torch.from_numpy(fake), real=sample['inputs'] / 8 - 1, label=sample['labels'])
            for fake, sample in zip(fakes, samples, strict=True)
        ],
    )
    return metric.evaluate(len(samples))


def test_the_metric_tells_digits_from_others() -> None:
    from examples.classification import Digits

    held_out = Digits(train=False)
    real = held_out.images.reshape(-1, 1, 8, 8) / 8 - 1
    same = score(real)
    assert same['gan/frechet'] == pytest.approx(0, abs=1e-3) and same['gan/recognised'] > 95
    # the training digits of the same classes: as good as a generator that has learnt everything
    train = Digits(train=True)
    order = np.random.default_rng(0).permutation(len(train))
    taken: list[int] = []
    for label in held_out.labels:
        taken.append(next(i for i in order if train.labels[i] == label and i not in taken))
    good = score(train.images[taken].reshape(-1, 1, 8, 8) / 8 - 1)
    assert good['gan/frechet'] < 0.5 and good['gan/recognised'] > 99
    wrong_classes = score(np.roll(real, 1, 0))
    assert wrong_classes['gan/frechet'] == pytest.approx(0, abs=1e-3) and wrong_classes['gan/recognised'] < 20
    means = np.stack([real[held_out.labels == label].mean(0) for label in held_out.labels])
    one_per_class = score(means)
    assert one_per_class['gan/recognised'] == 100 and one_per_class['gan/frechet'] > 5 * good['gan/frechet']
    assert score(np.random.default_rng(0).uniform(-1, 1, real.shape).astype(np.float32))['gan/frechet'] > 5
    broken = score(np.full_like(real, np.nan))
    assert np.isnan(broken['gan/frechet']) and broken['gan/recognised'] == 0


# -- runner -----------------------------------------------------------------------------------------------------------


def run(cfg: Config, work_dir: Path, **changes: Any) -> Runner:
    """Train with networks so narrow that float16 on a CPU is no burden."""
    cfg = copy.deepcopy(cfg)
    cfg.model.generator.width = cfg.model.discriminator.width = 4
    cfg.merge_from_dict(dict(work_dir=str(work_dir), log_level='WARNING', **changes))
    cfg.experiment_name = f'{work_dir.parent.name}_{work_dir.name}_{len(list(work_dir.glob("*")))}'
    runner = Runner.from_cfg(cfg)
    runner.train()
    return runner


def test_the_config_trains_and_draws(tmp_path: Path) -> None:
    runner = run(
        Config.fromfile(CONFIG),
        tmp_path,
        **{'train_cfg.max_epochs': 1, 'train_cfg.val_interval': 1},
        **{'train_dataloader.batch_size': 479},
    )
    wrappers = runner.optim_wrapper
    assert isinstance(wrappers, OptimWrapperDict) and list(wrappers.keys()) == ['generator', 'discriminator']
    assert all(type(wrapper) is AmpOptimWrapper for wrapper in wrappers.values())
    assert matrix_types(runner.model.generator) == {torch.float16}
    assert matrix_types(runner.model.discriminator) == {torch.bfloat16}
    assert [wrapper.loss_scaler.is_dynamic for wrapper in wrappers.values()] == [True, False]
    for name in ('frechet', 'recognised'):
        assert np.isfinite(runner.message_hub.get_scalar(f'val/gan/{name}').current())
    picture = mmcv.imread(str(tmp_path / 'samples' / 'epoch_1.png'), 'grayscale')
    assert picture.shape == (8 * 10 * 6, 10 * 10 * 6)
    assert picture.min() < 200 and picture.max() > 250
    saved = torch.load(tmp_path / 'epoch_1.pth', weights_only=True)
    assert {value.dtype for value in saved['state_dict'].values()} == {torch.float32, torch.int64}


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path) -> None:
    cfg = config('O2', 'O2')
    cfg.custom_hooks.append(dict(type='amp_wrapper.ExactResumeHook'))
    cfg.train_dataloader.batch_size = 400
    cfg.train_cfg = dict(by_epoch=True, max_epochs=2, val_interval=1)
    cfg.default_hooks.checkpoint.interval = 1
    whole = run(cfg, tmp_path / 'whole')
    again = run(cfg, tmp_path / 'again', load_from=str(tmp_path / 'whole' / 'epoch_1.pth'), resume=True)
    assert again.iter == whole.iter == 8
    for a, b in zip(whole.model.state_dict().values(), again.model.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    for name, wrapper in whole.optim_wrapper.items():
        other = again.optim_wrapper[name]
        assert wrapper.loss_scaler.state_dict() == other.loss_scaler.state_dict()
        assert all(torch.equal(a, b) for a, b in zip(wrapper.master_params(), other.master_params(), strict=True))
    pictures = [mmcv.imread(str(tmp_path / name / 'samples' / 'epoch_2.png')) for name in ('whole', 'again')]
    assert np.array_equal(*pictures)
