"""Finds the few modules that have to stay in FP32, by trying: bisection over the tree of modules."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

from torch import nn

from ..casting.modules import class_name

#: The least share of the error that a module has to take away when it is kept in FP32.
LEAST_GAIN = 0.3
#: A part stands for the whole where keeping it alone brings this share of what keeping the whole brings.
SAME_GAIN = 0.8
#: A search ends when it has brought this share of what keeping all modules brings.
ENOUGH_GAIN = 0.9
#: What all kept modules together have to take away, where the error was finite before.
WHOLE_GAIN = 0.5
#: More modules, or classes of modules, than this are not few.
MOST_KEPT = 8
#: Up to so many modules it is tried whether each is needed.
MOST_DROPPED = 4


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one trial gave.

    Attributes:
        error: At least 0; infinity where something was not finite.
        culprit: The module in which the first infinity began, where one did.
    """

    error: float
    culprit: str | None = None

    @property
    def finite(self) -> bool:
        """Whether all was."""
        return math.isfinite(self.error)


@dataclasses.dataclass(frozen=True)
class KeepTrial:
    """One trial of a search: these modules were kept in FP32, and this was the error."""

    keep: tuple[str, ...]
    error: float


@dataclasses.dataclass(frozen=True)
class KeepSearch:
    """What a search has found.

    Attributes:
        keep: Names of the modules to keep, or of classes all of whose modules are; empty where no few modules help.
        before: Without any.
        after: With these.
        trials: All that was tried, in order.
        ended: Why it ended, in words.
    """

    keep: tuple[str, ...]
    before: Outcome
    after: Outcome
    trials: tuple[KeepTrial, ...]
    ended: str


class _NoTrialsLeftError(Exception):
    """The search has to end with what it has."""


def gain(before: Outcome, after: Outcome) -> float:
    """The share of the error that is gone; 1.0 where it was not finite and is now, 0.0 where it is not."""
    if not after.finite:
        return 0.0
    if not before.finite:
        return 1.0
    return 1.0 - after.error / before.error if before.error > 0 else 0.0


