"""DistributedDataParallel after a cast.

DDP sorts gradients into buckets by the types it finds when it wraps a model, and listens to each parameter. A cast
afterwards ends gradient averaging without a word. mmengine wraps before any optimizer wrapper exists, so DDP has to
look at the cast model once more.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .errors import AmpAttachError

_HOOK_TABLES = (
    '_forward_hooks',
    '_forward_hooks_with_kwargs',
    '_forward_hooks_always_called',
    '_forward_pre_hooks',
    '_forward_pre_hooks_with_kwargs',
    '_backward_hooks',
    '_backward_pre_hooks',
    '_state_dict_hooks',
    '_state_dict_pre_hooks',
    '_load_state_dict_pre_hooks',
    '_load_state_dict_post_hooks',
)


def check_ddp(model: nn.Module) -> None:
    """Refuse, before anything is cast, what :func:`rebuild_ddp` could not carry over.

    Args:
        model: Any module.

    Raises:
        AmpAttachError: A DDP with delayed reductions or its own mixed precision.
    """
    for ddp in _ddps(model):
        if getattr(ddp, 'mixed_precision', None) is not None:
            raise AmpAttachError(
                'DistributedDataParallel(mixed_precision=...) casts the model itself: drop it, the opt level does it.'
            )
        if getattr(ddp, '_delay_all_reduce_params', None):
            raise AmpAttachError(
                'DistributedDataParallel(delay_all_reduce_named_params=...) cannot be combined with a level that casts '
                'the model: drop the argument or use O1.'
            )


def rebuild_ddp(model: nn.Module) -> int:
    """Let every DDP in ``model`` build its reducer anew, with its own settings and communication hooks.

    The objects keep their identity, their subclass, their hooks and their mode. Collective: every rank calls it.

    Args:
        model: The cast model, or a wrapper around it.

    Returns:
        The number of DDP modules found.
    """
    ddps = _ddps(model)
    for ddp in ddps:
        training = ddp.training
        tables = {name: getattr(ddp, name) for name in _HOOK_TABLES if hasattr(ddp, name)}
        comm_hooks = list(getattr(ddp, '_comm_hooks', []))
        DistributedDataParallel.__init__(ddp, ddp.module, **_settings(ddp))
        for name, table in tables.items():
            setattr(ddp, name, table)
        for hook, state in comm_hooks:
            ddp.register_comm_hook(state, hook)
        # nn.Module.__init__ set the flag of the wrapper alone; the module inside kept its own
        ddp.training = training
    return len(ddps)


def _ddps(model: nn.Module) -> list[DistributedDataParallel]:
    return [module for module in model.modules() if isinstance(module, DistributedDataParallel)]


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
    return settings
