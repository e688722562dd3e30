"""``from amp_wrapper import amp`` in a dozen lines: ``python examples/simple.py O2``."""

from __future__ import annotations

import argparse

import torch
from torch import nn

from amp_wrapper import amp

LEVELS = ('O0', 'O1', 'O2', 'O3', 'O4', 'O5')


def train(opt_level: str, steps: int, device: torch.device) -> float:
    """Fit a random target with a tiny network.

    Args:
        opt_level: 'O0' to 'O5'.
        steps: Optimizer steps.
        device: Where to compute.

    Returns:
        The last loss.
    """
    torch.manual_seed(0)
    inputs, target = torch.randn(64, 32, device=device), torch.randn(64, 4, device=device)

    model = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 4)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = amp.initialize(model, optimizer, opt_level=opt_level)
    for step in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), target)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        if step % 20 == 0 or step == steps - 1:
            print(f'step {step:3d}  loss {loss.item():.4f}', flush=True)
    return loss.item()


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description='A tiny network at an opt level, on a GPU where there is one.')
    parser.add_argument('opt_level', nargs='?', default='O1', choices=LEVELS, help='the level (default: %(default)s)')
    parser.add_argument('--steps', type=int, default=100, metavar='N', help='optimizer steps (default: %(default)s)')
    args = parser.parse_args()
    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    print(f'{args.opt_level} on {device}: loss {train(args.opt_level, args.steps, device):.4f}')


if __name__ == '__main__':
    main()
