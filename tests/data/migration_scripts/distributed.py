"""python -m apex.parallel.multiproc distributed.py"""
import apex.parallel
import torch
from apex import amp
from apex.parallel import DistributedDataParallel, Reducer
from apex.parallel.LARC import LARC


def early(model, optimizer):
    model = DistributedDataParallel(model)
    model, optimizer = amp.initialize(model, optimizer, opt_level='O1')
    return model, optimizer


def right(model, optimizer, group):
    model = apex.parallel.convert_syncbn_model(model, process_group=apex.parallel.create_syncbn_process_group(4))
    model, optimizer = amp.initialize(model, LARC(optimizer), 'O2', patch_torch_functions_type=torch.half)
    model = DistributedDataParallel(model, 1e7, True, gradient_average=True, num_allreduce_streams=2, prof=False)
    return model, optimizer


def others(model, optimizer):
    models = [
        DistributedDataParallel(model, gradient_average=False),
        apex.parallel.DistributedDataParallel(model, shared_param=True, allreduce_always_fp32=True),
        apex.parallel.DistributedDataParallel(
            model,
            delay_allreduce=True,
            gradient_predivide_factor=torch.distributed.get_world_size(),
        ),
        apex.parallel.SyncBatchNorm(4, channel_last=True),
        Reducer(model),
    ]
    return models
