"""What is found out about a step that was not finite."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..policy import Policy, dtype_name
from .ranges import Ranges
from .recorder import StepRecord, identifiers
from .remedies import Remedy
from .trace import ModuleOutput

#: The kinds of causes, and what each is in one sentence.
CAUSES: Mapping[str, str] = {
    'input': 'What the model was given holds NaN.',
    'input_range': 'What the model was given is too large for the 16-bit type.',
    'weight': 'A weight or buffer of the model is not finite.',
    'weight_range': 'A weight is too large for the 16-bit type.',
    'optimizer_state': "The optimizer's state is not finite, and has made weights that are not.",
    'forward_range': 'A number of the forward pass is too large for the 16-bit type.',
    'forward_nan': 'The forward pass is not finite in FP32 either.',
    'forward_16bit': 'The forward pass does something that gives no number in the 16-bit type, and gives one in FP32.',
    'loss': 'The loss, or its gradient at the outputs of the model, is not finite.',
    'gradient_scale': 'A gradient is too large for the 16-bit type at this loss scale, and fits at a smaller one.',
    'gradient_range': 'A gradient is too large for the 16-bit type at any loss scale.',
    'gradient_16bit': 'The backward pass does something that gives no number in the 16-bit type, and gives one in FP32.',
    'gradient_nan': 'The backward pass is not finite in FP32 either.',
    'gradient_sum': 'Gradients of several backward passes are finite, and their sum is not.',
    'forward': 'The output of a module is not finite; it could not be run again at other settings.',
    'gradient': 'The gradient at a module is not finite; it could not be run again at other settings.',
    'other_rank': 'Everything is finite on this rank.',
    'not_reproduced': 'The step was finite when it was run again.',
    'not_replayed': 'The step could not be run again.',
}


@dataclasses.dataclass
class Diagnosis:
    """Why a step was not finite.

    Attributes:
        cause: A key of :data:`CAUSES`.
        text: The cause in words, with its place and numbers.
        module: The qualified name of the module in which it begins; '' for the model itself, or where that is not known.
        kind: The class of that module.
        phase: 'forward', 'backward', or '' for neither.
        op: The op in which it begins.
        source: The line of Python that called it.
        first_gradient: Of the first gradient that is not finite, in the order of the backward pass: module and node.
        parameters: Those concerned, by name.
        losses: The losses concerned, by ``loss_id``.
        level: What the step ran at.
        scales: The loss scale of each loss.
        values: The value of each loss.
        remedies: What was tried.
        ranges: What came into the op, the weights concerned, and gradients, by what they are.
        outputs: What the modules gave in the forward pass, in the order in which they ended.
        samples: What the samples of the batch are called.
        notes: What else there is to say.
    """

    cause: str
    text: str
    module: str = ''
    kind: str = ''
    phase: str = ''
    op: str = ''
    source: str = ''
    first_gradient: str = ''
    parameters: list[str] = dataclasses.field(default_factory=list)
    losses: list[int] = dataclasses.field(default_factory=list)
    level: str = ''
    scales: list[float] = dataclasses.field(default_factory=list)
    values: list[float] = dataclasses.field(default_factory=list)
    remedies: list[Remedy] = dataclasses.field(default_factory=list)
    ranges: dict[str, Ranges] = dataclasses.field(default_factory=dict)
    outputs: list[ModuleOutput] = dataclasses.field(default_factory=list)
    samples: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)

    @property
    def advice(self) -> str:
        """The settings that made the step finite, in words; '' where none was found."""
        good = [each.setting for each in self.remedies if each.finite and not each.forward_only]
        half = [each.setting for each in self.remedies if each.finite and each.forward_only]
        texts = [f'With {" or ".join(good)}, this step is finite.'] if good else []
        if half:
            texts.append(
                f'With {" or ".join(half)}, its forward pass is finite; the loss, outside of the model, was not tried.'
            )
        return ' '.join(texts)

    def plain(self) -> dict[str, Any]:
        """All of it as numbers, strings, lists and dicts, for JSON."""
        found = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        found['ranges'] = {name: each.plain() for name, each in self.ranges.items()}
        found['remedies'] = [dataclasses.asdict(each) for each in self.remedies]
        found['outputs'] = [{**dataclasses.asdict(each), 'dtype': dtype_name(each.dtype)} for each in self.outputs]
        return {**found, 'meaning': CAUSES[self.cause], 'advice': self.advice}


def complete(found: Diagnosis, step: StepRecord, policy: Policy) -> None:
    """What every diagnosis tells of the step."""
    found.level = policy.describe()
    found.scales = [1.0 if loss.scale is None else float(loss.scale) for loss in step.losses]
    found.values = [float(loss.value.detach().float().sum()) for loss in step.losses]
    if not found.losses and found.cause not in ('other_rank', 'not_reproduced', 'not_replayed'):
        found.losses = sorted({loss.loss_id for loss in step.losses})
    for call in step.calls:
        for key, values in identifiers((call.args, call.kwargs)).items():
            found.samples.setdefault(key, []).extend(values)
    if step.dropped:
        found.notes.append(f'{step.dropped} earlier forward calls of this step were not kept.')
