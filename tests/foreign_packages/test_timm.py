"""timm: ``create_optimizer_v2`` with all its optimizers, layer decay, Lookahead, its schedulers and models."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import timm.loss
import timm.optim
import timm.scheduler
import torch
import torch.nn.functional as F
from ways import LEVELS, Recipe, Task, cases, refused, trial

PACKAGE = 'timm'
#: Tried at every level and through mmengine: learning rate.
RATES = {
    'adafactor': 0.009,
    'adafactorbv': 0.009,
    'adan': 0.03,
    'adopt': 0.009,
    'lamb': 0.009,
    'lion': 0.003,
    'madgrad': 0.009,
    'muon': 0.009,
    'nadamw': 0.009,
    'novograd': 0.003,
    'sgd': 0.09,
    'cadamw': 0.03,
}
#: Tried at O2 and O5 alone, where it is not the model's weights that are stepped.
MORE_RATES = {
    'adabelief': 0.003,
    'adadelta': 0.9,
    'adagrad': 0.03,
    'adam': 0.003,
    'adamax': 0.03,
    'adamp': 0.009,
    'adamuon': 0.009,
    'adamw': 0.009,
    'adanw': 0.03,
    'adoptc': 0.009,
    'cadafactor': 0.009,
    'cadafactorbv': 0.009,
    'cadamp': 0.003,
    'cadan': 0.03,
    'cadanw': 0.009,
    'cadopt': 0.003,
    'cadoptc': 0.003,
    'clamb': 0.009,
    'claprop': 0.003,
    'clion': 0.003,
    'cmars': 0.009,
    'cnadamw': 0.009,
    'crmsproptf': 0.003,
    'csgdc': 0.009,
    'csgdp': 0.009,
    'kron': 0.009,
    'lambc': 0.09,
    'lambw': 0.009,
    'laprop': 0.009,
    'larc': 0.9,
    'lars': 0.9,
    'madgradw': 0.003,
    'mars': 0.009,
    'momentum': 0.009,
    'nadam': 0.009,
    'nadamc': 0.009,
    'nadamuon': 0.009,
    'nesterov': 0.09,
    'nlarc': 0.9,
    'nlars': 0.9,
    'nmuon': 0.009,
    'novogradc': 0.003,
    'radabelief': 0.03,
    'radam': 0.03,
    'rmsprop': 0.0003,
    'rmsproptf': 0.003,
    'sgdp': 0.009,
    'sgdw': 0.009,
}


def recipe(name: str, rate: float) -> Recipe:
    return Recipe(PACKAGE, name, lambda m: timm.optim.create_optimizer_v2(m, opt=name, lr=rate, weight_decay=0.01))


RECIPES = [recipe(name, rate) for name, rate in RATES.items()]
RECIPES += [
    Recipe(
        PACKAGE,
        'lookahead_adamw, initialised itself',
        lambda m: timm.optim.create_optimizer_v2(m, opt='lookahead_adamw', lr=1e-2),
    ),
    Recipe(
        PACKAGE,
        'lookahead_momentum, initialised itself',
        lambda m: timm.optim.create_optimizer_v2(m, opt='lookahead_momentum', lr=3e-2, momentum=0.9),
    ),
    Recipe(
        PACKAGE,
        'Lookahead, around an initialised optimizer',
        lambda m: timm.optim.create_optimizer_v2(m, opt='momentum', lr=3e-2, momentum=0.9),
        around=lambda o: timm.optim.Lookahead(o, k=3),
        skips=False,
    ),
]
MORE = [recipe(name, rate) for name, rate in MORE_RATES.items()]


@pytest.mark.parametrize('recipe,level,api', cases(RECIPES))
def test_trains(recipe: Recipe, level: str, api: str, row: dict[str, Any]) -> None:
    trial(recipe, level, api, row)


@pytest.mark.parametrize('recipe,level,api', cases(MORE, levels=('O2', 'O5'), apis=('functional',)))
def test_the_rest_trains(recipe: Recipe, level: str, api: str, row: dict[str, Any]) -> None:
    trial(recipe, level, api, row)


HESSIANS = [
    Recipe(
        PACKAGE,
        'adahessian',
        lambda m: timm.optim.create_optimizer_v2(m, opt='adahessian', lr=0.1),
        'create_graph',
        exact=False,
    )
]


@pytest.mark.parametrize('recipe,level,api', cases(HESSIANS, levels=('O1', 'O2', 'O5')))
def test_second_derivatives(recipe: Recipe, level: str, api: str, row: dict[str, Any]) -> None:
    refused(recipe, level, api, row, ['create_graph', "opt_level='O4'", 'torch.autograd.grad'])


def pictures(index: int, count: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    """(count, 3, 32, 32) of noise, whose colour is the class."""
    generator = torch.Generator().manual_seed(index)
    labels = torch.arange(count) % 3
    images = torch.randn(count, 3, 32, 32, generator=generator)
    return images + F.one_hot(labels, 3).view(count, 3, 1, 1), labels


def classify(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return timm.loss.LabelSmoothingCrossEntropy(0.1)(model(batch[0]), batch[1])


def task(name: str, **kwargs: Any) -> Task:
    return Task(
        lambda: timm.create_model(name, num_classes=3, **kwargs), classify, pictures, lambda: pictures(1000, 48)
    )


VIT = dict(img_size=32, patch_size=8, embed_dim=48, depth=3, num_heads=3, drop_path_rate=0.1)
MODELS = {
    'ViT, layer decay 0.75, cosine with warm-up': (task('vit_tiny_patch16_224', **VIT), 'adamw', 3e-3, 0.75),
    'ViT, lamb, layer decay 0.75': (task('vit_tiny_patch16_224', **VIT), 'lamb', 1e-2, 0.75),
    'ResNet, lion': (task('resnet10t', stem_width=8, channels=(8, 16, 24, 32)), 'lion', 1e-3, None),
    'ConvNeXt, nadamw, layer decay 0.8': (
        task('convnext_atto', depths=(1, 1, 2, 1), dims=(8, 16, 24, 32), drop_path_rate=0.1),
        'nadamw',
        3e-3,
        0.8,
    ),
}


class Steps:
    """timm's schedulers, which are told the number of the update, with torch's face."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.scheduler = timm.scheduler.CosineLRScheduler(
            optimizer, t_initial=40, warmup_t=8, warmup_lr_init=1e-5, t_in_epochs=False
        )
        self.count = 0

    def step(self) -> None:
        self.count += 1
        self.scheduler.step_update(self.count)

    def state_dict(self) -> dict[str, Any]:
        return dict(count=self.count, scheduler=self.scheduler.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state['count']
        self.scheduler.load_state_dict(state['scheduler'])


@pytest.mark.parametrize('api', ['functional', 'mmengine'])
@pytest.mark.parametrize('level', LEVELS)
@pytest.mark.parametrize('name', MODELS)
def test_models(name: str, level: str, api: str, row: dict[str, Any]) -> None:
    """Whole recipes: model with stochastic depth, layer decay, schedule."""
    what, opt, rate, decay = MODELS[name]
    trained = Recipe(
        PACKAGE,
        name,
        lambda m: timm.optim.create_optimizer_v2(m, opt=opt, lr=rate, weight_decay=0.05, layer_decay=decay),
        scheduler=Steps,
        exact=False,
    )
    trial(trained, level, api, row, what)
