"""Fused optimizers in trainings at every level, with a compiled library, and without one by torch's own fused step."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bits import same_bits
from fused_training import KINDS, MOMENTUM, THEIRS, TRAININGS, OpCount, Training, advance, agree, build, weights
from op_lists import ops_from, skip_without_library
from torch import Tensor, nn

from amp_wrapper import AmpOptimWrapper, AmpUsageError, FusedAdamW, FusedSGD, ops

both = pytest.mark.usefixtures('with_and_without_ops')
trainings = pytest.mark.parametrize(('setting', 'door', 'kind'), TRAININGS)


@both
# torch's moments have 16 bits at O3, and it takes no split masters
@pytest.mark.parametrize(('setting', 'door', 'kind'), [row for row in TRAININGS if row[0] in ('O0', 'O1', 'O2', 'O5')])
def test_training_is_that_of_torchs_optimizer(setting: str, door: str, kind: str, device: torch.device) -> None:
    """The same scales, skips and counts, and weights, masters and moments to the last places; in the wrapper also clipped."""
    ours, theirs = (Training(setting, door, kind, device, ours=is_ours) for is_ours in (True, False))
    bad = -1 if setting in ('O0', 'O5') and door == 'amp' else 4
    for training in (ours, theirs):
        training.run(0, 1, 2, 3, 4, 5, bad=bad)
    agree(ours.saved(), theirs.saved(), but=('step', 'param_groups'))


@both
@trainings
def test_step_is_one_call(setting: str, door: str, kind: str, device: torch.device) -> None:
    """Of our op, or of torch's fused function. A step in Python made more than a hundred ops for each parameter."""
    counts = []
    if 'split' in setting:
        skip_without_library(device)
    for depth in (2, 12):
        training, count = Training(setting, door, kind, device, depth), OpCount()
        training.run(0)
        training.run(1, within=lambda: count)  # noqa: B023
        counts.append(sum(count.calls.values()))
        if ops.serves(device) and kind != 'dampened':
            assert count.calls['fused_adam' if 'adam' in kind else 'fused_sgd'] == 1
        elif kind != 'dampened' and (setting != 'O3' or device.type != 'cpu'):
            # 16-bit weights and those that stay float32 are a call each
            function = {'adamw': '_fused_adamw_', 'adam': '_fused_adam_'}.get(kind, '_fused_sgd_')
            assert 1 <= count.calls[function] <= 2
    # of the 20 that are more, each is widened, and in a step without fused kernels updated by itself
    assert (counts[1] - counts[0]) / 20 < (0.1 if ops.serves(device) and kind != 'dampened' else 15), counts


# torch's moments have 16 bits at O3
@pytest.mark.parametrize(('setting', 'door', 'kind'), [t for t in TRAININGS if 'split' not in t[0] and t[0] != 'O3'])
def test_run_goes_on_with_and_without_library(setting: str, door: str, kind: str, device: torch.device) -> None:
    def part(*indices: int, bad: int, resumed: Any = None) -> dict[str, Any]:
        training = Training(setting, 'wrapper', kind, device)
        if resumed is not None:
            # masters and 16-bit weights are there before they are loaded
            training.run(7)
            training.model.load_state_dict(resumed['model'])
            training.wrapper.load_state_dict(resumed['wrapper'])
        training.run(*indices, bad=bad)
        return training.saved()

    skip_without_library(device)
    middle = part(0, 1, 2, bad=0)
    end = part(3, 4, 5, bad=4, resumed=middle)
    with ops_from('torch'):
        other = part(0, 1, 2, bad=0)
        agree(part(3, 4, 5, bad=4, resumed=middle), end)
    agree(other, middle)
    agree(part(3, 4, 5, bad=4, resumed=other), end)


