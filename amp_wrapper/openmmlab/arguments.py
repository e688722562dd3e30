"""The arguments of ``AmpOptimWrapper``: every conflict in one message, before any work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .. import policy
from ..engine.clipping import GradientClip
from ..errors import AmpConfigError, nearest
from ..policy.options import is_count

_PARENT_ARGUMENTS = ('optimizer', 'accumulative_counts', 'clip_grad')


def resolve(
    options: Mapping[str, Any], use_fsdp: bool, parent: Mapping[str, Any], own: Sequence[str]
) -> tuple[policy.Policy, GradientClip | None]:
    """Read the arguments of a wrapper, changing nothing.

    Args:
        options: For :func:`amp_wrapper.policy.resolve`.
        use_fsdp: As of the wrapper.
        parent: Keyword arguments for mmengine's ``OptimWrapper``.
        own: The names that the wrapper itself knows.

    Returns:
        The resolved configuration, and how gradients are clipped.

    Raises:
        AmpConfigError: Every conflict.
    """
    problems: list[str] = []
    resolved, clip = None, None
    try:
        resolved = policy.resolve(**options)
    except AmpConfigError as error:
        problems += error.problems
    try:
        clip = GradientClip.parse(parent.get('clip_grad'))
    except AmpConfigError as error:
        problems += error.problems
    if options['master_weights'] == 'split' and clip is not None and clip.not_fused:
        problems.append(clip.not_fused)
    known = [*own, *_PARENT_ARGUMENTS]
    unknown = [name for name in parent if name not in _PARENT_ARGUMENTS]
    problems += [f'unknown argument {name!r}{nearest(name, known)}: known are {", ".join(known)}.' for name in unknown]
    if parent.get('optimizer') is None:
        problems.append("optimizer is missing: write optimizer=dict(type='SGD', lr=0.01), or give one of torch.")
    counts = parent.get('accumulative_counts', 1)
    if not is_count(counts):
        problems.append(f'accumulative_counts={counts!r} must be a whole number of at least 1.')
    if use_fsdp:
        problems.append("use_fsdp=True: write model_wrapper_cfg=dict(type='amp_wrapper.MMFullyShard') in its place.")
    if problems or resolved is None:
        raise AmpConfigError(problems)
    return resolved, clip
