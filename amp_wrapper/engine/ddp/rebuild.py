"""Finds the parameters that the reducer of a DDP listens to, and makes a DDP build a new reducer in place."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ... import distributed_internals
from .forward_record import record_of

# arguments of DDP's constructor that it keeps under their names
_ARGUMENTS = """
    device_ids output_device dim process_group broadcast_buffers forward_sync_buffers static_graph find_unused_parameters
    gradient_as_bucket_view skip_all_reduce_unused_params batched_grad_copy
"""
# what nn.Module.__init__ makes anew, and DDP's constructor calls it
_MODULE_FIELDS = tuple(nn.Module().__dict__)


def look_at(ddp: DistributedDataParallel) -> list[nn.Parameter]:
    """Find the parameters of now; new ones, and new buffers, take the values of the group's first rank.

    Returns:
        The parameters.
    """
    parameters, record = _parameters(ddp), record_of(ddp)
    if not record.parameters:
        trainable = frozenset(id(parameter) for parameter in parameters if parameter.requires_grad)
        # where some were frozen or unfrozen since DDP was made, it is built anew at the first forward call
        record.reduced = trainable if len(trainable) == distributed_internals.count_listened(ddp) else frozenset()
    if list(map(id, record.parameters)) != list(map(id, parameters)):
        record.parameters, record.flags = parameters, None
    before = set(map(id, distributed_internals.ddp_parameters(ddp))) | set(map(id, getattr(ddp, 'modules_buffers', ())))
    named = (*ddp.module.named_parameters(), *ddp.module.named_buffers())
    new = [tensor for name, tensor in named if id(tensor) not in before and name not in ddp.parameters_to_ignore]
    if new and has_several_ranks(ddp):
        source = dist.get_global_rank(ddp.process_group, 0)
        with torch.no_grad():
            for tensor in new:
                dist.broadcast(tensor, source, group=ddp.process_group)
    return parameters


def rebuild(ddp: DistributedDataParallel) -> None:
    """Let a DDP listen to the parameters that are trainable now. Collective: each rank calls it.

    With ``find_unused_parameters`` frozen ones stay in the reducer: those that are frozen by turns must not drop out by turns.

    Args:
        ddp: After :func:`look_at`.
    """
    parameters, record = _parameters(ddp), record_of(ddp)
    keep = record.reduced if ddp.find_unused_parameters else ()
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
    record.parameters, record.reduced, record.flags = parameters, trainable, None
    record.use_up('void')


def has_several_ranks(ddp: DistributedDataParallel) -> bool:
    """Whether there is anything to average."""
    return ddp.process_group.size() > 1


def _parameters(ddp: DistributedDataParallel) -> list[nn.Parameter]:
    """What DDP would listen to, were it trainable."""
    ignored = ddp.parameters_to_ignore
    return [parameter for name, parameter in ddp.module.named_parameters() if name not in ignored]


def rebuild_ddp(ddp: DistributedDataParallel) -> None:
    """Let a DDP build its reducer anew, with its own settings and communication hooks.

    The object keeps its identity, its class, its hooks, mode, and what a subclass put on it. Collective: each rank calls
    it.

    Args:
        ddp: Around a model whose parameters changed their type or ``requires_grad``.
    """
    settings = _settings(ddp)
    before = dict(ddp.__dict__)
    comm_hooks = distributed_internals.comm_hooks(ddp)
    # the old reducer takes its hooks along, and its buckets need not lie beside the new ones
    del ddp.reducer, before['reducer']
    del ddp.logger, before['logger']
    DistributedDataParallel.__init__(ddp, ddp.module, **settings)
    for name in (*_MODULE_FIELDS, *distributed_internals.DDP_FIELDS.split()):
        if name in before:
            ddp.__dict__[name] = before[name]
    for hook, state in comm_hooks:
        ddp.register_comm_hook(state, hook)


def _settings(ddp: DistributedDataParallel) -> dict[str, Any]:
    """The arguments that a DDP was made with, as far as this torch knows them."""
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    settings = {name: getattr(ddp, name) for name in _ARGUMENTS.split() if name in known and hasattr(ddp, name)}
    if 'forward_sync_buffers' in settings:
        # its other name
        settings.pop('broadcast_buffers', None)
    if 'init_sync' in known:
        # the ranks agree already, and a broadcast would only reach the rounded weights, not their masters
        settings['init_sync'] = False
    # without a bound of its own, DDP starts with a small first bucket; an explicit 25 would change that
    is_default = getattr(ddp, 'bucket_bytes_cap_default', ddp.bucket_bytes_cap == 25 * 1024 * 1024)
    settings['bucket_cap_mb'] = None if is_default else ddp.bucket_bytes_cap / (1024 * 1024)
    sizes = getattr(ddp, 'bucket_bytes_cap_list', None)
    if sizes and 'bucket_cap_mb_list' in known:
        settings['bucket_cap_mb_list'] = [size / (1024 * 1024) for size in sizes]
    return settings
