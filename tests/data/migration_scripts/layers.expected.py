import torch.nn as nn

try:
    from torch.nn import LayerNorm as BertLayerNorm
except ImportError:
    class BertLayerNorm(nn.Module):
        pass
from torch.nn import RMSNorm, LayerNorm
from torch.nn import SyncBatchNorm


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = BertLayerNorm(4, eps=1e-12)
        self.second = RMSNorm(4, eps=1e-5)
        self.third = LayerNorm(4)
        self.fourth = SyncBatchNorm(4)

    def forward(self, x):
        return self.fourth(self.third(self.second(self.first(x))))


def main():
    import torch

    model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(Net()).eval()
    assert isinstance(model.fourth, SyncBatchNorm)
    return [model(torch.ones(3, 4)).sum().item() for _ in range(2)]
