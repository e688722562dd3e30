import apex.amp as mixed
import torch


def backward(loss, optimizer):
    from apex import amp as casting

    with casting.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()


@mixed.float_function
def careful(x):
    return x.exp()


def main():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = mixed.initialize(model, optimizer, opt_level='O0', verbosity=0)
    losses = []
    for _ in range(2):
        with mixed.disable_casts():
            loss = careful(model(torch.ones(3, 4))).mean()
        backward(loss, optimizer)
        optimizer.step()
        losses.append(float(loss))
    return losses
