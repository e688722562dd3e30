import argparse

import torch

try:
    from torch.nn.parallel import DistributedDataParallel as DDP
    import amp_wrapper
    from amp_wrapper import amp
    HAS_APEX = True
except ImportError:
    raise ImportError('Please install amp_wrapper to run this script.')


def main(words=()):
    parser = argparse.ArgumentParser()
    parser.add_argument('--sync_bn', action='store_true', help='apex sync BN')
    parser.add_argument('--opt-level', default='O2')
    parser.add_argument('--keep-batchnorm-fp32', type=str, default=None)
    parser.add_argument('--loss-scale', type=str, default=None)
    parser.add_argument('--distributed', action='store_true')
    args = parser.parse_args(words)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    if args.sync_bn:
        print("using apex synced BN")
        model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    optimizer = amp_wrapper.FusedSGD(model.parameters(), 0.1,
                                    momentum=0.9)

    model, optimizer = amp.initialize(model, optimizer,
                                      opt_level=args.opt_level,
                                      keep_batchnorm_fp32=args.keep_batchnorm_fp32,
                                      loss_scale=args.loss_scale
                                      )
    if args.distributed:
        # model = DDP(model)
        model = DDP(model)
    losses = []
    for _ in range(2):
        output = model(torch.randn(6, 4))
        loss = output.square().mean()
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
