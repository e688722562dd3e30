"""The pages ``docs/recipes_*.md``: their snippets run; they learn, accumulate and clip as FP32 does; skips are whole."""

from __future__ import annotations

import copy
import gc
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import timm
import torch
from accelerate.state import AcceleratorState, GradientState
from bits import same
from recipe_runs import FIXED, pictures, recipe, seed
from snippets import foreign_pages, run_all
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback

from amp_wrapper import amp

LEVELS = ('O1', 'O2', 'O4', 'O5')
#: Largest distance of a gradient from that of FP32, relative to it, after accumulation and clipping.
NEAR = {'O0': 1e-5, 'O1': 0.01, 'O2': 0.01, 'O4': 0.06, 'O5': 0.06}


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In a folder of its own, without what accelerate keeps for the process."""
    monkeypatch.chdir(tmp_path)
    logging.getLogger('lightning.pytorch').setLevel(logging.ERROR)
    seed(0)
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    gc.collect()


@pytest.mark.parametrize('page', foreign_pages(), ids=lambda page: page.stem)
def test_the_page_runs(page: Path) -> None:
    run_all(page)


class Watch:
    """Gradients with which an optimizer has stepped. Lightning makes them within ``step()``, so they are read after it."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.gradients: list[Tensor] = []
        optimizer.register_step_post_hook(self.look)

    def look(self, optimizer: Optimizer, *_: Any) -> None:
        found = [p.grad for group in optimizer.param_groups for p in group['params'] if p.grad is not None]
        self.gradients.append(torch.cat([gradient.detach().float().flatten() for gradient in found]))


def states(*parts: Any) -> list[Any]:
    """Copies of the states of models, optimizers and schedules."""
    return copy.deepcopy([part.state_dict() for part in parts])


@torch.no_grad()
def accuracy(model: Callable[[Tensor], Tensor], size: int) -> float:
    """On 256 digits that were not trained on."""
    images, labels = pictures(256, size, first=1024).tensors
    return float((model(images).argmax(1) == labels).float().mean())


# -- the same training by each library, at a level, or in plain FP32 ---------------------------------------------------


def by_timm(level: str | None, epochs: int, clip: float = 1.0, count: int = 512, model: Any = None) -> Any:
    page = recipe('timm')
    model = page.make_model() if model is None else model
    if level is None:
        page.train_epoch.__globals__['amp'] = PLAIN
    loader = DataLoader(pictures(count, 32), batch_size=16, shuffle=True)
    run = page.build(
        model, level or 'O0', epochs=epochs, steps=count // 32, lr=1e-2, **({} if level is None else FIXED)
    )
    watched = Watch(run.optimizer)
    mixup = page.timm.data.Mixup(mixup_alpha=0.1, num_classes=10)
    for _ in range(epochs):
        page.train_epoch(run, loader, mixup, clip=clip)
    run.model.eval()
    return watched.gradients, accuracy(run.model, 32), run.optimizer


