"""Trains small models at each level and with torch.autocast, and compares them with FP32: ``python -m benchmarks.fidelity``.

Several seeds each; at all levels of a seed the first weights, the order of the data and the recipe are the same. A run that is
done is a line of a file, so a benchmark that was interrupted goes on where it ended.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import datetime
import hashlib
import json
import logging
import math
import statistics
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.optim import OptimWrapper, OptimWrapperDict
from mmengine.registry import OPTIM_WRAPPERS
from mmengine.runner import Runner
from torch import Tensor, nn

from amp_wrapper import AmpOptimWrapper
from amp_wrapper.errors import OverflowStreakError
from amp_wrapper.policy import LEVELS

from .loops import TorchAmp
from .machine import RESULTS, ROOT, options, parse, publish, say, table

#: torch's own peers of O1 and O4.
STOCK = {'autocast float16': torch.float16, 'autocast bfloat16': torch.bfloat16}
REFERENCE = 'O0'
#: So many first steps are compared with those of O0.
FIRST = 20


@OPTIM_WRAPPERS.register_module()
class AutocastOptimWrapper(OptimWrapper):
    """``torch.autocast``, and ``GradScaler`` for float16, in mmengine's loop; mmengine's own class refuses a CPU.

    Args:
        optimizer: Over FP32 parameters.
        variant: A key of :data:`STOCK`.
        clip_grad: ``dict(max_norm=...)``, or None.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, variant: str, clip_grad: dict[str, Any] | None = None) -> None:
        super().__init__(optimizer)
        self.amp = TorchAmp(optimizer, STOCK[variant], (clip_grad or {}).get('max_norm'), 2.0**16)

    @contextmanager
    def optim_context(self, model: nn.Module) -> Iterator[None]:
        """Surround a forward pass."""
        with super().optim_context(model), self.amp.optim_context(model):
            yield

    def update_params(self, loss: Tensor, *_: Any, **__: Any) -> None:
        """Backward, clip, step, clear."""
        self.amp.backward(loss)
        self.amp.step()
        self.amp.zero_grad()
        self._inner_count += 1


