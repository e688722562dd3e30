"""Buffers of modules without weights, and networks that follow others in small steps, stay FP32 at the levels that cast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from doors import CAST_LEVELS, DOORS, behind
from torch import Tensor, nn

from amp_wrapper import AmpOptimWrapper, amp
from amp_wrapper.policy import LEVELS


class Rotary(nn.Module):
    """Frequencies of positions, as language models keep them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer('inv_freq', 1.0 / 10000 ** (torch.arange(0, 32, 2) / 32))

    def forward(self, positions: Tensor) -> Tensor:
        return torch.outer(positions.float(), self.inv_freq).cos()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rotary = Rotary()
        # the same tensor under another name, in a module with weights
        self.register_buffer('freq', self.rotary.inv_freq)
        self.layer = nn.Linear(16, 16)
        self.seen: Any = None

    def forward(self, positions: Tensor) -> Tensor:
        self.seen = self.rotary(positions)
        return self.layer(self.seen)


@pytest.mark.parametrize('door', DOORS)
@pytest.mark.parametrize('level', CAST_LEVELS)
def test_tables_of_modules_without_weights_are_exact(level: str, door: str) -> None:
    net, plain = Attention(), Rotary()
    positions = torch.arange(4000, 4096)
    behind(door, net, level)(positions)
    half = net.layer.weight.dtype
    assert half is not torch.float32
    assert net.rotary.inv_freq.dtype is torch.float32
    assert net.freq is net.rotary.inv_freq
    # the module gives its output on in the type of the model
    assert net.seen.dtype is half
    assert torch.equal(net.seen, plain(positions).to(half))
    saved = net.state_dict()['rotary.inv_freq']
    assert saved.dtype is torch.float32
    assert torch.equal(saved, plain.inv_freq)


