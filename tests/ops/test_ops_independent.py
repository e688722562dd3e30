"""Results depend neither on the number of threads, nor on what else is in a list, nor on the instruction set."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from grid import but, long
from ops_models import (
    FLOATS,
    LISTED,
    NORMS,
    bits,
    digests,
    in_fresh_process,
    make_call,
    random_tensor,
    seeded_rows,
    without_compiled,
    wrong_conversions,
    zero,
)

from amp_wrapper import ops

WORKER = str(Path(__file__).parents[1] / 'support' / 'ops_models.py')


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures('threads')
@pytest.mark.parametrize('name', LISTED)
def test_any_number_of_threads(name: str, device: torch.device) -> None:
    if device.type != 'cpu':
        pytest.skip('threads are those of the CPU')
    # large enough for seven threads, at 32768 elements each
    rows = [*seeded_rows(54), (99, (1_000_003,), (FLOATS[0], FLOATS[1], FLOATS[2]), (0, 0, 0))]
    results = []
    for count in (1, 2, 3, 7):
        torch.set_num_threads(count)
        assert torch.get_num_threads() == count
        call = make_call(name, rows, device, (1 / 3, 0.7), True, True, special=count < 0)
        results.append([bits(tensor) for tensor in call.run(ops)])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other))


@pytest.mark.parametrize('name', NORMS)
def test_what_else_is_in_the_list(name: str, device: torch.device) -> None:
    norm = getattr(ops, name)
    tensors = [
        random_tensor(i, (size,), torch.float32, device) for i, size in enumerate((5, 1024, 40000, 100_001, 0, 33))
    ]
    total, alone = norm(tensors, zero(device, 1 / 3), None, True)
    mixed = []
    for index, tensor in enumerate(tensors):
        mixed += [random_tensor(50 + index, (3000 + index,), FLOATS[index % 3], device), tensor]
    assert torch.equal(bits(norm(mixed, zero(device, 1 / 3), None, True)[1][1::2]), bits(alone))
    for tensor, want in zip(tensors, alone):
        assert torch.equal(bits(norm([tensor], zero(device, 1 / 3))[0]), bits(want))
    # empty tensors at the end are leaves of the tree that are zero anyhow
    assert torch.equal(bits(norm([*tensors, tensors[4], tensors[4]], zero(device, 1 / 3))[0]), bits(total))


def capabilities() -> list[str]:
    """Those that ATEN_CPU_CAPABILITY can choose here: it lowers what the processor has, and never raises it."""
    order = ['default', 'avx2', 'avx512']
    best = torch.backends.cpu.get_cpu_capability().lower()
    return order[: order.index(best) + 1] if best in order else [best]


@functools.cache
def report(capability: str, implementation: str) -> Any:
    chosen = {'ATEN_CPU_CAPABILITY': capability} | ({'AMP_WRAPPER_OPS': 'reference'} if implementation else {})
    return in_fresh_process(WORKER, environment=chosen)


@pytest.mark.parametrize('implementation', but([''], ['', 'reference'], long), ids=['compiled', 'reference'])
@pytest.mark.parametrize('capability', but(['avx2'], ['default', 'avx2', 'avx512']))
def test_instruction_sets_give_the_same_bits(capability: str, implementation: str, device: torch.device) -> None:
    if device.type != 'cpu':
        pytest.skip('instruction sets are those of the CPU')
    if not implementation and without_compiled(device):
        pytest.skip(without_compiled(device))
    if capability not in capabilities():
        pytest.skip(f'this processor has no {capability}, or ATEN_CPU_CAPABILITY was lowered')
    found = report(capability, implementation)
    assert found['backend'] == ('reference' if implementation else 'CPU op')
    # torch 2.6 calls it so
    assert found['capability'].lower().replace('no avx', 'default') == capability
    assert found['digests'] == digests(device)
    assert set(found['wrong'].values()) == {0}, found['wrong']


def test_every_conversion_is_torchs(device: torch.device) -> None:
    """65,536 values of each 16-bit type to float32, and float32 of every upper half with every kind of tie back."""
    wrong = wrong_conversions(device)
    assert len(wrong) == 8 and set(wrong.values()) == {0}, wrong
