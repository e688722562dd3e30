"""Judges the parts of a checkpoint that frameworks would apply without a look, before any of them is applied."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from numbers import Integral
from types import MappingProxyType
from typing import Any

import torch
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
        if not isinstance(value, Integral) or isinstance(value, bool) or not 0 <= int(value) < 2**63:
            raise AmpCheckpointError(f'meta[{key!r}]={value!r} must be a whole number of at least 0.')
    seed = meta.get('seed')
    if seed is not None and (not isinstance(seed, Integral) or isinstance(seed, bool) or not 0 <= int(seed) < 2**63):
        raise AmpCheckpointError(f"meta['seed']={seed!r} must be a whole number of at least 0, or None.")


def check_model(
    saved: Any,
    model: nn.Module,
    name: str = 'state_dict',
    prefix: str = '',
    plain: Mapping[str, str] = MappingProxyType({}),
    read: Callable[[str], str] = lambda key: key,
) -> None:
    """Whether saved weights are those of a model: the same keys, shapes and kinds of numbers.

    Modules that load in their own way (another ``_load_from_state_dict``, pre-hooks) are left to themselves.

    Args:
        saved: By qualified names; a leading ``module.`` counts as absent, as mmengine has it.
        model: On any device, cast or not.
        name: How messages call ``saved``.
        prefix: What the names have in front beside that.
        plain: The model's names to those to compare by, where they differ.
        read: The same for the names of ``saved``, without ``prefix``.

    Raises:
        AmpCheckpointError: Names the first few keys and what was expected.
    """
    if not isinstance(saved, Mapping):
        raise AmpCheckpointError(f'{name} must be a dict, but is {type(saved).__name__}: the file is damaged.')
    wrong = [key for key in saved if not isinstance(key, str)]
    if wrong:
        raise AmpCheckpointError(f'{name} has the key {wrong[0]!r}, which is no name: the file is damaged.')
    mine = {plain.get(key, key): value for key, value in model.state_dict(keep_vars=True).items()}
    stripped = r'^module\.' if not hasattr(model, 'module') else '$^'
    theirs = {read(re.sub(stripped, '', key[len(prefix) :])): key for key in saved if key.startswith(prefix)}
    own_way = [start for way in _own_ways(model) for start in {way, *_plain_starts(way, plain)}]

    def judged(key: str) -> bool:
        return not key.endswith('_extra_state') and not any(key.startswith(start) for start in own_way)

    # BatchNorm fills in the count that old files do not have
    counts = 'num_batches_tracked'
    missing = [key for key in mine if key not in theirs and judged(key) and key.rpartition('.')[2] != counts]
    if missing:
        raise AmpCheckpointError(
            f'{name} lacks {_some(missing)}, which the model has: the file is damaged or of another model. If the model '
            f'was changed on purpose, {_WEIGHTS_ONLY}.'
        )
    # a buffer that is made in the course of a training is in its files, and not yet in a new model
    unset = {
        f'{name}.{key}' if name else key
        for name, module in model.named_modules()
        for key, value in module._buffers.items()
        if value is None
    }
    extra = [theirs[key] for key in theirs if key not in mine and key not in unset and judged(key)]
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
        _check_plain(other, label)
        # torch takes a vector of one element for a number
        if other.shape != value.shape and not (value.dim() == 0 and other.shape == (1,)):
            raise AmpCheckpointError(
                f'{label} has shape {tuple(other.shape)}, but the model has {tuple(value.shape)}: the file is of another '
                f'model. If the model was changed on purpose, {_WEIGHTS_ONLY}.'
            )
        if _kind(other) != _kind(value):
            raise AmpCheckpointError(f'{label} is {other.dtype}, but the model has {value.dtype}: the file is damaged.')


def check_average(
    saved: Any,
    model: nn.Module,
    average: nn.Module | None,
    plain: Mapping[str, str] = MappingProxyType({}),
    read: Callable[[str], str] = lambda key: key,
) -> None:
    """Whether a saved average (``module.`` and the model's names, and the average's own numbers) is that of a model.

    Args:
        saved: By qualified names.
        model: The model that is averaged.
        average: The averaged model; None where it is not built yet.
        plain: As of :func:`check_model`.
        read: As of :func:`check_model`.

    Raises:
        AmpCheckpointError: Names the key and what was expected.
    """
    name = 'ema_state_dict'
    check_model({} if isinstance(saved, Mapping) else saved, nn.Module(), name)
    wrong = [key for key in saved if not isinstance(key, str)]
    if wrong:
        raise AmpCheckpointError(f'{name} has the key {wrong[0]!r}, which is no name: the file is damaged.')
    names = {key: value for key, value in saved.items() if key.startswith('module.')}
    check_model(names, model, name, 'module.', plain, read)
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
        return 'floating' if tensor.dtype.itemsize >= 2 else str(tensor.dtype)
    return 'boolean' if tensor.dtype is torch.bool else 'whole numbers'


def _plain_starts(start: str, names: Mapping[str, str]) -> list[str]:
    """What a module's names begin with once the wrappers around it are off."""
    lengths = [(key, plain, len(key) - len(start)) for key, plain in names.items() if key.startswith(start)]
    return [plain[: len(plain) - rest] for key, plain, rest in lengths if plain.endswith(key[len(start) :])]


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


