"""The pages ``docs/recipes_*.md``: their snippets run; a training with each recipe skips, clips and resumes; refusals."""

from __future__ import annotations

import copy
import functools
import gc
import logging
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from bits import differences, same
from snippets import ROOT, definitions, foreign_pages, run_all
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.data import DataLoader, TensorDataset
from transformers import TrainerCallback

from amp_wrapper import AmpAttachError

CLIP, EPOCHS = 1e-3, 4
#: A loss scale at which nothing overflows by itself.
OPTIONS: dict[str, Any] = {'verbosity': 0, 'loss_scale': {'init_scale': 128.0}}
#: Largest distance of the first gradient from that of FP32, relative to it.
NEAR = {'O1': 0.02, 'O2': 0.02, 'O4': 0.1, 'O5': 0.1}


class Watch:
    """Copies of what a training consists of, after each of its steps; the gradients of the first."""

    def __init__(self) -> None:
        self.states: list[list[Any]] = []
        self.gradients: list[Tensor] = []

    def look(self, *parts: Any) -> None:
        self.states.append(copy.deepcopy([part if isinstance(part, list) else part.state_dict() for part in parts]))

    def stepped(self, optimizer: Optimizer, *_: Any) -> None:
        found = [p.grad for group in optimizer.param_groups for p in group['params'] if p.grad is not None]
        self.gradients.append(torch.cat([gradient.detach().float().flatten() for gradient in found]))


@functools.cache
def recipe(name: str) -> SimpleNamespace:
    """What the page on a library imports and defines."""
    return SimpleNamespace(**definitions(ROOT / f'docs/recipes_{name}.md'))


def digits(count: int, *shape: int, infinite: slice = slice(0)) -> TensorDataset:
    """Noise around the number of its class."""
    labels = torch.arange(count) % 10
    images = torch.randn(count, *shape, generator=torch.Generator().manual_seed(0))
    images += labels.view(-1, *[1] * len(shape)) / 4
    images[infinite] = math.inf
    return TensorDataset(images, labels)


def batches(epoch: int, *shape: int) -> list[tuple[Tensor, ...]]:
    """Two; the second of the second epoch overflows."""
    return list(DataLoader(digits(32, *shape, infinite=slice(16, 32) if epoch == 1 else slice(0)), batch_size=16))


def by_timm(watch: Watch, level: str, resumed: bool) -> None:
    page = recipe('timm')
    # BatchNorm over few pictures would make more of any rounding
    sizes = {'img_size': 32, 'patch_size': 8, 'embed_dim': 48, 'depth': 2, 'num_heads': 3, 'drop_path_rate': 0.1}
    model = page.timm.create_model('vit_tiny_patch16_224', num_classes=10, in_chans=1, **sizes)
    run = page.build(model, level, epochs=EPOCHS, steps=1, **OPTIONS)
    mixup = page.timm.data.Mixup(mixup_alpha=0.1, num_classes=10)
    if resumed:
        page.load(run, 'last.pth')
    while run.epoch < EPOCHS:
        page.train_epoch(run, batches(run.epoch, 1, 32, 32), mixup, clip=CLIP)
        watch.look(run.model, run.optimizer, run.average, [group['lr'] for group in run.optimizer.param_groups])
        if run.epoch == 2 and not resumed:
            page.save(run, 'last.pth')


def by_accelerate(watch: Watch, level: str, resumed: bool) -> None:
    page = recipe('huggingface')
    run = page.build(page.make_model(), level, digits(32, 64), steps=EPOCHS, **OPTIONS)
    if resumed:
        run.accelerator.load_state('state')
    for epoch in range(2 if resumed else 0, EPOCHS):
        run.loader = batches(epoch, 64)
        page.train_epoch(run, max_norm=CLIP)
        watch.look(run.model, run.prepared, run.scheduler)
        if epoch == 1:
            run.accelerator.save_state('state')


