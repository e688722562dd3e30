"""A DDP that builds its reducer anew, and is otherwise the same object."""

from __future__ import annotations

import inspect
from typing import Any, cast

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ... import torch_internals

# what nn.Module.__init__ makes anew, and DDP's constructor calls it
_MODULE_FIELDS = tuple(nn.Module().__dict__)
# what DDP's constructor makes anew and its arguments do not tell
_DDP_FIELDS = (
    '_join_config',
    '_ddp_sink_clone',
    '_divide_by_initial_world_size',
    'device_mesh',
    'require_backward_grad_sync',
    'require_forward_param_sync',
)


def rebuild_ddp(ddp: DistributedDataParallel) -> None:
    """Let a DDP build its reducer anew, with its own settings and communication hooks.

    The object keeps its identity, its class, its hooks, mode, and what a subclass put on it. Collective: each rank calls
    it.

    Args:
        ddp: Around a model whose parameters changed their type or ``requires_grad``.
    """
    settings = _settings(ddp)
    before = dict(ddp.__dict__)
    comm_hooks = list(getattr(ddp, '_comm_hooks', []))
    builtin = _builtin_comm_hook(ddp)
    for handle in getattr(ddp, '_accum_grad_hooks', []):
        handle.remove()
    # the old reducer takes its hooks along, and its buckets need not lie beside the new ones
    del ddp.reducer, before['reducer']
    del ddp.logger, before['logger']
    DistributedDataParallel.__init__(ddp, ddp.module, **settings)
    for name in (*_MODULE_FIELDS, *_DDP_FIELDS):
        if name in before:
            ddp.__dict__[name] = before[name]
    for hook, state in comm_hooks:
        ddp.register_comm_hook(state, hook)
    if builtin is not None:
        ddp._register_builtin_comm_hook(builtin)  # type: ignore[no-untyped-call]


def logged(ddp: DistributedDataParallel) -> dict[str, Any]:
    """What the reducer tells about itself: torch keeps it nowhere else."""
    return cast(dict[str, Any], ddp._get_ddp_logging_data())  # type: ignore[no-untyped-call]


def _builtin_comm_hook(ddp: DistributedDataParallel) -> Any:
    """torch keeps built-in communication hooks in the reducer alone; their name is in its log."""
    name = str(logged(ddp).get('comm_hook', '')).rpartition('.')[2]
    return torch_internals.builtin_comm_hooks().get(name)


def _settings(ddp: DistributedDataParallel) -> dict[str, Any]:
    settings: dict[str, Any] = {
        'device_ids': ddp.device_ids,
        'output_device': ddp.output_device,
        'dim': ddp.dim,
        'process_group': ddp.process_group,
        'bucket_cap_mb': ddp.bucket_bytes_cap / (1024 * 1024),
        'find_unused_parameters': ddp.find_unused_parameters,
        'gradient_as_bucket_view': ddp.gradient_as_bucket_view,
        'static_graph': ddp.static_graph,
    }
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    if 'forward_sync_buffers' in known and hasattr(ddp, 'forward_sync_buffers'):
        settings['forward_sync_buffers'] = ddp.forward_sync_buffers
    else:
        settings['broadcast_buffers'] = ddp.broadcast_buffers
    for name in ('skip_all_reduce_unused_params', 'batched_grad_copy'):
        if name in known and hasattr(ddp, name):
            settings[name] = getattr(ddp, name)
    if 'init_sync' in known:
        # the ranks agree already, and a broadcast would only reach the rounded weights, not their masters
        settings['init_sync'] = False
    if getattr(ddp, 'bucket_bytes_cap_default', ddp.bucket_bytes_cap == 25 * 1024 * 1024):
        # without a bound of its own, DDP starts with a small first bucket; an explicit 25 would change that
        settings['bucket_cap_mb'] = None
    sizes = getattr(ddp, 'bucket_bytes_cap_list', None)
    if sizes and 'bucket_cap_mb_list' in known:
        settings['bucket_cap_mb_list'] = [size / (1024 * 1024) for size in sizes]
    return settings
