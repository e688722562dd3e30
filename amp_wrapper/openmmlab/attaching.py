"""mmengine's models, wrappers and data elements in the terms of the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

from mmengine.hooks import EMAHook
from mmengine.model import BaseAveragedModel, BaseDataPreprocessor, is_model_wrapper
from mmengine.optim import OptimWrapperDict
from mmengine.structures import BaseDataElement
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ..casting import hugging_face
from ..engine import Engine, refuse_direct_steps
from ..engine import attach as engine_attach
from ..engine.ddp import check_foreign_wrapper
from ..policy.levels import Policy
from ..policy.nested import HALF_TYPES, map_tensors, parameters_of

#: What the engine leaves alone, and what stays FP32 as an average.
LEAVE, AVERAGES = (BaseDataPreprocessor,), (BaseAveragedModel,)


def attach(engine: Engine, model: nn.Module, foreign: Iterable[Tensor] = ()) -> None:
    """Attach an engine to a model of mmengine: preprocessors are left alone, averages and data elements leave in FP32.

    Args:
        engine: Not attached yet.
        model: Wrapped or not.
        foreign: Parameters that others step.
    """
    # the engine takes DDP off by itself; mmengine's other wrappers are known only here
    known = isinstance(model, (DataParallel, DistributedDataParallel)) or not is_model_wrapper(model)
    if not known and (engine.policy.casts_model or engine.policy.accumulate_in_fp32):
        check_foreign_wrapper(model)
    inner = model if known else cast(nn.Module, model.module)
    engine_attach(engine, inner, LEAVE, AVERAGES, foreign, cast_data_element)
    hugging_face.watch()
    if engine.optimizer is not None:
        refuse_direct_steps(engine)


def attach_members(engine: Engine, model: nn.Module) -> None:
    """Attach an engine together with those it was joined with, so that all casts are there at the first forward.

    Args:
        engine: Attached or not.
        model: Wrapped or not. Engines that step parameters outside of it are left alone.
    """
    if engine.attached:
        return
    members = {each: parameters_of(each.optimizer) for each in (engine, *engine.others) if each.optimizer is not None}
    inside = {id(parameter) for parameter in model.parameters()}
    for member, stepped in members.items():
        if not member.attached and (member is engine or inside.issuperset(map(id, stepped))):
            attach(member, model, [p for other, theirs in members.items() if other is not member for p in theirs])


def cast_data_element(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Cast 16-bit tensors inside mmengine's data elements, field by field and in place; labels stay what they are.

    Args:
        function: The cast.
        value: Any object; what is no data element is returned as it is.
    """

    def cast_half(tensor: Tensor) -> Tensor:
        return function(tensor) if tensor.dtype in HALF_TYPES else tensor

    for name, field in list(value.items()) if isinstance(value, BaseDataElement) else ():
        new = map_tensors(cast_half, field, cast_data_element)
        if new is not field:
            setattr(value, name, new)
    return value


def amp_wrappers(wrapper: Any) -> dict[str, Any]:
    """Return those of this package among the members of an ``OptimWrapperDict``, by name; under '' a single wrapper.

    Args:
        wrapper: An optimizer wrapper, or what it is built from.
    """
    members = dict(wrapper.items()) if isinstance(wrapper, OptimWrapperDict) else {'': wrapper}
    return {name: member for name, member in members.items() if isinstance(getattr(member, 'policy', None), Policy)}


def wrappers_of(runner: Any) -> dict[str, Any]:
    """Return :func:`amp_wrappers` of what a runner trains with.

    Args:
        runner: Whose wrapper is built or not.
    """
    return amp_wrappers(getattr(runner, 'optim_wrapper', None))


def averages_of(runner: Any) -> list[BaseAveragedModel]:
    """Return the averages of the model that a runner has.

    Args:
        runner: Whose hooks have made them, or will.
    """
    return [hook.ema_model for hook in runner.hooks if isinstance(hook, EMAHook) and hasattr(hook, 'ema_model')]


def inner_model(model: Any) -> nn.Module:
    """Return the model without the wrapper around it, such as DDP.

    Args:
        model: Wrapped or not.
    """
    return cast(nn.Module, model.module if is_model_wrapper(model) else model)
