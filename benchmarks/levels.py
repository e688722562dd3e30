"""Measures what each level costs and saves: ``python -m benchmarks.levels [--device cuda]``.

Time of whole training steps beside FP32 and ``torch.amp``; bytes for each parameter, of the tensors and of the process, each
way in a process of its own; and the activations that a forward pass keeps for the backward pass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from amp_wrapper import amp, ops
from amp_wrapper.diagnostics.sandbox import saved_bytes as count_saved
from amp_wrapper.policy import LEVELS

from .loops import HAS_MMENGINE, TORCH_TYPES, VARIANTS, Loop, TorchAmp, make_optimizer, wrap
from .machine import MIB, Memory, alone, in_turns, median, options, parse, publish, ratio, say, table
from .models import Training, resnet50, tiny_transformer, trainings, vit

PARTS = ('weights', 'masters', 'optimizer state', 'gradients')


# -- whole training steps ----------------------------------------------------------------------------------------------


def time_rows(training: Training, rounds: int, device: str) -> list[list[str]]:
    """Return a row for each variant: milliseconds, the time of FP32 divided by it, and on a GPU the peak of a step."""
    loops = {variant: Loop(training, variant, device) for variant in VARIANTS}
    times = in_turns({name: loop.step for name, loop in loops.items()}, rounds, device)
    rows = []
    for name, loop in loops.items():
        row = [training.name, name, median(times[name]), ratio(times['FP32'], times[name])]
        if device == 'cuda':
            memory = Memory(device)
            memory.reset()
            before = memory.now()
            loop.step()
            row.append(f'{(memory.peak() - before) / MIB:.0f}')
        rows.append(row)
        say(' | '.join(row))
    return rows


# -- bytes for each parameter ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Setup:
    """A way to train a perceptron.

    Attributes:
        level: Opt level, or a way of torch alone.
        optimizer: As :func:`~benchmarks.loops.make_optimizer` takes it.
        api: 'wrapper' for ``AmpOptimWrapper``, 'functional' for ``amp.initialize``, 'torch'.
        split: Whether masters are split.
        small_state: Whether moments are bfloat16.
        device: 'cpu' or 'cuda'.
    """

    level: str
    optimizer: str = 'FusedAdamW'
    api: str = 'wrapper'
    split: bool = False
    small_state: bool = False
    device: str = 'cpu'

    @property
    def name(self) -> str:
        """Name of the row."""
        parts = {self.level: True, 'split masters': self.split, '16-bit moments': self.small_state}
        return ', '.join(part for part, applies in parts.items() if applies)


SETUPS = (
    *(Setup(name, 'AdamW', 'torch') for name in TORCH_TYPES),
    *(Setup(level) for level in LEVELS),
    Setup('O2', split=True),
    Setup('O2', split=True, small_state=True),
    Setup('O2', 'AdamW'),
    *(Setup(level, api='functional') for level in ('O0', 'O2', 'O3', 'O5')),
    *(Setup(level, 'FusedSGD') for level in ('O0', 'O2', 'O3', 'O5')),
    Setup('O2', 'SGD'),
)


class Trained:
    """A model that is trained one way; gradients stay until :meth:`clear`.

    Args:
        setup: Which way.
        model: In FP32.
    """

    def __init__(self, setup: Setup, model: nn.Module) -> None:
        self.setup, self.model = setup, model
        words = {'state_dtype': torch.bfloat16} if setup.small_state else {}
        self.optimizer = make_optimizer(setup.optimizer, model.parameters(), **words)
        self.wrapper: TorchAmp | None = None
        if setup.api == 'functional':
            # 1, so that the first step is taken
            amp.initialize(model, self.optimizer, opt_level=setup.level, loss_scale=1.0, verbosity=0)
        elif setup.api == 'torch':
            self.wrapper = TorchAmp(self.optimizer, TORCH_TYPES[setup.level])
        else:
            options_of_level = {'master_weights': 'split'} if setup.split else {}
            self.wrapper = wrap(self.optimizer, model, setup.level, loss_scale=1.0, **options_of_level)

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss."""
        if self.wrapper is None:
            return self.model(x).float().square().mean()
        with self.wrapper.optim_context(self.model):
            return self.model(x).float().square().mean()

    def step(self, x: Tensor) -> None:
        """Forward, backward, step."""
        if self.wrapper is None:
            with amp.scale_loss(self.forward(x), self.optimizer) as scaled:
                scaled.backward()
            self.optimizer.step()
        else:
            self.wrapper.backward(self.forward(x))
            self.wrapper.step()

    def clear(self) -> None:
        """Clear the gradients."""
        (self.wrapper or self.optimizer).zero_grad()

    def held(self) -> list[int]:
        """Return the bytes by :data:`PARTS`; memory that several tensors share counts once."""
        weights = list(self.model.parameters())
        stepped = [parameter for group in self.optimizer.param_groups for parameter in group['params']]
        if self.setup.split:
            # its halves belong to the engine
            engine = self.wrapper._engine if HAS_MMENGINE else self.wrapper.engine
            stepped += [copy for copy in engine.params.lists().copies if copy is not None]
        masters = [parameter for parameter in stepped if not any(parameter is weight for weight in weights)]
        state = [value for values in self.optimizer.state.values() for value in values.values()]
        gradients = [parameter.grad for parameter in (*weights, *masters)]
        return [_bytes_of(tensors) for tensors in (weights, masters, state, gradients)]


