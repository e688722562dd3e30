"""Says what is in a checkpoint file of any kind, in lines for a reader."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from . import convert
from .format import SavedAmp


def lines_of(file: Any) -> list[str]:
    """Describe a file, one line for each fact.

    Args:
        file: Its content.

    Raises:
        AmpCheckpointError: None of the known kinds, or damaged.
    """
    kind, optimizers = convert.identify(file)
    weights = convert.weights_in(file)
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
    counts = Counter(str(tensor.dtype).removeprefix('torch.') for tensor in tensors)
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
