"""Patches weight averages (torch's and timm's) to read FP32 values in place of a cast model's 16-bit parameters.

For models without casts the patched methods do what they did. Averages that read ``state_dict()`` or ``amp.master_params``
get FP32 values anyway.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn

from ..casting.cast_module import is_cast
from ..casting.fp32_values import in_fp32

#: What gives tensors one by one, with their names or without.
_READERS = ('parameters', 'named_parameters', 'buffers', 'named_buffers')


class Fp32View:
    """A model as an average should see it: FP32 values in place of 16-bit tensors, the masters where there are any.

    Args:
        model: A module with casts of this package.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._model, name)
        return functools.partial(self._read, found) if name in _READERS else found

    def _read(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[Any]:
        for item in method(*args, **kwargs):
            yield in_fp32(item) if isinstance(item, Tensor) else (item[0], in_fp32(item[1]))

    def state_dict(self) -> dict[str, Tensor]:
        """Return that of the model in FP32. No host read."""
        # keep_vars: the plain variables, without the warning that saving gives
        return dict(self._read(self._model.state_dict(keep_vars=True).items))


def _reads_a_model(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method whose first argument is the model that is averaged."""

    @functools.wraps(method)
    def call(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        cast = isinstance(model, nn.Module) and is_cast(model)
        return method(self, Fp32View(model) if cast else model, *args, **kwargs)

    return call


#: Module, class, and its method that reads a model.
_KNOWN: tuple[tuple[str, str, str], ...] = (
    ('torch.optim.swa_utils', 'AveragedModel', 'update_parameters'),
    ('timm.utils.model_ema', 'ModelEma', 'update'),
    ('timm.utils.model_ema', 'ModelEmaV2', 'update'),
    ('timm.utils.model_ema', 'ModelEmaV3', 'update'),
)
_patched: WeakSet[type] = WeakSet()


def patch_loaded() -> None:
    """Let the averages whose packages somebody has imported see FP32 values. Does nothing a second time."""
    for module, name, method in _KNOWN:
        cls = getattr(sys.modules.get(module), name, None)
        if isinstance(cls, type) and cls not in _patched:
            _patched.add(cls)
            setattr(cls, method, _reads_a_model(getattr(cls, method)))
