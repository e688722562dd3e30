"""The text of the benchmark of fidelity: data set, model and metric of a language model of characters, for mmengine."""

from __future__ import annotations

import hashlib
import math
import string
from collections.abc import Sequence
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.nn.functional as F
from mmengine.evaluator import BaseMetric
from mmengine.model import BaseModel
from mmengine.registry import DATASETS, METRICS, MODELS
from torch import Tensor, nn
from torch.utils.data import Dataset

#: What the model can read and write; any other character counts as the last one.
CHARACTERS = '\n' + string.digits + string.ascii_letters + string.punctuation + ' ' + '\ufffd'
#: Every twentieth topic is held out.
HELD_OUT = 20


def text_of(train: bool) -> str:
    """The help texts on topics of the language that come with Python (``help('with')`` shows one of them).

    Args:
        train: All topics but every twentieth, or those.
    """
    chosen = [name for place, name in enumerate(sorted(topics)) if (place % HELD_OUT == 0) is not train]
    return '\n'.join(topics[name] for name in chosen)


def digest() -> str:
    """Twelve digits that tell the texts of two versions of Python apart."""
    return hashlib.sha256((text_of(True) + text_of(False)).encode()).hexdigest()[:12]


@DATASETS.register_module()
class Topics(Dataset):
    """Windows of the text: at each of its characters for training, side by side for the held-out part.

    Args:
        train: The training part or the held-out one.
        length: Characters that the model reads; each is asked for the next one.
    """

    def __init__(self, train: bool = True, length: int = 64) -> None:
        places = {character: place for place, character in enumerate(CHARACTERS)}
        self.codes = torch.tensor([places.get(character, len(CHARACTERS) - 1) for character in text_of(train)])
        self.length, self.stride = length, 1 if train else length

    def __len__(self) -> int:
        return (len(self.codes) - self.length - 1) // self.stride + 1

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start = index * self.stride
        window = self.codes[start : start + self.length + 1]
        return dict(inputs=window[:-1], labels=window[1:])


@MODELS.register_module()
class CharTransformer(BaseModel):
    """A decoder of torch's own layers: each character sees those before it. The loss is computed inside ``forward``.

    Args:
        length: The longest window.
        width: Features of a character.
        layers: How many layers.
        heads: Of each attention.
        dropout: In the layers, the attention among them.
        data_preprocessor: Config of the preprocessor; mmengine's own by default.
        init_cfg: mmengine's initialisation config.
    """

    def __init__(
        self,
        length: int = 64,
        width: int = 64,
        layers: int = 2,
        heads: int = 4,
        dropout: float = 0.1,
        data_preprocessor: Any = None,
        init_cfg: Any = None,
    ) -> None:
        super().__init__(data_preprocessor, init_cfg)
        self.characters = nn.Embedding(len(CHARACTERS), width)
        self.places = nn.Parameter(0.02 * torch.randn(length, width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout, F.gelu, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, len(CHARACTERS))
        self.register_buffer('later', torch.ones(length, length, dtype=torch.bool).triu(1), persistent=False)

    def forward(self, inputs: Tensor, labels: Tensor | None = None, mode: str = 'tensor') -> Any:
        """(N, length) codes to logits (N, length, characters), a loss dict ('loss'), or a list of results ('predict')."""
        logits = self.head(self.layers(self.characters(inputs) + self.places, mask=self.later, is_causal=True))
        if mode == 'tensor':
            return logits
        assert labels is not None
        if mode == 'loss':
            return dict(loss=F.cross_entropy(logits.flatten(0, 1), labels.flatten()))
        nats = F.cross_entropy(logits.float().transpose(1, 2), labels, reduction='none')
        return [dict(nats=row.sum(), characters=row.numel()) for row in nats]


@METRICS.register_module()
class BitsPerCharacter(BaseMetric):
    """The mean information of a character, given those before it in its window, as ``text/bits``."""

    default_prefix = 'text'

    def process(self, data_batch: Any, data_samples: Sequence[dict]) -> None:
        """Keep what each window takes."""
        self.results.extend((float(sample['nats']), int(sample['characters'])) for sample in data_samples)

    def compute_metrics(self, results: list) -> dict[str, float]:
        """Over all windows."""
        nats, characters = (sum(column) for column in zip(*results))
        return dict(bits=nats / characters / math.log(2))
