"""What happens when a cast module is called: casts of inputs, a region, the module itself, casts of outputs."""

from __future__ import annotations

import itertools
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch import nn

from ..compiler_internals import never_compiled_alone
from ..errors import AmpUsageError
from ..policy import said_once
from ..policy.fp32_registry import BCE_WARNING
from ..policy.nested import CASTABLE, HALF_TYPES, cast_tensors, tensors_in
from . import functions, kernels, region, type_errors
from .copies import Copies
from .modules import own_tensors
from .rule import Rule, traced

_FLOAT32 = frozenset({torch.float32})


def call(module: Any, own: Any, args: Any, kwargs: Any) -> Any:
    """Call a module by its rule; who watches it is told from outside of its casts."""
    watchers, output = module._amp_wrapper_link.watchers, None
    if not watchers or torch.compiler.is_compiling():
        return by_rule(module, own, args, kwargs)
    try:
        for watcher in watchers:
            watcher.enter(module, args, kwargs)
        output = by_rule(module, own, args, kwargs)
    finally:
        for watcher in watchers:
            watcher.leave(module, output)
    return output


def by_rule(module: Any, call: Any, args: Any, kwargs: Any) -> Any:
    rule, listener = module._amp_wrapper_rule, module._amp_wrapper_link.listener
    if rule is None or (rule.outermost and region.is_open()):
        return call(*args, **kwargs)
    # a wrapper may have opened a region around the call of the model
    if listener is not None and (rule.is_model or not region.is_open()):
        listener.before_call()
    copies = rule.copies(args, kwargs)
    if copies is None and rule.outputs is None and not rule.opens and not rule.sets_autocast:
        return call(*args, **kwargs)
    before = said_once.speaks(rule.policy.verbosity >= 1) if rule.is_model else None
    is_traced = copies is not None and torch.compiler.is_dynamo_compiling()
    if is_traced:
        traced.append(copies)
    try:
        return _run(module, rule, call, copies, args, kwargs)
    except (RuntimeError, TypeError) as error:
        if rule.is_model:
            type_errors.explain(module, error, rule.policy.opt_level)
        raise
    finally:
        if is_traced:
            traced.pop()
        if copies is not None:
            copies.write_back()
        if before is not None:
            said_once.speaks(before)


def _run(module: Any, rule: Rule, call: Any, copies: Copies | None, args: Any, kwargs: Any) -> Any:
    asks = rule.warning or rule.gives_back
    halves = [tensor.dtype for tensor in tensors_in((args, kwargs)) if tensor.dtype in HALF_TYPES] if asks else []
    caller = halves[0] if halves else None
    if caller is not None and rule.warning:
        said_once.warn_once(rule.warning)
    device = _device(module, args, kwargs) if rule.sets_autocast else 'cpu'
    if copies is not None:
        args, kwargs = rule.cast(copies, args, kwargs)
    if rule.opens or rule.sets_autocast:
        if rule.is_model:
            functions.look_around()
        if rule.opens == region.TABLES:
            kernels.install_tables(device)
        with region.spare(rule.opens), region.operands(rule.opens):
            with region.autocast(device, rule.autocast) if rule.sets_autocast else nullcontext():
                result = call(*args, **kwargs)
    else:
        result = call(*args, **kwargs)
    dtype = caller if rule.gives_back else rule.outputs
    if dtype is None or (rule.only_eval and module.training):
        return result
    if rule.clamps:
        return Copies(dtype).cast(result)
    return cast_tensors(result, dtype, _FLOAT32 if rule.gives_back else CASTABLE, rule.enter)


def _device(module: nn.Module, args: Any, kwargs: Any) -> str:
    """Where a call works: at the first tensor of the module, or at the first that it is handed."""
    for _, tensor in own_tensors(module):
        return tensor.device.type
    return region.device_of(itertools.chain(module.parameters(), module.buffers(), tensors_in((args, kwargs))))


def start_casts(allow_banned: bool = False) -> ExitStack:
    """Turn the casts of O1 and O4 on for everything on this thread, in a model or not: for amp.init, apex's oldest interface.

    It enters the blocks that calls of a model at O1 are in, and leaves them open. Weights are not cached, so that no stale copy
    can exist.

    Args:
        allow_banned: Whether nothing is said about ``binary_cross_entropy`` of 16-bit probabilities.

    Returns:
        Its ``close()`` turns them off, on the same thread.

    Raises:
        AmpUsageError: In a block of ``disable_casts()`` or of autocast, which restores at its end what was on before it, or
            where they are on already.
    """
    if region.is_suspended() or torch.is_autocast_enabled('cpu'):
        raise AmpUsageError(
            'amp.init() in a block of disable_casts() or of torch.autocast, whose end turns its casts off, or where another '
            'handle is active: write it outside, once.'
        )
    functions.install()
    if allow_banned:
        said_once.said.add(BCE_WARNING)
    blocks = ExitStack()
    blocks.callback(said_once.speaks, said_once.speaks(True))
    for device in ('cpu', 'cuda') if torch.cuda.is_available() else ('cpu',):
        kernels.install_tables(device)
        blocks.enter_context(torch.autocast(device, dtype=torch.float16, cache_enabled=False))
    blocks.enter_context(region.spare(region.TABLES))
    return blocks


# where a graph breaks inside of a call it runs as it is, and what it calls may be compiled
never_compiled_alone(globals())