# -- what is trained ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Task:
    """A model, its data and its recipe.

    Attributes:
        title: On the page.
        metric: Number of the last validation, as mmengine names it.
        losses: Losses whose sum is compared, as ``train_step`` names them.
        config: Of the training, at whatever level it has.
    """

    title: str
    metric: str
    losses: tuple[str, ...]
    config: Config

    @property
    def recipe(self) -> str:
        """Twelve digits that tell two recipes apart: runs of another recipe are not taken up."""
        text = json.dumps(self.config.to_dict(), sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def cnn() -> Task:
    """Return a CNN with BatchNorm and SGD."""
    cfg = Config.fromfile(ROOT / 'configs/digits/cnn_o2.py')
    cfg.train_cfg.max_epochs, cfg.param_scheduler.T_max = 4, 4
    return Task('CNN on digits: accuracy, %', 'accuracy/top1', ('loss',), cfg)


def vit() -> Task:
    """Return a vision transformer with LayerNorm, dropout, AdamW, an average of the weights, and images that are shifted."""
    cfg = Config.fromfile(ROOT / 'configs/digits/vit_o5.py')
    cfg.model.backbone.update(layers=2, patch=4)
    cfg.optim_wrapper.optimizer.lr = 4e-3
    cfg.train_cfg.max_epochs, cfg.param_scheduler[1].T_max = 8, 7
    shift = dict(type='PadAndCrop', padding=1)
    cfg.train_dataloader.dataset.pipeline = [dict(type='RandomApply', transforms=[shift], prob=0.5)]
    return Task('ViT on digits: accuracy, %', 'accuracy/top1', ('loss',), cfg)


def gan() -> Task:
    """Return a GAN, narrow and in small batches, since float16 convolutions with strides are slow on a CPU."""
    cfg = Config.fromfile(ROOT / 'configs/digits/gan_o2_o5.py')
    cfg.model.generator.width, cfg.model.discriminator.width = 16, 8
    cfg.train_dataloader.batch_size = 8
    for network in ('generator', 'discriminator'):
        cfg.optim_wrapper[network].optimizer.lr = 2e-3
    cfg.train_cfg.max_epochs, cfg.param_scheduler.T_max = 3, 3
    cfg.train_cfg.val_interval = 3
    cfg.custom_hooks = []
    return Task('GAN on digits: Fréchet distance', 'gan/frechet', ('loss_real', 'loss_fake'), cfg)


TASKS = {'cnn': cnn, 'vit': vit, 'gan': gan}


def at_variant(wrapper: Mapping[str, Any], variant: str) -> dict[str, Any]:
    """Return the config of one optimizer wrapper, or of several, at a level or with torch's own autocast."""
    found = copy.deepcopy(dict(wrapper))
    if 'optimizer' not in found:
        return {name: at_variant(one, variant) if isinstance(one, Mapping) else one for name, one in found.items()}
    if variant in LEVELS:
        return {**found, 'type': 'AmpOptimWrapper', 'opt_level': variant, 'verbosity': 0}
    found.pop('opt_level', None)
    optimizer = {**found['optimizer'], 'type': found['optimizer']['type'].removeprefix('amp_wrapper.Fused')}
    return {**found, 'type': 'AutocastOptimWrapper', 'variant': variant, 'optimizer': optimizer}


class LossRecord(Hook):
    """Keeps the losses and loss scales of a run.

    Args:
        names: Losses whose sum is kept.
    """

    priority = 'VERY_LOW'

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.losses: list[float] = []
        self.scales: list[float] = []
        self.skipped = 0

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Keep those of one step."""
        self.losses.append(sum(outputs[name].item() for name in self.names))
        wrapper = runner.optim_wrapper
        each = list(wrapper.values()) if isinstance(wrapper, OptimWrapperDict) else [wrapper]
        scales = [one.loss_scaler if isinstance(one, AmpOptimWrapper) else one.amp.scaler for one in each]
        self.scales.append(min(scale.get_scale() for scale in scales))
        fell = len(self.scales) > 1 and self.scales[-1] < self.scales[-2]
        ours = [one.step_was_skipped() for one in each if isinstance(one, AmpOptimWrapper)]
        self.skipped += any(ours) or (not ours and fell)


def train(name: str, variant: str, seed: int, quick: bool) -> dict[str, Any]:
    """Train once, and return the record of the run, of plain values; numbers that are not finite are None."""
    task = TASKS[name]()
    recipe, cfg, record = task.recipe, task.config, LossRecord(task.losses)
    cfg.optim_wrapper = at_variant(cfg.optim_wrapper, variant)
    cfg.randomness, cfg.log_level = dict(cfg.randomness, seed=seed), 'ERROR'
    # mmengine keeps what is logged under this name
    cfg.experiment_name = uuid.uuid4().hex
    cfg.default_hooks.checkpoint = None
    if quick:
        cfg.train_cfg.update(max_epochs=1, val_interval=1)
    begin, ended = time.process_time(), False
    with tempfile.TemporaryDirectory() as folder:
        cfg.work_dir = folder
        runner = Runner.from_cfg(cfg)
        runner.register_hook(record)
        try:
            runner.train()
        except OverflowStreakError:
            # the training has failed, and this is what is to be found out
            ended = True
        # an open file would stay at the logger, which the next training of the process gets, too
        for handler in list(runner.logger.handlers):
            if isinstance(handler, logging.FileHandler):
                runner.logger.removeHandler(handler)
                handler.close()
    metric = math.nan if ended else float(runner.message_hub.get_scalar(f'val/{task.metric}').current())
    return {
        'task': name, 'variant': variant, 'seed': seed, 'recipe': recipe, 'metric': _plain(metric),
        'first': [_plain(loss) for loss in record.losses[:FIRST]], 'steps': len(record.losses),
        'skipped': record.skipped, 'scale at the end': record.scales[-1],
        'seconds': round(time.process_time() - begin, 1), 'date': str(datetime.date.today()),
    }  # fmt: skip


def _plain(value: float) -> float | None:
    return float(f'{value:.6g}') if math.isfinite(value) else None


# -- records and tables ------------------------------------------------------------------------------------------------


def read_records(path: Path) -> dict[tuple[str, str, int, str], dict[str, Any]]:
    """Read the runs of a file, by task, variant, seed and recipe; a line that an interruption cut is left out."""
    found = {}
    for line in path.read_text(encoding='utf-8').splitlines() if path.is_file() else ():
        with contextlib.suppress(json.JSONDecodeError):
            record = json.loads(line)
            found[record['task'], record['variant'], record['seed'], record['recipe']] = record
    return found


def train_missing(names: Sequence[str], seeds: Sequence[int], path: Path, quick: bool) -> list[dict[str, Any]]:
    """Train what a file does not have, write each run to it, and return all of them."""
    known = read_records(path)
    keys = [
        (name, variant, seed, TASKS[name]().recipe) for seed in seeds for name in names for variant in (*LEVELS, *STOCK)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    missing = [key for key in keys if key not in known]
    for place, key in enumerate(missing, 1):
        known[key] = record = train(*key[:3], quick)
        with path.open('a', encoding='utf-8') as file:
            file.write(json.dumps(record, separators=(',', ':')) + '\n')
        say(f'{place} of {len(missing)}: {key[0]}, {key[1]}, seed {key[2]}: {record["metric"]}, {record["seconds"]} s')
    return [known[key] for key in keys]


def rows_of(records: Sequence[Mapping[str, Any]], name: str) -> list[list[str]]:
    """Return a row for each variant of a task, compared with O0 by pairs of one seed."""
    mine, rows = [record for record in records if record['task'] == name], []
    base = {record['seed']: record for record in mine if record['variant'] == REFERENCE}
    for variant in (*LEVELS, *STOCK):
        runs = [record for record in mine if record['variant'] == variant]
        pairs = [(run, base[run['seed']]) for run in runs]
        values = [run['metric'] for run in runs if run['metric'] is not None]
        differences = [run['metric'] - other['metric'] for run, other in pairs if run['metric'] is not None]
        failed = f'; {len(runs) - len(values)} of {len(runs)} runs failed' if len(values) < len(runs) else ''
        compared, is_far = '', bool(failed)
        if len(differences) > 1 and variant != REFERENCE:
            mean, error = statistics.fmean(differences), statistics.stdev(differences) / math.sqrt(len(differences))
            compared, is_far = f'{mean:.4f} ± {error:.4f}', is_far or abs(mean) > 2 * error
        deviation = max(_deviation(run['first'], other['first']) for run, other in pairs)
        skipped = statistics.fmean(run['skipped'] for run in runs)
        cells = [
            _mean(values) + failed,
            compared,
            '**yes**' if is_far else 'no',
            f'{100 * deviation:.3f}',
            f'{skipped:.1f}',
        ]
        rows.append([variant, *cells])
    return rows


def _mean(values: Sequence[float]) -> str:
    spread = f' ± {statistics.stdev(values):.4f}' if len(values) > 1 else ''
    return f'{statistics.fmean(values):.4f}{spread}' if values else 'none'


def _deviation(losses: Sequence[float | None], others: Sequence[float | None]) -> float:
    return max(math.inf if a is None or b is None else abs(a - b) / abs(b) for a, b in zip(losses, others))


def main(words: Sequence[str] | None = None) -> None:
    """Train what is missing, and print the page."""
    parser = options(__doc__, 1)
    parser.add_argument('--tasks', nargs='+', choices=list(TASKS), default=list(TASKS))
    parser.add_argument('--seeds', nargs='+', type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument('--records', type=Path, default=RESULTS / 'fidelity.jsonl', help='of runs, one a line')
    args = parse(parser, words)
    with tempfile.TemporaryDirectory() as folder:
        records = Path(folder, 'quick.jsonl') if args.quick else args.records
        tasks, seeds = (args.tasks[:1], args.seeds[:2]) if args.quick else (args.tasks, args.seeds)
        runs = train_missing(tasks, seeds, records, args.quick)
    heads = ('level', 'mean ± standard deviation', 'difference from O0 ± standard error', 'more than two of them',
             f'largest deviation of the loss in the first {FIRST} steps, %', 'skipped steps')  # fmt: skip
    dates = ', '.join(sorted({run['date'] for run in runs}))
    lines = [f'Seeds: {", ".join(map(str, seeds))}. The runs are of {dates}.']
    for name in tasks:
        lines += ['', f'## {TASKS[name]().title}', *table(heads, rows_of(runs, name))]
    publish(args, 'fidelity', 'Fidelity', lines)


if __name__ == '__main__':
    main()
