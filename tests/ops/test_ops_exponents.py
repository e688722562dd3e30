"""Counts over powers of two: against a model in float64, at every edge of a type, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ops_models import EDGES, FLOATS, REFERENCE, NoHostRead, random_tensor, same_bits, without_compiled
from torch import Tensor

from amp_wrapper import ops

FACES = {'front': ops, 'raw': torch.ops.amp_wrapper, 'reference': REFERENCE}
SUBNORMAL, NONFINITE, ZERO = 0, 255, 256


@pytest.fixture(params=list(FACES))
def where(request: pytest.FixtureRequest, device: torch.device) -> Any:
    if request.param != 'reference' and without_compiled(device):
        pytest.skip(without_compiled(device))
    return FACES[request.param]


def column(value: float) -> int:
    """Where a float32 is counted, from its exponent in float64, which has no subnormal number among them."""
    if not math.isfinite(value):
        return NONFINITE
    return ZERO if value == 0 else max(math.frexp(value)[1] - 1 + 127, SUBNORMAL)


def model(tensors: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Counts and largest magnitudes, element by element."""
    counts = np.zeros((len(tensors), ops.EXPONENTS), dtype=np.int64)
    largest = np.zeros(len(tensors), dtype=np.float32)
    for index, tensor in enumerate(tensors):
        for value in tensor.cpu().double().reshape(-1).tolist():
            counts[index, column(value)] += 1
            if math.isfinite(value):
                largest[index] = max(largest[index], np.float32(abs(value)))
    return torch.from_numpy(counts), torch.from_numpy(largest)


