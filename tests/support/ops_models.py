"""What the tests of the ops share: tensors, arguments of every op, and a worker that prints digests of results."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from bits import bits as every_bit
from bits import same_bits as equal_bits
from command_line import python
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from amp_wrapper import ops
from amp_wrapper.ops import loader, split

ROOT = Path(__file__).parents[2]
#: The ops in plain torch, by name.
REFERENCE = SimpleNamespace(**ops.REFERENCES)
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
HALVES = (torch.float16, torch.bfloat16)
PAIRED = (
    'multi_tensor_scale',
    'multi_tensor_axpby',
    'multi_tensor_copy',
    'multi_tensor_scale_l2norm',
    'multi_tensor_refresh',
)
NORMS = ('multi_tensor_l2norm', 'multi_tensor_maxnorm')
#: Every op that takes lists.
LISTED = (*PAIRED, 'multi_tensor_isnonfinite', 'multi_tensor_exponents', *NORMS)
#: The ops of an optimizer step, whose arguments are made by :func:`prologue_call` and :func:`update_call`.
UPDATES = ('fused_adam', 'fused_sgd')
STEPS = ('step_prologue', *UPDATES)
#: A block of the sum is 1024 elements, a chunk 32768.
EDGES = (1, 2, 63, 64, 65, 1023, 1024, 1025, 2049, 32767, 32768, 32769, 65536, 3 * 32768 + 7)


class NoHostRead(TorchDispatchMode):
    """Fails on a read of the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, 'the host read the device'
        return func(*args, **(kwargs or {}))


#: As everywhere, but for which NaN an operation gives: processors choose among those that go in.
bits = functools.partial(every_bit, any_nan=True)
same_bits = functools.partial(equal_bits, any_nan=True)


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

    if name in ('multi_tensor_scale', 'multi_tensor_scale_l2norm'):
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
    if name == 'multi_tensor_exponents':
        # what is there stays: it is added to, and one of the numbers is the larger one
        counts = torch.arange(len(rows) * ops.EXPONENTS, device=device).view(len(rows), ops.EXPONENTS)
        largest = torch.tensor([1000.0 * (seed % 2) for seed, *_ in rows], dtype=torch.float32, device=device)
        return Call(name, dict(tensors=column(0), counts=counts, largest=largest), ('counts', 'largest'))
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


#: (type of a parameter, type of its copy): alone, with a copy, with a remainder.
KINDS: tuple[tuple[torch.dtype, torch.dtype | None], ...] = (
    (torch.float32, None),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.int16),
    (torch.float16, torch.int16),
    (torch.float32, torch.float16),
    (torch.bfloat16, None),
    (torch.float16, None),
)


def hyper_of(name: str, flags: int) -> Tensor:
    """Two groups of hyper-parameters; bits of ``flags``: amsgrad or momentum (0), maximize (1), decoupled or nesterov (2)."""
    maximize, more = float(flags >> 1 & 1), float(flags >> 2 & 1)
    if name == 'fused_adam':
        rows = [[1e-2, 0.9, 0.999, 1e-8, 0.05, maximize, more], [3e-3, 0.3, 0.95, 1e-6, 0.0, 0.0, 1 - more]]
    else:
        rows = [[1e-1, 0.9, 0.1, more, 0.05, maximize, 0.0], [3e-2, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0]]
    return torch.tensor(rows, dtype=torch.float64)


def prologue_call(
    name: str,
    steps: Sequence[float],
    device: torch.device,
    flags: int = 0,
    hyper: Tensor | None = None,
    found: float | None = None,
    scale: float | None = None,
    dynamic: bool = False,
    norm: float | None = None,
    limits: tuple[float | None, float | None] = (None, None),
    learned: float | None = None,
    rate: float | None = None,
    tracker: int = 0,
) -> Call:
    """A prologue for an update called ``name``; parameters belong to the groups of ``hyper`` by turns."""
    table = hyper_of(name, flags) if hyper is None else hyper

    def given(value: float | None) -> Tensor | None:
        return None if value is None else zero(device, value)

    def integer(value: int) -> Tensor:
        return torch.tensor(value, dtype=torch.int32, device=device)

    arguments = dict(
        decision=torch.full((ops.DECISION,), -1.0, device=device),
        rows=torch.full((len(steps), ops.ROW), -1.0, device=device),
        steps=[zero(device, step) for step in steps],
        hyper=table,
        groups=torch.tensor([i % len(table) for i in range(len(steps))], dtype=torch.int64),
        kind=UPDATES.index(name),
        rates=[] if rate is None else [zero(device, rate)],
        rated=[] if rate is None else [len(table) - 1],
        found_inf=given(found),
        learned=given(learned),
        norm=given(norm),
        scale=given(scale),
        growth_tracker=integer(tracker) if dynamic else None,
        hysteresis_tracker=integer(1) if dynamic else None,
        counts=torch.tensor([7, 3, 1], device=device) if dynamic else None,
        rule=(2.0, 0.5, 3.0, 2.0, 0.25, 2.0**20) if dynamic else (),
        max_norm=limits[0],
        clip_value=limits[1],
    )
    written = ('decision', 'rows', 'steps', 'counts')
    # a scale that stays is read alone
    return Call(
        'step_prologue', arguments, (*written, *(('scale', 'growth_tracker', 'hysteresis_tracker') if dynamic else ()))
    )


