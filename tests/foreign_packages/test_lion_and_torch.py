"""lion-pytorch, the optimizers of torch that are not Adam or SGD, transformers' Adafactor."""

from __future__ import annotations

from typing import Any

import lion_pytorch
import pytest
import torch
from torch.optim import lr_scheduler
from transformers.optimization import Adafactor, AdafactorSchedule
from ways import DIGITS, LEVELS, Recipe, cases, prepare, trial

from amp_wrapper import amp
from amp_wrapper.errors import AmpAttachError


def matrices(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.ndim == 2]


RECIPES = [
    Recipe('lion-pytorch', 'Lion', lambda m: lion_pytorch.Lion(m.parameters(), lr=1e-3, weight_decay=0.1)),
    Recipe(
        'lion-pytorch',
        'Lion (decoupled decay), cosine',
        lambda m: lion_pytorch.Lion(m.parameters(), lr=3e-3, weight_decay=0.01, decoupled_weight_decay=True),
        scheduler=lambda o: lr_scheduler.CosineAnnealingLR(o, 40),
    ),
    Recipe('torch', 'Adafactor', lambda m: torch.optim.Adafactor(m.parameters(), lr=0.03)),
    Recipe('torch', 'NAdam', lambda m: torch.optim.NAdam(m.parameters(), lr=3e-3)),
    Recipe('torch', 'RAdam', lambda m: torch.optim.RAdam(m.parameters(), lr=3e-2)),
    Recipe('torch', 'ASGD', lambda m: torch.optim.ASGD(m.parameters(), lr=0.3, t0=10)),
    Recipe('torch', 'Rprop', lambda m: torch.optim.Rprop(m.parameters(), lr=1e-3), exact=True),
    Recipe('torch', 'Adadelta', lambda m: torch.optim.Adadelta(m.parameters())),
    Recipe(
        'torch',
        'AdamW, OneCycleLR',
        lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3),
        scheduler=lambda o: lr_scheduler.OneCycleLR(o, 1e-2, total_steps=41),
    ),
    Recipe(
        'torch',
        'SGD, warm-up in a SequentialLR',
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True),
        scheduler=lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o, 0.1, total_iters=25), lr_scheduler.ExponentialLR(o, 0.95)], milestones=[25]
        ),
    ),
    Recipe('transformers', 'Adafactor (own rate)', lambda m: Adafactor(m.parameters(), lr=None)),
    Recipe(
        'transformers',
        'Adafactor (given rate)',
        lambda m: Adafactor(m.parameters(), lr=1e-2, scale_parameter=False, relative_step=False, beta1=0.9),
    ),
    Recipe(
        'transformers',
        'Adafactor, AdafactorSchedule',
        lambda m: Adafactor(m.parameters(), lr=None),
        scheduler=AdafactorSchedule,
    ),
]


# the wrapper casts modules that its optimizer steps as a whole: here it would cast none
MATRICES = [
    Recipe('torch', 'Muon (matrices)', lambda m: torch.optim.Muon(matrices(m), lr=0.03)),
]


@pytest.mark.parametrize('recipe,level,api', [*cases(RECIPES), *cases(MATRICES, apis=('functional',))])
def test_trains(recipe: Recipe, level: str, api: str, row: dict[str, Any]) -> None:
    trial(recipe, level, api, row)


@pytest.mark.parametrize('level', LEVELS)
def test_lbfgs_is_refused(level: str, row: dict[str, Any]) -> None:
    recipe = Recipe('torch', 'LBFGS', lambda m: torch.optim.LBFGS(m.parameters()))
    prepare(row, recipe, level, 'functional')
    model = DIGITS.model()
    with pytest.raises(AmpAttachError, match='LBFGS') as error:
        amp.initialize(model, recipe.optimizer(model), opt_level=level, verbosity=0)
    assert 'several times' in str(error.value)
    row['verdict'] = 'refused'
    row['remedy'] = str(error.value)
