"""The benchmark of fidelity: it goes on where it was interrupted, compares by pairs, and its page is what was recorded."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from grid import grid, long
from torch import nn

from benchmarks import fidelity, fidelity_page, fidelity_plot, fidelity_statistics, fidelity_tasks, pages
from benchmarks.fidelity_findings import FINDINGS
from benchmarks.fidelity_tasks import REFERENCE, STOCK, TASKS, VARIANTS


@pytest.fixture
def one_thread() -> Any:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def copied_page(folder: Path) -> Path:
    path = folder / 'page.md'
    path.write_text(fidelity.PAGE.read_text(encoding='utf-8'), encoding='utf-8')
    return path


def test_a_benchmark_goes_on_where_it_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    """Two trainings of a few steps; the one whose line was cut runs again, and the page comes whole."""
    records = tmp_path / 'runs.jsonl'
    words = ['--tasks', 'cnn', '--variants', 'O0', 'O5', '--seeds', '3', '--quick', '--records', str(records)]
    printed: list[str] = []
    fidelity.main(words, printed.append)
    lines = records.read_text().splitlines()
    first = [json.loads(line) for line in lines]
    assert [(run['variant'], run['seed'], run['steps']) for run in first] == [('O0', 3, 46), ('O5', 3, 46)]
    # the same weights and the same batch, in another type
    assert first[0]['first'][0] == pytest.approx(first[1]['first'][0], rel=1e-2)
    assert first[0]['first'] != first[1]['first']
    assert len(first[0]['first']) == fidelity_tasks.FIRST and len(first[0]['curve']) == 10

    trained: list[tuple[str, str, int]] = []
    real = fidelity.run

    def counted(task: Any, variant: str, seed: int, quick: bool) -> dict[str, Any]:
        trained.append((task.name, variant, seed))
        return real(task, variant, seed, quick)

    monkeypatch.setattr(fidelity, 'run', counted)
    fidelity.main(words, printed.append)
    assert trained == [] and printed[0] == printed[1]
    records.write_text(lines[0] + '\n' + lines[1][:50])
    docs = copied_page(tmp_path)
    fidelity.main([*words, '--write', str(tmp_path / 'out.md'), '--docs', str(docs)], printed.append)
    assert trained == [('cnn', 'O5', 3)]
    again = list(map(json.loads, (records.read_text().splitlines()[0], records.read_text().splitlines()[-1])))
    for run, other in zip(first, again):
        assert {**run, 'seconds': 0} == {**other, 'seconds': 0}
    assert (tmp_path / 'out.md').read_text() == printed[-1]
    assert {'## CNN with BatchNorm on digits', '## What differs from O0'} <= set(printed[-1].splitlines())
    assert (tmp_path / 'fidelity_losses.svg').read_text().count('id="O5') == 2
    assert (tmp_path / 'fidelity_losses.png').stat().st_size > 10_000
    assert pages.part(docs, 'metrics') == fidelity_page.metric_table(again)


@pytest.mark.parametrize('name', [pytest.param(name, marks=grid if name in ('cnn', 'vit') else long) for name in TASKS])
def test_every_task_trains(name: str, one_thread: None) -> None:
    """With its metric, in bfloat16 and with stock autocast."""
    torch.set_num_threads(1)
    for variant in ('O5', 'autocast bfloat16'):
        found = fidelity_tasks.run(TASKS[name], variant, 0, quick=True)
        assert found['metric'] is not None and math.isfinite(found['metric'])
        assert None not in found['curve'] and found['skipped'] == 0
        assert found['scale at the end'] == 1.0
        assert ('monitor' in found) == (variant == 'O5')


@pytest.mark.parametrize('variant', VARIANTS)
def test_a_recipe_is_the_same_at_every_level(variant: str) -> None:
    """But for the wrapper, and the class of a fused optimizer with stock autocast."""
    for task in TASKS.values():
        cfg = task.config()
        found = fidelity_tasks.at(cfg.optim_wrapper, variant)
        ours = [found] if 'optimizer' in found else [found['generator'], found['discriminator']]
        theirs = (
            [cfg.optim_wrapper]
            if 'optimizer' in cfg.optim_wrapper
            else [cfg.optim_wrapper.generator, cfg.optim_wrapper.discriminator]
        )
        for one, other in zip(ours, theirs, strict=True):
            assert one['type'] == ('AutocastOptimWrapper' if variant in STOCK else 'AmpOptimWrapper')
            assert one.get('opt_level', variant) == variant
            assert one.get('dtype') == STOCK.get(variant)
            assert one.get('clip_grad') == other.get('clip_grad')
            words = dict(one['optimizer'])
            kind = words.pop('type')
            expected = dict(other['optimizer'])
            named = expected.pop('type')
            assert words == expected
            assert kind == (named.removeprefix('amp_wrapper.Fused') if variant in STOCK else named)


def test_stock_autocast_is_that_of_torch() -> None:
    """Its types, its scale, and a step that is skipped."""
    model = nn.Linear(4, 2)
    wrapper = fidelity_tasks.AutocastOptimWrapper(
        torch.optim.SGD(model.parameters(), lr=0.1), 'float16', dict(max_norm=1.0)
    )
    before = model.weight.detach().clone()
    with wrapper.optim_context(model):
        out = model(torch.ones(3, 4))
    assert out.dtype is torch.float16 and wrapper.scale() == 2.0**16
    wrapper.update_params(out.float().sum() * math.inf)
    assert wrapper.skipped and wrapper.scale() == 2.0**15 and torch.equal(model.weight, before)
    with wrapper.optim_context(model):
        loss = model(torch.ones(3, 4)).float().mean()
    wrapper.update_params(loss)
    assert not wrapper.skipped and not torch.equal(model.weight, before)
    # clipped to a norm of 1
    assert float((model.weight - before).norm()) <= 0.1 + 1e-6
    assert fidelity_tasks.AutocastOptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1), 'bfloat16').scale() == 1.0


def record(
    variant: str, seed: int, metric: float | None, first: tuple[float | None, ...] = (2.0, 1.0)
) -> dict[str, Any]:
    return {
        'task': 'cnn', 'variant': variant, 'seed': seed, 'metric': metric, 'first': list(first), 'curve': list(first),
        'skipped': 0, 'scale at the end': 1.0, 'seconds': 1.0,
    }  # fmt: skip


def test_levels_are_compared_by_pairs() -> None:
    """The spread over the seeds is large, and that of the differences small."""
    base, far, near = (90.0, 92.0, 94.0), (89.0, 91.1, 92.9), (90.5, 91.5, 94.0)
    records = [record('O0', seed, value) for seed, value in enumerate(base)]
    records += [record('O3', seed, value, (2.0, 1.2)) for seed, value in enumerate(far)]
    records += [record('O5', seed, value, (2.1, 1.0)) for seed, value in enumerate(near)]
    found = {level.variant: level for level in fidelity_statistics.levels_of(records, 'cnn')}
    assert found['O3'].difference == pytest.approx(-1.0)
    assert found['O3'].error == pytest.approx(statistics.stdev((-1.0, -0.9, -1.1)) / math.sqrt(3))
    assert [found[name].is_far for name in ('O0', 'O3', 'O5')] == [False, True, False]
    assert found['O3'].deviation == pytest.approx(0.2) and found['O5'].deviation == pytest.approx(0.05)
    more = [record(name, seed, 90.0 + seed) for name in ('O0', 'O3') for seed in (7, 8)]
    lines = fidelity_page.explanations(records, more)
    assert len(lines) == 1 and 'O3' in lines[0] and lines[0].endswith('2 further seeds: 0.00 ± 0.00.')


def test_seeds_that_a_level_lacks_are_left_out() -> None:
    records = [record(name, seed, 90.0) for seed in range(3) for name in ('O0', 'O3') if (name, seed) != ('O3', 2)]
    assert [(run['variant'], run['seed']) for run in fidelity.balanced(records)] == [
        ('O0', 0), ('O3', 0), ('O0', 1), ('O3', 1)
    ]  # fmt: skip
    assert fidelity_page.chance(fidelity.balanced(records)).startswith(
        'With 2 seeds, chance alone exceeds 2 standard errors in 30 of'
    )


def test_a_run_without_a_finite_metric_is_far() -> None:
    records = [record('O0', seed, 90.0 + seed) for seed in range(3)]
    records += [record('O3', seed, None if seed == 1 else 90.0 + seed, (2.0, None)) for seed in range(3)]
    level = fidelity_statistics.levels_of(records, 'cnn')[1]
    assert level.is_far and level.deviation == math.inf and len(level.differences) == 2
    assert '(1 of 3 runs failed)' in fidelity_page.metric_table(records)[-1]
    # equal numbers are not far
    same = [record(name, seed, 90.0 + seed) for name in ('O0', 'O4') for seed in range(3)]
    assert not fidelity_statistics.levels_of(same, 'cnn')[1].is_far


# -- what is published -------------------------------------------------------------------------------------------------


def published() -> list[dict[str, Any]]:
    return fidelity.balanced(fidelity.read_records(fidelity.RECORDS))


def test_the_published_tables_are_those_of_the_recorded_runs() -> None:
    """The page of the results, the parts of the page for readers, and what was found out."""
    records, more = published(), fidelity.read_records(fidelity.further(fidelity.RECORDS))
    assert fidelity.RECORDS.with_suffix('.md').read_text(encoding='utf-8') == fidelity_page.page(records, more)
    for name, lines in fidelity_page.parts(records, more).items():
        assert pages.part(fidelity.PAGE, name) == lines, name


def test_every_level_has_the_same_seeds() -> None:
    """All tasks, all variants, at least three seeds each, and the recipe that the benchmark has now."""
    records = published()
    found = {(run['task'], run['variant'], run['seed']) for run in records}
    seeds = {seed for _, _, seed in found}
    assert len(seeds) >= 3 and seeds <= set(fidelity.SEEDS)
    assert found == {(task, variant, seed) for task in TASKS for variant in VARIANTS for seed in seeds}
    for run in records:
        assert run['recipe'] == fidelity_tasks.recipe_digest(TASKS[run['task']]), run['task']


def test_what_is_far_from_fp32_is_explained() -> None:
    """And nothing else."""
    records = published()
    far = {
        (level.task, level.variant)
        for task in TASKS
        for level in fidelity_statistics.levels_of(records, task)
        if level.is_far
    }
    assert far == set(FINDINGS)


def test_the_picture_has_every_line() -> None:
    """All variants in each panel of losses, and all but O0 in each panel of distances."""
    found = fidelity_plot.figure(published())
    for axes in found.axes:
        names = [line.get_gid() for line in axes.lines if line.get_gid() != 'failed']
        left = str(axes.get_gid()).startswith('loss')
        assert names == [name for name in VARIANTS if left or name != REFERENCE]
    assert len(found.axes) == 2 * len(TASKS)
