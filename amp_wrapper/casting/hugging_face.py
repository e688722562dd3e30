"""Writes the type of the saved weights into the config that ``save_pretrained`` of Hugging Face's models writes beside them.

transformers takes that type from the model's parameters, which are 16-bit at the levels that cast, while the state dict has
FP32 values. The file is corrected after it was written: too late for what ``save_pretrained(push_to_hub=True)`` uploads by
itself; ``model.push_to_hub()`` saves first. transformers is never imported here.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..policy.levels import dtype_name
from .cast_module import holds_casts


def watch() -> None:
    """Correct the configs that are written for cast models from now on, where transformers is imported."""
    base = getattr(sys.modules.get('transformers.modeling_utils'), 'PreTrainedModel', None)
    if base is not None and not hasattr(base.save_pretrained, 'corrects_type'):
        base.save_pretrained = _correcting_the_type(base.save_pretrained)


def _correcting_the_type(save: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(save)
    def save_pretrained(
        self: nn.Module, folder: Any, is_main_process: bool = True, state_dict: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        # without a state dict the model's own is saved, which is FP32; transformers empties those it is given
        given = [
            value for value in (state_dict or {}).values() if isinstance(value, Tensor) and value.is_floating_point()
        ]
        saved = dtype_name(given[0].dtype) if given else 'float32'
        result = save(self, folder, is_main_process, state_dict, *args, **kwargs)
        config = Path(folder, 'config.json')
        if is_main_process and config.is_file() and holds_casts(self):
            values = json.loads(config.read_text(encoding='utf-8'))
            # in transformers 4.56 and later, and in those before
            values.update({name: saved for name in ('dtype', 'torch_dtype') if name in values})
            config.write_text(json.dumps(values, indent=2, sort_keys=True) + '\n', encoding='utf-8')
        return result

    save_pretrained.corrects_type = True  # type: ignore[attr-defined]
    return save_pretrained
