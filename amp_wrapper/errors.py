"""The typed errors of the package, and its logger.

Each message names the argument or key, the value that was found and what to write instead. An error is raised before
any state changes, unless its docstring says otherwise.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

#: Integrations decide where its lines go.
logger = logging.getLogger('amp_wrapper')


class AmpError(Exception):
    """Base of every error this package raises on purpose."""


class AmpConfigError(AmpError, ValueError, TypeError, AssertionError, RuntimeError):
    """A configuration that cannot mean anything: raised when the wrapper is built, with every conflict at once.

    For a wrong argument, mmengine raises ``TypeError``, ``AssertionError`` or ``ValueError``, and apex ``RuntimeError`` too.
    One error may name several arguments, so it is all four: code that catches what those raise goes on working.

    Args:
        problems: One sentence per conflict.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        rows = '\n'.join(f'  {i}. {problem}' for i, problem in enumerate(problems, 1))
        several = f'{len(problems)} conflicts in one configuration:\n{rows}'
        super().__init__(problems[0] if len(problems) == 1 else several)

    def __reduce__(self) -> tuple[type[AmpConfigError], tuple[tuple[str, ...]]]:
        return type(self), (self.problems,)


class AmpAttachError(AmpError, RuntimeError):
    """A model or optimizer that mixed precision cannot be attached to."""


class AmpUsageError(AmpError, RuntimeError):
    """A call at a moment when it has no meaning, such as ``step()`` without a ``backward()``."""


class ScriptingError(AmpUsageError, AttributeError):
    """``torch.jit.script`` of a model that mixed precision is attached to."""


class BannedOpError(AmpUsageError, NotImplementedError):
    """Not raised any more: ``binary_cross_entropy`` of 16-bit tensors warns instead. Kept for code that catches it."""


class AmpCheckpointError(AmpError, RuntimeError):
    """A checkpoint that is damaged, from the future or of another kind. Nothing of it has been applied."""


class CheckpointWriteError(AmpError, OSError):
    """A checkpoint, or another file, could not be written. The file of that name, and all others, are what they were."""


class OverflowStreakError(AmpError, RuntimeError):
    """Too many optimizer steps in a row were skipped. Weights, masters and optimizer state are those of the last clean
    step; the loss scale has followed its rule."""


class NonfiniteError(AmpError, RuntimeError):
    """A forward pass gave infinities or NaN, and somebody asked to stop there."""


def some(names: Collection[Any], most: int = 5, form: Callable[[Any], str] = str) -> str:
    """The first few of many names, for a message: ``'a, b and 3 more'``."""
    shown = ', '.join(list(map(form, names))[:most])
    return f'{shown} and {len(names) - most} more' if len(names) > most else shown


def short(value: Any) -> str:
    """The ``repr`` of a value on one line of at most 60 characters: that of a model has a line for each layer."""
    text = ' '.join(repr(value).split())
    return text if len(text) <= 60 else text[:57] + '...'


def one_line(error: BaseException) -> str:
    """The class and the text of an error of others on one line, of at most 300 characters."""
    return f'{type(error).__name__}: {" ".join(str(error).split())}'[:300].removesuffix(': ')


def nearest(word: str, known: Iterable[str], ending: str = '') -> str:
    """`` (did you mean 'x'?)`` for the closest of ``known``, or an empty string when nothing is close. ``ending`` is added."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" (did you mean '{close[0]}{ending}'?)" if close else ''
