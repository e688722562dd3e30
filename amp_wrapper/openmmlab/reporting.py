"""What ``amp-wrapper report`` does with an mmengine config."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from torch import nn

from ..diagnostics import precision_report
from ..diagnostics.level_trial import Subject
from ..diagnostics.output_files import OutputFiles
from .from_config import FromConfig, from_config, seeded


def report(args: argparse.Namespace) -> None:
    """Report on the model of a config: in the terminal, and to the files that were asked for.

    Args:
        args: The options of ``amp-wrapper report``.

    Raises:
        AmpError: Config, options, checkpoint or data cannot be used; a file cannot be written.
    """
    from rich.console import Console

    files = OutputFiles(args.html, args.json)
    built = from_config(args.config, args.cfg_options, args.checkpoint, input_shape=args.input_shape)
    with Console(stderr=True).status('reading data') as status:
        found = report_of(built, args.config, args.opt_level, lambda level: status.update(f'a step at {level}'))
    try:
        # first: whoever reads the tables may go
        written = files.write(found.html, found.data)
    finally:
        Console().print(found.table(args.depth))
    for path in written:
        print(f'Written: {path}')


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
        AmpError: The data cannot be read; the level cannot be had; the model fails on the data.
    """
    policy = built.settings.policy(opt_level)
    batch = built.batches(1)[0]

    def run(model: nn.Module) -> Any:
        return built.loss_fn(model, batch)

    subject = Subject(built.model, run, True, built.make_optimizer, built.attach, surrounds=True)
    tried = ['O0']

    def begin(level: str) -> None:
        tried.append(level)
        if begins is not None:
            begins(level)

    # dropout is the same in two reports
    with seeded(built.config), built.model_errors(lambda: tried[-1]):
        return precision_report.make(subject, policy, built.settings.overrides, title, begin)
