import torch
import amp_wrapper
# steps all weights in one launch
from amp_wrapper import FusedAdamW, FusedAdam, FusedSGD
from amp_wrapper import FusedAdamW as Adam


def main():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    made = [
        FusedAdamW(model.parameters(), weight_decay=0.0),
        FusedAdamW(
            model.parameters(),
            lr=1e-3,
            betas=(0.9, 0.98),
            weight_decay=0.0,
        ),
        FusedAdam(model.parameters(), 1e-3, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.1, amsgrad=False),
        FusedAdamW(model.parameters(), lr=1e-3, weight_decay=0.1),
        Adam(model.parameters(), amsgrad=False, weight_decay=0.0),
        FusedSGD(model.parameters(), lr=0.1, momentum=0.9),
        amp_wrapper.FusedSGD(model.parameters(), 0.1, 0.9, 0, 1e-4, True),
    ]
    losses = []
    for optimizer in made[:2]:
        loss = model(torch.ones(3, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
