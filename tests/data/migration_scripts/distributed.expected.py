"""python -m apex.parallel.multiproc distributed.py"""
import apex.parallel
import torch
from amp_wrapper import amp
from torch.nn.parallel import DistributedDataParallel
from apex.parallel import Reducer
from apex.parallel.LARC import LARC


def early(model, optimizer):
    model = DistributedDataParallel(model)
    model, optimizer = amp.initialize(model, optimizer, opt_level='O1')
    return model, optimizer


def right(model, optimizer, group):
    model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model, process_group=apex.parallel.create_syncbn_process_group(4))
    model, optimizer = amp.initialize(model, LARC(optimizer), 'O2', patch_torch_functions_type=torch.half)
    model = DistributedDataParallel(model)
    return model, optimizer


def others(model, optimizer):
    models = [
        DistributedDataParallel(model, gradient_average=False),
        torch.nn.parallel.DistributedDataParallel(model, allreduce_always_fp32=True),
        torch.nn.parallel.DistributedDataParallel(
            model,
        ),
        torch.nn.SyncBatchNorm(4, channel_last=True),
        Reducer(model),
    ]
    return models
