"""Translates mmengine's models and optimizer wrappers into what the engine takes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from mmengine.model import BaseAveragedModel, BaseDataPreprocessor, is_model_wrapper
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ..casting import hugging_face
from ..engine import Engine
from ..engine import attach as engine_attach
from ..engine.ddp import check_foreign_wrapper
from ..errors import AmpAttachError
from ..policy import Policy
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


def only_ours(wrappers: Iterable[Any], policy: Policy) -> list[Any]:
    """The wrappers of this package, of those that train parts of one model.

    Args:
        wrappers: Of this package, or of mmengine.
        policy: Of the wrapper that is beside them.

    Raises:
        AmpAttachError: One of mmengine.
    """
    ours = []
    for wrapper in wrappers:
        if hasattr(wrapper, 'policy'):
            ours.append(wrapper)
        elif policy.enabled:
            raise AmpAttachError(
                f'{type(wrapper).__name__} of mmengine beside AmpOptimWrapper: gradients that the loss of one brings to '
                f"parameters of the other would carry the wrong loss scale. Write AmpOptimWrapper(opt_level='O0') in its "
                f'place, which trains in FP32.'
            )
    return ours
