"""A DCGAN of handwritten digits: two models, two optimizers, three losses, each loss with a scale of its own.

.. code-block:: bash

    python examples/dcgan_digits.py --opt-level O4
    python examples/dcgan_digits.py --opt-level O4 --epochs 120 --resume work_dirs/dcgan_digits/checkpoint.pth

The digits are the 1,797 images of 8 x 8 that install with scikit-learn. The run ends with the distance of its samples from
held-out digits, and writes a checkpoint from which it goes on bit for bit.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_wrapper import AmpError, amp
from amp_wrapper.checkpoint import file as checkpoint_file

LEVELS = ('O0', 'O1', 'O2', 'O3', 'O4', 'O5')
CLASSES = 10


class DigitGenerator(nn.Module):
    """Turns noise and a class into an image of 8 x 8 in -1 to 1.

    Args:
        noise_dim: Length of the noise.
        num_classes: Classes.
        width: Channels at 4 x 4; twice as many at 2 x 2.
    """

    def __init__(self, noise_dim: int = 32, num_classes: int = CLASSES, width: int = 64) -> None:
        super().__init__()
        self.noise_dim, self.num_classes, self.width = noise_dim, num_classes, width
        self.stem = nn.Linear(noise_dim + num_classes, 2 * width * 2 * 2, bias=False)
        self.layers = nn.Sequential(
            nn.BatchNorm2d(2 * width),
            nn.ReLU(inplace=True),
            nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.ConvTranspose2d(width, 1, 4, stride=2, padding=1),
            nn.Tanh(),
        )

    def forward(self, noise: Tensor, labels: Tensor) -> Tensor:
        """Map (N, noise_dim) and (N,) to (N, 1, 8, 8)."""
        classes = F.one_hot(labels, self.num_classes).to(noise.dtype)
        return self.layers(self.stem(torch.cat([noise, classes], 1)).view(-1, 2 * self.width, 2, 2))


class DigitDiscriminator(nn.Module):
    """Turns an image and its alleged class into a logit: is it real?

    It has no BatchNorm, so real and generated images can share a batch.

    Args:
        num_classes: Classes.
        width: Channels at 8 x 8; doubled at each halving of the size.
        dropout: Share of dropped activations. The data set is small, and memorised without it.
    """

    def __init__(self, num_classes: int = CLASSES, width: int = 32, dropout: float = 0.3) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(width, 2 * width, 4, stride=2, padding=1),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Dropout2d(dropout),
            nn.Conv2d(2 * width, 4 * width, 4, stride=2, padding=1),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Flatten(),
            nn.Dropout(dropout),
        )
        self.fc = nn.Linear(4 * width * 2 * 2, 1)
        self.classes = nn.Embedding(num_classes, 4 * width * 2 * 2)

    def init_weights(self) -> None:
        """Begin with small classes: at torch's standard deviation of 1 they would drown the image's own logit."""
        nn.init.normal_(self.classes.weight, std=0.02)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Map (N, 1, 8, 8) and (N,) to (N,)."""
        features = self.layers(images)
        # one term judges the image, the other whether it fits its class
        return self.fc(features).squeeze(1) + (features * self.classes(labels)).sum(1)


