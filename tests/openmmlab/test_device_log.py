"""What is said of overflows, and values that come from the device only when they are read."""

from __future__ import annotations

import copy
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from bits import differences
from mmengine.logging import HistoryBuffer, MessageHub
from torch.utils._python_dispatch import TorchDispatchMode
from toy_wrapper import SGD, net, one_step, wrap

from amp_wrapper import OverflowStreakError
from amp_wrapper.openmmlab.device_log import DeviceLog

# -- overflow ----------------------------------------------------------------------------------------------------------


def test_overflow_that_never_ends_names_parameters() -> None:
    model = net()
    wrapper = wrap(model, opt_level='O2', max_consecutive_skips=4, verbosity=0)
    one_step(model, wrapper)
    before = copy.deepcopy((model.state_dict(), wrapper.optimizer.state_dict()))
    for _ in range(3):
        one_step(model, wrapper, factor=float('nan'))
    with pytest.raises(OverflowStreakError) as error:
        one_step(model, wrapper, factor=float('nan'))
    assert '4 optimizer steps in a row' in str(error.value)
    assert '0.weight' in str(error.value)
    after = model.state_dict(), wrapper.optimizer.state_dict()
    # the batch statistics of BatchNorm belong to the forward pass
    for state in (before[0], after[0]):
        for key in [key for key in state if 'running' in key or 'tracked' in key]:
            del state[key]
    assert differences(before, after) == []


def test_overflow_messages_are_rate_limited_and_can_be_silenced() -> None:
    for verbosity, expected in ((1, 5 + 2), (0, 0)):
        model = net()
        wrapper = wrap(model, opt_level='O2', verbosity=verbosity, max_consecutive_skips=None)
        with toy.captured_log() as lines:
            for _ in range(20):
                one_step(model, wrapper, factor=float('inf'))
        assert len([line for line in lines if 'skipped' in line]) == expected


# -- logging -----------------------------------------------------------------------------------------------------------


class _NoHostRead(TorchDispatchMode):
    """Counts what makes the host wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self.reads += 1
        return func(*args, **(kwargs or {}))


def test_log_values_come_over_when_they_are_read() -> None:
    MessageHub.get_instance('deferred')
    model = net()
    wrapper = wrap(model, opt_level='O2', clip_grad=dict(max_norm=1.0))
    log = wrapper.device_log
    for _ in range(6):
        one_step(model, wrapper)
    one_step(model, wrapper, factor=float('inf'))
    assert log.transfers == 0
    hub = wrapper.message_hub
    assert len(hub.get_scalar('train/grad_norm').data[0]) == 6
    assert log.transfers == 1
    assert hub.get_scalar('train/amp_scale').data[0].tolist() == [2.0**16] * 6 + [2.0**15]
    assert hub.get_scalar('train/amp_skipped').current() == 1.0
    assert log.transfers == 1


def late(name: str) -> tuple[MessageHub, DeviceLog]:
    """A hub, and a log of which one name has a number, and another has none."""
    hub = MessageHub.get_instance(name)
    log = DeviceLog(hub)
    log.update(torch.tensor([3.0, float('nan')]), {'train/here': 0, 'train/nothing': 1})
    log.update(torch.tensor([4.0, float('nan')]), {'train/here': 0, 'train/nothing': 1})
    assert log.transfers == 0
    return hub, log


@pytest.mark.parametrize(
    'look',
    [
        lambda hub: list(hub.log_scalars),
        lambda hub: list(hub.log_scalars.items()),
        lambda hub: list(hub.log_scalars.keys()),
        lambda hub: list(hub.log_scalars.values()),
        lambda hub: len(hub.log_scalars),
        lambda hub: hub.log_scalars['train/here'],
        lambda hub: hub.log_scalars.get('train/here'),
        lambda hub: hub.get_scalar('train/here'),
        lambda hub: 'train/nothing' in hub.log_scalars,
        lambda hub: hub.state_dict(),
        lambda hub: copy.deepcopy(hub.log_scalars),
    ],
    ids=range(11),
)
def test_a_new_name_waits_until_somebody_looks(look: Any, request: pytest.FixtureRequest) -> None:
    hub, log = late(request.node.name)
    # other names cost nothing
    assert 'train/else' not in hub.log_scalars
    assert log.transfers == 0
    look(hub)
    assert log.transfers == 1
    assert list(hub.log_scalars) == ['train/here']
    assert hub.get_scalar('train/here').data[0].tolist() == [3.0, 4.0]
    with pytest.raises(KeyError):
        hub.get_scalar('train/nothing')
    # a first number after all
    log.update(torch.tensor([5.0, 6.0]), {'train/here': 0, 'train/nothing': 1})
    assert hub.log_scalars['train/nothing'].current() == 6.0
    assert log.transfers == 2


def test_a_resume_while_a_name_waits() -> None:
    hub, log = late('resumed meanwhile')
    hub.load_state_dict(
        dict(log_scalars={'train/here': HistoryBuffer([1.0], [1])}, runtime_info={}, resumed_keys={'train/here': True})
    )
    log.update(torch.tensor([5.0]), {'train/here': 0})
    assert hub.get_scalar('train/here').data[0].tolist() == [1.0, 3.0, 4.0, 5.0]


def test_copies_of_all_names_are_plain() -> None:
    hub, _ = late('copied')
    assert type(copy.deepcopy(hub.log_scalars)) is OrderedDict
    assert set(hub.log_scalars.copy()) == {'train/here'}
    assert type(copy.deepcopy(hub.log_scalars)['train/here']) is HistoryBuffer


def test_deferred_buffers_are_saved_as_mmengines_own(tmp_path: Path) -> None:
    toy.run(tmp_path, dict(type='AmpOptimWrapper', opt_level='O2', optimizer=SGD, clip_grad=dict(max_norm=1.0)))
    data = (tmp_path / 'epoch_2.pth').read_bytes()
    assert b'amp_wrapper' not in data
    saved = toy.checkpoint(tmp_path)['message_hub']['log_scalars']['train/grad_norm']
    assert type(saved).__module__ == 'mmengine.logging.history_buffer'
    skipped = toy.checkpoint(tmp_path)['message_hub']['log_scalars']['train/amp_skipped'].current()
    # a skipped step logs no norm: it would be infinite
    assert len(saved.data[0]) == 14 - skipped
    assert bool(torch.tensor(saved.data[0]).isfinite().all())


@pytest.mark.parametrize(('words', 'reads'), [(dict(opt_level='O2'), 4), (dict(opt_level='O0'), 0)])
def test_host_reads_of_a_step(words: dict[str, Any], reads: int) -> None:
    """One transfer where gradients are checked (``tolist`` of four numbers), none at O0."""
    model = net()
    wrapper = wrap(model, **words)
    one_step(model, wrapper)
    with wrapper.optim_context(model):
        loss = model(torch.randn(6, 4)).square().mean()
    wrapper.backward(loss)
    with _NoHostRead() as counted:
        wrapper.step()
        wrapper.zero_grad()
    assert counted.reads <= reads
