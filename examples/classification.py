"""Image classification for the example configs: small networks, the digits, accuracy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from mmcv.cnn import ConvModule
from mmcv.transforms import BaseTransform, Compose
from mmengine.evaluator import BaseMetric
from mmengine.model import BaseDataPreprocessor, BaseModel, BaseModule
from mmengine.registry import DATASETS, METRICS, MODELS, TRANSFORMS
from torch import Tensor, nn
from torch.utils.data import Dataset


@MODELS.register_module()
class Normalize(BaseDataPreprocessor):
    """Moves a batch to the device and normalises its images, in FP32 at every opt level.

    Args:
        mean: One value per channel, in the images' own range.
        std: One value per channel.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.register_buffer('mean', torch.tensor(mean).view(-1, 1, 1), persistent=False)
        self.register_buffer('std', torch.tensor(std).view(-1, 1, 1), persistent=False)

    def forward(self, data: dict[str, Any], training: bool = False) -> dict[str, Any]:
        """Normalise ``data['inputs']`` of shape (N, C, H, W)."""
        data = dict(self.cast_data(data))
        data['inputs'] = (data['inputs'].float() - self.mean) / self.std
        return data


@MODELS.register_module()
class ConvNet(BaseModule):
    """A few 3 x 3 ``ConvModule``s, the later ones with stride 2.

    Args:
        in_channels: Channels of the images.
        channels: Output channels of each layer.
        init_cfg: mmengine's initialisation config.
    """

    def __init__(self, in_channels: int, channels: Sequence[int], init_cfg: Any = None) -> None:
        super().__init__(init_cfg)
        pairs = zip([in_channels, *channels], channels)
        layers = [
            ConvModule(*pair, 3, 2 if index else 1, 1, norm_cfg=dict(type='BN')) for index, pair in enumerate(pairs)
        ]
        self.layers = nn.Sequential(*layers)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (N, C, H, W) to (N, channels[-1], h, w)."""
        return self.layers(inputs)


class TransformerLayer(nn.Module):
    """Attention and a perceptron, each behind a LayerNorm and beside a shortcut.

    Args:
        width: Features of a token.
        heads: Of the attention.
        dropout: Share of the features that each branch loses in training.
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, tokens, width) to the same."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + F.dropout(self.out(mixed), self.dropout, self.training)
        return x + F.dropout(self.mlp(self.norm2(x)), self.dropout, self.training)


@MODELS.register_module()
class PatchTransformer(BaseModule):
    """A vision transformer without a class token.

    Args:
        in_channels: Channels of the images.
        size: Height and width of the images.
        patch: Height and width of a patch.
        width: Features of a token.
        layers: How many layers.
        heads: Of each attention.
        dropout: As of :class:`TransformerLayer`.
        init_cfg: mmengine's initialisation config.
    """

    def __init__(
        self,
        in_channels: int,
        size: int,
        patch: int,
        width: int,
        layers: int,
        heads: int,
        dropout: float = 0.0,
        init_cfg: Any = None,
    ) -> None:
        super().__init__(init_cfg)
        self.patches = nn.Conv2d(in_channels, width, patch, patch)
        self.places = nn.Parameter(0.02 * torch.randn(1, (size // patch) ** 2, width))
        self.layers = nn.ModuleList(TransformerLayer(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (N, C, size, size) to (N, width, size / patch, size / patch)."""
        image = self.patches(inputs)
        tokens = image.flatten(2).transpose(1, 2) + self.places
        for layer in self.layers:
            tokens = layer(tokens)
        return self.norm(tokens).transpose(1, 2).unflatten(2, image.shape[2:])


@MODELS.register_module()
class ImageClassifier(BaseModel):
    """Backbone, global average pooling, one linear layer; the loss is computed inside ``forward``.

    Args:
        backbone: Config of the backbone.
        in_channels: Channels it puts out.
        num_classes: Classes.
        data_preprocessor: Config of the preprocessor.
        init_cfg: mmengine's initialisation config.
    """

    def __init__(
        self, backbone: dict, in_channels: int, num_classes: int, data_preprocessor: Any = None, init_cfg: Any = None
    ) -> None:
        super().__init__(data_preprocessor, init_cfg)
        self.backbone = MODELS.build(backbone)
        self.fc = nn.Linear(in_channels, num_classes)

    def forward(self, inputs: Tensor, labels: Tensor | None = None, mode: str = 'tensor') -> Any:
        """Return logits (N, num_classes), a loss dict ('loss'), or a list of results ('predict')."""
        logits = self.fc(self.backbone(inputs).mean((2, 3)))
        if mode == 'loss':
            return dict(loss=F.cross_entropy(logits, labels))
        if mode == 'predict':
            return [dict(pred=p, label=label) for p, label in zip(logits.argmax(1), labels)]
        return logits


@DATASETS.register_module()
class Digits(Dataset):
    """The handwritten digits that install with scikit-learn: 1,797 images of 8 x 8 (UCI), a fifth of them held out.

    Args:
        train: The training part or the held-out one.
        pipeline: Configs of mmcv's transforms; each takes and gives a dict with ``img`` (8, 8, 1), 0 to 16, and ``gt_label``.
    """

    def __init__(self, train: bool = True, pipeline: Sequence[dict[str, Any]] = ()) -> None:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        self.metainfo = dict(classes=[str(digit) for digit in range(10)])
        self.pipeline = Compose([TRANSFORMS.build(step) for step in pipeline])
        images, labels = load_digits(return_X_y=True)
        parts = train_test_split(images, labels, test_size=0.2, random_state=0, stratify=labels)
        self.images = parts[0 if train else 1].reshape(-1, 8, 8, 1).astype(np.float32)
        self.labels = parts[2 if train else 3]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Any]:
        results = self.pipeline(dict(img=self.images[index], gt_label=int(self.labels[index])))
        image = np.ascontiguousarray(results['img'].transpose(2, 0, 1))
        return dict(inputs=torch.from_numpy(image), labels=torch.tensor(results['gt_label']))


@TRANSFORMS.register_module()
class PadAndCrop(BaseTransform):
    """A random crop of the image's own size from its zero-padded self.

    Args:
        padding: Pixels on each side.
    """

    def __init__(self, padding: int) -> None:
        self.padding = padding

    def transform(self, results: dict) -> dict:
        """Shift the image by up to ``padding`` pixels."""
        image, pad = results['img'], self.padding
        height, width = image.shape[:2]
        top, left = np.random.randint(0, 2 * pad + 1, 2)
        padded = np.pad(image, ((pad, pad), (pad, pad), (0, 0)))
        return {**results, 'img': padded[top : top + height, left : left + width]}


@METRICS.register_module()
class Accuracy(BaseMetric):
    """Share of right predictions, in per cent, as ``accuracy/top1``."""

    default_prefix = 'accuracy'

    def process(self, data_batch: Any, data_samples: Sequence[dict]) -> None:
        """Keep whether each prediction is right."""
        self.results.extend(int(sample['pred']) == int(sample['label']) for sample in data_samples)

    def compute_metrics(self, results: list) -> dict[str, float]:
        """Return the share over the whole data set."""
        return dict(top1=100.0 * sum(results) / len(results))
