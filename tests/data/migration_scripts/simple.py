"""The ten lines that the documentation begins with."""

import torch
from apex import amp

torch.manual_seed(0)


def main():
    x, y = torch.randn(8, 4), torch.randn(8, 2)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", loss_scale="128.0", verbosity=0)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        # loss.backward() becomes:
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
        optimizer.step()
        losses.append(loss.item())
    print(amp._amp_state.loss_scalers[0].loss_scale())
    checkpoint = {'model': model.state_dict(), 'optimizer': optimizer.state_dict(), 'amp': amp.state_dict()}
    amp.load_state_dict(checkpoint['amp'])
    return losses