@both
def test_skipped_step_changes_no_bit(device: torch.device) -> None:
    for setting, _, kind in TRAININGS:
        if setting not in ('O0', 'O1', 'O2', 'O5') and not ops.serves(device):
            continue
        training = Training(setting, 'wrapper', kind, device)
        training.run(0, 1)
        tensors = [*training.model.parameters(), *(p for g in training.optimizer.param_groups for p in g['params'])]
        tensors += [value for state in training.optimizer.state.values() for value in state.values()]
        before = [tensor.detach().clone() for tensor in tensors]
        training.run(2, bad=2)
        assert all(map(same_bits, before, (tensor.detach() for tensor in tensors))), (setting, kind)
        training.run(3)
        assert not all(map(same_bits, before, (tensor.detach() for tensor in tensors))), (setting, kind)


def test_split_masters_need_the_library(device: torch.device) -> None:
    training = Training('O5 split', 'wrapper', 'adamw', device)
    with ops_from('torch'), pytest.raises(AmpUsageError, match=r"master_weights='split'.*build-ops"):
        training.run(0)


@pytest.mark.usefixtures('library')
def test_split_masters_keep_what_16_bits_have_no_room_for(device: torch.device) -> None:
    """From the largest numbers of float16 to its subnormal ones; a skip leaves the upper weight beside a tie."""
    start = torch.tensor(
        [1.0001, 60000.5, 0.1, 2.0**-14, 1.0001 * 2.0**-15, 2.0**-16, -3.0003, 1 + 2**-8], device=device
    )
    start = torch.cat([start, 2.0**-16 * (1 + 3 * torch.rand(56, device=device))])
    for level in ('O2', 'O5'):
        model = nn.Linear(64, 1, bias=False).to(device)
        model.weight.data.copy_(start)
        optimizer = FusedSGD(model.parameters(), lr=0.5)
        words: dict[str, Any] = dict(opt_level=level, loss_scale=1.0, skip_nonfinite=True, verbosity=0)
        wrapper = AmpOptimWrapper(optimizer=optimizer, master_weights='split', **words)
        for lr, factor, wanted in ((0.5, math.inf, start), (0.0, 1.0, start), (0.5, 1.0, start - 0.5)):
            optimizer.param_groups[0]['lr'] = lr
            with wrapper.optim_context(model):
                loss = model(torch.ones(1, 64, device=device)).float().sum() * factor
            wrapper.update_params(loss)
            torch.testing.assert_close(model.state_dict()['weight'][0], wanted, rtol=0, atol=0)
            # where rounding to nearest-even would give the lower
            assert wanted is not start or level == 'O2' or model.weight[0, 7] == 1 + 2**-7


@both
def test_all_types_in_one_group(device: torch.device) -> None:
    """As by torch's optimizer, where gradients take turns."""
    types = (torch.float32, torch.float64, torch.complex64, torch.complex128, torch.float16, torch.bfloat16)
    for kind in KINDS:
        mine = [nn.Parameter(torch.ones(5, dtype=dtype, device=device)) for dtype in types * 2]
        theirs = [nn.Parameter(p.detach().clone()) for p in mine]
        cls, options = KINDS[kind]
        optimizers = cls(mine, **options), THEIRS[cls](theirs, foreach=False, **options)
        for step in range(4):
            for index, parameter in itertools.chain(enumerate(mine), enumerate(theirs)):
                parameter.grad = None if (index + step) % 4 == 0 else torch.full_like(parameter, step + 0.5)
            for optimizer in optimizers:
                optimizer.step()
        assert all(torch.equal(p, q) and not torch.equal(p, torch.ones_like(p)) for p, q in zip(mine, theirs)), kind


FORMS: list[Callable[[Tensor], Tensor]] = [
    lambda t: t,
    lambda t: t.contiguous(memory_format=torch.channels_last),
    lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    lambda t: torch._neg_view(-t),
]


