"""The states of sharded models and optimizers: whole on rank 0 for a file, and cut into shards from one."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from mmengine.dist import is_main_process
from mmengine.hooks import EMAHook
from mmengine.optim import BaseOptimWrapper, OptimWrapperDict
from torch import Tensor, nn

from .. import distributed_internals
from ..checkpoint.sharded import rebuilt
from ..policy.nested import parameters_of
from ..shards import any_sharded, is_sharded, shard_like, whole
from ..torch_internals import is_zero
from .wrappers import inner_model

_are_gathered: ContextVar[bool] = ContextVar('_are_gathered', default=False)


@contextmanager
def gathered(runner: Any, with_optimizer: bool = True) -> Iterator[None]:
    """Inside, the states of a runner's model, averages and optimizers are whole, on the CPU of rank 0. Collective.

    mmengine asks for them on rank 0 alone. Where nothing is sharded, they are what they are.

    Args:
        runner: On every rank, about to save a checkpoint.
        with_optimizer: Whether the optimizer is part of it.
    """
    wrapper = getattr(runner, 'optim_wrapper', None)
    members = list(wrapper.values()) if isinstance(wrapper, OptimWrapperDict) else [wrapper]
    zeros = [found for member in members if is_zero(found := getattr(member, 'optimizer', None))]
    if zeros and with_optimizer and not _are_gathered.get():
        with _consolidated(zeros):
            yield
        return
    inner = getattr(runner.model, 'module', None)
    is_sharded_model = isinstance(inner, nn.Module) and any_sharded(inner.parameters())
    if not is_sharded_model or _are_gathered.get():
        yield
        return
    owners = owners_of(runner, with_optimizer)
    states = [gather(owner.state_dict()) for owner in owners]
    with contextlib.ExitStack() as stack:
        if is_main_process():
            for owner, state in zip(owners, states):
                stack.enter_context(giving(owner, state))
        token = _are_gathered.set(True)
        try:
            yield
        finally:
            _are_gathered.reset(token)


def owners_of(runner: Any, with_optimizer: bool) -> list[Any]:
    """Whose state dicts mmengine puts into a checkpoint of a sharded model: the model, its averages, the optimizer wrapper."""
    wrapper = getattr(runner, 'optim_wrapper', None)
    steps = with_optimizer and isinstance(wrapper, BaseOptimWrapper)
    return [runner.model.module, *_averages_of(runner), *([wrapper] if steps else [])]


def _averages_of(runner: Any) -> list[Any]:
    hooks = getattr(runner, 'hooks', ())
    return [hook.ema_model for hook in hooks if isinstance(hook, EMAHook) and hasattr(hook, 'ema_model')]


def layouts_of(runner: Any) -> Callable[[str], Tensor | None]:
    """Which tensor of a runner is laid out as one of a checkpoint, by the name that it has there; None for no sharded one."""
    model = inner_model(runner.model)
    distributed_internals.reshard(model)
    weights = {name: p for name, p in model.named_parameters(remove_duplicate=False) if is_sharded(p)}
    wrapper = getattr(runner, 'optim_wrapper', None)
    members = dict(wrapper.items()) if isinstance(wrapper, OptimWrapperDict) else {'': wrapper}
    stepped: dict[str, Tensor] = {}
    fronts: list[str] = []
    for name, member in members.items():
        optimizer = getattr(member, 'optimizer', None)
        parameters = [] if optimizer is None else parameters_of(optimizer)
        front = f'optimizer/{name}/' if name else 'optimizer/'
        stepped |= {f'{front}state/{index}': p for index, p in enumerate(parameters) if is_sharded(p)}
        fronts.append(front)

    def layout(name: str) -> Tensor | None:
        part, _, rest = name.partition('/')
        if part in ('state_dict', 'ema_state_dict'):
            return weights.get(rest, weights.get(rest.removeprefix('module.')))
        owner, _, last = name.rpartition('/')
        if owner.endswith('window/gradients'):
            # of an open accumulation, in the order of the groups
            return next((stepped.get(f'{front}state/{last}') for front in fronts if name.startswith(front)), None)
        return stepped.get(owner)

    return layout


@contextmanager
def _consolidated(optimizers: Sequence[Any]) -> Iterator[None]:
    """Inside, rank 0 has the whole state of each ``ZeroRedundancyOptimizer``; mmengine's would ask all ranks once more."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    with contextlib.ExitStack() as stack:
        for optimizer in optimizers:
            optimizer.consolidate_state_dict(to=0)
            if is_main_process():
                stack.enter_context(giving(optimizer, ZeroRedundancyOptimizer.state_dict(optimizer)))
        yield


@contextmanager
def giving(owner: Any, state: Any) -> Iterator[None]:
    """Inside, the state dict of an object is a given one."""
    owner.state_dict = lambda *args, **kwargs: state
    try:
        yield
    finally:
        del owner.state_dict


def like_it(value: Mapping[Any, Any]) -> Any:
    """A shallow copy of a dict, which keeps its class and attributes, such as ``_metadata`` of a state dict."""
    return copy.copy(value)


def gather(value: Any) -> Any:
    """Nested lists and dicts with whole tensors in place of sharded ones, on the CPU of rank 0. Collective.

    One tensor is whole on the other ranks at a time.

    Returns:
        On other ranks, sharded tensors are missing: None.
    """
    if isinstance(value, Mapping):
        made = like_it(value)
        for key, item in value.items():
            made[key] = gather(item)
        return made
    if isinstance(value, (list, tuple)):
        return rebuilt(value, [gather(item) for item in value])
    if not is_sharded(value):
        return value
    full = whole(value.detach())
    return full.cpu() if is_main_process() else None


def shard_states(model: nn.Module, state: Any) -> dict[str, Any]:
    """A state dict with shards in place of whole tensors, where those of the model are sharded.

    Args:
        model: Whose parameters and buffers have the names of the state dict.
        state: Not changed.
    """
    distributed_internals.reshard(model)
    mine = {name: tensor for name, tensor in model.named_parameters(remove_duplicate=False) if is_sharded(tensor)}

    def fitting(name: str, value: Any) -> Any:
        like = mine.get(name)
        if like is None or not isinstance(value, Tensor) or is_sharded(value) or value.shape != like.shape:
            return value
        return shard_like(value, like)

    made = like_it(state)
    for name, value in state.items():
        made[name] = fitting(name, value)
    return made  # type: ignore[no-any-return]
