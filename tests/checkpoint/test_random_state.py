"""The states of the random generators: there and back, and checked before they are used."""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from amp_wrapper import AmpCheckpointError
from amp_wrapper.checkpoint import random_state


def draw(device: torch.device) -> list[Any]:
    values = [random.random(), random.gauss(0, 1), float(np.random.rand()), float(np.random.randn())]
    return [*values, float(torch.rand(())), float(torch.rand((), device=device))]


def test_there_and_back_through_a_file(device: torch.device) -> None:
    extra = torch.Generator().manual_seed(5)
    # a half-used pair of normal numbers belongs to the state, too
    random.gauss(0, 1)
    np.random.randn()
    file = io.BytesIO()
    torch.save(random_state.capture([extra]), file)
    expected = [*draw(device), float(torch.rand((), generator=extra))]
    draw(device)
    file.seek(0)
    states = torch.load(file, weights_only=True)
    random_state.check(states, 'states')
    other = torch.Generator()
    assert random_state.restore(states, [other]) == []
    assert [*draw(device), float(torch.rand((), generator=other))] == expected


def test_what_cannot_be_set_is_told() -> None:
    states = random_state.capture([torch.Generator()])
    assert any('generators of the data' in note for note in random_state.restore(states))
    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    states = random_state.capture()
    states['cuda'] = [torch.zeros(16, dtype=torch.uint8)] * (here + 2)
    if not here:
        assert any('2 GPU generators' in note for note in random_state.restore(states))


WRONG: list[tuple[Callable[[Any], Any], str]] = [
    (lambda s: None, r'states must be a dict'),
    (lambda s: s.pop('python') and s, r"states\['python'\] must be a dict"),
    (lambda s: s['python'].update(version=9) or s, r"\['python'\]\['version'\] must be 3"),
    (
        lambda s: s['python'].update(state=torch.zeros(3, dtype=torch.int64)) or s,
        r"\['python'\]\['state'\] must be 625 words",
    ),
    (lambda s: s['python']['state'].__setitem__(0, -1) or s, r"\['python'\]\['state'\] must be 625 words"),
    (lambda s: s['python']['state'].__setitem__(-1, 700) or s, r"\['state'\]\[-1\] must be 0 to 624"),
    (lambda s: s['python'].update(gauss='x') or s, r"\['python'\]\['gauss'\]"),
    (lambda s: s['numpy'].update(kind='PCG64') or s, r"\['numpy'\]\['kind'\] must be 'MT19937'"),
    (lambda s: s['numpy'].update(position=-1) or s, r"\['numpy'\]\['position'\]"),
    (lambda s: s['numpy'].update(state=s['numpy']['state'].float()) or s, r"\['numpy'\]\['state'\] must be 624 words"),
    (lambda s: s.update(torch=torch.zeros(9, dtype=torch.uint8)) or s, r"\['torch'\] is no state of a torch generator"),
    (lambda s: s.update(torch=torch.zeros(9)) or s, r"\['torch'\] must be a vector of bytes"),
    (lambda s: s.update(cuda={}) or s, r"\['cuda'\] must be a list"),
    (lambda s: s.update(generators=[1]) or s, r"\['generators'\]\[0\] must be a vector of bytes"),
]


@pytest.mark.parametrize(('change', 'words'), WRONG)
def test_damage_is_named(change: Callable[[Any], Any], words: str) -> None:
    states = change(random_state.capture())
    with pytest.raises(AmpCheckpointError, match=words):
        random_state.check(states, 'states')
