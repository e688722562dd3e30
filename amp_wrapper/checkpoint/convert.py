"""Recognises six kinds of checkpoint files, and converts them to plain weights or to mmengine's format.

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

Dict to dict, without mmengine. Every conversion returns a new dict, which shares its tensors with the old one, and one
sentence for each thing that is not in it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import AmpCheckpointError, AmpUsageError
from ..policy.options import is_whole
from . import apex, resume_record, schema
from .format import SavedAmp, read

WEIGHT_TYPES = {'fp32': torch.float32, 'fp16': torch.float16, 'bf16': torch.bfloat16}
#: Where the weights of a file with averaged weights come from.
WEIGHTS = ('average', 'trained')
_KIND_OF_PART = {'own': 'own', 'apex': 'apex', 'torch': 'stock', 'plain': 'plain'}
_CASTABLE = frozenset(WEIGHT_TYPES.values())
_STATISTICS = ('running_mean', 'running_var')
_STOCK_SCALER = ('scale', 'growth_factor', 'backoff_factor', 'growth_interval', '_growth_tracker')
_EMPTY_HUB: Mapping[str, Mapping[str, Any]] = {'log_scalars': {}, 'runtime_info': {}, 'resumed_keys': {}}
_HUB = schema.Record(
    dict.fromkeys(_EMPTY_HUB, schema.ANYTHING), missing='{path} has no key {keys}: the file is damaged.'
)
_WEIGHT = schema.Both(
    schema.TensorOf(dense=False),
    schema.Is(
        '',
        lambda value: value.layout is torch.strided and not value.is_meta,
        '{path} is no plain tensor ({value.layout}, on {value.device}).',
    ),
)
_POSITION_KEYS = {'epoch': ('epoch',), 'iter': ('iter', 'global_step', 'iteration')}


@dataclasses.dataclass(frozen=True)
class Content:
    """What a file holds.

    Attributes:
        kind: 'own', 'stock', 'plain', 'apex', 'raw_apex' or 'weights'. With several optimizers, the first of own, apex,
            stock and plain that one of them has.
        state_dict: The weights as they lie in the file, by name.
        optimizers: What :func:`amp_wrapper.checkpoint.read` says about each; the name of a single one is ''.
    """

    kind: str
    state_dict: Mapping[str, Any]
    optimizers: Mapping[str, SavedAmp]


def identify(file: Any) -> Content:
    """Find out what kind of file this is, and validate it.

    Args:
        file: As it was read; not changed.

    Raises:
        AmpCheckpointError: None of the six kinds, or damaged; names the key.
    """
    state_dict = _weights_in(file)
    # old tools write None for "no optimizer"
    if state_dict is file or file.get('optimizer') is None:
        return Content('weights', state_dict, {})
    state = file['optimizer']
    schema.MapOf(expected='the state dict of one optimizer, or of several by name').check(state, "'optimizer'")
    named = bool(state) and all(isinstance(part, Mapping) and 'param_groups' in part for part in state.values())
    parts: dict[str, SavedAmp] = {}
    for name, part in state.items() if named else [('', state)]:
        try:
            parts[str(name)] = read(part)
        except AmpCheckpointError as error:
            raise AmpCheckpointError(f"'optimizer'{f'[{name!r}]' if name else ''}: {error}") from None
    kinds = {_KIND_OF_PART[part.kind] for part in parts.values()}
    if 'amp' in file and kinds == {'plain'} and not named:
        scalers = apex.read(file['amp'], 'amp')
        return Content('raw_apex', state_dict, {'': dataclasses.replace(parts[''], kind='apex', loss_scalers=scalers)})
    return Content(next(kind for kind in _KIND_OF_PART.values() if kind in kinds), state_dict, parts)


def _weights_in(file: Any) -> Mapping[str, Any]:
    schema.MapOf().check(file, 'a checkpoint')
    if file and all(isinstance(value, Tensor) for value in file.values()):
        bare: Mapping[str, Any] = file
        return bare
    key = next((key for key in ('state_dict', 'model') if key in file), None)
    if key is None:
        raise AmpCheckpointError(
            f"this holds neither 'state_dict' nor 'model' (found: {', '.join(map(str, file)) or 'nothing'}): put the model's "
            f'state dict under one of the two.'
        )
    weights: Mapping[str, Any] = file[key]
    schema.MapOf(expected='a dict of tensors', names=True).check(weights, repr(key))
    # a module's extra state may be anything
    tensors = [
        name for name, value in weights.items() if isinstance(value, Tensor) or not name.endswith('_extra_state')
    ]
    schema.Record(dict.fromkeys(tensors, _WEIGHT)).check(weights, repr(key))
    return weights


# -- weights ----------------------------------------------------------------------------------------------------------


def to_weights(
    file: Mapping[str, Any], dtype: torch.dtype, weights: str = 'average'
) -> tuple[dict[str, Any], list[str]]:
    """The weights alone, in one floating type.

    float16, bfloat16 and float32 tensors are cast; integer, boolean, complex and float64 ones are left alone. In
    float16, BatchNorm's running statistics stay float32, and so does a tensor with a finite element that float16 cannot
    hold.

    Args:
        file: A dict of any kind; not changed.
        dtype: torch.float32, torch.float16 or torch.bfloat16.
        weights: 'average' or 'trained'; makes a difference where the file has ``ema_state_dict``.

    Returns:
        ``{'meta', 'state_dict'}``, and notes.

    Raises:
        AmpCheckpointError: No weights; the optimizer's part is not looked at.
        AmpUsageError: Another type, or another word for ``weights``.
    """
    if dtype not in _CASTABLE:
        raise AmpUsageError(f'dtype={dtype!r} must be torch.float32, torch.float16 or torch.bfloat16.')
    # whatever happened to the optimizer's part, the weights may be all that is left to save
    state_dict = _weights_in(file)
    notes: list[str] = []
    result: dict[str, Tensor] = {}
    # tied weights are one tensor under several names; cast one by one they would be several
    cast: dict[Any, Tensor] = {}
    kept: set[Any] = set()
    too_large: list[str] = []
    vanished = 0
    for name, value in _choose_weights(file, state_dict, weights, notes).items():
        if not isinstance(value, Tensor) or value.dtype not in _CASTABLE or value.dtype == dtype:
            result[name] = value
            continue
        target = torch.float32 if dtype == torch.float16 and name.rpartition('.')[2] in _STATISTICS else dtype
        memory = value.untyped_storage().data_ptr(), value.storage_offset()
        key = (*memory, value.shape, value.stride(), value.dtype, target)
        if key not in cast:
            cast[key] = value.to(target)
            if (cast[key].isinf() & value.isfinite()).any():
                cast[key] = value.float()
                kept.add(key)
            vanished += int(((cast[key] == 0) & (value != 0)).sum())
        if key in kept:
            too_large.append(name)
        result[name] = cast[key]
    if too_large:
        notes.append(f'too large for {_short(dtype)}, kept in float32: {", ".join(too_large)}')
    if vanished:
        notes.append(f'{vanished} elements were too small for {_short(dtype)} and are 0 now')
    left_out = [str(key) for key in file if key not in ('meta', 'state_dict', 'model')]
    if left_out and state_dict is not file:
        notes.append(f'weights alone; left out: {", ".join(left_out)}')
    meta = file.get('meta')
    return {'meta': dict(meta) if isinstance(meta, Mapping) else {}, 'state_dict': result}, notes


def _choose_weights(
    file: Mapping[str, Any], state_dict: Mapping[str, Any], weights: str, notes: list[str]
) -> dict[str, Any]:
    """The state dict without the prefix of a wrapped model, of the average or of the trained weights."""
    if weights not in WEIGHTS:
        raise AmpUsageError(f"weights={weights!r} must be 'average' or 'trained'.")
    state = dict(state_dict)
    if state and all(str(name).startswith('module.') for name in state):
        state = {str(name)[len('module.') :]: value for name, value in state.items()}
        notes.append("the prefix 'module.' of a wrapped model is left out")
    average = file.get('ema_state_dict') if state_dict is not file else None
    if average is None:
        if weights == 'trained':
            notes.append("no average is in the file: 'state_dict' holds the trained weights")
        return state
    schema.MapOf(expected='a dict of tensors').check(average, "'ema_state_dict'")
    if weights == 'average':
        notes.append(
            "'state_dict' holds the average, which mmengine's EMAHook swaps in when it saves; weights='trained' "
            '(--weights trained) takes the others'
        )
        return state
    trained = {str(name)[len('module.') :]: value for name, value in average.items() if str(name).startswith('module.')}
    for name, value in trained.items():
        if name not in state or not isinstance(value, Tensor) or value.shape != state[name].shape:
            raise AmpCheckpointError(
                f"'ema_state_dict'['module.{name}'] has no counterpart of its shape in 'state_dict'."
            )
    notes.append("the trained weights are taken out of 'ema_state_dict'; the average is left out")
    return {**state, **trained}


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix('torch.')


# -- training files ---------------------------------------------------------------------------------------------------


def to_stock(
    file: Mapping[str, Any], epoch: int | None = None, iteration: int | None = None, weights: str | None = None
) -> tuple[dict[str, Any], list[str]]:
    """A file that mmengine resumes from without this package, with ``AmpOptimWrapper`` or ``OptimWrapper``.

    Args:
        file: Of any kind with an optimizer; not changed.
        epoch: Finished epochs, where the file does not have them, or to replace what it has.
        iteration: Finished iterations, likewise.
        weights: 'trained' puts the trained weights into ``state_dict`` and leaves the average out; otherwise both stay
            where mmengine's EMAHook expects them.

    Returns:
        ``meta``, ``state_dict``, ``message_hub``, ``optimizer`` with ``GradScaler``'s keys in ``loss_scaler`` and nothing
        of ours, and the file's other keys; and notes.

    Raises:
        AmpCheckpointError: As :func:`identify`; or no optimizer; or epoch or iteration are unknown.
    """
    content = identify(file)
    result, notes = _training_file(file, content, epoch, iteration, weights or 'average')
    parts: dict[str, dict[str, Any]] = {}
    for name, saved in content.optimizers.items():
        said = _dropped(saved)
        part = dict(saved.optimizer)
        scaler = saved.loss_scalers[0] if saved.loss_scalers else None
        if scaler:
            part['loss_scaler'] = _stock_scaler(scaler, said)
        elif scaler is not None:
            said.append('the empty state of a disabled loss scaler is left out: an enabled GradScaler refuses it')
        if len(saved.loss_scalers) > 1:
            rest = ', '.join(f'loss {index}: {s["scale"]:g}' for index, s in enumerate(saved.loss_scalers) if index)
            said.append(f'mmengine keeps one loss scale; left out: {rest}')
        parts[name] = part
        notes += [f'{name}: {line}' if name else line for line in said]
    result['optimizer'] = parts.get('', parts)
    return result, notes


def _training_file(
    file: Mapping[str, Any], content: Content, epoch: int | None, iteration: int | None, weights: str
) -> tuple[dict[str, Any], list[str]]:
    """Everything but the optimizer."""
    if content.kind == 'weights':
        raise AmpCheckpointError(
            'this holds weights and no optimizer, so nothing can be resumed from it: use it with load_from=... and '
            'resume=False, or convert it to fp32, fp16 or bf16.'
        )
    notes: list[str] = []
    meta, hub = file.get('meta', {}), file.get('message_hub', _EMPTY_HUB)
    schema.MapOf().check(meta, "'meta'")
    _HUB.check(hub, "'message_hub'")
    if 'config' in meta:
        # mmcv 1 wrote it; mmengine would execute it while resuming
        meta = {key: value for key, value in meta.items() if key != 'config'}
        notes.append("'meta' without 'config', a text that mmengine would execute")
    result: dict[str, Any] = {
        'meta': {
            **meta,
            'epoch': _position(file, meta, 'epoch', epoch),
            'iter': _position(file, meta, 'iter', iteration),
        },
        'state_dict': _choose_weights(file, content.state_dict, weights, notes),
        'message_hub': hub if 'message_hub' in file else {key: {} for key in _EMPTY_HUB},
    }
    # raw scripts keep more beside; whoever reads the new file finds it where it was
    left_out = (*result, 'model', 'amp', resume_record.KEY)
    result.update({key: value for key, value in file.items() if key not in left_out})
    if weights == 'trained':
        result.pop('ema_state_dict', None)
    elif 'ema_state_dict' in file:
        notes.append(
            "resume with mmengine's EMAHook, which swaps the two: without it, training goes on from the average"
        )
    if 'state_dict' in file and 'model' in file and not _same_weights(file['model'], content.state_dict):
        notes.append("left out: 'model', which is not the same as 'state_dict'")
    if 'message_hub' not in file:
        notes.append('the log of a mmengine run is not in the file: it starts empty')
    if 'param_schedulers' not in file:
        notes.append("the file has no 'param_schedulers': mmengine's schedules start at their beginning")
    if resume_record.KEY in file:
        notes.append(f'left out: the states of the random generators ({resume_record.KEY!r})')
    return result, notes


def _same_weights(left: Any, right: Mapping[str, Any]) -> bool:
    if not isinstance(left, Mapping) or left.keys() != right.keys():
        return False
    pairs = ((left[name], right[name]) for name in right)
    return all(torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a is b for a, b in pairs)


def _position(file: Mapping[str, Any], meta: Mapping[str, Any], name: str, given: int | None) -> int:
    value: Any = given
    keys = _POSITION_KEYS[name]
    if value is None:
        value = meta.get(name, next((file[key] for key in keys if key in file), None))
    if value is None:
        raise AmpCheckpointError(
            f'the file does not tell how many {"epochs" if name == "epoch" else "iterations"} are done (no '
            f'{" or ".join(map(repr, keys))}): give --{name} N.'
        )
    if not is_whole(value):
        raise AmpCheckpointError(f'{name}={value!r} must be a whole number of at least 0: give --{name} N.')
    return int(value)


def _dropped(saved: SavedAmp) -> list[str]:
    """One sentence for each thing that only this package's format holds."""
    if saved.kind != 'own':
        return []
    notes = [f'left out: level and overrides ({saved.opt_level})']
    if saved.window is not None:
        count = sum(gradient is not None for gradient in saved.window.gradients)
        notes.append(f'left out: the gradients of an unfinished accumulation ({count}), which starts anew')
    for index, scaler in enumerate(saved.loss_scalers):
        label = f' of loss {index}' if len(saved.loss_scalers) > 1 else ''
        if scaler.get('steps'):
            notes.append(f'left out: the counters{label} ({scaler["steps"]} steps, {scaler.get("skips", 0)} skipped)')
        if scaler.get('hysteresis_tracker', 1) != 1:
            notes.append(f'left out: the hysteresis{label} ({scaler["hysteresis_tracker"]})')
    return notes


def _stock_scaler(scaler: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """Exactly ``GradScaler``'s keys; it fails without any of them."""
    defaults = {'growth_factor': 2.0, 'backoff_factor': 0.5, 'growth_interval': apex.GROWTH_INTERVAL}
    state = {key: scaler.get(key, defaults.get(key)) for key in _STOCK_SCALER}
    if not scaler.get('dynamic', True):
        notes.append(
            f"the loss scale {scaler['scale']:g} was static: mmengine's AmpOptimWrapper goes on from it and lets it grow, "
            f'unless its own loss_scale is a number'
        )
    # GradScaler grows when the tracker equals the interval: one that is past it would never grow again
    if state['_growth_tracker'] >= state['growth_interval']:
        notes.append(f'the growth tracker {state["_growth_tracker"]} counted steps of a static scale: it is 0 now')
        state['_growth_tracker'] = 0
    return state
