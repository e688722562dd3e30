import torch.nn as nn

try:
    from apex.normalization.fused_layer_norm import FusedLayerNorm as BertLayerNorm
except ImportError:
    class BertLayerNorm(nn.Module):
        pass
from apex.normalization import FusedRMSNorm, MixedFusedLayerNorm
from apex.parallel import SyncBatchNorm, convert_syncbn_model


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = BertLayerNorm(4, eps=1e-12, memory_efficient=True)
        self.second = FusedRMSNorm(4)
        self.third = MixedFusedLayerNorm(4)
        self.fourth = SyncBatchNorm(4, channel_last=False, fuse_relu=False)

    def forward(self, x):
        return self.fourth(self.third(self.second(self.first(x))))


def main():
    import torch

    model = convert_syncbn_model(Net()).eval()
    assert isinstance(model.fourth, SyncBatchNorm)
    return [model(torch.ones(3, 4)).sum().item() for _ in range(2)]
