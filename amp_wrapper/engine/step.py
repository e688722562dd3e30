"""One optimizer step: taken, or skipped as a whole. Two ways through it, with the same results."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeAlias
from weakref import ref

import torch
from torch import Tensor
from torch.optim import Optimizer

from .. import ops
from ..casting import fp32_values
from ..casting.masters import StepLists
from ..compiler_internals import untraced
from ..errors import AmpUsageError, OverflowStreakError, some
from ..optim.fused import FusedOptimizer, Update
from ..torch_internals import hooks_before_step
from .clipping import GradientClip
from .ddp import has_several_processes
from .engine import Engine
from .flags import GRAD_NORM, LOSS_SCALE, SKIPS, STREAK, LateRead, StepResult, info_of, what_to_try
from .gradients import nonfinite_names
from .optimizers import inside, put_in_front, takes_flag

#: Calls the optimizer's own ``step``.
Run = Callable[[], None]
#: How to clip; None for not at all.
Clip: TypeAlias = GradientClip | None


@untraced
def take_step(engine: Engine, clip: Clip = None, own: Callable[..., Any] | None = None, **kwargs: Any) -> StepResult:
    """Take one optimizer step from the gradients at hand, or skip it as a whole.

    With an optimizer of :mod:`amp_wrapper.optim` it takes two passes over memory, and the host never waits: what happened
    stays on the device until somebody reads the result (:meth:`Engine.review`). Optimizers that follow GradScaler's protocol,
    as torch's fused ones do, learn of a skip from a flag on the device; before all others steps, the host reads it.

    Syncs once where an optimizer cannot read the flag itself, with ``error_if_nonfinite``, and where the step may be one
    skip too many.

    Args:
        engine: Of the optimizer.
        clip: How to clip, after unscaling.
        own: The optimizer's own ``step``, where another stands in front of it.
        **kwargs: For it. A closure is possible where there is no scale and no master; its gradients are not checked.

    Returns:
        What happened. A skipped step leaves weights, masters and optimizer state as they were, bit for bit.

    Raises:
        AmpUsageError: No backward since the last step, inside of one, or a closure under a loss scale; a weight and its master
            that were both written to by others.
        OverflowStreakError: ``max_consecutive_skips`` steps in a row were non-finite.
    """
    optimizer = engine.find_optimizer()
    assert optimizer is not None

    def run() -> None:
        engine.in_own_step = True
        try:
            (own or optimizer.step)(**kwargs)
        finally:
            engine.in_own_step = False

    _check(engine, kwargs)
    if engine.gradients.after_each_pass:
        engine.check_rest()
    if kwargs.get('closure') is not None:
        # its backward passes run inside the optimizer: there is nothing to unscale, and nobody to check
        norm = None if clip is None else clip.apply(engine.params.parameters())
        run()
        engine.settle_buffers(None)
        engine.is_accumulating = False
        return _finish(engine, [0, 0], norm)
    engine.params.before_step()
    lists = engine.params.lists()
    engine.has_ranks = has_several_processes()
    if engine.has_ranks:
        engine.ddp.start_alike()
    for observer in engine.observers:
        observer.before_step(engine)
    if isinstance(optimizer, FusedOptimizer) and (update := _gather(engine, optimizer, clip, lists)) is not None:
        result = _step_fused(engine, optimizer, clip, update, run)
    else:
        result = _step_eager(engine, optimizer, clip, run)
    engine.is_accumulating = False
    for observer in engine.observers:
        observer.after_step(engine, result)
    engine.gradients.mark_stepped()
    return result


# -- what is refused ---------------------------------------------------------------------------------------------------


def _check(engine: Engine, kwargs: Mapping[str, Any]) -> None:
    scales, params = engine.scales, engine.params
    # an evaluation since the backward pass leaves gathered weights, which a step does not reach
    for group in engine.shard_groups:
        group.reshard()
    if any(each.gradients.in_backward for each in (engine, *engine.others)):
        raise AmpUsageError('step() inside an amp.scale_loss block: gradients are still scaled. Step after the block.')
    if not params.have_fp32_values and engine.pairs_checked != fp32_values.pairs_made:
        if fp32_values.paired(params.parameters()):
            raise AmpUsageError(
                f'step() at {engine.policy.opt_level}: the model was initialised again, and another optimizer steps FP32 '
                f'masters of its weights by now: step that one, or a new one, of amp.initialize([], optimizer).'
            )
        engine.pairs_checked = fp32_values.pairs_made
    has_closure, is_bare = kwargs.get('closure') is not None, scales.is_one and not params.have_fp32_values
    if has_closure and not is_bare:
        raise AmpUsageError(
            f'step(closure=...) at {engine.policy.opt_level}: a closure would run backward passes that nobody unscales. '
            f"Call update_params(loss) or backward() and step(), or use a level without scale and masters ('O0', 'O4')."
        )
    is_checked = not scales.are_shared and (scales.check or not is_bare)
    if is_checked and not has_closure and not engine.is_accumulating:
        raise AmpUsageError('step() without a backward() since the last step: call optim_wrapper.backward(loss) first.')


def refuse_direct_steps(engine: Engine) -> None:
    """Refuse ``step()`` of the optimizer of an engine, and of those inside of it, while gradients wait for its own step.

    Args:
        engine: Not kept alive.
    """
    optimizer, reference = engine.optimizer, ref(engine)
    assert optimizer is not None
    kind = type(optimizer).__name__

    def step(own_step: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        found = reference()
        if found is not None and not found.in_own_step and found.awaits_step:
            raise AmpUsageError(
                f'{kind}.step() beside the wrapper that holds it, whose gradients carry a scale or are not at masters yet: '
                f'call optim_wrapper.step(). Steps in two parts, as those of SAM, train through amp.initialize.'
            )
        return own_step(*args, **kwargs)

    for each in (optimizer, *inside(optimizer)):
        put_in_front(each, 'step', step)


# -- with an optimizer of this package ---------------------------------------------------------------------------------


def _gather(engine: Engine, optimizer: FusedOptimizer, clip: Clip, lists: StepLists) -> Update | None:
    """Return what a fused step does; None where this way cannot do it all.

    Raises:
        AmpUsageError: What split masters cannot have: some ways to clip, hooks before the step, no compiled ops.
    """
    is_split, fuses = engine.policy.split_masters, optimizer.fuses
    if not is_split and not (fuses and engine.policy.enabled):
        return None
    problem = '' if clip is None else clip.not_fused
    for hook in hooks_before_step(optimizer):
        # it wants to see gradients where the optimizer looks for them, unscaled
        if not hasattr(hook, 'sees_no_gradient'):
            problem = (
                "master_weights='split' with hooks before optimizer.step() (register_step_pre_hook): they would see scaled "
                '16-bit gradients, and what they write would come too late. Remove the hooks, or use master_weights=True.'
            )
    # nothing else can step split masters: what the fused step cannot do is refused
    if is_split and problem:
        raise AmpUsageError(problem)
    if problem:
        return None
    gradients = engine.gradients.to_step(lists)
    there = [(weight, grad) for weight, grad in zip(lists.weights, gradients) if grad is not None]
    # torch's clipping leaves frozen weights out
    clips_frozen = clip is not None and not all(weight.requires_grad for weight, _ in there)
    fits = fuses and {grad.layout for _, grad in there} <= {torch.strided}
    if is_split and not fits:
        raise AmpUsageError(
            f"master_weights='split': only the compiled ops step both halves (ops: {ops.backend()}), and not on "
            f'{engine.device}, with these options of {type(optimizer).__name__}, or with sparse gradients. Build them by '
            f'amp-wrapper build-ops where they are missing, or write master_weights=True.'
        )
    if not is_split and (clips_frozen or not fits or not there):
        return None
    decide = functools.partial(_decide, engine, clip, gradients)
    return Update(lists.parameters, gradients, lists.copies, decide, engine.params.settle)


def _step_fused(engine: Engine, optimizer: FusedOptimizer, clip: Clip, update: Update, run: Run) -> StepResult:
    """One pass for norm and flag, one for everything else, and a decision between them, all on the device."""
    scales = engine.scales
    optimizer.amp_update = update
    try:
        run()
    finally:
        optimizer.amp_update = None
    info = update.decision
    if info is None:
        raise AmpUsageError('parameters are not what the ops stepped before: nothing was changed, step once more.')
    if engine.gradients.after_each_pass:
        scales.update(engine.flags, is_counted=True)
        # the op was given no scale, for the gradients carry none
        info[LOSS_SCALE] = scales.first.current_scale
    else:
        engine.flags.clear()
    numbers = info[SKIPS : STREAK + 1].tolist() if scales.check and engine.monitor.must_wait else None
    return _finish(engine, numbers, None if clip is None or clip.kind == 'value' else info[GRAD_NORM], info)


def _decide(engine: Engine, clip: Clip, gradients: Sequence[Tensor | None], found: Sequence[Tensor]) -> dict[str, Any]:
    """Read the gradients once, for norm and flag; returns arguments of the op, which decides."""
    scales, flags, layout = engine.scales, engine.flags, engine.params.layout
    # unscaled after each backward pass, and checked there
    done = engine.gradients.after_each_pass
    flag = torch.zeros((), dtype=torch.float32, device=engine.device) if scales.check and not done else None
    words: dict[str, Any] = {'counts': scales.steps.counts} if scales.check else {}
    if not done:
        words |= scales.first.step_arguments(flags.used[0])
    if clip is not None:
        words |= clip.step_arguments()
    power = None
    if clip is not None and clip.kind == 'norm':
        if layout.groups:
            power = clip.power(gradients, layout.replicas, flag)
        else:
            words['norm'] = clip.norm(found, flag)
    elif flag is not None:
        ops.multi_tensor_isnonfinite(found, flag)
    if flag is not None:
        flags.add(flag, 0)
    if power is not None or engine.has_ranks:
        total = engine.agree(clip, power)
        words |= {} if total is None else {'norm': total}
    if scales.check:
        words['found_inf'] = flags.skipped()
        if not done:
            words['learned'] = flags.of(0)
        engine.settle_buffers(words['found_inf'])
    return words


# -- with any other optimizer ------------------------------------------------------------------------------------------


def _step_eager(engine: Engine, optimizer: Optimizer, clip: Clip, run: Run) -> StepResult:
    """Unscale, find out, clip, step, copy, each in its turn. Syncs once, where the optimizer cannot read the flag itself."""
    scales, params = engine.scales, engine.params
    raises = clip is not None and bool(clip.arguments.get('error_if_nonfinite'))
    waits = scales.check and engine.monitor.must_wait
    if not engine.gradients.after_each_pass:
        engine.gradients.unscale(scales.first.inverse_scale(), engine.flags.of(0) if scales.check else None)
        # whatever fails from here on: they must not be unscaled again
        engine.is_accumulating = False
        engine.gradients.mark_stepped()
    power, layout = None, params.layout
    if clip is not None and clip.kind == 'norm' and clip.is_simple and layout.groups:
        # torch clips no frozen ones
        power = clip.power([p.grad if p.requires_grad else None for p in params.parameters()], layout.replicas, None)
    known = engine.agree(clip, power)
    skip = engine.flags.skipped() if scales.check else None
    engine.settle_buffers(skip)
    # where somebody may ask for names, gradients stay as they are
    is_careful = waits or raises
    by_flag = skip is not None and not is_careful and takes_flag(optimizer)
    late = None if skip is None or by_flag else LateRead(torch.stack([skip, *scales.steps.counts[1:].double()]))
    # goes on while the flag is on its way
    norm = None if clip is None or is_careful else clip.apply(params.parameters(), known)
    numbers = None if late is None else late.wait()
    skipped = numbers is not None and numbers[0] > 0
    # a dynamic scale learns from the overflow
    if raises and (not scales.is_dynamic if skipped else known is not None and not known.isfinite()):
        raise RuntimeError(
            'The total norm of gradients is non-finite, here or on another rank, so it cannot be clipped. '
            'error_if_nonfinite=False skips such steps where gradients are checked.'
        )
    if not skipped:
        if clip is not None and is_careful:
            norm = clip.apply(params.parameters(), known)
        if by_flag:
            # exactly 0 or 1: torch's kernels compare with 1
            optimizer.grad_scale, optimizer.found_inf = None, skip  # type: ignore[attr-defined]
        try:
            run()
        finally:
            if by_flag:
                del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
        if params.have_fp32_values:
            params.write_weights()
    scales.update(engine.flags)
    # the counts were read before this step
    now = None if numbers is None else [numbers[1] + skipped, (numbers[2] + 1) * skipped]
    return _finish(engine, now, norm)


# -- afterwards --------------------------------------------------------------------------------------------------------


def _finish(engine: Engine, numbers: list[float] | None, norm: Tensor | None, info: Tensor | None = None) -> StepResult:
    """Say what a step did, and count skips.

    Args:
        engine: Of the optimizer.
        numbers: The skips so far, and in a row up to this step; None where the host does not know.
        norm: Scalar, or None.
        info: Of the op; None where it is put together here.

    Raises:
        OverflowStreakError: The limit of skips in a row is reached.
    """
    scales, monitor = engine.scales, engine.monitor
    skipped = None if numbers is None else numbers[1] > 0
    if not scales.check:
        skipped = False
    elif numbers is None:
        monitor.unseen += 1
    elif monitor.record(int(numbers[0]), int(numbers[1]), engine.label):
        _raise_streak(engine, int(numbers[1]))
    shows = {'grad_norm': norm is not None, 'loss_scale': scales.check and scales.is_dynamic, 'skips': scales.check}
    shown = tuple(filter(shows.get, shows))
    if info is None and shown:
        info = info_of(norm, scales.first.current_scale, scales.steps.counts)
    return StepResult(skipped, info if shown else None, shown)


def _raise_streak(engine: Engine, streak: int) -> NoReturn:
    """The gradients are still there. Syncs."""
    # after a fused step they lie where backward put them
    everything = [*engine.params.parameters(), *engine.params.behind_masters]
    found = nonfinite_names([(engine.name(parameter), parameter) for parameter in everything])
    shown = some(list(dict.fromkeys(found)), 8)
    scale = engine.scales.describe()
    told = ''.join(f' {text}' for text in (each.explain_streak(engine) for each in engine.observers) if text)
    engine.zero_grad()
    raise OverflowStreakError(
        f'{streak} optimizer steps in a row had non-finite gradients (max_consecutive_skips='
        f'{engine.policy.max_consecutive_skips}); the loss scale is {scale}. Non-finite now: {shown}. Weights and '
        f'optimizer state are those of the last clean step. What to try: {"; ".join(what_to_try(engine.policy))}.{told}'
    )
