"""The bytes of docs/numbers.md: formulas say what the tensors of the engine take, and what was measured is published."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import level_numbers, numbers_memory, pages
from benchmarks.numbers_memory import OPTIMIZERS, PARTS, Setup, Trained, formula, perceptron, saved_bytes, setups
from benchmarks.step_training import TORCH_TYPES, Training, Transformer

ROOT = Path(__file__).resolve().parents[2]

WIDTH, LAYERS = 96, 3
COUNT = WIDTH**2 * LAYERS
SETUPS = [setup for api in ('torch', 'wrapper', 'functional') for kind in OPTIMIZERS for setup in setups(kind, api)]


@pytest.mark.parametrize('setup', SETUPS, ids=lambda s: f'{s.name}-{s.api}-{s.optimizer}')
def test_formulas_are_the_bytes_of_the_engine(setup: Setup, device: torch.device) -> None:
    """When the third step is done; step counts of optimizers are a few bytes."""
    trained = Trained(setup, perceptron(WIDTH, LAYERS).to(device))
    x = torch.ones(2, WIDTH, device=device)
    found = {}
    for _ in range(3):
        trained.backward(trained.forward(x))
        trained.step()
        found = trained.held()
        trained.clear()
    wanted = formula(setup)
    for part in PARTS:
        assert 0 <= found[part] / COUNT - wanted[part] < 0.01, part


@pytest.mark.parametrize('level', [*TORCH_TYPES, 'O0', 'O1', 'O2', 'O3', 'O4', 'O5'])
def test_copies_of_weights_are_what_autocast_keeps(level: str, device: torch.device) -> None:
    """What a forward pass keeps whatever the batch is, in bytes for each parameter. A first layer whose input needs no gradient
    has no use for its weight in the backward pass."""
    setup = Setup(level, 'SGD', 'torch') if level in TORCH_TYPES else Setup(level, 'FusedSGD')
    one, two = (
        saved_bytes(
            setup,
            perceptron(WIDTH, LAYERS).to(device),
            torch.ones(batch, WIDTH, device=device, requires_grad=True),
        )
        for batch in (8, 16)
    )
    assert (2 * one - two) / COUNT == pytest.approx(formula(setup)['casts'], abs=0.01)


def test_levels_without_split_masters_save_no_parameter_memory() -> None:
    """What the page says in bold; and what it says of the others."""

    def together(setup: Setup) -> int:
        return sum(formula(setup)[part] for part in PARTS)

    base = together(Setup('O0', 'FusedAdamW'))
    assert base == 16
    assert together(Setup('O2', 'FusedAdamW')) == together(Setup('O5', 'FusedAdamW')) == base
    assert together(Setup('O2', 'FusedAdamW', split=True)) == base - 2
    assert together(Setup('O2', 'FusedAdamW', split=True, small_state=True)) == base - 6
    assert together(Setup('O3', 'FusedAdamW')) == base - 4
    assert together(Setup('O1', 'FusedAdamW')) == base and formula(Setup('O1', 'FusedAdamW'))['casts'] == 2


@pytest.mark.skipif(not sys.platform.startswith('linux'), reason='reads what Linux counts')
def test_a_process_takes_what_its_tensors_take() -> None:
    """Four million parameters; the allocator and libraries take some more."""
    found = numbers_memory.measure(Setup('O5', 'FusedAdamW'), 1000, 4)
    assert found['counted'] == pytest.approx(16, abs=0.01)
    assert found['counted'] - 0.5 < found['held'] < found['counted'] + 3
    assert found['peak'] > found['counted'] - 0.5
    # the 16-bit gradients are gone
    assert 1 < found['held'] - found['between'] < 3


def test_tables_have_a_row_for_every_level(monkeypatch: pytest.MonkeyPatch) -> None:
    """On small models; what is in them depends on the machine, but for what is counted."""
    small = {'tiny': (lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), (4,))}
    said: list[str] = []
    rows = level_numbers.activation_table(said.append, small)[2:]
    assert len(rows) == len(said) == len(TORCH_TYPES) + 6
    training = Training('tiny', lambda: Transformer(64, 1), (2, 4, 64), 'AdamW')
    times = level_numbers.time_table(1, [training])
    for level in (*level_numbers.NAMES.values(), 'O0', 'O1', 'O2', 'O3', 'O4', 'O5'):
        assert sum(f'| tiny | {level} |' in line for line in times) == 1, level
    monkeypatch.setattr(
        level_numbers, 'measure', lambda *_: dict.fromkeys(('counted', 'held', 'peak', 'between'), 16.0)
    )
    assert len(level_numbers.process_table(said.append, 10, 1)) == 2 + len(level_numbers.MEASURED)


def test_published_tables_are_those_of_the_results() -> None:
    """What is counted is counted again; what was measured stands on both pages."""
    assert pages.part(level_numbers.PAGE, 'parts') == level_numbers.parts_table()
    assert pages.part(level_numbers.PAGE, 'adamw') == level_numbers.sums_table('AdamW')
    assert pages.part(level_numbers.PAGE, 'sgd') == level_numbers.sums_table('SGD')
    text = (ROOT / 'benchmarks/results/numbers_cpu.md').read_text(encoding='utf-8')
    for name in ('parts', 'adamw', 'sgd', 'process', 'activations', 'times', 'measured'):
        lines = '\n'.join(pages.part(level_numbers.PAGE, name))
        assert lines and lines in text, name


def test_times_of_the_other_processor_are_those_of_its_page() -> None:
    lines = '\n'.join(pages.part(level_numbers.PAGE, 'xeon'))
    assert lines and lines in (ROOT / 'benchmarks/results/numbers_xeon.md').read_text(encoding='utf-8')


def test_a_page_without_the_part_is_refused(tmp_path: Path) -> None:
    page = tmp_path / 'page.md'
    page.write_text('<!-- a: by hand -->\nold\n<!-- end of a -->\nrest\n')
    pages.put(page, 'a', ['x', 'y'])
    assert page.read_text() == '<!-- a: by hand -->\n\nx\ny\n\n<!-- end of a -->\nrest\n'
    assert pages.part(page, 'a') == ['x', 'y']
    pages.put(page, 'a', [])
    assert pages.part(page, 'a') == [] and page.read_text().endswith('-->\nrest\n')
    with pytest.raises(ValueError, match="no part 'b'"):
        pages.put(page, 'b', [])
