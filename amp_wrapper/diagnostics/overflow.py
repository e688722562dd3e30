"""Runs a skipped step again, and says in words why it was not finite: where that begins, and which setting mends it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..casting import fp32_values
from ..engine import Engine
from ..errors import AmpError, one_line, some
from ..policy import Policy, dtype_name
from ..policy.levels import IN_BFLOAT16, LEVEL_TABLE
from ..policy.nested import HALF_TYPES
from ..shards import local
from .page import Page, Table
from .replay import MOST_CALLS, Remedy, Replay, StepRecord, run_call, versions_of
from .sandbox import Attach, own_functions, sandbox
from .watches import BACKWARD, FORWARD, NAN, BadOp, Maximum, called, is_bad

#: What to say of an op of each cause.
_ADVICE = {
    'forward_range': 'In FP32 the forward pass is finite.',
    'forward_nan': 'So it is in FP32, too: this is no matter of precision. Look for a division by zero, a logarithm or a root '
    'of zero or less, numbers that have outgrown FP32, and at the data.',
    'gradient_range': 'In FP32 the backward pass is finite; a smaller loss scale does not help.',
    'gradient_nan': 'So it is in FP32 without a loss scale, too: this is no matter of precision. The derivative is not finite '
    'there, as that of a root or a norm at zero, or 0 times infinity.',
    'gradient_scale': 'Gradients carry the loss scale {scale:g} there; with loss_scale=1.0 they fit. A dynamic scale falls by '
    'itself until they do: nothing is to be done then, unless steps are skipped over and over.',
}
_LOSS_ADVICE = 'Look at what turns outputs into the loss: a division, a logarithm, an empty target, 16-bit sums.'
_OUTPUTS = 'The largest absolute number in what each module gave, in the order in which the modules ended.'
_NOT_REPRODUCED = (
    'The step was finite when it was run again. Either something that is not recorded has changed, such as a random generator '
    'of its own, a count of calls, or an op whose results differ from run to run; or another rank has the cause. Or the '
    'gradients that are not finite do not come through the outputs of the model: a term of the loss on weights, a penalty on '
    'gradients, a hook that changes them; or a function that is a forward hook changes outputs, which no copy runs.'
)


@dataclasses.dataclass
class Diagnosis:
    """Why a step was not finite.

    Attributes:
        cause: 'input': what the model was given is not finite. 'weight': a weight or a buffer is not, or is too large.
            'forward_range', 'gradient_range': a number is too large, or too small, for the 16-bit type. 'forward_nan',
            'gradient_nan': not finite in FP32 either. 'gradient_scale': a gradient fits without the loss scale. 'loss': a loss
            outside of the model, or its gradient at the outputs, is not finite. 'not_reproduced': finite when it was run
            again. 'not_replayed': it could not be run again.
        text: The cause in words, with its place and numbers, and the settings that made the step finite.
        module: The qualified name of the module in which it begins; '' for the model itself, or where that is not known.
        phase: 'forward', 'backward', or '' for neither.
        op: The op in which it begins.
        source: The line of Python that called it.
        parameters: Those concerned, by name.
        losses: The losses concerned, by ``loss_id``.
        level: What the step ran at.
        scales: The loss scale of each loss.
        values: The value of each loss.
        remedies: What was tried.
        outputs: The largest numbers that modules gave in the forward pass, in the order in which they ended.
        samples: What the samples of the batch are called, where the batch says it.
    """

    cause: str
    text: str
    module: str = ''
    phase: str = ''
    op: str = ''
    source: str = ''
    parameters: list[str] = dataclasses.field(default_factory=list)
    losses: list[int] = dataclasses.field(default_factory=list)
    level: str = ''
    scales: list[float] = dataclasses.field(default_factory=list)
    values: list[float] = dataclasses.field(default_factory=list)
    remedies: list[Remedy] = dataclasses.field(default_factory=list)
    outputs: list[Maximum] = dataclasses.field(default_factory=list)
    samples: list[str] = dataclasses.field(default_factory=list)

    def page(self, **facts: Any) -> Page:
        """Return all of it as a page.

        Args:
            **facts: What else belongs to it: the iteration, the rank.
        """
        data = {**facts, **dataclasses.asdict(self)}
        data['outputs'] = [{**each._asdict(), 'dtype': dtype_name(each.dtype)} for each in self.outputs]
        rows = [[each.name or '(model)', each.kind, dtype_name(each.dtype), each.largest] for each in self.outputs]
        bad = {row: 'bad' for row, each in enumerate(self.outputs) if not math.isfinite(each.largest)}
        words = {True: 'finite', False: 'not finite', None: 'not tried'}
        tried = [[r.setting, words[r.finite] + ' in its forward pass' * r.forward_only] for r in self.remedies]
        good = {row: 'good' for row, each in enumerate(self.remedies) if each.finite}
        tables = [
            Table('What was tried on this step', ['setting', 'step'], tried, marks=good),
            Table('The forward pass', ['module', 'class', 'type', 'largest number'], rows, _OUTPUTS, bad),
        ]
        losses = ', '.join(f'{value:g} (scale {scale:g})' for value, scale in zip(self.values, self.scales))
        known = {'cause': self.cause, 'line': self.source, 'level': self.level, 'losses': losses}
        known |= {'parameters': some(self.parameters, 64), 'samples': some(self.samples, 64)}
        known |= {key: str(fact) for key, fact in facts.items()}
        return Page(f'Skipped step {facts.get("iteration", "")}'.strip(), self.text, known, tables, [], data)


def diagnose(step: StepRecord, model: nn.Module, engine: Engine, attach: Attach) -> Diagnosis:
    """Find out why a step was not finite, from what was recorded of it. Syncs, and takes some forward and backward passes.

    The model, its gradients, the optimizer and random states are left as they are.

    Args:
        step: What was recorded.
        model: Of the engine, with the weights that it had in the step.
        engine: Of the optimizer.
        attach: Attaches a copy of the model.
    """
    # others were for no loss of this step
    used = dataclasses.replace(step, calls=[call for call in step.calls if call.gradients] or step.calls)
    examination = _Examination(used, model, engine, attach)
    found = examination.of_state() or examination.of_replay()
    found.text = ' '.join([found.text, *_helps(found.remedies)])
    found.level = engine.policy.describe()
    found.scales = [1.0 if loss.scale is None else float(loss.scale) for loss in step.losses]
    found.values = [float(loss.value.detach().float().sum()) for loss in step.losses]
    found.samples = [name for call in used.calls for name in _names(call.given)]
    if not found.losses and not found.cause.startswith('not_'):
        found.losses = sorted({loss.loss_id for loss in step.losses})
    return found


def _names(value: Any, key: str = '', depth: int = 6) -> Iterator[str]:
    """Yield the texts and numbers of a batch, in dicts and in ``metainfo``, that are called like a path, a name or an id."""
    parts = getattr(value, 'metainfo', value)
    if isinstance(parts, (str, int)) and key.endswith(('path', 'name', 'id', 'idx')):
        yield str(parts)
    elif depth and isinstance(parts, (dict, list, tuple)):
        for name, item in parts.items() if isinstance(parts, dict) else ((key, item) for item in parts):
            yield from _names(item, str(name), depth - 1)


def _helps(remedies: list[Remedy]) -> list[str]:
    """Say which settings made the step finite, in up to two sentences."""
    whole, half = (
        ' or '.join(each.setting for each in remedies if each.finite and each.forward_only == is_half)
        for is_half in (False, True)
    )
    unknown = 'the loss, outside of the model, was not tried.'
    words = f'With {whole}, this step is finite.', f'With {half}, its forward pass is finite; {unknown}'
    return [text for text, settings in zip(words, (whole, half)) if settings]


@dataclasses.dataclass(frozen=True)
class _Examination:
    """The questions that are asked of one step, in their order.

    Attributes:
        step: What was recorded.
        model: With the weights that it had in the step; it is left as it is. Several models are an ``nn.ModuleDict``.
        engine: Of the optimizer.
        attach: Attaches a copy.
    """

    step: StepRecord
    model: nn.Module
    engine: Engine
    attach: Attach

    def of_state(self) -> Diagnosis | None:
        """Look at the weights; None where they are finite, and in range."""
        stepped = set(map(id, self.engine.weights()))
        parameters = self.model.named_parameters()
        named = {name: p for name, p in parameters if p.requires_grad and id(p) in stepped}
        bad = [name for name, weight in named.items() if is_bad(_fp32(weight))]
        names = bad or [name for name, weight in named.items() if is_bad(local([weight.detach()])[0])]
        if not names:
            return None
        if bad:
            why = 'other code wrote to them, gradients were changed after the check, the state of the optimizer is not finite, '
            why += 'or a step was too large, by its learning rate or an eps that is zero in 16 bits'
        else:
            most = max(float(_fp32(named[name]).abs().max()) for name in names)
            end = torch.finfo(self._type()).max
            why = f'numbers up to {most:.3g} are too large for {dtype_name(self._type())}, which ends at {end:.5g}'
        found = self._at('weight', f'Weights are not finite: {some(names)}: {why}.', names[0].rpartition('.')[0])
        found.parameters, found.remedies = names, [] if bad else self._try(found.module)
        return found

    def of_replay(self) -> Diagnosis:
        """Run the step again, and say what it shows."""
        step = self.step
        if not step.calls:
            what = 'no call of the whole model that gives tensors with gradients was seen: it is called part by part, gives an '
            return _not_replayed(f'{what}object of its own class, or torch.compile hides it (train without it).')
        if not all(versions_of(call.given) == call.versions for call in step.calls):
            return _not_replayed('its inputs were written to, by the model itself or after its forward pass.')
        again = self._run(traced=True)
        if again.refused:
            return _not_replayed(again.refused)
        if again.first is not None and again.call is not None:
            one = dataclasses.replace(step, calls=[again.call])
            found = dataclasses.replace(self, step=one)._of_place(again.first)
        elif step.dropped:
            return _not_replayed(f'of its forward calls the last {MOST_CALLS} are kept, and these are finite.')
        elif any(call.has_bad_gradients for call in step.calls):
            found = self._of_loss()
        elif again.bad_sums:
            text = f'Gradients of backward passes are finite, and their sum in {dtype_name(self._type())} is not'
            found = self._at('gradient_range', f'{text}: {some(again.bad_sums)}.', again.bad_sums[0].rpartition('.')[0])
            found.phase, found.parameters = BACKWARD, again.bad_sums
            found.remedies = [Remedy('accumulate_in_fp32', 'accumulate_in_fp32=True', None)]
            found.remedies += [*self._try(found.module), self._without_scale()]
        else:
            found = Diagnosis('not_reproduced', _NOT_REPRODUCED)
        found.outputs = again.outputs
        found.losses = sorted({step.losses[number].loss_id for call in again.wrong for number in call.losses})
        found.parameters = found.parameters or again.parameters
        return found

    def _of_place(self, place: BadOp) -> Diagnosis:
        """Say what an op has done, and whether it does so without the loss scale, and in FP32."""
        if place.origin == 'input':
            name = self.step.calls[0].name
            what = '{} has {:,} infinities or NaN among {:,} elements'.format(place.op, *place.counts)
            return self._at('input', f'What {name or "the model"} was given is not finite: {what}.', name, place)
        if place.origin == 'weight':
            found = self._at('weight', f'{place.op} is not finite.', place.op.rpartition('.')[0], place)
            found.parameters = [place.op]
            return found
        tried = [self._without_scale()] if place.phase == BACKWARD else []
        cause = 'gradient_scale'
        if not (tried and tried[0].finite and self.step.scale > 1):
            exact = self._run(LEVEL_TABLE['O0'], 1 / self.step.scale, traced=True)
            is_range = bool(exact.refused) or exact.is_finite
            cause = f'{"forward" if place.phase == FORWARD else "gradient"}_{"range" if is_range else "nan"}'
            if exact.first is not None and exact.first.node != place.node:
                # in 16 bits something else came first
                place = exact.first
            tried = [*self._try(place.module), *tried] if is_range else [Remedy('fp32', "opt_level='O0'", False)]
        advice = _ADVICE[cause].format(scale=self.step.scale)
        found = self._at(cause, f'{self._begins(place)} {advice}', place.module, place)
        found.remedies = tried
        return found

    def _of_loss(self) -> Diagnosis:
        if any(own_functions(module) for module in self.model.modules()):
            # forward hooks that the copy did not run
            return Diagnosis('not_reproduced', _NOT_REPRODUCED)
        bad = next((loss for loss in self.step.losses if is_bad(loss.value)), None)
        if bad is not None:
            made_by = f' (of {bad.made_by})' if bad.made_by else ''
            what = f'are finite, and a loss that is computed outside of it is {float(bad.value.sum())}{made_by}.'
            return Diagnosis('loss', f'The outputs of the model {what} {_LOSS_ADVICE}', phase=FORWARD, op=bad.made_by)
        text = 'The outputs of the model and the loss are finite, and the gradient of the loss, which is computed outside of'
        given = [each for call in self.step.calls for each in call.gradients.values()]
        if self.step.scale > 1 and not any(bool(each.isnan().any()) for each in given):
            text += f' the model, is infinite with the loss scale {self.step.scale:g}: a smaller scale may help.'
            return Diagnosis('gradient_scale', text, phase=BACKWARD)
        return Diagnosis('loss', f'{text} the model, is not. {_LOSS_ADVICE}', phase=BACKWARD)

    def _at(self, cause: str, text: str, module: str, place: BadOp | None = None) -> Diagnosis:
        words: dict[str, Any] = {} if place is None else {'phase': place.phase, 'op': place.op, 'source': place.source}
        return Diagnosis(cause, text, module, **words)

    def _begins(self, place: BadOp) -> str:
        """Say where it begins, and with which numbers."""
        kind, what = ('NaN', 'NaN') if place.kind == NAN else ('Infinity', 'infinite')
        phase = 'forward pass' if place.phase == FORWARD else f'backward pass ({place.node or "a sum of gradients"})'
        came = '' if place.given is None else ' from finite numbers between {:.3g} and {:.3g}'.format(*place.given)
        line = f' The line is {place.source}.' if place.source else ''
        who = called(self.model, place.module)
        counts = '{:,} of {:,} elements'.format(*place.counts)
        begin = f'{kind} in {dtype_name(place.dtype)} in the {phase} of {who}'
        return f'{begin}: {place.op} made {counts} {what}{came}.{line}'

    # -- settings that may help --------------------------------------------------------------------------------------

    def _try(self, module: str) -> list[Remedy]:
        """Try what may make the step finite: a module in FP32, and bfloat16 in place of float16, without a loss scale."""
        policy, found = self.engine.policy, []
        if module and self.step.calls:
            kept = (*policy.keep_fp32, module)
            shown = [item if isinstance(item, str) else item.__name__ for item in kept]
            changed = dataclasses.replace(policy, keep_fp32=kept)
            # a dynamic loss scale falls by itself
            found = [self._tried('keep_fp32', f'keep_fp32={shown}', changed, not policy.loss_scale.dynamic)]
        if policy.half_type is torch.float16 and self.step.calls:
            level = IN_BFLOAT16.get(policy.opt_level, policy.opt_level)
            kind = 'cast_model_type' if policy.casts_model else 'autocast_dtype'
            changes: dict[str, Any] = {'opt_level': level, kind: torch.bfloat16, 'split_masters': False}
            setting = "dtype='bfloat16'" if level == policy.opt_level else f"opt_level='{level}'"
            found.append(self._tried('bfloat16', setting, dataclasses.replace(policy, **changes)))
        return found

    def _without_scale(self) -> Remedy:
        return self._tried('loss_scale', 'loss_scale=1.0', self.engine.policy)

    def _tried(self, kind: str, setting: str, policy: Policy, is_scaled: bool = False) -> Remedy:
        found = self._run(policy, 1.0 if is_scaled else 1 / self.step.scale)
        finite = None if found.refused else found.is_finite
        return Remedy(kind, setting, finite, bool(finite) and not found.gradients_known)

    def _run(self, policy: Policy | None = None, factor: float = 1.0, traced: bool = False) -> Replay:
        """Run the forward calls again, and their backward passes from the gradients that the losses gave. Syncs.

        Args:
            policy: The level; that of the training by default.
            factor: The gradients of the losses are multiplied by it: another loss scale.
            traced: Whether to look for the place where infinities and NaN begin, which is slow.
        """
        found = Replay()
        try:
            with sandbox(self.model, policy or self.engine.policy, attach=self.attach) as box:
                for call in self.step.calls:
                    run_call(box, call, factor, traced, found)
        except Exception as error:
            # whatever a copy of a model does, the training goes on
            is_ours = isinstance(error, AmpError)
            found.refused = str(error) if is_ours else f'a copy of the model could not be run ({one_line(error)})'
        return found

    def _type(self) -> torch.dtype:
        return self.engine.policy.half_type or torch.float32


def _not_replayed(why: str) -> Diagnosis:
    text = 'No other step is examined. NonfiniteHook, in scripts nonfinite_watch, names the module of a forward pass.'
    return Diagnosis('not_replayed', f'The step could not be run again: {why.rstrip(".")}. {text}')


def _fp32(weight: Tensor) -> Tensor:
    # found by the parameter itself, which no view of it is
    exact = fp32_values.fp32_value(weight) if weight.dtype in HALF_TYPES else weight
    return local([exact.detach()])[0]
