"""Validates the saved states of optimizers and of parameter schedulers, which frameworks would apply without a look.

What is asked for is what any phase of any schedule can leave there: types and lengths, and the numbers that must be counters.
A schedule may not have begun, be running, or be over, and a learning rate may be any number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ..errors import AmpCheckpointError, some
from ..policy.options import is_number
from . import schema
from .format import SavedAmp
from .validate import WEIGHTS_ONLY

#: The state of torch's element-wise optimizers; others keep tensors of any shape (Adafactor's factors, say)
PARAMETER_SHAPED = frozenset(
    {'momentum_buffer', 'exp_avg', 'exp_avg_sq', 'max_exp_avg_sq', 'exp_inf'}
    | {'square_avg', 'grad_avg', 'acc_delta', 'sum', 'prev', 'ax'}
)
# what older versions of torch did not save yet, and newer ones fill in
_ADDED = {'maximize', 'amsgrad', 'capturable', 'differentiable', 'foreach', 'fused', 'decoupled_weight_decay'}
# the hyper-parameters of torch's optimizers; numbers of any sign, for torch looks at it when an optimizer is made, and a
# schedule may go below 0
_NUMBERS = 'alpha dampening lambd lr lr_decay momentum momentum_decay rho t0 weight_decay'
_SWITCHES = 'amsgrad capturable centered differentiable foreach fused maximize nesterov'
_SETTINGS: dict[str, schema.Schema] = {
    **dict.fromkeys(_NUMBERS.split(), schema.SETTING),
    **dict.fromkeys(_SWITCHES.split(), schema.CHOICE),
    'betas': schema.named('two numbers', schema.ListOf(schema.SETTING, length=2)),
    'eps': schema.NOT_NEGATIVE,
}
# optimizers of torch whose state has the same keys for every parameter of a group
_UNIFORM = ('SGD', 'Adam', 'AdamW', 'Adamax', 'NAdam', 'RAdam', 'RMSprop', 'Adagrad', 'Adadelta', 'ASGD', 'Rprop')
# settings that decide which states there are, and the state that there need not be where they are off
_STATEFUL = {'momentum': 'momentum_buffer', 'amsgrad': 'max_exp_avg_sq', 'centered': 'grad_avg'}


def check_optimizer_state(saved: SavedAmp, optimizer: Optimizer) -> None:
    """Whether a saved optimizer state and accumulation window fit an optimizer.

    Of the optimizers of others only the learning rate is looked at (a number, or None where they choose their own): what
    else they keep is theirs to know.

    Args:
        saved: From :func:`amp_wrapper.checkpoint.read`.
        optimizer: The one that would take it over, of torch's form; not changed.

    Raises:
        AmpCheckpointError: Another number of groups or parameters; names group or parameter, key, value and what was expected.
    """
    parameters = dict(_pairs(saved.optimizer['param_groups'], optimizer.param_groups))
    state = saved.optimizer['state']
    # torch allows states under names that are no parameter's
    unknown = [key for key in state if isinstance(key, int) and key not in parameters]
    if unknown:
        raise AmpCheckpointError(
            f"'state' has {some(unknown, 4, repr)}, which no parameter group has: the file is damaged."
        )
    for key in parameters:
        schema.MapOf().check(state.get(key, {}), f"'state'[{key}]")
    for index, group in enumerate(saved.optimizer['param_groups']):
        check_settings(group, optimizer, f"'param_groups'[{index}]")
    # others may keep a low-rank state under a name of torch's
    if _is_known(optimizer):
        _check_states(saved.optimizer, type(optimizer).__name__ in _UNIFORM, parameters)
    for index, (parameter, gradient) in enumerate(
        zip(parameters.values(), saved.window.gradients if saved.window else ())
    ):
        if gradient is not None:
            schema.TensorOf(parameter.shape, dense=False).check(gradient, f"amp['window']['gradients'][{index}]")


def _is_known(optimizer: Optimizer) -> bool:
    return type(optimizer).__module__.startswith('torch.optim')


def _pairs(theirs: Sequence[Any], mine: Sequence[Any]) -> Iterator[tuple[int, Tensor]]:
    """The number of each parameter in a file, and the parameter."""
    if len(theirs) != len(mine):
        raise AmpCheckpointError(
            f'the checkpoint has {len(theirs)} parameter groups and the optimizer {len(mine)}: resume with the '
            f'paramwise_cfg and the model it was saved with, or load the weights only (resume=False).'
        )
    for index, (there, here) in enumerate(zip(theirs, mine)):
        if len(there['params']) != len(here['params']):
            raise AmpCheckpointError(
                f'parameter group {index} has {len(there["params"])} parameters in the checkpoint and '
                f'{len(here["params"])} in the optimizer: the model has changed.'
            )
        yield from zip(there['params'], here['params'])


def check_settings(group: Any, optimizer: Optimizer, label: str, complete: bool = True) -> None:
    """Whether hyper-parameters are of the form that an optimizer of torch needs; the present values do not matter.

    Args:
        group: By name.
        optimizer: Whose they are.
        label: How messages call them.
        complete: Whether all have to be there, and not the learning rate alone.

    Raises:
        AmpCheckpointError: Names the hyper-parameter, its value and what was expected.
    """
    known, defaults = _is_known(optimizer), optimizer.defaults
    needed = [key for key in defaults if key == 'lr' or (complete and known and key not in _ADDED)]
    settings = {key: form for key, form in _SETTINGS.items() if key in defaults and (known or key == 'lr')}
    if not complete and isinstance(group, Mapping):
        settings = {key: form for key, form in settings.items() if key == 'lr' or key in group}
    if not is_number(schema.number_in(defaults.get('eps'))):
        # Adafactor has two
        settings.pop('eps', None)
    if not known and defaults.get('lr', 0) is None and isinstance(group, Mapping) and group.get('lr') is None:
        # it chooses its own
        settings.pop('lr')
    other = f'it was saved by another optimizer than {type(optimizer).__name__}, or is damaged.'
    missing = '{path} lacks {keys} (found: {found}): ' + other
    schema.Record(dict.fromkeys(needed, schema.ANYTHING), settings, missing=missing).check(group, label)


def _check_states(saved: Mapping[str, Any], uniform: bool, parameters: Mapping[int, Tensor]) -> None:
    expected: dict[tuple[bool, ...], set[Any]] = {}
    for group in saved['param_groups']:
        settings = tuple(bool(group.get(name)) for name in _STATEFUL)
        for key in group['params']:
            expected.setdefault(settings, set()).update(saved['state'].get(key, ()))
    for group in saved['param_groups']:
        names = expected.get(tuple(bool(group.get(name)) for name in _STATEFUL), set()) if uniform else set()
        # a schedule may have turned it off in the middle, and parameters come into use at any time
        names = names - {state for name, state in _STATEFUL.items() if not group.get(name)}
        for key in group['params']:
            state = saved['state'].get(key)
            if state:
                needed = dict.fromkeys(sorted(names, key=str), schema.ANYTHING)
                form = {name: _state_schema(name, value, parameters[key]) for name, value in state.items()}
                schema.Record(needed, form, missing='{path} lacks {keys}: the file is damaged.').check(
                    state, f"'state'[{key}]"
                )


def _state_schema(name: Any, value: Any, parameter: Tensor) -> schema.Schema:
    if name == 'step':
        return schema.NOT_NEGATIVE
    if name in PARAMETER_SHAPED:
        return schema.Maybe(schema.TensorOf(parameter.shape, floating=True))
    return schema.TensorOf() if isinstance(value, Tensor) else schema.ANYTHING


# -- parameter schedulers ---------------------------------------------------------------------------------------------
# A scheduler writes everything it has but its optimizer, and takes over whatever a file has.

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
    schema.ListOf().check(saved, name)
    if len(saved) != len(now):
        raise AmpCheckpointError(
            f'{name} has {len(saved)} entries, but {len(now)} schedulers are configured: resume with the schedule it was saved '
            f'with, or {WEIGHTS_ONLY}.'
        )
    for index, (state, scheduler) in enumerate(zip(saved, now)):
        _scheduler_schema(state, scheduler).check(state, f'{name}[{index}]')


def _scheduler_schema(state: Any, scheduler: Any) -> schema.Schema:
    mine = scheduler.state_dict()
    other = f'it was saved by another scheduler than {type(scheduler).__name__}, or is damaged.'
    saved = state if isinstance(state, Mapping) else {}
    forms = {key: _entry_schema(key, saved.get(key), here) for key, here in mine.items()}
    required = {key: forms.pop(key) for key in (*_COUNTERS, *_RANGE, *_PER_GROUP, *_SAME) if key in mine}
    missing = '{path} lacks {keys}: ' + other
    if type(scheduler).__module__.startswith('mmengine.'):
        # an older mmengine may not have known them all
        return schema.Record(required, forms, missing, '{path} has an unknown {keys}: ' + other)
    return schema.Record(required, missing=missing)


def _entry_schema(key: str, there: Any, here: Any) -> schema.Schema:
    """What an entry must be where a new scheduler has ``here``: a counter, a number, a list, a name."""
    if key in _COUNTERS:
        return schema.COUNTER
    if key in _RANGE:
        return schema.REAL
    if key in _PER_GROUP:
        return schema.Is(
            f'a list of {len(here)} numbers',
            lambda values: (
                schema.ListOf(length=len(here)).fits(values)
                and all(schema.SETTING.fits(a) or (a is None and b is None) for a, b in zip(values, here))
            ),
        )
    if key in _SAME:
        return schema.Is(repr(here), lambda value: type(value) is type(here) and value == here)
    if there is None or here is None:
        # the bounds that may be given in one of two ways
        return schema.Is('a number or None', lambda value: schema.CHOICE.fits(value) or schema.SETTING.fits(value))
    if is_number(schema.number_in(here)):
        # numbers of steps, the best score and what is infinite here already may be infinite; factors and bounds may not
        endless = key == 'best' or isinstance(here, Integral) or math.isinf(schema.number_in(here))
        number = schema.REAL if endless else schema.SETTING
        other_than_0 = schema.Is('a number other than 0', lambda value: schema.number_in(value) != 0)
        return schema.Both(number, other_than_0) if key in _DIVISORS else number
    if isinstance(here, bool):
        return schema.Is('True or False', schema.CHOICE.accepts)
    for words, types in (('a name', str), ('a dict', Mapping), ('a list', (list, tuple))):
        if isinstance(here, types):
            return schema.kind(words, types)
    return schema.kind('a function', Callable) if callable(here) else schema.ANYTHING
