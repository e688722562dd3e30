"""A small conditional DCGAN for the 8 x 8 digits, with an optimizer wrapper for each of its two networks.

mmengine trains several networks through ``OptimWrapperDict`` but does not build one from a config; here is a constructor
that does. The metric compares generated digits with held-out ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from mmengine.evaluator import BaseMetric
from mmengine.model import BaseModel, BaseModule, is_model_wrapper
from mmengine.optim import OptimWrapperDict, build_optim_wrapper
from mmengine.registry import DATASETS, METRICS, MODELS, OPTIM_WRAPPER_CONSTRUCTORS
from torch import Tensor, nn

from .classification import Digits
from .dcgan_digits import frechet_distance


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class WrapperPerModule:
    """Builds an ``OptimWrapperDict`` with one wrapper for each named child of the model.

    Args:
        optim_wrapper_cfg: Name of a child to the config of its wrapper, which may have a ``constructor`` and a
            ``paramwise_cfg`` of its own.
        paramwise_cfg: Has to be None: it belongs into the config of a child.
    """

    def __init__(self, optim_wrapper_cfg: dict, paramwise_cfg: Any = None) -> None:
        if paramwise_cfg is not None:
            raise ValueError('paramwise_cfg belongs into the config of one module, such as optim_wrapper.generator')
        self.configs = optim_wrapper_cfg

    def __call__(self, model: nn.Module) -> OptimWrapperDict:
        """Build the wrappers for a model, which may be wrapped for several processes."""
        bare = _bare(model)
        wrappers = {name: build_optim_wrapper(bare.get_submodule(name), cfg) for name, cfg in self.configs.items()}
        return OptimWrapperDict(**wrappers)


@MODELS.register_module()
class DigitGenerator(BaseModule):
    """Turns noise and a class into an image of 8 x 8 in -1 to 1.

    Args:
        noise_dim: Length of the noise.
        num_classes: Classes.
        width: Channels at 4 x 4; twice as many at 2 x 2.
        init_cfg: mmengine's initialisation config.
    """

    def __init__(self, noise_dim: int = 32, num_classes: int = 10, width: int = 64, init_cfg: Any = None) -> None:
        super().__init__(init_cfg)
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


@MODELS.register_module()
class DigitDiscriminator(BaseModule):
    """Turns an image and its alleged class into a logit: is it real?

    It has no BatchNorm, so real and generated images can share a batch.

    Args:
        num_classes: Classes.
        width: Channels at 8 x 8; doubled at each halving of the size.
        dropout: Share of dropped activations. The data set is small, and memorised without it.
        init_cfg: mmengine's initialisation config.
    """

    def __init__(self, num_classes: int = 10, width: int = 32, dropout: float = 0.3, init_cfg: Any = None) -> None:
        # the many terms of the class's sum would drown the image's own logit at torch's standard deviation of 1
        super().__init__(init_cfg or dict(type='Normal', layer='Embedding', std=0.02))
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

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Map (N, 1, 8, 8) and (N,) to (N,)."""
        features = self.layers(images)
        # one term judges the image, the other whether it fits its class
        return self.fc(features).squeeze(1) + (features * self.classes(labels)).sum(1)


