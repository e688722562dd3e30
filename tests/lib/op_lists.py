"""Lists of tensors for the ops, models of what the ops give, and the switch from one compiled library to another."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from bits import same_bits as equal_bits
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from amp_wrapper import ops
from amp_wrapper.ops import loader

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
FLOATS = (F32, F16, BF16)
HALVES = (F16, BF16)
#: Sizes at which kernels go from one block, chunk or thread to the next.
EDGES = (1, 2, 63, 64, 65, 1023, 1024, 1025, 2049, 32767, 32768, 32769, 65536, 3 * 32768 + 7)
#: Shapes around the width of vectors, empty ones and scalars among them.
SHAPES: list[tuple[int, ...]] = [(1,), (0,), (7,), (3, 5), (16,), (), (17,), (2, 3, 4, 5), (31,), (33,), (6, 8)]
#: Zeros, subnormal numbers, ties, and what is close to the end of a type; the last four are too large for sums of squares.
SPECIAL = (0.0, -0.0, 1e-7, -6e-8, 2.0**-25, 1e-40, 65504.0, 65520.0, 2049.0, 3e38, math.inf, -math.inf, math.nan)

#: As everywhere, but for which NaN an operation gives: processors choose among those that go in.
same_bits = functools.partial(equal_bits, any_nan=True)


class NoHostRead(TorchDispatchMode):
    """Fails where the host reads a tensor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, 'the host read the device'
        return func(*args, **(kwargs or {}))


@contextmanager
def ops_from(setting: str) -> Iterator[None]:
    """Looks for the library as a new process with ``AMP_WRAPPER_OPS`` would: 'torch' for none.

    This is the one place of these tests that knows where the package keeps what it has found.
    """
    with mock.patch.dict(os.environ, AMP_WRAPPER_OPS=setting):
        loader.library.cache_clear()
        try:
            yield
        finally:
            loader.library.cache_clear()


def skip_without_library(device: torch.device) -> None:
    """Skips a test of compiled kernels on a device that they do not serve."""
    if not ops.serves(device):
        pytest.skip(f'no compiled ops for {device.type}')


@contextmanager
def threads(count: int) -> Iterator[None]:
    """torch computes with so many threads inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def scalar(device: torch.device, value: float = 0.0, dtype: torch.dtype = F32) -> Tensor:
    return torch.full((), value, dtype=dtype, device=device)


def random_tensor(
    seed: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device, layout: int = 0, special: bool = False
) -> Tensor:
    """Values over many magnitudes, the same for the same seed.

    Args:
        seed: Of the values.
        shape: Of the tensor.
        dtype: Of the tensor.
        device: Of the tensor.
        layout: 1 is transposed, 2 has gaps, 3 is misaligned, 4 is channels-last, where the shape has such a layout.
        special: Whether a tenth of the values is of :data:`SPECIAL`; NaN and infinities in every other tensor only.
    """
    generator = torch.Generator().manual_seed(seed)
    powers = torch.tensor([2.0**power for power in range(-9, 10)])
    values = torch.rand(tuple(shape), generator=generator) * 4 - 2
    values *= powers[torch.randint(0, len(powers), tuple(shape), generator=generator)]
    if special and values.numel():
        strange = torch.tensor(SPECIAL[: len(SPECIAL) - 3 * (seed % 2)])
        picked = strange[torch.randint(0, len(strange), tuple(shape), generator=generator)]
        values = torch.where(torch.rand(tuple(shape), generator=generator) < 0.1, picked, values)
    tensor = values.to(dtype).to(device)
    if layout == 1 and tensor.dim() == 2:
        return tensor.t().contiguous().t()
    if layout == 2 and tensor.dim():
        wide = torch.zeros(*tensor.shape[:-1], tensor.shape[-1] * 2, dtype=dtype, device=device)
        return wide[..., ::2].copy_(tensor)
    if layout == 3:
        return torch.zeros(tensor.numel() + 1, dtype=dtype, device=device)[1:].view(tensor.shape).copy_(tensor)
    if layout == 4 and tensor.dim() == 4:
        return tensor.contiguous(memory_format=torch.channels_last)
    return tensor


def moved_scale(
    state: tuple[float, int, int], bad: bool, rule: tuple[float, float, int, int, float, float]
) -> tuple[float, int, int]:
    """The loss scale, its growth tracker and its hysteresis tracker after a step, in float32.

    Args:
        state: The three before the step.
        bad: Whether the step overflowed.
        rule: Growth and backoff factor, growth interval, hysteresis, and the limits of the scale.
    """
    scale, tracker, left = np.float32(state[0]), state[1], state[2]
    growth, backoff, interval, hysteresis, floor, ceiling = rule
    with np.errstate(over='ignore', under='ignore'):
        if bad:
            lowered = min(scale, max(scale * np.float32(backoff), np.float32(floor)))
            return float(scale if left > 1 else lowered), 0, max(left - 1, 0)
        if tracker + 1 < interval:
            return float(scale), tracker + 1, hysteresis
        raised = min(scale * np.float32(growth), np.float32(ceiling))
        return float(max(scale, raised) if np.isfinite(raised) else scale), 0, hysteresis


def joined(weight: Tensor, remainder: Tensor) -> Tensor:
    """The float32 numbers of 16-bit weights and their int16 remainders: bits below a bfloat16, a distance from a float16."""
    near, extra = weight.float(), remainder.to(torch.int32)
    sums = (near.view(torch.int32) + extra).view(F32)
    if weight.dtype is BF16:
        return torch.where(sums.isnan(), near, sums)
    small = (near.double().abs() + extra * 2.0**-39).float().copysign(near)
    is_small = (near.abs() < 2.0**-14) | ((near.abs() == 2.0**-14) & (extra < 0))
    return torch.where(is_small, small, torch.where(near.isfinite(), sums, near))
