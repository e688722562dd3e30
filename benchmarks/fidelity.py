"""Trains four small models at each level and with torch's own autocast: ``python -m benchmarks.fidelity [--write]``.

Five seeds each; at each level of a seed the first weights, the order of the data, and the recipe are the same. A run that is
done is a line of a file, so a benchmark that was interrupted goes on where it ended. The page has the mean and the standard
deviation of the last metric, and the largest deviation of the loss from FP32 in the first steps; the picture has the losses.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from .fidelity_page import page, parts
from .fidelity_plot import draw
from .fidelity_tasks import TASKS, VARIANTS, recipe_digest, run
from .fidelity_text import digest
from .pages import RESULTS, add_write, processor, put
from .wrapping import mmengine_version

SEEDS = (0, 1, 2, 3, 4)
#: Where runs are kept, and the page for readers.
RECORDS, PAGE = RESULTS / 'fidelity.jsonl', Path(__file__).parents[1] / 'docs/fidelity.md'


def read_records(path: Path) -> list[dict[str, Any]]:
    """The runs of a file, of each task those of the recipe and text of its last line; of the same run twice, the later one.

    Args:
        path: JSON lines. A last line that an interruption cut is left out.
    """
    found: list[dict[str, Any]] = []
    for line in path.read_text(encoding='utf-8').splitlines() if path.is_file() else ():
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    newest = {record['task']: recipe_of(record) for record in found}
    kept = {
        (record['task'], record['variant'], record['seed']): record
        for record in found
        if recipe_of(record) == newest[record['task']]
    }
    return list(kept.values())


def balanced(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of seeds that every level of a task has: of an interrupted benchmark, the last seed is left out.

    Args:
        records: Of runs.
    """
    variants = {record['variant'] for record in records}
    found: list[dict[str, Any]] = []
    for task in dict.fromkeys(record['task'] for record in records):
        mine = [record for record in records if record['task'] == task]
        seeds = [{record['seed'] for record in mine if record['variant'] == variant} for variant in variants]
        found += [record for record in mine if record['seed'] in set.intersection(*seeds)]
    return found


def further(path: Path) -> Path:
    """The file beside the records with runs of further seeds, which only the explanations take into account."""
    return path.with_name(f'{path.stem}_further{path.suffix}')


def recipe_of(record: dict[str, Any]) -> tuple[str, str | None]:
    """Digests of recipe and text: runs of others are not taken up."""
    return record['recipe'], record.get('text')


def present_recipe(task: str) -> tuple[str, str | None]:
    """:func:`recipe_of` a run that would begin now."""
    return recipe_digest(TASKS[task]), digest() if task == 'text' else None


def environment() -> dict[str, str]:
    """What a run depends on beside its recipe."""
    return {
        'machine': f'{processor()}, {platform.machine()}',
        'python': platform.python_version(),
        'torch': torch.__version__,
        'mmengine': mmengine_version().removeprefix('mmengine '),
        'date': str(datetime.date.today()),
    }


def train_missing(
    tasks: Sequence[str],
    variants: Sequence[str],
    seeds: Sequence[int],
    path: Path,
    quick: bool = False,
    say: Callable[[str], object] = print,
) -> list[dict[str, Any]]:
    """Train what the file does not have, seed by seed, and write each run to it.

    Args:
        tasks: Names of :data:`~benchmarks.fidelity_tasks.TASKS`.
        variants: Levels, and torch's own autocast.
        seeds: Of weights, data, dropout and augmentation.
        path: Of the records. It is made, with its folder.
        quick: A few steps of each.
        say: Is given a line for each run.

    Returns:
        All records of the tasks, variants and seeds.
    """
    wanted = [(task, variant, seed) for seed in seeds for task in tasks for variant in variants]
    done = {
        (record['task'], record['variant'], record['seed']): record
        for record in read_records(path)
        if recipe_of(record) == present_recipe(record['task'])
    }
    open_ones = [key for key in wanted if key not in done]
    path.parent.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    if path.is_file() and not path.read_bytes().endswith(b'\n') and path.stat().st_size:
        # a line that an interruption cut
        with path.open('a', encoding='utf-8') as file:
            file.write('\n')
    for place, (task, variant, seed) in enumerate(open_ones, 1):
        record = {**run(TASKS[task], variant, seed, quick), **environment()}
        with path.open('a', encoding='utf-8') as file:
            file.write(json.dumps(record, separators=(',', ':')) + '\n')
        done[task, variant, seed] = record
        minutes = (time.monotonic() - begin) / 60
        left = minutes / place * (len(open_ones) - place)
        say(
            f'{place}/{len(open_ones)}  {task}, {variant}, seed {seed}: {record["metric"]}, {record["seconds"]} s; '
            f'{minutes:.0f} min so far, about {left:.0f} to go'
        )
    return [done[key] for key in wanted]


def main(words: Sequence[str] | None = None, say: Callable[[str], object] = print) -> None:
    """Train what is missing, and print the page."""
    parser = argparse.ArgumentParser(prog='python -m benchmarks.fidelity', description=(__doc__ or '').splitlines()[0])
    parser.add_argument('--tasks', nargs='+', choices=list(TASKS), default=list(TASKS))
    parser.add_argument(
        '--variants', nargs='+', choices=VARIANTS, default=list(VARIANTS), help='levels, and stock autocast'
    )
    parser.add_argument('--seeds', nargs='+', type=int, default=list(SEEDS))
    parser.add_argument('--records', type=Path, default=RECORDS, metavar='FILE', help='where runs are kept, one a line')
    parser.add_argument('--quick', action='store_true', help='a few steps of each, to see whether everything runs')
    parser.add_argument('--no-train', action='store_true', help='only the page, from the runs that are recorded')
    parser.add_argument('--docs', type=Path, default=PAGE, metavar='FILE', help='whose tables --write replaces')
    add_write(parser, 'fidelity.md')
    args = parser.parse_args(words)
    # the sums of several threads come in another order
    torch.set_num_threads(1)
    if args.no_train:
        records = [
            record
            for record in read_records(args.records)
            if record['task'] in args.tasks and record['variant'] in args.variants and record['seed'] in args.seeds
        ]
    else:
        records = train_missing(
            args.tasks,
            args.variants,
            args.seeds,
            args.records,
            args.quick,
            lambda line: print(line, file=sys.stderr, flush=True),
        )
    records, more = balanced(records), read_records(further(args.records))
    text = page(records, more)
    if args.write is not None:
        args.write.write_text(text, encoding='utf-8')
        for name, lines in parts(records, more).items():
            put(args.docs, name, lines)
        draw(records, args.docs.parent / 'fidelity_losses')
    say(text)


if __name__ == '__main__':
    os.environ.setdefault('OMP_NUM_THREADS', '1')
    main()
