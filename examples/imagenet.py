"""ImageNet at an opt level, with the main options that ``apex``'s example had.

.. code-block:: bash

    python examples/imagenet.py --synthetic 512 --image-size 32 --epochs 2 -b 32 --opt-level O4
    python examples/imagenet.py -a resnet50 -b 224 --opt-level O2 DIR
    torchrun --nproc-per-node 2 examples/imagenet.py -a resnet50 -b 224 --opt-level O2 DIR

``DIR`` has the folders ``train`` and ``val`` with one folder for each class, and is read with torchvision. ``--synthetic``
needs neither: it makes images, which a small network of this file learns.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

from amp_wrapper import AmpError, amp
from amp_wrapper.checkpoint import file as checkpoint_file

LEVELS = ('O0', 'O1', 'O2', 'O3', 'O4', 'O5')
#: Of the red, green and blue of ImageNet, which has bytes.
MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
CHECKPOINT = 'checkpoint.pth.tar'


# -- models and data --------------------------------------------------------------------------------------------------


def small_network() -> nn.Module:
    """Build what learns the synthetic images: convolutions with BatchNorm."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(inputs, outputs, 3, 2, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def make_images(count: int, size: int, seed: int) -> TensorDataset:
    """Make images of ten classes: each has a coarse pattern, with noise upon it.

    Args:
        count: Number of images.
        size: Height and width.
        seed: Of the noise; the patterns are the same for all.
    """
    coarse = torch.rand(10, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(count) % 10
    patterns = F.interpolate(coarse, size=(size, size), mode='bilinear')[labels] * 255
    noise = 64 * torch.randn(patterns.shape, generator=torch.Generator().manual_seed(seed))
    return TensorDataset((patterns + noise).clamp(0, 255).to(torch.uint8), labels)


def build(args: argparse.Namespace) -> tuple[nn.Module, Any, Any]:
    """Return the model in FP32, training images and validation images; images are uint8 (3, H, W)."""
    if args.synthetic:
        return small_network(), make_images(args.synthetic, args.image_size, 1), make_images(50, args.image_size, 2)
    import torchvision
    from torchvision import transforms

    crop = [transforms.RandomResizedCrop(args.image_size), transforms.RandomHorizontalFlip(), transforms.PILToTensor()]
    # 256 for the usual 224
    centre = [transforms.Resize(round(args.image_size * 8 / 7)), transforms.CenterCrop(args.image_size)]
    centre.append(transforms.PILToTensor())
    train, val = (
        torchvision.datasets.ImageFolder(str(args.data / name), transforms.Compose(parts))
        for name, parts in (('train', crop), ('val', centre))
    )
    return torchvision.models.get_model(args.arch, num_classes=len(train.classes)), train, val


# -- training ---------------------------------------------------------------------------------------------------------


class Trainer:
    """A model and its optimizer at an opt level, in one of several processes.

    Args:
        args: The command line.
        device: Of this process.
        rank: Of this process.
        world: Number of processes.
    """

    def __init__(self, args: argparse.Namespace, device: torch.device, rank: int, world: int) -> None:
        self.args, self.device, self.rank, self.world = args, device, rank, world
        self.epoch = 0
        torch.manual_seed(args.seed)
        self.mean, self.std = (torch.tensor(value, device=device).view(-1, 1, 1) for value in (MEAN, STD))
        bare, self.train_set, self.val_set = build(args)
        # the rate that is asked for belongs to 256 images a step
        self.lr = args.lr * args.batch_size * world / 256
        bare = bare.to(device)
        optimizer = torch.optim.SGD(bare.parameters(), self.lr, momentum=0.9, weight_decay=1e-4)
        overrides = {'keep_batchnorm_fp32': args.keep_batchnorm_fp32, 'loss_scale': args.loss_scale}
        self.bare, self.optimizer = amp.initialize(bare, optimizer, opt_level=args.opt_level, **overrides)
        if args.resume is not None:
            self.load(args.resume)
        # after the cast: DDP has to see the types that the parameters have from now on
        devices = [device] if device.type == 'cuda' else None
        self.model = DistributedDataParallel(self.bare, device_ids=devices) if world > 1 else self.bare

    def say(self, text: str) -> None:
        """Print, in one process."""
        if self.rank == 0:
            print(text, flush=True)

    def batches(self, train: bool) -> DataLoader:
        """Return this process's part of the images; an epoch's order depends on the seed and the epoch alone."""
        sampler, images = None, self.train_set
        if train:
            sampler = DistributedSampler(images, self.world, self.rank, seed=self.args.seed)
            sampler.set_epoch(self.epoch)
        else:
            # each image once, with no repetition that would fill up the last process
            images = Subset(self.val_set, range(self.rank, len(self.val_set), self.world))
        return DataLoader(images, self.args.batch_size, sampler=sampler, num_workers=self.args.workers)

    def prepare(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Move a batch to the device and normalise it, in FP32; the model casts what it is given."""
        return (images.to(self.device).float() - self.mean) / self.std, labels.to(self.device)

    def learning_rate(self, step: int, steps: int) -> float:
        """Return a rate that rises over five epochs, then falls to a tenth after 30, 60 and 80."""
        drops = sum(self.epoch >= epoch for epoch in (30, 60, 80))
        return self.lr * 0.1**drops * min(1.0, (self.epoch + (step + 1) / steps) / 5)

    def train_epoch(self) -> None:
        """Go once over the training images."""
        # also what is random in the augmentation depends on seed, epoch and process alone, as after a resume
        torch.manual_seed(self.args.seed + self.epoch * self.world + self.rank)
        loader, start = self.batches(train=True), time.monotonic()
        self.model.train()
        for step, batch in enumerate(loader):
            for group in self.optimizer.param_groups:
                group['lr'] = self.learning_rate(step, len(loader))
            images, labels = self.prepare(*batch)
            loss = F.cross_entropy(self.model(images), labels)
            self.optimizer.zero_grad()
            with amp.scale_loss(loss, self.optimizer) as scaled_loss:
                scaled_loss.backward()
            self.optimizer.step()
            # the only place that waits for the device
            if (step + 1) % self.args.print_freq == 0:
                speed = (step + 1) * self.world * self.args.batch_size / (time.monotonic() - start)
                place = f'Epoch: [{self.epoch}][{step + 1}/{len(loader)}]'
                self.say(f'{place}  Speed {speed:.1f}  Loss {loss.item():.4f}')

    @torch.no_grad()
    def validate(self) -> None:
        """Print the share of right predictions on the validation images, in per cent, over all processes."""
        if self.world > 1:
            # the processes have running statistics of their own, and the checkpoint those of the first
            for buffer in self.bare.buffers():
                dist.broadcast(buffer, 0)
        self.bare.eval()
        right = torch.zeros((), device=self.device)
        for batch in self.batches(train=False):
            images, labels = self.prepare(*batch)
            # not through DDP: the processes may have different numbers of batches
            right += (self.bare(images).argmax(1) == labels).sum()
        if self.world > 1:
            dist.all_reduce(right)
        self.say(f' * Prec@1 {100 * right.item() / len(self.val_set):.3f}')

    def fit(self) -> None:
        """Train, validate and save, until ``--epochs`` are done; with ``--evaluate``, only validate."""
        if self.args.evaluate:
            self.validate()
            return
        while self.epoch < self.args.epochs:
            self.train_epoch()
            self.validate()
            self.epoch += 1
            if self.rank == 0:
                self.save(self.args.out / CHECKPOINT)

    def save(self, path: Path) -> None:
        """Write a checkpoint; its weights are FP32 values, the masters where there are some."""
        states = {'state_dict': self.bare.state_dict(), 'optimizer': self.optimizer.state_dict()}
        checkpoint_file.save({'epoch': self.epoch, **states, 'amp': amp.state_dict()}, path)

    def load(self, path: Path) -> None:
        """Go on from a checkpoint of this script."""
        checkpoint = checkpoint_file.load(path)
        self.bare.load_state_dict(checkpoint['state_dict'])
        self.optimizer.load_state_dict(checkpoint['optimizer'])
        amp.load_state_dict(checkpoint['amp'])
        self.epoch = checkpoint['epoch']
        self.say(f'resumed from {path} after {self.epoch} epochs')


# -- the command line -------------------------------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
    add = parser.add_argument
    add('data', metavar='DIR', nargs='?', type=Path, help='has train/ and val/, with a folder for each class')
    add('--synthetic', type=int, metavar='N', help='make N images instead of reading DIR')
    add('--image-size', type=int, default=224, help='height and width (224)')
    add('-a', '--arch', default='resnet18', help='a model of torchvision (resnet18)')
    add('-j', '--workers', type=int, default=4, help='processes that load images (4)')
    add('--epochs', type=int, default=90, help='in all, those before a resume included (90)')
    add('-b', '--batch-size', type=int, default=256, help='images in a step, for each process (256)')
    add('--lr', type=float, default=0.1, help='for 256 images in a step of all processes (0.1)')
    add('-p', '--print-freq', type=int, default=10, help='steps between two lines (10)')
    add('--resume', type=Path, metavar='PATH', help='a checkpoint of this script')
    add('-e', '--evaluate', action='store_true', help='validate, and end')
    add('--opt-level', default='O1', choices=LEVELS, help='O1 by default')
    add('--keep-batchnorm-fp32', choices=('True', 'False'), help="in place of the level's own")
    add('--loss-scale', metavar='SCALE', help="'dynamic' or a number in place of the level's own")
    add('--seed', type=int, default=0, help='of weights, order and augmentation')
    add('--out', type=Path, default=Path('work_dirs/imagenet'), metavar='FOLDER', help='gets the checkpoints')
    args = parser.parse_args(arguments)
    if (args.synthetic is None) == (args.data is None):
        parser.error('name the folder of the images, or make some: --synthetic N')
    return args


def run(args: argparse.Namespace) -> None:
    """Train or evaluate in one process, or in those that torchrun started."""
    local, world = int(os.environ.get('LOCAL_RANK', 0)), int(os.environ.get('WORLD_SIZE', 1))
    device = torch.device('cuda', local) if torch.cuda.is_available() else torch.device('cpu')
    args.out.mkdir(parents=True, exist_ok=True)
    if device.type == 'cuda':
        torch.cuda.set_device(device)
    if world > 1:
        dist.init_process_group('nccl' if device.type == 'cuda' else 'gloo')
    try:
        Trainer(args, device, dist.get_rank() if world > 1 else 0, world).fit()
    finally:
        if world > 1:
            # a DDP that is left over would keep the threads of gloo alive, and these abort a process that is about to end
            gc.collect()
            dist.destroy_process_group()


def main() -> None:
    """Read the command line and train; a mistake of the user ends in one line."""
    args = parse()
    try:
        run(args)
    except (AmpError, ImportError, FileNotFoundError) as error:
        sys.exit(f'{type(error).__name__}: {error}')


if __name__ == '__main__':
    main()