class KeepFp32Search:
    """Bisects the tree of modules.

    While something is not finite, the module in which the first infinity begins is kept, and if that does not help the module
    around it; with the second one of a class all of that class are. After that, as long as the error is above the limit: the
    children of the model are kept all together; if that takes error away, one half of them (those first that add most to the
    error of their inputs), and so on down to one child, and in the same way down to a module within it, for as long as the part
    brings nearly what the whole brings.

    Args:
        model: Its tree of modules.
        attempt: Tries a set of modules, by name.
        scores: By how much each module adds to the error, for the order of the trials alone.
        most_trials: How many trials there may be.
    """

    def __init__(
        self,
        model: nn.Module,
        attempt: Callable[[tuple[str, ...]], Outcome],
        scores: Mapping[str, float],
        most_trials: int,
    ) -> None:
        self._attempt = attempt
        self._scores = scores
        self._left = most_trials
        self._children: dict[str, list[str]] = {}
        self._classes: dict[str, list[str]] = {}
        self._class_of: dict[str, str] = {}
        for name, module in model.named_modules():
            self._class_of[name] = class_name(module)
            self._classes.setdefault(class_name(module), []).append(name)
            self._children.setdefault(name, [])
            if name:
                self._children.setdefault(name.rpartition('.')[0], []).append(name)
        self.trials: list[KeepTrial] = []
        self._known: dict[frozenset[str], Outcome] = {}

    def run(self, before: Outcome, limit: float) -> KeepSearch:
        """Search.

        Args:
            before: Of the trial that keeps nothing.
            limit: An error that is good enough.
        """
        self._known[frozenset()] = before
        keep: list[str] = []
        try:
            ended = self._make_finite(keep, before) or self._make_accurate(keep, limit)
        except _NoTrialsLeftError:
            ended = f'the {len(self.trials)} trials that were allowed are used up'
        after = self._known.get(frozenset(keep), before)
        patterns = self._patterns(keep)
        if len(patterns) > MOST_KEPT:
            ended = f'{len(patterns)} modules would have to stay in FP32, which are not few'
        elif keep and gain(before, after) < WHOLE_GAIN:
            ended += f'; all of it takes less than {WHOLE_GAIN:.0%} of the error away, so nothing is kept'
        else:
            return KeepSearch(patterns, before, after, tuple(self.trials), ended)
        return KeepSearch((), before, before, tuple(self.trials), ended)

    def _try(self, keep: Sequence[str]) -> Outcome:
        key = frozenset(keep)
        if key not in self._known:
            if not self._left:
                raise _NoTrialsLeftError
            self._left -= 1
            self._known[key] = self._attempt(tuple(keep))
            self.trials.append(KeepTrial(tuple(keep), self._known[key].error))
        return self._known[key]

    def _make_finite(self, keep: list[str], now: Outcome) -> str:
        """Keep what makes infinities. Gives why it cannot be had, or an empty string."""
        while not now.finite:
            place = now.culprit
            around = next((name for name in keep if place is not None and _is_in(place, name)), None)
            if around is not None:
                # what it gives back is too large for the type of the model, too
                place = around.rpartition('.')[0]
            if not place:
                found = None if keep else self._bisect('', keep, now, LEAST_GAIN)
                if found is None:
                    return (
                        'no few modules make it finite: it begins in the forward of the model itself, in the loss, or in the '
                        'backward pass'
                    )
                place = found
            # a second one of a class: the others will follow
            kind = self._class_of[place]
            is_second = any(self._class_of[name] == kind for name in keep)
            added = self._classes[kind] if is_second else [place]
            keep[:] = [name for name in keep if not any(_is_in(name, other) for other in added)] + list(added)
            now = self._try(keep)
        for name in list(keep) if len(keep) <= MOST_DROPPED else ():
            rest = [other for other in keep if other != name]
            if rest and self._try(rest).finite:
                keep.remove(name)
        return ''

    def _make_accurate(self, keep: list[str], limit: float) -> str:
        before = now = self._try(keep)
        while now.error > limit and len(keep) < MOST_KEPT:
            if now is not before and gain(before, now) >= ENOUGH_GAIN * gain(before, self._try(self._children[''])):
                return 'more modules would bring little more'
            found = self._bisect('', keep, now, LEAST_GAIN)
            if found is None:
                return f'no module takes {LEAST_GAIN:.0%} of the error that is left away'
            keep[:] = [*(name for name in keep if not _is_in(name, found)), found]
            now = self._try(keep)
        return 'the error is below the limit' if now.error <= limit else f'{MOST_KEPT} modules are kept'

    def _bisect(self, node: str, keep: list[str], now: Outcome, least: float) -> str | None:
        """One module below ``node`` that takes at least the share ``least`` of the error away; None without one."""
        group = [name for name in self._children[node] if not any(_is_in(name, other) for other in keep)]
        group.sort(key=lambda name: -self._score(name))
        if not group:
            return None

        def brings(names: Sequence[str]) -> float:
            return gain(now, self._try([*keep, *names]))

        whole = brings(group)
        while whole >= least and len(group) > 1:
            half = (len(group) + 1) // 2
            first, second = group[:half], group[half:]
            gained = brings(first)
            if gained >= SAME_GAIN * whole:
                group, whole = first, gained
            else:
                other = brings(second)
                group, whole = (first, gained) if gained >= other else (second, other)
        if whole < least:
            return None
        return self._bisect(group[0], keep, now, max(least, SAME_GAIN * whole)) or group[0]

    def _patterns(self, keep: Sequence[str]) -> tuple[str, ...]:
        """Names, and the names of classes all of whose several modules are kept."""
        whole = [kind for kind, names in self._classes.items() if len(names) > 1 and set(names) <= set(keep)]
        return (*whole, *(name for name in keep if self._class_of[name] not in whole))

    def _score(self, name: str) -> float:
        """The largest score of a module and those below it: lists of modules are never called."""
        return max((score for key, score in self._scores.items() if _is_in(key, name)), default=0.0)


def _is_in(name: str, around: str) -> bool:
    return name == around or name.startswith(f'{around}.')
