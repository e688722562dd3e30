"""What is in a checkpoint file or folder of any kind, in lines for a reader."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from ..errors import AmpCheckpointError, AmpConfigError
from ..policy import OptLevel, resolve
from . import SavedAmp, convert

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


def report(path: Path, file: Any) -> list[str]:
    """What is in a file, one line each.

    Args:
        path: Where it was read from; its checksums were right.
        file: Its content.

    Raises:
        AmpCheckpointError: None of the known kinds, or damaged.
    """
    content = convert.identify(file)
    meta: Mapping[str, Any] = file['meta'] if isinstance(file.get('meta'), Mapping) else {}
    writer, resumes = KINDS[content.kind]
    if content.kind not in ('weights', 'raw_apex') and not ('meta' in file and 'message_hub' in file):
        resumes = 'nothing as it is, for it has no meta or message_hub: convert it: --to stock'
    elif any(saved.kind == 'torch' and {} in saved.loss_scalers for saved in content.optimizers.values()):
        resumes += ' (this with a disabled scaler; for an enabled one: --to stock)'
    if path.is_dir() and content.kind != 'raw_apex':
        resumes = 'amp_wrapper at any level, on any number of processes; for all else, make a file of it: --to stock'
    rows = [
        ('file', f'{path.name}, {byte_count(size(path))}, {_checksums(path)}'),
        ('kind', f'{content.kind} ({writer})'),
        ('saved', _saved(file, meta)),
        ('model', _tensors(content.state_dict.values())),
    ]
    bad = [name for name, value in content.state_dict.items() if isinstance(value, Tensor) and not _is_finite(value)]
    rows.append(('non-finite', ', '.join(bad) if bad else 'none'))
    average = file.get('ema_state_dict')
    if average is not None and not isinstance(average, Mapping):
        raise AmpCheckpointError(f"'ema_state_dict' must be a dict, but is {type(average).__name__}.")
    text = 'none'
    if average is not None:
        steps = average.get('steps')
        count = f', {int(steps)} updates' if isinstance(steps, Tensor) and steps.numel() == 1 else ''
        text = f"yes{count}: the average is in 'state_dict', the trained weights in 'ema_state_dict'"
    rows.append(('EMA', text))
    for name, saved in content.optimizers.items():
        rows += [(f'{name}: {label}' if name else label, text) for label, text in _optimizer(saved)]
    rows += [
        ('schedules', _schedules(file.get('param_schedulers'))),
        ('random', 'states of the random generators' if 'exact_resume' in file else 'no states of random generators'),
        ('resumes', resumes),
    ]
    width = max(len(label) for label, _ in rows)
    return [f'{label:<{width}}  {text}' for label, text in rows]


def byte_count(count: int) -> str:
    for unit, size in (('GB', 10**9), ('MB', 10**6), ('kB', 10**3)):
        if count >= size:
            return f'{count / size:.1f} {unit}'
    return f'{count} bytes'


def size(path: Path) -> int:
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
        words.append(_writer(str(meta['mmengine_version'])))
    if meta.get('seed') is not None:
        words.append(f'seed {meta["seed"]}')
    return ', '.join(words) or 'the file does not tell'


def _writer(version: str) -> str:
    """mmengine writes its version, and right behind it the commit of the repository that the training was started in."""
    match = re.fullmatch(r'(.+?)(?:([0-9a-f]{40}|[0-9a-f]{64})|unknown)', version)
    if match is None:
        return f'by mmengine {version}'
    place = f', in a repository at commit {match[2][:8]}' if match[2] else ''
    return f'by mmengine {match[1]}{place}'


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
        f'{tensors} of {kind} ({_count(elements, "element")}, {byte_count(size)})'
        for kind, (tensors, elements, size) in sorted(kinds.items())
    ]
    return 'tensors: ' + (', '.join(texts) or 'none')


def _optimizer(saved: SavedAmp) -> list[tuple[str, str]]:
    state, groups = saved.optimizer['state'], saved.optimizer['param_groups']
    parts = [value for entry in state.values() if isinstance(entry, Mapping) for value in entry.values()]
    rates = dict.fromkeys(f'{group["lr"]:g}' for group in groups if isinstance(group.get('lr'), (int, float)))
    count = _count(sum(len(group['params']) for group in groups), 'parameter')
    rows = [
        ('optimizer', f'state of {_count(len(state), "parameter")}; {_tensors(parts)}'),
        ('groups', f'{len(groups)}, {count}, lr {", ".join(rates) or "unknown"}'),
    ]
    if 'base_param_settings' in saved.optimizer:
        rows.append(('base group', 'base_param_settings of mmengine'))
    if saved.properties is not None:
        rows.append(('level', _level(saved)))
    for index, scaler in enumerate(saved.loss_scalers):
        label = f'loss scale {index}' if len(saved.loss_scalers) > 1 else 'loss scale'
        rows.append((label, _scale(scaler, saved.kind)))
    if not saved.loss_scalers:
        rows.append(('loss scale', 'none'))
    if saved.kind == 'own':
        window, text = saved.window, 'nothing: it was saved after a step'
        if window is not None:
            taken = sum(gradient is not None for gradient in window.gradients)
            text = f'gradients of {taken} parameters, {sum(window.used)} losses so far'
        rows.append(('accumulated', text))
    return rows


def _level(saved: SavedAmp) -> str:
    assert saved.opt_level is not None
    assert saved.properties is not None
    try:
        usual = resolve(cast(OptLevel, saved.opt_level)).to_dict()
    except AmpConfigError:
        return f'{saved.opt_level}, which this version does not know'
    changed = [f'{key}={value!r}' for key, value in saved.properties.items() if usual.get(key, value) != value]
    return saved.opt_level + (f' with {", ".join(changed)}' if changed else ', no overrides')


def _scale(scaler: Mapping[str, Any], kind: str) -> str:
    if not scaler:
        return 'disabled'
    moves = ('dynamic' if scaler.get('dynamic', True) else 'static') + (' by its values' if kind == 'apex' else '')
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
        raise AmpCheckpointError(f"'param_schedulers' must be a list, but is {type(schedules).__name__}.")
    count = sum(map(len, schedules.values())) if isinstance(schedules, Mapping) else len(schedules)
    return _count(count, 'state')


def _is_finite(tensor: Tensor) -> bool:
    # torch itself asks 8-bit numbers since 2.15 alone
    exact = tensor.float() if tensor.is_floating_point() and tensor.itemsize == 1 else tensor
    return bool(exact.isfinite().all())
