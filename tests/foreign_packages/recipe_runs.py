"""The recipes of the pages ``docs/recipes_*.md`` on other data: what their snippets define, and trainings with it.

Run as a script, it is the process that ``test_recipe_resumes.py`` kills and starts again.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'tests/support'), str(Path(__file__).parent)]

from torchvision_schemas import declare_torchvision_ops

declare_torchvision_ops()

import numpy as np
import torch
from snippets import definitions
from torch import Tensor

from amp_wrapper import amp

Batch = tuple[Tensor, Tensor]
EPOCHS = 3
#: No step is skipped at this loss scale, so that each has its counterpart in FP32.
FIXED = {'loss_scale': 128.0}


def recipe(name: str) -> SimpleNamespace:
    """What the page on a library imports and defines."""
    return SimpleNamespace(**definitions(ROOT / f'docs/recipes_{name}.md'))


def seed(value: int) -> None:
    torch.manual_seed(value)
    np.random.seed(value)


def pictures(count: int, size: int, first: int = 0) -> torch.utils.data.TensorDataset:
    """Handwritten digits, (count, 1, size, size) in [-1, 1], or (count, 64) for size 0."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))[first : first + count]
    found = torch.tensor(images, dtype=torch.float32)[order] / 8 - 1
    if size:
        found = torch.nn.functional.interpolate(found.view(-1, 1, 8, 8), size=size)
    return torch.utils.data.TensorDataset(found, torch.tensor(labels)[order])


class DiesAfter:
    """The batches of a loader, and SIGKILL in place of the one of this number."""

    def __init__(self, batches: Iterable[Any], count: int) -> None:
        self.batches, self.count = batches, count

    def __iter__(self) -> Iterator[Any]:
        for index, batch in enumerate(self.batches):
            if index == self.count:
                die()
            yield batch


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def with_timm(level: str, folder: Path, mode: str) -> dict[str, Any]:
    page = recipe('timm')
    loader = torch.utils.data.DataLoader(pictures(128, 32), batch_size=16, shuffle=True)
    mixup = page.timm.data.Mixup(mixup_alpha=0.2, num_classes=10)
    run = page.build(page.make_model(), level, epochs=EPOCHS, steps=4)
    if mode == 'resumed':
        page.load(run, folder / 'last.pth')
    while run.epoch < EPOCHS:
        dies = mode == 'killed' and run.epoch == 2
        page.train_epoch(run, DiesAfter(loader, 3) if dies else loader, mixup)
        page.save(run, folder / 'last.pth')
    return {
        'model': run.model.state_dict(),
        'optimizer': run.optimizer.state_dict(),
        'amp': amp.state_dict(),
        'average': run.average.module.state_dict(),
        'rates': [group['lr'] for group in run.optimizer.param_groups],
        'random': torch.get_rng_state(),
    }


def with_accelerate(level: str, folder: Path, mode: str) -> dict[str, Any]:
    page = recipe('accelerate')
    run = page.build(page.make_model(), level, pictures(128, 0), steps=4 * EPOCHS)
    done = 0
    if mode == 'resumed':
        done = int((folder / 'epochs').read_text())
        run.accelerator.load_state(str(folder / f'state-{done}'))
    loader = run.loader
    for epoch in range(done, EPOCHS):
        run.loader = DiesAfter(loader, 3) if mode == 'killed' and epoch == 2 else loader
        page.train_epoch(run)
        run.accelerator.save_state(str(folder / f'state-{epoch + 1}'))
        (folder / 'epochs').write_text(str(epoch + 1))
    return {
        'model': run.accelerator.unwrap_model(run.model).state_dict(),
        'optimizer': run.prepared.state_dict(),
        'amp': amp.state_dict(),
        'scheduler': run.scheduler.state_dict(),
        'random': torch.get_rng_state(),
    }


def with_trainer(level: str, folder: Path, mode: str) -> dict[str, Any]:
    from transformers import TrainerCallback

    page = recipe('trainer')
    torch.manual_seed(0)
    data = page.sequences(64)

    class Dies(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if mode == 'killed' and state.global_step == 8:
                die()

    trainer = page.AmpTrainer(
        model=page.make_model(),
        # four steps an epoch: the checkpoint of step 6 is one from the middle of an epoch
        args=page.arguments(str(folder / 'run'), num_train_epochs=EPOCHS),
        train_dataset=data,
        eval_dataset=data[:16],
        opt_level=level,
        amp_options={'verbosity': 0},
        callbacks=[Dies()],
    )
    trainer.train(resume_from_checkpoint=mode == 'resumed')
    return {
        'model': trainer.model.state_dict(),
        'optimizer': trainer.optimizer.state_dict(),
        'amp': amp.state_dict(),
        'scheduler': trainer.lr_scheduler.state_dict(),
        'steps': trainer.state.global_step,
        'random': torch.get_rng_state(),
    }


def with_lightning(level: str, folder: Path, mode: str) -> dict[str, Any]:
    page = recipe('lightning')

    class Dies(page.lightning.Callback):  # type: ignore[name-defined, misc]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if mode == 'killed' and trainer.current_epoch == 2 and trainer.global_step >= 10:
                die()

    data = pictures(128, 0)
    average = page.WeightAveraging(avg_fn=page.get_ema_avg_fn(0.9))
    options = {}
    if mode == 'ranks':
        strategy = page.AmpDDPStrategy(process_group_backend='gloo')
        options = {'strategy': strategy, 'devices': 2, 'accelerator': 'cpu'}
    trainer = page.make_trainer(
        page.AmpPrecision(level, verbosity=0), folder / 'run', EPOCHS, callbacks=[average, Dies()], **options
    )
    model = page.Classifier()
    trainer.fit(
        model,
        torch.utils.data.DataLoader(data, batch_size=16, shuffle=True),
        torch.utils.data.DataLoader(data, batch_size=64),
        ckpt_path=folder / 'run/epoch=1.ckpt' if mode == 'resumed' else None,
    )
    return {
        # the average, which the callback puts into the model at the end
        'average': model.state_dict(),
        'masters': list(amp.master_params(trainer.optimizers[0])),
        'optimizer': trainer.optimizers[0].state_dict(),
        'amp': amp.state_dict(),
        'scheduler': trainer.lr_scheduler_configs[0].scheduler.state_dict(),
        'steps': trainer.global_step,
        'random': torch.get_rng_state(),
    }


LIBRARIES: dict[str, Callable[[str, Path, str], dict[str, Any]]] = {
    'timm': with_timm,
    'accelerate': with_accelerate,
    'trainer': with_trainer,
    'lightning': with_lightning,
}


def main(library: str, level: str, folder: str, mode: str) -> None:
    """Train, be killed, or resume; what became of it goes to a file.

    Args:
        library: One of ``LIBRARIES``.
        level: 'O2', say.
        folder: Of the checkpoints.
        mode: 'whole', 'killed', 'resumed', or 'ranks': whole, as one of several processes of torchrun.
    """
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    # a resumed process begins with other weights and random numbers, which the checkpoint has to replace
    seed(7 if mode == 'resumed' else 0)
    found = LIBRARIES[library](level, Path(folder), mode)
    torch.save(found, Path(folder) / f'{mode}{os.environ.get("RANK", "")}.pt')


if __name__ == '__main__':
    main(*sys.argv[1:])
