"""The FP32 view of a cast model's state: hooks of ``state_dict()`` and ``load_state_dict()``, and of deep copies."""

from __future__ import annotations

import logging
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from ..policy.nested import HALF_TYPES
from . import fp32_values
from .cast_module import is_cast, rule_of, take_off
from .hooks import AmpHook, StayedBehind, strip_hooks
from .modules import own_tensors

logger = logging.getLogger('amp_wrapper')


class Fp32StateDict(AmpHook):
    """State-dict hook of a module that owns cast tensors: FP32 values, the exact ones where there are masters.

    Of a weight and its master, the one that somebody else wrote to last is saved. A weight that was edited through ``.data``
    is saved as well: its master takes the value first, and a warning names it. ``state_dict(keep_vars=True)`` asks for the
    variables and gets them as they are.

    Args:
        module: Held by a weak reference, which neither copies nor pickled modules have.
        speaks: Whether there are warnings.
    """

    # of copies as well
    speaks = True

    def __init__(self, module: nn.Module, speaks: bool = True) -> None:
        self._owner: ReferenceType[nn.Module] | None = ref(module)
        self.speaks = speaks

    def __call__(self, module: nn.Module, state_dict: Any, prefix: str, local_metadata: Any) -> None:
        for name, tensor in own_tensors(module):
            key = prefix + name
            value = state_dict.get(key)
            if value is None or value is tensor or tensor.dtype not in HALF_TYPES:
                continue
            # reads the flag of a master from the device
            if bool(fp32_values.take_up_edits(tensor)) and self.speaks:
                logger.warning(
                    f'amp: {key} was changed by something other than the optimizer. Its FP32 master takes the 16-bit value: '
                    f'steps that are too small for 16-bit are lost. Name the module in keep_fp32=[...] where it is moved in '
                    f'small steps; call weights_changed() right after an edit that training is to take up at once.'
                )
            exact = fp32_values.fp32_value(tensor)
            state_dict[key] = tensor.detach().float() if exact is None else exact

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A deep copy of a module that is trained is FP32. Its own tensors are copied before its hooks are."""
        owner = None if self._owner is None else self._owner()
        if self.stays_behind and owner is not None:
            for _, tensor in own_tensors(owner):
                copied = memo.get(id(tensor))
                if isinstance(copied, Tensor) and copied is not tensor:
                    _become_fp32(copied, tensor)
            return StayedBehind()
        hook = Fp32StateDict.__new__(Fp32StateDict)
        hook._owner = None
        return hook

    def __getstate__(self) -> dict[str, Any]:
        return {'_owner': None}


class LoadFp32(AmpHook):
    """Pair of load hooks: loaded values reach the masters unrounded, and parameters keep their identity.

    ``before`` runs inside ``_load_from_state_dict``, so mmengine's own loader triggers it too, and remembers what is
    about to be loaded. ``after`` sees what became of it: a weight that is the loaded value rounded gives its master the
    value itself; a weight that somebody changed otherwise wins as it is. It also repairs what ``assign=True`` replaced:
    the optimizer and DDP hold the old parameters.
    """

    def __init__(self) -> None:
        self.parameters: dict[str, Tensor] = {}
        self.values: dict[str, Tensor] = {}
        self.versions: dict[str, int] = {}
        # on a deep copy that is FP32
        self.idle = False

    def before(self, module: nn.Module, state_dict: Any, prefix: str, *_: Any) -> None:
        if self.idle:
            return
        self.parameters = dict(own_tensors(module))
        self.versions = {name: tensor._version for name, tensor in self.parameters.items()}
        found = {name: state_dict.get(prefix + name) for name in self.parameters}
        self.values = {name: value for name, value in found.items() if isinstance(value, Tensor) and not value.is_meta}

    @torch.no_grad()
    def after(self, module: nn.Module, incompatible_keys: Any) -> None:
        if self.idle:
            return
        before, self.parameters = self.parameters, {}
        values, self.values = self.values, {}
        versions, self.versions = self.versions, {}
        for name, now in list(own_tensors(module)):
            old, value = before.get(name, now), values.get(name)
            if now is not old:
                owner: dict[str, Any] = module._parameters if name in module._parameters else module._buffers
                old.copy_(now)
                owner[name] = old
            if (
                old.dtype in HALF_TYPES
                and value is not None
                and value.shape == old.shape
                and fp32_values.has_fp32_value(old)
            ):
                value = value.to(old.device, torch.float32)
                if value.to(old.dtype).view(torch.int16).equal(old.detach().view(torch.int16)):
                    fp32_values.write_fp32(old, value)
                    continue
            if old._version != versions.get(name):
                # newer than whatever was written to the weight or its master before
                fp32_values.weights_win([old])

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # torch holds its methods, which a copy keeps
        hook = memo[id(self)] = LoadFp32()
        hook.idle = self.idle or self.stays_behind
        return hook

    def __getstate__(self) -> dict[str, Any]:
        return {'parameters': {}, 'values': {}, 'versions': {}, 'idle': self.idle}


def restore_fp32_copy(copied: nn.Module, original: nn.Module) -> bool:
    """Turn a deep copy of a cast model into a plain FP32 one that holds the original's masters.

    Args:
        copied: A deep copy of ``original``; changed in place, its parameters keep their identity.
        original: A model, cast or not.

    Returns:
        Whether there was anything to do.
    """
    pairs = [
        (mine, theirs)
        for module, source in zip(copied.modules(), original.modules())
        if (rule := rule_of(source)) is not None and rule.casts
        for (_, mine), (_, theirs) in zip(own_tensors(module), own_tensors(source))
    ]
    had_hooks = is_cast(copied)
    strip_hooks(copied)
    for module in copied.modules():
        take_off(module)
    for mine, theirs in pairs:
        _become_fp32(mine, theirs)
    return had_hooks


def _become_fp32(mine: Tensor, theirs: Tensor) -> None:
    """A copied tensor takes the FP32 value of its original, and keeps its identity."""
    if mine.dtype in HALF_TYPES:
        fp32_values.take_up_edits(theirs)
        exact = fp32_values.fp32_value(theirs)
        mine.data = theirs.detach().float() if exact is None else exact.clone()
        mine.grad = None
