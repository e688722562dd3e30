"""Checkpoints of shards in a folder: written by all ranks, read by as many, by fewer and by one."""

from __future__ import annotations

import os
import pickle
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from bits import differences
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import amp_wrapper
from amp_wrapper import AmpCheckpointError, CheckpointWriteError, amp
from amp_wrapper.checkpoint import folder, sharded
from scenarios.common import Here, scenario
from scenarios.fsdp import Net, assembled, data, mesh_of, our_fused


def make(here: Here) -> tuple[Any, Any]:
    net: Any = amp_wrapper.fully_shard(Net().to(here.device), 'O5', mesh=mesh_of(here))
    optimizer = our_fused(net.parameters())
    amp.initialize(net, optimizer, opt_level='O5', verbosity=0)
    return net, optimizer


def train(here: Here, net: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        x, y = data(here, step)
        with amp.scale_loss(F.cross_entropy(net(x), y), optimizer) as loss:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def states(net: Any, optimizer: Any) -> dict[str, Any]:
    return {
        'state_dict': net.state_dict(),
        'optimizer': optimizer.state_dict(),
        'amp': amp.state_dict(),
        'meta': {'iter': 2},
    }


def layout(net: Any) -> Any:
    """For the name of a saved tensor: the parameter that it belongs to."""
    parameters = list(net.parameters())
    named = dict(net.named_parameters())

    def like(name: str) -> Any:
        part, key = name.split('/', 1)
        if part == 'state_dict':
            return named.get(key)
        return parameters[int(key.split('/')[1])]

    return like


@scenario
def fsdp_folders(here: Here) -> None:
    """A resume from a folder is exact; the same folder gives whole tensors; written at once, or while the training goes on."""
    net, optimizer = make(here)
    train(here, net, optimizer, range(2))
    pending = sharded.begin(states(net, optimizer), here.folder / 'later')
    sharded_now = here.folder / 'now'
    # the training goes on, and what is written does not
    before = assembled(net)
    saved = {name: value.clone() for name, value in net.state_dict().items()}
    train(here, net, optimizer, range(2, 4))
    pending.finish()
    assert pending.is_written and sharded.is_folder(here.folder / 'later')
    after = assembled(net)
    again = make(here)
    found = sharded.load(here.folder / 'later', layout(again[0]))
    assert {type(found['state_dict'][name]) for name, _ in again[0].named_parameters()} == {DTensor}
    for name, value in saved.items():
        if isinstance(value, DTensor):
            assert torch.equal(found['state_dict'][name].to_local(), value.to_local())
    # buffers are those of rank 0
    own = {name: value for name, value in saved.items() if not isinstance(value, DTensor)}
    again[0].load_state_dict({**found['state_dict'], **own})
    again[1].load_state_dict(found['optimizer'])
    train(here, *again, range(2, 4))
    assert differences(assembled(again[0]), after) == []
    whole = sharded.load(here.folder / 'later')
    assert (
        differences(
            {name: whole['state_dict'][name] for name, _ in net.named_parameters()},
            {name: before[name].cpu() for name, _ in net.named_parameters()},
        )
        == []
    )
    assert whole['meta'] == {'iter': 2} and not any(isinstance(v, DTensor) for v in whole['state_dict'].values())
    sharded.save(states(net, optimizer), sharded_now)
    sharded.save({'state_dict': net.state_dict()}, sharded_now)
    assert list(sharded.load(sharded_now)) == ['state_dict']
    assert sorted(path.name for path in here.folder.iterdir() if 'amp' in path.name) == []


@scenario
def fsdp_damaged_folders(here: Here) -> None:
    """Damage of any file is named, nothing is run, and a failed write leaves the folder before it."""
    net, optimizer = make(here)
    train(here, net, optimizer, range(1))
    good = here.folder / 'good'
    sharded.save(states(net, optimizer), good)
    before = assembled(net)
    train(here, net, optimizer, range(1, 2))
    with (
        mock.patch.object(folder, 'look_at', side_effect=OSError('no space left'))
        if here.rank == 1
        else mock.MagicMock(),
        pytest.raises(CheckpointWriteError, match='rank 1: OSError: no space left'),
    ):
        sharded.save(states(net, optimizer), good)
    found = sharded.load(good)
    assert all(torch.equal(found['state_dict'][name], before[name].cpu()) for name, _ in net.named_parameters())
    dist.barrier()
    if here.rank == 0:
        files = sorted(path for path in good.rglob('*') if path.is_file())
        assert len(files) == 3 + here.world
        for path in files:
            content = path.read_bytes()
            for other in (content[: len(content) // 2], content[:-1] + bytes([content[-1] ^ 1]), None):
                os.unlink(path) if other is None else path.write_bytes(other)
                with pytest.raises(AmpCheckpointError, match='good'):
                    sharded.load(good)
            path.write_bytes(content)
        sharded.verify(good)
        # dead between the two renames
        good.rename(good.with_name('good.amp-old'))
        assert sharded.is_folder(good) and list(sharded.load(good)) == list(found)
        good.with_name('good.amp-old').rename(good)

        class Malicious:
            def __reduce__(self) -> Any:
                return os.mkdir, (str(here.folder / 'ran'),)

        metadata = good / 'tensors' / '.metadata'
        metadata.write_bytes(pickle.dumps(Malicious()))
        with pytest.raises(AmpCheckpointError, match=r'asks for posix\.mkdir'):
            sharded.load(good, check=False)
        assert not (here.folder / 'ran').exists()
    dist.barrier()
    with pytest.raises(AmpCheckpointError, match='no complete checkpoint'):
        sharded.load(here.folder / 'nothing')
