# apex by its full name, with a fallback where it is not installed
import torch

try:
    import apex
except ImportError:
    apex = None


class Trainer:
    def __init__(self):
        torch.manual_seed(0)
        self.model = torch.nn.Linear(4, 2)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        if apex is not None:
            self.model, self.optimizer = apex.amp.initialize(
                self.model,
                self.optimizer,
                opt_level='O1',  # per-op casts
                verbosity=0,
            )

    def backward(self, loss):
        if apex is None:
            loss.backward()
            return
        with apex.amp.scale_loss(loss, self.optimizer) as scaled_loss: scaled_loss.backward()
        print('scale', apex.amp._amp_state.loss_scalers[0].loss_scale())


def main():
    trainer = Trainer()
    losses = []
    for _ in range(2):
        trainer.optimizer.zero_grad(set_to_none=True)
        loss = trainer.model(torch.ones(3, 4)).square().mean()
        trainer.backward(loss)
        trainer.optimizer.step()
        losses.append(loss.item())
    return losses
