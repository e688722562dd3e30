"""Ways to compile a model that ``amp.initialize`` has cast."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
from torch import nn

from amp_wrapper import amp

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
#: The type that products of matrices have at each level.
HALF = dict(O0=F32, O1=F16, O2=F16, O3=F16, O4=BF16, O5=BF16)
#: Levels whose casts of ops are a table's.
BY_OP = ('O1', 'O4')
WHOLE = functools.partial(torch.compile, backend='aot_eager', fullgraph=True)
#: Where it matters what is traced, and not what becomes of it.
TRACED = functools.partial(torch.compile, backend='eager')
TRACED_WHOLE = functools.partial(TRACED, fullgraph=True)


def fresh() -> dict[str, Any]:
    """Forgets all that was compiled. Gives the counters of torch, which begin anew."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    return torch._dynamo.utils.counters


def initialized(model: nn.Module, level: str, **options: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    return optimizer


Start = tuple[Callable[..., Any], torch.optim.Optimizer]
#: How a model is compiled: before or after ``amp.initialize``, in place, in parts, and inside of a function.
WAYS = ('before', 'after', 'in place', 'parts', 'function')


def start(model: nn.Module, level: str, way: str, by: Any = WHOLE, **options: Any) -> Start:
    """What is called in place of the model, and its optimizer; 'eager' is a way as well."""
    given = by(model) if way == 'before' else model
    optimizer = initialized(given, level, **options)
    if way == 'after':
        return by(model), optimizer
    if way == 'function':
        # a training function around the forward call, with something before and behind
        return by(lambda *args: model(args[0] * 1, *args[1:]) * 1), optimizer
    if way == 'in place':
        model.compile(**by.keywords)
    if way == 'parts':
        model.hidden.compile(**by.keywords)
        model.head = by(model.head)
    return given, optimizer
