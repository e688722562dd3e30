"""Judges the parts of a checkpoint that frameworks would apply without a look, before any of them is applied."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from numbers import Integral
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import AmpCheckpointError
from ..policy.options import is_number
from .saved_values import WEIGHTS_ONLY, is_setting, is_switch, plain, some


def check_parts(file: Any, resume_optimizer: bool = True) -> None:
    """Whether a file is a training checkpoint at all.

    Args:
        file: What was read.
        resume_optimizer: Whether the optimizer's state is wanted.

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
        if key not in file and (resume_optimizer or key != 'optimizer'):
            found = ', '.join(map(str, list(file)[:8])) or 'nothing'
            raise AmpCheckpointError(
                f'it has no key {key!r} (found: {found}), which a training goes on from: {WEIGHTS_ONLY}.'
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
            f'it: {WEIGHTS_ONLY}, or remove the key if you trust the file.'
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

    Modules that save or load in their own way (other methods, hooks) are left to themselves.

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
    # a model may have another signature
    own = nn.Module.state_dict(model, keep_vars=True)
    mine = {plain.get(key, key): value for key, value in own.items()}
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
            f'{name} lacks {some(missing)}, which the model has: the file is damaged or of another model. If the model '
            f'was changed on purpose, {WEIGHTS_ONLY}.'
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
            f'{name} has {some(extra)}, which the model has not: the file is of another model. If the model was changed '
            f'on purpose, {WEIGHTS_ONLY}.'
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
        # a sparse, expanded or quantized buffer of the model's own is in its files as it is
        if _is_plain(value):
            _check_plain(other, label)
        # torch takes a vector of one element for a number
        if other.shape != value.shape and not (value.dim() == 0 and other.shape == (1,)):
            raise AmpCheckpointError(
                f'{label} has shape {tuple(other.shape)}, but the model has {tuple(value.shape)}: the file is of another '
                f'model. If the model was changed on purpose, {WEIGHTS_ONLY}.'
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


# what mmengine and torch call while they save and load
_WAYS = ('_load_from_state_dict', '_save_to_state_dict', 'load_state_dict', 'state_dict')
_WAYS_HOOKS = ('_load_state_dict_pre_hooks', '_state_dict_pre_hooks', '_state_dict_hooks')


def _own_ways(model: nn.Module) -> list[str]:
    """What the names of modules begin with that save or load in another way than torch's."""
    found = []
    for key, module in model.named_modules():
        methods = any(not getattr(type(module), way).__module__.startswith('torch.') for way in _WAYS)
        hooks = [getattr(hook, 'hook', hook) for name in _WAYS_HOOKS for hook in getattr(module, name).values()]
        makers = {type(getattr(hook, '__self__', hook)).__module__ for hook in hooks}
        if methods or any(not maker.startswith('amp_wrapper') for maker in makers):
            found.append(f'{key}.' if key else '')
    return found


# the hyper-parameters of torch's optimizers: what each may be, and in words
_SETTINGS: dict[str, tuple[Callable[[Any], bool], str]] = {
    # of any sign: torch looks at it when an optimizer is made, and a schedule may go below 0
    **dict.fromkeys(
        (
            'lr',
            'weight_decay',
            'momentum',
            'dampening',
            'alpha',
            'rho',
            'lambd',
            't0',
            'lr_decay',
            'momentum_decay',
        ),
        (is_setting, 'a number'),
    ),
    **dict.fromkeys(
        ('nesterov', 'maximize', 'amsgrad', 'centered', 'capturable', 'differentiable', 'foreach', 'fused'),
        (is_switch, 'True, False or None'),
    ),
    'betas': (
        lambda value: isinstance(value, (list, tuple)) and len(value) == 2 and all(is_setting(beta) for beta in value),
        'two numbers',
    ),
}
# what older versions of torch did not save yet, and newer ones fill in
_ADDED = frozenset(
    ('maximize', 'amsgrad', 'capturable', 'differentiable', 'foreach', 'fused', 'decoupled_weight_decay')
)
# optimizers of torch whose state has the same keys for every parameter of a group
_UNIFORM = ('SGD', 'Adam', 'AdamW', 'Adamax', 'NAdam', 'RAdam', 'RMSprop', 'Adagrad', 'Adadelta', 'ASGD', 'Rprop')
# settings that decide which states there are, and the state that there need not be where they are off
_STATEFUL = {'momentum': 'momentum_buffer', 'amsgrad': 'max_exp_avg_sq', 'centered': 'grad_avg'}


def check_optimizer(saved: Mapping[str, Any], optimizer: Optimizer, shaped: Collection[str]) -> None:
    """Whether an optimizer's saved state and settings are of the form that torch's optimizers have.

    Of the optimizers of others only the learning rate is judged (a number, or None where they choose their own): what else
    they keep is theirs to know.

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
        raise AmpCheckpointError(f"'state' has {some(unknown)}, which no parameter group has: the file is damaged.")
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
            f'{label} lacks {some(lost)} (found: {", ".join(map(str, group))}): it was saved by another optimizer than '
            f'{type(optimizer).__name__}, or is damaged.'
        )
    for key, (fits, words) in _SETTINGS.items():
        if key not in group or key not in optimizer.defaults or not (known or key == 'lr'):
            continue
        chosen = not known and group[key] is None and optimizer.defaults[key] is None
        if not chosen and not fits(group[key]):
            raise AmpCheckpointError(f'{label}[{key!r}]={group[key]!r} must be {words}.')
    eps = group.get('eps')
    # Adafactor has two
    one = known and is_number(plain(optimizer.defaults.get('eps'))) and 'eps' in group
    if one and not (is_setting(eps) and plain(eps) >= 0):
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
        # a schedule may have turned it off in the middle, and parameters come into use at any time
        names = names - {state for name, state in _STATEFUL.items() if not group.get(name)}
        for key in group['params']:
            state = saved['state'].get(key, {})
            lost = names - set(state)
            if state and lost:
                raise AmpCheckpointError(f"'state'[{key}] lacks {some(sorted(map(str, lost)))}: the file is damaged.")
            for name, value in state.items():
                _check_state_value(name, value, f"'state'[{key}][{name!r}]", shaped)


def _check_state_value(name: Any, value: Any, label: str, shaped: Collection[str]) -> None:
    if name == 'step':
        if not is_setting(value) or not float(value) >= 0:
            raise AmpCheckpointError(f'{label}={value!r} must be a number of at least 0.')
        return
    floating = isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
    if name in shaped and value is not None and not floating:
        found = str(value.dtype) if isinstance(value, Tensor) else type(value).__name__
        raise AmpCheckpointError(f'{label} must be a floating tensor, but is {found}: the file is damaged.')
    if isinstance(value, Tensor):
        _check_plain(value, label)


def _is_plain(value: Tensor) -> bool:
    strided = value.layout is torch.strided and not value.is_meta and not value.is_quantized
    return strided and not any(step == 0 and size > 1 for step, size in zip(value.stride(), value.shape))


def _check_plain(value: Tensor, label: str) -> None:
    """A tensor that can be copied, and written to in place."""
    if not _is_plain(value):
        raise AmpCheckpointError(
            f'{label} is no plain tensor ({value.layout}, on {value.device}): the file is damaged.'
        )
