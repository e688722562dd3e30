"""``amp.monitor`` and the accessors of scripts."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bits import differences
from torch import Tensor, nn
from toy_overflow import Deep, Fault, ScaleGradient, batches, in_range_of_fp32, nan_input, square

from amp_wrapper import AmpConfigError, AmpUsageError, FusedSGD, OverflowStreakError, amp
from amp_wrapper.diagnostics.measured_numbers import NUMBERS

ALL = {*NUMBERS, 'amp_scale', 'amp_skipped'}


def start(level: str = 'O2', kind: Any = torch.optim.SGD, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Deep()
    return amp.initialize(model, kind(model.parameters(), lr=0.01), opt_level=level, verbosity=0, **options)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    with amp.scale_loss(square(model(x)), optimizer) as scaled:
        scaled.backward()
    optimizer.step()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_numbers_come_by_themselves(tmp_path: Path) -> None:
    model, optimizer = start()
    heard: list[tuple[int, dict[str, float]]] = []
    folder = tmp_path / 'new' / 'run'
    watch = amp.monitor(
        optimizer, 4, folder=folder, log=lambda at, numbers: heard.append((at, numbers)), ranges_interval=8
    )
    for x in batches(10):
        step(model, optimizer, x)
    assert [at for at, _ in heard] == [1, 4, 8]
    assert all(set(numbers) == ALL for _, numbers in heard)
    assert watch.read() == heard[-1][1]
    watch.close()
    written = lines(folder / 'amp_monitor.jsonl')
    assert [line.pop('iteration') for line in written] == [1, 4, 8]
    assert written == [numbers for _, numbers in heard]
    assert [line['iteration'] for line in lines(folder / 'amp_ranges.jsonl')] == [1, 8]
    step(model, optimizer, batches(1)[0])
    assert len(heard) == 3


@pytest.mark.parametrize('kind', [torch.optim.SGD, FusedSGD])
def test_skipped_steps_are_examined(kind: Any, tmp_path: Path) -> None:
    """The first one too, while the host knows of skips late or early."""
    model, optimizer = start(kind=kind)
    before = len(model._forward_pre_hooks)
    with amp.monitor(optimizer, folder=tmp_path) as watch:
        for index, x in enumerate(batches(8)):
            step(model, optimizer, nan_input(x) if index in (2, 3, 4, 5) else x)
        hooks = len(model._forward_pre_hooks) - 1
    assert hooks == before
    assert [each.cause for each in watch.diagnoses] == ['input'] * 4
    pages = sorted((tmp_path / 'amp_diagnosis').glob('*.html'))
    assert len(pages) == len(watch.diagnoses)
    data = json.loads(pages[0].with_suffix('.json').read_text())
    assert (data['format'], data['cause'], data['iteration']) == (1, 'input', int(pages[0].stem.removeprefix('iter_')))
    assert 'input 0' in pages[0].read_text()
    assert len(model._forward_pre_hooks) == hooks


def test_off_means_nothing(tmp_path: Path) -> None:
    model, optimizer = start()
    parts = amp.session.session_of(optimizer).engines[0].parts  # type: ignore[attr-defined]
    before = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    with amp.monitor(optimizer, folder=tmp_path, diagnose_overflow=False) as watch:
        for x in batches(3):
            step(model, optimizer, nan_input(x))
        assert before == [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    assert watch.diagnoses == []
    assert parts.observers == []
    assert not (tmp_path / 'amp_diagnosis').exists()


@pytest.mark.parametrize('level', ['O1', 'O2', 'O5'])
def test_training_goes_on_as_without(level: str, tmp_path: Path) -> None:
    """Weights, optimizer, scales and random numbers, bit for bit, through skipped steps that are examined."""

    class Noisy(Deep):
        def forward(self, x: Tensor) -> Any:
            return super().forward(nn.functional.dropout(x, 0.3))

    runs = []
    for watched in (False, True):
        torch.manual_seed(0)
        model = Noisy()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-4)
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        watch = amp.monitor(optimizer, 2, folder=tmp_path, diagnose_overflow=True) if watched else None
        for index, x in enumerate(batches(6)):
            step(model, optimizer, nan_input(x) if index in (1, 3) else x)
        runs.append([model.state_dict(), optimizer.state_dict(), amp.state_dict(), torch.randn(3)])
        if watch is not None:
            assert [each.cause for each in watch.diagnoses] == ['input', 'input']
            watch.close()
    assert differences(runs[0], runs[1]) == []


def test_a_report_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    blocked = tmp_path / 'file'
    blocked.write_text('')
    model, optimizer = start()
    with amp.monitor(optimizer, 1, folder=blocked, diagnose_overflow=True) as watch:
        for x in batches(3):
            step(model, optimizer, nan_input(x))
    assert len(watch.diagnoses) == 3
    assert amp.skipped_steps(optimizer) == 3


def test_a_diagnosis_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise ValueError('broken')

    monkeypatch.setattr('amp_wrapper.diagnostics.overflow.diagnose', fail)
    model, optimizer = start()
    with amp.monitor(optimizer, diagnose_overflow=True) as watch:
        for x in batches(2):
            step(model, optimizer, nan_input(x))
    assert watch.diagnoses == []
    assert amp.skipped_steps(optimizer) == 2


@pytest.mark.parametrize('mode', [True, 'after_skip'])
def test_the_streak_error_ends_with_the_cause(mode: Any, tmp_path: Path) -> None:
    model = Deep()
    model.blocks[2].place = Fault(in_range_of_fp32)
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.01), opt_level='O2', verbosity=0)
    amp.session.session_of(optimizer).engines[0].parts.monitor._limit = 4  # type: ignore[attr-defined]
    watch = amp.monitor(optimizer, folder=tmp_path, diagnose_overflow=mode)
    with pytest.raises(OverflowStreakError) as caught:
        [step(model, optimizer, x) for x in batches(6)]
    text = str(caught.value)
    assert 'blocks.2.place (Fault)' in text
    assert "keep_fp32=['blocks.2.place']" in text
    assert str(tmp_path / 'amp_diagnosis') in text
    watch.close()


def test_at_most_so_many_reports() -> None:
    model, optimizer = start()
    with amp.monitor(optimizer, diagnose_overflow=True, max_reports=2) as watch:
        for x in batches(6):
            step(model, optimizer, nan_input(x))
    assert len(watch.diagnoses) == 2


def test_a_model_whose_parts_are_called() -> None:
    """Nobody calls the model as a whole, as in a training of two networks: its children are recorded from step two on."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.networks = nn.ModuleDict({'first': Deep(), 'second': nn.Linear(2, 2)})

    torch.manual_seed(0)
    model = Two()
    model.networks['first'].blocks[1].place = Fault(in_range_of_fp32)
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.01), opt_level='O2', verbosity=0)
    with amp.monitor(optimizer, diagnose_overflow=True) as watch:
        for x in batches(3):
            with amp.scale_loss(square(model.networks['second'](model.networks['first'](x))), optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [(each.cause, each.module) for each in watch.diagnoses] == [
        ('forward_range', 'networks.first.blocks.1.place')
    ] * 2


def test_the_batch_is_named() -> None:
    """Whatever names its samples: dicts, and objects with ``metainfo``."""

    class Sample:
        metainfo = {'img_path': 'b.png', 'img_id': 7}

    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 2)

        def forward(self, batch: dict[str, Any]) -> Tensor:
            return self.fc(batch['x'])

    model = Takes()
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.01), opt_level='O5', verbosity=0)
    batch = {'x': nan_input(batches(1)[0]), 'idx': torch.tensor([3, 5]), 'more': [{'path': 'a.png'}, Sample()]}
    with amp.monitor(optimizer, diagnose_overflow=True) as watch:
        loss = model(batch).float().square().mean()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    assert watch.diagnoses[0].samples == {'idx': ['3', '5'], 'path': ['a.png'], 'img_path': ['b.png'], 'img_id': ['7']}


