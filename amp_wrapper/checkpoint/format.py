"""The mixed-precision part of an optimizer's state dict: our own format, and what can be read of others. Dict to dict.

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
from ..policy.loss_scale import check_scaler_state
from ..policy.options import is_number
from . import apex as checkpoint_apex

FORMAT_VERSION = 1
#: The state of torch's element-wise optimizers; others keep tensors of any shape (Adafactor's factors, say)
PARAMETER_SHAPED = frozenset(
    (
        'momentum_buffer',
        'exp_avg',
        'exp_avg_sq',
        'max_exp_avg_sq',
        'exp_inf',
        'square_avg',
        'grad_avg',
        'acc_delta',
        'sum',
        'prev',
        'ax',
    )
)


@dataclasses.dataclass(frozen=True)
class Window:
    """The gradients of an open accumulation window.

    Attributes:
        gradients: One entry per parameter in the order of the optimizer's groups; None for "no gradient".
        unscaled: Whether they are unscaled already (several losses) or still carry the scale.
        used: Whether each loss took part.
        found_inf: Whether each loss overflowed.
        foreign_found_inf: Whether what losses of other optimizers brought overflowed; None where they brought nothing.
        buffers: What buffers that the window's forward passes have changed were before it, by qualified name.
        averages: Of averages that were updated in the window, their buffers ``before`` it and ``now``, by name.
    """

    gradients: Sequence[Tensor | None]
    unscaled: bool
    used: Sequence[bool]
    found_inf: Sequence[float]
    foreign_found_inf: float | None = None
    buffers: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    averages: Sequence[Mapping[str, Mapping[str, Tensor]]] = ()


@dataclasses.dataclass(frozen=True)
class SavedAmp:
    """What a state dict says about mixed precision.

    Attributes:
        kind: 'own', 'torch' (mmengine's stock AmpOptimWrapper), 'apex' (its ApexOptimWrapper, or apex's own state
            merged into the optimizer's) or 'plain' (no mixed precision).
        optimizer: The rest: the optimizer's own keys.
        opt_level: The level it was saved at, or None where the file does not tell.
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
        amp['window'] = {
            'gradients': list(window.gradients),
            'unscaled': window.unscaled,
            'used': list(window.used),
            'found_inf': list(window.found_inf),
        }
        if window.foreign_found_inf is not None:
            amp['window']['foreign_found_inf'] = window.foreign_found_inf
        if window.buffers:
            amp['window']['buffers'] = dict(window.buffers)
        if window.averages:
            amp['window']['averages'] = [
                {key: dict(values) for key, values in entry.items()} for entry in window.averages
            ]
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
    """Take a state dict apart and judge every part of ours, applying nothing.

    Args:
        state: From :func:`write`, from mmengine's stock wrappers, from apex, or from a bare optimizer; not changed.
        form: The keys of the optimizer's part where they are others than torch's, from :func:`own_form`; the optimizer alone
            judges what they hold.

    Raises:
        AmpCheckpointError: Damage, or a format from the future; names key and expectation.
    """
    if not isinstance(state, Mapping):
        raise AmpCheckpointError(f'an optimizer state must be a dict, but is {type(state).__name__}.')
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
        _check_groups(rest)
    label = 'apex_amp' if 'apex_amp' in rest else 'amp'
    if label == 'apex_amp' or checkpoint_apex.is_apex(rest.get('amp')):
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
        # a scaler is disabled where nothing is scaled (bfloat16), and then the file does not tell the type
        return SavedAmp('torch', rest, opt_level='O1' if scaler else None, loss_scalers=[scaler])
    return _read_own(rest, amp)


def _check_groups(rest: Mapping[str, Any]) -> None:
    if not isinstance(rest['state'], Mapping):
        raise AmpCheckpointError(f"'state' must be a dict, but is {type(rest['state']).__name__}: the file is damaged.")
    groups = rest['param_groups']
    if not isinstance(groups, (list, tuple)):
        raise AmpCheckpointError(f"'param_groups' must be a list, but is {type(groups).__name__}: the file is damaged.")
    for index, group in enumerate(groups):
        if not isinstance(group, Mapping) or not isinstance(group.get('params'), (list, tuple)):
            raise AmpCheckpointError(
                f"'param_groups'[{index}] must be a dict with a list 'params': the file is damaged."
            )
    keys = [key for group in groups for key in group['params']]
    if any(not isinstance(key, int) or isinstance(key, bool) for key in keys) or len(set(keys)) != len(keys):
        raise AmpCheckpointError("'param_groups' must number every parameter once: the file is damaged.")


def check_optimizer_state(saved: SavedAmp, optimizer: Optimizer) -> None:
    """Judge whether a saved optimizer state and window fit an optimizer, applying nothing.

    Args:
        saved: From :func:`read`.
        optimizer: The one that would take it over.

    Raises:
        AmpCheckpointError: Another number of groups or parameters, or a tensor of another shape.
    """
    theirs, mine = saved.optimizer['param_groups'], optimizer.param_groups
    if len(theirs) != len(mine):
        raise AmpCheckpointError(
            f'the checkpoint has {len(theirs)} parameter groups and the optimizer {len(mine)}: resume with the '
            f'paramwise_cfg and the model it was saved with, or load the weights only (resume=False).'
        )
    parameters: list[tuple[Any, Tensor]] = []
    for index, (there, here) in enumerate(zip(theirs, mine)):
        if len(there['params']) != len(here['params']):
            raise AmpCheckpointError(
                f'parameter group {index} has {len(there["params"])} parameters in the checkpoint and '
                f'{len(here["params"])} in the optimizer: the model has changed.'
            )
        parameters += zip(there['params'], here['params'])
    # optimizers of others may keep a low-rank state under a name of torch's
    ours = type(optimizer).__module__.startswith('torch.optim')
    for key, parameter in parameters:
        state = saved.optimizer['state'].get(key, {})
        if not isinstance(state, Mapping):
            raise AmpCheckpointError(f"'state'[{key}] must be a dict, but is {type(state).__name__}.")
        for name, value in state.items():
            wrong = isinstance(value, Tensor) and value.shape != parameter.shape
            if wrong and ours and name in PARAMETER_SHAPED:
                raise AmpCheckpointError(
                    f"'state'[{key}][{name!r}] has shape {tuple(value.shape)}, but its parameter {tuple(parameter.shape)}."
                )
    if saved.window is not None:
        for index, ((_, parameter), gradient) in enumerate(zip(parameters, saved.window.gradients)):
            if gradient is not None and gradient.shape != parameter.shape:
                raise AmpCheckpointError(
                    f"amp['window']['gradients'][{index}] has shape {tuple(gradient.shape)}, but its parameter "
                    f'{tuple(parameter.shape)}.'
                )


def _read_apex(rest: dict[str, Any], label: str) -> SavedAmp:
    both = [key for key in ('apex_amp', 'loss_scaler', 'amp') if key in rest]
    if len(both) > 1:
        raise AmpCheckpointError(
            f"the optimizer state holds apex's loss scale and another one ({', '.join(both)}): remove the keys of all but one."
        )
    return SavedAmp('apex', rest, loss_scalers=checkpoint_apex.read(rest.pop(label), label))


def _read_own(rest: dict[str, Any], amp: Any) -> SavedAmp:
    if not isinstance(amp, Mapping):
        raise AmpCheckpointError(f'amp must be a dict, but is {type(amp).__name__}: the file is damaged.')
    version = amp.get('version')
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise AmpCheckpointError(f"amp['version']={version!r} must be a whole number from 1 to {FORMAT_VERSION}.")
    if version > FORMAT_VERSION:
        raise AmpCheckpointError(
            f"amp['version']={version} comes from a newer amp_wrapper; this one reads up to {FORMAT_VERSION}: upgrade it."
        )
    for key, kind in (('opt_level', str), ('properties', Mapping), ('loss_scalers', (list, tuple))):
        if not isinstance(amp.get(key), kind):
            raise AmpCheckpointError(f'amp[{key!r}]={amp.get(key)!r} is missing or of the wrong type.')
    if not isinstance(amp['properties'].get('loss_scale', {}), Mapping):
        raise AmpCheckpointError(f"amp['properties']['loss_scale']={amp['properties']['loss_scale']!r} must be a dict.")
    scalers = list(amp['loss_scalers'])
    if not scalers:
        raise AmpCheckpointError("amp['loss_scalers'] is empty: one state per loss was expected.")
    for index, state in enumerate(scalers):
        try:
            check_scaler_state(state)
        except AmpCheckpointError as error:
            raise AmpCheckpointError(f"amp['loss_scalers'][{index}]: {error}") from None
    window = _read_window(amp.get('window'), rest, len(scalers))
    return SavedAmp('own', rest, amp['opt_level'], amp['properties'], scalers, window)


def _read_window(window: Any, rest: Mapping[str, Any], num_losses: int) -> Window | None:
    if window is None:
        return None
    if not isinstance(window, Mapping):
        raise AmpCheckpointError(f"amp['window'] must be a dict, but is {type(window).__name__}.")
    gradients: Any = window.get('gradients')
    used: Any = window.get('used')
    found: Any = window.get('found_inf')
    groups = rest.get('param_groups')
    # where the form is the optimizer's own, how many there are is not told
    count = None if groups is None else sum(len(group['params']) for group in groups)
    if not isinstance(gradients, (list, tuple)) or (count is not None and len(gradients) != count):
        raise AmpCheckpointError(f"amp['window']['gradients'] must be a list of {count}, one per parameter.")
    for index, gradient in enumerate(gradients):
        if gradient is not None and not isinstance(gradient, Tensor):
            raise AmpCheckpointError(f"amp['window']['gradients'][{index}] must be a tensor or None.")
    if not isinstance(window.get('unscaled'), bool):
        raise AmpCheckpointError("amp['window']['unscaled'] must be True or False.")
    for key, value in (('used', used), ('found_inf', found)):
        if not isinstance(value, (list, tuple)) or len(value) != num_losses:
            raise AmpCheckpointError(f"amp['window'][{key!r}] must be a list of {num_losses}, one per loss.")
    if not all(isinstance(value, bool) for value in used):
        raise AmpCheckpointError(f"amp['window']['used']={used!r} must hold True and False only.")
    if not all(is_number(value) and value in (0, 1) for value in found):
        raise AmpCheckpointError(f"amp['window']['found_inf']={found!r} must hold 0 and 1 only.")
    foreign: Any = window.get('foreign_found_inf')
    if foreign is not None and not (is_number(foreign) and foreign in (0, 1)):
        raise AmpCheckpointError(f"amp['window']['foreign_found_inf']={foreign!r} must be 0 or 1.")
    buffers: Any = window.get('buffers', {})
    if not _are_tensors(buffers):
        raise AmpCheckpointError("amp['window']['buffers'] must be a dict of tensors by name.")
    averages: Any = window.get('averages', [])
    if not isinstance(averages, (list, tuple)) or not all(
        isinstance(entry, Mapping) and all(_are_tensors(entry.get(key)) for key in ('before', 'now'))
        for entry in averages
    ):
        raise AmpCheckpointError(
            "amp['window']['averages'] must be a list of dicts 'before' and 'now' of tensors by name."
        )
    values = [float(value) for value in found]
    received = None if foreign is None else float(foreign)
    return Window(gradients, window['unscaled'], list(used), values, received, dict(buffers), list(averages))


def _are_tensors(values: Any) -> bool:
    return isinstance(values, Mapping) and all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in values.items()
    )
