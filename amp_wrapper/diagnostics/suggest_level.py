"""Tries the levels on copies of a model, and recommends one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import Unpack

from ..casting.kept import kept_modules
from ..casting.modules import module_device
from ..casting.roots import is_compiled, unwrap
from ..engine.clipping import GradientClip
from ..errors import AmpConfigError, AmpUsageError
from ..optim import FusedAdamW
from ..policy import LEVELS, OptLevel, Policy, resolve
from ..policy.options import PolicyOptions, is_whole
from .level_phases import REFERENCE, LevelPhases
from .level_study import Study
from .level_trial import check_functions, check_options
from .level_verdicts import MEMORY, SPEED
from .progress import Progress
from .sandbox import Attach, attach_whole, isolated, trainable
from .side_by_side import WARM_UP, Task
from .suggestion import LevelSuggestion, describe

#: Of the optimizer that is taken where none is given.
DEFAULT_LR = 1e-3
_LEAST_STEPS = WARM_UP + 2
# for what is misspelt
_OWN_OPTIONS = ('levels', 'make_optimizer', 'max_trials', 'prefer', 'progress', 'seed', 'steps')


def suggest_level(
    model: nn.Module,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    batches: Iterable[Any],
    make_optimizer: Callable[[nn.Module], Optimizer] | None = None,
    levels: Sequence[OptLevel] | None = None,
    steps: int = 20,
    seed: int = 0,
    progress: bool = True,
    prefer: str | None = None,
    max_trials: int = 32,
    **overrides: Unpack[PolicyOptions],
) -> LevelSuggestion:
    """Try the levels side by side on copies of a model, and recommend one. Syncs.

    Each level takes the same steps, with the same batches and the same random numbers; FP32 (O0) always runs beside them. What
    is measured: the time of a step, memory, skipped steps, how far loss, outputs and gradients are from FP32, and how many
    updates would be lost without masters. Where a level fails because of a few modules, these are found by trying, and put into
    ``keep_fp32``. Ctrl-C ends it early with what is known by then.

    ```python
    found = amp.suggest_level(model, lambda model, batch: criterion(model(batch[0]), batch[1]), loader)
    print(found)
    model, optimizer = amp.initialize(model, optimizer, opt_level=found.level, keep_fp32=list(found.keep_fp32))
    ```

    Args:
        model: On its device, with the weights that training begins with. It may be attached already. Nothing of it changes.
        loss_fn: From (model, batch) to the loss, a floating scalar with its graph. It has to call the model that it is given, a
            copy, and to bring the batch to its device.
        batches: A list or any other iterable, a data loader say. As many as ``steps`` are taken from it; they are copied before
            use. At least two are needed to compare the errors of gradients with the differences between batches.
        make_optimizer: From a model to its optimizer. ``FusedAdamW`` with a learning rate of 1e-3 where None, which the result
            says.
        levels: Those that may be recommended, all by default.
        steps: Of each level; the first two are not timed. At least 4.
        seed: Of the random generators inside; those outside are as before.
        progress: Whether a progress bar is shown, on stderr, where that is a terminal and rich is installed.
        prefer: 'speed' or 'memory': what the recommended level should save. None: 'speed' on a GPU, and 'memory' on a CPU,
            whose times say nothing about a GPU.
        max_trials: How many trials the search for ``keep_fp32`` may take in all.
        **overrides: Options for all levels, as for ``amp.initialize``: ``loss_scale``, ``keep_fp32``, ``master_weights`` and
            others. A level that they conflict with is not tried.

    Returns:
        The recommendation, with everything that was measured.

    Raises:
        AmpConfigError: An impossible argument, or one that does not exist; overrides that go with none of the levels. Nothing
            has been run.
        AmpUsageError: No batch, or batches that cannot be read; a ``make_optimizer`` that makes no optimizer; a ``loss_fn``
            that returns no loss, does not use the model that it is given, or gives a loss in FP32 that is not finite.
        CannotCopyError: A model that cannot be copied.
    """
    return suggest(
        model,
        loss_fn,
        batches,
        make_optimizer=make_optimizer,
        levels=levels,
        steps=steps,
        seed=seed,
        progress=progress,
        prefer=prefer,
        max_trials=max_trials,
        overrides=dict(overrides),
    )


def suggest(
    model: nn.Module,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    batches: Iterable[Any],
    *,
    make_optimizer: Callable[[nn.Module], Optimizer] | None = None,
    levels: Sequence[str] | None = None,
    steps: int = 20,
    seed: int = 0,
    progress: bool = True,
    prefer: str | None = None,
    max_trials: int = 32,
    overrides: dict[str, Any] | None = None,
    attach: Attach = attach_whole,
    clip: GradientClip | None = None,
    surrounds: bool = False,
    optimizer_name: str = '',
) -> LevelSuggestion:
    """As :func:`suggest_level`, for integrations.

    Args:
        model: As there.
        loss_fn: As there.
        batches: As there.
        make_optimizer: As there.
        levels: As there.
        steps: As there.
        seed: As there.
        progress: As there.
        prefer: As there.
        max_trials: As there.
        overrides: As there.
        attach: Attaches a copy of the model.
        clip: How gradients are clipped.
        surrounds: Whether the engine surrounds ``loss_fn``, as mmengine's wrapper does.
        optimizer_name: What the result calls the optimizer.
    """
    given = overrides or {}
    chosen = _check_levels(levels)
    _check(model, loss_fn, steps, prefer, max_trials, seed)
    check_functions(make_optimizer=make_optimizer)
    check_options(given, _OWN_OPTIONS)
    steps, max_trials, seed = int(steps), int(max_trials), int(seed)
    policies, problems = _resolve(chosen, given)
    compiled = is_compiled(model)
    # modules are named as they are for amp.initialize
    model = unwrap(model)
    for policy in policies.values():
        # names that the model does not have are refused
        kept_modules([('', model)], policy, without_prefix=True)
    device = module_device(model)
    with isolated():
        taken = _take(batches, steps)
    if make_optimizer is None:
        optimizer_name = f'FusedAdamW with a learning rate of {DEFAULT_LR:g}, since none was given'
    task = Task(model, loss_fn, taken, make_optimizer or _default_optimizer, seed, attach, clip, surrounds)
    phases = LevelPhases(
        Study(
            device=device,
            levels=chosen,
            prefer=prefer or (SPEED if device.type == 'cuda' else MEMORY),
            steps=steps,
            seed=seed,
            batches=len(taken),
            optimizer=optimizer_name or 'as given',
            max_trials=max_trials,
            overrides=given,
            compiled=compiled,
        ),
        task,
        policies,
        problems,
    )
    with Progress(progress) as bar:
        phases.run(bar)
    return describe(phases.study)


def _default_optimizer(model: nn.Module) -> Optimizer:
    return FusedAdamW(trainable([model]), lr=DEFAULT_LR)


def _check_levels(levels: Any) -> tuple[OptLevel, ...]:
    if levels is None:
        return LEVELS
    listed = [levels] if isinstance(levels, str) else list(levels) if isinstance(levels, Iterable) else []
    unknown = [level for level in listed if level not in LEVELS]
    if unknown or not listed:
        raise AmpConfigError([f'levels={levels!r} must be a list of {", ".join(LEVELS)}, such as ["O0", "O2", "O5"].'])
    return tuple(level for level in LEVELS if level in listed)


def _resolve(levels: Sequence[OptLevel], overrides: dict[str, Any]) -> tuple[dict[str, Policy], dict[str, str]]:
    """Level to configuration, and level to why it cannot be had."""
    policies = {REFERENCE: resolve('O0')}
    problems: dict[str, str] = {}
    error: AmpConfigError | None = None
    for level in levels:
        if level == REFERENCE:
            continue
        try:
            policy = resolve(level, **overrides)
        except AmpConfigError as caught:
            problems[level], error = str(caught), caught
            continue
        if policy.num_losses != 1 or not policy.enabled:
            raise AmpConfigError(
                [
                    f'{name}={overrides[name]!r} cannot be tried: leave it out.'
                    for name in ('num_losses', 'enabled')
                    if name in overrides
                ]
            )
        # how long a streak of skipped steps is allowed to be is not asked here
        policies[level] = dataclasses.replace(policy, max_consecutive_skips=None, verbosity=0)
    if error is not None and len(policies) == 1:
        raise error
    return policies, problems


def _check(model: Any, loss_fn: Any, steps: Any, prefer: Any, max_trials: Any, seed: Any) -> None:
    problems = []
    if not isinstance(model, nn.Module):
        raise AmpConfigError([f'model={type(model).__name__} must be a torch.nn.Module.'])
    if not callable(loss_fn):
        problems.append(f'loss_fn={loss_fn!r} must be a function from (model, batch) to the loss.')
    if not is_whole(steps, _LEAST_STEPS):
        problems.append(f'steps={steps!r} must be a whole number of at least {_LEAST_STEPS}.')
    if prefer not in (None, SPEED, MEMORY):
        problems.append(f"prefer={prefer!r} must be 'speed', 'memory' or None.")
    if not is_whole(max_trials):
        problems.append(f'max_trials={max_trials!r} must be a whole number, 0 for no search.')
    if not is_whole(seed, None):
        problems.append(f'seed={seed!r} must be a whole number.')
    if not trainable([model]):
        problems.append('model has no parameter that requires a gradient: there is nothing to train.')
    if problems:
        raise AmpConfigError(problems)


def _take(batches: Iterable[Any], count: int) -> list[Any]:
    # the keys of a dict are no batches
    can_be_read = hasattr(batches, '__iter__') or hasattr(batches, '__getitem__')
    if isinstance(batches, (str, Mapping)) or not can_be_read:
        raise AmpConfigError(
            [f'batches={type(batches).__name__} must be a list or another iterable of batches: one batch is [batch].']
        )
    try:
        found = list(islice(batches, count))
    except Exception as error:
        # data sets are programs of others
        words = f'{type(error).__name__}: {" ".join(str(error).split())}'
        raise AmpUsageError(f'batches={type(batches).__name__} cannot be read ({words}).') from error
    if not found:
        raise AmpUsageError('batches is empty: at least one batch is needed, and two are better.')
    return found