def test_several_models() -> None:
    """A generator and a discriminator, initialised together: the one with the fault is named by its place in the list."""
    torch.manual_seed(0)
    first, second = Deep(), nn.Linear(2, 2)
    first.blocks[1].place = Fault(in_range_of_fp32)
    models, optimizers = amp.initialize(
        [second, first],
        [torch.optim.SGD(second.parameters(), lr=0.01), torch.optim.SGD(first.parameters(), lr=0.01)],
        opt_level='O2',
        verbosity=0,
    )
    with amp.monitor(optimizers[1], diagnose_overflow=True) as watch:
        loss = square(models[0](models[1](batches(1)[0])))
        with amp.scale_loss(loss, list(optimizers)) as scaled:
            scaled.backward()
        for optimizer in optimizers:
            optimizer.step()
    (found,) = watch.diagnoses
    assert (found.cause, found.module) == ('forward_range', 'models[1].blocks.1.place')
    # the name that keep_fp32 takes
    assert found.remedies[0].setting == "keep_fp32=['models[1].blocks.1.place']"
    assert found.remedies[0].finite


@pytest.mark.parametrize('fault', ['forward', 'backward'])
def test_a_generator_through_a_discriminator(fault: str) -> None:
    """What goes wrong in one model reaches the other: forward from the first to the second, backward the other way."""
    torch.manual_seed(0)
    generator, discriminator = Deep(), nn.Sequential(nn.Linear(2, 4), Deep())
    spoilt = generator if fault == 'forward' else discriminator[1]
    spoilt.blocks[1].place = Fault(in_range_of_fp32 if fault == 'forward' else lambda x: ScaleGradient.apply(x, 1e25))
    models, optimizers = amp.initialize(
        [generator, discriminator],
        [torch.optim.SGD(model.parameters(), lr=0.01) for model in (generator, discriminator)],
        opt_level='O2',
        loss_scale=8.0,
        verbosity=0,
    )
    with amp.monitor(optimizers[0], diagnose_overflow=True) as watch:
        loss = square(models[1](models[0](batches(1)[0])))
        with amp.scale_loss(loss, list(optimizers)) as scaled:
            scaled.backward()
        optimizers[0].step()
    (found,) = watch.diagnoses
    expected = ('forward_range', 'models[0].blocks.1.place')
    if fault == 'backward':
        expected = ('gradient_range', 'models[1].1.blocks.1.place')
    assert (found.cause, found.module) == expected, found.text


