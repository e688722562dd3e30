"""The parts of the picture of a training: which numbers of the log each shows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Panel:
    """One part of the picture.

    Attributes:
        title: Above it.
        numbers: Names of the log to the words for them.
        height: Beside the others.
    """

    title: str
    numbers: Mapping[str, str]
    height: float = 1.0


#: The parts of the picture from top to bottom, by the names for ``panels``.
PANELS: Mapping[str, Panel] = {
    'loss': Panel('Loss', {'loss': 'loss'}, 1.5),
    'grad_norm': Panel('Gradient norm', {'grad_norm': 'gradient norm'}),
    'scale': Panel('Loss scale', {'amp_scale': 'loss scale', 'amp_skipped': 'skipped step'}, 1.2),
    'small': Panel(
        'Gradients near zero, share of elements',
        {'amp_grad_underflow': 'zero in 16-bit', 'amp_grad_tiny': 'just above zero'},
    ),
    'peak': Panel(
        'Largest number, in powers of two from overflow',
        {'amp_grad_peak': 'gradient (scaled)', 'amp_weight_peak': 'weight'},
    ),
    'lost': Panel('Updates that 16-bit weights without masters would lose', {'amp_update_lost': 'lost updates'}, 0.9),
    'lr': Panel('Learning rate', {'lr': 'learning rate'}, 0.8),
}
#: Those that are drawn unless others are asked for.
DEFAULT_PANELS = tuple(name for name in PANELS if name != 'lr')
