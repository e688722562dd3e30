import types

import torch

try:
    from apex.fp16_utils import *
    from apex.optimizers import FusedAdam
except ImportError:
    FusedAdam = None
    raise ImportError('Please install apex: https://www.github.com/nvidia/apex')

args = types.SimpleNamespace(fp16=True, static_loss_scale=128.0, dynamic_loss_scale=False)


def main():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    if args.fp16:
        model = model.half()
    no_decay = ['bias']
    named = list(model.named_parameters())
    groups = [
        {'params': [p for n, p in named if n not in no_decay], 'weight_decay': 0.01},
        {'params': [p for n, p in named if n in no_decay], 'weight_decay': 0.0},
    ]
    optimizer = FusedAdam(groups, lr=1e-3, bias_correction=True)
    if args.fp16:
        optimizer = FP16_Optimizer(optimizer,
                                   static_loss_scale=args.static_loss_scale,
                                   dynamic_loss_scale=args.dynamic_loss_scale)
    return [train(model, optimizer) for _ in range(2)]


def train(model, optimizer):
    optimizer.zero_grad()
    loss = model(torch.ones(3, 4)).square().mean()
    if args.fp16: optimizer.backward(loss)
    else: loss.backward()
    if args.fp16:
        optimizer.clip_master_grads(1.0)
    else:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()
