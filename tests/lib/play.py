"""A training script is a list of acts, which plain FP32 training, ``amp`` and ``AmpOptimWrapper`` play alike.

Losses are linear in the weights, and inputs, weights and learning rates are small dyadic numbers, so gradients and their sums
are exact in every type. Plain FP32 training, which leaves out the steps that overflow, is what must come of a script at any
level: a difference of one bit is a gradient that was lost, counted twice or scaled wrongly.

>>> script = [('backward', (0,), 0), ('backward', (0, 1), 1, 0), ('step',)]  # the second pass overflows in part 0
>>> play(script, Amp, Setup('O2')) == play(script, Plain, Setup())
True
"""

from __future__ import annotations

import copy
import dataclasses
import io
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_wrapper import AmpOptimWrapper, FusedSGD, amp

#: The levels at which training with exact numbers is that of FP32; O3 has no FP32 weights.
EXACT_LEVELS = ('O0', 'O1', 'O2', 'O4', 'O5')
WEIGHT_TYPES = {'O2': torch.float16, 'O3': torch.float16, 'O5': torch.bfloat16}
#: What is scaled: small numbers, so that only what is meant to overflow does.
SCALE = dict(init_scale=8.0, growth_interval=2, max_scale=32.0, min_scale=0.5)

Act = tuple[Any, ...]
Step = Callable[[Iterable[Any]], Optimizer]


class Part(nn.Module):
    """A weight that the levels cast, one that stays FP32 where BatchNorm does, and statistics; linear in both weights."""

    total: Tensor
    count: Tensor

    def __init__(self, factor: int = 1) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2, bias=False)
        self.norm = nn.BatchNorm1d(2, track_running_stats=False)
        self.norm.bias.requires_grad_(False)
        self.register_buffer('total', torch.zeros(2))
        self.register_buffer('count', torch.tensor(0))
        with torch.no_grad():
            self.fc.weight.copy_(torch.tensor([[1.0, 2.0], [0.5, -1.0]]) * factor)
            self.norm.weight.copy_(torch.tensor([1.0, -2.0]) + factor)

    @property
    def trained(self) -> list[nn.Parameter]:
        return [self.fc.weight, self.norm.weight]

    def forward(self, x: Tensor) -> Tensor:
        """Shape (1, 2) gives a scalar."""
        if self.training:
            with torch.no_grad():
                self.total.neg_().add_(x[0])
                self.count = self.count + 1
        return self.fc(x).float().sum() + (self.norm.weight.float() * x.float()).sum()


class Model(nn.Module):
    """The sum of those of its parts that a call names."""

    def __init__(self, parts: int = 2) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Part(index + 1) for index in range(parts))

    def forward(self, x: Tensor, reached: Sequence[int]) -> Tensor:
        return torch.stack([self.parts[index](x * (index + 1)) for index in reached]).sum()


def data(index: int) -> Tensor:
    """(1, 2) of small dyadic numbers, others at each index."""
    return torch.tensor([[(1.0, 0.5, 2.0, -1.0)[index % 4], (0.25, 1.0, -0.5)[index % 3]]])


def sgd(groups: Iterable[Any]) -> Optimizer:
    return torch.optim.SGD(groups, momentum=0.5)


def fused_sgd(groups: Iterable[Any]) -> Optimizer:
    return FusedSGD(groups, momentum=0.5)


def adam(groups: Iterable[Any]) -> Optimizer:
    return torch.optim.Adam(groups)


@dataclasses.dataclass(frozen=True)
class Setup:
    """What a script is played with.

    Attributes:
        level: Plain FP32 training has none.
        optimizer: Makes the optimizer from its groups.
        losses: How many loss scales there are.
        clip: The largest element of a gradient; None for any. Norms have roundings of their own.
        grouped: How many of the parts the optimizer has at the beginning.
        learns_when_cleared: Whether scales learn from passes whose gradients are cleared without a step.
        options: More for ``amp.initialize`` or ``AmpOptimWrapper``.
    """

    level: str = 'O0'
    optimizer: Step = sgd
    losses: int = 1
    clip: float | None = None
    grouped: int = 2
    learns_when_cleared: bool = True
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def group(self, part: Part, index: int) -> dict[str, Any]:
        return {'params': part.trained, 'lr': 0.25 / 2**index}


