"""Buffers under DDP: averages of the model, BatchNorm over all ranks, skipped steps."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from mmengine.model import BaseModel
from torch import Tensor, nn

from amp_wrapper import amp
from amp_wrapper.casting import fp32_values
from scenarios.common import (
    HALF,
    LEVELS,
    Here,
    Net,
    backward,
    data,
    gather,
    masters_of,
    optim_wrapper,
    same_on_all_ranks,
    scenario,
    wrap,
)


@scenario
def averages(here: Here) -> None:
    """The average of the masters is the same on all ranks, and that of an FP32 copy outside."""
    from mmengine.model import ExponentialMovingAverage, MomentumAnnealingEMA, StochasticWeightAverage

    for level in LEVELS:
        for kind in (ExponentialMovingAverage, MomentumAnnealingEMA, StochasticWeightAverage):
            net = Net()
            net.side.requires_grad_(False)
            model = wrap(here, net)
            wrapper = optim_wrapper(model.parameters(), level)
            average = kind(net, update_buffers=True)
            outside = kind(Net().to(here.device), update_buffers=True)
            for step in range(4):
                backward(wrapper, model, data(here, step))
                wrapper.step()
                wrapper.zero_grad()
                average.update_parameters(net)
                copied = Net().to(here.device)
                with torch.no_grad():
                    copied.seen.copy_(net.seen)
                    for mine, parameter in zip(copied.parameters(), net.parameters()):
                        master = fp32_values.master_tensor(parameter)
                        mine.copy_(parameter.float() if master is None else master)
                outside.update_parameters(copied)
            same_on_all_ranks(here, average.module.parameters(), f'{level} average')
            assert not average.module.seen.equal(net.seen.float())
            for mine, theirs in zip(average.module.state_dict().values(), outside.module.state_dict().values()):
                assert mine.dtype == torch.float32 and mine.equal(theirs), (level, kind)


class NaiveSyncBatchNorm(nn.BatchNorm1d):
    """Statistics over all ranks in plain torch: torch's own SyncBatchNorm has no CPU kernels."""

    def forward(self, x: Tensor) -> Tensor:
        sums = torch.cat([x.float().mean(0), x.float().square().mean(0)])
        mean, square = (torch.distributed.nn.functional.all_reduce(sums) / dist.get_world_size()).chunk(2)
        y = (x.float() - mean) * (square - mean.square() + self.eps).rsqrt()
        return (y * self.weight + self.bias).to(x.dtype)


@scenario
def sync_batchnorm(here: Here) -> None:
    """BatchNorm over all ranks stays FP32 at the cast levels and takes 16-bit input; two ranks are the joint batch."""

    class Normed(BaseModel):
        def __init__(self, norm: type[nn.Module]) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first = nn.Linear(6, 8)
            self.bn = norm(8)
            self.last = nn.Linear(8, 3)
            self.seen: list[torch.dtype] = []
            self.bn.register_forward_pre_hook(lambda module, args: self.seen.append(args[0].dtype))

        def forward(self, inputs: Tensor, mode: str = 'loss') -> Any:
            return dict(loss=self.last(self.bn(self.first(inputs))).float().square().mean())

    for level in LEVELS:
        ends = []
        kinds = [nn.SyncBatchNorm] if here.device.type == 'cuda' else [NaiveSyncBatchNorm]
        for kind in (*kinds, nn.BatchNorm1d):
            alone = kind is nn.BatchNorm1d
            net = Normed(kind)
            model: nn.Module = net.to(here.device) if alone else wrap(here, net, broadcast_buffers=True)
            wrapper = optim_wrapper(model.parameters(), level)
            wrapper.initialize_count_status(model, 0, 100)
            kept = torch.float16 if level == 'O3' else torch.float32
            assert net.bn.weight.dtype == net.bn.running_mean.dtype == kept, level
            for step in range(4):
                parts = [data(here, step, rank) for rank in range(here.world)]
                with wrapper.optim_context(model):
                    loss = model(torch.cat(parts) if alone else data(here, step))['loss']
                wrapper.update_params(loss)
            if level in HALF:
                assert set(net.seen) == {HALF[level]}, (level, net.seen)
            ends.append(masters_of(wrapper))
            if not alone:
                same_on_all_ranks(here, masters_of(wrapper), f'{level} masters')
        for mine, theirs in zip(*ends):
            half = level != 'O0'
            torch.testing.assert_close(mine.float(), theirs.float(), rtol=0, atol=5e-2 if half else 1e-4)


@scenario
def buffers(here: Here) -> None:
    """A skipped step gives buffers back on every rank, whatever DDP does with them; the batch of one rank is bad."""

    class Exchanging(nn.BatchNorm1d):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                mean = x.float().mean(0)
                dist.all_reduce(mean)
                self.running_mean.lerp_((mean / here.world).to(self.running_mean), 0.5)
                self.num_batches_tracked += 1
            return F.batch_norm(x, None, None, self.weight.to(x), self.bias.to(x), training=True)

    for broadcasts in (False, True):
        for sync in (False, True):
            kind = nn.BatchNorm1d
            if sync:
                # torch's own exchanges on GPUs alone
                kind = nn.SyncBatchNorm if here.device.type == 'cuda' else Exchanging
            for level in LEVELS:
                for window in (1, 2):
                    torch.manual_seed(here.rank)
                    model = nn.Sequential(nn.Linear(6, 4), kind(4), nn.Linear(4, 3)).to(here.device)
                    ddp = wrap(here, model, broadcast_buffers=broadcasts)
                    wrapper = optim_wrapper(
                        ddp.parameters(), level, accumulative_counts=window, skip_nonfinite=True, loss_scale=8.0
                    )
                    wrapper.initialize_count_status(ddp, 0, 100)
                    for step in range(4):
                        before = [buffer.clone() for buffer in model.buffers()]
                        for part in range(window):
                            inputs = data(here, 10 * step + part)
                            if step % 2 and part == 0 and here.rank == 1:
                                inputs[0, 0] = torch.nan
                            with wrapper.optim_context(ddp):
                                loss = ddp(inputs).float().square().mean()
                            wrapper.update_params(loss)
                        now = list(model.buffers())
                        if step % 2:
                            assert wrapper.step_was_skipped()
                            if broadcasts:
                                # the first rank's, from the broadcast before the first pass on
                                before = [gather(here, buffer)[0] for buffer in before]
                            assert all(map(torch.equal, before, now)), (level, window, broadcasts, before, now)
                        else:
                            assert not all(map(torch.equal, before, now)), (level, window, broadcasts)
    # a script that adds gradients up without no_sync: buffers are broadcast in the middle of an accumulation
    for level in LEVELS:
        torch.manual_seed(here.rank)
        model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).to(here.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        amp.initialize(model, optimizer, opt_level=level, loss_scale=dict(init_scale=8.0), verbosity=0)
        ddp = wrap(here, model, broadcast_buffers=True)
        for step in range(4):
            before = [gather(here, buffer)[0] for buffer in model.buffers()]
            weight = model[0].weight.detach().clone()
            for part in range(3):
                inputs = data(here, 10 * step + part)
                if step % 2 and part == 0:
                    inputs[0, 0] = torch.nan
                with amp.scale_loss(ddp(inputs).float().square().mean(), optimizer) as scaled:
                    scaled.backward()
            optimizer.step()
            optimizer.zero_grad()
            assert torch.equal(weight, model[0].weight) == (step % 2 == 1), level
            assert all(map(torch.equal, before, model.buffers())) == (step % 2 == 1), (level, step, before)
