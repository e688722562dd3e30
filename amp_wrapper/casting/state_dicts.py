"""The FP32 view of a cast model's state: what is saved, loaded and copied are FP32 values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import logger
from ..policy.nested import HALF_TYPES
from . import fp32_values
from .modules import own_tensors
from .rule import Rule, rule_of


def save(module: nn.Module, state_dict: Any, prefix: str, local_metadata: Any) -> None:
    """Put FP32 values into a state dict, the exact ones where there are masters. A hook of modules that have 16-bit tensors.

    Of a weight and its master, the one that somebody else wrote to last is saved. A weight that was edited through ``.data``
    is saved as well: its master takes the value first, and a warning names it. ``state_dict(keep_vars=True)`` asks for the
    variables and gets them as they are. Once the casts are taken off, this does nothing.
    """
    rule = rule_of(module) or Rule()
    for name, tensor in own_tensors(module) if rule.casts else ():
        key = prefix + name
        value = state_dict.get(key)
        if value is None or value is tensor or tensor.dtype not in HALF_TYPES:
            continue
        # reads the device
        edited = list(filter(fp32_values.differ, fp32_values.agree([tensor])))
        fp32_values.weights_win(edited)
        if edited and rule.policy.verbosity >= 1:
            logger.warning(
                f'amp: {key} was changed by something other than the optimizer. Its FP32 master takes the 16-bit value, and '
                f'loses steps that are too small for 16-bit: name the module in keep_fp32=[...] if it is moved by them; call '
                f'weights_changed() right after an edit that training is to take up at once.'
            )
        state_dict[key] = fp32_values.fp32_value(tensor)


@torch.no_grad()
def load(module: nn.Module, own: Callable[[], None], state_dict: Any, prefix: str) -> None:
    """Load a module, so that values reach the masters unrounded, and parameters keep their identity.

    A weight that is the loaded value rounded gives its master the value itself; one that a loader changed otherwise wins as it
    is, over whatever was written to the weight or its master before.
    What ``assign=True`` replaced is put back: the optimizer and DDP hold the old parameters.

    Args:
        module: With casts.
        own: Calls its ``_load_from_state_dict``, which mmengine's loader calls, too.
        state_dict: Its hooks may change the keys.
        prefix: Of the names of the module.
    """
    before = {name: (tensor, tensor._version) for name, tensor in own_tensors(module)}
    own()
    for name, now in own_tensors(module):
        tensor, version = before.get(name, (now, now._version))
        if now is not tensor:
            tensor.copy_(now)
            setattr(module, name, tensor)
        value = state_dict.get(prefix + name)
        if tensor in fp32_values.pairs and isinstance(value, Tensor) and _is_rounded(value, tensor):
            fp32_values.write_fp32(tensor, value)
        elif tensor._version != version:
            fp32_values.weights_win([tensor])


def _is_rounded(value: Tensor, weight: Tensor) -> bool:
    rounded = value.to(weight.device, torch.float32).to(weight.dtype)
    return rounded.view(torch.int16).equal(weight.detach().view(torch.int16))
