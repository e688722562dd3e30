"""Writes float32 into the config that ``save_pretrained`` of Hugging Face's models writes beside the weights.

transformers takes the type from the model's parameters, which are 16-bit at the levels that cast, while the state dict has
FP32 values. The file is corrected after it was written: too late for what ``save_pretrained(push_to_hub=True)`` uploads by
itself; ``model.push_to_hub()`` saves first. transformers is never imported here.
"""

from __future__ import annotations

import functools
import re
import sys
from pathlib import Path
from typing import Any

from torch import nn

from .cast_module import holds_casts


def watch() -> None:
    """Correct the configs that are written for cast models from now on, where transformers is imported."""
    base = getattr(sys.modules.get('transformers.modeling_utils'), 'PreTrainedModel', None)
    if base is None or hasattr(base.save_pretrained, 'corrects_type'):
        return
    save = base.save_pretrained

    @functools.wraps(save)
    def save_pretrained(self: nn.Module, folder: Any, is_main_process: bool = True, *args: Any, **kwargs: Any) -> None:
        save(self, folder, is_main_process, *args, **kwargs)
        config = Path(folder, 'config.json')
        if is_main_process and config.is_file() and holds_casts(self):
            # in transformers 4.56 and later 'dtype'
            text = re.sub(r'("(torch_)?dtype": )"b?float16"', r'\1"float32"', config.read_text(encoding='utf-8'))
            config.write_text(text, encoding='utf-8')

    save_pretrained.corrects_type = True  # type: ignore[attr-defined]
    base.save_pretrained = save_pretrained
