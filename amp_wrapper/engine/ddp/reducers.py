"""DistributedDataParallel around and inside a model: what a cast, an unfrozen parameter or a second loss do to it.

DDP sorts gradients into buckets by the types it finds when it wraps a model, and listens to the parameters that are
trainable then. A cast or an unfreezing afterwards ends gradient averaging without a word. mmengine wraps before any
optimizer wrapper exists, so DDP has to look at the model once more.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeGuard
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...casting.cast_hooks import AmpHook
from ...errors import AmpAttachError, AmpUsageError
from .rebuild import logged, rebuild_ddp

logger = logging.getLogger('amp_wrapper')


@dataclasses.dataclass
class _Seen:
    """What is known of a DDP; shared by all optimizers that train parts of its module.

    Attributes:
        parameters: Those it would listen to, were they trainable.
        reduced: Those its reducer listens to, by id.
        flags: Which of ``parameters`` were trainable when it was last looked at.
    """

    parameters: list[nn.Parameter]
    reduced: frozenset[int]
    flags: list[bool] | None = None


_seen: WeakKeyDictionary[nn.Module, _Seen] = WeakKeyDictionary()


class ForwardRecord:
    """Forward hook of a DDP: what its next backward pass will do with gradients.

    DDP decides in the forward pass, and mmengine leaves ``no_sync`` before it calls backward.

    Attributes:
        state: 'unknown' before any forward pass with gradients; 'averaged' after one that synchronises; 'local' under
            ``no_sync``; 'spent' once a backward pass has used it up: DDP averages once for each forward pass; 'void' where
            the reducer was built anew between the forward pass and its backward pass.
    """

    def __init__(self) -> None:
        self.state = 'unknown'

    def __call__(self, module: nn.Module, *_: Any) -> None:
        if not torch.is_grad_enabled():
            return
        if module.require_backward_grad_sync:
            self.state = 'averaged'
        elif self.state != 'averaged':
            self.state = 'local'


# model -> the DDP that ran it last, where that was put around it after it had been cast
_noticed: WeakKeyDictionary[nn.Module, ReferenceType[DistributedDataParallel]] = WeakKeyDictionary()


class NoticeDdp(AmpHook):
    """Forward pre-hook of a model: takes notice of the DDP that runs it, which nobody hands over."""

    def __call__(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or not dist.is_available():
            return
        ddp = DistributedDataParallel._get_active_ddp_module()  # type: ignore[no-untyped-call]
        if ddp is None:
            return
        _noticed[module] = ref(ddp)
        if _record(ddp) is None:
            record = ForwardRecord()
            ddp.register_forward_hook(record)
            # torch may have looked for hooks before this forward pass began
            record(ddp)


#: Lines about parameters that are frozen and unfrozen.
_ENOUGH = 5


class Reducers:
    """The DDP modules that average the gradients of one optimizer.

    Args:
        model: The model, wrapped in DDP, holding DDP modules, or neither.
        weights: Returns the model's side of what the optimizer steps: weights, not their masters.
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
        self._watched: tuple[nn.Module, ...] = ()
        if model is not None:
            self._find(model)

    def _find(self, model: nn.Module) -> None:
        self._models.add(id(model))
        # mmengine's MMSeparateDistributedDataParallel is a DDP by name that never ran the constructor
        new = [module for module in model.modules() if _is_ddp(module) and module not in self.ddps]
        self.ddps += new
        if new:
            self._list()

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
            overlapped = [hook for hook, _ in getattr(ddp, '_comm_hooks', ()) if _steps_in_backward(hook)]
            if scales_or_masters and (
                overlapped or any(hasattr(p, '_in_backward_optimizers') for p in ddp.module.parameters())
            ):
                raise AmpAttachError(
                    'DistributedDataParallel steps an optimizer inside its backward pass (_register_fused_optim, '
                    '_apply_optimizer_in_backward): gradients would be applied scaled and unchecked. Drop it, or use O0.'
                )
            if casts and getattr(ddp, 'mixed_precision', None) is not None:
                raise AmpAttachError(
                    'DistributedDataParallel(mixed_precision=...) casts the model itself: drop it, the opt level does it.'
                )
            if casts and getattr(ddp, '_delay_all_reduce_params', None):
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
                _rebuild_and_note(ddp, _seen[ddp].reduced if ddp.find_unused_parameters else frozenset())

    def record(self) -> None:
        """Watch the forward passes of the DDP modules. Idempotent."""
        for ddp in self.ddps:
            if _record(ddp) is None:
                ddp.register_forward_hook(ForwardRecord())

    def watch(self, models: Iterable[nn.Module]) -> None:
        """Find the DDP modules that will be put around these models, when they run. Idempotent.

        Args:
            models: Not wrapped.
        """
        self._watched = tuple(models)
        for model in self._watched:
            if not any(isinstance(hook, NoticeDdp) for hook in model._forward_pre_hooks.values()):
                model.register_forward_pre_hook(NoticeDdp(), prepend=True)

    def _look_around(self) -> None:
        found = [ddp for ddp in (_noticed[model]() for model in self._watched if model in _noticed) if ddp is not None]
        new = [ddp for ddp in found if ddp not in self.ddps]
        self.ddps += new
        if new or (self.ddps and self._ids != [id(weight) for weight in self._weights()]):
            self._list()

    # -- before a forward pass ---------------------------------------------------------------------------------------

    def follow(self, model: nn.Module, waiting: Callable[[Iterable[int]], bool]) -> None:
        """Let every DDP listen to the parameters that are trainable now. Each rank calls it, before a forward pass.

        Parameters and buffers that DDP has never seen start from the values of rank 0, as in its constructor.

        Args:
            model: What is about to run; a DDP that was put around the model after it was attached is found here.
            waiting: Whether any of these parameters, by id, has a gradient waiting in an open window.

        Raises:
            AmpUsageError: A change in the middle of a window that DDP cannot follow, or a DDP that cannot be built anew.
        """
        if id(model) not in self._models:
            self._find(model)
            self.record()
        if not self.ddps:
            return
        if self._ids != [id(weight) for weight in self._weights()]:
            self._list()
        for ddp in self.ddps:
            seen = _seen[ddp]
            flags = [parameter.requires_grad for parameter in seen.parameters]
            if seen.flags == flags:
                continue
            now = frozenset(id(p) for p, flag in zip(seen.parameters, flags) if flag)
            grown = bool(now - seen.reduced)
            # frozen ones count as unused; with all of them frozen there is no backward pass to wait for
            if grown or (now and now != seen.reduced and not ddp.find_unused_parameters):
                self._check_rebuild(ddp, seen.reduced, now, waiting)
                self._say(now, seen.reduced)
                # those that are frozen by turns must not drop out by turns
                _rebuild_and_note(ddp, seen.reduced if ddp.find_unused_parameters else frozenset())
            seen.flags = flags

    def _check_rebuild(
        self,
        ddp: DistributedDataParallel,
        known: frozenset[int],
        now: frozenset[int],
        waiting: Callable[[Iterable[int]], bool],
    ) -> None:
        if getattr(ddp, '_delay_all_reduce_params', None):
            raise AmpUsageError(
                'parameters were frozen or unfrozen under DistributedDataParallel(delay_all_reduce_named_params=...), which '
                'cannot be built anew: freeze them before it wraps the model, or drop the argument.'
            )
        left = not ddp.find_unused_parameters and waiting(known - now)
        if left or (ddp.find_unused_parameters and waiting(known | now)):
            raise AmpUsageError(
                'parameters were frozen or unfrozen in the middle of an accumulation window, and DistributedDataParallel would '
                'leave the gradients that are waiting on their ranks: change requires_grad between two steps.'
            )

    def _list(self) -> None:
        weights = self._weights()
        self._ids = [id(weight) for weight in weights]
        owned = set(self._ids)
        reduced: set[int] = set()
        inside: set[int] = set()
        self._mine = []
        for ddp in self.ddps:
            parameters = _parameters(ddp)
            if ddp not in _seen:
                _seen[ddp] = _Seen(parameters, _listened_to(ddp))
            elif [id(p) for p in _seen[ddp].parameters] != [id(p) for p in parameters]:
                _seen[ddp].parameters, _seen[ddp].flags = parameters, None
            ids = set(map(id, parameters))
            reduced |= ids
            inside.update(map(id, ddp.module.parameters()))
            if ids & owned:
                self._mine.append(ddp)
            _sync_new(ddp)
        self._outside = not owned <= reduced
        lost = [p for p in weights if p.requires_grad and id(p) not in inside]
        if lost and not self._warned and any(map(_has_several_ranks, self.ddps)):
            self._warned = True
            names = [self._names.get(id(p), f'<parameter of shape {tuple(p.shape)}>') for p in lost]
            shown = ', '.join(names[:5]) + (f' and {len(names) - 5} more' if len(names) > 5 else '')
            logger.warning(
                f'amp: no DistributedDataParallel averages the gradients of {shown}, which the optimizer steps: each rank '
                f'trains its own. Wrap the module that holds them, or freeze them.'
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
            AmpUsageError: A second backward pass through one forward pass, which DDP does not average, or one whose DDP was
                built anew since the forward pass.
        """
        if self._watched:
            self._look_around()
        states = [_state(ddp) for ddp in self._mine]
        if any(map(_has_several_ranks, self._mine)):
            if states and all(state == 'spent' for state in states):
                raise AmpUsageError(_SECOND)
            if 'void' in states:
                raise AmpUsageError(
                    'parameters were frozen or unfrozen between a forward pass and its backward pass, and '
                    'DistributedDataParallel was built anew in between: run the model again before backward().'
                )
        self._before = {
            parameter: _mark(parameter)
            for ddp, state in zip(self._mine, states)
            if state == 'spent' and _has_several_ranks(ddp)
            for parameter in _seen[ddp].parameters
        }
        return not states or 'averaged' in states

    def end_backward(self) -> None:
        """A backward pass is through: what DDP averaged is averaged.

        Raises:
            AmpUsageError: Gradients arrived at a DDP that had averaged for this forward pass already. They are there.
        """
        before, self._before = self._before, {}
        if any(mark != _mark(parameter) for parameter, mark in before.items()):
            raise AmpUsageError(_SECOND)
        for ddp in self._mine:
            record = _record(ddp)
            if record is not None and record.state == 'averaged' and _is_finalized(ddp):
                record.state = 'spent'

    def is_unfinished(self) -> bool:
        """Whether a backward pass has left a DDP waiting for the gradients of another one."""
        return any(
            _has_several_ranks(ddp) and _state(ddp) == 'averaged' and not _is_finalized(ddp) for ddp in self._mine
        )

    def about_to_average(self, everywhere: bool = False) -> frozenset[int]:
        """The parameters, by id, whose gradients the coming backward pass averages over several ranks.

        Args:
            everywhere: In all DDP modules of the model, not only in those of this optimizer.
        """
        return frozenset(
            id(parameter)
            for ddp in (self.ddps if everywhere else self._mine)
            if _has_several_ranks(ddp) and _state(ddp) == 'averaged'
            for parameter in _seen[ddp].parameters
        )

    def is_local(self) -> bool:
        """Whether the last forward pass of any of the DDP modules was under ``no_sync``."""
        return any(_has_several_ranks(ddp) and _state(ddp) == 'local' for ddp in self._mine)

    def joins(self) -> bool:
        """Whether ranks may take another number of steps: ``DistributedDataParallel.join``."""
        return any(getattr(getattr(ddp, '_join_config', None), 'enable', False) for ddp in self._mine)

    # -- one decision ------------------------------------------------------------------------------------------------

    def same_everywhere(self) -> bool:
        """Whether the gradients of now are averages, and so those of every rank. False without DDP."""
        return any(map(_has_several_ranks, self._mine)) and not self.groups_to_ask()

    def groups_to_ask(self, always: bool = False) -> list[dist.ProcessGroup]:
        """Where the ranks' gradients may differ at a step: the groups over which they have to agree, one after the other.

        They are the same everywhere where plain DDP averaged all of them last. Communication hooks may do anything,
        parameters outside of DDP are left to their ranks, and so are backward passes under ``no_sync``.

        Args:
            always: Ask all the same.
        """
        several = [ddp for ddp in self._mine if _has_several_ranks(ddp)]
        groups: list[dist.ProcessGroup] = []
        for ddp in several:
            if not any(ddp.process_group is group for group in groups):
                groups.append(ddp.process_group)
        averaged = not self._outside and all(
            not getattr(ddp, '_comm_hooks', ()) and _state(ddp) != 'local' for ddp in several
        )
        return [] if averaged and len(groups) < 2 and not always else groups


_SECOND = (
    'a second backward pass through one forward pass: DistributedDataParallel averages gradients once for each forward pass, '
    'so these would stay on their ranks. Add the losses up, or run the model once for each loss.'
)


def _mark(parameter: Tensor) -> tuple[int, int] | None:
    """Changes whenever a gradient is added."""
    return None if parameter.grad is None else (id(parameter.grad), parameter.grad._version)


def check_unknown_listeners(model: nn.Module) -> None:
    """Refuse to cast a model whose gradients somebody listens to from outside: a DDP around it that was not handed over.

    Args:
        model: Without any DDP around it or inside.

    Raises:
        AmpAttachError: Several ranks, and something holds on to the accumulation of a parameter's gradient.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
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
        AmpAttachError: Several ranks, no DDP inside, and no such word.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return
    if any(_is_ddp(module) for module in model.modules()) or getattr(model, 'survives_cast', False):
        return
    raise AmpAttachError(
        f'{type(model).__name__} is no DistributedDataParallel: whether it still averages gradients after the model was '
        f'cast cannot be known. Derive it from MMDistributedDataParallel, or, if it hooks on parameters by '
        f'register_post_accumulate_grad_hook(), set survives_cast = True on it, or use O1.'
    )


def _rebuild_and_note(ddp: DistributedDataParallel, keep: frozenset[int] = frozenset()) -> None:
    """``keep``: parameters, by id, that stay in the reducer though they are frozen now."""
    parameters = _parameters(ddp)
    frozen = [p for p in parameters if not p.requires_grad and id(p) in keep]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        trainable = frozenset(id(p) for p in parameters if p.requires_grad)
        # DDP refuses to be made around a module that is frozen as a whole; the first unfreezing makes up for it
        if trainable:
            rebuild_ddp(ddp)
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)
    _seen[ddp] = _Seen(parameters, trainable)
    record = _record(ddp)
    if record is not None and record.state == 'averaged':
        record.state = 'void'