@both
def test_layouts_may_change_between_steps(device: torch.device) -> None:
    """torch's functions walk through memory: elements of a weight, its gradient and its moments must lie in one order."""
    for kind, dtype in itertools.product(KINDS, (torch.float32, torch.float64, torch.bfloat16)):
        start = torch.linspace(-1, 1, 48, device=device).view(2, 4, 2, 3).to(dtype)
        ours, plain = nn.Parameter(start.clone()), nn.Parameter(start.clone())
        optimizers = [build(kind, [parameter]) for parameter in (ours, plain)]
        is_ours = ops.serves(device) and kind != 'dampened' and dtype is not torch.float64
        # torch's fused steps refuse gradients that are lazily negated, which no backward pass leaves
        forms = itertools.product(FORMS[:3], FORMS if is_ours else FORMS[:3])
        for index, (weight_form, gradient_form) in enumerate(forms):
            ours.grad = plain.grad = None
            ours.data = weight_form(ours.data)
            gradient = torch.randn(plain.shape, generator=torch.Generator().manual_seed(index)).to(plain)
            ours.grad, plain.grad = gradient_form(gradient), gradient
            for optimizer in optimizers:
                optimizer.step()
            # the steps of torch that are not fused round to 16 bits in between, and in another order
            limit = 1e-6 if is_ours or dtype is not torch.bfloat16 else 1e-2
            torch.testing.assert_close(ours, plain, rtol=limit, atol=limit)


@both
def test_memory_between_elements_is_left_alone(device: torch.device) -> None:
    for kind, dtype in itertools.product(KINDS, (torch.float32, torch.float64)):
        memory, gradient = torch.ones(4, 5, device=device, dtype=dtype), torch.rand(4, 5, device=device, dtype=dtype)
        ours, plain = nn.Parameter(memory[:, :3]), nn.Parameter(memory[:, :3].clone())
        optimizers = [build(kind, [parameter]) for parameter in (ours, plain)]
        for _ in range(3):
            ours.grad, plain.grad = gradient[:, :3], gradient[:, :3].clone()
            for optimizer in optimizers:
                optimizer.step()
        torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-6)
        assert torch.equal(memory[:, 3:], torch.ones_like(memory[:, 3:]))


@both
def test_parameters_may_be_replaced_by_views_and_shapes_are_checked(device: torch.device) -> None:
    for kind, (cls, options) in KINDS.items():
        mine, theirs = (nn.Parameter(torch.linspace(-1, 1, 16, device=device).view(4, 4)) for _ in range(2))
        optimizers = build(kind, [mine]), THEIRS[cls]([theirs], foreach=False, **options)
        for turned, (parameter, optimizer) in itertools.product((False, True), zip((mine, theirs), optimizers)):
            parameter.grad = None
            parameter.data = parameter.data.t() if turned else parameter.data
            parameter.grad = torch.linspace(-1, 2, 16, device=device).view(4, 4)
            optimizer.step()
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)
        if kind != 'sgd':
            mine.grad, mine.data = None, torch.ones(40000, device=device)
            mine.grad = torch.ones(40000, device=device)
            for _ in range(2):
                with pytest.raises(AmpUsageError, match='emove state'):
                    optimizers[0].step()
            assert torch.equal(mine.detach(), torch.ones(40000, device=device))


@both
@pytest.mark.parametrize('level', ['O0', 'O1', 'O2', 'O4', 'scaler'])
def test_sparse_gradients_take_the_steps_of_torch(level: str, device: torch.device) -> None:
    found = []
    for cls in (FusedSGD, torch.optim.SGD):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 4)).to(device)
        optimizer, x = cls(model.parameters(), **MOMENTUM), torch.tensor([1, 2, 1], device=device)
        scaler = torch.amp.GradScaler(device.type, init_scale=4.0)
        wrapper = None if level == 'scaler' else AmpOptimWrapper(optimizer=optimizer, opt_level=level, verbosity=0)
        for _ in range(3):
            if wrapper is None:
                optimizer.zero_grad()
                scaler.scale(model(x).square().sum()).backward()
                scaler.step(optimizer)
                scaler.update()
                continue
            with wrapper.optim_context(model):
                loss = model(x).float().square().sum()
            wrapper.update_params(loss)
        found.append([parameter.detach().float() for parameter in model.parameters()])
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)