def tables(count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.zeros(count, ops.EXPONENTS, dtype=torch.int64, device=device), torch.zeros(count, device=device)


def check(where: Any, tensors: list[Tensor], device: torch.device) -> None:
    """A call gives what the model gives, and writes to nothing else."""
    kept = [tensor.clone() for tensor in tensors]
    counts, largest = tables(len(tensors), device)
    with NoHostRead():
        where.multi_tensor_exponents(tensors, counts, largest)
    wanted = model(tensors)
    assert torch.equal(counts.cpu(), wanted[0])
    assert same_bits(largest.cpu(), wanted[1])
    assert all(same_bits(tensor, old) for tensor, old in zip(tensors, kept))


def edges(dtype: torch.dtype) -> list[float]:
    """Each power of two of a type with its neighbours, both zeros, and what is not finite."""
    info = torch.finfo(dtype)
    lowest = math.frexp(info.smallest_normal * info.eps)[1] - 1
    powers = [2.0**power for power in range(lowest, math.frexp(info.max)[1])]
    values = [math.nextafter(power, way) for power in powers for way in (0.0, math.inf)] + powers
    return [0.0, -0.0, info.max, -info.max, math.inf, -math.inf, math.nan, *values, *(-power for power in powers)]


@pytest.mark.parametrize('dtype', FLOATS, ids=str)
def test_every_power_of_two(dtype: torch.dtype, where: Any, device: torch.device) -> None:
    """Also the subnormal numbers of the type, which arithmetic would perhaps take for zeros."""
    values = torch.tensor(edges(dtype), dtype=torch.float64).to(dtype).to(device)
    check(where, [values, values[:7], values[-1:]], device)
    counts, _ = tables(1, device)
    where.multi_tensor_exponents([values], counts, torch.zeros(1, device=device))
    # float16 reaches from its smallest subnormal number to its largest; the others fill every column
    filled = range(127 - 24, 127 + 16) if dtype is torch.float16 else range(255)
    assert counts[0].nonzero().reshape(-1).tolist() == [*filled, NONFINITE, ZERO]


@pytest.mark.parametrize('half', FLOATS[1:], ids=str)
def test_every_16_bit_number(half: torch.dtype, where: Any, device: torch.device) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(half).to(device)
    check(where, [every], device)


shapes = st.sampled_from(
    [(), (0,), (1,), (2, 0, 3), (3,), (7, 9), (33,), (2, 3, 4, 5), *((size,) for size in EDGES[:9])]
)
rows = st.tuples(st.integers(0, 99), shapes, st.sampled_from([*FLOATS, torch.float64]), st.integers(0, 4))


@settings(max_examples=50, deadline=None)
@given(rows=st.lists(rows, max_size=6), special=st.booleans())
def test_counts_are_those_of_the_model(device: torch.device, rows: list[Any], special: bool) -> None:
    """Types mixed, views, channels-last, misaligned, with gaps, empty; float64 goes to the reference."""
    tensors = [random_tensor(seed, shape, dtype, device, layout, special) for seed, shape, dtype, layout in rows]
    check(ops, tensors, device)


def test_counts_are_added_and_the_largest_stays(where: Any, device: torch.device) -> None:
    tensors = [torch.tensor([1.0, -3.0, 0.0], device=device), torch.full((2,), -5.0, device=device)]
    counts, largest = tables(2, device)
    counts[0, ZERO], counts[1, 7] = 2**40, 3
    largest[0] = 4.0
    before = counts._version, largest._version
    where.multi_tensor_exponents(tensors, counts, largest)
    where.multi_tensor_exponents(tensors, counts, largest)
    found = [{index: count for index, count in enumerate(row) if count} for row in counts.tolist()]
    assert found == [{127: 2, 128: 2, ZERO: 2**40 + 2}, {7: 3, 129: 4}]
    assert largest.tolist() == [4.0, 5.0]
    assert counts._version > before[0] and largest._version > before[1]


@pytest.mark.parametrize('dtype', FLOATS, ids=str)
def test_pieces_of_every_kind(dtype: torch.dtype, where: Any, device: torch.device) -> None:
    """The kernels work on runs of elements in different ways, by how far apart those lie; and on what is left of one."""
    normal = random_tensor(1, (1500,), dtype, device)
    wide = normal * torch.tensor([2.0**-100, 2.0**-10, 1.0, 2.0**90], device=device).repeat(375).to(dtype)
    tiny = torch.full((1500,), 3 * torch.finfo(dtype).smallest_normal / 8, dtype=dtype, device=device)
    parts = [normal, wide, torch.zeros_like(normal), -torch.zeros_like(normal), tiny]
    parts += [torch.full_like(normal, value) for value in (1.5, math.inf, math.nan)]
    for size in (900, 1024, 1500):
        for one in parts:
            check(where, [torch.cat([one[:size], other[:size]]) for other in parts], device)


def test_the_number_of_threads_changes_nothing(device: torch.device) -> None:
    tensors = [
        random_tensor(seed, (size,), FLOATS[seed % 3], device, 0, True)
        for seed, size in enumerate((300_001, 5, 99_999))
    ]
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(tables(3, device))
            ops.multi_tensor_exponents(tensors, *found[-1])
    finally:
        torch.set_num_threads(before)
    wanted = tables(3, device)
    REFERENCE.multi_tensor_exponents(tensors, *wanted)
    assert found[0][0].sum().item() == 400_005
    assert all(torch.equal(counts, wanted[0]) and same_bits(largest, wanted[1]) for counts, largest in found)


@pytest.mark.parametrize('kind', ['transposed', 'expanded', 'strided', 'channels-last', 'slice of channels-last'])
def test_views(kind: str, where: Any, device: torch.device) -> None:
    base = random_tensor(3, (4, 6, 8, 10), torch.float32, device, special=True)
    channels_last = base.contiguous(memory_format=torch.channels_last)
    view = {
        'transposed': base.transpose(0, 3),
        'expanded': base[:1].expand(5, 6, 8, 10),
        'strided': base[:, 1::2, ::3],
        'channels-last': channels_last,
        'slice of channels-last': channels_last[:, 1:4],
    }[kind]
    check(where, [view, base[0, 0, 0, 1:]], device)


def test_a_conjugate_is_its_value(device: torch.device) -> None:
    """The imaginary part of a conjugate has its sign in a bit of the tensor; the magnitude has none."""
    number = torch.tensor([3 - 8j], device=device)
    check(ops, [number.conj().imag, number.real], device)
    counts, largest = tables(1, device)
    ops.multi_tensor_exponents([number], counts, largest)
    assert counts[0].nonzero().reshape(-1).tolist() == [128, 130] and largest.tolist() == [8.0]


def test_subnormal_numbers_are_counted_where_arithmetic_flushes_them(where: Any, device: torch.device) -> None:
    values = torch.full((5000,), 1e-40, device=device)
    counts, largest = tables(1, device)
    kept = float(values[0])
    flushes = torch.set_flush_denormal(True)
    try:
        where.multi_tensor_exponents([values], counts, largest)
    finally:
        torch.set_flush_denormal(False)
    assert flushes and counts[0, SUBNORMAL].item() == 5000 and counts.sum().item() == 5000
    assert float(largest[0]) == kept > 0


def test_nothing_is_counted_of_nothing(where: Any, device: torch.device) -> None:
    counts, largest = tables(0, device)
    where.multi_tensor_exponents([], counts, largest)
    for shapes in ([(0,)], [(3,), (0,)], [(0,), (3,), (2, 0)]):
        check(where, [torch.ones(shape, device=device) for shape in shapes], device)


# -- what is refused ----------------------------------------------------------------------------------------------


def refused(where: Any, arguments: list[Any], message: str) -> None:
    """A ValueError of these words, with nothing written."""
    kept = [argument.clone() for argument in arguments[1:]]
    with pytest.raises(ValueError) as caught:
        where.multi_tensor_exponents(*arguments)
    assert str(caught.value).split('\nException raised from')[0] == message
    assert all(torch.equal(tensor, old) for tensor, old in zip(arguments[1:], kept))


@pytest.mark.parametrize(
    ('shape', 'dtype'),
    [((3, 257), torch.int64), ((2, 256), torch.int64), ((514,), torch.int64), ((2, 257), torch.int32)],
)
def test_other_counts_are_refused(shape: tuple[int, ...], dtype: torch.dtype, where: Any, device: torch.device) -> None:
    tensors, largest = [torch.ones(3, device=device)] * 2, torch.zeros(2, device=device)
    counts = torch.zeros(shape, dtype=dtype, device=device)
    text = f'counts has shape {shape} and dtype {dtype}: (2, 257) of torch.int64 is expected.'
    refused(where, [tensors, counts, largest], text)


@pytest.mark.parametrize(('shape', 'dtype'), [((1,), torch.float32), ((2, 1), torch.float32), ((2,), torch.float64)])
def test_other_largest_are_refused(
    shape: tuple[int, ...], dtype: torch.dtype, where: Any, device: torch.device
) -> None:
    tensors, (counts, _) = [torch.ones(3, device=device)] * 2, tables(2, device)
    largest = torch.zeros(shape, dtype=dtype, device=device)
    text = f'largest has shape {shape} and dtype {dtype}: (2,) of torch.float32 is expected.'
    refused(where, [tensors, counts, largest], text)


def test_counts_with_gaps_are_refused(where: Any, device: torch.device) -> None:
    counts = torch.zeros(257, 2, dtype=torch.int64, device=device).t()
    text = 'counts has shape (2, 257) and dtype torch.int64: (2, 257) of torch.int64 is expected.'
    refused(where, [[torch.ones(3, device=device)] * 2, counts, torch.zeros(2, device=device)], text)


@pytest.mark.parametrize('shared', ['counts and tensors[1]', 'largest and tensors[1]', 'counts and largest'])
def test_shared_memory_is_refused(shared: str, where: Any, device: torch.device) -> None:
    counts, largest = tables(2, device)
    tensors = [torch.ones(3, device=device), torch.ones(2, device=device)]
    if shared == 'counts and largest':
        largest = counts.view(-1)[-1:].view(torch.float32)
    else:
        tensors[1] = (counts if shared.startswith('counts') else largest).view(-1)[-1:].view(torch.float32)
    refused(where, [tensors, counts, largest], f'{shared} share memory: give each memory of its own.')


@pytest.mark.parametrize('name', ['counts', 'largest'])
def test_what_cannot_be_written_is_refused(name: str, where: Any, device: torch.device) -> None:
    arguments = dict(zip(('counts', 'largest'), tables(1, device)))
    with torch.inference_mode():
        arguments[name] = arguments[name].clone()
    text = f'{name} was made in inference mode: outside of it, it cannot be written to.'
    refused(where, [[torch.ones(3, device=device)], *arguments.values()], text)
    arguments = dict(zip(('counts', 'largest'), tables(1, device)))
    arguments[name].untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=f'^{name} has no memory'):
        where.multi_tensor_exponents([torch.ones(3, device=device)], *arguments.values())