@MODELS.register_module()
class GAN(BaseModel):
    """A generator and a discriminator that are trained in turns, each with an optimizer wrapper of its own.

    Args:
        generator: Config; takes noise and labels.
        discriminator: Config; takes images and labels.
        data_preprocessor: Config of the preprocessor, which has to bring the images to -1 to 1.
        init_cfg: mmengine's initialisation config.
    """

    def __init__(
        self, generator: dict, discriminator: dict, data_preprocessor: Any = None, init_cfg: Any = None
    ) -> None:
        super().__init__(data_preprocessor, init_cfg)
        self.generator = MODELS.build(generator)
        self.discriminator = MODELS.build(discriminator)

    def draw_noise(self, labels: Tensor) -> Tensor:
        """Draw noise from the global generator, whose state a resumed run finds again."""
        return torch.randn(len(labels), _bare(self.generator).noise_dim, device=labels.device)

    def train_step(self, data: dict[str, Any], optim_wrapper: OptimWrapperDict) -> dict[str, Tensor]:
        """Update the discriminator, then the generator."""
        data = self.data_preprocessor(data, training=True)
        images, labels = data['inputs'], data['labels']
        return {
            **self.train_discriminator(images, labels, optim_wrapper),
            **self.train_generator(labels, optim_wrapper),
        }

    def train_discriminator(self, images: Tensor, labels: Tensor, optim_wrapper: OptimWrapperDict) -> dict[str, Tensor]:
        """Tell real images from generated ones."""
        # each network runs in the context of its own wrapper, which may have another level than the other
        with optim_wrapper['generator'].optim_context(self.generator), torch.no_grad():
            fakes = _bare(self.generator)(self.draw_noise(labels), labels)
        wrapper = optim_wrapper['discriminator']
        with wrapper.optim_context(self.discriminator):
            # one call: two calls before one backward would confuse DistributedDataParallel
            logits = self.discriminator(torch.cat([images, fakes.to(images.dtype)]), labels.repeat(2))
        # out of the context and in FP32: a level that autocasts gives 16-bit logits
        real, fake = logits.float().chunk(2)
        loss, log_vars = self.parse_losses(dict(loss_real=F.softplus(-real).mean(), loss_fake=F.softplus(fake).mean()))
        wrapper.update_params(loss)
        return {name: log_vars[name] for name in ('loss_real', 'loss_fake')}

    def train_generator(self, labels: Tensor, optim_wrapper: OptimWrapperDict) -> dict[str, Tensor]:
        """Make images that the discriminator takes for real."""
        wrapper = optim_wrapper['generator']
        with wrapper.optim_context(self.generator):
            fakes = self.generator(self.draw_noise(labels), labels)
        # the discriminator only passes gradients on: none are made for its weights, and no process waits for them
        self.discriminator.requires_grad_(False)
        with optim_wrapper['discriminator'].optim_context(self.discriminator):
            logits = _bare(self.discriminator)(fakes, labels)
        loss, log_vars = self.parse_losses(dict(loss_generator=F.softplus(-logits.float()).mean()))
        wrapper.update_params(loss)
        self.discriminator.requires_grad_(True)
        return dict(loss_generator=log_vars['loss_generator'])

    def forward(self, inputs: Tensor, labels: Tensor, noise: Tensor | None = None, mode: str = 'tensor') -> Any:
        """Return images of the given classes ('tensor'), or a list of results with them ('predict').

        The networks are called without their wrappers for several processes, so each process samples on its own.
        """
        fakes = _bare(self.generator)(self.draw_noise(labels) if noise is None else noise, labels)
        if mode == 'tensor':
            return fakes
        if mode == 'predict':
            return [dict(fake=f, real=r, label=label) for f, r, label in zip(fakes.float(), inputs, labels)]
        raise NotImplementedError('a GAN has two losses and no common one: call train_step')


def _bare(module: nn.Module) -> nn.Module:
    return module.module if is_model_wrapper(module) else module


@DATASETS.register_module()
class DigitsWithNoise(Digits):
    """Digits, each with noise that stays the same: pictures of two validations show the same samples.

    Args:
        noise_dim: Length of the noise.
        seed: Of the noise.
        **kwargs: For :class:`Digits`.
    """

    def __init__(self, noise_dim: int = 32, seed: int = 0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.noise = np.random.default_rng(seed).standard_normal((len(self), noise_dim), np.float32)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return dict(super().__getitem__(index), noise=torch.from_numpy(self.noise[index]))


@METRICS.register_module()
class DigitQuality(BaseMetric):
    """How far generated digits are from held-out ones, as ``gan/frechet``.

    It is the Frechet distance of two normal distributions, fitted to the generated and to the held-out images in the space of
    the training images' first principal components. As many training images of the same classes score 0.25; uniform noise
    scores 9.2; the mean image of each class 4.1.

    Args:
        components: Number of principal components.
    """

    default_prefix = 'gan'

    def __init__(self, components: int = 16) -> None:
        super().__init__()
        self.components = components

    def process(self, data_batch: Any, data_samples: Sequence[dict[str, Any]]) -> None:
        """Keep the images."""
        self.results.extend((sample['fake'].float().cpu(), sample['real'].float().cpu()) for sample in data_samples)

    def compute_metrics(self, results: list[Any]) -> dict[str, float]:
        """Return the distance over the whole data set; NaN where an image is not finite."""
        fakes, reals = (torch.stack(column) for column in zip(*results))
        if not fakes.isfinite().all():
            return dict(frechet=float('nan'))
        digits = torch.from_numpy(Digits().images).flatten(1) / 8 - 1
        axes = torch.linalg.svd(digits - digits.mean(0), full_matrices=False)[2][: self.components].T
        return dict(frechet=frechet_distance(fakes, reals, axes))
