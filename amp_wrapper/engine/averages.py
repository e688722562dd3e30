"""Patches weight averages (torch's, timm's, torch_ema's) to read FP32 values in place of a cast model's 16-bit parameters.

For models without casts the patched methods do what they did. Averages that read ``state_dict()`` or ``amp.master_params``
get FP32 values anyway.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from ..casting import fp32_values
from ..casting.cast_module import is_cast
from ..casting.fp32_values import in_fp32
from ..errors import AmpUsageError
from ..policy.nested import HALF_TYPES
from .buffers.living import averaging


class Fp32View:
    """A model as an average should see it: FP32 values in place of 16-bit tensors, the masters where there are any.

    Args:
        model: A module with casts of this package.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def parameters(self, *args: Any, **kwargs: Any) -> Iterator[Tensor]:
        """As of the model, in FP32."""
        yield from map(in_fp32, self._model.parameters(*args, **kwargs))

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """As of the model, in FP32."""
        for name, parameter in self._model.named_parameters(*args, **kwargs):
            yield name, in_fp32(parameter)

    def buffers(self, *args: Any, **kwargs: Any) -> Iterator[Tensor]:
        """As of the model, in FP32."""
        yield from map(in_fp32, self._model.buffers(*args, **kwargs))

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """As of the model, in FP32."""
        for name, buffer in self._model.named_buffers(*args, **kwargs):
            yield name, in_fp32(buffer)

    def state_dict(self) -> dict[str, Tensor]:
        """As of the model, in FP32. No host read."""
        # keep_vars: the plain variables, without the warning that saving gives
        return {
            name: in_fp32(value) if isinstance(value, Tensor) else value
            for name, value in self._model.state_dict(keep_vars=True).items()
        }

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _reads_a_model(method: Callable[..., Any], attribute: str) -> Callable[..., Any]:
    """A method whose first argument is the model that is averaged; its object holds the average as ``attribute``."""

    @functools.wraps(method)
    def call(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        cast = isinstance(model, nn.Module) and is_cast(model)
        average = getattr(self, attribute)
        known = isinstance(model, nn.Module) and isinstance(average, nn.Module)
        with averaging(average, model) if known else nullcontext():
            return method(self, Fp32View(model) if cast else model, *args, **kwargs)

    return call


def _patch_parameter_lists(cls: Any) -> None:
    """torch_ema's: it is given parameters, copies, reads and writes them (through ``.data``)."""
    original_init, original_load = cls.__init__, cls.load_state_dict

    @functools.wraps(original_init)
    def init(self: Any, parameters: Iterable[Tensor], *args: Any, **kwargs: Any) -> None:
        given = list(parameters)
        original_init(self, given, *args, **kwargs)
        for index, parameter in enumerate(given):
            if fp32_values.has_fp32_value(parameter):
                self.shadow_params[index] = in_fp32(parameter).clone()

    @functools.wraps(original_load)
    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        original_load(self, state_dict)
        # which casts to the type of the parameters
        for index, parameter in enumerate(_given(self, None)):
            for name in ('shadow_params', 'collected_params'):
                values = state_dict.get(name)
                if values is not None and parameter is not None and fp32_values.has_fp32_value(parameter):
                    getattr(self, name)[index] = values[index].detach().to(parameter.device, torch.float32, copy=True)

    cls.__init__ = init
    cls.load_state_dict = load_state_dict
    for name in ('update', 'store', 'copy_to', 'restore'):
        setattr(cls, name, _on_fp32_values(getattr(cls, name), writes=name in ('copy_to', 'restore')))


def _given(average: Any, parameters: Iterable[Tensor] | None) -> Sequence[Tensor]:
    return [found() for found in average._params_refs] if parameters is None else list(parameters)


def _on_fp32_values(method: Callable[..., Any], writes: bool) -> Callable[..., Any]:
    """A method of an average that is given parameters, or remembers some."""

    @functools.wraps(method)
    def call(self: Any, parameters: Iterable[Tensor] | None = None) -> Any:
        given = _given(self, parameters)
        if any(parameter is None for parameter in given) or len(given) != len(self.shadow_params):
            # its own error
            return method(self, parameters if parameters is None else given)
        paired = [fp32_values.has_fp32_value(parameter) for parameter in given]
        if any(pair and mean.dtype in HALF_TYPES for pair, mean in zip(paired, self.shadow_params)):
            raise AmpUsageError(
                f'{type(self).__name__} was made from the 16-bit weights of a model: such an average hardly moves. Make it '
                f'again, from list(amp.master_params(optimizer)), or import its package before amp.initialize().'
            )
        values = [in_fp32(parameter) if pair else parameter for parameter, pair in zip(given, paired)]
        result = method(self, values)
        if writes:
            for parameter, pair, value in zip(given, paired, values):
                if pair:
                    fp32_values.write_fp32(parameter, value)
                elif not parameter.is_inference():
                    # .data leaves no trace, and this may be a master
                    torch.autograd.graph.increment_version(parameter)
        return result

    return call


def _patch_method(name: str, attribute: str) -> Callable[[Any], None]:
    """Patches a class that reads ``parameters()``, ``buffers()`` or ``state_dict()`` of a model in the method ``name``."""
    return lambda cls: setattr(cls, name, _reads_a_model(getattr(cls, name), attribute))


_KNOWN: tuple[tuple[str, str, Callable[[Any], None]], ...] = (
    ('torch.optim.swa_utils', 'AveragedModel', _patch_method('update_parameters', 'module')),
    ('timm.utils.model_ema', 'ModelEma', _patch_method('update', 'ema')),
    ('timm.utils.model_ema', 'ModelEmaV2', _patch_method('update', 'module')),
    ('timm.utils.model_ema', 'ModelEmaV3', _patch_method('update', 'module')),
    ('torch_ema', 'ExponentialMovingAverage', _patch_parameter_lists),
)
_patched: WeakSet[type] = WeakSet()


def patch_loaded() -> None:
    """Let the averages whose packages somebody has imported see FP32 values. Does nothing a second time."""
    for module, name, patch in _KNOWN:
        cls = getattr(sys.modules.get(module), name, None)
        if isinstance(cls, type) and cls not in _patched:
            _patched.add(cls)
            patch(cls)
