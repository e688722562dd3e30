"""Judges the saved states of mmengine's parameter schedulers before mmengine copies them over its own, unseen.

A scheduler writes everything it has but its optimizer. What is judged is what any phase of any schedule can leave there: types
and lengths, and the numbers that must be counters. A schedule may not have begun, be running, or be over.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from ..errors import AmpCheckpointError
from ..policy.options import is_number
from .saved_values import WEIGHTS_ONLY, is_real, is_setting, is_switch, is_whole, plain, some

# what every scheduler of mmengine has; the rest is a matter of its kind and version. The counters begin at -1, and the first
# stays there until the range of the scheduler begins
_COUNTERS = ('last_step', '_global_step')
_RANGE = ('begin', 'end')
_PER_GROUP = ('base_values', '_last_value')
_SAME = ('param_name', 'by_epoch')
# what a schedule divides by
_DIVISORS = ('T_max', 'step_size')


def check_schedulers(saved: Any, now: Any) -> None:
    """Whether the saved states of parameter schedulers can be taken over.

    Args:
        saved: A list of states, or a dict of such lists.
        now: The schedulers, in the same form; not changed.

    Raises:
        AmpCheckpointError: Names the entry, the key, its value and what was expected.
    """
    if not isinstance(now, Mapping):
        _check_list(saved, now, 'param_schedulers')
        return
    if not isinstance(saved, Mapping) or set(saved) != set(now):
        found = ', '.join(map(str, saved)) if isinstance(saved, Mapping) else type(saved).__name__
        raise AmpCheckpointError(
            f'param_schedulers must be a dict with the keys {", ".join(map(str, now))}, but has {found}.'
        )
    for key in now:
        _check_list(saved[key], now[key], f'param_schedulers[{key!r}]')


def _check_list(saved: Any, now: Sequence[Any], name: str) -> None:
    if not isinstance(saved, (list, tuple)):
        raise AmpCheckpointError(f'{name} must be a list, but is {type(saved).__name__}: the file is damaged.')
    if len(saved) != len(now):
        raise AmpCheckpointError(
            f'{name} has {len(saved)} entries, but {len(now)} schedulers are configured: resume with the schedule it was saved '
            f'with, or {WEIGHTS_ONLY}.'
        )
    for index, (state, scheduler) in enumerate(zip(saved, now)):
        _check_scheduler(state, scheduler, f'{name}[{index}]')


def _check_scheduler(state: Any, scheduler: Any, label: str) -> None:
    if not isinstance(state, Mapping):
        raise AmpCheckpointError(f'{label} must be a dict, but is {type(state).__name__}: the file is damaged.')
    mine = scheduler.state_dict()
    other = f'it was saved by another scheduler than {type(scheduler).__name__}, or is damaged.'
    common = [key for key in (*_COUNTERS, *_RANGE, *_PER_GROUP, *_SAME) if key in mine]
    for key in common:
        if key not in state:
            raise AmpCheckpointError(f'{label} lacks {key!r}: {other}')
    judged = common
    if type(scheduler).__module__.startswith('mmengine.'):
        extra = [key for key in state if key not in mine]
        if extra:
            raise AmpCheckpointError(f'{label} has an unknown {some(extra)}: {other}')
        # an older mmengine may not have known them all
        judged = [key for key in mine if key in state]
    for key in judged:
        expected = _expected(key, state[key], mine[key])
        if expected:
            raise AmpCheckpointError(f'{label}[{key!r}]={state[key]!r} must be {expected}.')


def _expected(key: str, there: Any, here: Any) -> str:
    """What an entry must be, in words; nothing where it is that."""
    if key in _COUNTERS:
        return '' if is_whole(there, -1) else 'a whole number of at least -1'
    if key in _RANGE:
        return '' if is_real(there) else 'a number'
    if key in _PER_GROUP:
        fits = isinstance(there, (list, tuple)) and len(there) == len(here)
        fits = fits and all(is_setting(a) or (a is None and b is None) for a, b in zip(there, here))
        return '' if fits else f'a list of {len(here)} numbers'
    if key in _SAME:
        return '' if type(there) is type(here) and there == here else repr(here)
    return _expected_form(key, there, here)


def _expected_form(key: str, there: Any, here: Any) -> str:
    """The same for what the kinds of schedulers have, told by what this one has: a number, a list, a name."""
    if there is None or here is None:
        # the bounds that may be given in one of two ways
        return '' if is_switch(there) or is_setting(there) else 'a number or None'
    if is_number(plain(here)):
        # numbers of steps, the best score and what is infinite here already may be infinite; factors and bounds may not
        endless = key == 'best' or isinstance(here, Integral) or math.isinf(plain(here))
        fits = is_real(there) if endless else is_setting(there)
        if key in _DIVISORS and fits and plain(there) == 0:
            return 'a number other than 0'
        return '' if fits else 'a number'
    if isinstance(here, bool):
        return '' if is_switch(there) else 'True or False'
    for kind, words in ((str, 'a name'), (Mapping, 'a dict'), ((list, tuple), 'a list')):
        if isinstance(here, kind):
            return '' if isinstance(there, kind) else words
    return 'a function' if callable(here) and not callable(there) else ''
