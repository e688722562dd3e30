"""Keeps DistributedDataParallel averaging gradients where a cast, an unfrozen parameter or a second loss would stop it.

DDP sorts gradients into buckets by the types it finds when it wraps a model, and listens to the parameters that are
trainable then. A cast or an unfreezing afterwards ends gradient averaging without a word. mmengine wraps before any
optimizer wrapper exists, so DDP has to look at the model once more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeGuard

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ... import distributed_internals
from ...errors import AmpAttachError, AmpUsageError, some
from ...shards import is_sharded
from .forward_record import NoticeDdp, State, record_of, state_of
from .rebuild import has_several_ranks, look_at, rebuild

logger = logging.getLogger('amp_wrapper')


#: Lines about parameters that are frozen and unfrozen.
_ENOUGH = 5


class Reducers:
    """The DDP modules that average the gradients of one optimizer.

    Args:
        model: The model, wrapped in DDP, holding DDP modules, or neither.
        weights: Returns the model's parameters that the optimizer steps: weights, not their masters.
        named: The model's parameters by name, for messages.
        speaks: Whether there are messages.
    """

    def __init__(
        self,
        model: nn.Module | None,
        weights: Callable[[], Sequence[Tensor]],
        named: Iterable[tuple[str, Tensor]] = (),
        speaks: bool = True,
    ) -> None:
        self.ddps: list[DistributedDataParallel] = []
        self._weights = weights
        self._names = {id(parameter): name for name, parameter in named}
        self._ids: list[int] = []
        self._mine: list[DistributedDataParallel] = []
        self._models: set[int] = set()
        self._before: dict[Tensor, tuple[int, int] | None] = {}
        self._outside = False
        self._warned = not speaks
        self._said = 0 if speaks else _ENOUGH
        self._notices: list[NoticeDdp] = []
        if model is not None:
            self._models.add(id(model))
            self._refresh(model.modules())

    # -- attaching ---------------------------------------------------------------------------------------------------

    def check(self, scales_or_masters: bool, casts: bool) -> None:
        """Refuse, before anything is cast, what cannot be carried over or would step behind our back.

        Args:
            scales_or_masters: Whether gradients need work between backward and step.
            casts: Whether the model is about to be cast.

        Raises:
            AmpAttachError: A DDP with delayed reductions, its own mixed precision, or optimizers in its backward pass.
        """
        for ddp in self.ddps:
            overlapped = [hook for hook, _ in distributed_internals.comm_hooks(ddp) if _steps_in_backward(hook)]
            if scales_or_masters and overlapped:
                raise AmpAttachError(
                    'DistributedDataParallel steps an optimizer inside its backward pass (_register_fused_optim): gradients '
                    'would be applied scaled and unchecked. Drop it, or use O0.'
                )
            if casts and getattr(ddp, 'mixed_precision', None) is not None:
                raise AmpAttachError(
                    'DistributedDataParallel(mixed_precision=...) casts the model itself: drop it, the opt level does it.'
                )
            if casts and distributed_internals.delays_all_reduce(ddp):
                raise AmpAttachError(
                    'DistributedDataParallel(delay_all_reduce_named_params=...) cannot be combined with a level that '
                    'casts the model: drop the argument, or use O0, O1 or O4.'
                )

    def rebuild(self, changed: Iterable[Tensor]) -> None:
        """After a cast: every DDP around a changed parameter builds its reducer anew. Collective: each rank calls it.

        Args:
            changed: The parameters whose type is another now.
        """
        ids = {id(parameter) for parameter in changed}
        for ddp in self.ddps:
            if ids.intersection(map(id, ddp.module.parameters())):
                rebuild(ddp)

    def record(self) -> None:
        """Watch the forward calls of the DDP modules. Idempotent."""
        for ddp in self.ddps:
            record_of(ddp).watch(ddp)

    def watch(self, models: Iterable[nn.Module]) -> None:
        """Find the DDP modules that will be put around these models, when they run. Idempotent.

        Args:
            models: Not wrapped.
        """
        self._notices = []
        for model in models if dist.is_available() else ():
            known = [hook for hook in model._forward_pre_hooks.values() if isinstance(hook, NoticeDdp)]
            self._notices += known or [NoticeDdp()]
            if not known:
                model.register_forward_pre_hook(self._notices[-1], prepend=True)

    # -- before a forward call ---------------------------------------------------------------------------------------

    def follow(self, model: nn.Module, waiting: Callable[[Iterable[int]], bool]) -> None:
        """Let every DDP listen to the parameters that are trainable now. Each rank calls it, before a forward call.

        Parameters and buffers that DDP has never seen start from the values of rank 0, as in its constructor.

        Args:
            model: What is about to run; a DDP that was put around the model after it was attached is found here.
            waiting: Whether any of these parameters, by id, has a gradient waiting for a step.

        Raises:
            AmpUsageError: A change in the middle of an accumulation that DDP cannot follow, or a DDP that cannot be built anew.
        """
        if id(model) not in self._models:
            self._models.add(id(model))
            self._refresh(model.modules())
            self.record()
        if not self.ddps:
            return
        self._refresh()
        for ddp in self.ddps:
            record = record_of(ddp)
            flags = [parameter.requires_grad for parameter in record.parameters]
            if record.flags == flags:
                continue
            now = frozenset(id(p) for p, flag in zip(record.parameters, flags) if flag)
            grown = bool(now - record.reduced)
            # frozen ones count as unused; with all of them frozen there is no backward pass to wait for
            if grown or (now and now != record.reduced and not ddp.find_unused_parameters):
                self._check_rebuild(ddp, record.reduced, now, waiting)
                self._say(now, record.reduced)
                rebuild(ddp)
            record.flags = flags

    def _check_rebuild(
        self,
        ddp: DistributedDataParallel,
        known: frozenset[int],
        now: frozenset[int],
        waiting: Callable[[Iterable[int]], bool],
    ) -> None:
        if distributed_internals.delays_all_reduce(ddp):
            raise AmpUsageError(
                'parameters were frozen or unfrozen under DistributedDataParallel(delay_all_reduce_named_params=...), which '
                'cannot be built anew: freeze them before it wraps the model, or drop the argument.'
            )
        left = not ddp.find_unused_parameters and waiting(known - now)
        if left or (ddp.find_unused_parameters and waiting(known | now)):
            raise AmpUsageError(
                'parameters were frozen or unfrozen in the middle of an accumulation, and DistributedDataParallel would '
                'leave the gradients that are waiting on their ranks: change requires_grad between two steps.'
            )

    def _refresh(self, found: Iterable[nn.Module | None] = ()) -> None:
        """Find out which DDP modules average what the optimizer steps. Each rank calls it.

        Args:
            found: Modules, new DDP among them.
        """
        # mmengine's MMSeparateDistributedDataParallel is a DDP by name that never ran the constructor
        new = [module for module in found if _is_ddp(module) and module not in self.ddps]
        self.ddps += new
        weights = self._weights() if self.ddps else []
        ids = [id(weight) for weight in weights]
        if not new and ids == self._ids:
            return
        self._ids = ids
        listened = {ddp: set(map(id, look_at(ddp))) for ddp in self.ddps}
        self._mine = [ddp for ddp in self.ddps if not listened[ddp].isdisjoint(ids)]
        self._outside = not set().union(*listened.values()).issuperset(ids)
        inside = {id(parameter) for ddp in self.ddps for parameter in ddp.module.parameters()}
        lost = [p for p in weights if p.requires_grad and id(p) not in inside]
        if lost and not self._warned and any(map(has_several_ranks, self.ddps)):
            self._warned = True
            names = [self._names.get(id(p), f'<parameter of shape {tuple(p.shape)}>') for p in lost]
            logger.warning(
                f'amp: no DistributedDataParallel averages the gradients of {some(names)}, which the optimizer steps: each '
                f'rank trains its own. Wrap the module that holds them, or freeze them.'
            )

    def _say(self, now: frozenset[int], known: frozenset[int]) -> None:
        self._said += 1
        if self._said <= _ENOUGH and known:
            logger.info(
                f'amp: DistributedDataParallel averages {len(now)} parameters from now on ({len(now - known)} were unfrozen '
                f'or added, {len(known - now)} frozen)'
            )

    # -- around a backward pass --------------------------------------------------------------------------------------

    def begin_backward(self) -> bool:
        """Say whether the gradients of the coming backward pass will be averaged over the ranks, in part at least.

        Returns:
            True without DDP.

        Raises:
            AmpUsageError: A second backward pass through one forward call, which DDP does not average, or one whose DDP was
                built anew since the forward call.
        """
        noticed = [notice.ddp() for notice in self._notices if notice.ddp is not None] if self._notices else []
        if noticed:
            self._refresh(noticed)
        if not self._mine:
            return True
        spent = self._that_are('spent')
        if spent and len(spent) == len(self._mine):
            raise AmpUsageError(_SECOND)
        if self._that_are('void'):
            raise AmpUsageError(
                'parameters were frozen or unfrozen between a forward pass and its backward pass, and '
                'DistributedDataParallel was built anew in between: run the model again before backward().'
            )
        self._before = {parameter: _mark(parameter) for ddp in spent for parameter in record_of(ddp).parameters}
        return any(state_of(ddp) == 'averaged' for ddp in self._mine)

    def averages(self) -> bool:
        """As :meth:`begin_backward`."""
        return self.begin_backward()

    def groups(self) -> list[dist.ProcessGroup]:
        """All that decide together."""
        return self.groups_to_ask(always=True)

    def end_backward(self) -> None:
        """A backward pass is through: what DDP averaged is averaged.

        Raises:
            AmpUsageError: A DDP that had averaged for this forward call already got further gradients, which stay there.
        """
        if not self._mine:
            return
        before, self._before = self._before, {}
        if any(mark != _mark(parameter) for parameter, mark in before.items()):
            raise AmpUsageError(_SECOND)
        for ddp in self._mine:
            if distributed_internals.is_finalized(ddp):
                record_of(ddp).use_up('spent')

    def _that_are(self, state: State, everywhere: bool = False) -> list[DistributedDataParallel]:
        """The DDP modules of several ranks whose next backward pass has this state.

        Args:
            state: As of :func:`amp_wrapper.engine.ddp.forward_record.state_of`.
            everywhere: Of all in the model, not only those of this optimizer.
        """
        ddps = self.ddps if everywhere else self._mine
        return [ddp for ddp in ddps if has_several_ranks(ddp) and state_of(ddp) == state] if ddps else []

    def is_unfinished(self) -> bool:
        """Whether a backward pass has left a DDP waiting for the gradients of another one."""
        return bool(self._mine) and not all(map(distributed_internals.is_finalized, self._that_are('averaged')))

    def about_to_average(self, everywhere: bool = False) -> frozenset[int]:
        """The parameters, by id, whose gradients the coming backward pass averages over several ranks.

        Args:
            everywhere: In all DDP modules of the model, not only in those of this optimizer.
        """
        ddps = self._that_are('averaged', everywhere) if self.ddps else []
        return (
            frozenset(id(parameter) for ddp in ddps for parameter in record_of(ddp).parameters) if ddps else frozenset()
        )

    def is_local(self) -> bool:
        """Whether the last forward call of any of the DDP modules was under ``no_sync``."""
        return bool(self._mine) and bool(self._that_are('local'))

    def joins(self) -> bool:
        """Whether ranks may take another number of steps: ``DistributedDataParallel.join``."""
        ddps = self._mine
        return bool(ddps) and any(map(distributed_internals.joins, ddps))

    # -- one decision ------------------------------------------------------------------------------------------------

    def same_everywhere(self) -> bool:
        """Whether the gradients of now are averages, and so those of every rank. False without DDP."""
        return any(map(has_several_ranks, self._mine)) and not self.groups_to_ask()

    def groups_to_ask(self, always: bool = False) -> list[dist.ProcessGroup]:
        """Where the ranks' gradients may differ at a step: the groups over which they have to agree, one after the other.

        They are the same everywhere where plain DDP averaged all of them last. Communication hooks may do anything,
        parameters outside of DDP are left to their ranks, and so are backward passes under ``no_sync``.

        Args:
            always: Ask all the same.
        """
        if not self._mine:
            return []
        groups: list[dist.ProcessGroup] = []
        for ddp in filter(has_several_ranks, self._mine):
            if not any(ddp.process_group is group for group in groups):
                groups.append(ddp.process_group)
            always = always or self._outside or bool(distributed_internals.comm_hooks(ddp))
        return groups if always or len(groups) > 1 or self._that_are('local') else []


_SECOND = (
    'a second backward pass through one forward pass: DistributedDataParallel averages gradients once for each forward pass, '
    'so these would stay on their ranks. Add the losses up, or run the model once for each loss.'
)


def _mark(parameter: Tensor) -> tuple[int, int] | None:
    """Changes whenever a gradient is added."""
    return None if parameter.grad is None else (id(parameter.grad), parameter.grad._version)


def has_several_processes() -> bool:
    """Whether torch.distributed runs with more than one process."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def check_unknown_listeners(model: nn.Module) -> None:
    """Refuse to cast a model whose gradients somebody listens to from outside: a DDP around it that was not handed over.

    Args:
        model: Without any DDP around it or inside.

    Raises:
        AmpAttachError: Several ranks, and something holds on to the accumulation of a parameter's gradient.
    """
    if not has_several_processes():
        return
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not is_sharded(parameter):
            _accumulation(parameter).metadata['amp_wrapper'] = True
            # torch makes a new one where nobody holds the old one
            if _accumulation(parameter).metadata.pop('amp_wrapper', False):
                raise AmpAttachError(
                    f'something listens to the gradient of {name}, such as a DistributedDataParallel around the model, and '
                    f'would stop averaging after the cast: hand over the wrapped model, optim_context(ddp) in place of '
                    f'optim_context(ddp.module).'
                )
            return


