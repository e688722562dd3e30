"""Ranks that all files of this folder share: to start processes takes longer than most scenarios."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import on_ranks
import pytest
import ranks
import torch


@pytest.fixture(scope='session')
def two_ranks(tmp_path_factory: pytest.TempPathFactory, device: torch.device) -> Iterator[ranks.Group]:
    """Started by the first scenario."""
    group = ranks.Group(tmp_path_factory.mktemp('ranks'), device)
    yield group
    group.close()


@pytest.fixture(scope='session')
def four_ranks(tmp_path_factory: pytest.TempPathFactory, device: torch.device) -> Iterator[ranks.Group]:
    """As :func:`two_ranks`."""
    group = ranks.Group(tmp_path_factory.mktemp('ranks'), device, world=4)
    yield group
    group.close()


@pytest.fixture(scope='session')
def ranks_of(
    tmp_path_factory: pytest.TempPathFactory, device: torch.device
) -> Iterator[Callable[[int], on_ranks.Group]]:
    """Gives the group of so many ranks, which the first test that asks for it starts."""
    groups: dict[int, on_ranks.Group] = {}

    def group(world: int) -> on_ranks.Group:
        if world not in groups:
            groups[world] = on_ranks.Group(tmp_path_factory.mktemp('ranks'), device, world)
        return groups[world]

    yield group
    for each in groups.values():
        each.close()
