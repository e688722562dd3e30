"""Watches the steps of an optimizer while it trains: why steps are skipped, and on request how large gradients are."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..casting import region
from ..casting.cast_module import Watcher
from ..checkpoint import random_state
from ..engine.engine import Engine, StepObserver
from ..engine.flags import SKIP, LateRead, StepResult
from ..errors import logger, one_line
from ..policy.nested import HALF_TYPES
from ..policy.options import Option, is_count
from ..shards import is_sharded, local, rank
from .overflow import Diagnosis, diagnose
from .page import finite
from .replay import MOST_CALLS, CallRecord, LossRecord, StepRecord, versions_of
from .sandbox import Attach
from .watches import is_bad, numbers

#: Reports of one training.
MOST_REPORTS = 10
#: Skips in a row that a loss scale which falls may take without a report: 2**16 falls to 1 in so many.
MOST_FALLS = 16
#: Causes that such a scale mends, or may mend where a step cannot be run again.
_FALLING = ('gradient_scale', 'not_reproduced', 'not_replayed')
#: Elements that are measured at a time.
_PIECE = 2**20
#: Is given the iteration and numbers by name.
Log = Callable[[int, dict[str, Any]], object]
#: A block around each examination, which keeps what a copy of a model writes to other places from them.
Around = Callable[[], AbstractContextManager[None]]
#: What ``amp.monitor`` and ``AmpMonitorHook`` take alike, for :func:`~amp_wrapper.policy.options.read_options`.
OPTIONS = {
    'interval': Option(None, (is_count, None), 'a whole number of steps, at least 1, or None'),
    'diagnose_overflow': Option(True, (True, False)),
}


class SkippedSteps(StepObserver):
    """Records the steps of one engine, runs a skipped one again, and says why it was not finite.

    A step keeps references to the arguments of its forward calls and to the gradients at the outputs of the model, and the
    states of the random generators. On a GPU the flag of a step is read when the next one is due: the device is not waited for.
    That a dynamic loss scale falls is no fault, and not reported.

    Args:
        models: Those whose parameters the engine steps, not wrapped.
        attach: Attaches a copy of the model; of several, a copy of an ``nn.ModuleDict`` of them.
        publish: Is given each diagnosis; returns where it was written, or ''.
        around: Surrounds each examination.
    """

    def __init__(
        self, models: Sequence[nn.Module], attach: Attach, publish: Callable[[Diagnosis], str], around: Around
    ) -> None:
        # under the names that they have elsewhere
        named = {f'models[{index}]' if len(models) > 1 else '': model for index, model in enumerate(models)}
        self._model = models[0] if len(models) == 1 else nn.ModuleDict(named)
        self._attach, self._publish, self._around = attach, publish, around
        # the states are those of the random generators at the last call
        self._record, self._depth, self._states = StepRecord(), threading.local(), dict[str, Any]()
        self._watchers = [Watcher(partial(self._enter, name), self._leave).watch(named[name]) for name in named]
        self._pending: tuple[StepRecord, LateRead] | None = None
        self._reports_left = MOST_REPORTS
        # in a row; why they were, which is '' when a step is taken
        self._skips, self._explanation = 0, ''

    def close(self) -> None:
        """Record nothing any more."""
        for watcher in self._watchers:
            watcher.remove()
        # they hold each other
        self._watchers, self._record, self._pending = [], StepRecord(), None

    def see_loss(self, engine: Engine, loss: Tensor, loss_id: int) -> None:
        """Record a loss that is about to be scaled, for a backward pass."""
        self._read_flag(engine, wait=False)
        scale, made_by = engine.scales.pinned(loss_id), '' if loss.grad_fn is None else loss.grad_fn.name()
        scale = None if scale is None else scale.clone()
        self._record.losses.append(LossRecord(loss_id, loss.detach(), scale, made_by))

    def before_step(self, engine: Engine) -> None:
        """Read how the last step went: weights are still those of that step, so it can be run again now at the latest."""
        self._read_flag(engine, wait=True)

    def after_step(self, engine: Engine, result: StepResult) -> None:
        """Look at a step that was taken or skipped, when its flag has reached the host."""
        record, self._record = self._record, StepRecord()
        if result.skipped is not None or result.info is None:
            self._take(engine, record, bool(result.skipped))
        elif record.losses:
            self._pending = record, LateRead(result.info[SKIP : SKIP + 1].clone())
            self._read_flag(engine, wait=False)

    def explain_streak(self, engine: Engine) -> str:
        """Return the cause of a row of skips that is too long, found now where it is not known yet."""
        if not self._explanation:
            self._report(engine, self._record, always=True)
        return self._explanation

    # -- what is recorded --------------------------------------------------------------------------------------------

    def _enter(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._depth.value = getattr(self._depth, 'value', 0) + 1
        if self._depth.value == 1 and torch.is_grad_enabled():
            # models change the dicts and lists that they are given
            self._states = random_state.capture(self._states)
            given = _same_tensors((args, kwargs))
            call = CallRecord(name, given, self._states, region.is_open(), versions_of(given))
            self._record.dropped += len(self._record.calls) == MOST_CALLS
            self._record.calls[:] = [*self._record.calls[1 - MOST_CALLS :], call]

    def _leave(self, module: nn.Module, output: Any) -> None:
        # an exception may have left others open
        self._depth.value = max(getattr(self._depth, 'value', 0) - 1, 0)
        if self._depth.value or not torch.is_grad_enabled() or not self._record.calls:
            return
        call, outputs = self._record.calls[-1], numbers(output)
        if not any(tensor.requires_grad for tensor in outputs):
            # such as a preprocessor: no gradient comes from it
            self._record.calls.pop()
        for place, tensor in enumerate(outputs):
            # hooks of leaves would stay
            if tensor.requires_grad and not tensor.is_leaf:
                # it holds no engine, since scripts keep their losses
                tensor.register_hook(partial(_keep, self._record, call, place))  # type: ignore[no-untyped-call]

    # -- what is found out -------------------------------------------------------------------------------------------

    def _read_flag(self, engine: Engine, wait: bool) -> None:
        if self._pending is not None and (wait or self._pending[1].is_there):
            (record, read), self._pending = self._pending, None
            self._take(engine, record, read.wait()[0] > 0)

    def _take(self, engine: Engine, record: StepRecord, skipped: bool) -> None:
        if skipped:
            self._skips += 1
            # ever fewer of a row
            if record.losses and self._reports_left and self._skips & (self._skips - 1) == 0:
                self._report(engine, record)
        else:
            self._skips, self._explanation = 0, ''
        record.clear()

    def _report(self, engine: Engine, record: StepRecord, always: bool = False) -> None:
        """Say why a step was skipped, also where a dynamic loss scale may mend it by itself if that is asked for ``always``."""
        try:
            with self._around():
                found = diagnose(record, self._model, engine, self._attach)
                if not always and found.cause in _FALLING and self._may_fall(engine, record):
                    return
            # what could not be run again can never be
            self._reports_left = 0 if found.cause == 'not_replayed' else self._reports_left - 1
            path = self._publish(found)
        except Exception as error:
            # whatever goes wrong here, the training goes on
            logger.warning(f'amp: the skipped step could not be examined ({one_line(error)})')
            return
        self._explanation = f'{found.text} Report: {path}.' if path else found.text
        if engine.policy.verbosity >= 1:
            name = f'{engine.label}: ' if engine.label else ''
            logger.warning(f'amp: {name}why a step was skipped: {self._explanation}')

    def _may_fall(self, engine: Engine, record: StepRecord) -> bool:
        """Return whether the loss scale may fall until steps like this one are finite. Syncs."""
        least = max(engine.policy.loss_scale.min_scale or 0.0, 1.0)
        can_fall = engine.scales.is_dynamic and record.scale > least and self._skips < MOST_FALLS
        return can_fall and not any(is_bad(loss.value) for loss in record.losses)


def _keep(step: StepRecord, call: CallRecord, place: int, gradient: Tensor) -> None:
    """Keep the gradient of an output."""
    # without a loss it is of one of other optimizers
    if step.losses:
        call.losses.add(len(step.losses) - 1)
        known = call.gradients.get(place)
        call.gradients[place] = gradient if known is None else known + gradient


def _same_tensors(value: Any) -> Any:
    """Return new lists, tuples and dicts, with the same things in them."""
    if type(value) in (list, tuple):
        return type(value)(map(_same_tensors, value))
    return {key: _same_tensors(item) for key, item in value.items()} if type(value) is dict else value


class TrainingWatch(StepObserver, AbstractContextManager['TrainingWatch']):
    """Examines the skipped steps of an optimizer, and measures some of its steps; made by :func:`amp_wrapper.amp.monitor`.

    The numbers of a step: ``amp_grad_subnormal``, the share of gradient elements other than zero that are below the normal
    range of float16, and ``amp_grad_peak``, the largest one in powers of two from the largest number of float16, both with the
    loss scale and where the level computes in float16; ``amp_scale``, that of the step; ``amp_skipped``, the steps that were
    skipped so far. They are computed on the device, and read late.

    Args:
        engine: Of the optimizer; None watches nothing.
        models: Those whose parameters it steps, not wrapped.
        attach: Attaches copies of them, as for :class:`SkippedSteps`.
        options: As of :data:`OPTIONS`.
        logs: Each is given the numbers; its name is for a warning where it fails.
        reports: Folder in which ``amp_diagnosis`` has the reports; None writes none.
        name: Of the optimizer, for the names of files, where there are several.
        around: As for :class:`SkippedSteps`.

    Attributes:
        diagnoses: What was found out about skipped steps.
        iteration: The present one, counted from 1: the number of the step, unless :meth:`begin` says which it is.
    """

    def __init__(
        self,
        engine: Engine | None,
        models: Sequence[nn.Module],
        attach: Attach,
        options: Mapping[str, Any],
        logs: Mapping[str, Log],
        reports: Path | None = None,
        name: str = '',
        around: Around = nullcontext,
    ) -> None:
        self.diagnoses: list[Diagnosis] = []
        self.iteration = 0
        self._engine, self._logs, self._reports, self._name = engine, dict(logs), reports, name
        self._interval: int | None = options['interval']
        # the iteration of the last step: what is told of it comes late
        self._last = 0
        self._counts_steps, self._is_due = True, False
        self._measured: dict[str, Tensor] = {}
        self._latest: dict[str, float] = {}
        self._failed: set[str] = set()
        self._waiting: list[tuple[int, list[str], LateRead]] = []
        self._skipped: SkippedSteps | None = None
        if engine is not None:
            if options['diagnose_overflow'] and engine.scales.check and models:
                self._skipped = SkippedSteps(models, attach, self._publish, around)
            # the flag of the last step is read before this step has its iteration
            engine.observers += [self] if self._skipped is None else [self._skipped, self]

    def begin(self, iteration: int) -> None:
        """Say which iteration comes, from 1 on. While gradients are accumulated, the next step that is taken is measured."""
        self.iteration, self._counts_steps = iteration, False
        self._is_due |= self._interval is not None and (iteration == 1 or iteration % self._interval == 0)

    def read(self) -> dict[str, float]:
        """Return the numbers of the last measured step, by name; empty before the first. Syncs, where they are on their way."""
        self._hand_on(wait=True)
        return dict(self._latest)

    def close(self) -> None:
        """Write what is left, and watch no longer. Syncs."""
        self._hand_on(wait=True)
        # they hold the model
        engine, skipped, self._engine, self._skipped = self._engine, self._skipped, None, None
        if engine is not None:
            # the list may be in use: a log function may close
            engine.observers = [each for each in engine.observers if each not in (self, skipped)]
        if skipped is not None:
            skipped.close()

    def __exit__(self, *error: object) -> None:
        self.close()

    @torch.no_grad()
    def before_step(self, engine: Engine) -> None:
        """Measure gradients, where the step is due, and hand on what has reached the host."""
        if self._counts_steps:
            self.begin(self.iteration + 1)
            self._counts_steps = True
        self._last = self.iteration
        self._measured, self._is_due = _measure(engine) if self._is_due else {}, False
        self._hand_on(wait=False)

    def after_step(self, engine: Engine, result: StepResult) -> None:
        """Count this step among the skipped ones, and send its numbers to the host."""
        if self._measured and not rank():
            found = {**self._measured, 'amp_skipped': engine.scales.steps.counts[1]}
            row = torch.stack([each.to(engine.device).double() for each in found.values()])
            self._waiting.append((self._last, list(found), LateRead(row)))

    def _hand_on(self, wait: bool) -> None:
        """Hand on what has reached the host, or all of it. The first failure of each log is warned of."""
        while self._waiting and (wait or self._waiting[0][-1].is_there):
            iteration, names, row = self._waiting.pop(0)
            self._latest = {name: number for name, number in zip(names, row.wait()) if math.isfinite(number)}
            for name, log in self._logs.items():
                try:
                    log(iteration, dict(self._latest))
                except Exception as error:
                    if name not in self._failed:
                        logger.warning(f'amp: {name} failed at step {iteration}, and is called on ({one_line(error)})')
                    self._failed.add(name)

    def _publish(self, found: Diagnosis) -> str:
        """Write a diagnosis as a page and as JSON; returns the path of the page, or ''."""
        self.diagnoses.append(found)
        # one report of a cause that is elsewhere is enough
        if self._reports is None or (rank() and found.cause == 'not_reproduced'):
            return ''
        stem = '_'.join(filter(None, (f'iter_{self._last}', self._name, f'rank{rank()}' if rank() else '')))
        page = found.page(iteration=self._last, rank=rank(), optimizer=self._name)
        try:
            return str(page.write(self._reports / 'amp_diagnosis', stem)[0])
        except OSError as error:
            logger.warning(f'amp: the report on a skipped step could not be written ({error})')
            return ''


def _measure(engine: Engine) -> dict[str, Tensor]:
    """Return the numbers of a step that is due, scalars: those of gradients where there are some in float16."""
    policy = engine.policy
    # FP32 weights of a cast model have FP32 gradients, which are in no danger; shards are FP32, and gathered in 16-bit
    found = [
        (local([gradient])[0], is_unscaled)
        for _, weight, gradient, is_unscaled in engine.gradients_at_hand()
        if not gradient.is_sparse and (not policy.casts_model or weight.dtype in HALF_TYPES or is_sharded(weight))
    ]
    devices = {gradient.device for gradient, _ in found}
    # the step changes it in place
    numbers = {'amp_scale': engine.scales.first.current_scale.clone()}
    if policy.half_type is not torch.float16 or len(devices) != 1:
        return numbers
    scale, normal = numbers['amp_scale'].to(found[0][0].device), torch.finfo(torch.float16)
    counts, peak = scale.new_zeros(2, dtype=torch.float64), scale.new_zeros(1, dtype=torch.float64)
    for gradient, is_unscaled in found:
        for piece in torch.split(gradient.detach().reshape(-1), _PIECE) if gradient.numel() else ():
            sizes = piece.float().abs() * (scale if is_unscaled else 1.0)
            known = sizes.isfinite() & (sizes > 0)
            counts += torch.stack([(known & (sizes < normal.tiny)).sum(), known.sum()])
            peak = torch.maximum(peak, torch.where(known, sizes, 0.0).amax())
    below, known = engine.params.layout.exchange(counts)
    peak = engine.params.layout.exchange(peak, greatest=True)[0]
    return {**numbers, 'amp_grad_subnormal': below / known, 'amp_grad_peak': torch.log2(peak / normal.max)}


def lines_to(path: Path) -> Log:
    """Return a log that writes lines of JSON to the end of a file, which is made where it is missing."""

    def write(iteration: int, values: Mapping[str, Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open('a', encoding='utf-8') as file:
            file.write(json.dumps(finite({'iteration': iteration, **values}), allow_nan=False) + '\n')

    return write
