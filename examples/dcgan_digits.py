"""A DCGAN of handwritten digits: two models, two optimizers, three losses, each loss with a scale of its own.

.. code-block:: bash

    python examples/dcgan_digits.py --opt-level O4
    python examples/dcgan_digits.py --opt-level O4 --epochs 120 --resume work_dirs/dcgan_digits/checkpoint.pth

The digits are the 1,797 images of 8 x 8 that install with scikit-learn. The run writes pictures of samples, a curve of the
losses, and a checkpoint from which it goes on bit for bit.
"""

from __future__ import annotations

import argparse
import math
import struct
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_wrapper import AmpCheckpointError, AmpError, amp
from amp_wrapper.checkpoint import file as checkpoint_file

LEVELS = ('O0', 'O1', 'O2', 'O3', 'O4', 'O5')
CLASSES = 10


class Generator(nn.Module):
    """Noise and a class to an image of 8 x 8 in -1 to 1.

    Args:
        noise_dim: Length of the noise.
        width: Channels at 4 x 4; twice as many at 2 x 2.
    """

    def __init__(self, noise_dim: int, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.ConvTranspose2d(noise_dim + CLASSES, 2 * width, 2, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.ConvTranspose2d(width, 1, 4, stride=2, padding=1),
            nn.Tanh(),
        )

    def forward(self, noise: Tensor, labels: Tensor) -> Tensor:
        """(N, noise_dim) and (N,) to (N, 1, 8, 8)."""
        classes = F.one_hot(labels, CLASSES).to(noise.dtype)
        return self.layers(torch.cat([noise, classes], 1)[:, :, None, None])


class Discriminator(nn.Module):
    """An image and its alleged class to a logit: is it real?

    Args:
        width: Channels at 8 x 8; doubled at each halving of the size.
        dropout: Share of dropped channels. The data set is small, and memorised without it.
    """

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1 + CLASSES, width, 3, padding=1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, 2 * width, 4, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Dropout2d(dropout),
            nn.Conv2d(2 * width, 4 * width, 4, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Dropout(dropout),
            nn.Conv2d(4 * width, 1, 2),
        )

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """(N, 1, 8, 8) and (N,) to (N,)."""
        planes = F.one_hot(labels, CLASSES).to(images.dtype)[:, :, None, None].expand(-1, -1, *images.shape[2:])
        return self.layers(torch.cat([images, planes], 1)).flatten()


def load_digits(device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images (N, 1, 8, 8) in -1 to 1 and labels (N,) to train on, and those of a fifth that is held out.

    Raises:
        ImportError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits as load
        from sklearn.model_selection import train_test_split
    except ImportError as error:
        raise ImportError('the digits come with scikit-learn: pip install scikit-learn') from error
    images, labels = load(return_X_y=True)
    train, test, train_labels, test_labels = train_test_split(
        images, labels, test_size=0.2, random_state=0, stratify=labels
    )
    pictures = [
        torch.tensor(part, dtype=torch.float32, device=device).view(-1, 1, 8, 8) / 8 - 1 for part in (train, test)
    ]
    classes = [torch.tensor(part, dtype=torch.int64, device=device) for part in (train_labels, test_labels)]
    return pictures[0], classes[0], pictures[1], classes[1]


@dataclass
class Run:
    """What training changes, and a checkpoint holds."""

    generator: nn.Module
    discriminator: nn.Module
    optimizer_g: torch.optim.Optimizer
    optimizer_d: torch.optim.Optimizer
    epoch: int = 0
    #: One row for each epoch: the losses on real images, on generated ones, and of the generator.
    losses: list[list[float]] = field(default_factory=list)


def build(args: argparse.Namespace, device: torch.device) -> Run:
    """The networks at the level that is asked for, with their optimizers."""
    generator = Generator(args.noise_dim, args.width).to(device)
    discriminator = Discriminator(args.width, args.dropout).to(device)
    optimizer_g, optimizer_d = (
        torch.optim.Adam(network.parameters(), lr=args.lr, betas=(args.beta1, 0.999), eps=args.eps)
        for network in (generator, discriminator)
    )
    (generator, discriminator), (optimizer_g, optimizer_d) = amp.initialize(
        (generator, discriminator),
        (optimizer_g, optimizer_d),
        opt_level=args.opt_level,
        loss_scale=args.loss_scale,
        keep_batchnorm_fp32=args.keep_batchnorm_fp32,
        num_losses=3,
    )
    return Run(generator, discriminator, optimizer_g, optimizer_d)


def train_step(run: Run, images: Tensor, labels: Tensor, noise: Tensor) -> Tensor:
    """Update the discriminator, then the generator.

    Args:
        run: The networks and their optimizers.
        images: Real images (N, 1, 8, 8).
        labels: Their classes (N,), and those of the images that are made.
        noise: (N, noise_dim).

    Returns:
        (3,): the losses on real images, on generated ones, and of the generator; on the device.
    """
    criterion = F.binary_cross_entropy_with_logits
    real, fake = images.new_ones(len(images)), images.new_zeros(len(images))

    # this also drops what the generator's last update left in the gradients of the discriminator
    run.optimizer_d.zero_grad()
    loss_real = criterion(run.discriminator(images, labels), real)
    with amp.scale_loss(loss_real, run.optimizer_d, loss_id=0) as scaled_loss:
        scaled_loss.backward()
    samples = run.generator(noise, labels)
    loss_fake = criterion(run.discriminator(samples.detach(), labels), fake)
    with amp.scale_loss(loss_fake, run.optimizer_d, loss_id=1) as scaled_loss:
        scaled_loss.backward()
    run.optimizer_d.step()

    run.optimizer_g.zero_grad()
    loss_generator = criterion(run.discriminator(samples, labels), real)
    with amp.scale_loss(loss_generator, run.optimizer_g, loss_id=2) as scaled_loss:
        scaled_loss.backward()
    run.optimizer_g.step()
    return torch.stack([loss_real, loss_fake, loss_generator]).detach()


def train_epoch(run: Run, images: Tensor, labels: Tensor, args: argparse.Namespace) -> None:
    """One pass over the images in a random order; what does not fill a batch is left out."""
    run.generator.train()
    order = torch.randperm(len(images)).to(images.device)
    steps = [order[i : i + args.batch_size] for i in range(0, len(images) - args.batch_size + 1, args.batch_size)]
    if args.steps_per_epoch is not None:
        steps = steps[: args.steps_per_epoch]
    total = torch.zeros(3, device=images.device)
    for rows in steps:
        noise = torch.randn(len(rows), args.noise_dim, device=images.device)
        total += train_step(run, images[rows], labels[rows], noise)
    # the only wait for the device in an epoch
    run.losses.append((total / len(steps)).tolist())
    run.epoch += 1


# -- checkpoints ------------------------------------------------------------------------------------------------------

#: Options that decide the shapes of the weights.
SHAPES = ('noise_dim', 'width')


def save(run: Run, args: argparse.Namespace, path: Path) -> None:
    """Write all that the run needs to go on bit for bit.

    Raises:
        CheckpointWriteError: Full disk and the like.
    """
    random = {'cpu': torch.get_rng_state()}
    if torch.cuda.is_available():
        random['cuda'] = torch.cuda.get_rng_state()
    checkpoint = {
        'epoch': run.epoch,
        'losses': run.losses,
        'options': {name: getattr(args, name) for name in SHAPES},
        # FP32 values, the masters where there are some
        'generator': run.generator.state_dict(),
        'discriminator': run.discriminator.state_dict(),
        'optimizer_g': run.optimizer_g.state_dict(),
        'optimizer_d': run.optimizer_d.state_dict(),
        # the three loss scales
        'amp': amp.state_dict(),
        'random': random,
    }
    checkpoint_file.save(checkpoint, path)


def read(path: Path, args: argparse.Namespace) -> dict[str, Any]:
    """A checkpoint that fits the options. Nothing is applied.

    Raises:
        AmpCheckpointError: Missing, damaged, of another script, or of networks of other sizes.
    """
    checkpoint = checkpoint_file.load(path)
    needed = {'epoch', 'losses', 'options', 'generator', 'discriminator', 'optimizer_g', 'optimizer_d', 'amp', 'random'}
    missing = sorted(needed - set(checkpoint)) if isinstance(checkpoint, dict) else sorted(needed)
    if missing:
        raise AmpCheckpointError(f'{path} is no checkpoint of this script: it has no {", ".join(missing)}.')
    for name in SHAPES:
        saved, given = checkpoint['options'][name], getattr(args, name)
        if saved != given:
            option = f'--{name.replace("_", "-")}'
            raise AmpCheckpointError(
                f'{path} was trained with {option} {saved}, not {given}: resume with {option} {saved}.'
            )
    return checkpoint


def restore(run: Run, checkpoint: dict[str, Any]) -> None:
    """Go back to the moment of :func:`save`."""
    for name in ('generator', 'discriminator', 'optimizer_g', 'optimizer_d'):
        getattr(run, name).load_state_dict(checkpoint[name])
    amp.load_state_dict(checkpoint['amp'])
    run.epoch, run.losses = checkpoint['epoch'], checkpoint['losses']
    torch.set_rng_state(checkpoint['random']['cpu'])
    if torch.cuda.is_available() and 'cuda' in checkpoint['random']:
        torch.cuda.set_rng_state(checkpoint['random']['cuda'])


# -- what came of it --------------------------------------------------------------------------------------------------


@torch.no_grad()
def sample(run: Run, labels: Tensor, noise_dim: int) -> Tensor:
    """Images (N, 1, 8, 8) of the classes, from noise that is always the same."""
    own = torch.Generator().manual_seed(0)
    noise = torch.randn(len(labels), noise_dim, generator=own).to(labels.device)
    run.generator.eval()
    return run.generator(noise, labels)


def frechet_distance(images: Tensor, others: Tensor, axes: Tensor) -> float:
    """Between two normal distributions that are fitted to images: how unlike two sets of images are.

    Args:
        images: (N, 1, 8, 8).
        others: (M, 1, 8, 8).
        axes: (64, K), the directions in which the images are compared.

    Returns:
        0 for equal distributions; NaN where an image is not finite.
    """
    if not bool(images.isfinite().all()):
        return float('nan')
    a, b = ((part.flatten(1).double() @ axes.double()).cpu() for part in (images, others))
    cov_a, cov_b = a.T.cov(), b.T.cov()
    values, vectors = torch.linalg.eigh(cov_a)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    # the trace of the root of cov_a cov_b, through a symmetric matrix with the same eigenvalues
    shared = torch.linalg.eigvalsh(root @ cov_b @ root).clamp(min=0).sqrt().sum()
    distance = (a.mean(0) - b.mean(0)).square().sum() + cov_a.trace() + cov_b.trace() - 2 * shared
    return max(0.0, float(distance))


def report(run: Run, data: tuple[Tensor, Tensor, Tensor, Tensor], noise_dim: int) -> str:
    """One line: how far samples are from held-out digits, and how far real digits and noise are."""
    images, labels, held_out, classes = data
    centred = images.flatten(1) - images.flatten(1).mean(0)
    axes = torch.linalg.svd(centred, full_matrices=False)[2][:16].T
    # as many real images, of the same classes in the same order
    real = torch.cat([images[labels == k][: int((classes == k).sum())] for k in range(CLASSES)])
    noise = torch.rand(held_out.shape, generator=torch.Generator().manual_seed(0)).to(held_out.device) * 2 - 1
    samples, digits, nothing = (
        frechet_distance(part, held_out, axes) for part in (sample(run, classes, noise_dim), real, noise)
    )
    return (
        f'Frechet distance of the samples to held-out digits: {samples:.2f} '
        f'(other real digits {digits:.2f}, uniform noise {nothing:.2f})'
    )


def write_png(grey: Tensor, path: Path) -> None:
    """Write a picture (H, W) of uint8; 255 is white."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack('>I', len(body)) + kind + body + struct.pack('>I', zlib.crc32(kind + body))

    height, width = grey.shape
    rows = b''.join(b'\0' + bytes(row.tolist()) for row in grey)
    header = struct.pack('>IIBBBBB', width, height, 8, 0, 0, 0, 0)
    path.write_bytes(
        b'\x89PNG\r\n\x1a\n' + chunk(b'IHDR', header) + chunk(b'IDAT', zlib.compress(rows, 9)) + chunk(b'IEND', b'')
    )


def write_samples(run: Run, noise_dim: int, device: torch.device, path: Path, rows: int = 8, zoom: int = 6) -> None:
    """Write a grid of samples with a column for each class; ink is dark on paper."""
    labels = torch.arange(CLASSES, device=device).repeat(rows)
    # a margin around each sample
    tiles = F.pad(sample(run, labels, noise_dim).float().cpu(), (1, 1, 1, 1), value=-1.0)
    grid = tiles.view(rows, CLASSES, 10, 10).transpose(1, 2).reshape(rows * 10, CLASSES * 10)
    grey = (127.5 * (1 - grid)).nan_to_num(0).clamp(0, 255).to(torch.uint8)
    write_png(grey.repeat_interleave(zoom, 0).repeat_interleave(zoom, 1), path)


def write_curve(losses: list[list[float]], path: Path) -> None:
    """Write the losses of both networks over the epochs as an SVG."""
    curves = {
        'discriminator': ('#1f77b4', [real + fake for real, fake, _ in losses]),
        'generator': ('#d62728', [generator for _, _, generator in losses]),
    }
    width, height, left, bottom = 640, 320, 50, 40
    finite = [value for _, values in curves.values() for value in values if math.isfinite(value)]
    top = max(1, math.ceil(max(finite, default=1)))

    def place(epoch: float, value: float) -> tuple[float, float]:
        share = (epoch - 1) / max(1, len(losses) - 1)
        return left + share * (width - left - 20), height - bottom - value / top * (height - bottom - 20)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for value in range(top + 1):
        x, y = place(1, value)
        parts.append(f'<path d="M{x:.1f} {y:.1f}H{width - 20}" stroke="#ddd"/>')
        parts.append(f'<text x="{x - 8:.1f}" y="{y + 4:.1f}" text-anchor="end">{value}</text>')
    for epoch in sorted({1, *range(0, len(losses) + 1, max(1, round(len(losses) / 8))), len(losses)} - {0}):
        x, y = place(epoch, 0)
        parts.append(f'<text x="{x:.1f}" y="{y + 16:.1f}" text-anchor="middle">{epoch}</text>')
    parts.append(f'<text x="{(left + width) / 2:.1f}" y="{height - 6}" text-anchor="middle">epoch</text>')
    for index, (name, (colour, values)) in enumerate(curves.items()):
        points = [place(epoch, value) for epoch, value in enumerate(values, 1) if math.isfinite(value)]
        line = ' '.join(f'{x:.1f},{y:.1f}' for x, y in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(
            f'<text x="{width - 30}" y="{30 + 16 * index}" text-anchor="end" fill="{colour}">loss of the {name}</text>'
        )
    path.write_text('\n'.join([*parts, '</svg>', '']))


# -- the command line -------------------------------------------------------------------------------------------------


def at_least(low: float, kind: type = int) -> Callable[[str], Any]:
    """A type of argparse for numbers with a floor."""

    def read_number(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not low <= value < math.inf:
            word = 'a whole number' if kind is int else 'a finite number'
            raise argparse.ArgumentTypeError(f'{text!r} must be {word} of at least {low}')
        return value

    return read_number


def share(text: str) -> float:
    """A type of argparse for 0 to below 1."""
    value = at_least(0, float)(text)
    if value >= 1:
        raise argparse.ArgumentTypeError(f'{text!r} must be below 1')
    return value


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description='A DCGAN of handwritten digits (8 x 8, from scikit-learn) at an opt level.',
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add('--opt-level', default='O4', choices=LEVELS, help='float16 (O1 to O3) is about ten times slower on a CPU')
    add('--loss-scale', metavar='SCALE', help="'dynamic' or a number in place of the level's own")
    add('--keep-batchnorm-fp32', choices=('True', 'False'), help="in place of the level's own")
    add('--epochs', type=at_least(1), default=60, metavar='N', help='passes over the 1,437 training images')
    add('--batch-size', type=at_least(2), default=64, metavar='N', help='images in a step')
    add('--steps-per-epoch', type=at_least(1), metavar='N', help='end each epoch early')
    add('--lr', type=at_least(0, float), default=4e-3, help='learning rate of both optimizers')
    add('--beta1', type=share, default=0.5, help='of Adam')
    add('--eps', type=at_least(0, float), default=1e-4, help='of Adam; the usual 1e-8 is 0 in float16, as it is at O3')
    add('--noise-dim', type=at_least(1), default=32, metavar='N', help='length of the noise')
    add('--width', type=at_least(1), default=16, metavar='N', help='channels of the widest maps')
    add('--dropout', type=share, default=0.2, help='in the discriminator')
    add('--seed', type=int, default=0, help='of everything random')
    add('--device', choices=('cpu', 'cuda'), help='a GPU where there is one, if left out')
    add(
        '--out', type=Path, default=Path('work_dirs/dcgan_digits'), metavar='FOLDER', help='for pictures and checkpoint'
    )
    add('--save-every', type=at_least(1), default=5, metavar='N', help='epochs between two checkpoints')
    add('--resume', type=Path, metavar='FILE', help='go on from a checkpoint of this script')
    args = parser.parse_args(arguments)
    if args.device == 'cuda' and not torch.cuda.is_available():
        parser.error('--device cuda: torch sees no GPU here; leave the option out')
    if args.batch_size > 1437:
        parser.error(f'--batch-size {args.batch_size}: there are 1,437 training images')
    return args


def train(args: argparse.Namespace) -> Run:
    """Train as the options say.

    Raises:
        AmpError: A configuration, a checkpoint or a folder that cannot be used.
        ImportError: scikit-learn is not installed.
    """
    device = torch.device(args.device or ('cuda' if torch.cuda.is_available() else 'cpu'))
    torch.backends.cudnn.deterministic = True
    Path(args.out).mkdir(parents=True, exist_ok=True)
    checkpoint = None if args.resume is None else read(args.resume, args)
    data = load_digits(device)
    torch.manual_seed(args.seed)
    run = build(args, device)
    if checkpoint is not None:
        restore(run, checkpoint)
        print(f'resumed from {args.resume} after epoch {run.epoch}')
    start, first = time.monotonic(), run.epoch
    while run.epoch < args.epochs:
        train_epoch(run, data[0], data[1], args)
        real, fake, generator = run.losses[-1]
        scales = ', '.join(f'{scaler["loss_scale"]:g}' for scaler in amp.state_dict().values())
        print(
            f'epoch {run.epoch:3d}/{args.epochs}  real {real:.3f}  fake {fake:.3f}  generator {generator:.3f}  '
            f'loss scales {scales}  {(time.monotonic() - start) / (run.epoch - first):.1f} s/epoch',
            flush=True,
        )
        if run.epoch % args.save_every == 0 or run.epoch == args.epochs:
            save(run, args, args.out / 'checkpoint.pth')
            write_samples(run, args.noise_dim, device, args.out / 'samples.png')
            write_curve(run.losses, args.out / 'losses.svg')
    if run.epoch == first:
        print(f'nothing to train: the checkpoint stands at epoch {first}, and --epochs is {args.epochs}')
    print(report(run, data, args.noise_dim))
    print(f'samples.png, losses.svg and checkpoint.pth are in {args.out}')
    return run


def main() -> None:
    """Read the command line and train; what the user has to change ends in one line."""
    args = parse()
    try:
        train(args)
    except (AmpError, ImportError) as error:
        sys.exit(f'{type(error).__name__}: {error}')


if __name__ == '__main__':
    main()
