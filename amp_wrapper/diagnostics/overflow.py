"""Runs a skipped step again, and says in words why it was not finite: where that begins, and which setting mends it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from ..casting import fp32_values
from ..casting.modules import class_name
from ..checkpoint import random_state
from ..engine import Engine
from ..errors import AmpError, one_line, some
from ..policy import Policy, dtype_name
from ..policy.levels import IN_BFLOAT16, LEVEL_TABLE
from ..policy.nested import HALF_TYPES, cast_tensors
from ..shards import local
from .page import Page, Table
from .sandbox import Attach, Pass, Sandbox, copied_batch, own_functions, run_step, sandbox
from .watches import BACKWARD, FORWARD, NAN, BadOp, FirstBad, Maximum, is_bad, numbers, tensors_of

#: Forward calls of one step that are kept, the last ones.
MOST_CALLS = 32
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


# -- a step, as it was recorded ----------------------------------------------------------------------------------------


class LossRecord(NamedTuple):
    """One loss that was scaled: its value without its graph, a copy of its scale (None for 1), what computed it."""

    loss_id: int
    value: Tensor
    scale: Tensor | None
    made_by: str


@dataclasses.dataclass
class CallRecord:
    """One forward call of a model, from outside of any other.

    Attributes:
        name: Of the model, where there are several; else ''.
        given: Its ``args`` and ``kwargs`` as they came, before any cast.
        states: Of the random generators before the call.
        surrounds: Whether the engine surrounded it, as mmengine's wrapper does.
        gradients: The scaled gradient of each floating tensor of the outputs, by its place among them; a sum where several
            losses gave one.
        losses: The places of these losses in the step.
        versions: Version counters of the tensors among the arguments.
    """

    name: str
    given: tuple[tuple[Any, ...], dict[str, Any]]
    states: dict[str, Any]
    surrounds: bool
    gradients: dict[int, Tensor] = dataclasses.field(default_factory=dict)
    losses: set[int] = dataclasses.field(default_factory=set)
    versions: list[int] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.versions = self.current_versions()

    def current_versions(self) -> list[int]:
        """Return the version counters as they are now."""
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors_of(self.given)]

    @property
    def has_bad_gradients(self) -> bool:
        """Whether a gradient that came back is not finite. Syncs."""
        return any(map(is_bad, self.gradients.values()))


@dataclasses.dataclass
class StepRecord:
    """The forward calls and losses since the last step.

    Attributes:
        calls: In their order.
        losses: In the order of their backward passes.
        dropped: Forward calls before the last :data:`MOST_CALLS`.
    """

    calls: list[CallRecord] = dataclasses.field(default_factory=list)
    losses: list[LossRecord] = dataclasses.field(default_factory=list)
    dropped: int = 0

    @property
    def scale(self) -> float:
        """The largest loss scale. Syncs."""
        return max((float(loss.scale) for loss in self.losses if loss.scale is not None), default=1.0)

    def clear(self) -> None:
        """Let go of all tensors. Hooks in the graph of a loss that somebody keeps still hold the calls."""
        for call in self.calls:
            call.given, call.gradients = ((), {}), {}
        self.calls.clear()
        self.losses.clear()


# -- the step again ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Replay:
    """What one replay of a step has shown.

    Attributes:
        refused: Why there is none; '' where it ran.
        wrong: The calls whose outputs, or gradients of parameters, were not finite.
        gradients_known: Whether the backward passes ran with the gradients that the losses gave.
        sums: Of each parameter the sum of its gradients; ``parameters`` are those that are not finite in one pass.
        first: Where that begins, and ``call`` the call in which it does; None where nothing was traced.
        outputs: The largest numbers that modules gave in this call, in the order in which they ended.
    """

    refused: str = ''
    wrong: list[CallRecord] = dataclasses.field(default_factory=list)
    gradients_known: bool = True
    parameters: list[str] = dataclasses.field(default_factory=list)
    sums: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    first: BadOp | None = None
    call: CallRecord | None = None
    outputs: list[Maximum] = dataclasses.field(default_factory=list)

    @property
    def bad_sums(self) -> list[str]:
        """The parameters whose gradients are finite in each pass, and not in their sum."""
        return [] if self.wrong else [name for name, total in self.sums.items() if is_bad(total)]

    @property
    def is_finite(self) -> bool:
        """Whether all that ran was finite."""
        return not (self.refused or self.wrong or self.bad_sums)


@dataclasses.dataclass(frozen=True)
class Remedy:
    """One setting, and what became of the step with it.

    Attributes:
        kind: 'keep_fp32', 'bfloat16', 'loss_scale', 'accumulate_in_fp32' or 'fp32'.
        setting: As it is written in a configuration.
        finite: Whether the step was finite with it; None where it could not be tried.
        forward_only: Whether the forward pass alone could be tried, since the loss is computed outside of the model.
    """

    kind: str
    setting: str
    finite: bool | None
    forward_only: bool = False


def _run_call(box: Sandbox, call: CallRecord, factor: float, traced: bool, found: Replay) -> None:
    """Run one call with its backward passes, and note what it has shown."""
    # one model may be given what another one gave at its level
    half = box.engine.policy.half_type or torch.float32
    args, kwargs = cast_tensors(copied_batch(call.given, cuts=True), half, HALF_TYPES)
    bad: list[Tensor] = []

    def run(copied: nn.Module) -> Pass:
        random_state.restore(call.states)
        outputs = numbers(copied.get_submodule(call.name)(*args, **kwargs))
        bad.extend(filter(is_bad, outputs))
        pairs = [] if bad or call.has_bad_gradients else _pairs(call.gradients, outputs, factor)
        found.gradients_known &= bool(pairs) and len(pairs) == len(call.gradients)
        return pairs

    trace = FirstBad(box.model, tensors_of((args, kwargs))) if traced else None
    step = run_step(box, run, [] if trace is None else [trace], surrounds=call.surrounds, updates=False)
    wrong = {name: gradient for name, gradient in step.gradients.items() if is_bad(gradient)}
    found.parameters += [name for name in wrong if name not in found.parameters]
    for name, gradient in step.gradients.items():
        found.sums[name] = gradient if name not in found.sums else found.sums[name] + gradient
    if bad or wrong:
        found.wrong.append(call)
    if trace is not None:
        # the copy is thrown away, but it may hold it
        trace.modules.remove()
        # what is wrong in one call goes on to the inputs of later ones, and to the gradients of earlier ones
        if (bad or wrong) and (found.first is None or found.first.phase == BACKWARD):
            found.first, found.call = trace.begin([*bad, *wrong.values()]), call
            found.outputs = [each for each in trace.modules.take() if not each.is_input]


def _pairs(gradients: dict[int, Tensor], outputs: Sequence[Tensor], factor: float) -> Pass:
    known = [(outputs[place], each) for place, each in gradients.items() if place < len(outputs)]
    fit = [(tensor, each) for tensor, each in known if tensor.requires_grad and tensor.shape == each.shape]
    # a product in 16 bits may overflow
    return [(tensor, (each.double() * factor).to(tensor.dtype)) for tensor, each in fit]


# -- what it shows -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Diagnosis:
    """Why a step was not finite.

    Attributes:
        cause: 'input': what the model was given is not finite. 'weight': a weight, a buffer or the optimizer's state is not, or
            is too large. 'forward_range', 'gradient_range': a number is too large, or too small, for the 16-bit type.
            'forward_nan', 'gradient_nan': not finite in FP32 either. 'gradient_scale': a gradient fits without the loss scale.
            'loss': the loss, or its gradient at the outputs, is not finite. 'not_reproduced': finite when it was run again.
            'not_replayed': it could not be run again.
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


