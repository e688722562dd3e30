"""ImageNet at an opt level, with the command line that ``apex``'s example had.

.. code-block:: bash

    python examples/imagenet.py --synthetic 512 --image-size 32 --epochs 2 -b 32 --opt-level O4
    python examples/imagenet.py -a resnet50 -b 224 --opt-level O2 DIR
    torchrun --nproc-per-node 2 examples/imagenet.py -a resnet50 -b 224 --opt-level O2 DIR

``DIR`` has the folders ``train`` and ``val`` with one folder for each class, and is read with torchvision. ``--synthetic``
needs neither: it makes images, and a ResNet of this file learns them.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

from amp_wrapper import AmpCheckpointError, AmpError, amp
from amp_wrapper.checkpoint import file as checkpoint_file

try:
    import torchvision
except (ImportError, RuntimeError):
    # one that was built for another torch raises RuntimeError
    torchvision = None

LEVELS = ('O0', 'O1', 'O2', 'O3', 'O4', 'O5')
#: Of the red, green and blue of ImageNet, which has bytes.
MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
NO_TORCHVISION = 'is not installed, or does not fit this torch: install the version that does'
CHECKPOINT, BEST = 'checkpoint.pth.tar', 'model_best.pth.tar'


# -- models -----------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A residual block of two or three convolutions.

    Args:
        inputs: Channels that come in.
        width: Channels of the 3 x 3 convolutions.
        stride: Of the first 3 x 3 convolution.
        bottleneck: Whether 1 x 1 convolutions stand around a single 3 x 3, and four times as many channels go out.
    """

    def __init__(self, inputs: int, width: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        outputs = 4 * width if bottleneck else width
        # channels in and out, kernel, stride
        shapes = [(inputs, width, 3, stride), (width, width, 3, 1)]
        if bottleneck:
            shapes = [(inputs, width, 1, 1), (width, width, 3, stride), (width, outputs, 1, 1)]
        layers: list[nn.Module] = []
        for shape in shapes:
            layers += [*convolution(*shape), nn.ReLU(inplace=True)]
        self.layers = nn.Sequential(*layers[:-1])
        # begins as the identity
        nn.init.zeros_(layers[-2].weight)
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else nn.Sequential(*convolution(inputs, outputs, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        """(N, inputs, H, W) to (N, outputs, H / stride, W / stride)."""
        return F.relu(self.layers(x) + self.shortcut(x))


def convolution(inputs: int, outputs: int, kernel: int, stride: int) -> tuple[nn.Module, nn.Module]:
    """A convolution without bias, and its BatchNorm."""
    layer = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode='fan_out', nonlinearity='relu')
    return layer, nn.BatchNorm2d(outputs)


class ResNet(nn.Module):
    """A residual network for images.

    Args:
        depths: Blocks of each of the four stages.
        bottleneck: The kind of the blocks.
        num_classes: Classes.
    """

    def __init__(self, depths: Sequence[int], bottleneck: bool, num_classes: int) -> None:
        super().__init__()
        stem = (*convolution(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, stride=2, padding=1))
        blocks: list[nn.Module] = []
        channels = 64
        for stage, depth in enumerate(depths):
            width = 64 * 2**stage
            for index in range(depth):
                blocks.append(Block(channels, width, 2 if stage > 0 and index == 0 else 1, bottleneck))
                channels = 4 * width if bottleneck else width
        self.features = nn.Sequential(*stem, *blocks)
        self.fc = nn.Linear(channels, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """(N, 3, H, W) to (N, num_classes)."""
        return self.fc(self.features(images).mean((2, 3)))


#: What can be built without torchvision: depths, and whether the blocks are bottlenecks.
OWN_MODELS = {'resnet18': ((2, 2, 2, 2), False), 'resnet50': ((3, 4, 6, 3), True)}


def model_names() -> list[str]:
    """What ``--arch`` may be."""
    if torchvision is None:
        return sorted(OWN_MODELS)
    # these two put out more than logits
    return torchvision.models.list_models(module=torchvision.models, exclude=['googlenet', 'inception_*'])


def build_model(args: argparse.Namespace, num_classes: int) -> nn.Module:
    """The model of ``--arch``, in FP32 and on the CPU.

    Raises:
        RuntimeError: Weights that cannot be had.
    """
    if torchvision is None:
        return ResNet(*OWN_MODELS[args.arch], num_classes)
    if not args.pretrained:
        return torchvision.models.get_model(args.arch, num_classes=num_classes)
    try:
        model = torchvision.models.get_model(args.arch, weights='DEFAULT')
    except (OSError, ValueError) as error:
        raise RuntimeError(
            f'--pretrained: the weights of {args.arch} could not be fetched ({error}): leave the option out, or try again '
            f'with a network.'
        ) from error
    if num_classes != 1000:
        raise RuntimeError(f'--pretrained: the weights are for 1000 classes, and the images have {num_classes}.')
    return model


# -- data -------------------------------------------------------------------------------------------------------------


class Synthetic(Dataset):
    """Images that are made when they are asked for: each class has a coarse pattern, with noise upon it.

    Args:
        length: Number of images.
        size: Height and width.
        seed: Of the noise; the patterns are the same for all.
    """

    num_classes = 10

    def __init__(self, length: int, size: int, seed: int) -> None:
        self.length, self.size, self.seed = length, size, seed
        coarse = torch.rand(self.num_classes, 3, 4, 4, generator=torch.Generator().manual_seed(0))
        self.patterns = F.interpolate(coarse, size=(size, size), mode='bilinear') * 255

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if not 0 <= index < self.length:
            raise IndexError(index)
        own = torch.Generator().manual_seed(self.seed * 10**9 + index)
        label = index % self.num_classes
        noise = 64 * torch.randn(3, self.size, self.size, generator=own)
        return (self.patterns[label] + noise).clamp(0, 255).to(torch.uint8), label


def build_data(args: argparse.Namespace) -> tuple[Dataset, Dataset, int]:
    """Training images, validation images and the number of classes; images are uint8 (3, H, W)."""
    if args.synthetic:
        held_out = max(Synthetic.num_classes, args.synthetic // 5)
        size = args.image_size
        return Synthetic(args.synthetic, size, 1), Synthetic(held_out, size, 2), Synthetic.num_classes
    steps = torchvision.transforms
    crop = [steps.RandomResizedCrop(args.image_size), steps.RandomHorizontalFlip(), steps.PILToTensor()]
    # 256 for the usual 224
    centre = [steps.Resize(round(args.image_size * 8 / 7)), steps.CenterCrop(args.image_size), steps.PILToTensor()]
    folders = torchvision.datasets.ImageFolder
    train, val = (
        folders(str(args.data / name), steps.Compose(parts)) for name, parts in (('train', crop), ('val', centre))
    )
    return train, val, len(train.classes)


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
        self.train_set, self.val_set, num_classes = build_data(args)
        self.format = torch.channels_last if args.channels_last else torch.contiguous_format
        self.mean, self.std = (torch.tensor(value, device=device).view(-1, 1, 1) for value in (MEAN, STD))
        self.best = 0.0
        self.epoch = args.start_epoch

        bare = build_model(args, num_classes)
        if args.sync_bn:
            bare = nn.SyncBatchNorm.convert_sync_batchnorm(bare)
        bare = bare.to(device, memory_format=self.format)
        # the rate that is asked for belongs to 256 images a step
        self.lr = args.lr * args.batch_size * world / 256
        optimizer = torch.optim.SGD(bare.parameters(), self.lr, momentum=args.momentum, weight_decay=args.weight_decay)
        self.bare, self.optimizer = amp.initialize(
            bare,
            optimizer,
            opt_level=args.opt_level,
            keep_batchnorm_fp32=args.keep_batchnorm_fp32,
            loss_scale=args.loss_scale,
        )
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
        """This process's part of the images; an epoch's order depends on the seed and the epoch alone."""
        if train:
            sampler = DistributedSampler(self.train_set, self.world, self.rank, seed=self.args.seed)
            sampler.set_epoch(self.epoch)
            images = self.train_set
        else:
            # each image once, with no repetition that would fill up the last process
            sampler, images = None, Subset(self.val_set, range(self.rank, len(self.val_set), self.world))
        return DataLoader(
            images,
            batch_size=self.args.batch_size,
            sampler=sampler,
            num_workers=self.args.workers,
            pin_memory=self.device.type == 'cuda',
        )

    def prepare(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Move a batch to the device and normalise it, in FP32; the model casts what it is given."""
        images = images.to(self.device, non_blocking=True, memory_format=self.format)
        return (images.float() - self.mean) / self.std, labels.to(self.device, non_blocking=True)

    def summed(self, values: Tensor) -> list[float]:
        """The sum over the processes. Waits for the device."""
        if self.world > 1:
            dist.all_reduce(values)
        return values.tolist()

    def learning_rate(self, step: int, steps: int) -> float:
        """Rises over the first epochs, then falls to a tenth after 30, 60 and 80."""
        drops = sum(self.epoch >= epoch for epoch in (30, 60, 80))
        done = self.epoch + (step + 1) / steps
        return self.lr * 0.1**drops * min(1.0, done / max(self.args.warmup_epochs, 1e-12))

    def train_epoch(self) -> None:
        """One pass over the training images."""
        args = self.args
        # also what is random in the augmentation depends on seed, epoch and process alone, as after a resume
        torch.manual_seed(args.seed + self.epoch * self.world + self.rank)
        loader = self.batches(train=True)
        if args.prof + 10 > len(loader) and args.prof >= 0:
            raise SystemExit(
                f'--prof {args.prof}: an epoch has {len(loader)} steps, fewer than ten from there on; begin at a smaller one.'
            )
        self.model.train()
        start, printed = time.monotonic(), 0
        with contextlib.ExitStack() as stack:
            for step, batch in enumerate(loader):
                if args.prof == step:
                    profiler = stack.enter_context(torch.profiler.profile())
                for group in self.optimizer.param_groups:
                    group['lr'] = self.learning_rate(step, len(loader))
                images, labels = self.prepare(*batch)

                output = self.model(images)
                loss = F.cross_entropy(output, labels)
                self.optimizer.zero_grad()
                with amp.scale_loss(loss, self.optimizer) as scaled_loss:
                    scaled_loss.backward()
                self.optimizer.step()

                # the only place that waits for the device
                if (step + 1) % args.print_freq == 0 or step + 1 == len(loader):
                    mean_loss, *shares = self.summed(torch.stack([loss.detach(), *accuracy(output, labels)]))
                    seconds = (time.monotonic() - start) / (step + 1 - printed)
                    start, printed = time.monotonic(), step + 1
                    self.say(
                        f'Epoch: [{self.epoch}][{step + 1}/{len(loader)}]  Time {seconds:.3f}  '
                        f'Speed {self.world * args.batch_size / seconds:.1f}  Loss {mean_loss / self.world:.4f}  '
                        + '  '.join(f'Prec@{k} {share / self.world:.2f}' for k, share in zip((1, 5), shares))
                    )
                if 0 <= args.prof == step - 9:
                    stack.close()
                    self.say(profiler.key_averages().table(sort_by='self_cpu_time_total', row_limit=20))
                    raise Profiled

    @torch.no_grad()
    def validate(self) -> float:
        """Share of right predictions on the validation images, in per cent, over all processes."""
        if self.world > 1:
            # the processes have running statistics of their own, and the checkpoint those of the first
            for buffer in self.bare.buffers():
                dist.broadcast(buffer, 0)
        self.bare.eval()
        total = torch.zeros(4, device=self.device)
        for batch in self.batches(train=False):
            images, labels = self.prepare(*batch)
            # not through DDP: the processes may have different numbers of batches
            output = self.bare(images)
            loss = F.cross_entropy(output, labels)
            total += len(labels) * torch.stack([torch.ones_like(loss), loss, *accuracy(output, labels)])
        count, loss, prec1, prec5 = self.summed(total)
        self.say(f' * Prec@1 {prec1 / count:.3f}  Prec@5 {prec5 / count:.3f}  Loss {loss / count:.4f}')
        return prec1 / count

    def fit(self) -> None:
        """Train, validate and save, until ``--epochs`` are done."""
        while self.epoch < self.args.epochs:
            self.train_epoch()
            prec1 = self.validate()
            self.epoch += 1
            best, self.best = prec1 > self.best, max(prec1, self.best)
            if self.rank == 0:
                self.save(best)
        self.say(f'best Prec@1 {self.best:.3f}')

    def save(self, best: bool) -> None:
        """Write a checkpoint, and a copy of the best."""
        checkpoint = {
            'epoch': self.epoch,
            'arch': self.args.arch,
            'best_prec1': self.best,
            # FP32 values, the masters where there are some
            'state_dict': self.bare.state_dict(),
            'optimizer': self.optimizer.state_dict(),
            'amp': amp.state_dict(),
        }
        path = self.args.out / CHECKPOINT
        checkpoint_file.save(checkpoint, path)
        if best:
            shutil.copyfile(path, self.args.out / BEST)

    def load(self, path: Path) -> None:
        """Go on from a checkpoint.

        Raises:
            AmpCheckpointError: Missing, damaged, of another script or of another model. Nothing has been applied.
        """
        checkpoint = checkpoint_file.load(path)
        needed = {'epoch', 'arch', 'best_prec1', 'state_dict', 'optimizer', 'amp'}
        missing = sorted(needed - set(checkpoint)) if isinstance(checkpoint, dict) else sorted(needed)
        if missing:
            raise AmpCheckpointError(f'{path} is no checkpoint of this script: it has no {", ".join(missing)}.')
        if checkpoint['arch'] != self.args.arch:
            raise AmpCheckpointError(
                f'{path} holds a {checkpoint["arch"]}, not a {self.args.arch}: resume with --arch {checkpoint["arch"]}.'
            )
        self.bare.load_state_dict(checkpoint['state_dict'])
        self.optimizer.load_state_dict(checkpoint['optimizer'])
        amp.load_state_dict(checkpoint['amp'])
        self.epoch, self.best = checkpoint['epoch'], checkpoint['best_prec1']
        self.say(f'resumed from {path} after {self.epoch} epochs')


class Profiled(Exception):
    """The steps that ``--prof`` asked for are done."""


def accuracy(output: Tensor, labels: Tensor) -> list[Tensor]:
    """Shares in per cent of labels (N,) among the 1 and the 5 highest logits (N, num_classes); on the device."""
    order = output.topk(min(5, output.shape[1]), 1).indices
    hits = order == labels[:, None]
    return [100 * hits[:, :k].any(1).float().mean() for k in (1, 5)]


# -- the command line -------------------------------------------------------------------------------------------------


def truth(text: str) -> bool:
    """A type of argparse for True and False."""
    if text.lower() not in ('true', 'false'):
        raise argparse.ArgumentTypeError(f'{text!r} must be True or False')
    return text.lower() == 'true'


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
    add = parser.add_argument
    add('data', metavar='DIR', nargs='?', type=Path, help='has train/ and val/, with a folder for each class')
    add('--synthetic', type=int, metavar='N', help='make N images instead of reading DIR')
    add('--image-size', type=int, default=224, metavar='N', help='height and width (default: %(default)s)')
    add('-a', '--arch', default='resnet18', choices=model_names(), metavar='ARCH', help=', '.join(model_names()))
    add('-j', '--workers', type=int, metavar='N', help='processes that load images (default: 4, with --synthetic 0)')
    add('--epochs', type=int, default=90, metavar='N', help='in all, those before a resume included')
    add('--start-epoch', type=int, default=0, metavar='N', help='number of the first epoch; a checkpoint knows it')
    add('-b', '--batch-size', type=int, default=256, metavar='N', help='images in a step, for each process')
    add('--lr', '--learning-rate', type=float, default=0.1, help='for 256 images in a step of all processes')
    add('--warmup-epochs', type=float, default=5, metavar='N', help='over which the learning rate rises')
    add('--momentum', type=float, default=0.9, help='of SGD')
    add('--wd', '--weight-decay', dest='weight_decay', type=float, default=1e-4, help='of SGD')
    add('-p', '--print-freq', type=int, default=10, metavar='N', help='steps between two lines')
    add('--resume', type=Path, metavar='PATH', help='a checkpoint of this script')
    add('-e', '--evaluate', action='store_true', help='validate, and end')
    add(
        '--pretrained',
        action='store_true',
        help="torchvision's weights; needs torchvision, and a network the first time",
    )
    add('--prof', type=int, default=-1, metavar='N', help='profile ten steps from the Nth on, and end')
    add('--deterministic', action='store_true', help='choose slower kernels that give the same bits each time')
    add('--sync_bn', '--sync-bn', action='store_true', help='BatchNorm over all processes; needs GPUs')
    add('--opt-level', default='O1', choices=LEVELS, help='default: %(default)s')
    add('--keep-batchnorm-fp32', choices=('True', 'False'), help="in place of the level's own")
    add('--loss-scale', metavar='SCALE', help="'dynamic' or a number in place of the level's own")
    add('--channels-last', nargs='?', type=truth, const=True, default=False, metavar='BOOL', help='memory format')
    add('--local_rank', '--local-rank', type=int, help='of old launchers; torchrun says it in LOCAL_RANK')
    add('--seed', type=int, default=0, help='of weights, order and augmentation')
    add('--out', type=Path, default=Path('work_dirs/imagenet'), metavar='FOLDER', help='for checkpoints')
    args = parser.parse_args(arguments)
    if args.workers is None:
        args.workers = 0 if args.synthetic else 4
    lowest = dict(image_size=32, workers=0, epochs=0, start_epoch=0, batch_size=2, print_freq=1, lr=0, warmup_epochs=0)
    for name, low in {**lowest, 'momentum': 0, 'weight_decay': 0}.items():
        value = getattr(args, name)
        if not low <= value < math.inf:
            parser.error(f'--{name.replace("_", "-")} {value} must be at least {low}, and finite')
    _check_source(args, parser)
    return args


def _check_source(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Refuse what this machine or the data cannot give, before any work."""
    if args.synthetic is None and args.data is None:
        parser.error('name the folder of the images, or make some: --synthetic N')
    if args.synthetic is not None and args.data is not None:
        parser.error(f'{args.data} is not read with --synthetic: leave out one of them')
    if args.synthetic is not None and args.synthetic < 2:
        parser.error(f'--synthetic {args.synthetic} must be at least 2')
    if args.pretrained and torchvision is None:
        parser.error(f'--pretrained needs torchvision, which {NO_TORCHVISION}')
    if args.data is not None and torchvision is None:
        parser.error(f'images are read with torchvision, which {NO_TORCHVISION}; --synthetic N needs none')
    if args.data is not None and not all((args.data / name).is_dir() for name in ('train', 'val')):
        parser.error(f'{args.data} must hold the folders train and val')
    if args.sync_bn and not torch.cuda.is_available():
        parser.error("--sync_bn: torch's SyncBatchNorm needs GPUs; leave the option out")


@contextlib.contextmanager
def processes() -> Iterator[tuple[torch.device, int, int]]:
    """The device, rank and number of the processes, as torchrun started them."""
    local, world = int(os.environ.get('LOCAL_RANK', 0)), int(os.environ.get('WORLD_SIZE', 1))
    cuda = torch.cuda.is_available()
    device = torch.device('cuda', local) if cuda else torch.device('cpu')
    if cuda:
        torch.cuda.set_device(device)
    if world == 1:
        yield device, 0, 1
        return
    dist.init_process_group('nccl' if cuda else 'gloo')
    try:
        yield device, dist.get_rank(), dist.get_world_size()
        # the first process may still be writing
        dist.barrier()
    finally:
        # a DDP that is left over would keep the threads of gloo alive, and these abort a process that is about to end
        gc.collect()
        dist.destroy_process_group()


def run(args: argparse.Namespace) -> Any:
    """Train or evaluate as the options say."""
    torch.backends.cudnn.benchmark = not args.deterministic
    torch.backends.cudnn.deterministic = args.deterministic
    Path(args.out).mkdir(parents=True, exist_ok=True)
    with processes() as place:
        return _run(args, *place)


def _run(args: argparse.Namespace, device: torch.device, rank: int, world: int) -> Any:
    torch.manual_seed(args.seed)
    trainer = Trainer(args, device, rank, world)
    with contextlib.suppress(Profiled):
        return trainer.validate() if args.evaluate else trainer.fit()


def main() -> None:
    """Read the command line and train; what the user has to change ends in one line."""
    args = parse()
    try:
        run(args)
    except (AmpError, FileNotFoundError, RuntimeError) as error:
        sys.exit(f'{type(error).__name__}: {error}')


if __name__ == '__main__':
    main()
