"""What a training step holds, in bytes for each parameter: from the level's definition, of its tensors, of its process."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_wrapper import AmpOptimWrapper, FusedAdamW, FusedSGD, amp
from amp_wrapper.diagnostics.step import SavedBytes
from amp_wrapper.policy import LEVELS, resolve

from .step_training import TORCH_TYPES
from .wrapping import TorchAmp

#: What makes an optimizer, and how many moments it keeps.
OPTIMIZERS: dict[str, tuple[Callable[..., Optimizer], int]] = {
    'FusedAdamW': (FusedAdamW, 2),
    'FusedSGD': (FusedSGD, 1),
    'AdamW': (torch.optim.AdamW, 2),
    'SGD': (torch.optim.SGD, 1),
}
PARTS = ('weights', 'masters', 'optimizer state', 'gradients')


@dataclasses.dataclass(frozen=True)
class Setup:
    """A way to train.

    Attributes:
        level: Opt level, or one of torch's own ways (:data:`~benchmarks.step_training.TORCH_TYPES`).
        optimizer: A key of :data:`OPTIMIZERS`.
        api: 'wrapper' for ``AmpOptimWrapper``, 'functional' for ``amp.initialize``, 'torch'.
        split: Whether masters are split.
        small_state: Whether moments are bfloat16.
    """

    level: str
    optimizer: str
    api: str = 'wrapper'
    split: bool = False
    small_state: bool = False

    @property
    def name(self) -> str:
        """For a table."""
        more = (', split masters' if self.split else '') + (', 16-bit moments' if self.small_state else '')
        return self.level + more

    @property
    def words(self) -> dict[str, Any]:
        """Options of the level."""
        return {'master_weights': 'split'} if self.split else {}


def formula(setup: Setup) -> dict[str, int]:
    """Bytes for each parameter that is cast, from what the level means.

    Args:
        setup: How it is trained.

    Returns:
        By :data:`PARTS`, when a step is done and its gradients are still there; and 'casts', the 16-bit copies of weights that
        autocast keeps from the forward pass to the backward pass.
    """
    fused, moments = setup.optimizer.startswith('Fused'), OPTIMIZERS[setup.optimizer][1]
    if setup.api == 'torch':
        weight, master, autocast = 4, 0, TORCH_TYPES[setup.level] is not None
    else:
        policy = resolve(setup.level, **setup.words)
        weight = policy.cast_model_type.itemsize if policy.cast_model_type is not None else 4
        master = 2 if policy.split_masters else 4 if policy.master_weights else 0
        autocast = policy.autocast_dtype is not None
    # torch's optimizers keep moments in the type of what they step; ours in FP32, unless they are told otherwise
    stepped = weight if master == 0 else 4
    moment = 2 if setup.small_state else 4 if fused else stepped
    # an FP32 gradient of the master in place of the weight's, where something outside of a fused step reads it
    is_wide = master == 4 and (setup.api == 'functional' or not fused)
    values = (weight, master, moments * moment, 4 if is_wide else weight)
    return {**dict(zip(PARTS, values)), 'casts': 2 if autocast else 0}


def setups(optimizer: str, api: str) -> list[Setup]:
    """Rows of the table of one optimizer: each level, and the variants that only a fused one has."""
    if api == 'torch':
        return [Setup(name, optimizer, api) for name in TORCH_TYPES]
    found = [Setup(level, optimizer, api) for level in LEVELS]
    if optimizer.startswith('Fused') and api == 'wrapper':
        found.append(Setup('O2', optimizer, split=True))
        found.append(Setup('O2', optimizer, split=True, small_state=True))
    return found


# -- real tensors ------------------------------------------------------------------------------------------------------


def perceptron(width: int, layers: int) -> nn.Sequential:
    """Layers of one width without biases: everything is cast at O2, and nearly nothing is activations."""
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))


class Trained:
    """A model that is trained one way.

    Args:
        setup: Which.
        model: FP32, on any device.
    """

    def __init__(self, setup: Setup, model: nn.Module) -> None:
        self.setup, self.model = setup, model
        words: dict[str, Any] = dict(lr=1e-5)
        if OPTIMIZERS[setup.optimizer][1] == 1:
            words['momentum'] = 0.9
        if setup.small_state:
            words['state_dtype'] = torch.bfloat16
        self.optimizer = OPTIMIZERS[setup.optimizer][0](model.parameters(), **words)
        # 1, so that the first step is taken
        options = dict(opt_level=setup.level, loss_scale=1.0, verbosity=0)
        self.wrapper: Any = None
        if setup.api == 'wrapper':
            self.wrapper = AmpOptimWrapper(optimizer=self.optimizer, **options, **setup.words)
            self.wrapper.attach(model)
        elif setup.api == 'functional':
            amp.initialize(model, self.optimizer, **options)
        else:
            self.wrapper = TorchAmp(self.optimizer, dtype=TORCH_TYPES[setup.level])

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        if self.setup.api == 'functional':
            return self.model(x).float().square().mean()
        with self.wrapper.optim_context(self.model):
            return self.model(x).float().square().mean()

    def backward(self, loss: Tensor) -> None:
        """Gradients come."""
        if self.setup.api == 'functional':
            with amp.scale_loss(loss, self.optimizer) as scaled:
                scaled.backward()
        elif self.setup.api == 'wrapper':
            self.wrapper.backward(loss)
        else:
            loss.backward()

    def step(self) -> None:
        """Weights change; gradients stay."""
        (self.wrapper if self.setup.api == 'wrapper' else self.optimizer).step()

    def clear(self) -> None:
        """Gradients go."""
        (self.wrapper if self.setup.api == 'wrapper' else self.optimizer).zero_grad()

    def held(self) -> dict[str, int]:
        """Bytes by :data:`PARTS`; memory that several tensors share counts once."""
        weights = list(self.model.parameters())
        stepped = [parameter for group in self.optimizer.param_groups for parameter in group['params']]
        others = [parameter for parameter in stepped if not any(parameter is weight for weight in weights)]
        if self.setup.split:
            copies = self.wrapper._engine.params.lists().copies
            others += [copy for copy in copies if copy is not None and not any(copy is weight for weight in weights)]
        state = [v for values in self.optimizer.state.values() for v in values.values() if isinstance(v, Tensor)]
        gradients = [parameter.grad for parameter in (*weights, *others) if parameter.grad is not None]
        return dict(zip(PARTS, map(_bytes_of, (weights, others, state, gradients))))


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def saved_bytes(setup: Setup, model: nn.Module, x: Tensor) -> int:
    """What one forward pass keeps for the backward pass, without weights and buffers.

    Args:
        setup: How it is trained.
        model: FP32; it is attached here.
        x: The batch.
    """
    trained = Trained(setup, model)
    saved = SavedBytes(model)
    with saved:
        trained.forward(x)
    return saved.total


# -- the memory of a process ---------------------------------------------------------------------------------------------


def process_memory(key: str) -> int:
    """Bytes of this process, as Linux counts them: 'VmRSS' now, 'VmHWM' at the peak."""
    lines = Path('/proc/self/status').read_text(encoding='ascii').splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(key)).split()[1])


def measure_here(setup: Setup, width: int, layers: int) -> dict[str, float]:
    """Train three steps in this process, and look what it holds. Bytes for each parameter.

    Returns:
        'counted': of the tensors after the step; 'held': what the process has more than before, at the same moment;
        'between': after gradients were cleared; 'peak': the most during the third step.
    """
    torch.set_num_threads(1)
    x = torch.ones(2, width)
    # libraries that the first product and the first step load
    warm = Trained(dataclasses.replace(setup), perceptron(64, 2))
    for _ in range(2):
        warm.backward(warm.forward(torch.ones(2, 64)))
        warm.step()
        warm.clear()
    del warm
    gc.collect()
    start = process_memory('VmRSS')
    trained = Trained(setup, perceptron(width, layers))
    count = sum(parameter.numel() for parameter in trained.model.parameters())
    found: dict[str, float] = {}
    for turn in range(3):
        if turn == 2:
            gc.collect()
            Path('/proc/self/clear_refs').write_text('5', encoding='ascii')
        trained.backward(trained.forward(x))
        trained.step()
        if turn == 2:
            found['peak'] = (process_memory('VmHWM') - start) / count
            found['held'] = (process_memory('VmRSS') - start) / count
            found['counted'] = sum(trained.held().values()) / count
        trained.clear()
    gc.collect()
    found['between'] = (process_memory('VmRSS') - start) / count
    return found


def measure(setup: Setup, width: int = 2500, layers: int = 8) -> dict[str, float]:
    """:func:`measure_here` in a process of its own.

    Args:
        setup: How it is trained.
        width: Of each layer.
        layers: How many; together some 50 million parameters.
    """
    words = json.dumps({**dataclasses.asdict(setup), 'width': width, 'layers': layers})
    # what is freed goes back to the system at once
    env = {**os.environ, 'MALLOC_MMAP_THRESHOLD_': '65536', 'MALLOC_TRIM_THRESHOLD_': '65536', 'OMP_NUM_THREADS': '1'}
    done = subprocess.run(
        [sys.executable, '-m', 'benchmarks.numbers_memory', words],
        capture_output=True,
        text=True,
        env=env,
        cwd=Path(__file__).parents[1],
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def all_setups() -> Iterable[Setup]:
    """Of the table that is measured: AdamW through each interface, SGD through the wrapper."""
    return itertools.chain(
        setups('AdamW', 'torch'),
        setups('FusedAdamW', 'wrapper'),
        setups('AdamW', 'wrapper'),
        setups('FusedAdamW', 'functional'),
        setups('SGD', 'torch'),
        setups('FusedSGD', 'wrapper'),
        setups('SGD', 'wrapper'),
        setups('FusedSGD', 'functional'),
    )


if __name__ == '__main__':
    chosen = json.loads(sys.argv[1])
    size = {name: chosen.pop(name) for name in ('width', 'layers')}
    print(json.dumps(measure_here(Setup(**chosen), **size)))
