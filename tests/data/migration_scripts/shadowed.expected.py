"""Nothing here is apex, though it looks like it."""
from torch.cuda import amp
from torch.nn.parallel import DistributedDataParallel as DDP

from .apex import amp as ours

type_ = 'AmpOptimWrapper'


def train(model, apex, loss, optimizer):
    scaler = amp.GradScaler()
    scaler.scale(loss).backward()
    with apex.amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    amp.initialize = None
    optimizer.backward(loss)
    return DDP(model, device_ids=[0]), ours.initialize(model, backend='apex')


optim_wrapper = dict(type='AmpOptimWrapper', loss_scale='dynamic')
