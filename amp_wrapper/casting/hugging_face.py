"""Writes the type of the saved weights into the config that ``save_pretrained`` of Hugging Face's models writes beside them.

transformers takes that type from the model's parameters, which are 16-bit at the levels that cast, while the state dict has
FP32 values. The file is corrected after it was written: too late for what ``save_pretrained(push_to_hub=True)`` uploads by
itself; ``model.push_to_hub()`` saves first. transformers is never imported here.
"""

from __future__ import annotations

import functools
import inspect
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..policy.levels import dtype_name
from .cast_module import holds_casts


def watch(models: Iterable[nn.Module]) -> None:
    """Correct the configs that are written for cast models of Hugging Face from now on. Does nothing for other models.

    Args:
        models: Attached models; Hugging Face's may stand inside of others.
    """
    base = getattr(sys.modules.get('transformers.modeling_utils'), 'PreTrainedModel', None)
    if base is None or hasattr(base.save_pretrained, 'corrects_type'):
        return
    if any(isinstance(module, base) for model in models for module in model.modules()):
        base.save_pretrained = _correcting_the_type(base.save_pretrained)


def _correcting_the_type(save: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(save)
    def save_pretrained(self: nn.Module, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(save).bind(self, save_directory, *args, **kwargs).arguments
        # without a state dict the model's own is saved, which is FP32; transformers empties those it is given
        state = (value for value in (given.get('state_dict') or {}).values() if isinstance(value, Tensor))
        saved = next((dtype_name(tensor.dtype) for tensor in state if tensor.is_floating_point()), 'float32')
        result = save(self, save_directory, *args, **kwargs)
        config = Path(save_directory, 'config.json')
        is_written = given.get('is_main_process', True) and config.is_file()
        if is_written and holds_casts(self):
            values = json.loads(config.read_text(encoding='utf-8'))
            # in transformers 4.56 and later, and in those before
            values.update({name: saved for name in ('dtype', 'torch_dtype') if name in values})
            config.write_text(json.dumps(values, indent=2, sort_keys=True) + '\n', encoding='utf-8')
        return result

    save_pretrained.corrects_type = True  # type: ignore[attr-defined]
    return save_pretrained
