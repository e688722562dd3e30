# apex by its full name, with a fallback where it is not installed
import torch

try:
    import amp_wrapper.amp
except ImportError:
    amp_wrapper = None


class Trainer:
    def __init__(self):
        torch.manual_seed(0)
        self.model = torch.nn.Linear(4, 2)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        if amp_wrapper is not None:
            self.model, self.optimizer = amp_wrapper.amp.initialize(
                self.model,
                self.optimizer,
                opt_level='O1',  # per-op casts
                verbosity=0,
            )

    def backward(self, loss):
        if amp_wrapper is None:
            loss.backward()
            return
        with amp_wrapper.amp.scale_loss(loss, self.optimizer) as scaled_loss: scaled_loss.backward()
        print('scale', amp_wrapper.amp.state_dict()['loss_scaler0']['loss_scale'])


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
