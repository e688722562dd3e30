"""Losses of ``AmpOptimWrapper`` with FP32 masters in them: gradients there are unscaled once, and added to the model's."""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from bits import differing
from mmengine.optim import OptimWrapper, OptimWrapperDict
from toy_amp import Net, data

from amp_wrapper import AmpOptimWrapper, AmpUsageError, FusedAdamW, FusedSGD, OverflowStreakError

LEVELS = ('O2', 'O5')
# powers of two: SGD stays exact
OPTIMIZERS: dict[str, Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]] = {
    'SGD': lambda p: torch.optim.SGD(p, lr=0.25, momentum=0.5),
    'FusedSGD': lambda p: FusedSGD(p, lr=0.25, momentum=0.5),
    'AdamW': lambda p: torch.optim.AdamW(p, lr=0.25),
    'fused AdamW': lambda p: torch.optim.AdamW(p, lr=0.25, fused=True),
    'FusedAdamW': lambda p: FusedAdamW(p, lr=0.25),
}
DYNAMIC = {'init_scale': 256.0, 'growth_interval': 1}
WAYS = {'masters': ['masters', 'masters'], 'both': ['both', 'both'], 'in turn': ['model', 'masters', 'both', 'model']}
OPTIONS: dict[str, dict[str, Any]] = {
    'plain': {},
    'dynamic': {'loss_scale': DYNAMIC},
    'fp32 sums': {'accumulate_in_fp32': True},
    'norm': {'clip_grad': {'max_norm': 2.0}},
    'value': {'clip_grad': {'type': 'value', 'clip_value': 1.0}},
}

pytestmark = pytest.mark.usefixtures('with_and_without_ops')


def make(level: str | None, optimizer: str, device: torch.device, **options: Any) -> tuple[Net, OptimWrapper]:
    """``level=None`` for plain FP32 training."""
    net = Net().to(device)
    words = {'optimizer': OPTIMIZERS[optimizer](net.trained), **options}
    if level is None:
        wrapper = OptimWrapper(**{k: v for k, v in words.items() if k not in ('accumulate_in_fp32', 'loss_scale')})
    else:
        wrapper = AmpOptimWrapper(opt_level=level, verbosity=0, **{'loss_scale': 256.0, **words})
    return net, wrapper


def stepped(wrapper: OptimWrapper) -> list[torch.Tensor]:
    if isinstance(wrapper, AmpOptimWrapper):
        return list(wrapper.master_params())
    return [p for group in wrapper.optimizer.param_groups for p in group['params']]


def loss(way: str, net: Net, wrapper: OptimWrapper, index: int = 0) -> torch.Tensor:
    with wrapper.optim_context(net):
        through = net(data(index, net.fc.weight.device)) if way != 'masters' else 0
    penalty = sum(p.square().sum() for p in stepped(wrapper)) / 2
    return {'model': through, 'masters': penalty, 'both': through + penalty, 'other': stepped(wrapper)[1].sum()}[way]


def values(wrapper: OptimWrapper) -> dict[str, torch.Tensor]:
    """What it steps, and its moments."""
    found = {}
    for index, p in enumerate(stepped(wrapper)):
        tensors = {'value': p, **wrapper.optimizer.state.get(p, {})}
        found |= {f'{index} {k}': v.detach().clone() for k, v in tensors.items() if k != 'step' and v is not None}
    return found


def attached(level: str | None, optimizer: str, device: torch.device, **options: Any) -> tuple[Net, OptimWrapper]:
    net, wrapper = make(level, optimizer, device, **options)
    wrapper.initialize_count_status(net, 0, 12)
    return net, wrapper


@pytest.mark.parametrize('level', LEVELS)
@pytest.mark.parametrize('optimizer', OPTIMIZERS)
@pytest.mark.parametrize('way', WAYS)
@pytest.mark.parametrize('options', OPTIONS)
def test_as_fp32_does(options: str, way: str, optimizer: str, level: str, device: torch.device) -> None:
    """To the bit where the arithmetic is exact."""
    parts, words = WAYS[way], OPTIONS[options]
    exact = 'SGD' in optimizer and options != 'norm'
    plain = optimizer.replace('Fused', '') if exact else optimizer
    ours, theirs = (
        attached(each, name, device, accumulative_counts=len(parts), **copy.deepcopy(words))
        for each, name in ((level, optimizer), (None, plain))
    )
    for _ in range(2):
        for index, part in enumerate(parts):
            for each in (ours, theirs):
                each[1].update_params(loss(part, *each, index) * len(parts))
        if exact:
            assert differing(values(ours[1]), values(theirs[1])) == []
        for name, value in values(theirs[1]).items():
            assert torch.allclose(values(ours[1])[name], value, rtol=1e-5, atol=1e-6), name


