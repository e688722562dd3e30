"""Watches the steps of an engine, and finds the cause of those that are skipped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed
from torch import Tensor, nn

from ..engine import Engine
from ..engine.engine import StepObserver
from ..engine.flags import SKIP, LateRead, StepResult
from ..errors import logger
from .causes import diagnose
from .diagnosis import Diagnosis
from .live import LiveWatch, judge_watched
from .recorder import Recorder, StepRecord
from .remedies import trials_of
from .replay import is_bad
from .sandbox import Attach

#: Reports of one training.
MOST_REPORTS = 10
#: Skips in a row that a loss scale which falls may take without a report: 2**16 falls to 1 in so many.
MOST_FALLS = 16


class OverflowDiagnosis(StepObserver):
    """Records the steps of one engine, runs a skipped one again, and says why it was not finite.

    A step keeps references to the arguments of its forward calls and to the gradients at the outputs of the model, and the
    states of the random generators. On a GPU the flag of a step is read when the next one is due: the device is not waited for.

    That a dynamic loss scale falls is no fault, and not reported: a step that would have been finite without a loss scale.

    Args:
        models: Those whose parameters the engine steps, not wrapped.
        attach: Attaches a copy of the model; of several, a copy of an ``nn.ModuleList`` of them.
        publish: Is given each diagnosis; returns where it was written, or ''.
        most: Reports of this training.
        around: Around each examination: keeps what a copy of the model writes to other places from them.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        attach: Attach,
        publish: Callable[[Diagnosis], str],
        most: int = MOST_REPORTS,
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        # holds them all under the names that the recorder gives
        self._model = models[0] if len(models) == 1 else nn.ModuleList(models)
        self._attach = attach
        self._publish = publish
        self._left = most
        self._around = around
        self._recorder: Recorder | None = Recorder(models)
        self._pending: tuple[StepRecord, LateRead] | None = None
        # in a row: for a fault, and since a dynamic loss scale falls
        self._skips = self._falling = 0
        # of the row of skips that goes on
        self._last = ''
        # where no copy of the model can be run
        self._live: LiveWatch | None = None

    def disarm(self) -> None:
        """Record nothing any more; hooks are taken off."""
        if self._recorder is not None:
            self._recorder.remove()
            self._recorder = None
        if self._live is not None:
            self._live.remove()
            self._live = None
        self._drop_pending()

    # -- the steps of an engine --------------------------------------------------------------------------------------

    def see_loss(self, engine: Engine, loss: Tensor, loss_id: int) -> None:
        """A loss is about to be scaled."""
        if self._recorder is not None:
            self._resolve(engine, wait=False)
            self._recorder.see_loss(engine, loss, loss_id)

    def before_step(self, engine: Engine) -> None:
        """Weights are still those of the step before, so that one can be run again now at the latest."""
        self._resolve(engine, wait=True)

    def after_step(self, engine: Engine, result: StepResult) -> None:
        """The step was taken or skipped."""
        if self._recorder is None:
            return
        record = self._recorder.next_step()
        if result.skipped is not None or result.info is None:
            self._take(engine, record, bool(result.skipped))
        elif record.calls or record.losses:
            if not result.info.is_cuda:
                self._take(engine, record, bool(result.info[SKIP]))
                return
            self._pending = (record, LateRead(result.info[SKIP : SKIP + 1].clone()))
            self._resolve(engine, wait=False)

    def explain_streak(self, engine: Engine) -> str:
        """Too many steps in a row were skipped: the cause, found now where it is not known yet."""
        if not self._last and self._recorder is not None:
            self._left = max(self._left, 1)
            self._report(engine, self._recorder.step, may_fall=False)
        return self._last

    # -- what became of them -----------------------------------------------------------------------------------------

    def _resolve(self, engine: Engine, wait: bool) -> None:
        if self._pending is None or not (wait or self._pending[1].is_there):
            return
        (record, read), self._pending = self._pending, None
        self._take(engine, record, read.wait()[0] > 0)

    def _take(self, engine: Engine, record: StepRecord, skipped: bool) -> None:
        if skipped:
            self._skips += 1
            # the first ones of a row, and then ever fewer
            # without a loss, nothing was recorded yet; without a call, torch.compile hides it
            if record.losses and self._left > 0 and (self._skips <= 3 or self._skips & (self._skips - 1) == 0):
                self._report(engine, record)
        else:
            self._skips = self._falling = 0
            self._last = ''
            if self._live is not None:
                self._live.take()
        record.clear()

    def _falls(self, engine: Engine, record: StepRecord) -> bool:
        """Whether a dynamic loss scale was too large for the step, and falls: without it, the step is finite. Syncs."""
        if (
            not engine.scales.is_dynamic
            or self._falling >= MOST_FALLS
            or any(is_bad(loss.value) for loss in record.losses)
        ):
            return False
        given = [each for call in record.calls for kept in call.gradients.values() for each in kept.values()]
        # infinite gradients come from losses outside of the model as well, where float16 has no room for the scale
        has_nan = any(bool(gradient.isnan().any()) for gradient in given)
        again = trials_of(record, self._model, engine.policy, self._attach, has_nan).without_scale()
        return self._falling < 3 if again.refused else again.is_finite

    def _report(self, engine: Engine, record: StepRecord, may_fall: bool = True) -> None:
        self._left -= 1
        several = torch.distributed.is_available() and torch.distributed.is_initialized()
        several = several and torch.distributed.get_world_size() > 1
        try:
            with self._around():
                if may_fall and self._falls(engine, record):
                    self._left += 1
                    self._skips -= 1
                    self._falling += 1
                    return
                found = self._find(engine, record, several)
            path = self._publish(found)
        except Exception as error:
            # whatever goes wrong here, the training goes on
            logger.warning(f'amp: the skipped step could not be examined ({type(error).__name__}: {error})')
            return
        self._last = ' '.join(part for part in (found.text, found.advice, path and f'Report: {path}.') if part)
        if engine.policy.verbosity >= 1:
            name = f'{engine.label}: ' if engine.label else ''
            logger.warning(f'amp: {name}why a step was skipped: {self._last}')

    def _find(self, engine: Engine, record: StepRecord, several: bool) -> Diagnosis:
        if self._live is not None:
            return judge_watched(self._live.take(), record, engine, several)
        found = diagnose(record, self._model, engine, self._attach, several)
        if not record.calls and not record.unseen:
            # it would be the same each time
            self._left = 0
        elif found.cause == 'not_reproduced' and self._recorder is not None:
            self._recorder.watch_children()
        elif found.cause == 'not_replayed':
            self._live = LiveWatch(self._model)
            found.notes.append(
                'From now on its modules are watched while it trains: see the report of the next skipped step.'
            )
            self._left += 1
        return found

    def _drop_pending(self) -> None:
        if self._pending is not None:
            self._pending[0].clear()
            self._pending = None
