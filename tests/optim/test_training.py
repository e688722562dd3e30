"""Fused optimizers in trainings at every level, with a compiled library, and without one by torch's own fused step."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import same_bits
from fused_training import SETTINGS, TRAINED, OpCount, Training, agree, build, by_turns, give
from op_lists import NoHostRead, ops_from, skip_without_library
from pairs import pairs
from torch import Tensor, nn

from amp_wrapper import AmpOptimWrapper, AmpUsageError, FusedAdamW, FusedSGD, ops

Setting = tuple[str, bool]


@pytest.mark.usefixtures('with_and_without_ops')
# at O3, torch's moments have 16 bits
@by_turns('amp', 'wrapper', settings=[s for s in [*SETTINGS, *SETTINGS[2:]] if s[0] != 'O3' and not s[1]])
def test_training_is_that_of_torchs_optimizer(door: str, setting: Setting, kind: str, device: torch.device) -> None:
    """The same scales, skips and counts, and weights, masters and moments to the last places; in the wrapper also clipped."""
    ours, theirs = (Training(door, setting, kind, device, ours=is_ours) for is_ours in (True, False))
    bad = -1 if setting[0] in ('O0', 'O4', 'O5') and door == 'amp' else 4
    for training in (ours, theirs):
        training.run(0, 1, 2, 3, 4, 5, bad=bad)
    agree(ours.saved(), theirs.saved(), but=('step', 'param_groups'))


@pytest.mark.usefixtures('with_and_without_ops')
@by_turns('amp', 'wrapper')
def test_step_is_one_call(door: str, setting: Setting, kind: str, device: torch.device) -> None:
    """Of our op, or of torch's fused function. A step in Python made more than a hundred ops for each parameter."""
    counts = []
    for depth in (2, 12):
        training, count = Training(door, setting, kind, device, depth), OpCount()
        training.run(0)
        training.run(1, within=lambda: count)  # noqa: B023
        counts.append(sum(count.calls.values()))
        if ops.compiled_devices():
            assert count.calls['step_prologue'] == count.calls['fused_adam' if 'adam' in kind else 'fused_sgd'] == 1
        else:
            # 16-bit weights and those that stay float32 are a call each
            function = {'adamw': '_fused_adamw_', 'adam': '_fused_adam_'}.get(kind, '_fused_sgd_')
            assert 1 <= count.calls[function] <= 2
    # of the 20 that are more, each is checked and widened, and some are taken apart
    assert setting[1] or (counts[1] - counts[0]) / 20 < (0.1 if ops.compiled_devices() else 15), counts


@pytest.mark.parametrize('library_first', [True, False])
@by_turns('wrapper')
def test_run_goes_on_with_and_without_library(
    door: str, setting: Setting, kind: str, library_first: bool, device: torch.device, tmp_path: Path
) -> None:
    def part(
        *indices: int, bad: int, resumed: dict[str, dict[str, Tensor]] | None = None
    ) -> dict[str, dict[str, Tensor]]:
        training = Training(door, setting, kind, device)
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
    if library_first:
        with ops_from(tmp_path):
            agree(part(3, 4, 5, bad=4, resumed=middle), end)
        return
    with ops_from(tmp_path):
        other = part(0, 1, 2, bad=0)
    agree(other, middle)
    agree(part(3, 4, 5, bad=4, resumed=other), end)


@pytest.mark.usefixtures('with_and_without_ops')
@by_turns('wrapper')
def test_skipped_step_changes_no_bit(door: str, setting: Setting, kind: str, device: torch.device) -> None:
    training = Training(door, setting, kind, device)
    training.run(0, 1)
    tensors = [*training.model.parameters(), *(p for g in training.optimizer.param_groups for p in g['params'])]
    tensors += [value for state in training.optimizer.state.values() for value in state.values()]
    before = [tensor.detach().clone() for tensor in tensors]
    training.run(2, bad=2)
    assert all(map(same_bits, before, (tensor.detach() for tensor in tensors)))
    training.run(3)
    assert not all(map(same_bits, before, (tensor.detach() for tensor in tensors)))


