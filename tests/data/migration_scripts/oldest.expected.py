import torch
from amp_wrapper import amp

amp_handle = amp.init(enabled=True, enable_caching=True, verbose=False)


def main():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = amp_handle.wrap_optimizer(torch.optim.SGD(model.parameters(), 0.1), num_loss=1)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(torch.ones(3, 4)).square().mean()
        with optimizer.scale_loss(loss) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        losses.append(loss.item())
    amp_handle._deactivate()
    return losses
