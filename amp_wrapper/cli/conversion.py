"""The work of ``amp-wrapper convert``, apart from its options, since it imports torch."""

from __future__ import annotations

import argparse
import hashlib
import os
import re
from pathlib import Path
from typing import Any

from ..checkpoint import convert, inspect
from ..checkpoint import file as checkpoint_file
from ..errors import AmpUsageError


def run(args: argparse.Namespace) -> None:
    """Inspect, convert, or both.

    Args:
        args: The options of ``amp-wrapper convert``.

    Raises:
        AmpError: As :func:`amp_wrapper.cli.convert.run` says.
    """
    source = Path(args.source)
    if source.is_dir():
        from ..openmmlab import shard_files

        file = shard_files.load_folder(source)
    else:
        file = checkpoint_file.load(source)
    source = _named(args.source)
    if args.inspect:
        print('\n'.join(inspect.lines_of(file)))
    if args.to:
        out, notes = write(args, source, file)
        print(f'{source.name} -> {out} ({out.stat().st_size / 1e6:.1f} MB)')
        for note in notes:
            print(f'  note: {note}')


def write(args: argparse.Namespace, source: Path, file: Any) -> tuple[Path, list[str]]:
    """Convert and write.

    Args:
        args: The options of ``amp-wrapper convert``.
        source: Never overwritten.
        file: Its content.

    Returns:
        The file that was written, and the notes of the conversion.
    """
    # a name that ends in a hash would tell the wrong one
    stem = re.sub(r'-[0-9a-f]{8}$', '', source.stem) if args.publish else source.stem
    out = _named(args.out) if args.out else source.with_name(f'{stem}{_ending(args)}.pth')
    if not args.publish:
        _check_not_source(out, source)
    if out.is_dir():
        raise AmpUsageError(f'OUT={args.out} is a folder: give the name of a file.')
    result, notes = convert.to_weights(file, convert.WEIGHT_TYPES[args.to], args.weights or 'average')
    if not args.publish:
        checkpoint_file.save(result, out)
        return out, notes
    # the name depends on the content, so it is known only now; torch.hub's check_hash reads it from there
    unnamed = out.with_name(f'{out.stem}.unnamed{out.suffix}')
    checkpoint_file.save(result, unnamed)
    digest = hashlib.sha256(unnamed.read_bytes()).hexdigest()
    named = out.with_name(f'{out.stem}-{digest[:8]}{out.suffix}')
    try:
        _check_not_source(named, source)
        os.replace(unnamed, named)
    finally:
        unnamed.unlink(missing_ok=True)
    if 'cfg' in result['meta']:
        notes.append("'meta' holds the training config, with the paths in it")
    return named, notes


def _named(path: str) -> Path:
    """A path that ends in a name; the current folder has none."""
    found = Path(path)
    return found if found.name not in ('', '..') else found.resolve()


def _check_not_source(out: Path, source: Path) -> None:
    if out.exists() and os.path.samefile(out, source):
        raise AmpUsageError(f'{out} is the source itself, which is never overwritten: give another OUT.')


def _ending(args: argparse.Namespace) -> str:
    return '' if args.publish and args.to == 'fp32' else f'_{args.to}'
