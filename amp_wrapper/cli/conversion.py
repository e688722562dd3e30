"""``amp-wrapper convert``: look into a checkpoint of any kind, and take the weights out of it."""

from __future__ import annotations

import argparse
import hashlib
import re
from mmap import ACCESS_READ, mmap
from pathlib import Path

from .. import _register
from ..checkpoint import file as checkpoint_file
from ..checkpoint.convert import WEIGHT_TYPES, lines_of, to_weights
from ..errors import AmpUsageError


def convert(args: argparse.Namespace) -> None:
    """Inspect, write weights, or both.

    Args:
        args: The options of ``amp-wrapper convert``.

    Raises:
        ArgumentError: There is nothing to do, or nothing to write to OUT.
        AmpCheckpointError: The checkpoint is missing, damaged or of no known kind, or lacks what is asked for.
        AmpUsageError: OUT would replace SRC, or is a folder.
        CheckpointWriteError: OUT cannot be written.
    """
    kind = args.to or ('fp32' if args.publish else None)
    if kind is None and (args.out or not args.inspect):
        raise argparse.ArgumentError(None, 'give --to or --publish to write weights, or --inspect without OUT')
    # files of mmengine hold classes of it
    _register()
    source = Path(args.source)
    if source.is_dir():
        from ..openmmlab import shard_files

        file = shard_files.load_folder(source)
    else:
        file = checkpoint_file.load(source)
    if args.inspect:
        print('\n'.join(lines_of(file)))
    if kind is None:
        return
    # the current folder has no name
    source = source if source.name not in ('', '..') else source.resolve()
    # a name that ends in a hash would tell the wrong one
    stem = re.sub(r'-[0-9a-f]{8}$', '', source.stem) if args.publish else source.stem
    ending = '' if args.publish and kind == 'fp32' else f'_{kind}'
    named = out = Path(args.out or source.with_name(f'{stem}{ending}.pth'))
    if args.publish:
        # its last name depends on its content
        out = out.with_name(f'{out.stem}.unnamed{out.suffix}')
    _check(out, source)
    weights, notes = to_weights(file, WEIGHT_TYPES[kind], args.weights or 'average')
    checkpoint_file.save(weights, out)
    if args.publish:
        notes += ["'meta' holds the training config, with the paths in it"] if 'cfg' in weights['meta'] else []
        try:
            with out.open('rb') as written, mmap(written.fileno(), 0, access=ACCESS_READ) as content:
                # torch.hub looks for it in the name
                named = named.with_name(f'{named.stem}-{hashlib.sha256(content).hexdigest()[:8]}{named.suffix}')
            _check(named, source)
            out.replace(named)
        finally:
            out.unlink(missing_ok=True)
    print(f'{source.name} -> {named} ({named.stat().st_size / 1e6:.1f} MB)')
    for note in notes:
        print(f'  note: {note}')


def _check(out: Path, source: Path) -> None:
    if out.is_dir():
        raise AmpUsageError(f'OUT={out} is a folder: give the name of a file.')
    if out.exists() and out.samefile(source):
        raise AmpUsageError(f'{out} is the source itself, which is never overwritten: give another OUT.')
