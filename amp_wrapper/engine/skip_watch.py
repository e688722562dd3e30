"""When the host has to know whether steps are skipped, and what it says about them."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence

from .step_result import LOSS_SCALE, SKIP, SKIPS, STREAK

logger = logging.getLogger('amp_wrapper')


class SkipWatch:
    """Follows skipped steps from the decisions that the host gets to see, some of them late.

    A step that nobody waits for leaves its decision on the device. Doors read those together with the log values and hand
    them over. A row of skips that may reach the limit with the next one makes that step wait, so that the error comes while the
    gradients that caused it are there.

    Args:
        limit: Skips in a row that end the training, or None.
        verbosity: 0 says nothing about skipped steps.
    """

    def __init__(self, limit: int | None, verbosity: int) -> None:
        self._limit = limit
        self._verbosity = verbosity
        self._streak = 0
        self._unseen = 0

    @property
    def must_wait(self) -> bool:
        """Whether the next step could be the one too many, as far as the host knows.

        Where nobody hands decisions over, that is so once in ``limit`` steps.
        """
        return self._limit is not None and self._streak + self._unseen + 1 >= self._limit

    def pass_unseen(self) -> None:
        """A step whose decision the host has not seen."""
        self._unseen += 1

    def start(self, streak: int) -> None:
        """Begin with so many skips in a row: after a state was loaded."""
        self._streak, self._unseen = streak, 0

    def see(self, skipped: bool, skips: int, streak: int, scale: Callable[[], str], label: str = '') -> bool:
        """Take notice of one step, the latest so far, and say so where it was skipped.

        Args:
            skipped: Whether it was.
            skips: In all, with this one.
            streak: In a row, with this one.
            scale: Gives what to say of the loss scale after it.
            label: What to call the engine.

        Returns:
            Whether the limit is reached.
        """
        self._streak, self._unseen = streak, 0
        if not skipped:
            return False
        if self._limit is not None and streak >= self._limit:
            return True
        # rare enough to read, often enough to see a collapse coming: the first few, then at every doubling
        if self._verbosity >= 1 and (skips <= 5 or skips & (skips - 1) == 0):
            name = f'{label}: ' if label else ''
            logger.warning(
                f'amp: {name}non-finite gradients, optimizer step skipped ({skips} so far, {streak} in a row); '
                f'loss scale now {scale()}',
            )
        return False

    def review(
        self, decisions: Iterable[Sequence[float]], scales: Callable[[], str], one_loss: bool = True, label: str = ''
    ) -> None:
        """Take notice of steps that nobody waited for.

        Args:
            decisions: Those of steps that nobody waited for, in order, up to the latest, as numbers.
            scales: Gives what to say of the present loss scales.
            one_loss: Whether a decision tells the loss scale of its step.
            label: What to call the engine.
        """
        known = (self._streak, self._unseen)
        for decision in decisions:
            # where nothing is scaled, none is told
            told = one_loss and not math.isnan(decision[LOSS_SCALE])
            scale = f'{decision[LOSS_SCALE]:g}'.strip if told else scales
            self.see(decision[SKIP] > 0, int(decision[SKIPS]), int(decision[STREAK]), scale, label)
        if not known[1]:
            # a later step was waited for
            self._streak, self._unseen = known


__all__ = ['SkipWatch']