def _some(keys: Sequence[Any]) -> str:
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
        _check_scheduler(state, scheduler, f'{name}[{index}]')


# what every scheduler of mmengine counts and steps; the rest is a matter of its kind and version
_COUNTED = ('last_step', '_global_step', 'begin', 'end')
_STEPPED = ('base_values', '_last_value')


def _check_scheduler(state: Any, scheduler: Any, label: str) -> None:
    if not isinstance(state, Mapping):
        raise AmpCheckpointError(f'{label} must be a dict, but is {type(state).__name__}: the file is damaged.')
    mine = scheduler.state_dict()
    for key in (*_COUNTED, *_STEPPED, 'param_name', 'by_epoch'):
        if key not in mine:
            continue
        if key not in state:
            raise AmpCheckpointError(
                f'{label} lacks {key!r}: it was saved by another scheduler than {type(scheduler).__name__}, or is damaged.'
            )
        value, here = state[key], mine[key]
        if key in _COUNTED:
            counted = is_number(value) and value >= 0 and (math.isinf(value) or float(value).is_integer())
            expected = 'a whole number of at least 0' if not counted else ''
        elif key in _STEPPED:
            numbers = isinstance(value, (list, tuple)) and all(_is_setting(item) for item in value)
            expected = f'a list of {len(here)} numbers' if not numbers or len(value) != len(here) else ''
        else:
            expected = '' if type(value) is type(here) and value == here else repr(here)
        if expected:
            raise AmpCheckpointError(f'{label}[{key!r}]={value!r} must be {expected}.')
    if not type(scheduler).__module__.startswith('mmengine.'):
        return
    extra = [key for key in state if key not in mine]
    if extra:
        raise AmpCheckpointError(
            f'{label} has an unknown {_some(extra)}: it was saved by another scheduler than {type(scheduler).__name__}, or is '
            f'damaged.'
        )
    for key, here in mine.items():
        # an older mmengine may not have known them all
        there = state.get(key, here)
        if is_number(here) and not (_is_switch(there) or _is_setting(there)):
            raise AmpCheckpointError(f'{label}[{key!r}]={there!r} must be a number.')


