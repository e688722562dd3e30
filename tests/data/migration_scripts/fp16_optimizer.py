import torch
from apex.fp16_utils import FP16_Optimizer, BN_convert_float, network_to_half


def main():
    torch.manual_seed(0)
    x, y = torch.randn(8, 4).half(), torch.randn(8, 2)
    model = BN_convert_float(network_to_half(torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(2))))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    # the optimizer keeps its name
    optimizer = FP16_Optimizer(optimizer, dynamic_loss_scale=True,
                               dynamic_loss_args={'scale_window': 500, 'init_scale': 2**10}, verbose=False)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x).float(), y)
        # one backward pass, two losses
        optimizer.backward(loss, update_master_grads=False, retain_graph=True)  # first
        optimizer.backward(0.1 * loss, update_master_grads=False)
        optimizer.update_master_grads()
        norm = optimizer.clip_master_grads(5.0, norm_type=2)
        optimizer.step()
        losses.append(loss.item())
        print('norm', norm, 'scale', optimizer.loss_scale)
    return losses
