"""Adds to torch's errors about types where in the model they were raised, and what to do."""

from __future__ import annotations

import re
from types import TracebackType

from torch import nn

from ..errors import AmpError
from .modules import class_name
from .rule import rule_of

_ABOUT_TYPES = re.compile(r'\bdtypes?\b|Half|BFloat16|float16')
#: What plain FP32 is refused for as well.
_ABOUT_OTHERS = re.compile(r'\b(Long|Int|Byte|Bool)\b|invalid combination of arguments')
_NOTE = '\namp: '


def explain(model: nn.Module, error: BaseException, level: str) -> None:
    """Give an error of torch about types a note.

    Args:
        model: Whose call raised it.
        error: Other errors are left alone.
        level: The opt level of the model.
    """
    text = str(error)
    about_types = _ABOUT_TYPES.search(text) and not _ABOUT_OTHERS.search(text)
    if not about_types or isinstance(error, AmpError) or _NOTE in text:
        return
    place, name = _innermost(model, error.__traceback__)
    where = f'{name} ({class_name(place)})' if name else class_name(place)
    # of a model, that would keep all
    keeps = f'keep_fp32=[{name!r}] keeps the module in FP32, ' if name else ''
    note = (
        f'raised in {where}, in a forward at {level}. Where 16-bit and FP32 meet there, or a function has no 16-bit '
        f"kernel, one of these helps: {keeps}fp32_ops=['package.function'] a function, and another opt_level casts less."
    )
    has_rules = any(rule_of(module) is not None for module in place.modules())
    if not has_rules and any(True for _ in place.parameters()):
        note = (
            f'{where} joined the model after mixed precision was attached to it, and its weights are FP32. Initialise '
            f'it by itself before it joins: layer = amp.initialize(layer, opt_level={level!r}).'
        )
    error.args = (f'{text}{_NOTE}{note}', *error.args[1:])


def _innermost(root: nn.Module, trace: TracebackType | None) -> tuple[nn.Module, str]:
    """The module of a model in whose forward an error was raised, and its name."""
    names = {id(module): name for name, module in root.named_modules()}
    found = root
    while trace is not None:
        owner = trace.tb_frame.f_locals.get('self')
        if isinstance(owner, nn.Module) and id(owner) in names:
            found = owner
        trace = trace.tb_next
    return found, names[id(found)]
