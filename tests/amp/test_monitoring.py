"""``amp.monitor``, and what a script may ask of an initialised optimizer."""

from __future__ import annotations

import json
import math
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from exact_scripts import backward
from planted_overflows import Deep, Fault, ScaleGradient, batches, in_range_of_fp32, nan_input, square
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from amp_wrapper import AmpConfigError, AmpUsageError, FusedSGD, OverflowStreakError, amp
from amp_wrapper.diagnostics import watch as watch_module
from amp_wrapper.engine.flags import LateRead


def start(level: str = 'O2', kind: Any = SGD, model: nn.Module | None = None, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = Deep() if model is None else model
    return amp.initialize(model, kind(model.parameters(), lr=0.01), opt_level=level, verbosity=0, **options)


def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    backward(square(model(x)), optimizer)
    optimizer.step()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_numbers_are_logged_written_and_read_until_closed(tmp_path: Path, log: list[str]) -> None:
    """A log that fails is warned of once, and called again."""
    heard: list[tuple[int, dict[str, float]]] = []

    def hear(at: int, numbers: dict[str, float]) -> None:
        heard.append((at, numbers))
        raise OSError('disk\nfull')

    model, optimizer = start()
    folder = tmp_path / 'new' / 'run'
    watch = amp.monitor(optimizer, 4, folder=folder, log=hear)
    for index, x in enumerate(batches(8)):
        step(model, optimizer, nan_input(x) if index == 3 else x)
    watch.close()
    found = [(at, numbers['amp_scale'], numbers['amp_skipped'], len(numbers)) for at, numbers in heard]
    assert found == [(1, 65536, 0, 4), (4, 65536, 1, 2), (8, 32768, 1, 4)] and watch.read() == heard[-1][1]
    written = lines(folder / 'amp_monitor.jsonl')
    assert [line.pop('iteration') for line in written] == [1, 4, 8] and written == [numbers for _, numbers in heard]
    for x in batches(4):
        step(model, optimizer, x)
    told = [line for line in log if 'log= of amp.monitor' in line]
    assert len(heard) == 3 and len(told) == 1 and 'OSError: disk full' in told[0]


@pytest.mark.parametrize('kind', [SGD, FusedSGD])
def test_skips_are_diagnosed_and_pages_written(kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one too, whether the host knows of skips late or early: what is late is not waited for."""
    monkeypatch.setattr(LateRead, 'is_there', False)
    model, optimizer = start(kind=kind)
    with amp.monitor(optimizer, folder=tmp_path) as watch:
        for index, x in enumerate(batches(30)):
            step(model, optimizer, nan_input(x) if index in (*range(2, 12), *range(13, 30, 2)) else x)
            assert index != 2 or bool(watch.diagnoses) == (kind is SGD)
    # the first ones of a row, and then ever fewer; ten at most
    assert [each.cause for each in watch.diagnoses] == ['input'] * 10
    pages = sorted((tmp_path / 'amp_diagnosis').glob('*.html'))
    assert {page.stem for page in pages} == {f'iter_{at}' for at in (3, 4, 6, 10, *range(14, 25, 2))}
    assert 'input 0' in pages[0].read_text()


def test_nothing_is_kept_when_closed() -> None:
    model, optimizer = start()
    amp.monitor(optimizer).close()
    x = batches(1)[0]
    step(model, optimizer, x)
    kept = weakref.ref(x)
    del x
    assert kept() is None


class Takes(nn.Linear):
    def forward(self, batch: dict[str, Any]) -> Tensor:
        return super().forward(batch['x'])


def test_samples_are_named() -> None:
    """Names are in dicts, also as lists, and in ``metainfo`` of objects."""
    model, optimizer = start('O5', model=Takes(4, 2))
    with amp.monitor(optimizer) as watch:
        sample = SimpleNamespace(metainfo={'img_path': 'b.png', 'scale': 'large', 'img_id': 7})
        batch = {'x': nan_input(batches(1)[0]), 'file_name': ['c.png', 'd.png'], 'more': [{'path': 'a.png'}, sample]}
        backward(model(batch).float().square().mean(), optimizer)
        optimizer.step()
    assert [each.samples for each in watch.diagnoses] == [['c.png', 'd.png', 'a.png', 'b.png', '7']]


def test_diagnosis_that_fails_does_not_end_training(log: list[str], tmp_path: Path, monkeypatch: Any) -> None:
    """A folder that cannot be written to is no matter either."""

    def fail(*args: Any) -> Any:
        raise ValueError('no reason')

    (tmp_path / 'file').write_text('')
    model, optimizer = start('O5')
    with amp.monitor(optimizer, folder=tmp_path / 'file', diagnose_overflow=True) as watch:
        monkeypatch.setattr(watch_module, 'diagnose', fail)
        step(model, optimizer, nan_input(batches(1)[0]))
        monkeypatch.undo()
        step(model, optimizer, nan_input(batches(1)[0]))
    assert len([line for line in log if 'ValueError: no reason' in line]) == 1 and amp.skipped_steps(optimizer) == 2
    assert [each.cause for each in watch.diagnoses] == ['input']


def test_error_after_too_many_skips_ends_with_the_cause(tmp_path: Path) -> None:
    model = Deep()
    model.blocks[2].place = Fault(in_range_of_fp32)
    model, optimizer = start(model=model)
    watch = amp.monitor(optimizer, folder=tmp_path)
    with pytest.raises(OverflowStreakError) as caught:
        [step(model, optimizer, x) for x in batches(60)]
    watch.close()
    words = 'blocks.2.place (Fault)', "keep_fp32=['blocks.2.place']", str(tmp_path / 'amp_diagnosis')
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize('fault', ['generator, forward', 'discriminator, backward'])
def test_cause_is_found_in_the_right_model_of_several(fault: str) -> None:
    """What goes wrong in one reaches the other: forward from the first to the second, backward the other way."""
    torch.manual_seed(0)
    forward = fault == 'generator, forward'
    generator, discriminator = Deep(), nn.Sequential(nn.Linear(2, 4), Deep())
    broken: Any = generator if forward else discriminator[1]
    broken.blocks[1].place = Fault(in_range_of_fp32 if forward else lambda x: ScaleGradient.apply(x, 1e25))
    models = [generator, discriminator]
    optimizers = [SGD(model.parameters(), lr=0.01) for model in models]
    amp.initialize(models, optimizers, opt_level='O2', loss_scale=8.0, verbosity=0)
    with amp.monitor(optimizers[0], diagnose_overflow=True) as watch:
        backward(square(models[1](models[0](batches(1)[0]))), optimizers)
        optimizers[0].step()
    (found,) = watch.diagnoses
    name = 'models[0].blocks.1.place' if forward else 'models[1].1.blocks.1.place'
    assert (found.cause, found.module) == ('forward_range' if forward else 'gradient_range', name), found.text
    if forward:
        # the name that keep_fp32 takes
        assert found.remedies[0].setting == f"keep_fp32=['{name}']" and found.remedies[0].finite


def test_accessors_follow_the_scale_and_skips() -> None:
    model, optimizer = start(loss_scale={'init_scale': 1024.0}, num_losses=2)
    seen = [(amp.loss_scale(optimizer), amp.skipped_steps(optimizer), amp.last_step_skipped(optimizer))]
    for index, x in enumerate(batches(4)):
        step(model, optimizer, nan_input(x) if index in (1, 2) else x)
        seen.append((amp.loss_scale(optimizer), amp.skipped_steps(optimizer), amp.last_step_skipped(optimizer)))
    assert seen == [(1024.0, 0, False), (1024.0, 0, False), (512.0, 1, True), (256.0, 2, True), (256.0, 2, False)]
    backward(square(model(batches(1)[0])) * math.inf, optimizer, loss_id=1)
    optimizer.step()
    assert (amp.loss_scale(optimizer), amp.loss_scale(optimizer, loss_id=1)) == (256.0, 512.0)
    with pytest.raises(AmpUsageError, match='loss_id=2'):
        amp.loss_scale(optimizer, loss_id=2)
    with pytest.raises(AmpConfigError, match='diagnose_overflow='):
        amp.monitor(optimizer, diagnose_overflow='always')


def test_compiled_model_keeps_its_one_graph() -> None:
    """What runs in graphs is not recorded, and the report says so."""
    model, optimizer = start('O2')
    with amp.monitor(optimizer, 2, diagnose_overflow=True) as watch:
        compiled = torch.compile(model, backend='eager', fullgraph=True)
        for index, x in enumerate(batches(3)):
            step(compiled, optimizer, nan_input(x) if index else x)
    (found,) = watch.diagnoses
    assert found.cause == 'not_replayed' and 'torch.compile' in found.text and amp.skipped_steps(optimizer) == 2
