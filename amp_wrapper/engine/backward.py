"""The backward passes of one optimizer's losses, whoever runs them: the loss is scaled, and gradients come home."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..compiler_internals import untraced
from ..distributed_internals import hold_back
from ..errors import AmpUsageError
from .engine import Engine, Stage
from .unscale import NO_GRAPH


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
    for each in (engine, *together):
        for observer in each.observers:
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
    with receiving(engine, loss_id):
        scaled.backward(**kwargs)  # type: ignore[no-untyped-call]


@contextmanager
def receiving(engine: Engine, loss_id: int = 0, together: Sequence[Engine] = ()) -> Iterator[list[Engine]]:
    """Surround one backward pass of a loss that :func:`scale` has scaled, whoever runs it. No host read.

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
    if not engine.gradients.after_each_pass:
        # one loss of one optimizer: nothing meets anything
        engine.gradients.begin_pass(None, True, None)
        try:
            yield came
        finally:
            engine.gradients.end_pass(None, None)
            engine.stage = Stage.ACCUMULATING
        engine.flags.used[loss_id] = True
        return
    named = [engine, *together]
    reached = [*named, *(each for each in engine.others if each not in named)]
    if any(each.gradients.in_backward for each in reached):
        raise AmpUsageError(
            'a backward pass inside another one of the same optimizers: leave the first "with amp.scale_loss(...)" block '
            'before the second begins, or add the losses up: amp.scale_loss(loss0 + loss1, [optimizer0, optimizer1]).'
        )
    loss_scale = _scale_of(engine, loss_id)
    passes = [_Pass(each, loss_scale, loss_id if each is engine else None, each in named) for each in reached]
    error: BaseException | None = None
    try:
        for each in passes:
            each.begin()
        yield came
    except BaseException as raised:
        error = raised
    for each in passes:
        # whatever happens to one, all come home
        try:
            each.end()
        except BaseException as raised:
            error = error or raised
    for each in passes[0 if error else len(named) :]:
        each.note_others()
    if error is not None:
        try:
            raise error
        finally:
            # it holds this frame
            del error
    came += [each.engine for each in passes if each.has_come]
    _note_own(passes[: len(named)], passes, loss_id)


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
        engine, gradients = self.engine, self.engine.gradients
        engine.tidy_up()
        if engine.shard_groups and self._is_named and self._scale is not None:
            self._note_kept(self._scale, hold_back(engine.shard_groups))
        if engine.scales.check or not self._is_named:
            self.flag = engine.flags.new()
        gradients.begin_pass(self._scale, engine.ddp.averages(), engine.flags.skipped(but=self._loss_id))

    def _note_kept(self, scale: Tensor, keeps: bool) -> None:
        """FSDP2 keeps the gradients of this pass, or averages them with those that it has kept."""
        kept, loss_id = self.engine.gradients.kept_by_fsdp, self._loss_id or 0
        if kept is not None and kept[0] != loss_id:
            raise AmpUsageError(
                f'backward() of loss {loss_id} while FSDP2 keeps gradients of loss {kept[0]} until they are averaged '
                f'(set_requires_gradient_sync(False)): their scales would mix. Finish the accumulation of one loss before the '
                f'next, or use one loss_id for both.'
            )
        self.engine.gradients.kept_by_fsdp = (loss_id, scale) if keeps else None

    def end(self) -> None:
        """Bring everything home."""
        gradients = self.engine.gradients
        self.has_come = gradients.in_backward and gradients.end_pass(self._scale, self.flag)

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
        if engine.attached:
            engine.stage = Stage.ACCUMULATING


def _note_own(named: Sequence[_Pass], passes: Sequence[_Pass], loss_id: int) -> None:
    """After a pass: say which step is skipped, and whose scale falls."""
    engine = named[0].engine
    engine.flags.used[loss_id] = True
    for each in named:
        each.engine.flags.has_arrived |= each.has_come
        each.engine.stage = Stage.ACCUMULATING
    # the scale of a wrapper was too large where its loss overflows in any parameter. Scripts name the optimizers that step;
    # gradients elsewhere are mostly thrown away, and do not count
    counted = named if engine.scales.are_shared else [each for each in passes if each.has_come]
    found = [each.flag.to(engine.device) for each in counted if each.flag is not None]
    if found and engine.scales.check:
        worst = found[0] if len(found) == 1 else torch.stack(found).max()
        engine.flags.add(worst, loss_id)
        for each in named[1:]:
            each.engine.flags.add(worst)
