"""What ``amp-wrapper report`` does with an mmengine config."""

from __future__ import annotations

import argparse
from typing import Any

from torch import nn

from ..diagnostics import pages, precision_report
from ..diagnostics.level_trial import Subject
from ..errors import AmpUsageError
from .from_config import FromConfig, from_config


def report(args: argparse.Namespace) -> None:
    """Report on the model of a config: in the terminal, and to the files that were asked for.

    Args:
        args: The options of ``amp-wrapper report``.

    Raises:
        AmpError: Config, options, checkpoint or data cannot be used; a file cannot be written.
    """
    import rich

    built = from_config(args.config, args.cfg_options, args.checkpoint, input_shape=args.input_shape)
    found = report_of(built, args.config, args.opt_level)
    rich.print(found.table(args.depth))
    for path, make in ((args.html, found.html), (args.json, found.json)):
        if path is None:
            continue
        try:
            pages.write_text(path, make())
        except OSError as error:
            raise AmpUsageError(f'{path} cannot be written: {error.strerror or error}.') from error
        print(f'Written: {path}')


def report_of(built: FromConfig, title: str, opt_level: str | None = None) -> precision_report.PrecisionReport:
    """The report on a model, with the first batch of its training data.

    Args:
        built: From a config.
        title: What the report is about.
        opt_level: The level; that of the config by default.

    Raises:
        AmpError: The data cannot be read; the level cannot be had.
    """
    policy = built.settings.policy(opt_level)
    batch = built.batches(1)[0]

    def run(model: nn.Module) -> Any:
        return built.loss_fn(model, batch)

    subject = Subject(built.model, run, True, built.make_optimizer, built.attach, surrounds=True)
    return precision_report.make(subject, policy, built.settings.overrides, title)
