"""What a config's ``optim_wrapper`` says of the level, without building it."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

from mmengine.registry import OPTIM_WRAPPERS

from ..errors import AmpConfigError
from ..policy import OPTIONS, Policy, resolve
from .wrappers import is_built_here

#: What to do where a config cannot be tried.
SCRIPT = 'use amp.report(...) and the like in a script that has the model and the loss'


@dataclasses.dataclass(frozen=True)
class WrapperSettings:
    """What a config's ``optim_wrapper`` says beside the optimizer.

    Attributes:
        opt_level: 'O0' for mmengine's plain ``OptimWrapper``.
        overrides: Options of :func:`amp_wrapper.policy.resolve` that are not the defaults.
        clip_grad: As mmengine's ``OptimWrapper`` takes it; None for none.
        accumulative_counts: Iterations to a step.
    """

    opt_level: str
    overrides: Mapping[str, Any]
    clip_grad: Mapping[str, Any] | None
    accumulative_counts: int

    def policy(self, opt_level: str | None = None) -> Policy:
        """The configuration at its own level, or at another one with the same overrides.

        Raises:
            AmpConfigError: Overrides that do not go with the level.
        """
        level: Any = opt_level or self.opt_level
        return resolve(level, **self.overrides)


def wrapper_settings(words: Mapping[str, Any] | None) -> WrapperSettings:
    """Read ``optim_wrapper``, inside of the scope of its config.

    Args:
        words: Not changed.

    Raises:
        AmpConfigError: There is none; it has several optimizers; its class is not registered; its level or an option of it
            cannot be had.
    """
    if not words:
        raise AmpConfigError(['the config has no optim_wrapper: it trains nothing.'])
    if 'optimizer' not in words:
        members = [str(key) for key, value in words.items() if isinstance(value, Mapping) and 'optimizer' in value]
        named = f' ({", ".join(members)})' if members else ''
        raise AmpConfigError(
            [f'optim_wrapper trains with several optimizers{named}, one after the other in a train_step: {SCRIPT}.']
        )
    kind = words.get('type', 'OptimWrapper')
    kind = OPTIM_WRAPPERS.get(kind) if isinstance(kind, str) else kind
    if kind is None:
        raise AmpConfigError([f'optim_wrapper.type={words.get("type")!r} is not registered.'])
    clip, counts = words.get('clip_grad'), words.get('accumulative_counts', 1)
    if not isinstance(counts, int) or counts < 1:
        raise AmpConfigError([f'optim_wrapper.accumulative_counts={counts!r} must be a whole number of at least 1.'])
    if is_built_here(words):
        known = inspect.signature(kind.__init__).parameters
        defaults = {
            name: known[name].default
            for name in OPTIONS
            if name in known and known[name].default is not inspect.Parameter.empty
        }
        given = {name: words[name] for name in OPTIONS if name in words}
        level = words.get('opt_level', known['opt_level'].default if 'opt_level' in known else 'O1')
        chosen = {**defaults, **given}
        differing = {name: value for name, value in chosen.items() if value != OPTIONS[name].default}
        settings = WrapperSettings(level, differing, clip, counts)
    elif 'Amp' in kind.__name__ or 'Apex' in kind.__name__:
        # mmengine's own, under the name that this package gave it
        given = {name: words[name] for name in ('loss_scale', 'dtype') if name in words}
        settings = WrapperSettings('O1', given, clip, counts)
    else:
        settings = WrapperSettings('O0', {}, clip, counts)
    settings.policy()
    return settings
