"""The mixed-precision part of an optimizer's state dict: writes our own format, reads it and those of others. Dict to dict.

Our format, version 1, beside the optimizer's own keys::

    loss_scaler: {scale, growth_factor, backoff_factor, growth_interval, _growth_tracker, ...}   # GradScaler's names
    amp: {version, opt_level, properties, loss_scalers, window}

A stock-shaped configuration (O1 or O4, one loss) has no top-level ``amp``: it lies inside ``loss_scaler``, which stock
readers accept. Everything in it is a tensor, number, string, list, dict, boolean or None.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ..errors import AmpCheckpointError
from . import apex, schema

FORMAT_VERSION = 1
_DICT = schema.kind('a dict', Mapping)
_GRADIENT = schema.Maybe(schema.kind('a tensor or None', Tensor))
_TENSORS = schema.MapOf(schema.TENSOR, names=True)
#: Of our scaler and of ``GradScaler``
_SCALER = schema.Record(
    {'scale': schema.POSITIVE, '_growth_tracker': schema.whole(bits=31)},
    {
        'dynamic': schema.SWITCH,
        **dict.fromkeys(('growth_factor', 'backoff_factor', 'growth_interval'), schema.FINITE),
        'hysteresis_tracker': schema.whole(bits=31),
        **dict.fromkeys(('steps', 'skips', 'consecutive_skips'), schema.whole()),
    },
    missing='{path} has no key {keys} (found: {found}).',
)
_AMP = schema.Record(
    {
        'version': schema.version(FORMAT_VERSION),
        'opt_level': schema.kind('a name', str),
        'properties': _DICT,
        'loss_scalers': schema.ListOf(expected='a list of one state per loss', least=1),
    }
)
#: The optimizer's part, where it is of torch's form
_OPTIMIZER = schema.Record(
    {
        'state': schema.MapOf(),
        'param_groups': schema.ListOf(
            schema.named("a dict with a list 'params'", schema.Record({'params': schema.ListOf()}))
        ),
    }
)


@dataclasses.dataclass(frozen=True)
class Window:
    """The gradients of an open accumulation window.

    Attributes:
        gradients: One entry per parameter in the order of the optimizer's groups; None for "no gradient".
        unscaled: Whether they are unscaled already (several losses) or still carry the scale.
        used: Whether each loss took part.
        found_inf: Whether each loss overflowed.
        foreign_found_inf: Whether gradients that came from losses of other optimizers overflowed; None without such gradients.
        buffers: The values before the accumulation of buffers that its forward passes have changed, by qualified name.
    """

    gradients: Sequence[Tensor | None]
    unscaled: bool
    used: Sequence[bool]
    found_inf: Sequence[float]
    foreign_found_inf: float | None = None
    buffers: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class SavedAmp:
    """What a state dict says about mixed precision.

    Attributes:
        kind: 'own', 'torch' (mmengine's stock AmpOptimWrapper), 'apex' (its ApexOptimWrapper, or apex's own state
            merged into the optimizer's) or 'plain' (no mixed precision).
        optimizer: The rest: the optimizer's own keys.
        opt_level: The level it was saved at, or None where the file does not say.
        properties: The resolved policy as plain values, or None.
        loss_scalers: One ``LossScaler`` state per loss; an empty one for a disabled ``GradScaler``.
        window: The open accumulation window, or None.
    """

    kind: str
    optimizer: dict[str, Any]
    opt_level: str | None = None
    properties: Mapping[str, Any] | None = None
    loss_scalers: Sequence[Mapping[str, Any]] = ()
    window: Window | None = None


def write(
    optimizer: Mapping[str, Any],
    properties: Mapping[str, Any],
    loss_scalers: Sequence[Mapping[str, Any]],
    window: Window | None,
    stock_shaped: bool,
) -> dict[str, Any]:
    """Join the optimizer's state dict with ours.

    Args:
        optimizer: ``Optimizer.state_dict()``; not changed.
        properties: ``Policy.to_dict()``.
        loss_scalers: ``LossScaler.state_dict()`` of each loss.
        window: The open accumulation window, if any.
        stock_shaped: Whether ours goes inside ``loss_scaler``.

    Returns:
        A new dict.
    """
    amp: dict[str, Any] = {
        'version': FORMAT_VERSION,
        'opt_level': properties['opt_level'],
        'properties': dict(properties),
        'loss_scalers': [dict(state) for state in loss_scalers],
    }
    if window is not None:
        always = ('gradients', 'unscaled', 'used', 'found_inf')
        amp['window'] = {
            key: value for key, value in vars(window).items() if key in always or value not in (None, {}, (), [])
        }
    result = dict(optimizer)
    result['loss_scaler'] = dict(loss_scalers[0])
    if stock_shaped:
        result['loss_scaler']['amp'] = amp
    else:
        result['amp'] = amp
    return result


def amp_part(state: Mapping[str, Any]) -> dict[str, Any]:
    """The ``amp`` dict inside a state dict of :func:`write`, wherever it lies; an empty one where there is none."""
    scaler = state.get('loss_scaler')
    inside = scaler.get('amp') if isinstance(scaler, Mapping) else None
    part = state.get('amp', inside)
    return part if isinstance(part, dict) else {}


def own_form(optimizer: Optimizer) -> frozenset[str] | None:
    """The keys of an optimizer's state dict where it is not of torch's form (Lookahead's, say); None where it is."""
    if type(optimizer).state_dict is Optimizer.state_dict:
        return None
    keys = frozenset(optimizer.state_dict())
    return None if {'state', 'param_groups'} <= keys else keys


def read(state: Mapping[str, Any], form: Collection[str] | None = None) -> SavedAmp:
    """Take a state dict apart and validate every part of ours, applying nothing.

    Args:
        state: From :func:`write`, from mmengine's own wrappers, from apex, or from a bare optimizer; not changed.
        form: The keys of the optimizer's part where they are others than torch's, from :func:`own_form`; the optimizer alone
            knows what they hold.

    Raises:
        AmpCheckpointError: Damage, or a format from the future; names key and expectation.
    """
    schema.MapOf().check(state, 'an optimizer state')
    rest = dict(state)
    for key in sorted(form) if form is not None else ('state', 'param_groups'):
        if key not in rest:
            if rest and all(isinstance(value, Mapping) and 'param_groups' in value for value in rest.values()):
                raise AmpCheckpointError(
                    f'this checkpoint holds several optimizers ({", ".join(map(str, rest))}), but one is being resumed: '
                    f'build the OptimWrapperDict it was saved from.'
                )
            raise AmpCheckpointError(
                f'the optimizer state has no key {key!r} (found: {", ".join(map(str, rest)) or "nothing"}).'
            )
    if form is None:
        _OPTIMIZER.check(rest, '')
        keys = [key for group in rest['param_groups'] for key in group['params']]
        if any(not isinstance(key, int) or isinstance(key, bool) for key in keys) or len(set(keys)) != len(keys):
            raise AmpCheckpointError("'param_groups' must number every parameter once: the file is damaged.")
    label = 'apex_amp' if 'apex_amp' in rest else 'amp'
    if label == 'apex_amp' or apex.is_apex(rest.get('amp')):
        return _read_apex(rest, label)
    scaler = rest.pop('loss_scaler', None)
    amp = rest.pop('amp', None)
    if scaler is not None:
        check_scaler_state(scaler)
        scaler = dict(scaler)
        amp = scaler.pop('amp', amp)
    if amp is None:
        if scaler is None:
            return SavedAmp('plain', rest)
        # a scaler is disabled where nothing is scaled (bfloat16), and then nothing in the file says which type it was
        return SavedAmp('torch', rest, opt_level='O1' if scaler else None, loss_scalers=[scaler])
    return _read_own(rest, amp)


def _read_apex(rest: dict[str, Any], label: str) -> SavedAmp:
    both = [key for key in ('apex_amp', 'loss_scaler', 'amp') if key in rest]
    if len(both) > 1:
        raise AmpCheckpointError(
            f"the optimizer state holds apex's loss scale and another one ({', '.join(both)}): remove the keys of all but one."
        )
    return SavedAmp('apex', rest, loss_scalers=apex.read(rest.pop(label), label))


def check_scaler_state(state: Any, path: str = 'loss_scaler') -> None:
    """Validate the saved state of a loss scaler without applying it.

    Args:
        state: Of our scaler or of ``GradScaler``; empty for a disabled one.
        path: How messages call it.

    Raises:
        AmpCheckpointError: Names the key, the value and what was expected.
    """
    if not (isinstance(state, Mapping) and not state):
        _SCALER.check(state, path)


def _read_own(rest: dict[str, Any], amp: Any) -> SavedAmp:
    _AMP.check(amp, 'amp')
    schema.Record(optional={'loss_scale': _DICT}).check(amp['properties'], "amp['properties']")
    scalers = list(amp['loss_scalers'])
    for index, state in enumerate(scalers):
        check_scaler_state(state, f"amp['loss_scalers'][{index}]: loss_scaler")
    saved, window = amp.get('window'), None
    if saved is not None:
        _accumulation(rest, len(scalers)).check(saved, "amp['window']")
        window = Window(**{name: saved[name] for name in Window.__dataclass_fields__ if name in saved})
    return SavedAmp('own', rest, amp['opt_level'], amp['properties'], scalers, window)


def _accumulation(rest: Mapping[str, Any], num_losses: int) -> schema.Record:
    """What an open accumulation window of so many losses holds."""
    groups = rest.get('param_groups')
    # where the form is the optimizer's own, the number of parameters is unknown
    count = None if groups is None else sum(len(group['params']) for group in groups)
    losses = f'a list of {num_losses}, one per loss'
    return schema.Record(
        {
            'gradients': schema.ListOf(_GRADIENT, f'a list of {count}, one per parameter', count),
            'unscaled': schema.SWITCH,
            'used': schema.named(f'{losses}, of True and False only', schema.ListOf(schema.SWITCH, length=num_losses)),
            'found_inf': schema.named(f'{losses}, of 0 and 1 only', schema.ListOf(schema.FLAG, length=num_losses)),
        },
        {
            'foreign_found_inf': schema.Maybe(schema.FLAG),
            'buffers': schema.Is('', _TENSORS.fits, '{path} must be a dict of tensors by name.'),
            # of files of 0.2.0, which restored those as well
            'averages': schema.ListOf(schema.Record({'before': _TENSORS, 'now': _TENSORS})),
        },
    )
