"""``amp-wrapper plot``: pictures of the loss scale and of skipped steps, from the logs of one training or several."""

from __future__ import annotations

import argparse

from ..diagnostics.plot import DEFAULT_PANELS, PANELS, Run, plot_runs, read_run, save


def plot(args: argparse.Namespace) -> None:
    """Draw and write the picture, and print what is in it.

    Args:
        args: The options of ``amp-wrapper plot``.

    Raises:
        AmpUsageError: A log cannot be read; there is nothing to draw; matplotlib is not installed.
        AmpConfigError: ``--out`` has another suffix.
        CheckpointWriteError: The file cannot be written.
    """
    panels = args.panels or DEFAULT_PANELS
    save(plot_runs(args.logs, panels=panels, first=args.first, last=args.last, title=args.title), args.out)
    runs = [read_run(path).between(args.first, args.last) for path in args.logs]
    print(*map(_summary, runs), sep='\n')
    missing = [name for name in panels if not any(run.lines(PANELS[name][1]) for run in runs)]
    if missing:
        print('left out:', ', '.join(f'{name} (no {PANELS[name][1]} in the log)' for name in missing))
    print(args.out)


def _summary(run: Run) -> str:
    words = [f'iterations {min(run.rows)} to {max(run.rows)}']
    for member, skips in run.lines('amp_skipped').items():
        count = f'{sum(skips.values()):.0f} step{"" if sum(skips.values()) == 1 else "s"} skipped'
        words.append(f'{count} by {member}' if member else count)
    words += [f'resumed at {place}' for place in run.resumed]
    return f'{run.name}: {", ".join(words)}'
