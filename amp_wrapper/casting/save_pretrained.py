"""Lets ``save_pretrained`` of Hugging Face's models write the right type into the config beside the weights.

transformers takes that type from the model's parameters, which are 16-bit at the levels that cast, and writes the config before
it asks for the state dict, whose values are FP32. Its method is wrapped once, when the first such model is attached, and is the
original for all models that are not cast. transformers itself is never imported here.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from ..policy.levels import dtype_name
from .cast_module import holds_casts

_wrapped: set[type] = set()
# in this order: the attribute of transformers 4.56 and later, and the one before
_NAMES = ('dtype', 'torch_dtype')


def watch(models: Iterable[nn.Module]) -> None:
    """Have the configs of these models say what their files hold. Does nothing for models of other kinds.

    Args:
        models: Attached models; Hugging Face's may stand inside of others.
    """
    base = getattr(sys.modules.get('transformers.modeling_utils'), 'PreTrainedModel', None)
    if base is None or base in _wrapped or not any(isinstance(m, base) for model in models for m in model.modules()):
        return
    _wrapped.add(base)
    base.save_pretrained = _saying_the_type(base.save_pretrained)


def _saying_the_type(save: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(save)
    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = getattr(self, 'config', None)
        if config is None or not holds_casts(self):
            return save(self, *args, **kwargs)
        # by position: save_directory, is_main_process, state_dict
        state = args[2] if len(args) > 2 else kwargs.get('state_dict')
        found = _type_of(state)
        write = config.save_pretrained

        def write_config(*words: Any, **options: Any) -> Any:
            # the config copies its own attributes into the file
            vars(config).pop('save_pretrained', None)
            for name in _NAMES:
                if name in vars(config):
                    setattr(config, name, found)
                    break
            return write(*words, **options)

        config.save_pretrained = write_config
        try:
            return save(self, *args, **kwargs)
        finally:
            vars(config).pop('save_pretrained', None)

    return save_pretrained


def _type_of(state: Mapping[str, Any] | None) -> str:
    """Of the first floating tensor; a cast model's own state dict is FP32."""
    for value in () if state is None else state.values():
        if isinstance(value, Tensor) and value.is_floating_point():
            return dtype_name(value.dtype)
    return 'float32'
