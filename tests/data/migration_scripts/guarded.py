import argparse

import torch

try:
    from apex.parallel import DistributedDataParallel as DDP
    from apex import amp, optimizers
    from apex.multi_tensor_apply import multi_tensor_applier
    HAS_APEX = True
except ImportError:
    raise ImportError("Please install apex from its repository to run this example.")


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
        import apex
        print("using apex synced BN")
        model = apex.parallel.convert_syncbn_model(model)
    optimizer = optimizers.FusedSGD(model.parameters(), 0.1,
                                    momentum=0.9,
                                    materialize_master_grads=True)

    model, optimizer = amp.initialize(model, optimizer,
                                      opt_level=args.opt_level,
                                      keep_batchnorm_fp32=args.keep_batchnorm_fp32,
                                      loss_scale=args.loss_scale
                                      )
    if args.distributed:
        # model = DDP(model)
        model = DDP(model, delay_allreduce=True)
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
