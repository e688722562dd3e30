import types

import torch

try:
    from amp_wrapper import amp
    from amp_wrapper import FusedAdamW
except ImportError:
    FusedAdamW = None
    raise ImportError('Please install amp_wrapper to run this script.')

args = types.SimpleNamespace(fp16=True, static_loss_scale=128.0, dynamic_loss_scale=False)


def main():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    no_decay = ['bias']
    named = list(model.named_parameters())
    groups = [
        {'params': [p for n, p in named if n not in no_decay], 'weight_decay': 0.01},
        {'params': [p for n, p in named if n in no_decay], 'weight_decay': 0.0},
    ]
    optimizer = FusedAdamW(groups, lr=1e-3, weight_decay=0.0)
    if args.fp16:
        model, optimizer = amp.initialize(model, optimizer, opt_level='O2', loss_scale='dynamic' if args.dynamic_loss_scale else args.static_loss_scale)
    return [train(model, optimizer) for _ in range(2)]


def train(model, optimizer):
    optimizer.zero_grad()
    loss = model(torch.ones(3, 4)).square().mean()
    if args.fp16:
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
    else: loss.backward()
    if args.fp16:
        torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
    else:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()
