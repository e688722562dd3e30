"""Recommends a level for what an mmengine config trains."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from ..diagnostics.output_files import OutputFiles
from ..diagnostics.suggest_level import suggest
from ..diagnostics.suggestion import LevelSuggestion
from ..engine.clipping import GradientClip
from ..errors import AmpConfigError
from ..policy import LEVELS, resolve
from .from_config import FromConfig, from_config


def suggest_from_config(args: argparse.Namespace) -> int:
    """The work of ``amp-wrapper suggest-level``.

    Args:
        args: Its options.

    Returns:
        The exit status.

    Raises:
        AmpError: Config, data or options cannot be used; a file cannot be written.
    """
    files = OutputFiles(args.html, args.json)
    built = from_config(args.config, args.cfg_options, args.checkpoint, args.device, args.input_shape)
    found = suggest_for(
        built,
        levels=args.levels,
        steps=args.steps,
        seed=args.seed,
        prefer=args.prefer,
        max_trials=args.max_trials,
    )
    try:
        # first: whoever reads the table may go
        written = files.write(found.html, found.data)
    finally:
        _show(found)
    for path in written:
        print(f'Written: {path}')
    return 130 if found.data['interrupted'] else 0


def suggest_for(built: FromConfig, steps: int = 20, **words: Any) -> LevelSuggestion:
    """Try the levels on what a config trains: its model, data, optimizer, clipping, and the options of its wrapper.

    Args:
        built: From :func:`~amp_wrapper.openmmlab.from_config.from_config`.
        steps: Of each level.
        **words: Others of :func:`~amp_wrapper.diagnostics.suggest_level.suggest`: ``levels``, ``seed``, ``prefer``,
            ``max_trials``, ``progress``.
    """
    settings = built.settings
    optimizer = built.config.optim_wrapper.optimizer
    name = f'{optimizer.get("type", "that")} of the config, with a learning rate of {optimizer.get("lr", "?")}'
    # what the model raises at other levels rules these out
    with built.model_errors(lambda: 'O0'):
        return suggest(
            built.model,
            built.loss_fn,
            built.batches(max(steps, 1)),
            make_optimizer=built.make_optimizer,
            steps=steps,
            overrides=_shared(dict(settings.overrides)),
            attach=built.attach,
            clip=GradientClip.parse(settings.clip_grad),
            surrounds=True,
            optimizer_name=name,
            **words,
        )


def _shared(overrides: dict[str, object]) -> dict[str, object]:
    """Those of a config's options that every level can have, and that say something beside the level."""
    shared = {}
    for name, value in overrides.items():
        if name in ('dtype', 'cast_model_type', 'num_losses', 'verbosity', 'max_consecutive_skips'):
            continue
        try:
            for level in LEVELS:
                resolve(level, **{name: value})  # type: ignore[arg-type]
        except AmpConfigError:
            continue
        shared[name] = value
    return shared


def _show(found: LevelSuggestion) -> None:
    """On a terminal a table by rich; elsewhere plain text."""
    if not sys.stdout.isatty():
        print(found)
        return
    from rich.console import Console

    console = Console(highlight=False)
    console.print(found.reason, markup=False)
    console.print(found.table())
    for note in found.data['notes']:
        console.print(note, markup=False, style='dim')
    if found.level:
        # as they are, for copying: not broken into lines
        print(f'\nmmengine  {found.config}\nscript    {found.script}')
