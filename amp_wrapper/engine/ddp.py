"""Keeps DistributedDataParallel (DDP) averaging gradients, and knows whether the next backward pass does.

DDP sorts gradients into buckets by the types it finds when it wraps a model, and listens to the parameters that are trainable
then. A cast or an unfreezing afterwards ends averaging without a word. mmengine wraps before any optimizer wrapper exists, so
DDP has to build its reducer once more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeGuard
from weakref import ReferenceType, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .. import distributed_internals as internals
from ..casting.masters import Masters
from ..compiler_internals import constant_when_traced, never_compiled
from ..errors import AmpAttachError, AmpUsageError, logger, some
from ..shards import is_sharded


class Notice:
    """Notes whether the next backward pass averages gradients, which DDP decides in its forward call.

    A forward pre-hook of a DDP, one for all engines; and of a model that a DDP may be put around later, which it finds.
    mmengine leaves ``no_sync`` before it calls backward, so the flag of that moment says nothing.

    Attributes:
        ddp: The DDP that ran the model last.
        averages: Of a DDP: whether the next backward pass averages; None before any call with gradients.
        backward_has_begun: Whether that pass has begun.
        listened: The parameters, by id, that its reducer listens to.
    """

    def __init__(self) -> None:
        self.ddp: ReferenceType[DistributedDataParallel] | None = None
        self.averages: bool | None = None
        self.backward_has_begun = False
        self.listened: frozenset[int] = frozenset()

    def __call__(self, module: nn.Module, args: Any) -> None:
        if _is_ddp(module):
            self.note(module)
        else:
            self.find()

    never_compiled(__call__)

    def note(self, ddp: DistributedDataParallel) -> None:
        """Note what a forward call of a DDP decides."""
        if torch.is_grad_enabled():
            # DDP averages in the backward pass that comes next, even if a call under no_sync lies in between
            is_promised = self.averages is True and not self.backward_has_begun
            self.averages, self.backward_has_begun = ddp.require_backward_grad_sync or is_promised, False

    @constant_when_traced
    def find(self) -> bool:
        """Find the DDP that runs the model, also while the call becomes part of a graph, of which DDP itself is no part."""
        ddp = internals.active_ddp()
        if ddp is not None:
            self.ddp = ref(ddp)
            # torch may have looked for hooks of the DDP before this call began
            _notice_of(ddp).note(ddp)
        return True

    def __reduce__(self) -> tuple[type[Notice], tuple[()]]:
        return Notice, ()


class Ddp:
    """The DDPs that average the gradients of one optimizer.

    Args:
        params: What the optimizer steps, and the weights of the model.
        models: Wrapped in DDP, holding DDPs, or neither.
        names: The names of the models' parameters, by id, for messages.
        speaks: Whether to warn of parameters that no DDP averages.

    Attributes:
        ddps: The DDPs that are known so far, of this optimizer or of others.
    """

    def __init__(self, params: Masters, models: Sequence[nn.Module], names: Mapping[int, str], speaks: bool) -> None:
        self._params, self._names, self._speaks = params, names, speaks
        self.ddps = _ddps_in(models)
        # of calls of these DDPs, and of those that will be put around the models, which are found at the DDPs then
        self._notices = [_notice_of(module) for module in (*self.ddps, *models)]
        # the DDPs that average what the optimizer steps, with their parameters, and what was looked at to find them
        self._averaging: dict[DistributedDataParallel, list[nn.Parameter]] = {}
        self._seen: tuple[int, list[int]] = (0, [])
        self._unaveraged: list[str] = []
        # the models, looked through once more at the first step, and how many of the DDPs have equal masters on all ranks
        self._models = [ref(model) for model in models]
        self._alike = len(self.ddps)

    def rebuild(self, changed: Iterable[Tensor]) -> None:
        """Rebuild the reducer of every DDP around a parameter whose type has changed. Collective: each rank calls it.

        Args:
            changed: The parameters whose type is another now.
        """
        ids = {id(parameter) for parameter in changed}
        for ddp in self.ddps:
            if not ids.isdisjoint(map(id, ddp.module.parameters())):
                _rebuild(ddp)

    def follow(self, model: nn.Module, waiting: Callable[[frozenset[int]], bool], is_plain: bool) -> None:
        """Let every DDP listen to the parameters that are trainable now. Collective: each rank calls it.

        Parameters that a DDP has never seen start from the values of its first rank, as in its constructor.

        Args:
            model: What is about to run; perhaps a DDP that was put around the model after it was attached.
            waiting: Returns whether any of these parameters, by id, has a gradient that waits for a step.
            is_plain: Whether ranks may take another number of steps: there is neither a scale nor a master.

        Raises:
            AmpUsageError: A change in the middle of an accumulation; ``DistributedDataParallel.join``.
        """
        for ddp, parameters in self._find(model).items():
            if internals.joins(ddp) and not is_plain:
                raise AmpUsageError('DistributedDataParallel.join(): ranks with one loss scale step together: use O0.')
            now, known, allows_unused = _trainable(parameters), _notice_of(ddp).listened, ddp.find_unused_parameters
            # frozen ones count as unused; with all of them frozen there is no backward pass to wait for
            if not now or now == known or (allows_unused and now < known) or internals.cannot_be_rebuilt(ddp):
                continue
            # a new reducer does not know what was used under no_sync
            if waiting(known | now if allows_unused else known - now):
                raise AmpUsageError('requires_grad changed in the middle of an accumulation: change it between steps.')
            seen = set(map(id, internals.ddp_parameters(ddp)))
            for parameter in [parameter for parameter in parameters if id(parameter) not in seen]:
                dist.broadcast(parameter.detach(), dist.get_global_rank(ddp.process_group, 0), ddp.process_group)
            _rebuild(ddp)

    def start_alike(self) -> None:
        """Give masters the values of the first rank, of which a DDP that was made later gave the weights alone.

        Collective: each rank calls it, in its first step with such a DDP.
        """
        models, self._models = [model() for model in self._models], []
        self._add(_ddps_in(filter(None, models)))
        for ddp in self.ddps[self._alike :]:
            inside, group = set(map(id, _parameters(ddp))), ddp.process_group
            for weight, master in zip(self._params.behind_masters, self._params.masters):
                if id(weight) in inside and group.size() > 1:
                    dist.broadcast(master.detach(), dist.get_global_rank(group, 0), group)
            # the weights have the rounded values already
            self._params.settle()
        self._alike = len(self.ddps)

    def averages(self) -> bool:
        """Return whether the coming backward pass averages gradients over the ranks, in part at least; True without DDP."""
        found = self._find()
        for ddp in found:
            _notice_of(ddp).backward_has_begun = True
        return not found or any(map(_averages, found))

    def is_local(self) -> bool:
        """Return whether the last forward call of any of the DDPs was under ``no_sync``."""
        return not all(map(_averages, self._find()))

    def groups(self) -> list[dist.ProcessGroup]:
        """Return the groups of several ranks that take one decision at each step: those of the DDPs, each once."""
        groups = dict.fromkeys(ddp.process_group for ddp in self._find()) if has_several_processes() else ()
        return [group for group in groups if group.size() > 1]

    def same_everywhere(self) -> bool:
        """Return whether every rank has the same gradients now: plain averages, all of them. False without DDP."""
        plain = not self.is_local() and not self._unaveraged
        return plain and len(self.groups()) == 1 and not any(map(internals.comm_hooks, self._averaging))

    def _find(self, model: nn.Module | None = None) -> dict[DistributedDataParallel, list[nn.Parameter]]:
        """Find the DDPs that average what the optimizer steps, with their parameters, trainable or not."""
        self._add([model, *(notice.ddp() for notice in self._notices if notice.ddp is not None)])
        stepped = self._params.weights() if self.ddps else []
        seen = len(self.ddps), list(map(id, stepped))
        if seen == self._seen:
            return self._averaging
        self._seen = seen
        found = {ddp: _parameters(ddp) for ddp in self.ddps}
        self._averaging = {ddp: inside for ddp, inside in found.items() if not set(seen[1]).isdisjoint(map(id, inside))}
        averaged = {id(parameter) for inside in self._averaging.values() for parameter in inside}
        alone = [weight for weight in stepped if weight.requires_grad and id(weight) not in averaged]
        self._unaveraged = [self._names.get(id(p), f'<parameter of shape {tuple(p.shape)}>') for p in alone]
        if alone and self._speaks and any(ddp.process_group.size() > 1 for ddp in self.ddps):
            self._speaks = False
            logger.warning(
                f'amp: no DistributedDataParallel averages the gradients of {some(self._unaveraged)}, which the optimizer '
                f'steps: each rank trains its own. Wrap the module that holds them, or freeze them.'
            )
        return self._averaging

    def _add(self, modules: Iterable[nn.Module | None]) -> None:
        self.ddps += [module for module in dict.fromkeys(modules) if _is_ddp(module) and module not in self.ddps]


def _is_ddp(module: nn.Module | None) -> TypeGuard[DistributedDataParallel]:
    # mmengine's MMSeparateDistributedDataParallel is a DDP by name that never ran the constructor
    return isinstance(module, DistributedDataParallel) and 'reducer' in vars(module)


def _ddps_in(models: Iterable[nn.Module]) -> list[DistributedDataParallel]:
    return [module for model in models for module in model.modules() if _is_ddp(module)]


def _notice_of(module: nn.Module) -> Notice:
    """Return the hook of a DDP or of a model inside, registered where there is none."""
    known = [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, Notice)]
    if known:
        return known[0]
    notice = Notice()
    if _is_ddp(module):
        now = _trainable(_parameters(module))
        # where some were frozen or unfrozen since DDP was made, it is rebuilt before the next forward call
        notice.listened = now if len(now) == internals.count_listened(module) else frozenset()
    module.register_forward_pre_hook(notice, prepend=True)
    return notice


def _averages(ddp: DistributedDataParallel) -> bool:
    noted = _notice_of(ddp).averages
    # where ``forward`` was called by itself, the flag of now is the best there is
    return ddp.require_backward_grad_sync if noted is None else noted


def _parameters(ddp: DistributedDataParallel) -> list[nn.Parameter]:
    """Return what DDP would listen to, were it trainable."""
    return [parameter for name, parameter in ddp.module.named_parameters() if name not in ddp.parameters_to_ignore]


def _trainable(parameters: Iterable[nn.Parameter]) -> frozenset[int]:
    return frozenset(id(parameter) for parameter in parameters if parameter.requires_grad)


def _rebuild(ddp: DistributedDataParallel) -> None:
    """Give a DDP a new reducer, for parameters that changed their type or ``requires_grad``. Collective."""
    trainable, notice = _trainable(_parameters(ddp)), _notice_of(ddp)
    # DDP refuses a module that is frozen as a whole; the first unfreezing makes up for it
    if trainable:
        internals.renew_reducer(ddp)
    notice.listened = trainable
    # the new reducer knows of no forward call
    notice.averages = None if notice.averages is None else False


def has_several_processes() -> bool:
    """Return whether torch.distributed runs with more than one process."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def check_before_cast(model: nn.Module, inner: nn.Module) -> None:
    """Refuse, before a model is cast, what would stop averaging its gradients then.

    Args:
        model: As it was handed over.
        inner: Without wrappers around it.

    Raises:
        AmpAttachError: A DDP with mixed precision of its own, or with delayed reductions; one around the model that was not
            handed over, where there are several ranks.
    """
    ddps = _ddps_in([model])
    if any(map(internals.cannot_be_rebuilt, ddps)):
        raise AmpAttachError('a DDP with mixed_precision or delayed reductions cannot be cast: use O0, O1 or O4.')
    trained = [(name, p) for name, p in inner.named_parameters() if p.requires_grad and not is_sharded(p)]
    for name, parameter in trained[:1] if has_several_processes() and not ddps else ():
        _accumulation(parameter).metadata['amp_wrapper'] = True
        # torch makes a new one where nobody holds the old one
        if _accumulation(parameter).metadata.pop('amp_wrapper', False):
            raise AmpAttachError(
                f'something listens to the gradient of {name}, such as a DistributedDataParallel, and would stop '
                f'averaging after the cast: hand over the wrapped model, optim_context(ddp) and not its .module.'
            )


def _accumulation(parameter: Tensor) -> Any:
    return parameter.view_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


def check_foreign_wrapper(model: nn.Module) -> None:
    """Refuse, at a level that casts, a model wrapper of which nobody knows whether it averages gradients afterwards.

    Args:
        model: A wrapper that is no DDP. One that hooks on parameters (``register_post_accumulate_grad_hook``) keeps
            working after a cast, and says so by ``survives_cast = True``; one that hooks on autograd's accumulation
            nodes does not.

    Raises:
        AmpAttachError: Several ranks, no DDP inside, and no such attribute.
    """
    if has_several_processes() and not (getattr(model, 'survives_cast', False) or _ddps_in([model])):
        raise AmpAttachError(
            f'{type(model).__name__} is no DistributedDataParallel, and may stop averaging gradients after the cast: derive it '
            f'from MMDistributedDataParallel, set survives_cast = True on it if it hooks on parameters, or use O1.'
        )