def _is_ddp(module: nn.Module) -> TypeGuard[DistributedDataParallel]:
    return isinstance(module, DistributedDataParallel) and 'reducer' in module.__dict__


def _has_several_ranks(ddp: DistributedDataParallel) -> bool:
    return ddp.process_group.size() > 1


def _parameters(ddp: DistributedDataParallel) -> list[nn.Parameter]:
    """What DDP would listen to, were it trainable."""
    ignored = ddp.parameters_to_ignore
    return [parameter for name, parameter in ddp.module.named_parameters() if name not in ignored]


def _listened_to(ddp: DistributedDataParallel) -> frozenset[int]:
    """What the reducer of a DDP that we did not build listens to, by id."""
    parameters = _parameters(ddp)
    told = logged(ddp)
    # torch tells number and size; where they are those of all parameters, it is all of them
    size = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    if told.get('num_parameter_tensors') == len(parameters) and told.get('total_parameter_size_bytes') == size:
        return frozenset(map(id, parameters))
    try:
        buckets = ddp.reducer._get_zeros_like_grad_buckets()
    except RuntimeError:
        # sparse gradients have no bucket before the first backward pass: build it anew at the first forward pass
        return frozenset()
    return frozenset(id(parameter) for bucket in buckets for parameter in bucket.parameters())


