"""Translates mmengine's models and optimizer wrappers into what the engine takes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from mmengine.model import BaseAveragedModel, BaseDataPreprocessor, is_model_wrapper
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ..casting import hugging_face
from ..engine import Engine
from ..engine import attach as engine_attach
from ..engine.ddp import check_foreign_wrapper
from .data_elements import cast_data_element


def attach(engine: Engine, model: nn.Module, foreign: Iterable[Tensor] = ()) -> nn.Module:
    """Attach an engine to a model of mmengine: preprocessors are left alone, averages and data elements leave in FP32.

    Args:
        engine: Not attached yet.
        model: Wrapped or not.
        foreign: Parameters that others step.

    Returns:
        The model without mmengine's wrapper.
    """
    # the engine takes DDP off by itself; mmengine's other wrappers are known only here
    known = isinstance(model, (DataParallel, DistributedDataParallel)) or not is_model_wrapper(model)
    if not known and (engine.policy.casts_model or engine.policy.accumulate_in_fp32):
        check_foreign_wrapper(model)
    inner = model if known else cast(nn.Module, model.module)
    engine_attach(
        engine,
        inner,
        leave=(BaseDataPreprocessor,),
        average=(BaseAveragedModel,),
        foreign=foreign,
        enter=cast_data_element,
    )
    hugging_face.watch()
    return inner
