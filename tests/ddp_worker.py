"""One rank of a two-rank run over gloo: ``python ddp_worker.py RANK STORE OUT LEVEL [no-rebuild]``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault('OMP_NUM_THREADS', '1')
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from mmengine.model import BaseModel, MMDistributedDataParallel
from torch import Tensor, nn

from amp_wrapper import AmpOptimWrapper, model_wrappers


class Net(BaseModel):
    """No BatchNorm: two half batches are then the joint batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3))

    def forward(self, inputs: Tensor, factor: float = 1.0, mode: str = 'loss') -> Any:
        return dict(loss=self.body(inputs).square().mean() * factor)


def batches(step: int) -> Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(step))


def build(level: str, counts: int, distributed: bool) -> tuple[nn.Module, AmpOptimWrapper]:
    model: nn.Module = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if distributed:
        model = MMDistributedDataParallel(module=model, device_ids=None, broadcast_buffers=False)
    wrapper = AmpOptimWrapper(
        opt_level=level,
        optimizer=optimizer,
        accumulative_counts=counts,
        loss_scale=1024.0,
        clip_grad=dict(max_norm=10.0),
    )
    return model, wrapper


def train(level: str, counts: int, rank: int | None) -> dict[str, Any]:
    model, wrapper = build(level, counts, rank is not None)
    identity, module = id(model), id(getattr(model, 'module', model))
    buckets: list[torch.dtype] = []
    if rank is not None:
        # registered before the cast, so the rebuilt reducer must carry it over

        def averaging(state, bucket):  # DDP reads annotations as objects, and here they are strings
            buckets.append(bucket.buffer().dtype)
            work = dist.all_reduce(bucket.buffer().div_(2), async_op=True).get_future()
            return work.then(lambda future: future.value()[0])

        model.register_comm_hook(None, averaging)
    wrapper.initialize_count_status(model, 0, 6 * counts)
    grads = []
    step = 0
    for update in range(6):
        for micro in range(counts):
            batch = batches(step)
            if rank is not None:
                batch = batch[rank * 4 : rank * 4 + 4]
            # one rank alone overflows in the third update, in the first micro-batch of its window
            factor = float('inf') if update == 2 and micro == 0 and rank in (None, 1) else 1.0
            with wrapper.optim_context(model):
                losses = model(batch, factor=factor, mode='loss')
            if micro == counts - 1:
                wrapper.backward(wrapper.scale_loss(losses['loss']))
                grads.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
                wrapper.step()
                wrapper.zero_grad()
            else:
                wrapper.update_params(losses['loss'])
            step += 1
    assert (id(model), id(getattr(model, 'module', model))) == (identity, module)
    return dict(
        grads=grads,
        weights=[p.detach() for p in model.parameters()],
        masters=[p.detach() for p in wrapper.master_params()],
        counts=wrapper.loss_scaler.counts,
        buckets=sorted({str(kind) for kind in buckets}),
        state={k.removeprefix('module.'): v for k, v in model.state_dict().items()},
    )


def main() -> None:
    rank, store, out, level = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4]
    if 'no-rebuild' in sys.argv:
        model_wrappers.rebuild_ddp = lambda model: 0
    dist.init_process_group('gloo', init_method=f'file://{store}', rank=rank, world_size=2)
    results = {counts: train(level, counts, rank) for counts in (1, 3)}
    torch.save(results, out / f'rank{rank}.pt')
    if rank == 0:
        torch.save({counts: train(level, counts, None) for counts in (1, 3)}, out / 'alone.pt')
    dist.barrier()
    dist.destroy_process_group()


if __name__ == '__main__':
    main()