@pytest.mark.parametrize('level', LEVELS)
@pytest.mark.parametrize('optimizer', ['SGD', 'FusedSGD'])
@pytest.mark.parametrize('clears', [None, True, False])
def test_steps_by_hand(clears: bool | None, optimizer: str, level: str, device: torch.device) -> None:
    """Gradients that nobody clears are added to, and zeros are stepped with: momentum moves on."""
    gc.collect()
    ours, theirs = attached(level, optimizer, device), attached(None, 'SGD', device)
    # others unscale FP32 weights in place: as with GradScaler, such gradients mix with scaled ones where nobody clears them
    mixes = clears is None and optimizer == 'SGD'
    for index, way in enumerate(('masters', 'other', 'both', 'model', 'masters', 'other')):
        for net, wrapper in (ours, theirs):
            if clears is not None:
                wrapper.zero_grad(set_to_none=clears)
            wrapper.backward(loss(way, net, wrapper, index))
            wrapper.step()
        wrong = differing(values(ours[1]), values(theirs[1]))
        assert [name for name in wrong if not mixes or name.startswith('0')] == []


@pytest.mark.parametrize('level', LEVELS)
@pytest.mark.parametrize('optimizer', OPTIMIZERS)
def test_an_overflow_there_skips_the_step(optimizer: str, level: str, device: torch.device) -> None:
    net, wrapper = attached(level, optimizer, device, loss_scale=DYNAMIC)
    wrapper.update_params(loss('both', net, wrapper))
    before, scale = values(wrapper), wrapper.loss_scaler.get_scale()
    wrapper.update_params(loss('both', net, wrapper) + stepped(wrapper)[0].sum() * math.inf)
    assert wrapper.step_was_skipped() and differing(before, values(wrapper)) == []
    assert wrapper.loss_scaler.get_scale() == scale / 2
    wrapper.update_params(loss('both', net, wrapper))
    assert not wrapper.step_was_skipped() and differing(before, values(wrapper)) != []


@pytest.mark.parametrize('level', LEVELS)
@pytest.mark.parametrize('optimizer', ['SGD', 'FusedSGD'])
def test_an_accumulation_goes_on_after_a_checkpoint(optimizer: str, level: str, device: torch.device) -> None:
    """1/3 has no 16-bit number: what a checkpoint holds of such a gradient is not rounded."""
    ends = []
    for resumes in (False, True):
        net, wrapper = attached(level, optimizer, device, accumulative_counts=2)
        wrapper.update_params(loss('both', net, wrapper) + stepped(wrapper)[0].sum() / 3)
        if resumes:
            saved = copy.deepcopy(wrapper.state_dict())
            net, wrapper = attached(level, optimizer, device, accumulative_counts=2)
            wrapper.load_state_dict(saved)
        wrapper.update_params(loss('both', net, wrapper, 1))
        ends.append(values(wrapper))
    assert differing(*ends) == []


@pytest.mark.parametrize('level', LEVELS)
def test_a_step_of_the_optimizer_itself_is_refused(level: str, device: torch.device) -> None:
    net, wrapper = attached(level, 'SGD', device, loss_scale=1.0)
    wrapper.backward(loss('both', net, wrapper))
    with pytest.raises(AmpUsageError, match='beside the wrapper'):
        wrapper.optimizer.step()


@pytest.mark.parametrize('level', LEVELS)
@pytest.mark.parametrize('optimizer', ['SGD', 'FusedSGD'])
@pytest.mark.parametrize('of', ['master', 'weight'])
def test_names_in_the_error_of_too_many_skips(of: str, optimizer: str, level: str, device: torch.device) -> None:
    net, wrapper = attached(level, optimizer, device, max_consecutive_skips=1)
    spoiled = stepped(wrapper)[0] if of == 'master' else net.fc.weight
    wrapper.backward(loss('both', net, wrapper) + spoiled.float().sum() * math.inf)
    with pytest.raises(OverflowStreakError, match=r'Non-finite now: fc\.weight\.'):
        wrapper.step()


@pytest.mark.parametrize('level', LEVELS)
@pytest.mark.parametrize('optimizer', ['SGD', 'FusedSGD'])
@pytest.mark.parametrize('clears', [True, False])
def test_wrappers_of_one_model(clears: bool, optimizer: str, level: str, device: torch.device) -> None:
    """Losses reach the masters of the other wrapper, too, which has another scale."""
    scales = (8.0, 256.0) if clears else (1.0, 1.0)

    def trained(each: str | None, name: str) -> list[dict[str, torch.Tensor]]:
        model = torch.nn.ModuleDict({'one': Net(), 'two': Net(2)}).to(device)
        options: list[dict[str, Any]] = [
            {} if each is None else {'opt_level': each, 'loss_scale': scale, 'verbosity': 0} for scale in scales
        ]
        cls = OptimWrapper if each is None else AmpOptimWrapper
        wrappers = OptimWrapperDict(
            **{k: cls(optimizer=OPTIMIZERS[name](net.trained), **o) for (k, net), o in zip(model.items(), options)}
        )
        wrappers.initialize_count_status(model, 0, 8)
        for index in range(4):
            for wrapper in wrappers.values():
                with wrapper.optim_context(model):
                    through = sum(net(data(index, device)) for net in model.values())
                penalty = sum(p.square().sum() for w in wrappers.values() for p in stepped(w)) / 2
                wrapper.backward(through + penalty)
                wrapper.step()
                if clears:
                    wrapper.zero_grad()
        return [values(wrapper) for wrapper in wrappers.values()]

    for ours, theirs in zip(trained(level, optimizer), trained(None, 'SGD')):
        assert differing(ours, theirs) == []
