"""The page of ``python -m benchmarks.fidelity``, and the tables of ``docs/fidelity.md``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from .fidelity_findings import FINDINGS
from .fidelity_statistics import LIMIT, Level, levels_of
from .fidelity_tasks import FIRST, REFERENCE, TASKS, VARIANTS, Task
from .pages import table

NOT_FOUND = 'The cause was not found.'


def tasks_of(records: Sequence[Mapping[str, Any]]) -> list[Task]:
    """Those that have runs, in their order."""
    return [task for name, task in TASKS.items() if any(record['task'] == name for record in records)]


def ordered(records: Sequence[Mapping[str, Any]], task: str) -> list[Level]:
    """What the runs say about each level of a task, O0 first, stock autocast last."""
    return sorted(levels_of(records, task), key=lambda level: VARIANTS.index(level.variant))


def _difference(level: Level, digits: int) -> str:
    """From O0, with its standard error; '' where no run can be compared."""
    return f'{number(level.difference, digits)} ± {number(level.error, digits)}' if level.differences else ''


def number(value: float, digits: int = 3) -> str:
    """For a cell."""
    return 'not finite' if not math.isfinite(value) else f'{value:.{digits}f}'


def metric_table(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """The last metric: a row for each level, a column for each task; in bold what is far from O0."""
    tasks = tasks_of(records)
    found = {task.name: {level.variant: level for level in ordered(records, task.name)} for task in tasks}
    heads = [f'{task.title}: {task.metric_title} ({"higher" if task.higher else "lower"} is better)' for task in tasks]
    rows = []
    for variant in VARIANTS:
        cells = [_metric(found[task.name].get(variant), task.digits) for task in tasks]
        if any(cells):
            rows.append([variant, *cells])
    return table(['level', *heads], rows)


def _metric(level: Level | None, digits: int) -> str:
    if level is None:
        return ''
    text = _mean(level, digits)
    return f'**{text}**' if level.is_far else text


def _mean(level: Level, digits: int) -> str:
    failed = level.runs - len(level.values)
    if not level.values:
        return f'none: {failed} of {level.runs} runs failed'
    text = f'{number(level.mean, digits)} ± {number(level.spread, digits)}'
    return text + (f' ({failed} of {level.runs} runs failed)' if failed else '')


def deviation_table(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """The largest distance of the loss from FP32 in the first steps, in per cent of it."""
    tasks = tasks_of(records)
    found = {task.name: {level.variant: level for level in ordered(records, task.name)} for task in tasks}
    rows = []
    for variant in VARIANTS:
        cells = [
            number(found[task.name][variant].deviation * 100, 3) if variant in found[task.name] else ''
            for task in tasks
        ]
        if variant != REFERENCE and any(cells):
            rows.append([variant, *cells])
    return table(['level', *(task.title for task in tasks)], rows)


def task_table(records: Sequence[Mapping[str, Any]], task: Task) -> list[str]:
    """Everything that is known of the levels of one task."""
    rows = []
    for level in ordered(records, task.name):
        digits = task.digits
        base = level.variant == REFERENCE
        rows.append(
            [
                level.variant,
                _mean(level, digits),
                '' if base else _difference(level, digits),
                '' if base else ('**yes**' if level.is_far else 'no'),
                '' if base else number(level.deviation * 100, 3),
                number(level.last, 4),
                f'{level.skipped:g}',
                _range(level.scales),
            ]
        )
    heads = [
        'level',
        f'{task.metric_title}, mean ± standard deviation',
        f'difference from {REFERENCE} ± standard error',
        f'more than {LIMIT:g} standard errors',
        f'largest deviation of the loss in the first {FIRST} steps, %',
        'loss over the last tenth',
        'skipped steps of a run',
        'loss scale at the end',
    ]
    return table(heads, rows)


def _range(scales: Sequence[float]) -> str:
    low, high = min(scales), max(scales)
    return f'{low:,.0f}' if low == high else f'{low:,.0f} to {high:,.0f}'


def explanations(records: Sequence[Mapping[str, Any]], more: Sequence[Mapping[str, Any]] = ()) -> list[str]:
    """A line for each level that is far from O0, with what was found out about it.

    Args:
        records: Of runs.
        more: Runs of further seeds, which tell chance from an effect.
    """
    lines = []
    for task in tasks_of(records):
        further = {level.variant: level for level in ordered(more, task.name)}
        for level in ordered(records, task.name):
            if level.is_far:
                text = FINDINGS.get((task.name, level.variant), NOT_FOUND)
                by = _difference(level, task.digits)
                if level.variant in further:
                    again = further[level.variant]
                    text += f' {len(again.differences)} further seeds: {_difference(again, task.digits)}.'
                lines.append(f'- **{task.title}, {level.variant}**{by and f" ({by})"}: {text}')
    return lines or [f'No level is further than {LIMIT:g} standard errors from {REFERENCE}.']


def chance(records: Sequence[Mapping[str, Any]]) -> str:
    """How many comparisons of equal things would be far from each other."""
    from scipy.stats import t

    seeds = len({record['seed'] for record in records})
    others = [
        level for task in tasks_of(records) for level in ordered(records, task.name) if level.variant != REFERENCE
    ]
    # a level whose runs all failed has no metric
    compared = sum(len(level.differences) > 0 for level in others)
    if seeds < 2:
        return 'With one seed nothing can be said about chance.'
    share = 2 * float(t.sf(LIMIT, seeds - 1))
    return (
        f'With {seeds} seeds, chance alone exceeds {LIMIT:g} standard errors in {share * 100:.0f} of 100 comparisons of equal '
        f"things (Student's distribution with {seeds - 1} degrees of freedom). The table has {compared} comparisons, so about "
        f'{share * compared:.0f} of them are expected to be bold for no other reason.'
    )


def conditions(records: Sequence[Mapping[str, Any]]) -> str:
    """Where and when the runs were made."""

    def every(name: str) -> str:
        return ', '.join(sorted({str(record[name]) for record in records}))

    minutes = sum(record['seconds'] for record in records) / 60
    seeds = sorted({record['seed'] for record in records})
    return (
        f'{every("date")}, {every("machine")}, one thread; Python {every("python")}, torch {every("torch")}, '
        f'mmengine {every("mmengine")}; seeds {", ".join(map(str, seeds))}; {len(records)} runs, '
        f'{minutes:.0f} minutes of one core.'
    )


def parts(records: Sequence[Mapping[str, Any]], more: Sequence[Mapping[str, Any]] = ()) -> dict[str, list[str]]:
    """What ``docs/fidelity.md`` takes over, by the names of its parts.

    Args:
        records: Of runs.
        more: Runs of further seeds.
    """
    return {
        'measured': [conditions(records)],
        'metrics': metric_table(records),
        'chance': [chance(records)],
        'deviations': deviation_table(records),
        'findings': explanations(records, more),
        'recipes': [f'- **{task.title}**: {task.recipe}.' for task in tasks_of(records)],
    }


def page(records: Sequence[Mapping[str, Any]], more: Sequence[Mapping[str, Any]] = ()) -> str:
    """The page of the results.

    Args:
        records: Of runs.
        more: Runs of further seeds.
    """
    texts = sorted({record['text'] for record in records if 'text' in record})
    lines = [
        '# Fidelity',
        '',
        'Written by `python -m benchmarks.fidelity --write`, from the runs in `fidelity.jsonl`. How it is measured, and what '
        'was not: `docs/fidelity.md`.',
        '',
        f'Measured: {conditions(records)}'
        + (f' Digest of the text of the third task: {", ".join(texts)}.' if texts else ''),
        '',
        f'In bold: more than {LIMIT:g} standard errors from {REFERENCE}, by pairs of runs with the same seed.',
        '',
        *metric_table(records),
        '',
        f'The largest deviation of the loss from {REFERENCE} in the first {FIRST} steps, in per cent, over all seeds:',
        '',
        *deviation_table(records),
        '',
        'The curves of the losses: [picture](../../docs/fidelity_losses.png), [as SVG](../../docs/fidelity_losses.svg).',
        '',
        '## What differs from O0',
        '',
        *explanations(records, more),
    ]
    for task in tasks_of(records):
        lines += [
            '',
            f'## {task.title}',
            '',
            f'{task.recipe[0].upper()}{task.recipe[1:]}.',
            '',
            *task_table(records, task),
        ]
    return '\n'.join([*lines, ''])
