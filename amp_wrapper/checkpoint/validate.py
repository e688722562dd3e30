"""Validates the parts of a checkpoint that frameworks would apply without a look, before any of them is applied."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import AmpCheckpointError, some
from ..torch_internals import STATE_DICT_METHODS, saving_and_loading_hooks
from .names import plain_names, reader
from .schema import ANYTHING, Both, Is, MapOf, Maybe, Record, Schema, TensorOf, is_dense, whole

#: What to do with a file that training cannot go on from.
WEIGHTS_ONLY = 'load the weights alone (load_from, resume=False)'
_COUNT = whole(types=Integral)
_META = Record(
    {'epoch': _COUNT, 'iter': _COUNT},
    {
        'seed': Maybe(_COUNT),
        'config': Is(
            'absent',
            lambda value: False,
            '{path} holds a text that mmengine would execute as a config while resuming. mmengine itself never writes it: '
            + WEIGHTS_ONLY
            + ', or remove the key if you trust the file.',
        ),
    },
)


def check_parts(file: Any, resume_optimizer: bool = True) -> None:
    """Whether a file is a training checkpoint at all, with epoch, iteration and seed in order.

    Args:
        file: What was read.
        resume_optimizer: Whether the optimizer's state is wanted.

    Raises:
        AmpCheckpointError: Names the missing part and what the file seems to be; or a key of ``meta``, its value and what was
            expected.
    """
    MapOf().check(file, 'a checkpoint')
    if 'state_dict' not in file and 'model' in file and 'optimizer' in file:
        raise AmpCheckpointError(
            "it has 'model' in place of 'state_dict': a training file of a script without mmengine (apex, say). Convert it "
            'with amp-wrapper convert --to stock.'
        )
    parts = ('state_dict', 'meta', 'message_hub', *(['optimizer'] if resume_optimizer else []))
    missing = f'it has no key {{keys}} (found: {{found}}), which a training goes on from: {WEIGHTS_ONLY}.'
    Record(dict.fromkeys(parts, ANYTHING), missing=missing).check(file, '')
    _META.check(file['meta'], 'meta')


def check_model(saved: Any, model: nn.Module, name: str = 'state_dict', prefix: str = '') -> None:
    """Whether saved weights are those of a model: the same keys, shapes and kinds of numbers.

    Modules that save or load in their own way (other methods, hooks) are left to themselves.

    Args:
        saved: By qualified names, with ``module.`` of wrappers around the model and inside it or without.
        model: On any device, cast or not; without a wrapper around it.
        name: How messages call ``saved``.
        prefix: What the names that are compared have in front.

    Raises:
        AmpCheckpointError: Names the first few keys and what was expected.
    """
    MapOf(names=True).check(saved, name)
    plain = plain_names(model)
    mine = {plain[key]: value for key, value in nn.Module.state_dict(model, keep_vars=True).items()}
    keys = {key[len(prefix) :]: key for key in saved if key.startswith(prefix)}
    read = reader(model, keys)
    theirs = {read(key): whole for key, whole in keys.items()}
    own_way = tuple({start for way in _own_ways(model) for start in (way, *_plain_starts(way, plain))})

    def checked(key: str) -> bool:
        return not key.endswith('_extra_state') and not key.startswith(own_way)

    # BatchNorm fills in the count that old files do not have
    counts = 'num_batches_tracked'
    missing = [key for key in mine if key not in theirs and checked(key) and key.rpartition('.')[2] != counts]
    if missing:
        raise AmpCheckpointError(
            f'{name} lacks {some(missing, 4, repr)}, which the model has: the file is damaged or of another model. If the '
            f'model was changed on purpose, {WEIGHTS_ONLY}.'
        )
    # a buffer that is made in the course of a training is in its files, and not yet in a new model
    unset = {
        f'{name}.{key}' if name else key
        for name, module in model.named_modules()
        for key, value in module._buffers.items()
        if value is None
    }
    extra = [theirs[key] for key in theirs if key not in mine and key not in unset and checked(key)]
    if extra:
        raise AmpCheckpointError(
            f'{name} has {some(extra, 4, repr)}, which the model has not: the file is of another model. If the model was '
            f'changed on purpose, {WEIGHTS_ONLY}.'
        )
    tensors = {
        theirs[key]: _like(value, saved[theirs[key]])
        for key, value in mine.items()
        if key in theirs and checked(key) and isinstance(value, Tensor)
    }
    Record(tensors).check(saved, name)


def _like(value: Tensor, saved: Any) -> Schema:
    """What may be loaded into a parameter or buffer."""
    if isinstance(value, (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer)):
        return TensorOf(dense=False)
    # torch takes a vector of one element for a number
    lone = value.dim() == 0 and isinstance(saved, Tensor) and saved.shape == (1,)
    remedy = f': the file is of another model. If the model was changed on purpose, {WEIGHTS_ONLY}.'
    # a sparse, expanded or quantized buffer of the model's own is in its files as it is
    form = TensorOf(None if lone else value.shape, 'the model has', remedy, is_dense(value))
    other = f'{{path}} is {{value.dtype}}, but the model has {value.dtype}: the file is damaged.'
    return Both(form, Is('', lambda there: _kind(there) == _kind(value), other))


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
    MapOf(names=True).check(saved, name)
    names = {key: value for key, value in saved.items() if key.startswith('module.')}
    check_model(names, model, name, 'module.')
    if average is not None:
        own = {key: _same_form(value) for key, value in average.state_dict().items() if not key.startswith('module.')}
        other = ': it is damaged, or another average.'
        form = Record(own, missing='{path} lacks {keys}' + other, unknown='{path} has an unknown {keys}' + other)
        form.check({key: value for key, value in saved.items() if key not in names}, name)


def _same_form(value: Tensor) -> Is:
    return Is(
        f'like {value!r}',
        lambda there: isinstance(there, Tensor) and there.shape == value.shape and _kind(there) == _kind(value),
    )


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
    """What the names of modules begin with that save or load in another way than torch's."""
    found = []
    for key, module in model.named_modules():
        ways = [vars(kind)[way] for kind in type(module).__mro__ for way in STATE_DICT_METHODS if way in vars(kind)]
        hooks = [getattr(hook, '__self__', hook) for hook in saving_and_loading_hooks(module)]
        if any(not way.__module__.startswith(('torch.', 'amp_wrapper.')) for way in ways) or any(
            not hook.__module__.startswith('amp_wrapper.') for hook in hooks
        ):
            found.append(f'{key}.' if key else '')
    return found
