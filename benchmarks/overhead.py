"""Measures what the package adds to a training: ``python -m benchmarks.overhead [--only casts] [--device cuda]``.

Each row compares two ways of the same work that take turns: forward passes of many small modules, whole steps of tiny layers,
steps that copy buffers, steps that are watched, checkpoints, and processes that import the package.
"""

from __future__ import annotations

import copy
import functools
import io
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from amp_wrapper import FusedAdamW, FusedSGD, amp
from amp_wrapper.checkpoint import file as checkpoint_file

from .loops import SCALE, Loop
from .machine import ROOT, in_turns, median, options, parse, publish, ratio, say, table
from .models import CLASSES, Training, resnet, small_resnet, small_transformer, tiny_transformer

Call = Callable[[], object]
HEADS = ('work', 'without', 'ms', 'with', 'ms', 'ratio')


def pair_rows(work: str, ways: Mapping[str, Call], rounds: int, device: str, wall: bool = False) -> list[list[str]]:
    """Time ways in turns, and compare each with the first one."""
    times = in_turns(ways, rounds, device, wall=wall)
    base, *others = ways
    return [
        [work, base, median(times[base]), name, median(times[name]), ratio(times[name], times[base])] for name in others
    ]


# -- casts -------------------------------------------------------------------------------------------------------------


class Fp32Norm(nn.LayerNorm):
    """A norm in FP32, as at O4 on every device and as autocast has it on a GPU; on a CPU autocast leaves it in 16-bit."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise."""
        return super().forward(x.float())


def small_modules(count: int, norm: Callable[[int], nn.Module] = nn.LayerNorm) -> nn.Sequential:
    """Build blocks of three small modules, so that the host limits their speed."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), norm(8), nn.ReLU()) for _ in range(count)))


def forward(model: nn.Module, x: Tensor, dtype: torch.dtype | None = None) -> None:
    """Run a forward pass, with ``torch.autocast`` where a type is given."""
    if dtype is None:
        model(x)
    else:
        with torch.autocast(x.device.type, dtype):
            model(x)


def casts(rounds: int, device: str, quick: bool) -> list[list[str]]:
    """Compare forward passes of many small modules."""
    count, x = (5, 100)[not quick], torch.ones(4, 8, device=device)
    models = {
        level: amp.initialize(small_modules(count).to(device), opt_level=level, verbosity=0)
        for level in ('O0', 'O4', 'O5')
    }
    ours = {level: functools.partial(forward, model, x) for level, model in models.items()}
    plain, half = small_modules(count).to(device), small_modules(count).to(device, torch.bfloat16)
    norms = small_modules(count, Fp32Norm).to(device)
    work, rows = f'forward pass of {3 * count} modules', []
    for name, base, level in (
        ('FP32', functools.partial(forward, plain, x), 'O0'),
        ('bfloat16', functools.partial(forward, half, x.bfloat16()), 'O5'),
        ('torch.autocast, norms in FP32', functools.partial(forward, norms, x, torch.bfloat16), 'O4'),
    ):
        rows += pair_rows(work, {name: base, level: ours[level]}, rounds, device)
    return rows


# -- whole steps -------------------------------------------------------------------------------------------------------


class Script:
    """Training steps through ``amp.initialize``.

    Args:
        training: Model and inputs.
        level: The opt level.
        device: Where.
        restores: Whether a skipped step restores buffers.
        interval: Of the numbers of a watch; 0 for a watch without numbers, None for no watch.
    """

    def __init__(
        self, training: Training, level: str, device: str, restores: bool = True, interval: int | None = None
    ) -> None:
        torch.manual_seed(0)
        model = training.build().to(device)
        self.inputs, self.labels = training.batch(device)
        kind = FusedAdamW if training.optimizer == 'AdamW' else FusedSGD
        scale = {'init_scale': SCALE} if level in ('O1', 'O2') else None
        self.model, self.optimizer = amp.initialize(
            model, kind(model.parameters(), lr=1e-4), True, level,
            loss_scale=scale, restore_buffers_on_skip=restores, verbosity=0,
        )  # fmt: skip
        if interval is not None:
            self.watch = amp.monitor(self.optimizer, interval or None)

    def step(self) -> None:
        """Forward, backward, clip, step, clear."""
        loss = F.cross_entropy(self.model(self.inputs).float(), self.labels)
        with amp.scale_loss(loss, self.optimizer) as scaled:
            scaled.backward()
        clip_grad_norm_(amp.master_params(self.optimizer), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def steps(self, count: int) -> dict[str, Tensor]:
        """Train so many steps, and return the weights and buffers."""
        for _ in range(count):
            self.step()
        return copy.deepcopy(self.model.state_dict())


def tiny_layers() -> nn.Module:
    """Build 99 layers of width 4, and one that classifies."""
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(99)), nn.Linear(4, CLASSES))


def host(rounds: int, device: str, quick: bool) -> list[list[str]]:
    """Compare whole steps of tiny layers, whose time is that of the host, with torch's own AMP and fused AdamW."""
    training, rows = Training('100 tiny layers', tiny_layers, (2, 4), 'AdamW'), []
    for base, levels in (('FP32', ['O0']), ('torch.amp', ['O1', 'O2']), ('torch.amp, bfloat16', ['O4', 'O5'])):
        ways: dict[str, Call] = {base: Loop(training, base, device).step}
        for level in levels[: 1 if quick else 2]:
            ways[f'{level}, wrapper'] = Loop(training, level, device).step
            ways[f'{level}, functional'] = Script(training, level, device).step
        rows += pair_rows(f'step of {training.name}', ways, rounds, device)
    return rows


