"""Golden losses: ten steps of the toy at each level. ``python tests/support/make_golden.py`` writes them anew.

Do that only when a change is meant to change the arithmetic, and say so in the commit.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
import toy

from amp_wrapper import AmpOptimWrapper

FILE = Path(__file__).parents[1] / 'data' / 'golden' / 'curves.json'


def curve(level: str, device: torch.device) -> list[float]:
    """Ten losses on one batch, SGD with momentum and a clip that takes effect."""
    torch.manual_seed(0)
    model = toy.ToyModel().to(device)
    wrapper = AmpOptimWrapper(
        opt_level=level,
        # one scale for all: how the first overflows are met is another test's matter
        loss_scale=256.0,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9),
        clip_grad=dict(max_norm=0.5),
    )
    data = toy.ToyData()
    batch = dict(inputs=data.images.to(device), labels=data.labels.to(device))
    return [float(model.train_step(dict(batch), wrapper)['loss']) for _ in range(10)]


def main() -> None:
    """Write the file."""
    FILE.parent.mkdir(exist_ok=True)
    curves = {level: [round(loss, 6) for loss in curve(level, torch.device('cpu'))] for level in toy.LEVELS}
    FILE.write_text(json.dumps(curves, indent=1) + '\n')


if __name__ == '__main__':
    main()
