"""Several backward passes a step, of one loss or two, with and without no_sync."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from amp_wrapper import AmpOptimWrapper, AmpUsageError
from scenarios.common import (
    HALF,
    LEVELS,
    ROUNDING,
    Here,
    Net,
    averaged,
    data,
    gather,
    gradients,
    masters_of,
    optim_wrapper,
    refused,
    same_on_all_ranks,
    scenario,
    wrap,
)


@scenario
def accumulation(here: Here) -> None:
    """Accumulation, bit for bit in the arithmetic that the page states, and within its bound of the true sum."""
    for level in LEVELS:
        half = HALF.get(level)
        for wide in (False, True):
            for counts, total in ((1, 2), (2, 4), (3, 8), (5, 6)):
                for distributed in (True, False):
                    net = Net()
                    net.side.requires_grad_(False)
                    model: nn.Module = wrap(here, net) if distributed else net.to(here.device)
                    wrapper = optim_wrapper(
                        model.parameters(),
                        level,
                        lr=0.5,
                        momentum=0,
                        accumulative_counts=counts,
                        accumulate_in_fp32=wide,
                        skip_nonfinite=False,
                        loss_scale=64.0,
                    )
                    wrapper.initialize_count_status(model, 0, total)
                    step = 0
                    while step < total:
                        length = min(counts, total - step)
                        probe = [_local(here, model, wrapper, step + i, length) for i in range(length)]
                        before = masters_of(wrapper)
                        for i in range(length):
                            with wrapper.optim_context(model):
                                losses = model(data(here, step + i))
                            wrapper.update_params(losses['loss'])
                        after = masters_of(wrapper)
                        names = [n for n, p in net.named_parameters() if p.requires_grad]
                        moved = {
                            n: (b.double() - a.double()) / 0.5
                            for n, b, a in zip(dict(net.named_parameters()), before, after)
                        }
                        for name in names:
                            parts = [gradient[name] for gradient in probe]
                            total_grad = _accumulated(here, parts, half, wide, distributed)
                            index = list(dict(net.named_parameters())).index(name)
                            kind = before[index].dtype
                            expected = before[index] - 0.5 * (total_grad.float() / 64).to(kind)
                            got = after[index]
                            assert got.equal(expected.to(kind)), (level, wide, counts, distributed, step, name)
                            # and the bound of the page, against float64
                            ranks = (
                                [torch.stack(gather(here, part)).double() for part in parts]
                                if distributed
                                else [part.double()[None] for part in parts]
                            )
                            true = sum(part.mean(0) for part in ranks)
                            size = sum(part.abs().mean(0) for part in ranks)
                            unit = ROUNDING[half or torch.float32]
                            roundings = (3 if distributed else 1) if wide and half is not None else length + 2
                            error = (total_grad.double() - true).abs()
                            assert bool((error <= roundings * unit * size + 1e-7).all()), (level, wide, counts, name)
                        assert moved
                        step += length
                    if distributed:
                        same_on_all_ranks(here, masters_of(wrapper), f'{level} masters')


def _local(here: Here, model: nn.Module, wrapper: AmpOptimWrapper, step: int, length: int) -> dict[str, Tensor]:
    """The scaled gradient of one micro-batch on this rank, as backward leaves it."""
    net = getattr(model, 'module', model)
    with wrapper._engine.forward_context(net):
        loss = net(data(here, step))['loss']
    ((loss / length).float() * wrapper.loss_scaler.current_scale).backward()
    found = gradients(net)
    for parameter in net.parameters():
        parameter.grad = None
    return found


def _accumulated(here: Here, parts: list[Tensor], half: Any, wide: bool, distributed: bool) -> Tensor:
    """The arithmetic of an accumulation as docs/distributed.md states it."""
    if wide and half is not None:
        if not distributed:
            return torch.stack([part.float() for part in parts]).cumsum(0)[-1] if len(parts) > 1 else parts[0].float()
        carried: Tensor | None = None
        for part in parts[:-1]:
            carried = part.float() if carried is None else carried + part.float()
        last = parts[-1] if carried is None else carried.to(half) + parts[-1]
    else:
        last = parts[0]
        for part in parts[1:]:
            last = last + part
    return averaged(here, {'': last})[''] if distributed else last


@scenario
def second_losses(here: Here) -> None:
    """Several losses: averaged each, or refused where DDP would keep them apart."""
    for level in ('O0', 'O1', 'O2', 'O5'):
        for views in (False, True):
            net = Net()
            net.side.requires_grad_(False)
            model = wrap(here, net, gradient_as_bucket_view=views)
            wrapper = optim_wrapper(model.parameters(), level, num_losses=2, loss_scale=256.0, momentum=0, lr=1.0)
            wrapper.attach(model)
            start = masters_of(wrapper)
            local = []
            for step in range(2):
                with wrapper._engine.forward_context(net):
                    loss = net(data(here, step))['loss']
                (loss.float() * 256.0).backward()
                local.append(gradients(net))
                for parameter in net.parameters():
                    parameter.grad = None
            for step in range(2):
                with wrapper.optim_context(model):
                    loss = model(data(here, step))['loss']
                wrapper.backward(loss, loss_id=step)
            wrapper.step()
            wrapper.zero_grad()
            same_on_all_ranks(here, masters_of(wrapper), f'{level} masters')
            for index, (name, parameter) in enumerate(net.named_parameters()):
                if not parameter.requires_grad:
                    continue
                parts = [averaged(here, {name: part[name]})[name].float() for part in local]
                expected = start[index] - (parts[0] / 256.0 + parts[1] / 256.0)
                torch.testing.assert_close(masters_of(wrapper)[index], expected, rtol=1e-6, atol=1e-7)
        # two backward passes through one forward pass
        net = Net()
        net.side.requires_grad_(False)
        model = wrap(here, net)
        wrapper = optim_wrapper(model.parameters(), level)
        with wrapper.optim_context(model):
            loss = model(data(here, 0))['loss']
        wrapper.backward(loss, retain_graph=True)
        kept = gradients(net)
        with refused(AmpUsageError, 'second backward pass'):
            wrapper.backward(loss * 2)
        assert all(value.equal(kept[name]) for name, value in gradients(net).items())
        wrapper.step()
        # as mmengine calls it: backward after no_sync was left
        model = wrap(here, Net())
        several = optim_wrapper(model.parameters(), level, num_losses=2, accumulative_counts=2)
        several.initialize_count_status(model, 0, 10)
        with several.optim_context(model):
            loss = model(data(here, 0), side=True)['loss']
        with refused(AmpUsageError, 'under no_sync'):
            several.backward(loss)