def load_digits(device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return images (N, 1, 8, 8) in -1 to 1 and labels (N,) to train on, and those of a fifth that is held out."""
    from sklearn.datasets import load_digits as load
    from sklearn.model_selection import train_test_split

    parts = train_test_split(*load(return_X_y=True), test_size=0.2, random_state=0, stratify=load().target)
    images = [torch.tensor(part, dtype=torch.float32, device=device).view(-1, 1, 8, 8) / 8 - 1 for part in parts[:2]]
    labels = [torch.tensor(part, dtype=torch.int64, device=device) for part in parts[2:]]
    return images[0], labels[0], images[1], labels[1]


class Training:
    """Both networks at an opt level, with their optimizers and three loss scales.

    Args:
        args: The command line.
        device: Where.
    """

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args, self.device, self.epoch = args, device, 0
        discriminator = DigitDiscriminator(width=args.width)
        discriminator.init_weights()
        models = (DigitGenerator(args.noise_dim, width=args.width).to(device), discriminator.to(device))
        # an eps of 1e-8 is 0 in float16, as it is at O3
        optimizers = tuple(torch.optim.Adam(model.parameters(), 4e-3, (0.5, 0.999), 1e-4) for model in models)
        models, optimizers = amp.initialize(models, optimizers, opt_level=args.opt_level, num_losses=3)
        self.generator, self.discriminator = models
        self.optimizer_g, self.optimizer_d = optimizers

    def step(self, images: Tensor, labels: Tensor) -> Tensor:
        """Update the discriminator, then the generator.

        Returns:
            (3,): the losses on real images, on generated ones, and of the generator; on the device.
        """
        criterion = F.binary_cross_entropy_with_logits
        noise = torch.randn(len(images), self.args.noise_dim, device=self.device)
        real, fake = images.new_ones(len(images)), images.new_zeros(len(images))

        # this also drops what the generator's last update left in the gradients of the discriminator
        self.optimizer_d.zero_grad()
        loss_real = criterion(self.discriminator(images, labels), real)
        with amp.scale_loss(loss_real, self.optimizer_d, loss_id=0) as scaled_loss:
            scaled_loss.backward()
        samples = self.generator(noise, labels)
        loss_fake = criterion(self.discriminator(samples.detach(), labels), fake)
        with amp.scale_loss(loss_fake, self.optimizer_d, loss_id=1) as scaled_loss:
            scaled_loss.backward()
        self.optimizer_d.step()

        self.optimizer_g.zero_grad()
        loss_generator = criterion(self.discriminator(samples, labels), real)
        with amp.scale_loss(loss_generator, self.optimizer_g, loss_id=2) as scaled_loss:
            scaled_loss.backward()
        self.optimizer_g.step()
        return torch.stack([loss_real, loss_fake, loss_generator]).detach()

    def train_epoch(self, images: Tensor, labels: Tensor) -> list[float]:
        """Go over the images in a random order, and return the mean losses; what does not fill a batch is left out."""
        self.generator.train()
        order = torch.randperm(len(images)).to(self.device)
        batches = order[: len(order) // self.args.batch_size * self.args.batch_size].view(-1, self.args.batch_size)
        losses = [self.step(images[rows], labels[rows]) for rows in batches[: self.args.steps_per_epoch]]
        self.epoch += 1
        # the only wait for the device in an epoch
        return torch.stack(losses).mean(0).tolist()

    def parts(self) -> dict[str, nn.Module | torch.optim.Optimizer]:
        """Return what has a state dict, by the names in a checkpoint; weights are saved in FP32."""
        models = {'generator': self.generator, 'discriminator': self.discriminator}
        return {**models, 'optimizer_g': self.optimizer_g, 'optimizer_d': self.optimizer_d}

    def save(self, path: Path) -> None:
        """Write all that is needed to go on bit for bit, the three loss scales and the random states among it."""
        random = [torch.get_rng_state(), *torch.cuda.get_rng_state_all()]
        states = {name: part.state_dict() for name, part in self.parts().items()}
        checkpoint_file.save({'epoch': self.epoch, **states, 'amp': amp.state_dict(), 'random': random}, path)

    def load(self, path: Path) -> None:
        """Go back to the moment of :meth:`save`."""
        checkpoint = checkpoint_file.load(path)
        for name, part in self.parts().items():
            part.load_state_dict(checkpoint[name])
        amp.load_state_dict(checkpoint['amp'])
        self.epoch = checkpoint['epoch']
        torch.set_rng_state(checkpoint['random'][0])
        torch.cuda.set_rng_state_all(checkpoint['random'][1:])


@torch.no_grad()
def frechet_distance(images: Tensor, others: Tensor, axes: Tensor) -> float:
    """Return how unlike two sets of images are: the distance of two normal distributions that are fitted to them.

    Args:
        images: (N, 1, 8, 8).
        others: (M, 1, 8, 8).
        axes: (64, K), the directions in which the images are compared.
    """
    a, b = ((part.flatten(1).double() @ axes.double()).cpu() for part in (images, others))
    cov_a, cov_b = a.T.cov(), b.T.cov()
    values, vectors = torch.linalg.eigh(cov_a)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    # the trace of the root of cov_a cov_b, through a symmetric matrix with the same eigenvalues
    shared = torch.linalg.eigvalsh(root @ cov_b @ root).clamp(min=0).sqrt().sum()
    return float((a.mean(0) - b.mean(0)).square().sum() + cov_a.trace() + cov_b.trace() - 2 * shared)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add('--opt-level', default='O4', choices=LEVELS, help='float16 (O1 to O3) is about ten times slower on a CPU')
    add('--epochs', type=int, default=60, help='passes over the 1,437 training images')
    add('--batch-size', type=int, default=64, help='images in a step')
    add('--steps-per-epoch', type=int, help='end each epoch early')
    add('--noise-dim', type=int, default=32, help='length of the noise')
    add('--width', type=int, default=16, help='channels of the widest maps')
    add('--seed', type=int, default=0, help='of everything random')
    add('--out', type=Path, default=Path('work_dirs/dcgan_digits'), metavar='FOLDER', help='gets the checkpoint')
    add('--resume', type=Path, metavar='FILE', help='go on from a checkpoint of this script')
    return parser.parse_args(arguments)


def train(args: argparse.Namespace) -> None:
    """Train as the options say, and print how far samples are from held-out digits."""
    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    torch.backends.cudnn.deterministic = True
    args.out.mkdir(parents=True, exist_ok=True)
    images, labels, held_out, classes = load_digits(device)
    torch.manual_seed(args.seed)
    training = Training(args, device)
    if args.resume is not None:
        training.load(args.resume)
    while training.epoch < args.epochs:
        losses = training.train_epoch(images, labels)
        words = '  '.join(f'{name} {loss:.3f}' for name, loss in zip(('real', 'fake', 'generator'), losses))
        scales = ', '.join(f'{scaler["loss_scale"]:g}' for scaler in amp.state_dict().values())
        print(f'epoch {training.epoch:3d}/{args.epochs}  {words}  loss scales {scales}', flush=True)
        training.save(args.out / 'checkpoint.pth')
    axes = torch.linalg.svd(images.flatten(1) - images.flatten(1).mean(0), full_matrices=False)[2][:16].T
    training.generator.eval()
    # always the same noise
    noise = torch.randn(len(classes), args.noise_dim, generator=torch.Generator().manual_seed(0)).to(device)
    samples = training.generator(noise, classes)
    print(f'Frechet distance of the samples to held-out digits: {frechet_distance(samples, held_out, axes):.2f}')


def main() -> None:
    """Read the command line and train; a mistake of the user ends in one line."""
    try:
        train(parse())
    except (AmpError, ImportError) as error:
        sys.exit(f'{type(error).__name__}: {error}')


if __name__ == '__main__':
    main()
