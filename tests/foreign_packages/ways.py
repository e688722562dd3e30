"""One training, three ways: a plain FP32 loop, ``amp.initialize``, ``AmpOptimWrapper``; and what is compared between them."""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from bits import same
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_wrapper import AmpOptimWrapper, amp
from amp_wrapper.errors import AmpError

LEVELS = ('O1', 'O2', 'O4', 'O5')
APIS = ('functional', 'mmengine')
CAST = {'O2': torch.float16, 'O5': torch.bfloat16}
#: The first steps of a search for a scale are skipped: with this one no step is, so that each has its counterpart in FP32.
SCALE: dict[str, Any] = dict(init_scale=2.0**7, growth_interval=7)
FIXED = 2.0**7
Batch = tuple[Tensor, Tensor]


class DigitsNet(nn.Module):
    """Convolutions, BatchNorm, dropout, LayerNorm, two linear layers, for 8 x 8 images of ten classes."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2), nn.BatchNorm2d(8)
        )
        self.hidden = nn.Linear(72, 32)
        self.norm = nn.LayerNorm(32)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.features(images)).flatten(1)
        return self.head(self.dropout(F.gelu(self.norm(self.hidden(x)))))


class LinearNet(nn.Module):
    """Its loss is linear in weights and small dyadic numbers, so gradients are the same bits at every level."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 8)
        self.out = nn.Linear(16, 4, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.fc(x), self.out(x)


_digits: list[Batch] = []


def digits(index: int, size: int = 32) -> Batch:
    """Batch ``index`` of the first 1,024 digits, (size, 1, 8, 8) and (size,)."""
    if not _digits:
        images, labels = load_digits(return_X_y=True)
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
        found = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8)[order] / 8 - 1
        _digits.append((found, torch.tensor(labels)[order]))
    images, labels = _digits[0]
    rows = torch.arange(size) + index * size % 1024
    return images[rows], labels[rows]


def held_out() -> Batch:
    """512 digits that no batch holds."""
    digits(0)
    images, labels = _digits[0]
    return images[1024:1536], labels[1024:1536]


def dyadic(index: int) -> Batch:
    """(4, 16) and (4, 12) of small dyadic numbers."""
    generator = torch.Generator().manual_seed(index)
    x = torch.randint(-4, 5, (4, 16), generator=generator) / 4
    return x, torch.randint(-2, 3, (4, 12), generator=generator) / 2


