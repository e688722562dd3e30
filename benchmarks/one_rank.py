"""One rank, with DistributedDataParallel and with FSDP2: does a process group of this kind train here?

``python -m benchmarks.one_rank --backend nccl``
"""

from __future__ import annotations

import argparse
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from amp_wrapper import FusedAdamW, amp


def train(backend: str, level: str, way: str = 'ddp') -> float:
    """Three steps of a small model, with 'ddp', or with 'fsdp' over a mesh of one; returns the last loss."""
    device = torch.device('cuda', 0) if backend == 'nccl' else torch.device('cpu')
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1)).to(device)
    optimizer = FusedAdamW(inner.parameters(), lr=1e-2)
    model: nn.Module = inner
    if way == 'fsdp':
        mesh = init_device_mesh(device.type, (1,))
        amp.initialize(inner, optimizer, opt_level=level, mesh=mesh, verbosity=0)
    else:
        amp.initialize(inner, optimizer, opt_level=level, verbosity=0)
        model = DistributedDataParallel(inner, device_ids=[0] if backend == 'nccl' else None)
    x = torch.randn(64, 16, device=device)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = (model(x).float() - x.sum(1, keepdim=True)).square().mean()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        losses.append(loss.detach())
    assert losses[-1] < losses[0], losses
    return float(losses[-1])


def main() -> None:
    """Train at O2 and O5, and say so."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--backend', choices=('gloo', 'nccl'), default='gloo')
    args = parser.parse_args()
    with tempfile.NamedTemporaryFile() as store:
        dist.init_process_group(args.backend, init_method=f'file://{store.name}', rank=0, world_size=1)
        try:
            for level in ('O2', 'O5'):
                for way in ('ddp', 'fsdp'):
                    loss = train(args.backend, level, way)
                    print(f'{args.backend}, one rank, {way}, {level}: trains, last loss {loss:.4f}')
        finally:
            dist.destroy_process_group()


if __name__ == '__main__':
    main()
