"""Sizes and numbers of ranks in the options of sharding: whole numbers of any kind, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from amp_wrapper import fsdp_internals
from amp_wrapper.casting.sharding import Sharding, shard
from amp_wrapper.errors import AmpAttachError, AmpConfigError
from amp_wrapper.openmmlab.sharding import mesh_of
from amp_wrapper.policy import resolve


@pytest.fixture(autouse=True)
def one_process() -> Iterator[None]:
    torch.distributed.init_process_group('gloo', store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize('sizes', [None, 1, [1], (1, 1), np.int64(1), (np.int32(1), np.int64(1))], ids=repr)
def test_sizes_of_a_mesh(sizes: Any) -> None:
    mesh = mesh_of(sizes)
    assert tuple(mesh.shape) == ((1, 1) if isinstance(sizes, tuple) else (1,))


@pytest.mark.parametrize('sizes', [0, True, np.bool_(True), 1.0, '1', (1, True), np.int64(2), []], ids=repr)
def test_wrong_sizes_of_a_mesh(sizes: Any) -> None:
    with pytest.raises(AmpConfigError, match=r'mesh=.* must be sizes whose product is the number of processes, 1'):
        mesh_of(sizes)


def test_the_number_of_ranks_that_gather_again() -> None:
    mesh, policy = mesh_of(None), resolve('O5')
    found = Sharding.of(mesh, {'reshard_after_forward': np.int64(1)}, policy).reshard_after_forward
    assert type(found) is int and found == 1
    assert Sharding.of(mesh, {'reshard_after_forward': np.bool_(True)}, policy).reshard_after_forward is True
    for wrong in (np.int64(2), np.float64(1.0), '1'):
        with pytest.raises(AmpConfigError, match='reshard_after_forward'):
            Sharding.of(mesh, {'reshard_after_forward': wrong}, policy)


def test_a_torch_that_shards_on_no_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh, policy, model = mesh_of(None), resolve('O5'), torch.nn.Linear(2, 2)
    monkeypatch.setattr(fsdp_internals, 'TRAINS_ON_CPUS', False)
    with pytest.raises(AmpAttachError, match=r'fully_shard of torch .* trains on no CPU'):
        shard([model], policy, Sharding.of(mesh, {}, policy))
    assert {type(p) for p in model.parameters()} == {torch.nn.Parameter}
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_a_torch_that_shards_no_whole_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh, policy, model = mesh_of(None), resolve('O5'), torch.nn.Linear(2, 2)
    model.seen = torch.nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)
    monkeypatch.setattr(fsdp_internals, 'TRAINS_ON_CPUS', True)
    monkeypatch.setattr(fsdp_internals, 'SHARDS_WHOLE_NUMBERS', False)
    with pytest.raises(
        AmpAttachError, match=r'the model \(Linear\) has a parameter of int64, which .* make it a buffer'
    ):
        shard([model], policy, Sharding.of(mesh, {}, policy))
    assert {type(p) for p in model.parameters()} == {torch.nn.Parameter}


@pytest.mark.parametrize('after', [None, True, False, 1])
def test_what_fully_shard_is_told(after: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing was said, torch decides: torch 2.6 takes no None."""
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(fsdp_internals, 'TRAINS_ON_CPUS', True)
    monkeypatch.setattr('torch.distributed.fsdp.fully_shard', lambda module, **words: told.append(words))
    policy = resolve('O5')
    shard([torch.nn.Linear(2, 2)], policy, Sharding.of(mesh_of(None), {'reshard_after_forward': after}, policy))
    (words,) = told
    assert words.get('reshard_after_forward', None) is after
    assert ('reshard_after_forward' in words) == (after is not None)