def test_steps_of_torch_and_of_the_ops_may_alternate(device: torch.device) -> None:
    """They begin moments of other types."""
    skip_without_library(device)
    mine = weights(device, torch.bfloat16)
    optimizer = FusedAdamW([dict(params=mine[:1]), dict(params=mine[1:], amsgrad=True)], lr=0.01)
    advance(optimizer, seeds=[0])
    optimizer.param_groups[1]['amsgrad'] = False
    for parameter in mine[1:]:
        optimizer.state.pop(parameter)
    advance(optimizer, seeds=[1])
    assert optimizer.state[mine[1]]['exp_avg'].dtype is torch.float32
    optimizer.param_groups[1]['amsgrad'] = True
    for parameter in mine[1:]:
        optimizer.state[parameter]['max_exp_avg_sq'] = torch.zeros_like(parameter)
    before = [parameter.detach().clone() for parameter in mine]
    advance(optimizer, seeds=[2])
    assert optimizer.state[mine[1]]['exp_avg'].dtype is torch.bfloat16
    assert not any(map(same_bits, before, mine))


@both
@pytest.mark.parametrize('level', ['O0', 'O2'])
def test_clipping_leaves_weights_out_that_are_frozen_with_a_gradient(level: str, device: torch.device) -> None:
    """As torch's clipping does; the optimizer steps them nevertheless."""
    found = []
    for cls in (FusedAdamW, torch.optim.AdamW):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(device)
        optimizer = cls(model.parameters(), lr=0.01)
        words: dict[str, Any] = dict(loss_scale=8.0) if level == 'O2' else {}
        wrapper = AmpOptimWrapper(
            optimizer=optimizer, opt_level=level, clip_grad=dict(max_norm=0.01), verbosity=0, **words
        )
        for _ in range(2):
            model[0].requires_grad_(True)
            with wrapper.optim_context(model):
                loss = model(torch.ones(2, 4, device=device)).float().square().sum()
            wrapper.backward(loss)
            model[0].requires_grad_(False)
            wrapper.step()
            wrapper.zero_grad()
        moments = [state['exp_avg'] for state in optimizer.state.values()]
        assert moments[0].abs().sum() > 10 * moments[2].abs().sum()
        found.append([*moments, *(parameter.detach().float() for parameter in model.parameters())])
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-5)


@both
def test_types_may_change_between_steps(device: torch.device) -> None:
    """A step of parameters of another type is that of an optimizer that begins there."""
    for kind, dtype in itertools.product(KINDS, (torch.float64, torch.bfloat16)):
        mine = weights(device)
        optimizer = build(kind, [dict(params=mine[:2]), dict(params=mine[2:])])
        advance(optimizer, seeds=[0])
        for parameter in mine:
            parameter.data, parameter.grad = parameter.data.to(dtype), None
        theirs = copy.deepcopy(mine)
        other = build(kind, [dict(params=theirs[:2]), dict(params=theirs[2:])])
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        advance(optimizer, other, seeds=[1])
        assert all(map(same_bits, mine, theirs)), (kind, dtype)


@both
@pytest.mark.parametrize('kind', [FusedAdamW, FusedSGD])
@pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
def test_steps_with_a_scaler_and_without_may_alternate(kind: Any, dtype: torch.dtype, device: torch.device) -> None:
    weight = nn.Parameter(torch.ones(3, dtype=dtype, device=device))
    optimizer, scaler = kind([weight], lr=0.125), torch.amp.GradScaler(device.type, init_scale=8.0)
    for step in range(4):
        optimizer.zero_grad()
        loss = weight.sum()
        if step % 2:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()
    assert bool((weight < 0.52).all())
