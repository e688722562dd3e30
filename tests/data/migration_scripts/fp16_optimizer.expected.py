import torch
from amp_wrapper import amp


def main():
    torch.manual_seed(0)
    x, y = torch.randn(8, 4).half(), torch.randn(8, 2)
    model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    # the optimizer keeps its name
    model, optimizer = amp.initialize(model, optimizer, opt_level='O2', loss_scale=dict(growth_interval=500, init_scale=2**10), verbosity=0)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x).float(), y)
        # one backward pass, two losses
        with amp.scale_loss(loss, optimizer) as scaled_loss:  # first
            scaled_loss.backward(retain_graph=True)
        with amp.scale_loss(0.1 * loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 5.0, norm_type=2)
        optimizer.step()
        losses.append(loss.item())
        print('norm', norm, 'scale', amp.state_dict()['loss_scaler0']['loss_scale'])
    return losses