def by_trainer(watch: Watch, level: str, resumed: bool) -> None:
    page = recipe('huggingface')

    class Poisoned(page.AmpTrainer):  # type: ignore[name-defined, misc]
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs) * (math.inf if self.state.global_step == 2 else 1.0)

    class Look(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            watch.look(trainer.model, trainer.optimizer, trainer.lr_scheduler)

    with torch.random.fork_rng():
        torch.manual_seed(0)
        data = page.sequences(80)
    trainer = Poisoned(
        model=page.make_gpt2(),
        args=page.arguments('run', num_train_epochs=1, eval_strategy='no', max_grad_norm=CLIP),
        train_dataset=data,
        opt_level=level,
        amp_options=OPTIONS,
        callbacks=[Look()],
    )
    trainer.train(resume_from_checkpoint='run/checkpoint-3' if resumed else None)
    # the rate of the first step is 0
    del watch.states[: 0 if resumed else 1]


def by_lightning(watch: Watch, level: str, resumed: bool, **options: Any) -> None:
    page = recipe('lightning')

    class Look(page.lightning.Callback):  # type: ignore[name-defined, misc]
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
            if index % 2:
                watch.look(module, trainer.optimizers[0], trainer.lr_scheduler_configs[0].scheduler)

    callbacks = [page.WeightAveraging(avg_fn=page.get_ema_avg_fn(0.9)), Look()]
    plugin = page.AmpPrecision(level, **OPTIONS)
    trainer = page.make_trainer(plugin, 'run', 2, callbacks=callbacks, gradient_clip_val=CLIP, **options)
    loader = DataLoader(digits(128, 64, infinite=slice(32, 48)), batch_size=16)
    module = page.Classifier()
    trainer.fit(module, loader, ckpt_path='run/epoch=0.ckpt' if resumed else None)
    # the average, which the callback puts into the model at the end
    watch.states[-1].append(module.state_dict())


LIBRARIES: dict[str, Callable[..., None]] = {
    'timm': by_timm,
    'accelerate': by_accelerate,
    'trainer': by_trainer,
    'lightning': by_lightning,
}


def trained(library: str, level: str, resumed: bool = False, **options: Any) -> Watch:
    forget()
    watch = Watch()
    hook = register_optimizer_step_post_hook(watch.stepped)
    # who goes on begins with other weights and random numbers, which the file has to replace
    torch.manual_seed(int(resumed))
    np.random.seed(int(resumed))
    LIBRARIES[library](watch, level, resumed, **options)
    hook.remove()
    return watch


def forget() -> None:
    """What accelerate keeps for the process, and what sessions of ``amp`` are without models."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    gc.collect()


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    logging.getLogger('lightning.pytorch').setLevel(logging.ERROR)
    yield
    forget()


@pytest.mark.parametrize('page', foreign_pages(), ids=lambda page: page.stem)
def test_the_page_runs(page: Path) -> None:
    run_all(page)


@functools.cache
def first_gradient(library: str) -> Tensor:
    return trained(library, 'O0').gradients[0]


@pytest.mark.parametrize('level', NEAR)
@pytest.mark.parametrize('library', LIBRARIES)
def test_training_skips_clips_and_resumes(library: str, level: str) -> None:
    """An overflow in one of two accumulated passes changes nothing; masters are clipped after they are unscaled."""
    watch = trained(library, level)
    before, skipped, after = watch.states[:3]
    assert same(before, skipped)
    assert all(not same(left, right) for left, right in zip(skipped, after))
    for gradient in watch.gradients:
        assert math.isclose(float(gradient.norm()), CLIP, rel_tol=1e-3) or not gradient.isfinite().all()
    assert differences(trained(library, level, resumed=True).states[-1], watch.states[-1]) == []
    assert float((watch.gradients[0] - first_gradient(library)).norm()) <= NEAR[level] * CLIP


@pytest.mark.parametrize(('library', 'level'), [('trainer', 'O2'), ('lightning', 'O5')])
def test_two_processes_stay_equal(library: str, level: str, tmp_path: Path) -> None:
    """Each has its own half of the data; all but BatchNorm's statistics is the same, for gradients are averaged."""
    launcher = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', '2', '--no-python']
    script = f'import conftest, {Path(__file__).stem} as recipes; recipes.as_rank({library!r}, {level!r})'
    words = {'ACCELERATE_USE_CPU': 'true', 'PYTHONPATH': os.pathsep.join(sys.path)}
    command = [*launcher, sys.executable, '-c', script]
    done = subprocess.run(command, env={**os.environ, **words}, capture_output=True, timeout=600)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    first, second = (torch.load(tmp_path / f'{rank}.pt', weights_only=True) for rank in range(2))
    assert same(*({k: v for k, v in each.items() if 'running_' not in k} for each in (first, second)))


def as_rank(library: str, level: str) -> None:
    options = {}
    if library == 'lightning':
        strategy = recipe('lightning').AmpDDPStrategy(process_group_backend='gloo')
        options = dict(strategy=strategy, devices=2, accelerator='cpu')
    torch.save(trained(library, level, **options).states[-1][0], f'{os.environ["RANK"]}.pt')


def test_refusals_of_the_recipes() -> None:
    page = recipe('huggingface')
    with pytest.raises(ValueError, match='opt_level takes their place'):
        page.AmpTrainer(page.make_gpt2(), args=page.arguments('no', bf16=True, eval_strategy='no'))
    page = recipe('lightning')
    model, loader = page.Classifier(), DataLoader(digits(32, 64), batch_size=16)
    with pytest.raises(ValueError, match='AmpDDPStrategy'):
        page.AmpPrecision('O5').connect(torch.nn.Sequential(model), [model.configure_optimizers()['optimizer']], [])
    page.make_trainer(page.AmpPrecision('O5', **OPTIONS), 'first', 1).fit(model, loader)
    with pytest.raises(AmpAttachError, match='already carries casts'):
        page.make_trainer(page.AmpPrecision('O5', **OPTIONS), 'second', 1).fit(model, loader)
