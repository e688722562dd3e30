"""Describes what a resume took over from a checkpoint: a line each for what was kept, converted, dropped, and is new."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from ..policy.levels import Policy, dtype_name
from ..policy.nested import HALF_TYPES
from .format import SavedAmp


def window_fits(saved: SavedAmp, policy: Policy) -> bool:
    """Whether the gradients of an open accumulation window mean the same under ``policy``.

    Args:
        saved: What was read.
        policy: The configuration that resumes.
    """
    mine = policy.to_dict()
    theirs = saved.properties or {}
    keys = ('cast_model_type', 'autocast_dtype', 'num_losses', 'master_weights')
    same_scale = theirs.get('loss_scale', {}).get('dynamic') == mine['loss_scale']['dynamic'] and (
        mine['loss_scale']['dynamic'] or theirs['loss_scale'].get('init_scale') == mine['loss_scale']['init_scale']
    )
    # files of before the option existed do not name it
    same_sums = theirs.get('accumulate_in_fp32', False) == mine['accumulate_in_fp32']
    return same_scale and same_sums and all(theirs.get(key) == mine[key] for key in keys)


def describe(
    saved: SavedAmp, policy: Policy, scales: Sequence[float], dropped: Sequence[str], new: Sequence[float] = ()
) -> list[str]:
    """Say what was kept, converted, dropped, and begun anew.

    Args:
        saved: What the checkpoint held.
        policy: The configuration that resumed.
        scales: The loss scales that were taken over.
        dropped: One phrase for each thing that was not.
        new: Loss scales that start as configured, for the checkpoint has none.

    Returns:
        One to four lines.
    """
    header = _header(saved, policy)
    pure = policy.enabled and policy.cast_model_type in HALF_TYPES and not policy.master_weights
    kept: list[str] = []
    converted: list[str] = []
    states = _states(saved)
    types = sorted({dtype_name(value.dtype) for value in states if value.dtype in HALF_TYPES})
    name = dtype_name(policy.cast_model_type) if pure and policy.cast_model_type is not None else 'float32'
    before = saved.properties or {}
    rounded_before = before.get('cast_model_type') == name and before.get('master_weights') is False
    if not pure or rounded_before:
        kept.append('weights')
    else:
        converted.append(f'weights to {name}')
    if pure and (types != [name] or any(value.dtype not in HALF_TYPES for value in states)):
        converted.append(f'optimizer state to {name}')
    elif types and not pure:
        converted.append(f'optimizer state from {" and ".join(types)} to float32')
    else:
        kept.append('optimizer state')
    kept += _scales(scales)
    if saved.window is not None and policy.enabled and window_fits(saved, policy):
        kept.append('the gradients of an unfinished accumulation')
    begun = [f'{phrase}, which the checkpoint does not hold' for phrase in _scales(new)]
    rows = (('kept', ', ', kept), ('converted', ', ', converted), ('dropped', '; ', dropped), ('new', ', ', begun))
    return [f'{header}: {verb}: {comma.join(items)}' for verb, comma, items in rows if items]


def _scales(scales: Sequence[float]) -> list[str]:
    words = 'loss scale ' if len(scales) == 1 else 'loss scales '
    return [words + ', '.join(f'{scale:g}' for scale in scales)] if scales else []


def _header(saved: SavedAmp, policy: Policy) -> str:
    origin = {
        'own': f'saved at {saved.opt_level}',
        'torch': "saved by mmengine's own AmpOptimWrapper",
        'apex': 'saved by apex',
        'plain': 'saved without mixed precision',
    }[saved.kind]
    return (
        f'{origin}, resumed at {policy.opt_level}' if policy.enabled else f'{origin}, resumed without mixed precision'
    )


def _states(saved: SavedAmp) -> list[Tensor]:
    """The floating tensors of the optimizer's state, without scalars such as step counters."""
    states = saved.optimizer.get('state', {}).values()
    values = [value for state in states if isinstance(state, Mapping) for value in state.values()]
    return [v for v in values if isinstance(v, Tensor) and v.is_floating_point() and v.dim() > 0]