def _accumulation(parameter: Tensor) -> Any:
    function = parameter.view_as(parameter).grad_fn
    assert function is not None
    return function.next_functions[0][0]


def check_foreign_wrapper(model: nn.Module) -> None:
    """Refuse, at a level that casts, a model wrapper of which nobody knows whether it averages gradients afterwards.

    Args:
        model: A wrapper that is no DDP. One that hooks on parameters (``register_post_accumulate_grad_hook``) keeps
            working after a cast, and says so by ``survives_cast = True``; one that hooks on autograd's accumulation
            nodes does not.

    Raises:
        AmpAttachError: Several ranks, no DDP inside, and no such attribute.
    """
    if not has_several_processes():
        return
    if any(_is_ddp(module) for module in model.modules()) or getattr(model, 'survives_cast', False):
        return
    raise AmpAttachError(
        f'{type(model).__name__} is no DistributedDataParallel: whether it still averages gradients after the model was '
        f'cast cannot be known. Derive it from MMDistributedDataParallel, or, if it hooks on parameters by '
        f'register_post_accumulate_grad_hook(), set survives_cast = True on it, or use O1.'
    )


def _is_ddp(module: nn.Module | None) -> TypeGuard[DistributedDataParallel]:
    return isinstance(module, DistributedDataParallel) and 'reducer' in module.__dict__


def _steps_in_backward(hook: Any) -> bool:
    place = getattr(hook, '__module__', '') or ''
    return place.endswith('optimizer_overlap_hooks') or 'hook_then_optimizer' in getattr(hook, '__qualname__', '')