def test_a_negative_view_is_refused(where: Any, device: torch.device) -> None:
    counts, _ = tables(1, device)
    largest = torch.zeros(1, dtype=torch.complex64, device=device).view(torch.float32)
    negative = torch.complex(torch.zeros(1, device=device), torch.zeros(1, device=device)).conj().imag
    assert negative.is_neg() and not largest.is_neg()
    with pytest.raises(ValueError, match=r'^largest has its negative bit set: give largest.resolve_neg\(\)'):
        where.multi_tensor_exponents([torch.ones(3, device=device)], counts, negative)


@pytest.mark.parametrize('face', ['front', 'reference'])
@pytest.mark.parametrize('name', ['counts', 'largest', 'tensors[1]'])
def test_everything_lies_on_one_device(name: str, face: str, device: torch.device) -> None:
    tensors, (counts, largest) = [torch.ones(3, device=device) for _ in range(2)], tables(2, device)
    if name == 'counts':
        counts = counts.to('meta')
    elif name == 'largest':
        largest = largest.to('meta')
    else:
        tensors[1] = tensors[1].to('meta')
    with pytest.raises(ValueError) as caught:
        FACES[face].multi_tensor_exponents(tensors, counts, largest)
    assert str(caught.value) == f'{name} is on meta and tensors[0] on {tensors[0].device}: they belong on one device.'
    assert name == 'counts' or counts.sum().item() == 0


@pytest.mark.parametrize('face', ['front', 'reference'])
@pytest.mark.parametrize('name', ['counts', 'largest'])
def test_what_is_no_table_is_a_type_error(name: str, face: str, device: torch.device) -> None:
    arguments: dict[str, Any] = dict(zip(('counts', 'largest'), tables(1, device)))
    arguments[name] = [0.0]
    with pytest.raises(TypeError) as caught:
        FACES[face].multi_tensor_exponents([torch.ones(3, device=device)], **arguments)
    assert str(caught.value) == f'{name} must be a tensor, not list.'
