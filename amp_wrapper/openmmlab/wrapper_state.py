"""The state dict of ``AmpOptimWrapper``: the engine's, and what mmengine's wrapper keeps beside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch.optim import Optimizer

from ..checkpoint.format import amp_part
from ..checkpoint.validate import check_settings
from ..errors import AmpCheckpointError


class WrapperState(NamedTuple):
    """A state dict in its parts.

    Attributes:
        engine: For the engine.
        base: mmengine's ``base_param_settings``, or None.
        inner_count: Iterations done.
    """

    engine: dict[str, Any]
    base: Mapping[str, Any] | None
    inner_count: int


def split(state_dict: Any, optimizer: Optimizer, inner_count: int) -> WrapperState:
    """Take a saved state apart, without a look at the engine's part.

    Args:
        state_dict: Not changed.
        optimizer: That it is for.
        inner_count: Where the state has none: files of mmengine's own wrappers.

    Raises:
        AmpCheckpointError: Names the key and what was expected.
    """
    if not isinstance(state_dict, Mapping):
        raise AmpCheckpointError(f'an optimizer state must be a dict, but is {type(state_dict).__name__}.')
    state = dict(state_dict)
    base = state.pop('base_param_settings', None)
    if base is not None and not isinstance(base, Mapping):
        raise AmpCheckpointError(f"'base_param_settings' must be a dict, but is {type(base).__name__}.")
    if base is not None:
        check_settings(base, optimizer, "'base_param_settings'")
    count: Any = amp_part(state).get('inner_count', inner_count)
    if not isinstance(count, int) or isinstance(count, bool) or count < 0:
        raise AmpCheckpointError(f"amp['inner_count']={count!r} must be a whole number of at least 0.")
    return WrapperState(state, base, count)
