"""Which types come out of a model: walks predictions, and an evaluator that remembers them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from mmengine.evaluator import BaseMetric
from mmengine.registry import METRICS
from mmengine.structures import BaseDataElement
from torch import Tensor


def tensors(value: Any, path: str = '') -> Iterator[tuple[str, Tensor]]:
    """Every tensor in nested predictions, with its path."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, BaseDataElement):
        for key, item in value.all_items():
            yield from tensors(item, f'{path}.{key}')
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from tensors(item, f'{path}.{key}')
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item, path)


def narrow(value: Any) -> list[str]:
    """Where 16-bit numbers came out."""
    return [f'{path}: {t.dtype}' for path, t in tensors(value) if t.dtype in (torch.float16, torch.bfloat16)]


@METRICS.register_module()
class TypeWatch(BaseMetric):
    """Counts the predictions that are 16-bit and all tensors seen, and adds the numbers up: metrics of models that have
    learned nothing are the same whatever the weights are, sums are not."""

    default_prefix = 'types'

    def process(self, data_batch: Any, data_samples: Any) -> None:
        predicted = [t for path, t in tensors(data_samples) if 'gt_' not in path and 'ignored' not in path]
        digest = sum(float((t.double() * (1 + torch.arange(t.numel()).view(t.shape) % 7)).sum()) for t in predicted)
        self.results.append((len(narrow(data_samples)), len(list(tensors(data_samples))), digest))

    def compute_metrics(self, results: list[tuple[int, int, float]]) -> dict[str, float]:
        return dict(
            narrow=sum(r[0] for r in results), seen=sum(r[1] for r in results), digest=sum(r[2] for r in results)
        )
