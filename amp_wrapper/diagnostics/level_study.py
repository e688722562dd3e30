"""What is known while levels are tried."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import torch

from .deviations import Deviation
from .keep_fp32_search import KeepSearch
from .level_verdicts import LevelFacts, Limits
from .side_by_side import LevelRun


def spread(run: LevelRun, reference: LevelRun) -> float:
    """How far apart the quartiles of the ratios of its steps to the same steps of another run are, over their median.

    Batches of different sizes do not matter so. NaN without steps that both have taken.
    """
    ratios = [run.seconds[step] / reference.seconds[step] for step in run.seconds.keys() & reference.seconds.keys()]
    if not ratios:
        return math.nan
    low, middle, high = np.quantile(ratios, (0.25, 0.5, 0.75))
    return float((high - low) / middle)


@dataclasses.dataclass
class Study:
    """What is known so far. Arguments first, then what each phase adds.

    Attributes:
        device: Of the model.
        levels: Those that may be recommended.
        prefer: 'speed' or 'memory'.
        steps: Of each level.
        seed: Of the random generators.
        batches: How many different ones there are.
        optimizer: How it is called.
        max_trials: Of the searches together.
        overrides: Of all levels.
        compiled: Whether the model, or a part of it, was compiled.
        facts: Level to what is known of it; FP32 first.
        mended: Levels with modules in FP32.
        runs: Name to training.
        side_by_side: Whether all were trained at the same time; None before.
        other_batch: How far FP32's gradients of another batch are from those of the first.
        sensitivity: Type to the error of the gradients in FP32 after the weights were rounded to it.
        limits: What deviations mean nothing.
        lost: Type to the share of updates that are lost without masters.
        searches: Level to its search for ``keep_fp32``.
        without_masters: The chosen level without them.
        chosen: The level to take.
        interrupted: Whether it ended early.
    """

    device: torch.device
    levels: tuple[str, ...]
    prefer: str
    steps: int
    seed: int
    batches: int
    optimizer: str
    max_trials: int
    overrides: dict[str, Any]
    compiled: bool = False
    facts: dict[str, LevelFacts] = dataclasses.field(default_factory=dict)
    mended: list[LevelFacts] = dataclasses.field(default_factory=list)
    runs: dict[str, LevelRun] = dataclasses.field(default_factory=dict)
    side_by_side: bool | None = None
    other_batch: Deviation | None = None
    sensitivity: dict[str, float] = dataclasses.field(default_factory=dict)
    limits: Limits | None = None
    lost: dict[str, float] = dataclasses.field(default_factory=dict)
    searches: dict[str, KeepSearch] = dataclasses.field(default_factory=dict)
    without_masters: LevelRun | None = None
    chosen: LevelFacts | None = None
    interrupted: bool = False

    @property
    def not_tried(self) -> list[str]:
        """The levels of which too little is known to judge."""
        return [level for level in self.levels if not self.facts[level].tried]
