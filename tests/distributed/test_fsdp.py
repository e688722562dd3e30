"""The levels over FSDP2 on two and four ranks. Checked by exit codes; what each is about stands in ``scenarios/fsdp.py``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import ranks
import torch

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason='this torch was built without torch.distributed'),
]
_OLD = tuple(map(int, torch.__version__.split('.')[:2])) < (2, 7)


@pytest.fixture(autouse=True)
def _skip_old(device: torch.device) -> None:
    if _OLD and device.type == 'cpu':
        pytest.skip('fully_shard of torch 2.6 needs a GPU')


@pytest.fixture(scope='module')
def two_ranks(device: torch.device, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ranks.Group]:
    group = ranks.Group(tmp_path_factory.mktemp('ranks'), device)
    yield group
    group.close()


@pytest.mark.parametrize(
    'scenario',
    [
        'fsdp_bits',
        'fsdp_recomputed',
        'fsdp_16bit_shards',
        'fsdp_types',
        'fsdp_clipping',
        'fsdp_overflow',
        'fsdp_raises_on_overflow',
        'fsdp_accumulation',
        'fsdp_reduction_in_fp32',
        'fsdp_collectives',
        'fsdp_refusals',
        'fsdp_blocks',
        'fsdp_from_meta',
    ],
)
def test_two_ranks(two_ranks: ranks.Group, scenario: str, tmp_path: Path) -> None:
    two_ranks.succeed(tmp_path, scenario)


@pytest.mark.parametrize('scenario', ['fsdp_two_by_two', 'fsdp_overflow'])
def test_four_ranks(scenario: str, device: torch.device, tmp_path: Path) -> None:
    ranks.succeed(tmp_path, scenario, device, world=4)
