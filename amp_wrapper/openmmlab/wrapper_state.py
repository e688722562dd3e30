"""The state dict of ``AmpOptimWrapper``: the engine's, and what mmengine's wrapper keeps beside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from ..checkpoint import amp_part, schema
from ..checkpoint.validate_optimizer import check_settings


def split(
    state_dict: Any, optimizer: Optimizer, inner_count: int
) -> tuple[dict[str, Any], Mapping[str, Any] | None, int]:
    """Take a saved state apart, without validating what the engine will load.

    Args:
        state_dict: Not changed.
        optimizer: The one that will load it.
        inner_count: Where the state has none: files of mmengine's own wrappers.

    Returns:
        The state for the engine, mmengine's ``base_param_settings`` or None, and the number of iterations done.

    Raises:
        AmpCheckpointError: Names the key and what was expected.
    """
    schema.MapOf().check(state_dict, 'an optimizer state')
    state = dict(state_dict)
    base = state.pop('base_param_settings', None)
    if base is not None:
        # made before ZeroRedundancyOptimizer knows the defaults of the optimizer inside; mmengine looks for lr
        check_settings(base, optimizer, "'base_param_settings'", complete=False)
    count: Any = amp_part(state).get('inner_count', inner_count)
    schema.whole(bits=None).check(count, "amp['inner_count']")
    return state, base, count
