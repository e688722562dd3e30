"""Memory that tensors share, have lost, or have not got of their own yet; and what a call may not touch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ops_models import REFERENCE, without_compiled, zero

from amp_wrapper import ops

FACES = {'front': ops, 'raw': torch.ops.amp_wrapper, 'reference': REFERENCE}


@pytest.fixture(params=list(FACES))
def where(request: pytest.FixtureRequest, device: torch.device) -> Any:
    if request.param != 'reference' and without_compiled(device):
        pytest.skip(without_compiled(device))
    return FACES[request.param]


@pytest.mark.parametrize('name', ['scale', 'flag', 'flag of what is read'])
def test_a_scalar_inside_a_list_is_refused(name: str, device: torch.device) -> None:
    """It would change while it is read: op and reference gave different numbers."""
    base = torch.full((4,), 3.0, device=device)
    sources, targets = (
        [torch.ones(2, device=device), torch.ones(3, device=device)],
        [torch.zeros(2, device=device), base[:3]],
    )
    scale, found = zero(device, 2.0), zero(device)
    if name == 'scale':
        scale = base[1]
    elif name == 'flag':
        found = base[2]
    else:
        sources[1] = base[:3].clone()
        found = sources[1][0]
    kept = [tensor.clone() for tensor in (*sources, *targets)]
    calls = [face.multi_tensor_scale for face in FACES.values()]
    messages = set()
    for call in calls:
        with pytest.raises(ValueError, match='share memory: give each memory of its own') as caught:
            call(sources, targets, scale, found)
        messages.add(str(caught.value))
        assert all(torch.equal(a, b) for a, b in zip(kept, (*sources, *targets)))
    assert len(messages) == 1 and '[1]' in messages.pop()


def test_neighbours_in_one_buffer_are_no_overlap(where: Any, device: torch.device) -> None:
    """DDP hands out gradients as views of one bucket, each beginning where the one before ends."""
    bucket = torch.arange(8.0, device=device)
    sources, targets = [bucket[:2], bucket[2:4]], [bucket[4:7], bucket[7:]]
    where.multi_tensor_scale([bucket[:3], bucket[3:4]], targets, zero(device, 2.0), None)
    assert bucket.tolist() == [0.0, 1.0, 2.0, 3.0, 0.0, 2.0, 4.0, 6.0]
    where.multi_tensor_scale(sources, sources, zero(device, 3.0), None)
    assert bucket.tolist() == [0.0, 3.0, 6.0, 9.0, 0.0, 2.0, 4.0, 6.0]


def test_lazy_clones_are_tensors_of_their_own(where: Any, device: torch.device) -> None:
    """Until somebody writes, they share the memory of their origin."""
    origin = torch.ones(3, device=device)
    targets = [torch._lazy_clone(origin), torch._lazy_clone(origin)]
    sources = [torch.full((3,), 5.0, device=device), torch._lazy_clone(origin)]
    where.multi_tensor_scale(sources, targets, zero(device, 2.0), None)
    assert [tensor.tolist() for tensor in (origin, *targets)] == [[1.0] * 3, [10.0] * 3, [2.0] * 3]


@pytest.mark.parametrize('lost', ['source', 'target', 'scale'])
def test_a_freed_storage_is_refused(lost: str, where: Any, device: torch.device) -> None:
    """Sharded training frees storages between uses; writing there ends the process."""
    sources, targets = [torch.ones(2, device=device), torch.ones(4, device=device)[1:]], []
    targets = [torch.zeros(2, device=device), torch.zeros(4, device=device)[1:]]
    scale = zero(device, 2.0)
    tensor = {'source': sources[1], 'target': targets[1], 'scale': scale}[lost]
    tensor.untyped_storage().resize_(0)
    label = {'source': r'sources\[1\]', 'target': r'targets\[1\]', 'scale': 'scale'}[lost]
    with pytest.raises(ValueError, match=f'^{label} has no memory: its storage was freed'):
        where.multi_tensor_scale(sources, targets, scale, None)
    assert targets[0].tolist() == [0.0, 0.0]


def test_a_flag_is_never_lowered(where: Any, device: torch.device) -> None:
    found = zero(device, 2.0)
    where.multi_tensor_isnonfinite([torch.tensor([torch.inf], device=device)], found)
    assert found.item() == 2.0


def test_empty_lists_count_no_version(where: Any, device: torch.device) -> None:
    found = zero(device)
    version = found._version
    where.multi_tensor_scale([], [], None, found)
    where.multi_tensor_isnonfinite([], found)
    assert found._version == version


@pytest.mark.parametrize('face', ['front', 'reference'])
def test_the_state_of_a_scale_lives_on_one_device(face: str, device: torch.device) -> None:
    scale, tracker = zero(device, 4.0), torch.zeros((), dtype=torch.int32, device=device)
    elsewhere = zero(torch.device('meta'))
    with pytest.raises(ValueError, match=r'^found_inf is on meta and scale on \w+(:0)?: they belong on one device'):
        FACES[face].update_scale(scale, tracker, tracker.clone(), elsewhere, 2.0, 0.5, 10, 1)
    assert scale.item() == 4.0
