"""Shapes of the parameters of the models that the benchmark of the optimizer step takes, written from their architectures."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .ops import Shapes, resnet50, swin_t


def vit_b16() -> Shapes:
    """The parameters of ViT-B/16 for images of 224 pixels: 152 tensors, 86.6 million elements."""
    dims = 768
    shapes: Shapes = [(1, 1, dims), (dims, 3, 16, 16), (dims,), (1, 197, dims)]
    shapes += 12 * _block(dims)
    return [*shapes, (dims,), (dims,), (1000, dims), (1000,)]


def bert_large() -> Shapes:
    """The parameters of BERT-large (uncased, with its pooler): 391 tensors, 335.1 million elements."""
    dims = 1024
    layer: Shapes = [*4 * [(dims, dims), (dims,)], (dims,), (dims,)]
    layer += [(4 * dims, dims), (4 * dims,), (dims, 4 * dims), (dims,), (dims,), (dims,)]
    return [(30522, dims), (512, dims), (2, dims), (dims,), (dims,), *24 * layer, (dims, dims), (dims,)]


def gpt_1b() -> Shapes:
    """A GPT of 18 blocks of width 2,048, the output tied to the embedding: 220 tensors, 1.01 billion elements."""
    dims = 2048
    return [(50257, dims), (1024, dims), *18 * _block(dims), (dims,), (dims,)]


def tiny() -> Shapes:
    """A few tensors of odd sizes, for trying things out: 10 tensors, 5,341 elements."""
    return [(16, 3, 3, 3), (16,), (16,), (64, 16), (64,), (64, 48), (13, 37), (1,), (7, 3), (214,)]


def _block(dims: int) -> Shapes:
    """A block of a transformer: two norms, attention with its three projections in one, two layers."""
    attention: Shapes = [(dims,), (dims,), (3 * dims, dims), (3 * dims,), (dims, dims), (dims,)]
    return [*attention, (dims,), (dims,), (4 * dims, dims), (4 * dims,), (dims, 4 * dims), (dims,)]


#: Name on the command line to the list.
MODELS = {
    'tiny': tiny,
    'resnet50': resnet50,
    'swin_t': swin_t,
    'vit_b16': vit_b16,
    'bert_large': bert_large,
    'gpt_1b': gpt_1b,
}
#: What tables call them.
TITLES = {
    'tiny': 'tiny',
    'resnet50': 'ResNet-50',
    'swin_t': 'Swin-T',
    'vit_b16': 'ViT-B/16',
    'bert_large': 'BERT-large',
    'gpt_1b': 'GPT, 1 billion',
}


def elements(shapes: Sequence[tuple[int, ...]]) -> int:
    """How many parameters that are."""
    return sum(math.prod(shape) for shape in shapes)


def shrunk(shapes: Shapes, limit: int) -> Shapes:
    """As many tensors with the same shares of at most about ``limit`` elements in all, each at least one."""
    factor = max(1, math.ceil(elements(shapes) / limit))
    return shapes if factor == 1 else [(max(1, math.prod(shape) // factor),) for shape in shapes]
