"""The passes of one optimizer's losses: a forward call has its casts, a loss is scaled, and gradients come home."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn

from ..casting import region
from ..casting.modules import module_device
from ..compiler_internals import eager_block, untraced
from ..distributed_internals import hold_back
from ..errors import AmpUsageError
from ..policy import said_once
from .engine import Engine
from .gradients import NO_GRAPH


@untraced
def before_forward(engine: Engine, model: nn.Module) -> None:
    """Let weights follow masters that somebody wrote to, and the other way round, and DDP the parameters that train.

    Every rank calls this, before it enters ``no_sync``.

    Args:
        engine: Of the optimizer that will step.
        model: What is about to run.

    Raises:
        AmpUsageError: A change of ``requires_grad`` that DDP cannot follow, or ranks with another number of steps; a weight
            and its master that were both written to.
    """
    if not engine.policy.enabled:
        return
    for each in (engine, *engine.others):
        each.params.synchronise()
    # parts that are called inside of the context are not told of. DDP broadcasts buffers in its call, which comes first
    for snapshot in () if engine.ddp.ddps else engine.snapshots:
        snapshot.begin()
    engine.ddp.follow(model, engine.has_waiting, engine.is_plain)


@eager_block
@contextmanager
def forward_context(engine: Engine, model: nn.Module) -> Iterator[None]:
    """Surround a training forward call with a region, and with autocast at O1 and O4.

    Args:
        engine: Of the optimizer that will step.
        model: Says on which device autocast works.
    """
    policy = engine.policy
    kind = region.AS_AROUND
    if policy.runs_16_bit:
        kind = region.OPERANDS if policy.casts_model else region.REGISTRY
    dtype = policy.autocast_dtype if policy.enabled else None
    casts = nullcontext() if dtype is None else region.autocast(module_device(model).type, dtype)
    before = said_once.speaks(policy.verbosity >= 1)
    try:
        # for models whose train_step does not call them
        with region.spare(kind), region.operands(kind), casts:
            yield
    finally:
        said_once.speaks(before)


def scale(engine: Engine, loss: Tensor, loss_id: int = 0, together: Sequence[Engine] = ()) -> Tensor:
    """``loss`` times the scale of ``loss_id``, in float32; ``loss`` itself where nothing is scaled.

    Args:
        engine: Of the optimizer that steps.
        loss: Floating tensor of any shape.
        loss_id: Which scaler; below ``num_losses``.
        together: As in :func:`receiving`.

    Raises:
        AmpUsageError: No such loss.
    """
    scaler = engine.scales.of(loss_id)
    for observer in [observer for each in (engine, *together) for observer in each.observers]:
        observer.see_loss(engine, loss, loss_id)
    return scaler.scale(loss, _scale_of(engine, loss_id) if engine.gradients.after_each_pass else None)


def _scale_of(engine: Engine, loss_id: int) -> Tensor | None:
    """The scale of the coming pass, a float32 scalar: that of gradients which FSDP2 keeps, or the present one; None for 1."""
    kept = engine.gradients.kept_by_fsdp
    # it may have moved since, where engines share it
    return kept[1] if kept is not None and kept[0] == loss_id else engine.scales.pinned(loss_id)


@untraced
def backward(engine: Engine, loss: Tensor, loss_id: int = 0, **kwargs: Any) -> None:
    """Scale the loss and run its backward pass.

    Args:
        engine: Of the optimizer that steps.
        loss: Scalar.
        loss_id: Which scaler; below ``num_losses``.
        **kwargs: For :meth:`torch.Tensor.backward`.

    Raises:
        AmpUsageError: No such loss; several losses of which FSDP2 keeps the gradients; ``create_graph=True`` with a scale or
            masters.
    """
    scaled = scale(engine, loss, loss_id)
    if kwargs.get('create_graph') and (engine.params.have_fp32_values or not engine.scales.is_one):
        raise AmpUsageError(NO_GRAPH)
    meets_nothing = not engine.gradients.after_each_pass
    engine.is_accumulating |= meets_nothing
    with engine.gradients if meets_nothing else receiving(engine, loss_id):
        scaled.backward(**kwargs)  # type: ignore[no-untyped-call]
    engine.flags.used[loss_id] = True


@contextmanager
def receiving(engine: Engine, loss_id: int = 0, together: Sequence[Engine] = ()) -> Iterator[list[Engine]]:
    """Surround one backward pass after which gradients are unscaled, of a loss that :func:`scale` has scaled. No host read.

    Args:
        engine: Of the first optimizer that steps. Its scale holds for all, and is updated.
        loss_id: Which scaler.
        together: Further engines that will step with its gradients; where one of any is non-finite, all skip their next step.

    Yields:
        An empty list; at the end it has the engines to which gradients have come.

    Raises:
        AmpUsageError: As :func:`backward`; inside another pass of one of the engines. After an exception inside, what has
            come by then is there, unscaled, as torch leaves it.
    """
    came: list[Engine] = []
    named = [engine, *together]
    reached = [*named, *(each for each in engine.others if each not in named)]
    if any(each.gradients.in_backward for each in reached):
        raise AmpUsageError('a backward pass inside another one: leave the first block, or add up the losses.')
    loss_scale = _scale_of(engine, loss_id)
    passes = [_Pass(each, loss_scale, loss_id if each is engine else None, each in named) for each in reached]
    is_whole = False
    try:
        with ExitStack() as stack:
            for each in passes:
                # whatever happens to one, all come home
                stack.callback(each.end)
                each.begin()
            yield came
        is_whole = True
    finally:
        for each in passes[len(named) if is_whole else 0 :]:
            each.note_others()
    came += [each.engine for each in passes if each.has_come]
    engine.flags.used[loss_id] = True
    for each in passes[: len(named)]:
        each.engine.flags.has_arrived |= each.has_come
        each.engine.is_accumulating = True
    # the scale of a wrapper was too large where its loss overflows in any parameter. Scripts name the optimizers that step;
    # gradients elsewhere are mostly thrown away, and do not count
    counted = passes[: len(named)] if engine.scales.are_shared else [each for each in passes if each.has_come]
    for flag in [each.flag for each in counted if each.flag is not None] if engine.scales.check else ():
        engine.flags.add(flag, loss_id)
        for other in together:
            other.flags.add(flag)


class _Pass:
    """One backward pass, as one of the engines that it may reach sees it.

    Args:
        engine: That engine.
        scale: Of the loss, a float32 scalar; None for 1.
        loss_id: The engine's own loss; None for one of another engine.
        is_named: Whether the pass is meant for this engine.

    Attributes:
        engine: As given.
        flag: float32 scalar, 1.0 where a gradient is non-finite; None where nobody asks, or where the step finds out.
        has_come: Set at the end: whether the pass has brought anything.
    """

    def __init__(self, engine: Engine, scale: Tensor | None, loss_id: int | None, is_named: bool) -> None:
        self.engine, self._loss_id, self._is_named = engine, loss_id, is_named
        self._scale = None if scale is None else scale.to(engine.device)
        self.flag: Tensor | None = None
        self.has_come = False

    def begin(self) -> None:
        """Bring what waits to the scale of the pass."""
        engine, gradients, loss_id = self.engine, self.engine.gradients, self._loss_id or 0
        engine.tidy_up()
        if engine.shard_groups and self._is_named and self._scale is not None:
            kept = gradients.kept_by_fsdp
            if kept is not None and kept[0] != loss_id:
                raise AmpUsageError(
                    f'loss {loss_id} while FSDP2 keeps gradients of loss {kept[0]}: finish that first, or use one loss_id.'
                )
            # FSDP2 averages the gradients of this pass with those that it has kept, or keeps them
            gradients.kept_by_fsdp = (loss_id, self._scale) if hold_back(engine.shard_groups) else None
        if engine.scales.check or not self._is_named:
            self.flag = engine.flags.new()
        gradients.begin_pass(self._scale, engine.ddp.averages(), engine.flags.skipped(but=self._loss_id))

    def end(self) -> None:
        """Bring everything home."""
        self.has_come = self.engine.gradients.in_backward and self.engine.gradients.end_pass(self._scale, self.flag)

    def note_others(self) -> None:
        """Gradients have come from a loss that is not for this engine, or from a pass that was broken off."""
        engine, flag = self.engine, self.flag
        if not self.has_come:
            return
        if flag is not None and engine.scales.check:
            engine.flags.add(flag)
        elif flag is not None:
            # nobody looks before it steps
            engine.gradients.zero_where(flag)
        engine.flags.only_by_others = engine.flags.has_arrived = True
        engine.is_accumulating = engine.attached