@pytest.mark.parametrize('door', DOORS)
@pytest.mark.parametrize('level', LEVELS)
def test_a_table_that_is_named_gives_its_numbers_unrounded(level: str, door: str) -> None:
    class Points(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer('offset', torch.tensor([0.3]))

        def forward(self) -> Tensor:
            return torch.arange(300) * 8 + self.offset

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.points = nn.Linear(1, 1), Points()

        def forward(self, x: Tensor) -> Tensor:
            self.seen = self.points()
            return self.layer(x)

    net = Net()
    behind(door, net, level, **({} if level == 'O0' else {'keep_fp32': ['points']}))(torch.ones(1, 1))
    assert torch.equal(net.seen, torch.arange(300) * 8 + 0.3)


@pytest.mark.parametrize('level', CAST_LEVELS)
def test_statistics_and_buffers_beside_weights_are_cast_as_before(level: str) -> None:
    class Mixed(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.register_buffer('bias_table', torch.randn(8))

    net = nn.Sequential(Mixed(), nn.BatchNorm1d(4, affine=False))
    amp.initialize(net, opt_level=level, verbosity=0)
    half = net[0].weight.dtype
    assert net[0].bias_table.dtype is half
    assert net[1].running_mean.dtype is (half if level == 'O3' else torch.float32)


def _buffers() -> dict[str, tuple[Tensor, str]]:
    """Buffers, and the levels at which their neighbours become equal."""
    grid = torch.stack(torch.meshgrid(torch.arange(600.0), torch.arange(600.0), indexing='ij'))
    return {
        'betas': (1 - torch.linspace(1e-4, 0.02, 1000), 'O2 O3 O5'),
        'positions': (torch.arange(300.0), 'O5'),
        'falling': (-torch.arange(4096.0)[:, None].expand(-1, 3).contiguous(), 'O2 O3 O5'),
        'grid': (grid[1, :2], 'O5'),
        'random': (torch.randn(4, 5000), ''),
        'steps': (torch.linspace(0, 1, 5), ''),
        'constant': (torch.ones(64), ''),
        'counts': (torch.arange(5000), ''),
    }


@pytest.mark.parametrize('door', DOORS)
@pytest.mark.parametrize('level', CAST_LEVELS)
def test_other_buffers_that_lose_steps_are_named_once(level: str, door: str, log: list[str]) -> None:
    class Schedule(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            for name, (value, _) in _buffers().items():
                self.register_buffer(name, value)

    call = behind(door, nn.Sequential(Schedule()), level, verbosity=1)
    for _ in range(2):
        call(torch.ones(1, 4))
    lines = [line for line in log if 'lose steps' in line]
    assert len(lines) == 1
    for name, (_, levels) in _buffers().items():
        assert (f'0.{name}' in lines[0]) is (level in levels), name
    assert "keep_fp32=['0']" in lines[0]


@pytest.mark.parametrize('around', [lambda call: call, lambda call: torch.compile(call, backend='aot_eager')])
@pytest.mark.parametrize('level', CAST_LEVELS)
def test_masks_that_tables_give_stay_finite(level: str, around: Callable[[nn.Module], Callable[..., Tensor]]) -> None:
    class Mask(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer('mask', torch.full((4, 4), -1e9).triu(1))

        def forward(self) -> Tensor:
            return self.mask

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.mask = nn.Linear(4, 4), Mask()

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) + self.mask()

    torch._dynamo.reset()
    net = amp.initialize(Masked(), opt_level=level, verbosity=0)
    assert around(net)(torch.ones(4, 4)).isfinite().all()


# -- momentum networks -------------------------------------------------------------------------------------------------


class Pair(nn.Module):
    """A student and its teacher."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.student = nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 4))
        self.teacher = nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 4))
        self.teacher.load_state_dict(self.student.state_dict())
        self.teacher.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.student(x).float() - self.teacher(x).float() + 1).square().mean()

    @torch.no_grad()
    def follow(self) -> None:
        for s, t in zip(self.student.parameters(), self.teacher.parameters()):
            t.data.mul_(1 - 0.001).add_(s.data, alpha=0.001)


def movement(level: str, door: str) -> Tensor:
    """How far the teacher goes in thirty steps."""
    net = Pair()
    before = net.state_dict()['teacher.0.weight'].clone()
    optimizer: Any = torch.optim.SGD(net.student.parameters(), lr=0.05)
    options: dict[str, Any] = {'opt_level': level, 'verbosity': 0, 'loss_scale': 1.0}
    wrapper = AmpOptimWrapper(optimizer=optimizer, **options) if door == 'wrapper' else None
    if wrapper is None:
        net, optimizer = amp.initialize(net, optimizer, **options)
    for x in torch.randn(30, 16, 8, generator=torch.Generator().manual_seed(0)):
        if wrapper is not None:
            with wrapper.optim_context(net):
                loss = net(x)
            wrapper.update_params(loss)
        else:
            optimizer.zero_grad()
            with amp.scale_loss(net(x), optimizer) as scaled:
                scaled.backward()
            optimizer.step()
        net.follow()
    return net.state_dict()['teacher.0.weight'].float() - before


@pytest.mark.parametrize('door', DOORS)
@pytest.mark.parametrize('level', ['O1', 'O2', 'O4', 'O5'])
def test_a_teacher_follows_its_student(level: str, door: str) -> None:
    right, moved = movement('O0', door), movement(level, door)
    assert (moved - right).norm() < 0.05 * right.norm()


def types(net: nn.Module) -> dict[str, torch.dtype]:
    return {name: parameter.dtype for name, parameter in net.named_parameters()}


def frozen(*parts: nn.Module) -> None:
    for part in parts:
        part.requires_grad_(False)


def test_what_is_kept_is_named_and_what_only_looks_like_it_is_cast(log: list[str]) -> None:
    half = torch.bfloat16
    momentum = nn.ModuleDict({'encoder': nn.Linear(4, 4), 'encoder_m': nn.Linear(4, 4), 'head': nn.Linear(4, 2)})
    frozen(momentum['encoder_m'])
    amp.initialize(momentum, opt_level='O5', verbosity=1)
    assert [line for line in log if 'encoder_m stay FP32' in line]
    assert types(momentum)['encoder_m.weight'] is torch.float32
    assert types(momentum)['encoder.weight'] is half

    # the first layers of a network, which fine-tuning freezes
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    frozen(layers[0], layers[1])
    # frozen layers of adapters, beside one trained layer of their shape
    adapters = nn.ModuleDict({f'base{i}': nn.Linear(4, 4) for i in range(3)} | {'head': nn.Linear(4, 4)})
    frozen(*(adapters[f'base{i}'] for i in range(3)))
    # a frozen encoder with more layers than a trained one has
    encoders = nn.ModuleDict(
        {'text': nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), 'image': nn.Sequential(nn.Linear(4, 4))}
    )
    frozen(encoders['text'])
    for net in (layers, adapters, encoders):
        amp.initialize(net, opt_level='O5', verbosity=0)
        assert set(types(net).values()) == {half}


def test_a_save_says_that_small_steps_of_16_bit_weights_are_lost(log: list[str]) -> None:
    net = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net, optimizer = amp.initialize(net, optimizer, opt_level='O5', verbosity=1)
    net(torch.ones(1, 4))
    net.weight.data.mul_(0.5)
    net.state_dict()
    assert [line for line in log if 'too small for 16-bit' in line and 'keep_fp32' in line]


def test_teachers_are_found_inside_of_wrappers_beside_heads_and_in_pairs() -> None:
    def body() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    class Wrapper(nn.Module):
        def __init__(self, **parts: nn.Module) -> None:
            super().__init__()
            self.parts = nn.ModuleDict(parts)

    nets = {
        'wrapped': nn.ModuleDict({'student': body(), 'teacher': Wrapper(module=body())}),
        'without the head': nn.ModuleDict(
            {'student': Wrapper(body=body(), head=nn.Linear(4, 2)), 'teacher': Wrapper(body=body())}
        ),
        # BYOL: encoder and projector, and nothing like the predictor
        'without the last layer': nn.ModuleDict(
            {'student': nn.Sequential(*body(), nn.Linear(4, 4)), 'teacher': body()}
        ),
        'two': nn.ModuleDict({'student': body(), 'teacher': body(), 'second_teacher': body()}),
    }
    for name, net in nets.items():
        frozen(*(part for key, part in net.items() if 'teacher' in key))
        amp.initialize(net, opt_level='O5', verbosity=0)
        for key, dtype in types(net).items():
            assert dtype is (torch.float32 if 'teacher' in key else torch.bfloat16), (name, key)