class Scale:
    """What a dynamic loss scale must be."""

    def __init__(self) -> None:
        self.value, self.clean = SCALE['init_scale'], 0

    def update(self, overflowed: bool) -> None:
        self.clean = 0 if overflowed else self.clean + 1
        if overflowed:
            self.value = max(self.value / 2, SCALE['min_scale'])
        elif self.clean == SCALE['growth_interval']:
            self.value, self.clean = min(self.value * 2, SCALE['max_scale']), 0


class Plain:
    """FP32 training without the package, which leaves out the steps that overflow: the methods are the acts of a script."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.model = Model()
        self.grouped = setup.grouped
        self.optimizer = setup.optimizer([setup.group(self.model.parts[i], i) for i in range(setup.grouped)])  # type: ignore[arg-type]
        self.scales = [Scale() for _ in range(setup.losses)]
        #: Of each loss since the last step: whether it overflowed.
        self.found: dict[int, bool] = {}
        self.before: dict[str, Tensor] | None = None
        self.skipped = False

    # -- acts ---------------------------------------------------------------------------------------------------------

    def backward(
        self,
        reached: Sequence[int] = (0,),
        index: int = 0,
        hit: int | None = None,
        loss_id: int = 0,
        value: float = math.inf,
    ) -> None:
        """One forward and backward pass.

        Args:
            reached: The parts that the loss reaches.
            index: Of the data.
            hit: The part whose gradient gets ``value``; None for none.
            loss_id: Of the loss.
            value: inf or NaN.
        """
        handle = None
        if hit is not None:
            handle = self.weight(hit).register_hook(lambda gradient: torch.full_like(gradient, value))
        self._pass(lambda: self.model(data(index), reached), loss_id)
        if handle is not None:
            handle.remove()
        self.found[loss_id] = self.found.get(loss_id, False) or hit is not None

    def penalty(self, reached: Sequence[int] = (), index: int = 0, hit: bool = False) -> None:
        """One backward pass of a loss that contains what the optimizer steps; more bits of it are used with each step.

        Args:
            reached: The parts that the loss reaches through the model.
            index: Of the data.
            hit: Whether the gradient of the first weight becomes infinite.
        """

        def loss() -> Tensor:
            stepped = self.masters()
            total = torch.stack([p.square().sum() for p in stepped]).sum() / 2
            total = total + self.model(data(index), reached) if reached else total
            return total + stepped[0].sum() * math.inf if hit else total

        self._pass(loss, 0)
        self.found[0] = self.found.get(0, False) or hit

    def step(self) -> None:
        """A step, and gradients are cleared."""
        self.skipped = any(self.found.values())
        parameters = [p for group in self.optimizer.param_groups for p in group['params']]
        if self.skipped:
            if self.before is not None:
                self.model.load_state_dict(self.before, strict=False)
        else:
            if self.setup.clip is not None:
                nn.utils.clip_grad_value_(parameters, self.setup.clip)
            self.optimizer.step()
        self.before = None
        self._learn()
        self.clear()

    def clear(self, set_to_none: bool = True) -> None:
        """Gradients are cleared without a step."""
        if self.setup.learns_when_cleared:
            self._learn()
        self.found = {}
        self.optimizer.zero_grad(set_to_none)

    def look(self) -> None:
        """Somebody reads weights: those of the model and of the optimizer agree from here on."""
        self.state()

    def write_weight(self, part: int, value: float) -> None:
        """A weight of the model is written to in place."""
        with torch.no_grad():
            self.weight(part).copy_(torch.tensor([[value, -value], [value / 2, 0.0]]))

    def load_weight(self, part: int, value: float) -> None:
        """A weight is loaded, with numbers that 16 bits do not hold."""
        loaded = torch.tensor([[value, -value], [value / 3, 1.0]]) / 3
        self.model.parts[part].load_state_dict({'fc.weight': loaded}, strict=False)

    def write_master(self, part: int, value: float) -> None:
        """What the optimizer steps for a weight is written to in place."""
        with torch.no_grad():
            self.masters()[2 * part].mul_(0.5).add_(value)

    def write_buffer(self, part: int, value: float) -> None:
        """A buffer is loaded: what a skipped step restores is this."""
        self.model.parts[part].load_state_dict({'total': torch.full((2,), value)}, strict=False)
        if self.before is not None:
            self.before[f'parts.{part}.total'] = torch.full((2,), value)

    def train(self, part: int, on: bool) -> None:
        """A weight is frozen, or trains again."""
        self.weight(part).requires_grad_(on)

    def add_group(self) -> None:
        """The second part joins the optimizer."""
        self.optimizer.add_param_group(self.setup.group(self.model.parts[self.grouped], self.grouped))  # type: ignore[arg-type]
        self.grouped += 1

    def evaluate(self) -> None:
        """Validation: nothing changes by it."""
        self.model.eval()
        with torch.no_grad():
            assert self.model(data(0), (0, 1)).isfinite()
        self.model.train()

    def call(self, name: str) -> None:
        """A method that the optimizer has of its own, such as ``train`` and ``eval`` of schedulefree."""
        getattr(self.optimizer, name)()

    def copy_model(self) -> None:
        """A copy has the same values, and what is written to it is its own."""
        copied = copy.deepcopy(self.model)
        found, wanted = copied.state_dict(), self.model.state_dict()
        assert all(torch.equal(found[name], value) for name, value in wanted.items())
        with torch.no_grad():
            for tensor in (*copied.parameters(), *copied.buffers()):
                tensor.zero_()

    def save_and_load(self) -> None:
        """The training ends, and goes on from its file in new objects."""
        file = io.BytesIO()
        torch.save(self._saved(), file)
        trains = [[p.requires_grad for p in part.parameters()] for part in self.model.parts]
        scales, grouped, skipped = self.scales, self.grouped, self.skipped
        setup = self.setup
        self.__init__(dataclasses.replace(setup, grouped=grouped))  # type: ignore[misc]
        self.setup, self.scales, self.skipped = setup, scales, skipped
        file.seek(0)
        self._load(torch.load(file, weights_only=True))
        for part, flags in zip(self.model.parts, trains):
            for parameter, flag in zip(part.parameters(), flags):
                parameter.requires_grad_(flag)

    # -- what is compared ---------------------------------------------------------------------------------------------

    def weight(self, part: int) -> nn.Parameter:
        """The weight of a part that the levels cast."""
        return self.model.get_parameter(f'parts.{part}.fc.weight')

    def masters(self) -> list[Tensor]:
        """What the optimizer steps."""
        return [p for group in self.optimizer.param_groups for p in group['params']]

    def loss_scales(self) -> list[float]:
        return [scale.value for scale in self.scales]

    def was_skipped(self) -> bool:
        return self.skipped

    def state(self) -> dict[str, Any]:
        """FP32 weights, buffers, moments and scales."""
        saved = self.model.state_dict()
        for name, parameter in self.model.named_parameters():
            assert torch.equal(parameter, saved[name].to(parameter.dtype)), f'{name} is not its FP32 value, rounded'
            wanted = torch.float32 if 'norm' in name else WEIGHT_TYPES.get(self.setup.level, torch.float32)
            assert parameter.dtype is wanted, name
        # that of torch's own SGD counts no steps
        moments = {
            (index, key): value.tolist()
            # of foreign optimizers, some keep counters beside the states of their parameters
            for index, state in self.optimizer.state_dict().get('state', {}).items()
            for key, value in (state.items() if isinstance(state, dict) else ())
            if isinstance(value, Tensor) and (key != 'step' or 'exp_avg' in state)
            # a momentum of zeros has not begun
            if key != 'momentum_buffer' or bool(value.any())
        }
        return dict(values={name: v.tolist() for name, v in saved.items()}, moments=moments, scales=self.loss_scales())

    # -- what the doors do in their own ways ----------------------------------------------------------------------------

    def _learn(self) -> None:
        for loss_id, overflowed in self.found.items():
            self.scales[loss_id].update(overflowed)
        self.found = {}

    def _pass(self, loss: Callable[[], Tensor], loss_id: int) -> None:
        if self.before is None:
            self.before = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        loss().backward()

    def _saved(self) -> dict[str, Any]:
        return dict(model=self.model.state_dict(), optimizer=self.optimizer.state_dict())

    def _load(self, saved: dict[str, Any]) -> None:
        self.model.load_state_dict(saved['model'])
        self.optimizer.load_state_dict(saved['optimizer'])


class Amp(Plain):
    """A script of the functional API."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        words = dict(opt_level=setup.level, num_losses=setup.losses, loss_scale=SCALE, verbosity=0, **setup.options)
        amp.initialize(self.model, self.optimizer, **words)

    def _pass(self, loss: Callable[[], Tensor], loss_id: int) -> None:
        with amp.scale_loss(loss(), self.optimizer, loss_id) as scaled:
            scaled.backward()

    def step(self) -> None:
        if self.setup.clip is not None:
            nn.utils.clip_grad_value_(amp.master_params(self.optimizer), self.setup.clip)
        self.optimizer.step()
        self.clear()

    def clear(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def write_buffer(self, part: int, value: float) -> None:
        self.model.parts[part].load_state_dict({'total': torch.full((2,), value)}, strict=False)

    def masters(self) -> list[Tensor]:
        return list(amp.master_params(self.optimizer))

    def loss_scales(self) -> list[float]:
        return [amp.loss_scale(self.optimizer, loss_id) for loss_id in range(self.setup.losses)]

    def was_skipped(self) -> bool:
        return amp.last_step_skipped(self.optimizer)

    def _saved(self) -> dict[str, Any]:
        return {**super()._saved(), 'amp': amp.state_dict(optimizers=self.optimizer)}

    def _load(self, saved: dict[str, Any]) -> None:
        super()._load(saved)
        amp.load_state_dict(saved['amp'], self.optimizer)


class Wrapper(Amp):
    """A training with the optimizer wrapper."""

    def __init__(self, setup: Setup) -> None:
        Plain.__init__(self, setup)
        words: dict[str, Any] = dict(loss_scale=SCALE, verbosity=0, max_consecutive_skips=None, **setup.options)
        if setup.clip is not None:
            words['clip_grad'] = dict(type='value', clip_value=setup.clip)
        self.wrapper = AmpOptimWrapper(
            opt_level=setup.level, num_losses=setup.losses, optimizer=self.optimizer, **words
        )
        self.wrapper.attach(self.model)

    def _pass(self, loss: Callable[[], Tensor], loss_id: int) -> None:
        with self.wrapper.optim_context(self.model):
            value = loss()
        self.wrapper.backward(value, loss_id)

    def step(self) -> None:
        self.wrapper.step()
        self.clear()

    def clear(self, set_to_none: bool = True) -> None:
        self.wrapper.zero_grad(set_to_none=set_to_none)

    def masters(self) -> list[Tensor]:
        return list(self.wrapper.master_params())

    def loss_scales(self) -> list[float]:
        return [scaler.get_scale() for scaler in self.wrapper.loss_scalers]

    def was_skipped(self) -> bool:
        return self.wrapper.step_was_skipped()

    def _saved(self) -> dict[str, Any]:
        return dict(model=self.model.state_dict(), wrapper=self.wrapper.state_dict())

    def _load(self, saved: dict[str, Any]) -> None:
        self.model.load_state_dict(saved['model'])
        self.wrapper.load_state_dict(saved['wrapper'])


DOORS: dict[str, type[Amp]] = {'amp': Amp, 'wrapper': Wrapper}


def play(script: Iterable[Act], door: type[Plain], setup: Setup) -> list[dict[str, Any]]:
    """Play the acts of a script: the state after each step, and at the end."""
    training, states = door(setup), []
    for name, *words in script:
        getattr(training, name)(*words)
        if name == 'step':
            states.append({**training.state(), 'skipped': training.was_skipped()})
    return [*states, training.state()]


def oracle_of(door: type[Plain], setup: Setup) -> Setup:
    """The setup of the plain training that a training must equal."""
    return dataclasses.replace(setup, level='O0', options={}, learns_when_cleared=door is not Wrapper)


def check(script: Iterable[Act], door: type[Plain], setup: Setup) -> None:
    """Play a script, and the plain FP32 training beside it, and compare their bits."""
    script = list(script)
    assert play(script, door, setup) == play(script, Plain, oracle_of(door, setup))
