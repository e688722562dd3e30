"""Look into a checkpoint file of any kind, and turn it into weights or into a file for mmengine."""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import sys
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

#: Those of :mod:`amp_wrapper.checkpoint.convert`, which is imported after the options are read.
WEIGHT_TYPES = ('fp32', 'fp16', 'bf16')
WEIGHTS = ('average', 'trained')
TARGETS = (*WEIGHT_TYPES, 'stock', 'sharded')
#: What wrote a file of each kind, and what resumes from it as it is.
KINDS = {
    'own': (
        "amp_wrapper's AmpOptimWrapper",
        "amp_wrapper at any level; mmengine's own OptimWrapper and AmpOptimWrapper",
    ),
    'stock': (
        "mmengine's own AmpOptimWrapper",
        "amp_wrapper at any level; mmengine's own OptimWrapper and AmpOptimWrapper",
    ),
    'plain': ('no mixed precision', "amp_wrapper at any level; mmengine's own OptimWrapper and AmpOptimWrapper"),
    'apex': (
        "mmengine's own ApexOptimWrapper",
        "amp_wrapper at any level; mmengine's own ApexOptimWrapper and OptimWrapper",
    ),
    'raw_apex': ('a script on apex', 'scripts on apex; for everything else, convert it: --to stock'),
    'weights': ('weights alone', 'nothing; load the weights with load_from=...'),
}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The options; at least one thing to do."""
    parser = argparse.ArgumentParser(
        description='Look into a checkpoint file of any kind, or turn it into one for mmengine, or into weights.',
        epilog='example: python tools/convert_checkpoint.py work_dirs/cnn_o2/epoch_10.pth --to fp16 --publish',
    )
    parser.add_argument(
        'source',
        metavar='SRC',
        help='checkpoint file of any kind, or a folder of shards; read without running code from it',
    )
    parser.add_argument('out', metavar='OUT', nargs='?', help='file to write; default: beside SRC, epoch_10_fp16.pth')
    parser.add_argument('--inspect', action='store_true', help='print what is in SRC; writes nothing without --to')
    parser.add_argument(
        '--to',
        choices=TARGETS,
        help='fp32, fp16, bf16: weights alone in that type; stock: mmengine resumes from it without this package; '
        'sharded: a folder of which each rank of a sharded run reads its part',
    )
    parser.add_argument(
        '--weights',
        choices=WEIGHTS,
        help='of a file with an EMA: the averaged weights (default), or the trained ones',
    )
    parser.add_argument(
        '--publish',
        action='store_true',
        help='weights alone (fp32 unless --to says otherwise), with the first 8 digits of its SHA-256 in the file name',
    )
    parser.add_argument('--epoch', type=int, metavar='N', help='with stock: finished epochs, if SRC does not tell')
    parser.add_argument('--iter', type=int, metavar='N', help='with stock: finished iterations, likewise')
    # OUT may stand behind the options
    args = parser.parse_intermixed_args(argv)
    if args.publish:
        args.to = args.to or 'fp32'
        if args.to not in WEIGHT_TYPES:
            parser.error(f'--publish is for weights, not for --to {args.to}')
    if args.to != 'stock' and (args.epoch, args.iter) != (None, None):
        parser.error('--epoch and --iter are for --to stock')
    if args.to is None and not args.inspect:
        parser.error('nothing to do: give --inspect, --to or --publish')
    if args.out and not args.to:
        parser.error('OUT is written with --to or --publish only')
    return args


if __name__ == '__main__':
    # --help and wrong words are answered before the imports below, which take seconds
    parse_args()

import torch
from torch import Tensor

import amp_wrapper
from amp_wrapper.checkpoint import SavedAmp, convert, sharded
from amp_wrapper.checkpoint import file as checkpoint_file
from amp_wrapper.policy import resolve

# -- inspecting -------------------------------------------------------------------------------------------------------


def report(path: Path, file: Any) -> list[str]:
    """What is in a file, one line each.

    Args:
        path: Where it was read from; its checksums were right.
        file: Its content.

    Raises:
        AmpCheckpointError: None of the known kinds, or damaged.
    """
    content = convert.identify(file)
    meta = file.get('meta') if isinstance(file.get('meta'), Mapping) else {}
    writer, resumes = KINDS[content.kind]
    if content.kind not in ('weights', 'raw_apex') and not ('meta' in file and 'message_hub' in file):
        resumes = 'nothing as it is, for it has no meta or message_hub: convert it: --to stock'
    elif any(saved.kind == 'torch' and {} in saved.loss_scalers for saved in content.optimizers.values()):
        resumes += ' (this with a disabled scaler; for an enabled one: --to stock)'
    if path.is_dir() and content.kind != 'raw_apex':
        resumes = 'amp_wrapper at any level, on any number of processes; for all else, make a file of it: --to stock'
    rows = [
        ('file', f'{path.name}, {_bytes(_size(path))}, {_checksums(path)}'),
        ('kind', f'{content.kind} ({writer})'),
        ('saved', _saved(file, meta)),
        ('model', _tensors(content.state_dict.values())),
    ]
    bad = [
        name for name, value in content.state_dict.items() if isinstance(value, Tensor) and not value.isfinite().all()
    ]
    rows.append(('non-finite', ', '.join(bad) if bad else 'none'))
    average = file.get('ema_state_dict')
    if average is not None and not isinstance(average, Mapping):
        raise amp_wrapper.AmpCheckpointError(f"'ema_state_dict' must be a dict, but is {type(average).__name__}.")
    if average is not None:
        steps = average.get('steps')
        one = isinstance(steps, Tensor) and steps.numel() == 1
        count = f', {int(steps)} updates' if one else ''
        rows.append(('EMA', f"yes{count}: the average is in 'state_dict', the trained weights in 'ema_state_dict'"))
    else:
        rows.append(('EMA', 'none'))
    for name, saved in content.optimizers.items():
        rows += [(f'{name}: {label}' if name else label, text) for label, text in _optimizer(saved)]
    rows += [
        ('schedules', _schedules(file.get('param_schedulers'))),
        ('random', 'states of the random generators' if 'exact_resume' in file else 'no states of random generators'),
        ('resumes', resumes),
    ]
    width = max(len(label) for label, _ in rows)
    return [f'{label:<{width}}  {text}' for label, text in rows]


def _bytes(count: int) -> str:
    for unit, size in (('GB', 10**9), ('MB', 10**6), ('kB', 10**3)):
        if count >= size:
            return f'{count / size:.1f} {unit}'
    return f'{count} bytes'


def _size(path: Path) -> int:
    files = path.rglob('*') if path.is_dir() else [path]
    return sum(each.stat().st_size for each in files if each.is_file())


def _checksums(path: Path) -> str:
    if path.is_dir():
        return 'a folder of shards, checksums agree'
    if not zipfile.is_zipfile(path):
        return 'no checksums (format of torch before 1.6)'
    with zipfile.ZipFile(path) as archive:
        records = archive.infolist()
    with_sum = sum(1 for record in records if record.CRC or not record.file_size)
    return f'{with_sum} of {len(records)} records have a checksum, all right'


def _saved(file: Mapping[str, Any], meta: Mapping[str, Any]) -> str:
    words = [f'{key} {meta.get(key, file.get(key))}' for key in ('epoch', 'iter') if key in meta or key in file]
    if 'time' in meta:
        words.append(f'at {meta["time"]}')
    if 'mmengine_version' in meta:
        words.append(f'by mmengine {meta["mmengine_version"]}')
    if meta.get('seed') is not None:
        words.append(f'seed {meta["seed"]}')
    return ', '.join(words) or 'the file does not tell'


def _count(number: int, word: str) -> str:
    return f'{number} {word}' if number == 1 else f'{number} {word}s'


def _tensors(values: Iterable[Any]) -> str:
    """How many tensors, elements and bytes of each type."""
    kinds: dict[str, list[int]] = {}
    for value in values:
        if isinstance(value, Tensor):
            row = kinds.setdefault(str(value.dtype).removeprefix('torch.'), [0, 0, 0])
            for index, count in enumerate((1, value.numel(), value.numel() * value.element_size())):
                row[index] += count
    texts = [
        f'{tensors} of {kind} ({_count(elements, "element")}, {_bytes(size)})'
        for kind, (tensors, elements, size) in sorted(kinds.items())
    ]
    return 'tensors: ' + (', '.join(texts) or 'none')


def _optimizer(saved: SavedAmp) -> list[tuple[str, str]]:
    state, groups = saved.optimizer['state'], saved.optimizer['param_groups']
    parts = [value for entry in state.values() if isinstance(entry, Mapping) for value in entry.values()]
    rates = ', '.join(
        dict.fromkeys(f'{group["lr"]:g}' for group in groups if isinstance(group.get('lr'), (int, float)))
    )
    rows = [
        ('optimizer', f'state of {_count(len(state), "parameter")}; {_tensors(parts)}'),
        (
            'groups',
            f'{len(groups)}, {_count(sum(len(group["params"]) for group in groups), "parameter")}, lr {rates or "unknown"}',
        ),
    ]
    if 'base_param_settings' in saved.optimizer:
        rows.append(('base group', 'base_param_settings of mmengine'))
    if saved.properties is not None:
        rows.append(('level', _level(saved)))
    for index, scaler in enumerate(saved.loss_scalers):
        rows.append(
            (f'loss scale {index}' if len(saved.loss_scalers) > 1 else 'loss scale', _scale(scaler, saved.kind))
        )
    if not saved.loss_scalers:
        rows.append(('loss scale', 'none'))
    if saved.kind == 'own':
        window = saved.window
        if window is None:
            rows.append(('window', 'no open accumulation window'))
        else:
            count = sum(gradient is not None for gradient in window.gradients)
            rows.append(('window', f'open: gradients of {count} parameters, {sum(window.used)} losses so far'))
    return rows


def _level(saved: SavedAmp) -> str:
    assert saved.opt_level is not None
    assert saved.properties is not None
    try:
        usual = resolve(saved.opt_level).to_dict()
    except amp_wrapper.AmpConfigError:
        return f'{saved.opt_level}, which this version does not know'
    changed = [f'{key}={value!r}' for key, value in saved.properties.items() if usual.get(key, value) != value]
    return saved.opt_level + (f' with {", ".join(changed)}' if changed else ', no overrides')


def _scale(scaler: Mapping[str, Any], kind: str) -> str:
    if not scaler:
        return 'disabled'
    moves = 'dynamic' if scaler.get('dynamic', True) else 'static'
    if kind == 'apex':
        moves += ' by its values'
    text = f'{scaler["scale"]:g} ({moves}), {scaler["_growth_tracker"]} clean steps'
    if 'growth_interval' in scaler:
        text += f' of {scaler["growth_interval"]} to the next growth'
    if 'steps' in scaler:
        text += f'; {scaler["steps"]} steps, {scaler["skips"]} skipped'
    return text


def _schedules(schedules: Any) -> str:
    if not schedules:
        return 'none'
    if not isinstance(schedules, (Mapping, list, tuple)):
        raise amp_wrapper.AmpCheckpointError(f"'param_schedulers' must be a list, but is {type(schedules).__name__}.")
    count = sum(map(len, schedules.values())) if isinstance(schedules, Mapping) else len(schedules)
    return _count(count, 'state')


# -- writing ----------------------------------------------------------------------------------------------------------


def write(args: argparse.Namespace, source: Path, file: Any) -> tuple[Path, list[str]]:
    """Convert and write.

    Args:
        args: From :func:`parse_args`.
        source: Never overwritten.
        file: Its content.

    Returns:
        The file that was written, and the notes of the conversion.
    """
    # a name that ends in a hash would tell the wrong one
    stem = re.sub(r'-[0-9a-f]{8}$', '', source.stem) if args.publish else source.stem
    out = Path(args.out) if args.out else source.with_name(f'{stem}{_ending(args)}.pth')
    if not args.publish:
        _check_not_source(out, source)
    if args.to == 'sharded':
        sharded.save(file, out, lambda tensor: bool(tensor.ndim))
        return out, ['scalars, and what is no tensor, are in rest.pth']
    if out.is_dir():
        raise amp_wrapper.AmpUsageError(f'OUT={args.out} is a folder: give the name of a file.')
    if args.to in convert.WEIGHT_TYPES:
        result, notes = convert.to_weights(file, convert.WEIGHT_TYPES[args.to], args.weights or 'average')
    else:
        result, notes = convert.to_stock(file, args.epoch, args.iter, args.weights)
    if not args.publish:
        checkpoint_file.save(result, out)
        # both are resumable and of one time and iteration: the newest file of a folder stays the original
        moment = min(out.stat().st_mtime, source.stat().st_mtime) - 1
        os.utime(out, (moment, moment))
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


def _check_not_source(out: Path, source: Path) -> None:
    if out.exists() and os.path.samefile(out, source):
        raise amp_wrapper.AmpUsageError(f'{out} is the source itself, which is never overwritten: give another OUT.')


def _ending(args: argparse.Namespace) -> str:
    return '' if args.publish and args.to == 'fp32' else f'_{args.to}'


def main(argv: list[str] | None = None) -> None:
    """Inspect, convert, or both."""
    args = parse_args(argv)
    source = Path(args.source)
    try:
        file = sharded.load(source) if source.is_dir() else checkpoint_file.load(source)
        if args.inspect:
            print('\n'.join(report(source, file)))
        if args.to:
            out, notes = write(args, source, file)
            print(f'{source.name} -> {out} ({_bytes(_size(out))})')
            for note in notes:
                print(f'  note: {note}')
    except amp_wrapper.AmpError as error:
        # a message for people; the traceback would bury it
        raise SystemExit(f'{type(error).__name__}: {error}') from (
            error if os.environ.get('AMP_WRAPPER_DEBUG') else None
        )


if __name__ == '__main__':
    torch.set_num_threads(1)
    main()