def _is_setting(value: Any) -> bool:
    """A number that float32 can hold, plain or in a tensor of one element."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and value.layout is torch.strided and not value.is_meta and _is_setting(value.item())
    return is_number(value) and abs(value) < (2**31 if isinstance(value, int) else 3e38)


def _is_switch(value: Any) -> bool:
    return value is None or isinstance(value, bool)


# the hyper-parameters of torch's optimizers: what each may be, and in words
_SETTINGS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(
        ('lr', 'weight_decay', 'momentum'),
        (lambda value: _is_setting(value) and value >= 0, 'a number of at least 0'),
    ),
    **dict.fromkeys(
        ('dampening', 'alpha', 'rho', 'lambd', 't0', 'lr_decay', 'momentum_decay'), (_is_setting, 'a number')
    ),
    **dict.fromkeys(
        ('nesterov', 'maximize', 'amsgrad', 'centered', 'capturable', 'differentiable', 'foreach', 'fused'),
        (_is_switch, 'True, False or None'),
    ),
    'betas': (
        lambda value: isinstance(value, (list, tuple)) and len(value) == 2 and all(_is_setting(beta) for beta in value),
        'two numbers',
    ),
}
# what older versions of torch did not save yet, and newer ones fill in
_ADDED = frozenset(
    ('maximize', 'amsgrad', 'capturable', 'differentiable', 'foreach', 'fused', 'decoupled_weight_decay')
)
# optimizers of torch whose state has the same keys for every parameter of a group
_UNIFORM = ('SGD', 'Adam', 'AdamW', 'Adamax', 'NAdam', 'RAdam', 'RMSprop', 'Adagrad', 'Adadelta', 'ASGD', 'Rprop')
# settings that decide which states there are
_STATEFUL = ('momentum', 'amsgrad', 'centered')


def check_optimizer(saved: Mapping[str, Any], optimizer: Optimizer, shaped: Collection[str]) -> None:
    """Whether an optimizer's saved state and settings are of the form that torch's optimizers have.

    Of the optimizers of others only the learning rate is judged: what else they keep is theirs to know.

    Args:
        saved: The optimizer's own state dict; numbers of groups and parameters and the shapes were judged before.
        optimizer: The one that would take it over; not changed.
        shaped: Names of states that have an entry for each element of the parameter.

    Raises:
        AmpCheckpointError: Names group or parameter, key, value and what was expected.
    """
    known = type(optimizer).__module__.startswith('torch.optim')
    numbered = {key for group in saved['param_groups'] for key in group['params']}
    # torch allows states under names that are no parameter's
    unknown = [key for key in saved['state'] if isinstance(key, int) and key not in numbered]
    if unknown:
        raise AmpCheckpointError(f"'state' has {_some(unknown)}, which no parameter group has: the file is damaged.")
    for index, group in enumerate(saved['param_groups']):
        check_settings(group, optimizer, f"'param_groups'[{index}]")
    if known:
        _check_states(saved, optimizer, shaped)


def check_settings(group: Mapping[str, Any], optimizer: Optimizer, label: str) -> None:
    """Whether hyper-parameters are of the form that an optimizer of torch needs; the present values do not matter.

    Args:
        group: By name.
        optimizer: Whose they are.
        label: How messages call them.

    Raises:
        AmpCheckpointError: Names the hyper-parameter, its value and what was expected.
    """
    known = type(optimizer).__module__.startswith('torch.optim')
    needed = [key for key in optimizer.defaults if key == 'lr' or (known and key not in _ADDED)]
    lost = [key for key in needed if key not in group]
    if lost:
        raise AmpCheckpointError(
            f'{label} lacks {_some(lost)} (found: {", ".join(map(str, group))}): it was saved by another optimizer than '
            f'{type(optimizer).__name__}, or is damaged.'
        )
    for key, (fits, words) in _SETTINGS.items():
        if key in group and key in optimizer.defaults and (known or key == 'lr') and not fits(group[key]):
            raise AmpCheckpointError(f'{label}[{key!r}]={group[key]!r} must be {words}.')
    eps = group.get('eps')
    # Adafactor has two
    one = known and is_number(optimizer.defaults.get('eps')) and 'eps' in group
    if one and not (_is_setting(eps) and float(eps or 0) >= 0):
        raise AmpCheckpointError(f"{label}['eps']={eps!r} must be a number of at least 0.")


def _check_states(saved: Mapping[str, Any], optimizer: Optimizer, shaped: Collection[str]) -> None:
    uniform = type(optimizer).__name__ in _UNIFORM
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
        if not _is_setting(value) or not float(value) >= 0:
            raise AmpCheckpointError(f'{label}={value!r} must be a number of at least 0.')
        return
    floating = isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
    if name in shaped and value is not None and not floating:
        found = str(value.dtype) if isinstance(value, Tensor) else type(value).__name__
        raise AmpCheckpointError(f'{label} must be a floating tensor, but is {found}: the file is damaged.')
    if isinstance(value, Tensor):
        _check_plain(value, label)


def _check_plain(value: Tensor, label: str) -> None:
    """A tensor that can be copied, and written to in place."""
    strided = value.layout is torch.strided and not value.is_meta and not value.is_quantized
    if not strided or any(step == 0 and size > 1 for step, size in zip(value.stride(), value.shape)):
        raise AmpCheckpointError(
            f'{label} is no plain tensor ({value.layout}, on {value.device}): the file is damaged.'
        )
