import torch
from amp_wrapper.amp import initialize, master_params, scale_loss
from amp_wrapper.amp import state_dict as amp_state
from amp_wrapper import amp


def main():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    [model], optimizer = initialize([model], optimizer, opt_level='O5', keep_batchnorm_fp32='True', verbosity=0)
    losses = []
    for _ in range(2):
        loss = model(torch.randn(5, 4)).abs().sum()
        with scale_loss(loss, optimizer, loss_id=0, delay_unscale=False) as scaled:
            scaled.backward()
        torch.nn.utils.clip_grad_value_(master_params(optimizer), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    index = 0
    print(amp_state(), amp.state_dict()[f'loss_scaler{index}']['loss_scale'])
    return losses
