"""Models that are 16-bit before: trained ones on request, frozen parts without a word; and what is saved of both."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from bits import same_bits
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from toy_amp import logged

from amp_wrapper import AmpOptimWrapper, FusedAdamW, amp
from amp_wrapper.errors import AmpAttachError, AmpConfigError
from amp_wrapper.policy import LEVELS, resolve

APIS = ('amp', 'wrapper')
HALF = (torch.float16, torch.bfloat16)


class Adapted(nn.Module):
    """A base layer, frozen mostly, with a low-rank FP32 adapter beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.base = nn.Linear(4, 4)
        self.down, self.up = nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.head(torch.relu(self.base(x) + self.up(self.down(x)).to(self.base.weight.dtype)))


def frozen_base(dtype: torch.dtype, device: torch.device) -> Adapted:
    torch.manual_seed(1)
    net = Adapted().to(device)
    for part in (net.norm, net.base):
        part.to(dtype).requires_grad_(False)
    return net


class Run:
    """One training through either door."""

    def __init__(self, api: str, net: nn.Module, optimizer: Optimizer, level: str, **words: Any) -> None:
        self.net, self.optimizer = net, optimizer
        self.wrapper: AmpOptimWrapper | None = None
        if api == 'amp':
            words.setdefault('verbosity', 0)
            amp.initialize(net, optimizer, opt_level=level, loss_scale=8.0, **words)
        else:
            self.wrapper = AmpOptimWrapper(opt_level=level, optimizer=optimizer, loss_scale=8.0, **words)
            self.wrapper.attach(net)

    def step(self, x: Tensor) -> Tensor:
        if self.wrapper is not None:
            with self.wrapper.optim_context(self.net):
                loss = self.net(x).square().mean()
            self.wrapper.update_params(loss)
            return loss.detach()
        self.optimizer.zero_grad()
        loss = self.net(x).square().mean()
        with amp.scale_loss(loss, self.optimizer) as scaled:
            scaled.backward()
        self.optimizer.step()
        return loss.detach()

    def stepped(self) -> list[Tensor]:
        return list(amp.master_params(self.optimizer) if self.wrapper is None else self.wrapper.master_params())


@pytest.mark.parametrize('api', APIS)
@pytest.mark.parametrize('dtype', HALF)
@pytest.mark.parametrize('level', LEVELS)
def test_trained_16_bit_weights(level: str, dtype: torch.dtype, api: str, device: torch.device) -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).to(device).to(dtype)
    # some are FP32
    net[2].float()
    optimizer = AdamW(net.parameters(), lr=0.1, eps=1e-3)
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(AmpAttachError, match=r'16-bit already: 0\.weight.*from_16bit=True'):
        Run(api, net, optimizer, level)
    assert all(same_bits(value, before[name]) for name, value in net.state_dict().items())
    with logged() as lines:
        run = Run(api, net, optimizer, level, from_16bit=True, verbosity=1)
    told = [line for line in lines if '16-bit before' in line]
    assert len(told) == 1 and '4 trainable weights' in told[0] and '2.weight' not in told[0]
    policy = resolve(level)
    want = torch.float16 if level == 'O3' else torch.float32
    assert {p.dtype for p in run.stepped()} == {want}
    assert net[0].weight.dtype is (policy.cast_model_type if policy.casts_model else torch.float32)
    assert net[1].weight.dtype is net[1].running_mean.dtype is (torch.float16 if level == 'O3' else torch.float32)
    # the values as they were, unrounded a second time, where there is room for them
    if level != 'O3':
        assert all(torch.equal(value.float(), before[name].float()) for name, value in net.state_dict().items())
    x = torch.randn(5, 4, device=device)
    losses = [float(run.step(x)) for _ in range(4)]
    assert losses[-1] < losses[0]
    assert net.state_dict()['0.weight'].dtype is torch.float32


