"""What ``amp-wrapper report`` does with an mmengine config."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from ..diagnostics import pages, precision_report
from ..diagnostics.level_trial import Subject
from ..errors import AmpUsageError
from .from_config import FromConfig, from_config, seeded


def report(args: argparse.Namespace) -> None:
    """Report on the model of a config: in the terminal, and to the files that were asked for.

    Args:
        args: The options of ``amp-wrapper report``.

    Raises:
        AmpError: Config, options, checkpoint or data cannot be used; a file cannot be written.
    """
    from rich.console import Console

    files = [(Path(path), kind) for path, kind in ((args.html, 'html'), (args.json, 'json')) if path is not None]
    for path, _ in files:
        _check_writable(path)
    built = from_config(args.config, args.cfg_options, args.checkpoint, input_shape=args.input_shape)
    with Console(stderr=True).status('reading data') as status:
        found = report_of(built, args.config, args.opt_level, lambda level: status.update(f'a step at {level}'))
    Console().print(found.table(args.depth))
    for path, kind in files:
        try:
            pages.write_text(path, found.html() if kind == 'html' else found.json())
        except OSError as error:
            raise AmpUsageError(f'{path} cannot be written: {error.strerror or error}.') from error
        print(f'Written: {path}')


def _check_writable(path: Path) -> None:
    """Before the work begins."""
    place = next(above for above in path.absolute().parents if above.exists())
    if path.is_dir() or not place.is_dir() or not os.access(place, os.W_OK):
        problem = f'{path} is a folder' if path.is_dir() else f'{place} is no folder that can be written to'
        raise AmpUsageError(f'{path} cannot be written: {problem}.')


def report_of(
    built: FromConfig, title: str, opt_level: str | None = None, begins: Callable[[str], object] | None = None
) -> precision_report.PrecisionReport:
    """The report on a model, with the first batch of its training data.

    Args:
        built: From a config.
        title: What the report is about.
        opt_level: The level; that of the config by default.
        begins: Called with the name of each level before its step.

    Raises:
        AmpError: The data cannot be read; the level cannot be had.
    """
    policy = built.settings.policy(opt_level)
    batch = built.batches(1)[0]

    def run(model: nn.Module) -> Any:
        return built.loss_fn(model, batch)

    subject = Subject(built.model, run, True, built.make_optimizer, built.attach, surrounds=True)
    # dropout is the same in two reports
    with seeded(built.config):
        return precision_report.make(subject, policy, built.settings.overrides, title, begins)
