"""The mixed-precision part of an optimizer's state dict: writes our own format, reads it and those of others. Dict to dict.

Our format, version 1, beside the optimizer's own keys::

    loss_scaler: {scale, growth_factor, backoff_factor, growth_interval, _growth_tracker, ...}   # GradScaler's names
    amp: {version, opt_level, properties, loss_scalers, window}

A stock-shaped configuration (O1 or O4, one loss) has no top-level ``amp``: it lies inside ``loss_scaler``, which stock
readers accept. Everything in it is a tensor, number, string, list, dict, boolean or None.

apex writes ``{'loss_scaler0': {'loss_scale': float, 'unskipped': int}, ...}``.

apex saved neither the level nor the rule of the scale. The rule never differed: growth 2, backoff 0.5, interval 2000. Whether
a scale was dynamic has to be found out from its values: a counter of 2000 or more is that of a static scale, since a dynamic
one starts again at 0 there; and 1.0 is the static scale of apex's O0 and O3. Every other scale is taken for a dynamic one.
Where the resumed configuration is static, it keeps its own scale.

apex reads two keys of each scaler and ignores others. So ``amp.state_dict()`` adds a third where the two do not suffice:
``dynamic`` for a dynamic scale that looks like a static one, ``hysteresis_tracker`` where hysteresis is in use.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ..errors import AmpCheckpointError
from ..policy.levels import Policy
from ..policy.options import is_scale, is_whole

FORMAT_VERSION = 1
#: What decides what the gradients of an open accumulation mean.
_MEANING = ('cast_model_type', 'autocast_dtype', 'num_losses', 'master_weights', 'accumulate_in_fp32')
#: What older versions of torch did not save in a group yet, and newer ones fill in.
_ADDED = {'maximize', 'amsgrad', 'capturable', 'differentiable', 'foreach', 'fused', 'decoupled_weight_decay'}

#: The state of torch's element-wise optimizers; others keep tensors of any shape (Adafactor's factors, say).
_PARAMETER_SHAPED = {'momentum_buffer', 'exp_avg', 'exp_avg_sq', 'max_exp_avg_sq', 'exp_inf', 'square_avg', 'grad_avg'}
#: Clean steps after which apex doubled a moving scale.
GROWTH_INTERVAL = 2000


@dataclasses.dataclass(frozen=True)
class SavedAmp:
    """What a state dict says about mixed precision.

    Attributes:
        kind: 'own', 'stock' (mmengine's AmpOptimWrapper), 'apex' (its ApexOptimWrapper, or apex's own state
            merged into the optimizer's) or 'plain' (no mixed precision).
        optimizer: The rest: the optimizer's own keys.
        opt_level: The level it was saved at, or None where the file does not say.
        properties: The resolved policy as plain values; empty where the file does not say.
        loss_scalers: One ``LossScaler`` state per loss; an empty one for a disabled ``GradScaler``.
        window: The open accumulation, or None: ``gradients``, one entry per parameter in the order of the optimizer's groups,
            None for "no gradient"; ``unscaled``, whether they are unscaled already; for each loss, whether it took part
            (``used``) and overflowed (``found_inf``); ``foreign_found_inf``, whether gradients that came from losses of other
            optimizers overflowed, where there are such; ``buffers``, by qualified name, the values before the accumulation of
            those that its forward passes have changed.
    """

    kind: str
    optimizer: dict[str, Any]
    opt_level: str | None = None
    properties: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    loss_scalers: Sequence[Mapping[str, Any]] = ()
    window: Mapping[str, Any] | None = None

    def window_fits(self, policy: Policy) -> bool:
        """Return whether the gradients of the open accumulation mean the same in another configuration.

        Args:
            policy: The configuration that resumes.
        """
        # files of before the option existed do not name it
        theirs, mine = {'accumulate_in_fp32': False, **self.properties}, policy.to_dict()
        rule = ('dynamic',) if mine['loss_scale']['dynamic'] else ('dynamic', 'init_scale')
        same_scale = all(theirs.get('loss_scale', {}).get(key) == mine['loss_scale'][key] for key in rule)
        return same_scale and all(theirs.get(key) == mine[key] for key in _MEANING)

    def resumed(self, how: str, scales: Sequence[float], dropped: Sequence[str]) -> str:
        """Say for the log who saved it and how training goes on.

        Args:
            how: "at O2", say.
            scales: The loss scales that were taken over.
            dropped: A phrase for each thing that was not.
        """
        who = {'stock': "by mmengine's own AmpOptimWrapper", 'apex': 'by apex', 'plain': 'without mixed precision'}
        kept = f' with loss scale {", ".join(f"{scale:g}" for scale in scales)}' if scales else ''
        line = f'saved {who.get(self.kind, f"at {self.opt_level}")}, resumed {how}{kept}'
        return f'{line}; not kept: {"; ".join(dropped)}' if dropped else line


def write(
    optimizer: Mapping[str, Any],
    properties: Mapping[str, Any],
    loss_scalers: Sequence[Mapping[str, Any]],
    window: Mapping[str, Any] | None,
    stock_shaped: bool,
) -> dict[str, Any]:
    """Join the optimizer's state dict with ours.

    Args:
        optimizer: ``Optimizer.state_dict()``; not changed.
        properties: ``Policy.to_dict()``.
        loss_scalers: ``LossScaler.state_dict()`` of each loss.
        window: The open accumulation as of :class:`SavedAmp`, if any.
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
        amp['window'] = dict(window)
    scaler = dict(loss_scalers[0])
    if stock_shaped:
        return {**optimizer, 'loss_scaler': {**scaler, 'amp': amp}}
    return {**optimizer, 'loss_scaler': scaler, 'amp': amp}


def amp_part(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``amp`` dict inside a state dict of :func:`write`, wherever it lies; an empty one where there is none."""
    part = state.get('amp', (state.get('loss_scaler') or {}).get('amp'))
    return part if isinstance(part, dict) else {}


def own_form(optimizer: Optimizer) -> frozenset[str] | None:
    """Return the keys of an optimizer's state dict where it is not of torch's form (Lookahead's, say); None where it is."""
    if type(optimizer).state_dict is Optimizer.state_dict:
        return None
    keys = frozenset(optimizer.state_dict())
    return None if {'state', 'param_groups'} <= keys else keys


def read(state: Any, form: Collection[str] | None = None) -> SavedAmp:
    """Take a state dict apart, applying nothing.

    What belongs to the optimizer is its own to check, in its ``load_state_dict``.

    Args:
        state: From :func:`write`, from mmengine's own wrappers, from apex, or from a bare optimizer; not changed.
        form: The keys of the optimizer's part where they are others than torch's, from :func:`own_form`.

    Raises:
        AmpCheckpointError: Keys that are missing, scales that cannot be, a format from the future; names key and expectation.
    """
    rest = dict(as_dict(state, 'an optimizer state'))
    missing = [key for key in (form or ('param_groups', 'state')) if key not in rest]
    if missing:
        several = all(isinstance(value, Mapping) and 'param_groups' in value for value in rest.values())
        remedy = ': build the OptimWrapperDict that it was saved from' if rest and several else ''
        found = ', '.join(map(str, rest)) or 'nothing'
        raise AmpCheckpointError(f'the optimizer state has no key {sorted(missing)[0]!r} (found: {found}){remedy}.')
    if 'apex_amp' in rest or is_apex(rest.get('amp')):
        label, *others = [key for key in ('apex_amp', 'loss_scaler', 'amp') if key in rest]
        if others:
            keys = ', '.join([label, *others])
            raise AmpCheckpointError(f'the optimizer state has several loss scales: remove all but one of {keys}.')
        return SavedAmp('apex', rest, loss_scalers=read_apex(rest.pop(label), label))
    scaler, amp = rest.pop('loss_scaler', None), rest.pop('amp', None)
    if scaler is not None:
        check_scaler_state(scaler)
        scaler = dict(scaler)
        amp = scaler.pop('amp', amp)
    if amp is None and scaler is None:
        return SavedAmp('plain', rest)
    if amp is None:
        # a scaler is disabled where nothing is scaled (bfloat16), and then nothing in the file says which type it was
        return SavedAmp('stock', rest, opt_level='O1' if scaler else None, loss_scalers=[scaler])
    if as_dict(amp, 'amp').get('version') != FORMAT_VERSION:
        raise AmpCheckpointError(f"amp['version']={amp.get('version')!r} is unknown: upgrade amp_wrapper.")
    if missing := [key for key in ('opt_level', 'properties', 'loss_scalers') if not amp.get(key)]:
        raise AmpCheckpointError(f"'amp' has no {missing[0]!r}: the file is damaged.")
    for index, state in enumerate(amp['loss_scalers']):
        check_scaler_state(state, f"amp['loss_scalers'][{index}]")
    return SavedAmp('own', rest, amp['opt_level'], amp['properties'], list(amp['loss_scalers']), amp.get('window'))


def check_groups(saved: SavedAmp, optimizer: Optimizer) -> None:
    """Check that a saved state is of an optimizer of this kind with these parameters, applying nothing.

    Args:
        saved: Of torch's form.
        optimizer: The one that would take it over; not changed.

    Raises:
        AmpCheckpointError: Another number of groups or parameters; a hyper-parameter that the file lacks.
    """
    theirs, mine = saved.optimizer['param_groups'], optimizer.param_groups
    if len(theirs) != len(mine):
        raise AmpCheckpointError(f'there are {len(theirs)} parameter groups, not {len(mine)}: load the weights only.')
    # what other libraries keep is theirs to know
    is_known = type(optimizer).__module__.startswith(('torch.optim', 'amp_wrapper.optim'))
    needed = set(optimizer.defaults) - _ADDED if is_known else set()
    pairs: list[tuple[Any, Tensor]] = []
    for index, (there, here) in enumerate(zip(theirs, mine)):
        parameters = as_dict(there, f"'param_groups'[{index}]").get('params', ())
        if len(parameters) != len(here['params']):
            counts = f"{len(parameters)} 'params', not {len(here['params'])}"
            raise AmpCheckpointError(f"'param_groups'[{index}] has {counts}: the model has changed.")
        if lost := sorted(needed - set(there)):
            kind = type(optimizer).__name__
            raise AmpCheckpointError(f"'param_groups'[{index}] lacks {lost[0]!r}: it was not saved by {kind}.")
        pairs += zip(parameters, here['params'])
    gradients = saved.window['gradients'] if saved.window is not None else ()
    shaped = [("amp['window']['gradients']", value, each) for value, (_, each) in zip(gradients, pairs)]
    for key, parameter in pairs if is_known else ():
        state = saved.optimizer['state'].get(key, {})
        shaped += [(f"'state'[{key}][{name!r}]", state.get(name), parameter) for name in _PARAMETER_SHAPED]
    for label, value, parameter in shaped:
        if isinstance(value, Tensor) and value.shape != parameter.shape:
            raise AmpCheckpointError(f'{label} has the shape {tuple(value.shape)}, not {tuple(parameter.shape)}.')


# -- loss scales -------------------------------------------------------------------------------------------------------------


def as_dict(value: Any, name: str) -> Mapping[Any, Any]:
    """Return a value that has to be a dict.

    Args:
        value: Of a file.
        name: How the error calls it.

    Raises:
        AmpCheckpointError: It is none.
    """
    if not isinstance(value, Mapping):
        raise AmpCheckpointError(f'{name} must be a dict, but is {type(value).__name__}: the file is damaged.')
    return value


def check_scaler_state(state: Any, label: str = 'loss_scaler') -> None:
    """Check the saved state of a loss scaler without applying it.

    Args:
        state: Of our scaler or of ``GradScaler``; empty for a disabled one.
        label: How messages call it.

    Raises:
        AmpCheckpointError: Names the key, the value and what was expected.
    """
    if as_dict(state, label):
        check_scale(state, 'scale', '_growth_tracker', label)


def check_scale(state: Any, scale: str, counter: str, label: str) -> None:
    """Check a saved loss scale, and the counter of steps beside it.

    Args:
        state: Of a loss scaler.
        scale: The key of the scale.
        counter: The key of the counter.
        label: How messages call the state.

    Raises:
        AmpCheckpointError: One is missing or impossible.
    """
    state = as_dict(state, label)
    if not is_scale(state.get(scale)):
        raise AmpCheckpointError(f'{label}[{scale!r}]={state.get(scale)!r} must be a positive float32 number.')
    if not is_whole(state.get(counter), 0, 2**31):
        raise AmpCheckpointError(f'{label}[{counter!r}]={state.get(counter)!r} must be a whole number below 2**31.')


def is_apex(amp: Any) -> bool:
    """Return whether ``amp`` is apex's state and not ours, which has a version."""
    is_dict = isinstance(amp, Mapping)
    # our own states have a key 'loss_scalers', without a number
    return is_dict and 'version' not in amp and any(re.fullmatch(r'loss_scaler\d+', str(key)) for key in amp)


def read_apex(amp: Any, label: str) -> list[dict[str, Any]]:
    """Translate apex's state into ``GradScaler``'s keys.

    Args:
        amp: ``apex.amp.state_dict()``; not changed.
        label: The key it lies under, for messages: 'apex_amp' or 'amp'.

    Returns:
        One ``LossScaler`` state per loss, in the order of their numbers.

    Raises:
        AmpCheckpointError: Not apex's form, a hole in the numbering, or an impossible value; names key and value.
    """
    names = [f'loss_scaler{index}' for index in range(max(1, len(as_dict(amp, label))))]
    if missing := [name for name in names if name not in amp]:
        text = f'{label}[{missing[0]!r}] is missing (found: {", ".join(map(str, amp)) or "nothing"})'
        raise AmpCheckpointError(f'{text}: apex saves one for each loss. To go on without them, remove {label!r}.')
    states = []
    for name in names:
        check_scale(amp[name], 'loss_scale', 'unskipped', f'{label}[{name!r}]')
        scale, unskipped = amp[name]['loss_scale'], amp[name]['unskipped']
        dynamic = scale != 1.0 and unskipped < GROWTH_INTERVAL
        state = {'dynamic': dynamic, 'scale': float(scale), '_growth_tracker': unskipped}
        states.append(state | {key: amp[name][key] for key in ('dynamic', 'hysteresis_tracker') if key in amp[name]})
    return states


def write_apex(loss_scalers: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Write loss scales with apex's keys, and the further keys that :func:`read_apex` needs where apex's do not suffice.

    Args:
        loss_scalers: ``LossScaler`` states, one per loss, none of them empty.

    Returns:
        A new dict of plain numbers.
    """
    result: dict[str, dict[str, Any]] = {}
    for index, state in enumerate(loss_scalers):
        scale, unskipped = float(state['scale']), int(state['_growth_tracker'])
        written = result[f'loss_scaler{index}'] = {'loss_scale': scale, 'unskipped': unskipped}
        if state['dynamic'] and (scale == 1.0 or unskipped >= GROWTH_INTERVAL):
            written['dynamic'] = True
        if 'hysteresis_tracker' in state:
            written['hysteresis_tracker'] = state['hysteresis_tracker']
    return result