@pytest.mark.usefixtures('with_and_without_ops')
def test_skipped_step_leaves_a_master_between_two_weights(device: torch.device) -> None:
    """Its 16-bit weight is the upper of the two, where rounding to nearest-even would give the lower."""
    model = nn.Linear(2, 2, bias=False).to(device)
    model.weight.data.fill_(1 + 2**-8)
    optimizer = FusedSGD(model.parameters(), lr=0.1)
    split = dict(opt_level='O5', master_weights='split', skip_nonfinite=True, verbosity=0)
    wrapper = AmpOptimWrapper(optimizer=optimizer, **split)
    with wrapper.optim_context(model):
        loss = model(torch.ones(1, 2, device=device)).float().sum() * math.inf
    wrapper.update_params(loss)
    assert model.weight.dtype is torch.bfloat16 and bool((model.weight == 1 + 2**-7).all())


@pytest.mark.usefixtures('with_and_without_ops')
@pytest.mark.parametrize('level', ['O0', 'O2', 'O5'])
def test_step_without_scale_clip_or_skip(level: str, device: torch.device) -> None:
    """Split masters keep what float16 has no bits for, from its largest numbers to its subnormal ones."""
    model = nn.Linear(64, 1, bias=False).to(device)
    start = torch.tensor([1.0001, 60000.5, 0.1, 2.0**-14, 1.0001 * 2.0**-15, 2.0**-16, -3.0003, 0.0], device=device)
    start = torch.cat([start, 2.0**-16 * (1 + 3 * torch.rand(56, device=device))])
    model.weight.data.copy_(start)
    more: dict[str, Any] = {} if level == 'O0' else dict(master_weights='split')
    more |= dict(loss_scale=1.0) if level == 'O2' else {}
    optimizer = FusedSGD(model.parameters(), lr=0.0)
    wrapper = AmpOptimWrapper(optimizer=optimizer, opt_level=level, verbosity=0, **more)
    for lr, wanted in ((0.0, start), (0.5, start - 0.5)):
        optimizer.param_groups[0]['lr'] = lr
        with wrapper.optim_context(model):
            loss = model(torch.ones(1, 64, device=device)).float().sum()
        wrapper.update_params(loss)
        torch.testing.assert_close(model.state_dict()['weight'][0], wanted, rtol=0, atol=0)


@pytest.mark.usefixtures('with_and_without_ops')
@pytest.mark.parametrize('kind', TRAINED)
def test_all_types_in_one_group(kind: str, device: torch.device) -> None:
    """As each in a group of its own; torch's kernels for GPUs take one type at a time."""
    types = (torch.float32, torch.float64, torch.complex64, torch.complex128, torch.float16, torch.bfloat16)
    together = [nn.Parameter(torch.ones(5, dtype=dtype, device=device)) for dtype in types * 2]
    apart = [nn.Parameter(p.detach().clone()) for p in together]
    optimizers = build(kind, together), build(kind, [dict(params=[p]) for p in apart])
    for step in range(3):
        for parameter in (*together, *apart):
            parameter.grad = torch.full_like(parameter, step + 0.5)
        with OpCount() as count, NoHostRead():
            for optimizer in optimizers:
                optimizer.step()
        assert count.types and all(len(types) == 1 for types in count.types)
    assert all(torch.equal(p, q) and not torch.equal(p, torch.ones_like(p)) for p, q in zip(together, apart))