def test_a_log_that_raises_does_not_end_the_training(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = start()
    calls = []

    def log(at: int, numbers: dict[str, float]) -> None:
        calls.append(at)
        raise OSError('disk\nfull')

    with amp.monitor(optimizer, 1, log=log):
        for x in batches(3):
            step(model, optimizer, x)
    assert calls == [1, 2, 3]
    told = [record.getMessage() for record in caplog.records if 'log= of amp.monitor' in record.getMessage()]
    assert told == ['amp: log= of amp.monitor failed at step 1 (OSError: disk full). The training goes on.']


def test_numbers_of_numpy() -> None:
    model, optimizer = start()
    words: Any = dict(interval=np.int64(2), ranges_interval=np.int32(3), max_reports=np.int64(1))
    with amp.monitor(optimizer, diagnose_overflow=np.bool_(True), **words) as watch:
        for index, x in enumerate(batches(3)):
            step(model, optimizer, nan_input(x) if index == 1 else x)
    assert len(watch.diagnoses) == 1
    assert amp.loss_scale(optimizer, np.int64(0)) == amp.loss_scale(optimizer)
    with pytest.raises(AmpConfigError, match='interval='):
        amp.monitor(optimizer, np.bool_(True))  # type: ignore[arg-type]


def test_wrong_arguments() -> None:
    _, optimizer = start()
    with pytest.raises(AmpConfigError, match='interval=0'):
        amp.monitor(optimizer, 0)
    with pytest.raises(AmpConfigError, match=r'ranges_interval=1\.5'):
        amp.monitor(optimizer, ranges_interval=1.5)  # type: ignore[arg-type]
    with pytest.raises(AmpConfigError, match="diagnose_overflow='always'"):
        amp.monitor(optimizer, diagnose_overflow='always')  # type: ignore[arg-type]
    with pytest.raises(AmpUsageError, match='was not initialised'):
        amp.monitor(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))


# -- accessors -------------------------------------------------------------------------------------------------------


def test_accessors() -> None:
    model, optimizer = start(loss_scale={'init_scale': 1024.0})
    assert (amp.loss_scale(optimizer), amp.skipped_steps(optimizer), amp.last_step_skipped(optimizer)) == (
        1024.0,
        0,
        False,
    )
    seen = []
    for index, x in enumerate(batches(4)):
        step(model, optimizer, nan_input(x) if index in (1, 2) else x)
        seen.append((amp.loss_scale(optimizer), amp.skipped_steps(optimizer), amp.last_step_skipped(optimizer)))
    assert seen == [(1024.0, 0, False), (512.0, 1, True), (256.0, 2, True), (256.0, 2, False)]


def test_accessors_of_several_losses() -> None:
    model, optimizer = start(num_losses=2)
    with amp.scale_loss(square(model(batches(1)[0])) * math.inf, optimizer, loss_id=1) as scaled:
        scaled.backward()
    optimizer.step()
    assert amp.loss_scale(optimizer) == 65536.0
    assert amp.loss_scale(optimizer, loss_id=1) == 32768.0
    with pytest.raises(AmpUsageError, match='loss_id=2'):
        amp.loss_scale(optimizer, loss_id=2)


def test_accessors_where_nothing_is_enabled() -> None:
    model = nn.Linear(2, 2)
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), enabled=False)
    assert (amp.loss_scale(optimizer), amp.skipped_steps(optimizer), amp.last_step_skipped(optimizer)) == (
        1.0,
        0,
        False,
    )
    with amp.monitor(optimizer) as watch:
        assert watch.read() == {}
    with pytest.raises(AmpUsageError, match='was not initialised'):
        amp.loss_scale(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))


def test_repr_of_a_session() -> None:
    _, optimizer = start(loss_scale=128.0)
    assert 'O2 (float16 weights' in repr(amp.session.session_of(optimizer))  # type: ignore[attr-defined]
    assert 'loss scale 128' in repr(amp.session.session_of(optimizer))  # type: ignore[attr-defined]


@pytest.mark.parametrize('level', ['O1', 'O2'])
def test_a_compiled_model_keeps_its_one_graph(level: str) -> None:
    """What runs in graphs is not recorded, and the report says so."""
    model, optimizer = start(level)
    with amp.monitor(optimizer, 2, diagnose_overflow=True) as watch:
        compiled = torch.compile(model, backend='eager', fullgraph=True)
        for index, x in enumerate(batches(4)):
            step(compiled, optimizer, nan_input(x) if index in (2, 3) else x)
        numbers = watch.read()
    (found,) = watch.diagnoses
    assert found.cause == 'not_replayed'
    assert 'torch.compile' in found.text
    # steps 1, 2 and 4 are measured
    assert numbers['amp_skipped'] == 2
    assert amp.skipped_steps(optimizer) == 2