@pytest.mark.parametrize('owns', ['all', 'trained'])
@pytest.mark.parametrize('api', APIS)
@pytest.mark.parametrize('dtype', HALF)
@pytest.mark.parametrize('level', LEVELS)
def test_frozen_16_bit_parts(level: str, dtype: torch.dtype, api: str, owns: str, device: torch.device) -> None:
    """No permission, no word, no master; they stay what they are, in training, files and a resume."""
    net = frozen_base(dtype, device)
    chosen = list(net.parameters()) if owns == 'all' else [p for p in net.parameters() if p.requires_grad]
    before = copy.deepcopy(net.state_dict())
    with logged() as lines:
        run = Run(api, net, AdamW(chosen, lr=0.1, eps=1e-3), level, verbosity=1)
    assert not [line for line in lines if '16-bit before' in line]
    policy = resolve(level)
    if owns == 'all' and policy.casts_model:
        assert {p.dtype for p in run.stepped() if not p.requires_grad} == {policy.cast_model_type}
    assert {p.dtype for p in run.stepped() if p.requires_grad} == {torch.float16 if level == 'O3' else torch.float32}
    x = torch.randn(5, 4, device=device)
    losses = [float(run.step(x)) for _ in range(4)]
    assert losses[-1] < losses[0]
    state = net.state_dict()
    # at the levels that cast, files are FP32; elsewhere frozen parts are as they came
    assert state['base.weight'].dtype is (torch.float32 if policy.casts_model else dtype)
    if policy.cast_model_type in (dtype, None, torch.float32):
        assert torch.equal(state['base.weight'].float(), before['base.weight'].float())

    file = io.BytesIO()
    torch.save({'model': state, 'optimizer': run.optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    expected = [float(run.step(x)) for _ in range(2)]
    again = frozen_base(dtype, device)
    optimizer = AdamW(
        list(again.parameters()) if owns == 'all' else [p for p in again.parameters() if p.requires_grad],
        lr=0.1,
        eps=1e-3,
    )
    resumed = Run(api, again, optimizer, level)
    again.load_state_dict(saved['model'])
    optimizer.load_state_dict(saved['optimizer'])
    assert [float(resumed.step(x)) for _ in range(2)] == expected
    assert all(same_bits(value, net.state_dict()[name]) for name, value in again.state_dict().items())


@pytest.mark.parametrize('api', APIS)
@pytest.mark.parametrize('level', ['O2', 'O5'])
def test_a_frozen_part_that_is_trained_later(level: str, api: str, device: torch.device) -> None:
    net = frozen_base(torch.bfloat16, device)
    run = Run(api, net, SGD(net.parameters(), lr=0.1), level)
    x = torch.randn(5, 4, device=device)
    run.step(x)
    assert sum(p.dtype is torch.float32 for p in run.stepped()) == 4
    net.requires_grad_(True)
    before = net.state_dict()['base.weight'].clone()
    run.step(x)
    # before anybody asks for them
    assert {p.dtype for p in run.optimizer.param_groups[0]['params']} == {torch.float32}
    after = net.state_dict()['base.weight']
    assert not torch.equal(before, after) and torch.equal(after.to(net.base.weight.dtype), net.base.weight)


def test_split_masters(device: torch.device) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).to(device).bfloat16()
    net[0].requires_grad_(False)
    before = copy.deepcopy(net.state_dict())
    run = Run(
        'wrapper',
        net,
        FusedAdamW(net.parameters(), lr=1e-3),
        'O2',
        master_weights='split',
        from_16bit=True,
        verbosity=0,
    )
    assert all(torch.equal(value, before[name].float()) for name, value in net.state_dict().items())
    run.step(torch.randn(5, 4, device=device))
    assert not torch.equal(net.state_dict()['1.weight'], before['1.weight'].float())
    assert torch.equal(net.state_dict()['0.weight'], before['0.weight'].float())


@pytest.mark.parametrize('level', LEVELS)
def test_kept_modules_are_fp32(level: str, device: torch.device) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(device).bfloat16().requires_grad_(False)
    net.append(nn.Linear(4, 2).to(device))
    run = Run('amp', net, SGD(net[2].parameters(), lr=0.1), level, keep_fp32=['1'])
    run.step(torch.randn(5, 4, device=device))
    assert (net[1].weight.dtype is torch.float32) == (level != 'O0')


def test_arguments() -> None:
    with pytest.raises(AmpConfigError, match="from_16bit='yes' must be True or False"):
        amp.initialize(nn.Linear(1, 1), from_16bit='yes')  # type: ignore[call-overload]
    with pytest.raises(AmpConfigError, match='from_16bit=1'):
        AmpOptimWrapper(optimizer=SGD(nn.Linear(1, 1).parameters(), lr=0.1), from_16bit=1)  # type: ignore[arg-type]


# -- the arguments that the wrapper has as well -------------------------------------------------------------------------


@pytest.mark.parametrize('several', [False, True])
@pytest.mark.parametrize('level', ['O2', 'O3', 'O5'])
def test_keep_fp32(level: str, several: bool, device: torch.device) -> None:
    net = nn.ModuleDict({'body': nn.Linear(4, 4), 'head': nn.Sequential(nn.Linear(4, 2))}).to(device)
    optimizer = SGD(net.parameters(), lr=0.1)
    models = [net, nn.Linear(2, 2).to(device)] if several else net
    amp.initialize(models, optimizer, opt_level=level, keep_fp32='head.*', verbosity=0)
    assert net['head'][0].weight.dtype is torch.float32
    assert net['body'].weight.dtype in HALF
    with pytest.raises(AmpConfigError, match=r"keep_fp32='heads' matches no module.*head"):
        amp.initialize(nn.ModuleDict({'head': nn.Linear(1, 1)}), opt_level=level, keep_fp32='heads', verbosity=0)


class Sums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = torch.special.expit(self.fc(x)).dtype
        return self.fc(x)


@pytest.mark.parametrize('level', [level for level in LEVELS if level != 'O0'])
def test_fp32_ops(level: str, device: torch.device) -> None:
    x = torch.ones(1, 2, device=device)
    for wide in (None, dict(name='torch.special.expit', output='float32')):
        net = Sums().to(device)
        amp.initialize(net, opt_level=level, fp32_ops=wide, verbosity=0)
        net(x)
        assert (net.seen is torch.float32) == (wide is not None)
    with pytest.raises(AmpConfigError, match='fp32_ops'):
        amp.initialize(Sums(), opt_level=level, fp32_ops='torch.special.expitt')
