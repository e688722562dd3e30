"""Adds to torch's errors about types where in the model they were raised, and what to do."""

from __future__ import annotations

import re
import sys
from types import TracebackType
from typing import Any

import torch
from torch import nn

from ..compiler_internals import never_compiled
from ..errors import AmpError
from .attached_modules import joined_later
from .cast_hooks import AmpHook
from .modules import class_name

_ABOUT_TYPES = re.compile(r'\bdtypes?\b|Half|BFloat16|float16')
#: What plain FP32 is refused for as well.
_ABOUT_OTHERS = re.compile(r'\b(Long|Int|Byte|Bool)\b|invalid combination of arguments')


class ExplainTypes(AmpHook):
    """Forward hook of a model, called after every exception too: an error of torch about types gets a note.

    Args:
        level: The opt level of the model.
    """

    def __init__(self, level: str) -> None:
        self.level = level

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if output is not None or torch.compiler.is_dynamo_compiling():
            return
        error = sys.exc_info()[1]
        is_meant = isinstance(error, (RuntimeError, TypeError)) and not isinstance(error, AmpError)
        if error is None or not is_meant or hasattr(error, '_amp_wrapper_note'):
            return
        if not _ABOUT_TYPES.search(str(error)) or _ABOUT_OTHERS.search(str(error)):
            return
        place, name = _innermost(module, error.__traceback__)
        if place is None:
            # another call raised it, and is being handled
            return
        note = self._note(place, name)
        error._amp_wrapper_note = note  # type: ignore[attr-defined]
        if sys.version_info >= (3, 11):
            error.add_note(note)
        else:
            error.args = (f'{error}\n{note}', *error.args[1:])

    never_compiled(__call__)

    def _note(self, place: nn.Module, name: str) -> str:
        where = f'{name} ({class_name(place)})' if name else class_name(place)
        if joined_later(place):
            return (
                f'amp: {where} joined the model after mixed precision was attached to it, and its weights are FP32. Initialise '
                f'it by itself before it joins: layer = amp.initialize(layer, opt_level={self.level!r}).'
            )
        # of a model, that would keep all
        keeps = f'keep_fp32=[{name!r}] keeps the module in FP32, ' if name else ''
        return (
            f'amp: raised in {where}, in a forward at {self.level}. Where 16-bit and FP32 meet there, or a function has no '
            f"16-bit kernel, one of these helps: {keeps}fp32_ops=['package.function'] a function, and another opt_level casts "
            f'less.'
        )


def _innermost(root: nn.Module, trace: TracebackType | None) -> tuple[nn.Module | None, str]:
    """The module of a model in whose forward an error was raised, and its name."""
    names = {id(module): name for name, module in root.named_modules()}
    found: nn.Module | None = None
    while trace is not None:
        owner = trace.tb_frame.f_locals.get('self')
        if id(owner) in names:
            found = owner
        trace = trace.tb_next
    return found, names.get(id(found), '')