def classify(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def linear(model: nn.Module, batch: Batch) -> Tensor:
    outputs = torch.cat([part.float() for part in model(batch[0])], 1)
    return (outputs * batch[1]).sum()


@dataclasses.dataclass
class Task:
    """What is trained.

    Attributes:
        model: Builds it in FP32; the random state is set before.
        loss: Of a model and a batch.
        batch: Of an index.
        held_out: The batch for evaluation.
    """

    model: Callable[[], nn.Module]
    loss: Callable[[Any, Any], Tensor]
    batch: Callable[[int], Any]
    held_out: Callable[[], Any]


DIGITS = Task(DigitsNet, classify, digits, held_out)
DROPOUT = Task(lambda: DigitsNet(0.2), classify, digits, held_out)
LINEAR = Task(LinearNet, linear, dyadic, lambda: dyadic(1000))


@dataclasses.dataclass
class Recipe:
    """An optimizer and how its package says to use it.

    Attributes:
        package: Name of the distribution.
        name: For the table and the test's name.
        optimizer: Builds it from the FP32 model.
        style: 'plain'; 'modes' (``train()`` and ``eval()`` around it); 'sam' (``first_step``, ``second_step``);
            'sam closure'; 'closure'; 'value closure' (the gradients are there, it returns the loss); 'create_graph'.
        around: Builds what wraps the optimizer once that is initialised, and is used in its place: Lookahead, for one.
        scheduler: Builds a scheduler of the optimizer; stepped after each step.
        near: How far the falls of the loss may be apart, as a part of the first loss.
        along: Smallest cosine between the ways that the weights went from their start, at this level and in FP32.
        exact: Whether it is asked for equal bits where gradients are equal bits.
        skips: Whether an overflow leaves nothing behind. What an optimizer does around the step of another one inside of it is
            its own affair; where that spoils the weights, it is trained with a fixed scale.
    """

    package: str
    name: str
    optimizer: Callable[[nn.Module], Optimizer]
    style: str = 'plain'
    around: Callable[[Optimizer], Any] | None = None
    scheduler: Callable[[Any], Any] | None = None
    near: float = 0.1
    along: float = 0.8
    exact: bool = True
    skips: bool = True

    def __str__(self) -> str:
        return self.name


class Way:
    """One training of a recipe.

    Args:
        recipe: The optimizer.
        task: Model and data.
        level: Opt level; None for plain FP32.
        api: 'functional' or 'mmengine'.
        seed: Of the model's weights.
    """

    def __init__(
        self, recipe: Recipe, task: Task, level: str | None = None, api: str = 'functional', seed: int = 0
    ) -> None:
        torch.manual_seed(seed)
        self.recipe, self.task, self.level, self.api = recipe, task, level, api
        self.model = task.model()
        self.optimizer = recipe.optimizer(self.model)
        self.scheduler = None if recipe.scheduler is None else recipe.scheduler(self.optimizer)
        self.wrapper: Any = None
        self.start = self.values()
        # one that grows until it overflows, where that is survived
        scale: Any = (SCALE if recipe.skips else FIXED) if level in ('O1', 'O2') else None
        if level is not None and api == 'functional':
            self.model, self.optimizer = amp.initialize(
                self.model, self.optimizer, opt_level=level, loss_scale=scale, verbosity=0
            )
        elif level is not None:
            self.wrapper = AmpOptimWrapper(scale, optimizer=self.optimizer, opt_level=level, verbosity=0)
            self.wrapper.initialize_count_status(self.model, 0, 10_000)
        self.inner = self.optimizer
        if recipe.around is not None:
            self.optimizer = recipe.around(self.inner)

    @contextmanager
    def forward(self) -> Iterator[None]:
        if self.wrapper is None:
            yield
        else:
            with self.wrapper.optim_context(self.model):
                yield

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        if self.level is None:
            loss.backward(**kwargs)
        elif self.wrapper is not None:
            self.wrapper.backward(self.wrapper.scale_loss(loss), **kwargs)
        else:
            with amp.scale_loss(loss, self.inner) as scaled:
                scaled.backward(**kwargs)

    def pass_over(self, batch: Any, **kwargs: Any) -> Tensor:
        """Forward and backward."""
        with self.forward():
            loss = self.task.loss(self.model, batch)
        self.backward(loss, **kwargs)
        return loss

    def step(self, batch: Any) -> float:
        """One update, in the optimizer's own style; the loss before it."""
        self.model.train()
        style, optimizer = self.recipe.style, self.optimizer
        stepping = optimizer if self.wrapper is None else self.wrapper
        if style == 'modes':
            optimizer.train()

        def closure() -> Tensor:
            optimizer.zero_grad()
            return self.pass_over(batch)

        stepping.zero_grad()
        if style == 'closure':
            loss = optimizer.step(closure)
        else:
            loss = self.pass_over(batch, **(dict(create_graph=True) if style == 'create_graph' else {}))
            if style == 'sam':
                optimizer.first_step(zero_grad=True)
                self.pass_over(batch)
                optimizer.second_step(zero_grad=True)
            elif style == 'sam closure':
                optimizer.step(closure)
            elif style == 'value closure':
                optimizer.step(lambda: float(loss.detach()))
            else:
                stepping.step()
        if self.scheduler is not None:
            self.scheduler.step()
        return float(loss.detach())

    @torch.no_grad()
    def evaluate(self) -> float:
        """Loss on what was held out, in the optimizer's mode for it."""
        self.model.eval()
        if self.recipe.style == 'modes':
            self.optimizer.eval()
        return float(self.task.loss(self.model, self.task.held_out()))

    def train(self, first: int, last: int) -> list[float]:
        return [self.step(self.task.batch(index)) for index in range(first, last)]

    def values(self) -> dict[str, Tensor]:
        """FP32 values of the model, copied."""
        return {key: value.detach().clone() for key, value in self.model.state_dict().items()}

    def went(self) -> Tensor:
        """From the start to now, in one vector."""
        now = self.values()
        names = [name for name, _ in self.model.named_parameters() if name in now]
        return torch.cat([(now[name].double() - self.start[name].double()).flatten() for name in names])

    def stepped(self) -> list[Tensor]:
        """What the optimizer steps, copied."""
        return [parameter.detach().clone() for parameter in amp.master_params(self.inner)]

    def save(self) -> bytes:
        """A checkpoint file, with the random state."""
        parts = {'model': self.model.state_dict(), 'random': torch.get_rng_state()}
        if self.wrapper is not None:
            parts['optimizer'] = self.wrapper.state_dict()
        else:
            parts['optimizer'] = self.optimizer.state_dict()
            if self.level is not None:
                parts['amp'] = amp.state_dict()
        if self.scheduler is not None:
            parts['scheduler'] = self.scheduler.state_dict()
        file = io.BytesIO()
        torch.save(parts, file)
        return file.getvalue()

    def load(self, file: bytes) -> None:
        # some of the optimizers keep objects of their own in their state
        parts = torch.load(io.BytesIO(file), weights_only=False)
        self.model.load_state_dict(parts['model'])
        (self.optimizer if self.wrapper is None else self.wrapper).load_state_dict(parts['optimizer'])
        if 'amp' in parts:
            amp.load_state_dict(parts['amp'])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(parts['scheduler'])
        torch.set_rng_state(parts['random'])

    def everything(self) -> dict[str, Any]:
        """What two runs that are the same have in common."""
        return {'model': self.values(), 'optimizer': self.optimizer.state_dict(), 'stepped': self.stepped()}


def check_masters(way: Way) -> None:
    """Model weights are their masters, rounded, and the file has the masters."""
    weights = dict(way.model.named_parameters())
    if way.level in CAST:
        assert CAST[way.level] in {weight.dtype for weight in weights.values()}
        assert all(parameter.dtype is torch.float32 for parameter in amp.master_params(way.inner))
    for name, value in way.values().items():
        if name in weights and weights[name].requires_grad:
            assert value.dtype is torch.float32, name
            assert torch.equal(weights[name], value.to(weights[name].dtype)), f'{name} is not its master, rounded'


def check_exact(recipe: Recipe, level: str, api: str, steps: int = 6) -> None:
    """Gradients being the same bits at each level, so are all weights that the optimizer makes of them."""
    plain, way = Way(recipe, LINEAR), Way(recipe, LINEAR, level, api)
    for one in (plain, way):
        torch.manual_seed(1)
        one.train(0, steps)
    names = [name for name, _ in plain.model.named_parameters()]
    assert any(not torch.equal(plain.values()[name], plain.start[name]) for name in names), 'FP32 does not train'
    check_same_bits(way, plain)
    for one in (plain, way):
        one.evaluate()
    check_same_bits(way, plain)


def check_same_bits(way: Way, plain: Way) -> None:
    for index, (ours, theirs) in enumerate(zip(way.stepped(), plain.stepped(), strict=True)):
        assert torch.equal(ours, theirs), f'parameter {index} is off by {(ours - theirs).abs().max():.3g}'
    ours = way.values()
    for name, value in plain.values().items():
        # what nobody steps is rounded and has no master
        if not torch.equal(value, plain.start[name]):
            assert torch.equal(ours[name], value), name


def check_skip(recipe: Recipe, level: str, api: str) -> None:
    """A batch whose gradients overflow leaves weights, masters and optimizer state as they were."""
    way = Way(recipe, LINEAR, level, api)
    way.train(0, 3)
    before = way.everything()
    x, target = dyadic(3)
    way.step((x, target * math.inf))
    assert same(way.everything(), before), 'an overflow leaves its traces'
    losses = way.train(4, 6)
    assert all(map(math.isfinite, losses)) and not same(way.everything(), before)


@dataclasses.dataclass
class Run:
    """What one training gave.

    Attributes:
        losses: Before each step.
        held_out: Loss at the end on what was held out.
        way: How far each trained weight went, in one vector.
        resumes: Whether a copy that was loaded in the middle ended at the same bits.
    """

    losses: list[float]
    held_out: float
    went: Tensor
    resumes: bool = False

    @property
    def end(self) -> float:
        return sum(self.losses[-5:]) / 5


def run(recipe: Recipe, task: Task, level: str | None, api: str, steps: int, check: Callable[[Way], None]) -> Run:
    """Train; save in the middle, in evaluation mode; train on; load the file into a new model, and train that on."""
    way = Way(recipe, task, level, api)
    torch.manual_seed(1)
    half = steps // 2
    losses = way.train(0, half)
    way.evaluate()
    file = way.save()
    losses += way.train(half, steps)
    # before it is evaluated, while the weights are those of training
    check(way)
    done = Run(losses, way.evaluate(), way.went())
    expected = way.everything()
    # amp.state_dict() numbers the scales of all that is alive
    del way
    again = Way(recipe, task, level, api, seed=3)
    again.load(file)
    resumed = again.train(half, steps)
    done.resumes = resumed == losses[half:] and again.evaluate() == done.held_out and same(again.everything(), expected)
    return done


_plain: dict[tuple[str, str, int, int], Run] = {}


def plain_run(recipe: Recipe, task: Task, steps: int) -> Run:
    """The FP32 run, once for all levels."""
    key = (recipe.package, recipe.name, id(task), steps)
    if key not in _plain:
        _plain[key] = run(recipe, task, None, '', steps, lambda way: None)
    return _plain[key]


def check_trains(
    recipe: Recipe, level: str, api: str, row: dict[str, Any], task: Task = DIGITS, steps: int = 40
) -> None:
    """Like FP32: the loss falls as far, the weights go the same way; saved in the middle and resumed, bit for bit."""
    fp32 = plain_run(recipe, task, steps)
    done = run(recipe, task, level, api, steps, check_masters)
    first = fp32.losses[0]
    cosine = float(F.cosine_similarity(done.went, fp32.went, dim=0))
    row.update(fp32=fp32.end / first, end=done.end / first, along=cosine)
    row.update(fp32_held_out=fp32.held_out / first, held_out=done.held_out / first)
    assert all(math.isfinite(loss) for loss in done.losses)
    assert fp32.end < 0.9 * first, 'FP32 does not learn'
    assert abs(done.end - fp32.end) <= recipe.near * first, (fp32.end, done.end, first)
    assert abs(done.held_out - fp32.held_out) <= 2 * recipe.near * first, (fp32.held_out, done.held_out)
    assert cosine >= recipe.along, cosine
    assert done.resumes == fp32.resumes, f'resumes exactly: {done.resumes}, in FP32: {fp32.resumes}'
    row['verdict'] = 'trains, resumes' if done.resumes else 'trains; resumes as inexactly as in FP32'
    if not recipe.skips:
        row['verdict'] += '; does its own part of a skipped step'


def cases(recipes: list[Recipe], levels: Iterable[str] = LEVELS, apis: Iterable[str] = APIS) -> list[Any]:
    """pytest's parameters ``recipe,level,api``; through mmengine's wrapper, too, where ``update_params`` is enough."""
    return [
        pytest.param(recipe, level, api, id=f'{recipe.name}-{level}-{api}')
        for recipe in recipes
        for level in levels
        for api in apis
        if api == 'functional' or (recipe.style in ('plain', 'modes') and recipe.around is None)
    ]


def prepare(row: dict[str, Any], recipe: Recipe, level: str, api: str) -> None:
    """The words of the table."""
    row.update(
        package=recipe.package, version=metadata.version(recipe.package), trial=recipe.name, level=level, api=api
    )


def refused(
    recipe: Recipe, level: str, api: str, row: dict[str, Any], words: Iterable[str], task: Task = DIGITS
) -> None:
    """A typed error that says what to write, before a weight has moved."""
    prepare(row, recipe, level, api)
    way = Way(recipe, task, level, api)
    before = way.values()
    with pytest.raises(AmpError) as error:
        way.train(0, 1)
    assert all(word in str(error.value) for word in words), str(error.value)
    trained = {name for name, _ in way.model.named_parameters()}
    assert all(same(value, before[name]) for name, value in way.values().items() if name in trained)
    row.update(verdict='refused', remedy=str(error.value))


def trial(recipe: Recipe, level: str, api: str, row: dict[str, Any], task: Task = DIGITS, steps: int = 40) -> None:
    """The whole of it, for an optimizer."""
    prepare(row, recipe, level, api)
    if recipe.exact:
        check_exact(recipe, level, api)
        if recipe.scheduler is None and recipe.skips:
            check_skip(recipe, level, api)
    check_trains(recipe, level, api, row, task, steps)
