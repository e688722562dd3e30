"""schedulefree: weights of training and of evaluation are exchanged by ``optimizer.train()`` and ``eval()``."""

from __future__ import annotations

from typing import Any

import pytest
import schedulefree
import torch
from ways import DROPOUT, Recipe, cases, trial

RECIPES = [
    Recipe(
        'schedulefree',
        'AdamWScheduleFree',
        lambda m: schedulefree.AdamWScheduleFree(m.parameters(), lr=1e-2, warmup_steps=8),
        'modes',
    ),
    Recipe(
        'schedulefree',
        'SGDScheduleFree',
        lambda m: schedulefree.SGDScheduleFree(m.parameters(), lr=0.5, warmup_steps=8),
        'modes',
    ),
    Recipe(
        'schedulefree', 'RAdamScheduleFree', lambda m: schedulefree.RAdamScheduleFree(m.parameters(), lr=1e-2), 'modes'
    ),
    Recipe(
        'schedulefree',
        'ScheduleFreeWrapper',
        lambda m: torch.optim.SGD(m.parameters(), lr=0.2),
        'modes',
        around=lambda o: schedulefree.ScheduleFreeWrapper(o, momentum=0.9),
        skips=False,
    ),
    Recipe(
        'schedulefree',
        'AdamWScheduleFreeReference',
        lambda m: schedulefree.AdamWScheduleFreeReference(m.parameters(), lr=1e-2, warmup_steps=8),
        'modes',
    ),
]


@pytest.mark.parametrize('recipe,level,api', cases(RECIPES))
def test_trains_in_both_modes(recipe: Recipe, level: str, api: str, row: dict[str, Any]) -> None:
    """Saved in evaluation mode, as the package's page says, which alters nothing for the run that goes on."""
    trial(recipe, level, api, row, DROPOUT)