def _bytes_of(tensors: Iterable[object]) -> int:
    storages = [tensor.untyped_storage() for tensor in tensors if isinstance(tensor, Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def perceptron(width: int, layers: int) -> nn.Sequential:
    """Build layers of one width without biases: everything is cast at O2, and nearly nothing is activations."""
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))


def train_perceptron(setup: Setup, width: int, layers: int) -> list[float]:
    """Train three steps, and return bytes for each parameter.

    Returns:
        Those of :data:`PARTS` after the third step, what the process or GPU holds then, its peak in the third step, and what it
        holds when gradients were cleared.
    """
    torch.set_num_threads(1)
    memory = Memory(setup.device)
    # libraries that the first product and the first step load
    warm = Trained(setup, perceptron(64, 2).to(setup.device))
    warm.step(torch.ones(2, 64, device=setup.device))
    warm.clear()
    x = torch.ones(2, width, device=setup.device)
    start = memory.now()
    trained = Trained(setup, perceptron(width, layers).to(setup.device))
    for _ in range(2):
        trained.step(x)
        trained.clear()
    memory.now()
    memory.reset()
    trained.step(x)
    peak, held, parts = memory.peak(), memory.now(), trained.held()
    trained.clear()
    count = width**2 * layers
    return [part / count for part in (*parts, held - start, peak - start, memory.now() - start)]


def memory_rows(setups: Sequence[Setup], width: int, layers: int, device: str) -> list[list[str]]:
    """Return a row for each setup."""
    rows = []
    for setup in setups:
        if (setup.split or setup.small_state) and not ops.serves(device):
            # they need the compiled ops
            continue
        found = alone(train_perceptron, dataclasses.replace(setup, device=device), width, layers)
        cells = [f'{value:.1f}' for value in (*found[:4], sum(found[:4]), *found[4:])]
        rows.append([setup.name, setup.api, f'`{setup.optimizer}`', *cells])
        say(' | '.join(rows[-1]))
    return rows


# -- activations -------------------------------------------------------------------------------------------------------


def saved_bytes(variant: str, training: Training, batch: int, device: str) -> int:
    """Return what one forward pass keeps for the backward pass, without weights and buffers."""
    setup = Setup(variant, 'SGD', 'torch') if variant in TORCH_TYPES else Setup(variant, 'FusedSGD')
    trained = Trained(setup, training.build().to(device))
    with count_saved(trained.model) as saved:
        trained.forward(torch.zeros(batch, *training.shape[1:], device=device))
    return sum(saved)


def activation_rows(training: Training, device: str) -> list[list[str]]:
    """Return a row for each variant: MB for each sample, the share of FP32, and MB whatever the batch is."""
    rows, base = [], 0
    for variant in VARIANTS:
        one, two = (saved_bytes(variant, training, batch, device) for batch in (1, 2))
        base = base or two - one
        cells = (f'{(two - one) / 1e6:.1f}', f'{(two - one) / base:.2f}', f'{(2 * one - two) / 1e6:.1f}')
        rows.append([training.name, variant, *cells])
        say(' | '.join(rows[-1]))
    return rows


def main(words: Sequence[str] | None = None) -> None:
    """Measure, and print the page."""
    args = parse(options(__doc__, 9), words)
    peak = ['MiB that a step adds at its peak'] if args.device == 'cuda' else []
    times = [row for each in trainings(args.device, args.quick) for row in time_rows(each, args.rounds, args.device)]
    width, layers = (64, 2) if args.quick else (2500, 8)
    held = memory_rows(SETUPS[3:8:2] if args.quick else SETUPS, width, layers, args.device)
    models = [Training('ResNet-50', resnet50, (1, 3, 224, 224), 'SGD'), Training('ViT-B', vit, (1, 196, 768), 'AdamW')]
    if args.quick:
        models = [Training('1 block of width 16', tiny_transformer, (1, 4, 16), 'AdamW')]
    saved = [row for training in models for row in activation_rows(training, args.device)]
    heads = ['level', 'interface', 'optimizer', *PARTS, 'together', 'of the process', 'at its peak', 'between steps']
    publish(args, 'levels', 'Time and memory at each level', [
        'Medians; ratios are medians of the ratios round by round, with their quartiles. Gradients are clipped by their norm.',
        '', '## Whole training steps', *table(['model', 'level', 'ms', 'times as fast as FP32', *peak], times),
        '## Bytes for each parameter', '',
        f'A perceptron of {width**2 * layers / 1e6:.3g} million parameters, after a step, with gradients.', *table(heads, held),
        '## Activations', *table(['model', 'level', 'MB for each sample', 'of FP32', 'MB whatever the batch is'], saved),
    ])  # fmt: skip


if __name__ == '__main__':
    main()
