"""Records what the last forward call of a DDP has decided about the gradients of the next backward pass."""

from __future__ import annotations

from typing import Any, Literal
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ... import distributed_internals
from ...compiler_internals import constant_when_traced, never_compiled

State = Literal['unknown', 'averaged', 'local', 'spent', 'void']


class ForwardRecord:
    """Forward hook of a DDP, shared by all optimizers that train parts of its module.

    Keeps what a forward call has decided, since mmengine leaves ``no_sync`` before it calls backward.

    Attributes:
        state: 'unknown' before any forward call with gradients; 'averaged' after one that synchronises; 'local' under
            ``no_sync``; 'spent' once a backward pass has used it up: DDP averages once for each forward call; 'void' where
            the reducer was built anew between the forward call and its backward pass.
        parameters: Those that the reducer would listen to, were they trainable.
        reduced: Those that it listens to, by id.
        flags: Which of ``parameters`` were trainable when it was last looked at.
    """

    def __init__(self) -> None:
        self.state: State = 'unknown'
        self.parameters: list[nn.Parameter] = []
        self.reduced: frozenset[int] = frozenset()
        self.flags: list[bool] | None = None

    def __call__(self, module: nn.Module, *_: Any) -> None:
        if torch.is_grad_enabled():
            self.state = 'averaged' if module.require_backward_grad_sync else 'local'

    never_compiled(__call__)

    def __reduce__(self) -> tuple[type[ForwardRecord], tuple[()]]:
        return type(self), ()

    def watch(self, ddp: DistributedDataParallel) -> bool:
        """Be called after forward calls from now on. Whether that is new."""
        is_new = self not in ddp._forward_hooks.values()
        if is_new:
            ddp.register_forward_hook(self)
        return is_new

    def use_up(self, state: Literal['spent', 'void']) -> None:
        """What was to be averaged is averaged ('spent'), or cannot be any more ('void')."""
        if self.state == 'averaged':
            self.state = state


_records: WeakKeyDictionary[nn.Module, ForwardRecord] = WeakKeyDictionary()


def record_of(ddp: DistributedDataParallel) -> ForwardRecord:
    """The one of a DDP, made where there is none."""
    if ddp not in _records:
        _records[ddp] = ForwardRecord()
    return _records[ddp]


def state_of(ddp: DistributedDataParallel) -> State:
    """What the next backward pass through a DDP does with gradients; not 'unknown'."""
    state = record_of(ddp).state
    if state == 'unknown':
        # called by ``forward`` directly: the flag of now is the best there is
        return 'averaged' if ddp.require_backward_grad_sync else 'local'
    return state


class NoticeDdp:
    """Forward pre-hook of a model: takes notice of the DDP that runs it, which nobody hands over.

    Attributes:
        ddp: The one that ran it last, where it was put around the model after that had been cast.
    """

    def __init__(self) -> None:
        self.ddp: ReferenceType[DistributedDataParallel] | None = None

    def __call__(self, module: nn.Module, args: Any) -> None:
        self.notice()

    never_compiled(__call__)

    @constant_when_traced
    def notice(self) -> bool:
        """Take notice; also while a call becomes part of a graph, which DDP itself is no part of."""
        ddp = distributed_internals.active_ddp()
        if ddp is not None:
            self.ddp = ref(ddp)
            record = record_of(ddp)
            if record.watch(ddp):
                # torch may have looked for hooks before this forward call began
                record(ddp)
        return True

    def __deepcopy__(self, memo: dict[int, Any]) -> NoticeDdp:
        return NoticeDdp()

    def __reduce__(self) -> tuple[type[NoticeDdp], tuple[()]]:
        return NoticeDdp, ()