def _names(value: Any, depth: int = 6) -> Iterator[str]:
    """Yield the texts of a batch, in dicts and in ``metainfo`` of objects, that are called like a path, a name or an id."""
    parts = getattr(value, 'metainfo', value)
    items = parts.items() if isinstance(parts, dict) else enumerate(parts) if isinstance(parts, (list, tuple)) else ()
    for key, item in items:
        if isinstance(item, str) and str(key).endswith(('path', 'name', 'id')):
            yield item
        elif depth:
            yield from _names(item, depth - 1)


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
        """Look at weights and optimizer state; None where they are finite, and in range."""
        stepped = set(map(id, self.engine.weights()))
        parameters = self.model.named_parameters()
        named = {name: p for name, p in parameters if p.requires_grad and id(p) in stepped}
        bad = [name for name, weight in named.items() if is_bad(_fp32(weight))]
        names = bad or [name for name, weight in named.items() if is_bad(local([weight.detach()])[0])]
        if not names:
            return None
        if state := self._bad_state() if bad else []:
            why = f'the state of the optimizer is not finite ({some(state)})'
        elif bad:
            why = 'other code wrote to them, gradients were changed after the check, or a step was too large, by its learning '
            why += 'rate or an eps that is zero in the type of 16-bit weights, since steps like this one are skipped'
        else:
            most = max(float(_fp32(named[name]).abs().max()) for name in names)
            end = torch.finfo(self._type()).max
            why = f'numbers up to {most:.3g} are too large for {dtype_name(self._type())}, which ends at {end:.5g}'
        found = self._at('weight', f'Weights are not finite: {some(names)}: {why}.', names[0].rpartition('.')[0])
        found.parameters, found.remedies = names, [] if bad else self._try(found.module)
        return found

    def _bad_state(self) -> list[str]:
        """Name what of the optimizer's state is not finite: 'weight: exp_avg'."""
        states: Any = {} if self.engine.optimizer is None else self.engine.optimizer.state
        return [
            f'{self.engine.name(cast(nn.Parameter, parameter))}: {key}'
            for parameter, values in states.items()
            for key, value in (values.items() if isinstance(values, dict) else ())
            if isinstance(value, Tensor) and value.is_floating_point() and is_bad(local([value])[0])
        ]

    def of_replay(self) -> Diagnosis:
        """Run the step again, and say what it shows."""
        step = self.step
        if not step.calls:
            what = 'no call of the whole model that gives tensors with gradients was seen: it is called part by part, gives an '
            return _not_replayed(f'{what}object of its own class, or torch.compile hides it (train without it).')
        if not all(call.current_versions() == call.versions for call in step.calls):
            return _not_replayed('its inputs were written to, by the model itself or after its forward pass.')
        again = self._run(traced=True)
        if again.refused:
            return _not_replayed(again.refused)
        bad_values = any(is_bad(loss.value) for loss in step.losses)
        # the gradients of outputs that are losses are single numbers
        are_losses = all(each.numel() == 1 for call in step.calls for each in call.gradients.values())
        if again.first is not None and again.call is not None:
            one = dataclasses.replace(step, calls=[again.call])
            found = dataclasses.replace(self, step=one)._of_place(again.first)
        elif step.dropped:
            return _not_replayed(f'of its forward calls the last {MOST_CALLS} are kept, and these are finite.')
        elif any(call.has_bad_gradients for call in step.calls) or (bad_values and not are_losses):
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
            text = f'What {self._called(name)} was given is not finite: {place.op} has {place.counts[0]:,} infinities or NaN'
            return self._at('input', f'{text} among {place.counts[1]:,} elements.', name, place)
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

    def _called(self, module: str) -> str:
        return f'{module} ({class_name(self.model.get_submodule(module))})' if module else 'the model'

    def _begins(self, place: BadOp) -> str:
        """Say where it begins, and with which numbers."""
        kind, what = ('NaN', 'NaN') if place.kind == NAN else ('Infinity', 'infinite')
        phase = 'forward pass' if place.phase == FORWARD else f'backward pass ({place.node or "a sum of gradients"})'
        came = '' if place.given is None else ' from finite numbers between {:.3g} and {:.3g}'.format(*place.given)
        line = f' The line is {place.source}.' if place.source else ''
        who = self._called(place.module) + ' itself' * (not place.module)
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
                    _run_call(box, call, factor, traced, found)
        except Exception as error:
            # whatever a copy of a model does, the training goes on
            is_ours = isinstance(error, AmpError)
            found.refused = str(error) if is_ours else f'a copy of the model could not be run ({one_line(error)})'
        return found

    def _type(self) -> torch.dtype:
        return self.engine.policy.half_type or torch.float32


def _not_replayed(why: str) -> Diagnosis:
    return Diagnosis('not_replayed', f'The step could not be run again: {why} No other step is examined.')


def _fp32(weight: Tensor) -> Tensor:
    # found by the parameter itself, which no view of it is
    exact = fp32_values.fp32_value(weight) if weight.dtype in HALF_TYPES else weight
    return local([exact.detach()])[0]
