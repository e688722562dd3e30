"""Copies a model's buffers before the forward calls of a step, so that a skipped step restores them.

One batch with NaN leaves NaN in BatchNorm's running statistics for good, although the optimizer step is skipped. So buffers
are copied when the first forward call since the last step begins, and the step writes the copies back by the flag that skips
it: on the device, without a host read.

What counts as a forward call is a call of the model, or of a part of it, with gradients enabled, checkpointed segments that
run again included. Whatever is written between two of them was written by somebody else, and stays
(:mod:`amp_wrapper.engine.buffers.tracked`).

Losses of other optimizers may go through the same modules. Their steps decide where the optimizer itself has no gradients
(:mod:`amp_wrapper.engine.buffers.users`).

Whatever a call was for, NaN that it has left is looked for when the next one begins, at each step, and before somebody reads
the buffers: those of the module then become what they were before the call. So a second set of copies follows the calls of a
step. A call without gradients is covered in this alone: no step comes of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from ... import torch_internals
from ...compiler_internals import untraced
from .. import graph_calls
from . import hooks, living
from .averages import AveragedBuffers
from .hooks import Call, Calls, HookedModules
from .ownership import owned_modules
from .tracked import TrackedBuffers
from .users import Deciders, User


class BufferSnapshots:
    """The buffers that one optimizer's skipped steps give back.

    Args:
        roots: (qualified name, module): the models.
        owners: Gives the parameters that the optimizer steps, and those that others step, beside those of other snapshots
            (:func:`amp_wrapper.engine.buffers.ownership.owned_modules`).
        leave: Module classes to leave alone, with everything in them.
        owner: Whose steps these are; not kept alive.
    """

    def __init__(
        self,
        roots: Sequence[tuple[str, nn.Module]],
        owners: Callable[[], tuple[Iterable[Tensor], Iterable[Tensor]]],
        leave: tuple[type, ...] = (),
        owner: User | None = None,
    ) -> None:
        self._deciders = Deciders(owner)
        self._averaged: AveragedBuffers | None = None
        self._roots = list(roots)
        self.owners = owners
        self._leave = leave
        self._hooked = HookedModules(self, [root for _, root in roots])
        self.calls = Calls()
        self._lock = threading.Lock()
        # calls under way that count, on all threads
        self._active = 0
        # whether the copies are those of the present step; or of a call without a graph, from which no step comes
        self._live = False
        self.expects_graph = False
        # whether NaN has been looked for since the last call
        self._looked = True
        # whether what was written until now was loaded together with the copies
        self._loaded = False
        # whether a graph may have written to buffers since the last look at them
        self._graph_runs = False
        # whether torch.compile is tracing a forward call at this moment
        self._is_traced = False
        self._collect()
        living.collect_again()
        # complete from here on: hooks of torch ask all that are listed
        living.living.add(ref(self, living.living.discard))
        living.listen()

    def remove(self) -> None:
        """Take the hooks off."""
        self._hooked.hook([])
        living.living.discard(ref(self))
        living.collect_again()

    # -- which buffers -------------------------------------------------------------------------------------------------

    @torch.inference_mode(False)
    def _collect(self) -> None:
        """Look for the buffers, and put hooks on the modules that have some."""
        # hooks that are being traced must not change
        self._stale = self._is_traced
        mine, theirs = self.owners()
        others = [weight for other in living.everything() if other is not self for weight in other.owners()[0]]
        modules = owned_modules(self._roots, mine, [*theirs, *others], self._leave)
        self.tracked = TrackedBuffers(modules)
        roots = [root for _, root in self._roots]
        # scripts call the model, one of its parts, or some layer
        parts = [child for root in roots for child in root.children()]
        above = [module for module in (*roots, *parts) if self.tracked.places_in(module.modules())]
        owners = [module for _, module in modules if self.tracked.places_in([module])]
        if self._is_traced:
            return
        # a hook that was called at the beginning of a call has to be called at its end
        self._hooked.hook([*above, *owners], keeps=self._active > 0)

    def collect_again(self) -> None:
        """Buffers may have come, or belong to others now: this is found out as the next step begins."""
        self._stale = True
        self._hooked.hook([root for _, root in self._roots], keeps=True)

    # -- forward calls -------------------------------------------------------------------------------------------------

    def traced(self) -> None:
        """A forward call is becoming part of a graph: what is done before it will be done before the graph."""
        self._is_traced = True
        try:
            graph_calls.traced(self)
        finally:
            self._is_traced = False

    def before_graph(self) -> None:
        """A graph is about to run that forward calls of models are part of, whose ends nobody sees."""
        has_graph = torch.is_grad_enabled()
        if not has_graph and not any(root.training for _, root in self._roots):
            self.settle()
            return
        with self._lock:
            if not self._active:
                self._begin(has_graph)
                self._graph_runs = True
                self._looked = False

    def _note_graphs(self) -> None:
        """What was written since a graph began to run, a forward call in it has written."""
        if self._graph_runs:
            self._graph_runs = False
            self.tracked.note()

    @untraced
    def enter(self, module: nn.Module) -> None:
        """A forward call begins that may write to buffers, or an evaluation that reads them.

        Args:
            module: What is called: a model, a part of one, or a replica.
        """
        # reentrant checkpointing runs a segment without gradients at first
        has_graph = torch.is_grad_enabled() or (module.training and hooks.is_checkpointed())
        calls = self.calls.open
        if calls and (calls[-1].covers is None or id(module) in calls[-1].covers):
            self.expects_graph = self.expects_graph and not has_graph
            calls[-1].depth += calls[-1].module is module
            return
        if not has_graph and not module.training:
            self.settle()
            return
        if torch_internals.in_function_transform():
            # nothing of this belongs into a graph, and buffers may be replaced for the time of the call
            return
        is_hooked = module in self._hooked
        if self._stale and not self._live and not self._active:
            self._collect()
            if is_hooked and module not in self._hooked:
                return
        # what is written without a graph between the calls of a step is its author's, update_bn's for one
        counts = has_graph or not self._live or self.expects_graph or self._active > 0
        if counts:
            with self._lock:
                self._active += 1
                if self._active == 1:
                    self._begin(has_graph)
        else:
            self.settle()
        # a model, or a replica of one, covers all
        is_part = is_hooked and all(module is not root for _, root in self._roots)
        calls.append(Call(module, frozenset(map(id, module.modules())) if is_part else None, counts))
        self._hooked.hook_end(module)

    @untraced
    def leave(self, module: nn.Module, output: Any = None) -> None:
        """The counterpart of :meth:`enter`.

        Args:
            module: What was called.
            output: What it returned; None after an exception.
        """
        calls = self.calls.open
        if not calls or calls[-1].module is not module:
            return
        if calls[-1].depth:
            calls[-1].depth -= 1
            return
        call = calls.pop()
        self._looked = False
        with self._lock:
            if not call.counts:
                self.tracked.accept()
                return
            self._active = max(self._active - 1, 0)
            self.tracked.note()
        # a single optimizer decides alone
        if len(living.living) > 1 and self._live:
            self._deciders.watch(output)

    def _begin(self, has_graph: bool) -> None:
        self._note_graphs()
        if self._loaded or hooks.is_broadcast():
            # what DDP broadcasts goes on being the work of forward calls
            self._loaded = False
            self.tracked.note()
        if self._live:
            doubt = self._deciders.take_doubt()
            self._give_back(doubt, keeps_nan=False)
            if doubt is not None or self.expects_graph or self._deciders.are_done:
                self._close()
        if self._live:
            self.tracked.go_on()
        else:
            self._take()
            self.expects_graph = not has_graph

    def _take(self) -> None:
        """Copy all buffers: a step begins."""
        if self._stale or not self.tracked.take():
            self._collect()
            self.tracked.take()
        self._live = True

    # -- steps ---------------------------------------------------------------------------------------------------------

    def restore(self, flag: Tensor | None) -> None:
        """The step is taken or skipped: where ``flag`` is up, buffers become what they were. No host read.

        Buffers that somebody has written since the last forward call stay as they are, and so do those that have another
        shape, type or device now.

        Args:
            flag: float32 scalar on any device, not zero where the step is skipped; None for a step that is taken.
        """
        self._note_graphs()
        if self._active or self._loaded or self.calls.open:
            # an interrupt ended a call without its hooks, or the step is taken inside of one
            self._active, self._loaded = 0, False
            self.calls.open.clear()
            self.tracked.note()
        if self._live:
            self._give_back(None if self.expects_graph else flag)
            self._close()

    def decide(self, user: User, flag: Tensor | None) -> None:
        """The step of another optimizer is taken or skipped: where it decides, buffers become what they were.

        Args:
            user: Whose step it is.
            flag: As for :meth:`restore`.
        """
        if self._live and not self._active:
            self._note_graphs()
            decides = self.expects_graph or self._deciders.other_step(user, flag)
            self._settle(decides, None if self.expects_graph else flag)

    def settle(self) -> None:
        """Somebody is about to read the buffers: an evaluation, an average, who saves. No host read.

        Where no loss has gone through the calls so far, the skipped step of another optimizer decides on them now.
        """
        if self._live and not self._active and not torch_internals.in_function_transform():
            self._note_graphs()
            doubt = self._deciders.take_doubt()
            self._settle(doubt is not None, doubt)

    def _settle(self, is_decided: bool, flag: Tensor | None) -> None:
        if is_decided:
            self._give_back(flag)
            if not self._deciders.wait:
                self._close()
        elif not self._looked:
            self._give_back(None)

    def _give_back(self, flag: Tensor | None, keeps_nan: bool = True) -> None:
        """Undo what calls have done where ``flag`` is up, and what left NaN in any case.

        Args:
            flag: As for :meth:`restore`.
            keeps_nan: Whether NaN stays that somebody has written between two calls.
        """
        self._looked = True
        self.tracked.accept(keeps_nan=keeps_nan)
        self.tracked.write_back(flag)
        if flag is not None and self._averaged is not None:
            self._averaged.give_back(flag)

    def _close(self) -> None:
        """The step is over: the next forward call copies anew."""
        self._live = False
        self.tracked.close()
        self._deciders.forget()
        if self._averaged is not None:
            self._averaged.release()

    def used_by(self, users: Iterable[User]) -> None:
        """Losses of these have made use of forward calls since the step began."""
        if self._live:
            self._deciders.used_by(users)

    def average(self, average: nn.Module, model: nn.Module) -> None:
        """An average of the buffers is about to be updated. During a step, it is restored together with the buffers.

        Args:
            average: A copy of ``model``.
            model: The model, or a wrapper of the same structure that the copy was made from.
        """
        if self._live or (self._averaged is not None and self._averaged.waits):
            mine = set(map(id, self.tracked.tensors))
            if not mine.isdisjoint(map(id, model.buffers())):
                self.settle()
            pairs = zip(average.named_buffers(), model.buffers())
            means = {name: mean for (name, mean), buffer in pairs if id(buffer) in mine}
            self._averaged = self._averaged or AveragedBuffers()
            self._averaged.hold(average, means, self._live)

    def averaged(self, average: nn.Module) -> None:
        """The counterpart of :meth:`average`."""
        if self._averaged is not None:
            self._averaged.note(average)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """The copies of a step that is under way by qualified name, for a checkpoint; empty where none is. Syncs."""
        if not self._live or self.expects_graph:
            return {}
        if self._loaded:
            # saved again before any forward call: the buffers were loaded meanwhile
            self.tracked.note()
        return self.tracked.state()

    def averages(self) -> list[dict[str, dict[str, Tensor]]]:
        """Of averages that were updated since the step began, the buffers ``before`` it and ``now``. Syncs."""
        if not self._live or self.expects_graph or self._averaged is None:
            return []
        return self._averaged.state()

    def load(self, copies: Mapping[str, Tensor], averages: Sequence[Mapping[str, Mapping[str, Tensor]]] = ()) -> None:
        """Continue a step that was under way. The buffers have been loaded, or will be before the next forward call.

        Args:
            copies: From :meth:`state`; those of unknown buffers, or of another shape, are left out.
            averages: From :meth:`averages`.
        """
        self._close()
        self._take()
        self.tracked.load(copies)
        self._averaged = AveragedBuffers(averages)
        self._deciders.has_own_loss = True
        self.expects_graph, self._loaded = False, True