def update_call(
    name: str,
    shapes: Sequence[tuple[int, ...]],
    device: torch.device,
    flags: int = 0,
    special: bool = False,
    skip: float = 0.0,
    start: int = 0,
    plain: bool = False,
) -> Call:
    """One parameter for each shape; types, copies and layouts by turns, all of them over 63 shapes.

    Args:
        name: Of the op.
        shapes: Of the parameters.
        device: Of the tensors.
        flags: As for :func:`hyper_of`.
        special: Whether odd values are among those of the lists.
        skip: The first number of the decision.
        start: Of the turns.
        plain: Whether states are float32 and layouts plain.
    """
    first = prologue_call(name, [float(i % 3 * 50) for i in range(len(shapes))], device, flags)
    first.run(REFERENCE)
    decision = torch.tensor([skip, 0.3, 0.7, 8.0, 1.0, 1.0, 0.0, 0.0], device=device)
    lists: list[list[Tensor]] = [[] for _ in range(6)]
    for index, shape in enumerate(shapes, start):
        kind, other = KINDS[index % 7]

        def made(which: int, dtype: torch.dtype, here: int = index, shape: tuple[int, ...] = shape) -> Tensor:
            layout = 0 if plain else (here + which // 2 * (here // 5 % 2)) % 5
            tensor = random_tensor(here + 1000 * which, shape, dtype, device, layout, special)
            return tensor.abs_() if which in (3, 4) else tensor

        state_type = torch.float32 if plain or index % 3 else FLOATS[index // 3 % 3]
        parameter = made(1, kind)
        # nothing beside it: the parameter itself stands there, or a copy of its type
        partner = parameter if plain or index % 2 else torch.zeros_like(parameter)
        if other is not None:
            partner = made(5, torch.float32 if other is torch.int16 else other)
        if other is torch.int16:
            # weight and remainder of one number
            weight, remainder = split.split(partner, kind)
            parameter.copy_(weight)
            partner = torch.zeros_like(parameter, dtype=torch.int16).copy_(remainder)
        new = (made(0, FLOATS[index // 7 % 3]), parameter, *(made(i, state_type) for i in (2, 3, 4)), partner)
        for tensors, tensor in zip(lists, new):
            tensors.append(tensor)
    grads, params, firsts, seconds, most, partners = lists
    rest = dict(rows=first.arguments['rows'], decision=decision)
    if plain and not any(KINDS[i % 7][1] for i in range(start, start + len(shapes))):
        partners = []
    if name == 'fused_adam':
        states = dict(exp_avgs=firsts, exp_avg_sqs=seconds, max_exp_avg_sqs=most if flags & 1 else [])
    else:
        states = dict(momentum_buffers=firsts if flags & 1 else [])
    arguments = dict(grads=grads, params=params, **states, partners=partners) | rest
    return Call(name, arguments, ('params', *states, 'partners'))


def step_samples(name: str, device: torch.device) -> list[Call]:
    """Calls of an op of a step, for what is asked of every op."""
    if name == 'step_prologue':
        return [
            prologue_call('fused_adam', [0.0, 5.0, 1.0], device),
            prologue_call('fused_sgd', [], device, found=1.0),
            prologue_call(
                'fused_adam', [2.0, 0.0, 7.0], device, 7, None, 0.0, 1024.0, True, 3.0, (1.0, 0.5), 1.0, 1e-4, tracker=2
            ),
        ]
    shapes: list[tuple[int, ...]] = [(3, 5), (0,), (), (2, 3, 4, 5), (17,), (4, 9), (33,), (7,), (8, 3)]
    return [update_call(name, shapes, device), update_call(name, shapes, device, 7, True, start=9)]


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
    for name in UPDATES:
        total = hashlib.sha256()
        for flags in range(8):
            for call in (
                update_call(name, [(size,) for size in (5, 37, 64, 1000, 33000)], device, flags, True, start=3 * flags),
                prologue_call(name, [0.0, 1.0, 1234567.0], device, flags, None, 0.0, 3.0, True, 0.7, (0.3, 0.1)),
            ):
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


#: Where modules lie that test files share.
SHARED = [str(ROOT / 'tests' / 'support')]


def in_fresh_process(*arguments: str, environment: dict[str, str] | None = None, folder: Path = ROOT) -> Any:
    """What ``python *arguments`` prints last, as JSON."""
    more = environment or {}
    env = {**os.environ, 'PYTHONPATH': os.pathsep.join([str(folder), *SHARED]), 'OMP_NUM_THREADS': '1', **more}
    if all(name.startswith('AMP_WRAPPER_') for name in more):
        done = python(*arguments, cwd=folder, env=env)
    else:
        # read by Python or torch when they start
        command = [sys.executable, *arguments]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, cwd=folder)
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
