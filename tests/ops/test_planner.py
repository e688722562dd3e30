"""The planner of ``csrc/common/planner.h``, as plain C++ through ctypes: also with sizes that no memory holds."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native import SHIM, compile_cpp

Numbers = ctypes.POINTER(ctypes.c_int64)


def numbers(values: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * max(len(values), 1))(*values)


@pytest.fixture(scope='module')
def planner(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    target = tmp_path_factory.mktemp('planner') / 'planner.so'
    library = ctypes.CDLL(str(compile_cpp(target, [SHIM / 'planner.cpp'], '-O1', '-shared', '-fPIC', '-ftrapv')))
    for name in ('chunk_size', 'most_chunks', 'plan_rows', 'split_bounds', 'segment_rows'):
        getattr(library, name).restype = ctypes.c_int64
    library.plan_rows.argtypes = [Numbers, *[ctypes.c_int64] * 3, Numbers, ctypes.c_int64]
    library.find_entry.argtypes = [Numbers, ctypes.c_int, ctypes.c_int64]
    library.launches_of.argtypes = [Numbers, ctypes.c_int64, ctypes.c_int]
    library.split_bounds.argtypes = [Numbers, ctypes.c_int64, ctypes.c_int64, Numbers]
    library.segment_rows.argtypes = [Numbers, ctypes.c_int64, Numbers]
    return library


def plan(library: ctypes.CDLL, counts: Sequence[int], entries: int, chunks: int) -> list[tuple[int, ...]]:
    """(launch, tensor, begin, count, chunks before) of every entry."""
    room = 4096
    rows = (ctypes.c_int64 * (5 * room))()
    used = library.plan_rows(numbers(counts), len(counts), entries, chunks, rows, room)
    assert used <= room
    return [tuple(rows[5 * i : 5 * i + 5]) for i in range(used)]


def chunks_of(count: int, size: int) -> int:
    return -(-count // size)


# around a chunk and beyond what 31, 32 and 53 bits count
sizes = st.one_of(
    st.just(0),
    st.integers(0, 5),
    st.integers(-2, 2).map(lambda d: 32768 + d),
    st.integers(1, 300).map(lambda n: n * 32768),
    st.integers(0, 10**6),
    st.sampled_from([2**31 - 1, 2**31, 2**31 + 1, 2**32 + 5, 2**40 + 1, 2**46 - 3]),
)


@settings(max_examples=400, deadline=None)
@given(counts=st.lists(sizes, max_size=12), entries=st.integers(1, 6), chunks=st.sampled_from([1, 2, 3, 7, 2**31 - 1]))
def test_every_element_is_in_one_entry(planner: ctypes.CDLL, counts: list[int], entries: int, chunks: int) -> None:
    size = planner.chunk_size()
    if chunks < 2**31 - 1 and sum(chunks_of(count, size) for count in counts) > 3000:
        # a launch for every few chunks of a tensor of terabytes would be a list of billions
        counts = [min(count, 40 * size + 1) for count in counts]
    rows = plan(planner, counts, entries, chunks)
    wanted = [(tensor, 0, count) for tensor, count in enumerate(counts) if count]
    covered: list[tuple[int, int, int]] = []
    for _, tensor, begin, count, _ in rows:
        assert count > 0 and begin % size == 0
        if covered and covered[-1][0] == tensor:
            # goes on where the entry before ended
            assert covered[-1][2] == begin
            covered[-1] = (tensor, 0, begin + count)
        else:
            assert begin == 0
            covered.append((tensor, 0, count))
    assert covered == wanted

    launches: dict[int, list[tuple[int, ...]]] = {}
    for row in rows:
        launches.setdefault(row[0], []).append(row)
    assert list(launches) == list(range(len(launches)))
    for group in launches.values():
        assert len(group) <= entries
        before = 0
        for _, _, _, count, start in group:
            assert start == before
            before += chunks_of(count, size)
        assert before <= chunks


@settings(max_examples=100, deadline=None)
@given(counts=st.lists(sizes.filter(lambda n: n < 2**40), min_size=1, max_size=12), data=st.data())
def test_entry_of_finds_the_entry_of_a_chunk(planner: ctypes.CDLL, counts: list[int], data: st.DataObject) -> None:
    rows = plan(planner, counts, 2**40, 2**62)
    if not rows:
        return
    size = planner.chunk_size()
    index = data.draw(st.integers(0, len(rows) - 1))
    *_, count, start = rows[index]
    starts = numbers([row[4] for row in rows] + [rows[-1][4] + chunks_of(rows[-1][3], size)])
    for chunk in {start, start + chunks_of(count, size) - 1}:
        assert planner.find_entry(starts, len(rows), chunk) == index


@settings(max_examples=200, deadline=None)
@given(counts=st.lists(sizes.filter(lambda n: n <= 2**32 + 5), max_size=12), parts=st.integers(1, 17))
def test_split_shares_the_chunks_out(planner: ctypes.CDLL, counts: list[int], parts: int) -> None:
    bounds = numbers([-1] * (parts + 1))
    chunks = planner.split_bounds(numbers(counts), len(counts), parts, bounds)
    if not any(counts):
        assert chunks == 0
        return
    found = list(bounds)
    assert found[0] == 0 and found[-1] == chunks and found == sorted(found)
    # no part has more than its share and one chunk, where a tensor costs what 64 elements do
    size = planner.chunk_size()
    costs = [cost for count in counts if count for cost in chunk_costs(count, size)]
    fair = sum(costs) / parts if len(costs) < 10**5 else None
    if fair is not None:
        for begin, end in itertools.pairwise(found):
            assert sum(costs[begin:end]) <= fair + size + 64 * len(counts) + parts


def chunk_costs(count: int, size: int) -> list[int]:
    if count > 10**5 * size:
        return [size] * (10**5)
    return [64 + min(size, count), *(min(size, count - begin) for begin in range(size, count, size))]


@settings(max_examples=100, deadline=None)
@given(counts=st.lists(st.sampled_from([0, 1, 32768, 32769, 10**6]), max_size=9), times=st.sampled_from([1, 3000]))
def test_segments_name_the_chunks_of_every_tensor(planner: ctypes.CDLL, counts: list[int], times: int) -> None:
    counts = counts * times
    size = planner.chunk_size()
    rows = (ctypes.c_int64 * (4 * (len(counts) + 1)))()
    used = planner.segment_rows(numbers(counts), len(counts), rows)
    tensors = chunks = 0
    for i in range(used):
        first, base, count, inside = rows[4 * i : 4 * i + 4]
        # also tensors without elements, whose norm is zero
        assert (first, base) == (tensors, chunks) and count > 0
        assert inside == sum(chunks_of(n, size) for n in counts[first : first + count])
        tensors, chunks = tensors + count, chunks + inside
    assert tensors == len(counts)


def test_a_tensor_of_more_than_a_grid(planner: ctypes.CDLL) -> None:
    """A grid has at most 2^31 - 1 blocks; a tensor with more chunks goes on in the next launch."""
    size, most = planner.chunk_size(), planner.most_chunks()
    rows = plan(planner, [5, size * (most + 10), 7], 1000, most)
    assert [row[:2] for row in rows] == [(0, 0), (0, 1), (1, 1), (1, 2)]
    assert rows[1][3] + rows[2][3] == size * (most + 10)


@pytest.mark.parametrize('lists', [1, 2, 3])
def test_the_number_of_launches_does_not_grow_with_the_number_of_tensors(planner: ctypes.CDLL, lists: int) -> None:
    """One launch up to the limit of the arguments, whatever the sizes are; the list of ResNet-50 is far below it."""
    most = planner.most_tensors(lists)
    assert most > 800
    for count in (1, 161, most):
        counts = [1 + 40_000 * (i % 3) for i in range(count)]
        assert planner.launches_of(numbers(counts), count, lists) == 1
    over = [5] * (2 * most + 1)
    assert planner.launches_of(numbers(over), len(over), lists) == 3
    assert planner.launches_of(numbers([0] * 7), 7, lists) == 0
