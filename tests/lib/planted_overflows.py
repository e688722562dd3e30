"""Faults that are planted in known places of a small model, and what the diagnosis has to name."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from amp_wrapper import Diagnosis, amp

ALL = ('O0', 'O1', 'O2', 'O3', 'O4', 'O5')
FLOAT16 = ('O1', 'O2', 'O3')
DEEP = 'blocks.2.place'

Act = Callable[[Tensor], Tensor]


class ScaleGradient(torch.autograd.Function):
    """The identity, whose gradient is multiplied."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


class WriteOutside(torch.autograd.Function):
    """An op that torch sees nothing of, as those of mmcv are: it writes NaN into the memory of a result.

    With ``reads``, a copy of the input shows what it reads; without, nobody can tell.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, only_16bit: bool = False, reads: bool = True) -> Tensor:
        result = x.new_zeros(x.shape)
        if reads:
            result.copy_(x)
        if not only_16bit or x.dtype is not torch.float32:
            # all bits are ones: NaN in every type
            ctypes.memset(result.data_ptr(), 0xFF, result.element_size() * result.numel())
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient, None, None


def contiguous(x: Tensor) -> Tensor:
    """A graph of torch 2.6 has no place for the method itself."""
    return x.contiguous()


class Fault(nn.Module):
    """Does what it is told to its input."""

    def __init__(self, act: Act) -> None:
        super().__init__()
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x)


class Block(nn.Module):
    """Two layers with a residual, checkpointed on request, and a place for a fault between them."""

    def __init__(self, checkpointed: str = '') -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 8), nn.Linear(8, 8)
        self.place: nn.Module = nn.Identity()
        self.checkpointed = checkpointed

    def inner(self, x: Tensor) -> Tensor:
        return self.fc2(self.place(self.fc1(x)).relu())

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointed:
            return x + checkpoint(self.inner, x, use_reentrant=self.checkpointed == 'reentrant')
        return x + self.inner(x)


class Deep(nn.Module):
    """Three blocks; three outputs on request; a loss of its own on request."""

    def __init__(self, checkpointed: str = '', outputs: int = 1, loss: nn.Module | None = None) -> None:
        super().__init__()
        self.stem, self.norm = nn.Linear(4, 8), nn.BatchNorm1d(8)
        self.blocks = nn.ModuleList([Block(checkpointed) for _ in range(3)])
        self.heads = nn.ModuleList([nn.Linear(8, 2) for _ in range(outputs)])
        self.loss = loss
        #: What the model itself does between its modules.
        self.between: Act = contiguous

    def forward(self, x: Tensor) -> Any:
        x = self.norm(self.stem(x))
        for block in self.blocks:
            x = block(x)
        x = self.between(x)
        outputs = tuple(head(x) for head in self.heads)
        if self.loss is not None:
            return self.loss(outputs[0])
        return outputs if len(outputs) > 1 else outputs[0]


class RatioLoss(nn.Module):
    """0 divided by 0."""

    def forward(self, output: Tensor) -> Tensor:
        nothing = (output * 0).sum()
        return square(output) + nothing / nothing


def square(output: Tensor) -> Tensor:
    return output.float().square().mean()


def in_range_of_fp32(x: Tensor) -> Tensor:
    """Out of the range of float16 on the way."""
    return (x * 1e6) / 1e6


def nan_input(x: Tensor) -> Tensor:
    x = x.clone()
    x[2, 1] = torch.nan
    return x


def huge_gradient(x: Tensor) -> Tensor:
    return ScaleGradient.apply(x, 1e25)


def root_at_zero(x: Tensor) -> Tensor:
    return x + (x * 0).sqrt()


def root_below_zero(x: Tensor) -> Tensor:
    return x + (x * 0 - 1).sqrt()


def written_if_bad(x: Tensor) -> Tensor:
    return WriteOutside.apply(x, False, False) if not x.isfinite().all() else x


def all_masked(x: Tensor) -> Tensor:
    return x * x.masked_fill(torch.ones_like(x, dtype=torch.bool), -torch.inf).softmax(-1)


def partly_masked_and_huge(x: Tensor) -> Tensor:
    mask = torch.zeros_like(x).index_fill(-1, torch.tensor([0]), -torch.inf)
    return in_range_of_fp32(x) * (x + mask).softmax(-1)


def batches(steps: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(6, 4, generator=generator) for _ in range(steps)]


def examine(
    model: nn.Module,
    level: str,
    inputs: Sequence[Any],
    loss_fn: Callable[[Any], Tensor] = square,
    optimizer: torch.optim.Optimizer | None = None,
    before: Callable[[int, nn.Module, torch.optim.Optimizer], None] | None = None,
    passes: int = 1,
    folder: Any = None,
    call: Callable[[Any], Any] | None = None,
    **options: Any,
) -> list[Diagnosis]:
    """Train a script on each of ``inputs`` once, and give what was found out about skipped steps.

    Args:
        before: Called before each forward pass with its number.
        passes: Backward passes of a step; their gradients stay scaled until the last one.
        folder: Of reports.
        call: What is called in place of the model.
    """
    if level == 'O0':
        # with a static one, nothing is checked
        options.setdefault('loss_scale', 'dynamic')
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, **{'verbosity': 0, **options})
    with amp.monitor(optimizer, folder=folder) as watch:
        for index, x in enumerate(inputs):
            last = (index + 1) % passes == 0
            if before is not None:
                before(index, model, optimizer)
            with amp.scale_loss(loss_fn((call or model)(x)), optimizer, delay_unscale=not last) as scaled:
                scaled.backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
    return watch.diagnoses


@dataclasses.dataclass(frozen=True)
class Planted:
    """One fault: where it is planted, and what has to be named."""

    name: str
    levels: tuple[str, ...]
    cause: str
    module: str = ''
    act: Act | None = None
    spoil: Act = lambda x: x
    phase: str = ''
    op: str = ''
    checkpointed: str = ''
    loss: type[nn.Module] | None = None
    loss_fn: Callable[[Any], Tensor] = square
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


_FORWARD: dict[str, Any] = {'module': DEEP, 'phase': 'forward'}
_BACKWARD: dict[str, Any] = {'module': DEEP, 'phase': 'backward'}
_HALF = ('O1', 'O2')
TABLE = [
    Planted('nan in the input', ALL, 'input', spoil=nan_input),
    Planted('input out of range', FLOAT16, 'forward_range', spoil=lambda x: x * 1e6),
    Planted('forward out of range', FLOAT16, 'forward_range', act=in_range_of_fp32, **_FORWARD),
    Planted('forward nan', ALL, 'forward_nan', act=root_below_zero, **_FORWARD),
    Planted('an op outside of torch', ('O1', 'O2', 'O5'), 'forward_nan', act=WriteOutside.apply, **_FORWARD),
    Planted('in 16-bit alone', ('O2', 'O5'), 'forward_range', act=lambda x: WriteOutside.apply(x, True), **_FORWARD),
    Planted('before an op outside torch', _HALF, 'forward_range', f'{DEEP}.0', act=in_range_of_fp32, phase='forward'),
    Planted('everything masked', ('O1', 'O2', 'O5'), 'forward_nan', act=all_masked, op='softmax', **_FORWARD),
    Planted('a mask beside it', _HALF, 'forward_range', act=partly_masked_and_huge, **_FORWARD),
    Planted('loss in the model', ALL, 'forward_nan', 'loss', loss=RatioLoss, phase='forward'),
    Planted('loss outside', ALL, 'loss', loss_fn=lambda output: square(output) * torch.nan),
    Planted('gradient of a loss outside', ('O2', 'O5'), 'loss', loss_fn=lambda y: square(root_at_zero(y.float()))),
    Planted('gradient out of range', FLOAT16, 'gradient_range', act=huge_gradient, **_BACKWARD),
    Planted('gradient nan', ALL, 'gradient_nan', act=root_at_zero, **_BACKWARD),
    Planted(
        'loss scale too large',
        FLOAT16,
        'gradient_scale',
        act=lambda x: ScaleGradient.apply(x, 2.0**10),
        options={'loss_scale': 2.0**11},
        **_BACKWARD,
    ),
]
for _kind in ('reentrant', 'not reentrant'):
    TABLE += [
        Planted(f'forward, {_kind}', _HALF, 'forward_range', act=in_range_of_fp32, checkpointed=_kind, **_FORWARD),
        Planted(f'gradient, {_kind}', _HALF, 'gradient_range', act=huge_gradient, checkpointed=_kind, **_BACKWARD),
    ]


def train(each: Planted, level: str) -> list[Diagnosis]:
    """Plant a fault, and train for a step."""
    torch.manual_seed(0)
    model = Deep(each.checkpointed, loss=None if each.loss is None else each.loss())
    if each.act is not None:
        fault = Fault(each.act)
        within = each.module.endswith('.0')
        model.blocks[2].place = nn.Sequential(fault, Fault(written_if_bad)) if within else fault
    loss_fn = (lambda output: output) if each.loss is not None else each.loss_fn
    return examine(model, level, [each.spoil(x) for x in batches(1)], loss_fn, **each.options)


def named_as_planted(each: Planted, level: str, found: Diagnosis) -> bool:
    # without a cast of the whole model, the first module casts its input
    place = 'stem' if (each.name, level) == ('input out of range', 'O1') else each.module
    return (found.cause, found.module, found.phase) == (each.cause, place, each.phase or found.phase)
