"""Several processes: one model on all ranks, whatever DDP, the levels and the gradients do. Checked by exit codes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import ranks
import torch
from grid import but, grid, long

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason='this torch was built without torch.distributed'),
]


@pytest.mark.parametrize(
    'scenario',
    [
        'averaging',
        'joint',
        'accumulation',
        'overflows',
        'random_overflows',
        'hooks',
        'changes',
        'second_losses',
        'gan',
        'averages',
        'sync_batchnorm',
        'buffers',
        'flexible',
        'turns',
        'refusals',
        'late_wrapping',
        'disabled',
        'local_flags',
    ],
)
def test_scenario(scenario: str, two_ranks: ranks.Group, tmp_path: Path) -> None:
    """What each is about stands in ``scenarios/``."""
    two_ranks.succeed(tmp_path, scenario)


@pytest.mark.parametrize(('scenario', 'words'), [('random_overflows', ['fused']), ('local_flags', ['fused', 'split'])])
def test_decisions_on_the_device(scenario: str, words: list[str], two_ranks: ranks.Group, tmp_path: Path) -> None:
    """The same with an optimizer that nobody waits for."""
    two_ranks.succeed(tmp_path, scenario, *words)


@grid
def test_three_ranks_take_one_decision(tmp_path: Path, device: torch.device) -> None:
    ranks.succeed(tmp_path, 'random_overflows', device, world=3)


def test_groups_that_are_not_the_world(tmp_path: Path, device: torch.device) -> None:
    ranks.succeed(tmp_path, 'groups', device, world=3)


@pytest.mark.parametrize('scenario', but(['joint'], ['averaging', 'joint', 'changes'], long))
def test_the_checks_see_a_reducer_that_was_not_rebuilt(scenario: str, tmp_path: Path, device: torch.device) -> None:
    """The silent failure itself: without the rebuild, every rank keeps its own gradients."""
    ended = ranks.launch(tmp_path, 'planted', device, scenario)
    assert any(rank.code != 0 for rank in ended)
    said = ''.join(rank.said for rank in ended)
    # red for its own reason, and not because the plant itself broke
    assert 'differs between rank' in said or 'Expected to have finished reduction' in said, said[-2000:]


def test_the_line_about_a_skipped_step_comes_once(two_ranks: ranks.Group, tmp_path: Path) -> None:
    said = two_ranks.succeed(tmp_path, 'message')
    assert [text.count('optimizer step skipped') for text in said] == [2, 0]


def test_resume_on_one_two_and_three_ranks(two_ranks: ranks.Group, tmp_path: Path, device: torch.device) -> None:
    """A rank is killed in mid-run; what it leaves resumes on as many ranks bit for bit, and on others at all."""
    (tmp_path / 'whole').mkdir()
    two_ranks.succeed(tmp_path, 'train', 'whole')
    ended = ranks.launch(tmp_path, 'train', device, 'part', 'kill')
    # the killed one by its signal, and the one left alone by its own error
    assert ended[1].code == -9 and ended[0].code != 0, ended
    for world in (1, 3):
        shutil.copytree(tmp_path / 'part', tmp_path / f'part{world}')
    ranks.succeed(tmp_path, 'train', device, 'part', 'resume', world=2)
    whole, part = (torch.load(tmp_path / name / 'end.pt', weights_only=True) for name in ('whole', 'part'))
    assert whole.keys() == part.keys()
    for key, value in whole.items():
        assert value.equal(part[key]), key
    for world in (1, 3):
        said = ranks.succeed(tmp_path, 'train', device, f'part{world}', 'resume', world=world)
        assert 'saved by 2 processes' in said[0] or 'another number of processes' in said[0], said[0][-3000:]
        end = torch.load(tmp_path / f'part{world}' / 'end.pt', weights_only=True)
        assert end.keys() == whole.keys() and all(bool(value.isfinite().all()) for value in end.values())


@grid
def test_files_of_a_model_with_wrappers_inside(two_ranks: ranks.Group, tmp_path: Path, device: torch.device) -> None:
    """mmengine saves names with ``.module.`` there, and finds none of them again."""
    two_ranks.succeed(tmp_path, 'gan_files', 'whole')
    two_ranks.succeed(tmp_path, 'gan_files', 'part', 'half')
    shutil.copytree(tmp_path / 'part', tmp_path / 'one')
    (tmp_path / 'one' / 'last_checkpoint').write_text(str(tmp_path / 'one' / 'epoch_1.pth'))
    two_ranks.succeed(tmp_path, 'gan_files', 'part', 'resume')
    whole, part = (torch.load(tmp_path / name / 'end.pt', weights_only=True) for name in ('whole', 'part'))
    assert whole.keys() == part.keys()
    assert [key for key, value in whole.items() if not value.equal(part[key])] == []
    said = ranks.succeed(tmp_path, 'gan_files', device, 'one', 'resume', world=1)
    alone = torch.load(tmp_path / 'one' / 'end.pt', weights_only=True)
    assert alone.keys() == whole.keys(), said
    # other data, and still near: random weights would not be
    for key, value in whole.items():
        if value.is_floating_point() and 'running' not in key:
            torch.testing.assert_close(alone[key], value, rtol=0, atol=0.1)


@long
def test_a_group_of_ranks_begins_anew_after_a_failure(two_ranks: ranks.Group, tmp_path: Path) -> None:
    with pytest.raises(pytest.fail.Exception, match="KeyError: 'no such scenario'"):
        two_ranks.succeed(tmp_path, 'no such scenario', limit=30)
    assert two_ranks.succeed(tmp_path, 'disabled')
