"""Ranks that all files of this folder share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from missing import skip_without_fsdp
from on_ranks import Group


@pytest.fixture(scope='session')
def ranks_of(tmp_path_factory: pytest.TempPathFactory, device: torch.device) -> Iterator[Callable[[int], Group]]:
    """Gives the group of so many ranks, which the first test that asks for it starts."""
    groups: dict[int, Group] = {}

    def group(world: int) -> Group:
        if world not in groups:
            groups[world] = Group(tmp_path_factory.mktemp('ranks'), device, world)
        return groups[world]

    yield group
    for each in groups.values():
        each.close()


@pytest.fixture(autouse=True)
def _skip_old(request: pytest.FixtureRequest, device: torch.device) -> None:
    if 'shard' in request.node.nodeid and 'sharded_optimizers' not in request.node.nodeid:
        skip_without_fsdp(device.type)
