"""Casts 16-bit tensors inside mmengine's data elements to FP32, when a model returns them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mmengine.structures import BaseDataElement
from torch import Tensor

from ..policy.nested import HALF_TYPES, map_tensors


def cast_data_element(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Cast 16-bit tensors inside mmengine's data elements, field by field and in place; labels stay what they are.

    Args:
        function: The cast.
        value: Any object; what is no data element is returned as it is.
    """
    if isinstance(value, BaseDataElement):

        def cast(tensor: Tensor) -> Tensor:
            return function(tensor) if tensor.dtype in HALF_TYPES else tensor

        for name, field in list(value.items()):
            new = map_tensors(cast, field, cast_data_element)
            if new is not field:
                setattr(value, name, new)
    return value
