"""What the tests of the ops share: tensors, arguments of every op, and a worker that prints digests of results."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from amp_wrapper import ops
from amp_wrapper.ops import loader

ROOT = Path(__file__).parents[1]
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
HALVES = (torch.float16, torch.bfloat16)
PAIRED = ('multi_tensor_scale', 'multi_tensor_axpby', 'multi_tensor_copy', 'multi_tensor_refresh')
NORMS = ('multi_tensor_l2norm', 'multi_tensor_maxnorm')
#: Every op that takes lists.
LISTED = (*PAIRED, 'multi_tensor_isnonfinite', *NORMS)
#: A block of the sum is 1024 elements, a chunk 32768.
EDGES = (1, 2, 63, 64, 65, 1023, 1024, 1025, 2049, 32767, 32768, 32769, 65536, 3 * 32768 + 7)
_VIEWS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class NoHostRead(TorchDispatchMode):
    """Fails on a read of the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, 'the host read the device'
        return func(*args, **(kwargs or {}))


def bits(tensor: Tensor) -> Tensor:
    """The bits as integers on the CPU, all NaN made equal."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.is_floating_point():
        tensor = torch.where(tensor.isnan(), torch.full_like(tensor, math.nan), tensor)
    return tensor.view(_VIEWS[tensor.element_size()])


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal in type, shape and every bit; any NaN equals any other."""
    return a.dtype is b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def without_compiled(device: torch.device) -> str:
    """Why compiled ops cannot be tested on a device; empty where they can."""
    if device.type in ops.compiled_devices():
        return ''
    return f'no compiled ops for {device.type}: {loader.library().reason or "not part of this build"}'


def zero(device: torch.device, value: float = 0.0) -> Tensor:
    return torch.full((), value, device=device)


def random_tensor(
    seed: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, layout: int = 0, special: bool = False
) -> Tensor:
    """Values over many magnitudes.

    Args:
        seed: Of the values.
        shape: Of the tensor.
        dtype: Of the tensor.
        device: Of the tensor.
        layout: 1 is transposed, 2 strided, 3 misaligned, 4 channels-last; plain where the shape has no such layout.
        special: Whether zeros, subnormal numbers, ties, infinities and NaN are among the values.
    """
    generator = torch.Generator().manual_seed(seed)
    # exact arithmetic only: torch's normal numbers and powers depend on the instruction set
    powers = torch.tensor([2.0**power for power in range(-9, 10)])
    power = powers[torch.randint(0, len(powers), shape, generator=generator)]
    values = (torch.rand(shape, generator=generator) * 4 - 2) * power
    if special and values.numel():
        strange = torch.tensor(
            [
                0.0,
                -0.0,
                1e-7,
                -6e-8,
                2.0**-25,
                1e-40,
                -1e-45,
                65504.0,
                65520.0,
                2049.0,
                3e38,
                math.inf,
                -math.inf,
                math.nan,
            ]
        )
        # the last three in some tensors only
        picked = torch.randint(0, len(strange) - 3 * (seed % 2), shape, generator=generator)
        values = torch.where(torch.rand(shape, generator=generator) < 0.1, strange[picked], values)
    tensor = values.to(dtype).to(device)
    if layout == 1 and tensor.dim() == 2:
        return tensor.t().contiguous().t()
    if layout == 2 and tensor.dim() >= 1:
        wide = torch.zeros(*tensor.shape[:-1], tensor.shape[-1] * 2, dtype=dtype, device=device)[..., ::2]
        return wide.copy_(tensor)
    if layout == 3:
        return torch.zeros(tensor.numel() + 1, dtype=dtype, device=device)[1:].view(shape).copy_(tensor)
    if layout == 4 and tensor.dim() == 4:
        return tensor.contiguous(memory_format=torch.channels_last)
    return tensor


@dataclasses.dataclass
class Call:
    """Arguments of an op, by name.

    Attributes:
        name: Of the op.
        arguments: In the order of the schema.
        written: Names of those that the op may write.
    """

    name: str
    arguments: dict[str, Any]
    written: tuple[str, ...]

    def run(self, where: Any) -> list[Tensor]:
        """Call ``where.<name>``; what was written and returned."""
        result = getattr(where, self.name)(*self.arguments.values())
        returned = [] if result is None else [result] if isinstance(result, Tensor) else list(result)
        return [*returned, *self.outputs()]

    def outputs(self) -> list[Tensor]:
        found: list[Tensor] = []
        for name in self.written:
            value = self.arguments[name]
            found += [] if value is None else [value] if isinstance(value, Tensor) else list(value)
        return found

    def tensors(self) -> Iterator[Tensor]:
        for value in self.arguments.values():
            for tensor in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(tensor, Tensor):
                    yield tensor


Row = tuple[int, tuple[int, ...], tuple[torch.dtype, torch.dtype, torch.dtype], tuple[int, int, int]]


