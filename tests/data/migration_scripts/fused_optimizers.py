import torch
from apex import optimizers as fused
from apex.optimizers import (
    FusedAdam,
    FusedSGD,  # steps all weights in one launch
)
from apex.optimizers import FusedAdam as Adam


def main():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    made = [
        FusedAdam(model.parameters()),
        FusedAdam(
            model.parameters(),
            lr=1e-3,
            betas=(0.9, 0.98),
        ),
        FusedAdam(model.parameters(), 1e-3, True, (0.9, 0.99), 1e-6, False, 0.1, False, True),
        FusedAdam(model.parameters(), lr=1e-3, adam_w_mode=True, weight_decay=0.1, set_grad_none=False),
        Adam(model.parameters(), amsgrad=False),
        FusedSGD(model.parameters(), lr=0.1, momentum=0.9, wd_after_momentum=False, set_grad_none=True),
        fused.FusedSGD(model.parameters(), 0.1, 0.9, 0, 1e-4, True, False, True),
    ]
    losses = []
    for optimizer in made[:2]:
        loss = model(torch.ones(3, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
