"""Judges the parts of a checkpoint that frameworks would apply without a look, before any of them is applied."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from .errors import AmpCheckpointError
from .scale_config import is_number

_WEIGHTS_ONLY = 'load the weights alone (load_from, resume=False)'


def check_parts(file: Any) -> None:
    """Whether a file is a training checkpoint at all.

    Args:
        file: What was read.

    Raises:
        AmpCheckpointError: Names the missing part and what the file seems to be.
    """
    if not isinstance(file, Mapping):
        raise AmpCheckpointError(f'a checkpoint must be a dict, but this is {type(file).__name__}.')
    if 'state_dict' not in file and 'model' in file and 'optimizer' in file:
        raise AmpCheckpointError(
            "it has 'model' in place of 'state_dict': a training file of a script without mmengine (apex, say). Convert it "
            'with tools/convert_checkpoint.py --to stock.'
        )
    for key in ('state_dict', 'meta', 'message_hub', 'optimizer'):
        if key not in file:
            found = ', '.join(map(str, list(file)[:8])) or 'nothing'
            raise AmpCheckpointError(
                f'it has no key {key!r} (found: {found}), which a training goes on from: {_WEIGHTS_ONLY}.'
            )


def check_meta(meta: Any) -> None:
    """Epoch, iteration and seed.

    Args:
        meta: The part of that name.

    Raises:
        AmpCheckpointError: Names the key, its value and what was expected.
    """
    if not isinstance(meta, Mapping):
        raise AmpCheckpointError(f'meta must be a dict, but is {type(meta).__name__}: the file is damaged.')
    if 'config' in meta:
        raise AmpCheckpointError(
            "meta['config'] holds a text that mmengine would execute as a config while resuming. mmengine itself never writes "
            f'it: {_WEIGHTS_ONLY}, or remove the key if you trust the file.'
        )
    for key in ('epoch', 'iter'):
        value = meta.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
            raise AmpCheckpointError(f'meta[{key!r}]={value!r} must be a whole number of at least 0.')
    seed = meta.get('seed')
    if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**63):
        raise AmpCheckpointError(f"meta['seed']={seed!r} must be a whole number of at least 0, or None.")


def check_model(saved: Any, model: nn.Module, name: str = 'state_dict', prefix: str = '') -> None:
    """Whether saved weights are those of a model: the same keys, shapes and kinds of numbers.

    Modules that load in their own way (another ``_load_from_state_dict``, pre-hooks) are left to themselves.

    Args:
        saved: By qualified names; a leading ``module.`` counts as absent, as mmengine has it.
        model: On any device, cast or not.
        name: How messages call ``saved``.
        prefix: What the names have in front beside that.

    Raises:
        AmpCheckpointError: Names the first few keys and what was expected.
    """
    if not isinstance(saved, Mapping):
        raise AmpCheckpointError(f'{name} must be a dict, but is {type(saved).__name__}: the file is damaged.')
    wrong = [key for key in saved if not isinstance(key, str)]
    if wrong:
        raise AmpCheckpointError(f'{name} has the key {wrong[0]!r}, which is no name: the file is damaged.')
    theirs = {re.sub(r'^module\.', '', key[len(prefix) :]): key for key in saved if key.startswith(prefix)}
    mine = model.state_dict(keep_vars=True)
    own_way = _own_ways(model)

    def judged(key: str) -> bool:
        return not key.endswith('_extra_state') and not any(key.startswith(start) for start in own_way)

    missing = [key for key in mine if key not in theirs and judged(key)]
    if missing:
        raise AmpCheckpointError(
            f'{name} lacks {_some(missing)}, which the model has: the file is damaged or of another model. If the model '
            f'was changed on purpose, {_WEIGHTS_ONLY}.'
        )
    extra = [theirs[key] for key in theirs if key not in mine and judged(key)]
    if extra:
        raise AmpCheckpointError(
            f'{name} has {_some(extra)}, which the model has not: the file is of another model. If the model was changed '
            f'on purpose, {_WEIGHTS_ONLY}.'
        )
    for key, value in mine.items():
        if key not in theirs or not judged(key) or not isinstance(value, Tensor):
            continue
        other = saved[theirs[key]]
        label = f'{name}[{theirs[key]!r}]'
        if not isinstance(other, Tensor):
            raise AmpCheckpointError(f'{label} must be a tensor, but is {type(other).__name__}: the file is damaged.')
        if isinstance(value, (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer)):
            continue
        if other.shape != value.shape:
            raise AmpCheckpointError(
                f'{label} has shape {tuple(other.shape)}, but the model has {tuple(value.shape)}: the file is of another '
                f'model. If the model was changed on purpose, {_WEIGHTS_ONLY}.'
            )
        if _kind(other) != _kind(value):
            raise AmpCheckpointError(f'{label} is {other.dtype}, but the model has {value.dtype}: the file is damaged.')


def check_average(saved: Any, model: nn.Module, average: nn.Module | None) -> None:
    """Whether a saved average (``module.`` and the model's names, and the average's own numbers) is that of a model.

    Args:
        saved: By qualified names.
        model: The model that is averaged.
        average: The averaged model; None where it is not built yet.

    Raises:
        AmpCheckpointError: Names the key and what was expected.
    """
    name = 'ema_state_dict'
    check_model({} if isinstance(saved, Mapping) else saved, nn.Module(), name)
    wrong = [key for key in saved if not isinstance(key, str)]
    if wrong:
        raise AmpCheckpointError(f'{name} has the key {wrong[0]!r}, which is no name: the file is damaged.')
    check_model({key: value for key, value in saved.items() if key.startswith('module.')}, model, name, 'module.')
    if average is None:
        return
    own = {key: value for key, value in average.state_dict().items() if not key.startswith('module.')}
    for key in {key for key in saved if not key.startswith('module.')} ^ set(own):
        raise AmpCheckpointError(
            f'{name} {"lacks" if key in own else "has an unknown"} {key!r}: it is damaged, or another average.'
        )
    for key, value in own.items():
        other = saved[key]
        if not isinstance(other, Tensor) or other.shape != value.shape or _kind(other) != _kind(value):
            raise AmpCheckpointError(f'{name}[{key!r}]={other!r} must be like {value!r}: the file is damaged.')


def _kind(tensor: Tensor) -> str:
    if tensor.is_complex():
        return 'complex'
    if tensor.is_floating_point():
        return 'floating'
    return str(tensor.dtype)


def _own_ways(model: nn.Module) -> list[str]:
    found = []
    for key, module in model.named_modules():
        loader = type(module)._load_from_state_dict
        hooks = [getattr(hook, 'hook', hook) for hook in module._load_state_dict_pre_hooks.values()]
        foreign = [
            hook for hook in hooks if not type(getattr(hook, '__self__', hook)).__module__.startswith('amp_wrapper')
        ]
        if not loader.__module__.startswith('torch.') or foreign:
            found.append(f'{key}.' if key else '')
    return found


def _some(keys: Sequence[str]) -> str:
    shown = ', '.join(repr(key) for key in keys[:4])
    return shown + (f' and {len(keys) - 4} more' if len(keys) > 4 else '')


def check_schedulers(saved: Any, now: Any) -> None:
    """Whether the saved states of parameter schedulers can be taken over.

    Args:
        saved: A list of states, or a dict of such lists.
        now: The schedulers, in the same form.

    Raises:
        AmpCheckpointError: Names the entry.
    """
    if isinstance(now, Mapping):
        if not isinstance(saved, Mapping) or set(saved) != set(now):
            found = ', '.join(map(str, saved)) if isinstance(saved, Mapping) else type(saved).__name__
            raise AmpCheckpointError(
                f'param_schedulers must be a dict with the keys {", ".join(map(str, now))}, but has {found}.'
            )
        for key in now:
            _check_list(saved[key], now[key], f'param_schedulers[{key!r}]')
        return
    _check_list(saved, now, 'param_schedulers')


def _check_list(saved: Any, now: Sequence[Any], name: str) -> None:
    if not isinstance(saved, (list, tuple)):
        raise AmpCheckpointError(f'{name} must be a list, but is {type(saved).__name__}: the file is damaged.')
    if len(saved) != len(now):
        raise AmpCheckpointError(
            f'{name} has {len(saved)} entries, but {len(now)} schedulers are configured: resume with the schedule it was saved '
            f'with, or {_WEIGHTS_ONLY}.'
        )
    for index, (state, scheduler) in enumerate(zip(saved, now)):
        label = f'{name}[{index}]'
        if not isinstance(state, Mapping):
            raise AmpCheckpointError(f'{label} must be a dict, but is {type(state).__name__}: the file is damaged.')
        mine = scheduler.state_dict()
        odd = set(mine) ^ set(state)
        if odd:
            verb = 'lacks' if odd & set(mine) else 'has an unknown'
            raise AmpCheckpointError(
                f'{label} {verb} {_some(sorted(map(str, odd)))}: it was saved by another scheduler than '
                f'{type(scheduler).__name__}, or the file is damaged.'
            )
        for key in ('last_step', '_global_step'):
            value = state.get(key, 0)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise AmpCheckpointError(f'{label}[{key!r}]={value!r} must be a whole number of at least 0.')
        for key, value in mine.items():
            there = state[key]
            # what a scheduler steps, and how, is no matter of form; one of eta_min and eta_min_ratio is left open
            other = isinstance(there, str) != isinstance(value, str) or (isinstance(value, str) and there != value)
            one_open = key.startswith('eta_min') and there is None
            if other or not (one_open or same_form(value, there)):
                raise AmpCheckpointError(f'{label}[{key!r}]={state[key]!r} must be of the form of {value!r}.')


def same_form(here: Any, there: Any) -> bool:
    """Whether a saved setting can stand where a present one stands: numbers for numbers, finite where it is finite.

    Args:
        here: The present setting.
        there: The saved one.
    """
    if isinstance(here, bool):
        # None is how torch writes "whichever is faster"
        return there is None or isinstance(there, bool)
    if here is None:
        return there is None or isinstance(there, (bool, str)) or (is_number(there) and math.isfinite(there))
    if isinstance(here, str):
        return isinstance(there, str)
    if isinstance(here, Tensor) or is_number(here):
        if isinstance(there, Tensor):
            return there.numel() == 1 and not there.is_complex() and math.isfinite(float(there))
        if isinstance(there, int) and not -(2**31) < there < 2**31:
            return False
        return is_number(there) and (math.isfinite(there) or not math.isfinite(float(here)))
    if isinstance(here, (list, tuple)):
        return (
            isinstance(there, (list, tuple))
            and len(here) == len(there)
            and all(same_form(mine, theirs) for mine, theirs in zip(here, there))
        )
    if isinstance(here, Mapping):
        return isinstance(there, Mapping)
    return True


# optimizers of torch whose state has the same keys for every parameter of a group
_UNIFORM = ('SGD', 'Adam', 'AdamW', 'Adamax', 'NAdam', 'RAdam', 'RMSprop', 'Adagrad', 'Adadelta', 'ASGD', 'Rprop')
# settings that decide which states there are
_STATEFUL = ('momentum', 'amsgrad', 'centered')
_NOT_NEGATIVE = ('lr', 'weight_decay', 'momentum', 'eps')


def check_optimizer(saved: Mapping[str, Any], optimizer: Optimizer, shaped: Collection[str]) -> None:
    """Whether an optimizer's saved state and settings are of the form that this optimizer has.

    Args:
        saved: The optimizer's own state dict; numbers of groups and parameters and the shapes were judged before.
        optimizer: The one that would take it over; not changed.
        shaped: Names of states that have an entry for each element of the parameter.

    Raises:
        AmpCheckpointError: Names group or parameter, key, value and what was expected.
    """
    keys = [key for group in saved['param_groups'] for key in group['params']]
    unknown = [key for key in saved['state'] if key not in set(keys)]
    if unknown:
        raise AmpCheckpointError(f"'state' has {_some(unknown)}, which no parameter group has: the file is damaged.")
    _check_settings(saved['param_groups'], optimizer)
    uniform = type(optimizer).__module__.startswith('torch.optim') and type(optimizer).__name__ in _UNIFORM
    expected: dict[tuple[bool, ...], set[Any]] = {}
    for group in saved['param_groups']:
        kind = tuple(bool(group.get(name)) for name in _STATEFUL)
        for key in group['params']:
            expected.setdefault(kind, set()).update(saved['state'].get(key, ()))
    for group in saved['param_groups']:
        names = expected[tuple(bool(group.get(name)) for name in _STATEFUL)] if uniform else set()
        for key in group['params']:
            state = saved['state'].get(key, {})
            lost = names - set(state)
            if state and lost:
                raise AmpCheckpointError(f"'state'[{key}] lacks {_some(sorted(map(str, lost)))}: the file is damaged.")
            for name, value in state.items():
                _check_state_value(name, value, f"'state'[{key}][{name!r}]", shaped)


def _check_state_value(name: Any, value: Any, label: str, shaped: Collection[str]) -> None:
    if name == 'step':
        counted = is_number(value) or (isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex())
        if not counted or not 0 <= float(value) < math.inf:
            raise AmpCheckpointError(f'{label}={value!r} must be a number of at least 0.')
        return
    floating = isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
    if name in shaped and value is not None and not floating:
        found = str(value.dtype) if isinstance(value, Tensor) else type(value).__name__
        raise AmpCheckpointError(f'{label} must be a floating tensor, but is {found}: the file is damaged.')


def _check_settings(groups: Sequence[Mapping[str, Any]], optimizer: Optimizer) -> None:
    # a copy without state fills in what older versions of torch did not save
    probe = copy.copy(optimizer)
    try:
        probe.load_state_dict({'state': {}, 'param_groups': [dict(group) for group in groups]})
    except Exception as error:  # whatever an optimizer of any make says about settings that are not its own
        raise AmpCheckpointError(f"'param_groups' do not fit {type(optimizer).__name__}: {error}") from error
    for index, (filled, mine) in enumerate(zip(probe.param_groups, optimizer.param_groups)):
        expected = {key: mine[key] for key in optimizer.defaults}
        check_settings(
            filled, expected, f"'param_groups'[{index}]", f'by another optimizer than {type(optimizer).__name__}'
        )


def check_settings(saved: Mapping[str, Any], here: Mapping[str, Any], label: str, otherwise: str) -> None:
    """Whether saved hyper-parameters can stand where the present ones stand.

    Args:
        saved: By name; further names are allowed.
        here: The present ones.
        label: How messages call ``saved``.
        otherwise: What it may have been saved by, for the message about a missing one.

    Raises:
        AmpCheckpointError: Names the hyper-parameter, its value and what was expected.
    """
    for key, value in here.items():
        if key not in saved:
            found = ', '.join(map(str, saved))
            raise AmpCheckpointError(
                f'{label} lacks {key!r} (found: {found}): it was saved {otherwise}, or is damaged.'
            )
        there = saved[key]
        # torch's switches that choose by themselves: foreach, fused
        odd_switch = value is None and not isinstance(there, (bool, type(None)))
        if odd_switch or not same_form(value, there) or (key in _NOT_NEGATIVE and float(there) < 0):
            raise AmpCheckpointError(f'{label}[{key!r}]={there!r} must be of the form of {value!r}.')
