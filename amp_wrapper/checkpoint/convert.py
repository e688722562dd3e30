"""Recognises six kinds of checkpoint files, says what is in them, and takes their weights out in another type.

==========  =========================================================================================================
kind        what wrote it
==========  =========================================================================================================
own         this package's ``AmpOptimWrapper``, at any level
stock       mmengine's own ``AmpOptimWrapper`` (key ``loss_scaler`` in the optimizer's state)
plain       mmengine's ``OptimWrapper``, or a script without mixed precision
apex        mmengine's own ``ApexOptimWrapper`` (key ``apex_amp`` in the optimizer's state)
raw_apex    a script on apex: ``{'model' or 'state_dict', 'optimizer', 'amp'}``
weights     no optimizer: ``{'state_dict' or 'model'}``, or tensors by name and nothing else
==========  =========================================================================================================
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import AmpCheckpointError, AmpUsageError
from ..policy.levels import dtype_name
from .format import SavedAmp, as_dict, read, read_apex

WEIGHT_TYPES = {'fp32': torch.float32, 'fp16': torch.float16, 'bf16': torch.bfloat16}


def weights_in(file: Any) -> Mapping[str, Any]:
    """Find the weights of a file of any kind.

    Args:
        file: As it was read; not changed.

    Raises:
        AmpCheckpointError: There are none.
    """
    if as_dict(file, 'a checkpoint') and all(isinstance(value, Tensor) for value in file.values()):
        bare: Mapping[str, Any] = file
        return bare
    key = next((key for key in ('state_dict', 'model') if key in file), None)
    if key is None:
        found = ', '.join(map(str, file)) or 'nothing'
        raise AmpCheckpointError(f"no 'state_dict' and no 'model' (found: {found}): put the weights under one of them.")
    return as_dict(file[key], repr(key))


def identify(file: Any) -> tuple[str, dict[str, SavedAmp]]:
    """Find out what kind of file this is.

    Args:
        file: As it was read; not changed.

    Returns:
        The kind: with several optimizers, the first of own, apex, stock and plain that one of them has. And what
        :func:`amp_wrapper.checkpoint.read` says about each optimizer; the name of a single one is ''.

    Raises:
        AmpCheckpointError: None of the six kinds, or damaged; names the key.
    """
    # old tools write None for "no optimizer"
    if weights_in(file) is file or file.get('optimizer') is None:
        return 'weights', {}
    state = as_dict(file['optimizer'], "'optimizer'")
    named = bool(state) and all(isinstance(part, Mapping) and 'param_groups' in part for part in state.values())
    parts = {str(name): read(part) for name, part in (state.items() if named else [('', state)])}
    kinds = {part.kind for part in parts.values()}
    if 'amp' in file and kinds == {'plain'} and not named:
        scalers = read_apex(file['amp'], 'amp')
        return 'raw_apex', {'': SavedAmp('apex', parts[''].optimizer, loss_scalers=scalers)}
    return next(kind for kind in ('own', 'apex', 'stock', 'plain') if kind in kinds), parts


def lines_of(file: Any) -> list[str]:
    """Describe a file, one line for each fact.

    Args:
        file: Its content.

    Raises:
        AmpCheckpointError: None of the known kinds, or damaged.
    """
    kind, optimizers = identify(file)
    weights = weights_in(file)
    meta: Mapping[str, Any] = file.get('meta') or {}
    place = [f'{key} {meta.get(key, file.get(key))}' for key in ('epoch', 'iter') if key in meta or key in file]
    rows = [
        ('kind', kind),
        ('saved', ', '.join(place) or 'the file does not tell when'),
        ('model', _tensors(weights.values())),
        ('non-finite', ', '.join(name for name, value in weights.items() if not _is_finite(value)) or 'none'),
    ]
    if file.get('ema_state_dict') is not None:
        rows.append(('EMA', "the average is in 'state_dict', the trained weights in 'ema_state_dict'"))
    for name, saved in optimizers.items():
        rows += [(f'{name}: {label}' if name else label, text) for label, text in _optimizer(saved)]
    width = max(len(label) for label, _ in rows)
    return [f'{label:<{width}}  {text}' for label, text in rows]


def _tensors(values: Iterable[Any]) -> str:
    tensors = [value for value in values if isinstance(value, Tensor)]
    counts = Counter(dtype_name(tensor.dtype) for tensor in tensors)
    kinds = ', '.join(f'{count} of {kind}' for kind, count in sorted(counts.items()))
    return f'{kinds or "none"} ({sum(tensor.numel() for tensor in tensors)} elements)'


def _is_finite(value: Any) -> bool:
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return True
    # torch has no kernel for 8-bit numbers, and none for sparse tensors
    value = value.coalesce().values() if value.is_sparse else value
    return bool((value.float() if value.itemsize == 1 else value).isfinite().all())


def _optimizer(saved: SavedAmp) -> Iterable[tuple[str, str]]:
    states = [entry for entry in saved.optimizer['state'].values() if isinstance(entry, Mapping)]
    groups = saved.optimizer['param_groups']
    rates = ', '.join(dict.fromkeys(str(group.get('lr')) for group in groups))
    yield 'optimizer', _tensors(value for entry in states for value in entry.values())
    yield 'groups', f'{len(groups)}, {sum(len(group["params"]) for group in groups)} parameters, lr {rates}'
    yield 'level', saved.opt_level or 'the file does not tell'
    for index, scaler in enumerate(saved.loss_scalers):
        label = f'loss scale {index}' if len(saved.loss_scalers) > 1 else 'loss scale'
        moves = 'dynamic' if scaler.get('dynamic', True) else 'static'
        yield label, f'{scaler["scale"]:g} ({moves})' if scaler else 'disabled'
    if saved.window is not None:
        waiting = [gradient for gradient in saved.window['gradients'] if gradient is not None]
        yield 'accumulated', f'gradients of {len(waiting)} parameters'


def to_weights(file: Any, dtype: torch.dtype, weights: str = 'average') -> tuple[dict[str, Any], list[str]]:
    """Take out the weights alone, in one floating type.

    float16, bfloat16 and float32 tensors are cast; integer, boolean, complex and float64 ones are left alone. In
    float16, BatchNorm's running statistics stay float32, and so does a tensor with a finite element that float16 cannot
    hold.

    Args:
        file: A dict of any kind; not changed.
        dtype: torch.float32, torch.float16 or torch.bfloat16.
        weights: 'average' or 'trained'; makes a difference where the file has ``ema_state_dict``.

    Returns:
        ``{'meta', 'state_dict'}``, which shares the tensors that need no cast; and a sentence for each thing that is lost.

    Raises:
        AmpCheckpointError: No weights; the optimizer's part is not looked at.
        AmpUsageError: Another type, or another word for ``weights``.
    """
    if dtype not in WEIGHT_TYPES.values():
        raise AmpUsageError(f'dtype={dtype!r} must be torch.float32, torch.float16 or torch.bfloat16.')
    if weights not in ('average', 'trained'):
        raise AmpUsageError(f"weights={weights!r} must be 'average' or 'trained'.")
    notes: list[str] = []
    result: dict[str, Any] = {}
    # tied weights are one tensor under several names; cast one by one they would be several
    cast: dict[Any, Tensor] = {}
    for name, value in _choose(file, weights, notes).items():
        if not isinstance(value, Tensor) or value.dtype not in WEIGHT_TYPES.values():
            result[name] = value
            continue
        target = torch.float32 if dtype == torch.float16 and name.endswith(('running_mean', 'running_var')) else dtype
        key = value.untyped_storage().data_ptr(), value.storage_offset(), value.shape, value.stride(), target
        if key not in cast:
            cast[key] = _cast(value, target, name, notes)
        result[name] = cast[key]
    return {'meta': dict(file.get('meta') or {}), 'state_dict': result}, notes


def _cast(value: Tensor, dtype: torch.dtype, name: str, notes: list[str]) -> Tensor:
    cast = value.to(dtype)
    if (cast.isinf() & value.isfinite()).any():
        notes.append(f'too large for {dtype_name(dtype)}, kept in float32: {name}')
        return value.float()
    if vanished := int(((cast == 0) & (value != 0)).sum()):
        notes.append(f'{vanished} elements were too small for {dtype_name(dtype)} and are 0 now: {name}')
    return cast


def _choose(file: Mapping[str, Any], weights: str, notes: list[str]) -> dict[str, Any]:
    """The state dict without the prefix of a wrapped model, of the average or of the trained weights."""
    state = dict(weights_in(file))
    if state and all(name.startswith('module.') for name in state):
        state = {name.removeprefix('module.'): value for name, value in state.items()}
    average = file.get('ema_state_dict')
    if average is None:
        if weights == 'trained':
            notes.append("no average is in the file: 'state_dict' holds the trained weights")
        return state
    if weights == 'average':
        notes.append("these are the averaged weights of mmengine's EMAHook; --weights trained takes the others")
        return state
    names = [name for name in as_dict(average, "'ema_state_dict'") if name.startswith('module.')]
    trained = {name.removeprefix('module.'): average[name] for name in names}
    if strange := trained.keys() - state.keys():
        raise AmpCheckpointError(f"'ema_state_dict' has {sorted(strange)[0]!r}, and 'state_dict' has no such weight.")
    notes.append("the trained weights are taken out of 'ema_state_dict'; the average is left out")
    return {**state, **trained}