def _sync_new(ddp: DistributedDataParallel) -> None:
    """Parameters and buffers that came after the wrapping take the values of the group's first rank."""
    before = set(map(id, ddp._module_parameters)) | set(map(id, getattr(ddp, 'modules_buffers', ())))
    named = (*ddp.module.named_parameters(), *ddp.module.named_buffers())
    new = [tensor for name, tensor in named if id(tensor) not in before and name not in ddp.parameters_to_ignore]
    if new and _has_several_ranks(ddp):
        source = dist.get_global_rank(ddp.process_group, 0)
        with torch.no_grad():
            for tensor in new:
                dist.broadcast(tensor, source, group=ddp.process_group)


def _record(ddp: nn.Module) -> ForwardRecord | None:
    return next((hook for hook in ddp._forward_hooks.values() if isinstance(hook, ForwardRecord)), None)


def _state(ddp: DistributedDataParallel) -> str:
    record = _record(ddp)
    if record is None or record.state == 'unknown':
        # called by ``forward`` directly: the flag of now is the best there is
        return 'averaged' if ddp.require_backward_grad_sync else 'local'
    return record.state


def _is_finalized(ddp: DistributedDataParallel) -> bool:
    try:
        ddp.reducer._check_reducer_finalized()
    except RuntimeError:
        # a part of the parameters is still waiting for another backward pass
        return False
    return True


def _steps_in_backward(hook: Any) -> bool:
    place = getattr(hook, '__module__', '') or ''
    return place.endswith('optimizer_overlap_hooks') or 'hook_then_optimizer' in getattr(hook, '__qualname__', '')