def by_accelerate(level: str | None, epochs: int, clip: float = 1.0, count: int = 512) -> Any:
    page = recipe('accelerate')
    if level is None:
        page.train_epoch.__globals__['amp'] = PLAIN
    options = {} if level is None else FIXED
    run = page.build(page.make_model(), level or 'O0', pictures(count, 0), count // 32 * epochs, **options)
    watched = Watch(run.optimizer)
    for _ in range(epochs):
        page.train_epoch(run, max_norm=clip)
    run.model.eval()
    return watched.gradients, accuracy(run.model, 0), run.optimizer


def by_lightning(level: str | None, epochs: int, clip: float = 1.0, count: int = 512) -> Any:
    page = recipe('lightning')
    plugin = None if level is None else page.AmpPrecision(level, verbosity=0, **FIXED)
    watched: list[Watch] = []

    class Module(page.Classifier):  # type: ignore[name-defined, misc]
        def configure_optimizers(self) -> Any:
            found = super().configure_optimizers()
            watched.append(Watch(found['optimizer']))
            return found

        if level is None:

            def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
                scheduler.step()

    model = Module(steps=count // 32 * epochs)
    trainer = page.make_trainer(plugin, 'run', epochs, gradient_clip_val=clip, enable_checkpointing=True)
    trainer.fit(model, DataLoader(pictures(count, 0), batch_size=16, shuffle=True))
    model.eval()
    return watched[0].gradients, accuracy(model.net, 0), trainer.optimizers[0]


def by_trainer(level: str | None, epochs: int, clip: float = 1.0, count: int = 128) -> Any:
    """The second of the three is the fall of the loss on what was held out, for the task is another one."""
    page = recipe('trainer')
    torch.manual_seed(1)
    data, held_out = page.sequences(count), page.sequences(64)
    torch.manual_seed(0)
    watched: list[Watch] = []

    class Watched(Trainer if level is None else page.AmpTrainer):  # type: ignore[misc]
        def create_optimizer(self, model: Any = None) -> Any:
            found = super().create_optimizer(model)
            watched.append(Watch(getattr(found, 'optimizer', found)))
            return found

    options = {} if level is None else {'opt_level': level, 'amp_options': {'verbosity': 0, **FIXED}}
    arguments = page.arguments('run', num_train_epochs=epochs, max_grad_norm=clip, save_strategy='no')
    model = page.make_model()
    trainer = Watched(model=model, args=arguments, train_dataset=data, eval_dataset=held_out, **options)
    before = trainer.evaluate()['eval_loss']
    trainer.train()
    return watched[0].gradients, 1 - trainer.evaluate()['eval_loss'] / before, trainer.optimizer


def _groups(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group['params']]


#: In place of ``amp``, what a plain FP32 loop does.
PLAIN = SimpleNamespace(
    initialize=lambda model, optimizer, **_: (model, optimizer),
    scale_loss=lambda loss, optimizer: nullcontext(loss),
    master_params=_groups,
    last_step_skipped=lambda optimizer: False,
    state_dict=dict,
    load_state_dict=lambda state: None,
)
BY = {'timm': by_timm, 'accelerate': by_accelerate, 'trainer': by_trainer, 'lightning': by_lightning}
#: epochs; what FP32 reaches at least; how far a level may be below it
GOALS = {
    'timm': (3, 0.6, 0.12),
    'accelerate': (6, 0.85, 0.04),
    'trainer': (6, 0.25, 0.03),
    'lightning': (6, 0.85, 0.04),
}
_reached: dict[str, float] = {}


@pytest.mark.parametrize('level', LEVELS)
@pytest.mark.parametrize('library', BY)
def test_learns_as_fp32_does(library: str, level: str) -> None:
    epochs, goal, below = GOALS[library]
    if library not in _reached:
        _reached[library] = BY[library](None, epochs)[1]
        seed(0)
    reached = BY[library](level, epochs)[1]
    assert _reached[library] >= goal, 'FP32 does not learn'
    assert reached >= _reached[library] - below


def vit() -> torch.nn.Module:
    sizes = {'img_size': 32, 'patch_size': 8, 'embed_dim': 48, 'depth': 2, 'num_heads': 3}
    return timm.create_model('vit_tiny_patch16_224', num_classes=10, in_chans=1, **sizes)


@pytest.mark.parametrize('level', ['O0', *LEVELS])
@pytest.mark.parametrize('library', BY)
def test_accumulates_and_clips_as_fp32_does(library: str, level: str) -> None:
    """What reaches the optimizer in its first step: the mean over two batches, shortened to the limit."""

    def first(level: str | None, clip: float) -> tuple[Tensor, Any]:
        seed(0)
        # BatchNorm over few pictures would make more of any rounding than the bound allows
        options = {'model': vit()} if library == 'timm' else {}
        gradients, _, optimizer = BY[library](level, 1, clip=clip, count=32, **options)
        return gradients[0], optimizer

    limit = float(first(None, 1e9)[0].norm()) / 3
    plain, _ = first(None, limit)
    found, optimizer = first(level, limit)
    assert math.isclose(float(plain.norm()), limit, rel_tol=1e-4)
    assert math.isclose(float(found.norm()), limit, rel_tol=1e-4), (
        'clipped before it was unscaled, or what nobody steps'
    )
    assert float((found - plain).norm()) <= NEAR[level] * limit
    for parameter in amp.master_params(getattr(optimizer, 'optimizer', optimizer)):
        assert parameter.dtype is torch.float32


# -- skipped steps --------------------------------------------------------------------------------------------------------


def skip_in_timm(level: str) -> list[list[Any]]:
    page = recipe('timm')
    run = page.build(page.make_model(), level, epochs=2, steps=4, **FIXED)
    images, labels = pictures(16, 32).tensors
    mixup = page.timm.data.Mixup(mixup_alpha=0.1, num_classes=10)
    found = []
    for factor in (1.0, math.inf, 1.0):
        page.train_epoch(run, [(images * factor, labels)], mixup, accumulate=1)
        rates = [group['lr'] for group in run.optimizer.param_groups]
        found.append([*states(run.model, run.optimizer, run.average), rates, run.updates])
    return found


def skip_in_accelerate(level: str) -> list[list[Any]]:
    page = recipe('accelerate')
    data = pictures(16, 0)
    run = page.build(page.make_model(), level, data, steps=4, accumulate=1, **FIXED)
    images, labels = data.tensors
    found = []
    for factor in (1.0, math.inf, 1.0):
        run.loader = [(images * factor, labels)]
        page.train_epoch(run)
        found.append(states(run.model, run.prepared, run.scheduler))
    return found


def skip_in_trainer(level: str) -> list[list[Any]]:
    page = recipe('trainer')
    found = []

    class Poisoned(page.AmpTrainer):  # type: ignore[name-defined, misc]
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs) * (math.inf if self.state.global_step == 3 else 1.0)

    class Look(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            found.append(states(trainer.model, trainer.optimizer, trainer.lr_scheduler))

    trainer = Poisoned(
        model=page.make_model(),
        args=page.arguments(
            'run', num_train_epochs=1, eval_strategy='no', save_strategy='no', gradient_accumulation_steps=1
        ),
        train_dataset=page.sequences(40),
        eval_dataset=page.sequences(8),
        opt_level=level,
        amp_options={'verbosity': 0, **FIXED},
        callbacks=[Look()],
    )
    trainer.train()
    assert trainer.state.global_step == 5
    return found[2:]


def skip_in_lightning(level: str) -> list[list[Any]]:
    page = recipe('lightning')
    found = []

    class Look(page.lightning.Callback):  # type: ignore[name-defined, misc]
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            found.append(states(module, trainer.optimizers[0], trainer.lr_scheduler_configs[0].scheduler))

    data = pictures(48, 0)
    data.tensors[0][16:32] = math.inf
    plugin = page.AmpPrecision(level, verbosity=0, **FIXED)
    trainer = page.make_trainer(plugin, 'run', 1, callbacks=[Look()], accumulate_grad_batches=1)
    trainer.fit(page.Classifier(), DataLoader(data, batch_size=16))
    return found


SKIPS = {
    'timm': skip_in_timm,
    'accelerate': skip_in_accelerate,
    'trainer': skip_in_trainer,
    'lightning': skip_in_lightning,
}


@pytest.mark.parametrize('level', LEVELS)
@pytest.mark.parametrize('library', SKIPS)
def test_a_skipped_step_changes_nothing(library: str, level: str) -> None:
    """Weights, BatchNorm, masters, optimizer state, averages and the schedule are those before it; the next step is taken."""
    before, skipped, after = SKIPS[library](level)[:3]
    assert same(before, skipped)
    assert all(not same(left, right) for left, right in zip(skipped, after))
