"""Inputs that are no activations: of modules that stay FP32, of arguments named by keep_inputs, and masks beyond the range."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from doors import CAST_LEVELS, DOORS, behind
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from amp_wrapper import AmpConfigError, amp
from amp_wrapper.policy import LEVELS


class Sees(nn.Linear):
    """A layer that notes what it was given."""

    seen: Any = None

    def forward(self, x: Tensor, **rest: Any) -> Tensor:
        self.seen = x
        return super().forward(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = Sees(3, 8), nn.Linear(8, 2)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.head(self.encoder(batch['points']))


POINTS = torch.rand(100, 3, generator=torch.Generator().manual_seed(0)) * 60 + 10


@pytest.mark.parametrize('options', [{'keep_fp32': ['encoder']}, {'keep_fp32': [Sees]}, {'fp32_ops': [Sees]}])
@pytest.mark.parametrize('door', DOORS)
@pytest.mark.parametrize('level', ['O1', 'O2', 'O3', 'O4', 'O5'])
def test_a_kept_module_gets_the_inputs_of_the_model_as_they_were(
    level: str, door: str, options: dict[str, Any]
) -> None:
    net = Net()
    behind(door, net, level, **options)({'points': POINTS})
    assert torch.equal(net.encoder.seen, POINTS)


@pytest.mark.parametrize('level', ['O2', 'O5'])
def test_what_was_written_to_meanwhile_counts(level: str) -> None:
    class Shifted(Net):
        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            batch['points'].add_(1)
            return super().forward(batch)

    net = amp.initialize(Shifted(), opt_level=level, verbosity=0, keep_fp32=['encoder'])
    points = POINTS.clone()
    net({'points': points})
    half = net.head.weight.dtype
    assert torch.equal(net.encoder.seen, (POINTS.to(half) + 1).float())
    assert torch.equal(points, net.encoder.seen)


def test_a_kept_module_gets_them_in_a_graph_as_well() -> None:
    torch._dynamo.reset()
    net = amp.initialize(Net(), opt_level='O5', verbosity=0, keep_fp32=['encoder'])
    torch.compile(lambda batch: net(batch), backend='aot_eager', fullgraph=True)({'points': POINTS})
    assert torch.equal(net.encoder.seen, POINTS)


@pytest.mark.parametrize('given', ['kept', 'registry'])
@pytest.mark.parametrize('is_leaf', [True, False])
@pytest.mark.parametrize('level', LEVELS)
def test_what_differentiates_by_its_input_sees_all_of_its_gradient(level: str, is_leaf: bool, given: str) -> None:
    class Energy(Net):
        def forward(self, points: Tensor) -> Any:
            points.requires_grad_(True)
            energy = self.encoder(points) if given == 'kept' else torch.linalg.norm(points, dim=-1) ** 2
            return torch.autograd.grad(energy.sum() + points.sum(), points)[0].float()

    def forces(level: str) -> Tensor:
        torch.manual_seed(0)
        options = {} if level == 'O0' else {'keep_fp32': ['encoder']}
        net = amp.initialize(Energy(), opt_level=level, verbosity=0, **options)
        return net(POINTS.clone().requires_grad_(is_leaf))

    right, found = forces('O0'), forces(level)
    eps = torch.finfo(torch.bfloat16 if level in ('O4', 'O5') else torch.float16).eps
    assert (found - right).abs().max() <= 2 * eps * right.abs().max()


class CheckedNorm(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        assert x.dtype is torch.float32
        return super().forward(x)


@pytest.mark.parametrize('options', [{'keep_fp32': ['CheckedNorm']}, {'keep_fp32': ['1']}, {'fp32_ops': [CheckedNorm]}])
@pytest.mark.parametrize('door', DOORS)
@pytest.mark.parametrize('level', ['O1', 'O2', 'O3', 'O4', 'O5'])
def test_a_batchnorm_that_is_named_gets_fp32(level: str, door: str, options: dict[str, Any]) -> None:
    net = nn.Sequential(nn.Linear(8, 8), CheckedNorm(8), nn.Linear(8, 4))
    behind(door, net, level, **options)(torch.randn(4, 8)).sum().backward()


# -- keep_inputs -------------------------------------------------------------------------------------------------------


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer = Embed(), nn.Linear(3, 3)

    def forward(self, x: Tensor, timestep: Tensor, scale: Any = None) -> Tensor:
        self.types = (x.dtype, timestep.dtype, None if scale is None else scale['s'].dtype)
        return self.layer(x) + self.embed(timestep)


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, timestep: Tensor) -> Tensor:
        self.seen = timestep
        return (timestep * self.weight).sin()[:, None]


STEPS = torch.tensor([999.3986, 988.4937])


@pytest.mark.parametrize('by_name', [True, False])
@pytest.mark.parametrize('door', DOORS)
@pytest.mark.parametrize('level', LEVELS)
def test_arguments_that_are_named_stay_as_they_are(level: str, door: str, by_name: bool) -> None:
    net = Denoiser()
    call = behind(door, net, level, keep_inputs=['timestep', 'scale'])
    scale = {'s': torch.ones(1)}
    result = call(torch.randn(2, 3), timestep=STEPS, scale=scale) if by_name else call(torch.randn(2, 3), STEPS, scale)
    result.sum().backward()
    assert torch.equal(net.embed.seen, STEPS)
    assert net.types == (net.layer.weight.dtype, torch.float32, torch.float32)


@pytest.mark.parametrize('way', ['entry of a dict', 'by place', 'by name'])
@pytest.mark.parametrize('door', DOORS)
@pytest.mark.parametrize('level', CAST_LEVELS)
def test_arguments_of_a_module_inside_stay_too(level: str, door: str, way: str) -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Denoiser()

        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            return self.net(args[0]['x'], args[0]['t']) if way == 'entry of a dict' else self.net(*args, **kwargs)

    net = Around()
    x = torch.randn(2, 3)
    args = {'entry of a dict': [{'x': x, 't': STEPS}], 'by place': [x, STEPS], 'by name': [x]}[way]
    behind(door, net, level, keep_inputs=['timestep'])(*args, **({'timestep': STEPS} if way == 'by name' else {}))
    assert torch.equal(net.net.embed.seen, STEPS)


def test_without_it_they_are_cast() -> None:
    net = amp.initialize(Denoiser(), opt_level='O5', verbosity=0)
    net(torch.randn(2, 3), STEPS)
    assert net.embed.seen.dtype is torch.bfloat16


@pytest.mark.parametrize('door', DOORS)
def test_a_name_that_no_forward_has_is_refused_before_anything_changes(door: str) -> None:
    net = Denoiser()
    with pytest.raises(AmpConfigError, match=r"keep_inputs='timesteps'.*timestep") as caught:
        behind(door, net, 'O5', keep_inputs=['timesteps'])(torch.randn(2, 3), STEPS)
    assert 'scale' in str(caught.value)
    assert net.layer.weight.dtype is torch.float32


@pytest.mark.parametrize('value', [3, ['a b'], [nn.Linear], ['']])
def test_what_is_no_name_is_refused(value: Any) -> None:
    with pytest.raises(AmpConfigError, match='keep_inputs'):
        amp.initialize(Denoiser(), opt_level='O5', keep_inputs=value)


# -- numbers beyond the range ------------------------------------------------------------------------------------------


@pytest.mark.parametrize('door', DOORS)
@pytest.mark.parametrize('level', CAST_LEVELS)
def test_masks_are_clamped_to_the_range_with_one_warning(level: str, door: str, log: list[str]) -> None:
    class Masked(nn.Linear):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            self.seen = mask
            return super().forward(x)

    net = Masked(4, 4)
    mask = torch.tensor([torch.finfo(torch.float32).min, -1e9, 1e9, -torch.inf, torch.nan, 0.5])
    call = behind(door, net, level, verbosity=1)
    for _ in range(3):
        call(torch.ones(1, 4), mask)
    limit = torch.finfo(net.weight.dtype).max
    expected = mask.clamp(-limit, limit).to(net.weight.dtype)
    expected[3] = -torch.inf
    assert torch.equal(net.seen.nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))
    assert net.seen[:2].isfinite().all()
    assert len([line for line in log if 'beyond the range' in line]) == 1


@pytest.mark.parametrize('verbosity', [0, 1])
@pytest.mark.parametrize('around', [None, 'aot_eager'])
@pytest.mark.parametrize('level', CAST_LEVELS)
def test_a_mask_that_comes_first_and_late_is_clamped(level: str, around: str | None, verbosity: int) -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(8, 4)

        def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
            hidden = self.embed(ids)
            return (hidden @ hidden.T + mask).softmax(-1)

    torch._dynamo.reset()
    net = amp.initialize(Attends(), opt_level=level, verbosity=verbosity)
    call: Any = net if around is None else torch.compile(net, backend=around)
    for number in (0.0, torch.finfo(torch.float32).min):
        assert call(torch.arange(4), torch.full((4, 4), number)).isfinite().all()


def test_activations_still_overflow() -> None:
    class Loud(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.seen = x
            return super().forward(x)

    class Grows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), Loud(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x).float() * 1e9)

    net = amp.initialize(Grows(), opt_level='O2', verbosity=0)
    net(torch.ones(1, 4))
    assert net.second.seen.isinf().any()


@pytest.mark.parametrize('reentrant', [True, False])
def test_recomputation_sees_the_same_input(reentrant: bool) -> None:
    class Checkpointed(Net):
        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            return self.head(checkpoint(self.encoder, batch['points'], use_reentrant=reentrant))

    net = amp.initialize(Checkpointed(), opt_level='O5', verbosity=0, keep_fp32=['encoder'])
    result = net({'points': POINTS.clone().requires_grad_(reentrant)}).sum()
    assert torch.equal(net.encoder.seen, POINTS)
    net.encoder.seen = None
    result.backward()
    assert torch.equal(net.encoder.seen, POINTS)


def test_arguments_by_name_alone_and_beside_many() -> None:
    class Many(nn.Linear):
        def forward(self, *xs: Tensor, t: Tensor, **others: Tensor) -> Tensor:
            self.types = [*(x.dtype for x in xs), t.dtype, *(x.dtype for x in others.values())]
            return super().forward(xs[0])

    net = nn.Sequential(Many(4, 4))
    amp.initialize(net, opt_level='O5', verbosity=0, keep_inputs=['t', 'time'])
    x = torch.ones(1, 4)
    net[0](x, x, t=x, time=x, other=x)
    assert net[0].types == [torch.bfloat16, torch.bfloat16, torch.float32, torch.float32, torch.bfloat16]


@pytest.mark.parametrize('level', ['O2', 'O5'])
def test_the_range_is_not_looked_at_where_numbers_cannot_be_read(level: str) -> None:
    net = amp.initialize(nn.Linear(4, 4), opt_level=level)
    assert torch.vmap(net)(torch.ones(3, 4)).shape == (3, 4)
    net = amp.initialize(nn.Linear(4, 4, device='meta'), opt_level=level)
    assert net(torch.ones(3, 4, device='meta')).is_meta


@pytest.mark.parametrize('level', ['O2', 'O5'])
def test_sparse_inputs_are_cast(level: str) -> None:
    class Graph(nn.Linear):
        def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
            self.seen = adjacency
            return super().forward(x)

    net = amp.initialize(Graph(4, 4), opt_level=level, verbosity=1)
    net(torch.ones(4, 4), torch.eye(4).to_sparse())
    assert net.seen.dtype is net.weight.dtype and net.seen.layout is torch.sparse_coo
