"""Models, and ways to compile them: what several files about ``torch.compile`` share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from amp_wrapper import amp
from amp_wrapper.autocast.patching import graphs_are_gone

#: The type that products of matrices have at each level.
HALF = dict(
    O0=torch.float32, O1=torch.float16, O2=torch.float16, O3=torch.float16, O4=torch.bfloat16, O5=torch.bfloat16
)
#: Levels whose casts of ops are a table's.
BY_OP = ('O1', 'O4')
#: How a model is compiled: before or after ``amp.initialize``, in place, as a part, and inside of a function.
WAYS = ('before', 'after', 'in place', 'parts', 'function')


class IsOf(nn.Module):
    """Asserts the type of what goes through it; in a graph, while it is traced."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        assert x.dtype is self.dtype, f'{x.dtype}, not {self.dtype}'
        return x


def products_are_saved() -> Any:
    """The contexts of selective checkpointing: products of matrices are kept, the rest runs again."""
    return create_selective_checkpoint_contexts([torch.ops.aten.mm.default, torch.ops.aten.addmm.default])


class Hidden(nn.Sequential):
    """A part of a class of its own: ``compile()`` of torch's own classes compiles nothing in some versions."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Net(nn.Module):
    """Norms with and without statistics, attention, dropout and two losses; asserts the types that a level gives.

    Args:
        level: Whose types are asserted; None for none.
        reentrant: The kind of activation checkpointing; None for none.
        dropout: Its probability.
    """

    def __init__(self, level: str | None = None, reentrant: bool | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        half = torch.float32 if level is None else HALF[level]
        self.level, self.reentrant = level, reentrant
        #: Whether checkpointing is selective.
        self.selects = False
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.layer_norm = nn.LayerNorm(16)
        self.hidden = Hidden(nn.Linear(16, 32), nn.GELU(), nn.Dropout(dropout), nn.Linear(32, 16))
        self.narrow = IsOf(half) if level else nn.Identity()
        self.wide = IsOf(torch.float32) if level else nn.Identity()
        self.by_op = self.wide if level in BY_OP else self.narrow
        self.head = nn.Linear(16, 5)
        self.loss = nn.CrossEntropyLoss()

    def block(self, x: Tensor) -> Tensor:
        """Attention, and what follows it."""
        y = self.layer_norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.narrow(self.hidden(self.layer_norm(x)))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        x = F.relu(self.norm(self.narrow(self.conv(x))))
        x = x.flatten(2)
        if self.selects:
            x = checkpoint(self.block, x, use_reentrant=False, context_fn=products_are_saved)
        else:
            x = self.block(x) if self.reentrant is None else checkpoint(self.block, x, use_reentrant=self.reentrant)
        scores = self.narrow(self.head(x.mean(1)))
        self.by_op(torch.softmax(scores, -1))
        self.by_op(scores**2)
        self.wide(torch.linalg.matrix_norm(scores.float()))
        if labels is None:
            return scores
        losses = self.wide(F.cross_entropy(scores, labels)), self.wide(self.loss(scores, labels))
        return losses[0] + losses[1]


def batch(device: torch.device, bad: bool = False) -> tuple[Tensor, Tensor]:
    """Eight pictures and their labels; with NaN in one where ``bad`` is set."""
    x, labels = torch.randn(8, 1, 4, 4), torch.randint(0, 5, (8,))
    if bad:
        x[0, 0, 0, 0] = float('nan')
    return x.to(device), labels.to(device)


@contextmanager
def fresh() -> Iterator[Any]:
    """Nothing is compiled before, and nothing stays compiled. Gives the counters of torch."""
    torch.compiler.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    try:
        yield counters
    finally:
        torch.compiler.reset()
        counters.clear()
        graphs_are_gone()
        assert torch._C._len_torch_function_stack() == 0
        assert not torch.is_autocast_enabled('cpu')
        # what is left open would keep casts of weights from test to test
        assert torch.autocast_increment_nesting() == 1
        torch.autocast_decrement_nesting()


def compiled(model: nn.Module, way: str, backend: Any = 'aot_eager', fullgraph: bool = True) -> Callable[..., Any]:
    """What is called in place of ``model``, after ``amp.initialize``; 'eager' is a way as well."""
    words: dict[str, Any] = dict(backend=backend, fullgraph=fullgraph)
    if way == 'function':
        # a training function around the forward call, with something before and behind
        return torch.compile(lambda *args: model(args[0] * 1, *args[1:]) * 1, **words)
    if way == 'in place':
        model.compile(**words)
    elif way == 'parts':
        model.hidden.compile(**words)
        model.head = torch.compile(model.head, **words)
    elif way == 'after':
        return torch.compile(model, **words)
    return model


def initialized(
    model: nn.Module, way: str, level: str, backend: Any = 'aot_eager', lr: float = 0.05, **options: Any
) -> tuple[Callable[..., Any], torch.optim.Optimizer]:
    """A compiled model and its optimizer, after ``amp.initialize``."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    if way == 'before':
        wrapper = torch.compile(model, backend=backend, fullgraph=True)
        given, optimizer = amp.initialize(wrapper, optimizer, opt_level=level, verbosity=0, **options)
        assert given is wrapper
        return wrapper, optimizer
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    return compiled(model, way, backend), optimizer


def step(call: Callable[..., Any], optimizer: torch.optim.Optimizer, batches: list[tuple[Tensor, Tensor]]) -> Tensor:
    """One optimizer step on some batches; the last loss."""
    for x, labels in batches:
        loss = call(x, labels) / len(batches)
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()
