"""The levels over FSDP2 on two and four ranks. Checked by exit codes; what each is about stands in ``scenarios/fsdp*.py``."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from bits import differences
from fsdp import skip_without_fsdp
from grid import grid, long

from amp_wrapper.checkpoint import sharded

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason='this torch was built without torch.distributed'),
]


@pytest.fixture(autouse=True)
def _skip_old(device: torch.device) -> None:
    skip_without_fsdp(device.type)


@pytest.mark.parametrize(
    'scenario',
    [
        'fsdp_recomputed',
        'fsdp_16bit_shards',
        'fsdp_types',
        'fsdp_raises_on_overflow',
        'fsdp_reduction_in_fp32',
        'fsdp_collectives',
        'fsdp_bytes',
        'fsdp_refusals',
        'fsdp_blocks',
        'fsdp_from_meta',
        'fsdp_meshes_without_names',
        'fsdp_two_wrappers',
        'fsdp_nan_and_the_largest',
        'fsdp_late_errors_come_early',
        'fsdp_evaluation_before_a_step',
        'fsdp_begins_alike',
        'fsdp_other_calls',
        'fsdp_folders',
        'fsdp_damaged_folders',
        'fsdp_windows_of_others',
        'fsdp_averages',
        'fsdp_offload',
        'fsdp_compiled',
        'fsdp_compiled_runs',
        'fsdp_saving_kinds',
        'fsdp_saving_fails',
        'fsdp_saving_with_hooks',
        'fsdp_saving_refusals',
        'fsdp_saving_preempted',
        'fsdp_versions_of_modules',
        'fsdp_failed_saving_deletes_nothing',
        'fsdp_saving_to_several_folders',
        'fsdp_saving_on_a_full_disk',
        'fsdp_damage_that_one_rank_sees',
        'fsdp_files_beside_shards',
        'fsdp_a_training_after_another',
    ],
)
def test_two_ranks(two_ranks: ranks.Group, scenario: str, tmp_path: Path) -> None:
    two_ranks.succeed(tmp_path, scenario)


@pytest.mark.parametrize('words', [('quick',), pytest.param((), marks=long)], ids=['quick', 'all'])
@pytest.mark.parametrize(
    'scenario',
    [
        'fsdp_bits',
        'fsdp_clipping',
        'fsdp_overflow',
        'fsdp_windows',
        'fsdp_accumulation',
        'fsdp_types_of_gradients',
        'fsdp_other_passes',
        'fsdp_gradients_apart',
        'fsdp_mixed_types',
    ],
)
def test_two_ranks_at_each_level(two_ranks: ranks.Group, scenario: str, words: tuple[str, ...], tmp_path: Path) -> None:
    two_ranks.succeed(tmp_path, scenario, *words)


@pytest.mark.parametrize(
    ('scenario', 'words'),
    [
        ('fsdp_two_by_two', ('quick',)),
        pytest.param('fsdp_two_by_two', (), marks=long),
        ('fsdp_overflow', ('quick',)),
        ('fsdp_tensor_parallel_folders', ()),
    ],
)
def test_four_ranks(four_ranks: ranks.Group, scenario: str, words: tuple[str, ...], tmp_path: Path) -> None:
    four_ranks.succeed(tmp_path, scenario, *words)


def _last(folder: Path) -> dict[str, Any]:
    path = (folder / 'last_checkpoint').read_text()
    if sharded.is_folder(path):
        found: dict[str, Any] = sharded.load(path)
    else:
        found = torch.load(path, weights_only=True, map_location='cpu')
    return found


@pytest.mark.parametrize(
    'level', [pytest.param('O2', id='O2'), *(pytest.param(each, marks=grid) for each in ('O0', 'O1', 'O4', 'O5'))]
)
def test_runs_of_mmengine(two_ranks: ranks.Group, level: str, tmp_path: Path) -> None:
    """The file at the end is that of DDP, bit for bit: weights, moments, averages, random states, the best file."""
    kind = 'FusedAdamW'
    for wrapper in ('ddp', 'fsdp'):
        two_ranks.succeed(tmp_path, 'fsdp_train', wrapper, wrapper, level, kind, 'one')
    sharded, whole = _last(tmp_path / 'fsdp'), _last(tmp_path / 'ddp')
    for part in ('state_dict', 'ema_state_dict', 'optimizer', 'param_schedulers', 'exact_resume'):
        assert sharded.keys() == whole.keys()
        assert differences(sharded[part], whole[part]) == [], part
    best = [sorted(path.name for path in (tmp_path / each).glob('best*')) for each in ('fsdp', 'ddp')]
    assert best[0] == best[1] != []


@pytest.mark.parametrize(
    ('wrapper', 'level', 'kind', 'how'),
    [
        ('fsdp', 'O5', 'FusedAdamW', 'kill'),
        ('async', 'O2', 'FusedAdamW', 'kill-writing'),
        pytest.param('shards', 'O4', 'AdamW', 'kill-writing', marks=grid),
        pytest.param('async', 'O5', 'FusedSGD', 'kill', marks=long),
        *(
            pytest.param(wrapper, level, kind, 'kill', marks=mark)
            for wrapper, level, kind, mark in (
                ('apart', 'O2', 'AdamW', grid),
                ('fsdp', 'O1', 'SGD', long),
                ('apart', 'O4', 'FusedSGD', long),
                ('fsdp', 'O3', 'FusedAdam', long),
                ('fsdp', 'O0', 'AdamW', long),
                ('apart', 'O5', 'SGD', long),
            )
        ),
    ],
)
def test_resume_of_a_sharded_run(
    two_ranks: ranks.Group, wrapper: str, level: str, kind: str, how: str, tmp_path: Path, device: torch.device
) -> None:
    """A rank is killed. What it leaves resumes on as many ranks bit for bit, and in DDP; by one process, by three."""
    two_ranks.succeed(tmp_path, 'fsdp_train', 'whole', wrapper, level, kind)
    ended = ranks.launch(tmp_path, 'fsdp_train', device, 'part', wrapper, level, kind, how)
    assert ended[1].code == -9 and ended[0].code != 0, ended
    others = [('ddp', 2, 'ddp')]
    if how == 'kill-writing' or wrapper == 'fsdp':
        others += [('alone', 1, wrapper)] if level in ('O2', 'O4', 'O5') else [('three', 3, wrapper)]
    for name, *_ in others:
        shutil.copytree(tmp_path / 'part', tmp_path / name)
    if (level, kind) == ('O5', 'FusedAdamW'):
        # in new processes, too
        ranks.succeed(tmp_path, 'fsdp_train', device, 'part', wrapper, level, kind, 'resume')
    else:
        two_ranks.succeed(tmp_path, 'fsdp_train', 'part', wrapper, level, kind, 'resume')
    whole, part = _last(tmp_path / 'whole'), _last(tmp_path / 'part')
    for key in ('state_dict', 'ema_state_dict', 'optimizer', 'param_schedulers', 'exact_resume'):
        assert differences(part[key], whole[key]) == [], key
    for name, world, other in others:
        if world == 2:
            two_ranks.succeed(tmp_path, 'fsdp_train', name, other, level, kind, 'resume')
        else:
            ranks.succeed(tmp_path, 'fsdp_train', device, name, other, level, kind, 'resume', world=world)
        found = _last(tmp_path / name)
        assert {k: v.shape for k, v in found['state_dict'].items()} == {
            k: v.shape for k, v in whole['state_dict'].items()
        }


@pytest.mark.parametrize('words', [('quick',), pytest.param((), marks=long)], ids=['quick', 'all'])
def test_resume_from_shards(two_ranks: ranks.Group, words: tuple[str, ...], tmp_path: Path) -> None:
    two_ranks.succeed(tmp_path, 'fsdp_resume_grid', *words, limit=900)


def test_other_ways_through_mmengine(two_ranks: ranks.Group, tmp_path: Path) -> None:
    two_ranks.succeed(tmp_path, 'fsdp_flexible')
    two_ranks.succeed(tmp_path, 'fsdp_refused_runs')


@pytest.mark.parametrize('words', [('quick',), pytest.param((), marks=long)], ids=['quick', 'all'])
def test_zero(two_ranks: ranks.Group, words: tuple[str, ...], tmp_path: Path) -> None:
    two_ranks.succeed(tmp_path, 'zero', *words)
    two_ranks.succeed(tmp_path, 'zero_refusals')


@grid
def test_runs_of_mmengine_with_zero(two_ranks: ranks.Group, tmp_path: Path, device: torch.device) -> None:
    """The file at the end is that of the optimizer inside; a killed run resumes exactly, also without it."""
    words = ('ddp', 'O5', 'AdamW')
    two_ranks.succeed(tmp_path, 'fsdp_train', 'plain', *words)
    two_ranks.succeed(tmp_path, 'fsdp_train', 'whole', *words, 'zero')
    ranks.launch(tmp_path, 'fsdp_train', device, 'part', *words, 'zero', 'kill')
    shutil.copytree(tmp_path / 'part', tmp_path / 'without')
    two_ranks.succeed(tmp_path, 'fsdp_train', 'part', *words, 'zero', 'resume')
    two_ranks.succeed(tmp_path, 'fsdp_train', 'without', *words, 'resume')
    plain = _last(tmp_path / 'plain')
    for folder in ('whole', 'part', 'without'):
        found = _last(tmp_path / folder)
        for key in ('state_dict', 'ema_state_dict', 'exact_resume'):
            assert differences(found[key], plain[key]) == [], (folder, key)
        assert differences(found['optimizer']['state'], plain['optimizer']['state']) == [], folder
