"""The DCGAN of ``dcgan_digits.py`` for mmengine, with an optimizer wrapper for each of its two networks.

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
from mmengine.model import BaseModel, is_model_wrapper
from mmengine.optim import OptimWrapperDict, build_optim_wrapper
from mmengine.registry import DATASETS, METRICS, MODELS, OPTIM_WRAPPER_CONSTRUCTORS
from torch import Tensor, nn

from .classification import Digits
from .dcgan_digits import DigitDiscriminator, DigitGenerator, frechet_distance


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


MODELS.register_module(module=DigitGenerator)
MODELS.register_module(module=DigitDiscriminator)


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
        losses = self.train_discriminator(images, labels, optim_wrapper)
        return losses | self.train_generator(labels, optim_wrapper)

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
        if mode == 'predict':
            return [dict(fake=f, real=r, label=label) for f, r, label in zip(fakes.float(), inputs, labels)]
        return fakes


def _bare(module: nn.Module) -> nn.Module:
    return module.module if is_model_wrapper(module) else module


@DATASETS.register_module()
class DigitsWithNoise(Digits):
    """Digits, each with noise that stays the same: all validations judge samples of the same noise.

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
