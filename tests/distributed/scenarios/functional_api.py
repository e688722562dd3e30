"""The functional API with DistributedDataParallel around the model, held against plain FP32 training."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from toy_amp import HALF, LEVELS, MASTERS, Net, backward, scalers, scales, set_scales, sgd

from amp_wrapper import AmpAttachError, AmpUsageError, amp
from scenarios.common import Here, same_on_all_ranks, scenario


def inputs(here: Here, index: int, rank: int | None = None) -> Tensor:
    """Even dyadic numbers, others on each rank: means over two ranks are exact in each type."""
    rank = here.rank if rank is None else rank
    return torch.tensor([[2.0 + 2 * index - 4 * rank, 4.0 * rank - 2 * index]], device=here.device)


def make(here: Here, level: str | None, **options: Any) -> tuple[Any, Net, Optimizer]:
    net = Net().to(here.device)
    optimizer = sgd([net])
    if level is None:
        return net, net, optimizer
    amp.initialize(net, optimizer, opt_level=level, **{'loss_scale': 'dynamic', 'verbosity': 0, **options})
    set_scales(optimizer, *[4.0] * options.get('num_losses', 1))
    ids = [here.device.index] if here.device.type == 'cuda' else None
    # BatchNorm's statistics are not used, and no averages are either
    ddp = DistributedDataParallel(
        net, device_ids=ids, broadcast_buffers=False, gradient_as_bucket_view='view' in here.words
    )
    return ddp, net, optimizer


def averaged(here: Here, net: Net, *indices: int) -> list[Tensor]:
    """The mean over the ranks of what one process computes from the batches of one rank."""
    sums = [torch.zeros_like(p) for p in net.trained]
    for rank in range(here.world):
        for index in indices:
            grads = torch.autograd.grad(net(inputs(here, index, rank)), net.trained)
            sums = [total + grad / here.world for total, grad in zip(sums, grads)]
    return sums


def check(here: Here, net: Net, optimizer: Optimizer, plain: tuple[Net, Optimizer], level: str, what: str) -> None:
    for index, (ours, theirs) in enumerate(zip(amp.master_params(optimizer), plain[0].trained)):
        assert torch.equal(ours.float(), theirs), f'{what} at {level}: parameter {index}: {ours} against {theirs}'
        momentum = optimizer.state.get(ours, {}).get('momentum_buffer')
        wanted = plain[1].state.get(theirs, {}).get('momentum_buffer')
        assert (momentum is None) == (wanted is None), what
        assert momentum is None or torch.equal(momentum.float(), wanted), what
    same_on_all_ranks(here, list(net.parameters()), f'{what} at {level}')
    for weight, master in zip(net.trained, amp.master_params(optimizer)):
        assert torch.equal(weight, master.to(weight.dtype)), what
    same_on_all_ranks(here, [torch.tensor(scales(optimizer))], f'{what} at {level}: scales')


def step_plainly(here: Here, plain: tuple[Net, Optimizer], *indices: int) -> None:
    for parameter, grad in zip(plain[0].trained, averaged(here, plain[0], *indices)):
        parameter.grad = grad
    plain[1].step()


@scenario
def every_level(here: Here) -> None:
    """DDP around the model after initialize: averages of what single processes have, bit for bit."""
    for level in LEVELS:
        ddp, net, optimizer = make(here, level)
        plain = make(here, None)[1:]
        for index in range(4):
            for clear in ((optimizer.zero_grad,), (ddp.zero_grad,))[index % 2]:
                clear()
            wanted = averaged(here, plain[0], index)
            hit = index == 1
            if hit:
                # an infinity on one rank reaches all, in the average
                loss = ddp(inputs(here, index) * (float('inf') if here.rank == 1 else 1.0))
            else:
                loss = ddp(inputs(here, index))
            assert loss.dtype is torch.float32
            backward(loss, optimizer)
            for parameter, grad in zip(amp.master_params(optimizer), wanted):
                assert parameter.grad is not None
                assert hit or torch.equal(parameter.grad.float(), grad), f'{level}: {parameter.grad} against {grad}'
            optimizer.step()
            if not hit:
                step_plainly(here, plain, index)
            check(here, net, optimizer, plain, level, f'step {index}')
        assert scales(optimizer) == [2.0]
        assert net.fc.weight.dtype is HALF.get(level, torch.float32)
        del ddp, net, optimizer
        gc.collect()


@scenario
def accumulation_under_no_sync(here: Here) -> None:
    """Forward and backward inside, the last pass outside."""
    for level in LEVELS:
        for delay in (False, True):
            ddp, net, optimizer = make(here, level)
            plain = make(here, None)[1:]
            for step in range(4):
                (optimizer if step % 2 else ddp).zero_grad()
                passes = [3 * step + each for each in range(3)]
                for each, index in enumerate(passes):
                    with nullcontext() if each == 2 else ddp.no_sync():
                        # an overflow on one rank alone, in a pass that nobody averages
                        hit = step == 1 and each == 0 and here.rank == 1
                        loss = ddp(inputs(here, index % 4))
                        backward(
                            loss, optimizer, poisoned=net.bn.weight if hit else None, delay_unscale=delay and each < 2
                        )
                optimizer.step()
                if step != 1:
                    step_plainly(here, plain, *[index % 4 for index in passes])
                check(here, net, optimizer, plain, level, f'step {step}, delay {delay}')
            assert scales(optimizer) == [2.0], scales(optimizer)
            del ddp, net, optimizer
            gc.collect()


@scenario
def open_ends(here: Here) -> None:
    """Accumulations that end under no_sync: ranks keep their own gradients, as with plain DDP, but take one decision."""
    for level in LEVELS:
        ddp, net, optimizer = make(here, level)
        before = [p.detach().clone() for p in amp.master_params(optimizer)]
        with ddp.no_sync():
            backward(ddp(inputs(here, 0)), optimizer, poisoned=net.fc.weight if here.rank == 0 else None)
        optimizer.step()
        for old, now in zip(before, amp.master_params(optimizer)):
            assert torch.equal(old, now), f'{level}: rank {here.rank} did not skip'
        assert scales(optimizer) == [2.0], f'{level}: {scales(optimizer)}'
        assert [scaler.state_dict()['_growth_tracker'] for scaler in scalers(optimizer)] == [0]
        # the gradients were dropped; the next accumulation is whole
        optimizer.zero_grad()
        plain = make(here, None)[1:]
        with ddp.no_sync():
            backward(ddp(inputs(here, 1)), optimizer)
        backward(ddp(inputs(here, 2)), optimizer)
        optimizer.step()
        step_plainly(here, plain, 1, 2)
        check(here, net, optimizer, plain, level, 'after it')
        del ddp, net, optimizer
        gc.collect()


@scenario
def cleared(here: Here) -> None:
    """An accumulation that is given up: nothing of it is left, whoever clears."""
    for level in LEVELS:
        for how in range(3):
            ddp, net, optimizer = make(here, level)
            plain = make(here, None)[1:]
            with ddp.no_sync():
                backward(ddp(inputs(here, 0)), optimizer)
            if how == 0:
                optimizer.zero_grad()
            elif how == 1:
                net.zero_grad()
            else:
                for parameter in ddp.parameters():
                    parameter.grad = None
            backward(ddp(inputs(here, 1)), optimizer)
            optimizer.step()
            step_plainly(here, plain, 1)
            check(here, net, optimizer, plain, level, f'cleared {how}')
            del ddp, net, optimizer
            gc.collect()


@scenario
def two_losses(here: Here) -> None:
    """Their scales would mix in what no_sync holds: refused, with nothing changed. With averaging all is well."""
    for level in MASTERS:
        ddp, net, optimizer = make(here, level, num_losses=2)
        set_scales(optimizer, 4.0, 16.0)
        plain = make(here, None)[1:]
        with ddp.no_sync():
            backward(ddp(inputs(here, 0)), optimizer, 0)
            before = [None if p.grad is None else p.grad.clone() for p in net.parameters()]
            with pytest.raises(AmpUsageError, match='scales would mix'):
                backward(ddp(inputs(here, 1)), optimizer, 1)
        after = [p.grad for p in net.parameters()]
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(before, after))  # type: ignore[arg-type]
        backward(ddp(inputs(here, 2)), optimizer, 0)
        backward(ddp(inputs(here, 3)), optimizer, 1)
        optimizer.step()
        step_plainly(here, plain, 0, 2, 3)
        check(here, net, optimizer, plain, level, 'two losses')
        del ddp, net, optimizer
        gc.collect()


@scenario
def too_early(here: Here) -> None:
    """DDP first: refused with the order, whether its wrapper is handed over or what is inside of it."""
    for level in ('O1', 'O2', 'O5'):
        net = Net().to(here.device)
        optimizer = sgd([net])
        ddp = DistributedDataParallel(net, broadcast_buffers=False)
        for model in (ddp, net) if level != 'O1' else (ddp,):
            with pytest.raises(AmpAttachError, match='DistributedDataParallel'):
                amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        assert net.fc.weight.dtype is torch.float32 and 'step' not in optimizer.__dict__


@scenario
def one_after_another(here: Here) -> None:
    """All of the above: to start a process takes longer than any of them."""
    for words, scenarios in (
        ([], (every_level, accumulation_under_no_sync, open_ends, cleared, two_losses, too_early)),
        (['view'], (accumulation_under_no_sync,)),
    ):
        for each in scenarios:
            print(f'{each.__name__} {words}', flush=True)
            here.words = words
            each(here)