def resnet26() -> nn.Module:
    """Build a ResNet with as many BatchNorms for its size as usual ones have."""
    return resnet(64, (2, 2, 2, 2))


def buffers(rounds: int, device: str, quick: bool) -> list[list[str]]:
    """Compare steps that keep copies of buffers, for the case of a skip, with steps that do not."""
    training = Training('ResNet-26', resnet26, (2, 3, 64, 64), 'SGD')
    if quick:
        training = Training('small ResNet', small_resnet, (2, 3, 32, 32), 'SGD')
    ways = {'nothing restored': Script(training, 'O5', device, restores=False).step}
    ways['restores buffers'] = Script(training, 'O5', device).step
    return pair_rows(f'O5 step of {training.name}', ways, rounds, device)


def monitor(rounds: int, device: str, quick: bool) -> list[list[str]]:
    """Compare steps that are watched with steps that are not, and check that they compute the same."""
    trainings = [Training('1 block of width 16', tiny_transformer, (2, 4, 16), 'AdamW')]
    if not quick:
        trainings = [
            Training('small ResNet, 16 images', small_resnet, (16, 3, 32, 32), 'SGD'),
            Training('4 transformer blocks', small_transformer, (8, 64, 256), 'AdamW'),
        ]
    kinds, rows = {'no watch': None, 'watched': 0, 'watched, numbers of each step': 1}, []
    for training in trainings:
        for level in ('O2', 'O5') if device == 'cuda' or quick else ('O5',):
            scripts = {name: Script(training, level, device, interval=interval) for name, interval in kinds.items()}
            wanted, *others = (script.steps(3) for script in scripts.values())
            if not all(torch.equal(state[name], wanted[name]) for state in others for name in wanted):
                raise RuntimeError(f'{training.name}, {level}: watched steps have other weights')
            ways = {name: script.step for name, script in scripts.items()}
            rows += pair_rows(f'{level} step of {training.name}', ways, rounds, device)
    return rows


# -- files and processes -----------------------------------------------------------------------------------------------


def write_in_memory(checkpoint: object, path: Path) -> None:
    """Serialise in memory, then write, as mmengine does with a local file."""
    with io.BytesIO() as memory:
        torch.save(checkpoint, memory)
        path.write_bytes(memory.getvalue())


def checkpoints(rounds: int, device: str, quick: bool) -> list[list[str]]:
    """Compare files with checksums, flushed to the disk under another name first, with plain ones."""
    count = 4 if quick else 100
    content = {part: {str(index): torch.randn(250_000) for index in range(count)} for part in ('model', 'optimizer')}
    with tempfile.TemporaryDirectory() as name:
        ours, plain = Path(name, 'ours.pth'), Path(name, 'plain.pth')
        write: dict[str, Call] = {'mmengine, not flushed': functools.partial(write_in_memory, content, plain)}
        write['whole and flushed'] = functools.partial(checkpoint_file.save, content, ours)
        read: dict[str, Call] = {'torch.load': functools.partial(torch.load, plain, weights_only=True)}
        read['with checksums'] = functools.partial(checkpoint_file.load, ours)
        size = f'{count // 4} million weights with momentum'
        return [
            *pair_rows(f'write {size}', write, rounds, 'cpu', wall=True),
            *pair_rows(f'read {size}', read, rounds, 'cpu', wall=True),
        ]


def imports(rounds: int, device: str, quick: bool) -> list[list[str]]:
    """Compare processes that import the package with one that imports torch, by their processor time."""
    commands = {
        'import torch': ['-c', 'import torch'],
        'from amp_wrapper import amp': ['-c', 'from amp_wrapper import amp'],
        'import amp_wrapper': ['-c', 'import amp_wrapper'],
        'amp-wrapper info --help': ['-m', 'amp_wrapper', 'info', '--help'],
    }
    times: dict[str, list[float]] = {name: [] for name in commands}
    # the first round writes what is compiled to bytecode
    for turn, name in itertools.product(range(min(rounds, 5) + 1), commands):
        before = os.times()
        subprocess.run([sys.executable, *commands[name]], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        after = os.times()
        if turn:
            used = after.children_user + after.children_system - before.children_user - before.children_system
            times[name].append(used)
    base, *others = commands
    return [['process', base, median(times[base]), name, median(times[name]), ratio(times[name], times[base])]
            for name in others]  # fmt: skip


PARTS = {part.__name__: part for part in (casts, host, buffers, monitor, checkpoints, imports)}


def main(words: Sequence[str] | None = None) -> None:
    """Measure, and print the page."""
    parser = options(__doc__, 25)
    parser.add_argument('--only', nargs='+', choices=list(PARTS), default=list(PARTS))
    args = parse(parser, words)
    rows = []
    for name in args.only:
        say(name)
        rows += PARTS[name](args.rounds, args.device, args.quick)
    note = 'Medians; ratios are medians of the ratios round by round, with their quartiles.'
    publish(args, 'overhead', 'What the package adds', [note, *table(HEADS, rows)])


if __name__ == '__main__':
    main()
