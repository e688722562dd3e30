"""A script as written for apex. ``amp-wrapper migrate examples/apex_style.py`` shows what it needs."""

import argparse

import torch
from apex import amp
from apex.optimizers import FusedAdam
from torch import nn


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument('--opt-level', default='O2')
    parser.add_argument('--steps', type=int, default=50)
    args = parser.parse_args()

    torch.manual_seed(0)
    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    inputs, target = torch.randn(64, 32, device=device), torch.randn(64, 4, device=device)
    model = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 4)).to(device)
    optimizer = FusedAdam(model.parameters(), lr=1e-2)
    model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level)
    losses = []
    for _ in range(args.steps):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), target)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 5.0)
        optimizer.step()
        losses.append(loss.item())
    scale = amp._amp_state.loss_scalers[0].loss_scale()
    print(f'loss {losses[0]:.4f} to {losses[-1]:.4f}, loss scale {scale:g}')


if __name__ == '__main__':
    main()