@pytest.mark.usefixtures('with_and_without_ops')
@pytest.mark.parametrize(
    ('kind', 'dtype'),
    [('adamw', torch.float32), ('adam', torch.float64), ('sgd', torch.bfloat16), ('dampened', torch.float32)],
)
def test_layouts_may_change_between_steps(kind: str, dtype: torch.dtype, device: torch.device) -> None:
    """torch's functions walk through memory: elements of a weight, its gradient and its moments must lie in one order."""
    ours, plain = (nn.Parameter(torch.linspace(-1, 1, 48, device=device).view(2, 4, 2, 3).to(dtype)) for _ in range(2))
    optimizers = [build(kind, [parameter]) for parameter in (ours, plain)]
    forms: list[Callable[[Tensor], Tensor]] = [
        lambda t: t,
        lambda t: t.contiguous(memory_format=torch.channels_last),
        lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
        lambda t: torch._neg_view(-t),
    ]
    for index, (weight_form, gradient_form) in enumerate((w, g) for w in forms[:3] for g in forms):
        ours.grad = plain.grad = None
        ours.data = weight_form(ours.data)
        gradient = torch.randn(plain.shape, generator=torch.Generator().manual_seed(index)).to(plain)
        ours.grad, plain.grad = gradient_form(gradient), gradient
        for optimizer in optimizers:
            optimizer.step()
        torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures('with_and_without_ops')
@pairs(groups=[1, 2], dtype=[torch.float32, torch.float64], begun=[False, True])
def test_shared_memory_is_refused(groups: int, dtype: torch.dtype, begun: bool, device: torch.device) -> None:
    storage, first = torch.ones(8, device=device, dtype=dtype), nn.Parameter(torch.ones(4, device=device))
    mine = [first, nn.Parameter(storage[:6]), nn.Parameter(storage[2:])]
    optimizer = FusedAdamW(mine if groups == 1 else [dict(params=[parameter]) for parameter in mine])
    if begun:
        first.grad = torch.zeros_like(first)
        optimizer.step()
    give(mine, 0)
    with pytest.raises(AmpUsageError, match='share memory'):
        optimizer.step()
    assert len(optimizer.state) == begun and bool((storage == 1).all()) and bool((first == first[0]).all())


@pytest.mark.usefixtures('with_and_without_ops')
def test_gradients_take_turns_among_parameters_of_one_shape(device: torch.device) -> None:
    mine = [nn.Parameter(torch.ones(2, device=device)) for _ in range(3)]
    optimizer = FusedAdamW(mine, weight_decay=0.0)
    for index in (0, 1, 2, 1):
        for parameter in mine:
            parameter.grad = torch.ones_like(parameter) if parameter is mine[index] else None
        optimizer.step()
    assert [int(optimizer.state[parameter]['step']) for parameter in mine] == [1, 2, 1]


@pytest.mark.usefixtures('with_and_without_ops')
@pairs(groups=[1, 2], kind=TRAINED)
def test_types_may_change_between_steps(kind: str, groups: int, device: torch.device) -> None:
    """A step of parameters of another type is that of an optimizer that begins there."""

    def grouped(parameters: list[nn.Parameter]) -> list[dict[str, list[nn.Parameter]]]:
        return [dict(params=[p]) for p in parameters] if groups == 2 else [dict(params=parameters)]

    for dtype in (torch.float64, torch.bfloat16):
        parameters = [nn.Parameter(torch.randn(3, 2, device=device)) for _ in range(2)]
        optimizer = build(kind, grouped(parameters))
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        for parameter in parameters:
            parameter.data, parameter.grad = parameter.data.to(dtype), None
        theirs = copy.deepcopy(parameters)
        other = build(kind, grouped(theirs))
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for parameter in (*parameters, *theirs):
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        other.step()
        assert all(map(same_bits, parameters, theirs))


def test_many_groups_are_one_call(device: torch.device) -> None:
    skip_without_library(device)
    mine = [nn.Parameter(torch.ones(2, device=device)) for _ in range(20)]
    optimizer = FusedAdamW([dict(params=[p], lr=0.1 * (i + 1)) for i, p in enumerate(mine)], weight_decay=0.0)
    for _ in range(2):
        for parameter in mine:
            parameter.grad = torch.ones_like(parameter)
        with OpCount() as count:
            optimizer.step()
        assert count.calls['fused_adam'] == count.calls['step_prologue'] == 1
    assert [round(1 - float(p.detach()[0]), 4) for p in mine] == [round(0.2 * (i + 1), 4) for i in range(20)]