def make_call(
    name: str,
    rows: Sequence[Row],
    device: torch.device,
    factors: tuple[float | None, float | None] = (None, None),
    flag: bool = False,
    per_tensor: bool = False,
    special: bool = False,
    checks: tuple[bool, bool] = (True, True),
) -> Call:
    """A call over lists with one row for each tensor: seed, shape, types and layouts of up to three lists.

    The same arguments give the same bits, so that two implementations can each have their own. ``factors`` are those that
    the op has, in the order of its schema; ``checks`` are of axpby.
    """
    found_inf = zero(device) if flag else None
    first, second = (None if factor is None else zero(device, factor) for factor in factors)

    def column(which: int) -> list[Tensor]:
        return [
            random_tensor(seed + 1000 * which, shape, dtypes[which], device, layouts[which], special)
            for seed, shape, dtypes, layouts in rows
        ]

    if name == 'multi_tensor_scale':
        arguments: dict[str, Any] = dict(sources=column(0), targets=column(1), scale=first, found_inf=found_inf)
        return Call(name, arguments, ('targets', 'found_inf'))
    if name == 'multi_tensor_axpby':
        arguments = dict(xs=column(0), ys=column(1), targets=column(2), a=first, b=second, found_inf=found_inf)
        arguments |= dict(check_x=checks[0], check_y=checks[1])
        return Call(name, arguments, ('targets', 'found_inf'))
    if name == 'multi_tensor_copy':
        return Call(name, dict(sources=column(0), targets=column(1)), ('targets',))
    if name == 'multi_tensor_isnonfinite':
        return Call(name, dict(tensors=column(0), found_inf=zero(device)), ('found_inf',))
    if name in NORMS:
        arguments = dict(tensors=column(0), inverse_scale=first, found_inf=found_inf, per_tensor=per_tensor)
        return Call(name, arguments, ('found_inf',))
    assert name == 'multi_tensor_refresh'
    weights, masters = [], []
    for seed, shape, dtypes, layouts in rows:
        half = dtypes[0] if dtypes[0] in HALVES else torch.bfloat16
        master = random_tensor(seed, shape, torch.float32, device, layouts[1], special)
        weight = random_tensor(seed, shape, torch.float32, device, 0, special).to(half)
        if seed % 3:
            # a few edits; the others are the rounded masters
            edited = random_tensor(seed + 7, shape, half, device, 0, special)
            weight = torch.where(random_tensor(seed + 9, shape, torch.float32, device) > 9, edited, weight)
        weights.append(random_tensor(seed, shape, half, device, layouts[0]).copy_(weight))
        masters.append(master)
    return Call(name, dict(weights=weights, masters=masters), ('masters',))


def state(
    device: torch.device, scale: float = 1024.0, tracker: int = 0, left: int = 1, bad: bool = False
) -> list[Tensor]:
    """The tensors of ``update_scale``."""
    integers = [torch.tensor(value, dtype=torch.int32, device=device) for value in (tracker, left)]
    return [zero(device, scale), *integers, zero(device, float(bad))]


def seeded_rows(count: int, start: int = 0) -> list[Row]:
    """Rows of all types and layouts, with sizes around blocks and chunks."""
    shapes: list[tuple[int, ...]] = [(), (0,), (5,), (7, 9), (2, 0, 3), (2, 3, 4, 5), (33, 31), *((n,) for n in EDGES)]
    rows: list[Row] = []
    for index in range(start, start + count):
        types = (FLOATS[index % 3], FLOATS[index // 3 % 3], FLOATS[index // 9 % 3])
        layouts = (index % 5, index // 5 % 5, index // 2 % 5)
        rows.append((index, shapes[index % len(shapes)], types, layouts))
    return rows


def digests(device: torch.device) -> dict[str, str]:
    """A digest of the results of every op over many lists."""
    found = {}
    for name in LISTED:
        total = hashlib.sha256()
        for special in (False, True):
            for factors in ((None, None), (1 / 3, 0.7), (2.0**-16, -1.5)):
                call = make_call(name, seeded_rows(54), device, factors, True, True, special)
                for tensor in call.run(ops):
                    total.update(str(tensor.dtype).encode() + bits(tensor).numpy().tobytes())
        found[name] = total.hexdigest()
    total = hashlib.sha256()
    for index in range(64):
        tensors = state(device, 3.0 ** (index % 7 - 3), index % 4, index % 3, index % 5 == 0)
        ops.update_scale(*tensors, 2.0 + index / 7, 1 / (1.5 + index), 3, 2, None if index % 2 else 0.5, 700.0)
        for tensor in tensors:
            total.update(bits(tensor).numpy().tobytes())
    found['update_scale'] = total.hexdigest()
    return found


#: Endings of a float32 that lie at, just below and just above a tie of a 16-bit type, and between.
ENDINGS = (
    0,
    1,
    0x0FFF,
    0x1000,
    0x1001,
    0x1FFF,
    0x2000,
    0x2FFF,
    0x3000,
    0x3001,
    0x7FFF,
    0x8000,
    0x8001,
    0xEFFF,
    0xF000,
    0xFFFF,
)


def wrong_conversions(device: torch.device) -> dict[str, int]:
    """How many conversions differ from torch's own: every 16-bit value to float32, every upper half of a float32 back."""
    found = {}
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32)
    wide = torch.cat([every * 2**16 + ending for ending in ENDINGS]).view(torch.float32).to(device)
    for half in HALVES:
        narrow = every.to(torch.int16).view(half).to(device)
        for source, dtype in ((narrow, torch.float32), (wide, half)):
            for name, more in (('multi_tensor_copy', ()), ('multi_tensor_scale', (None, None))):
                target = torch.zeros_like(source, dtype=dtype)
                getattr(ops, name)([source], [target], *more)
                label = f'{name} {source.dtype} to {dtype}'
                found[label] = int((bits(target) != bits(source.to(dtype))).sum())
    return found


def in_fresh_process(*arguments: str, environment: dict[str, str] | None = None, folder: Path = ROOT) -> Any:
    """What ``python *arguments`` prints last, as JSON."""
    done = subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {'PYTHONPATH': str(folder), 'OMP_NUM_THREADS': '1'} | (environment or {}),
        capture_output=True,
        text=True,
        timeout=300,
        cwd=folder,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


if __name__ == '__main__':
    place = torch.device('cpu')
    report = dict(
        backend=ops.backend_of(place),
        capability=torch.backends.cpu.get_cpu_capability(),
        digests=digests(place),
        wrong=wrong_conversions(place),
    )
    print(json.dumps(report))
