"""What became of each damaged file of ``fuzz_checkpoints.py``, kept in a file and compared with what becomes of it now.

Beside ``NAME.json.xz`` lies ``NAME.zip``, the checkpoints that were damaged: those of another run would hold other times and
paths, and the same seed would damage other bytes. The damage follows from these files, the seed and torch, whose version is
kept, too: what another version writes and says of broken archives differs.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import lzma
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path

import mmengine
import torch

COLUMNS = ('damage', 'verdict', 'error', 'key', 'message')
#: A key in a message: ``amp['window']['used']``, ``'state'[0]['exp_avg']``, ``param_schedulers[1]``, or a quoted word.
_KEY = re.compile(r"""'?\w+'?(?:\[(?:'[^']*'|"[^"]*"|-?\d+)\])+|'[^']+'|"[^"]+\"""")


@dataclasses.dataclass
class Record:
    """What :func:`write` kept.

    Attributes:
        verdicts: :data:`COLUMNS` of each file, in their order.
        checkpoints: What was damaged, by ``level/name``.
    """

    verdicts: list[list[str]]
    checkpoints: dict[str, bytes]


def _text(error: Exception, path: Path) -> str:
    """A message without what differs from run to run."""
    text = str(error).replace(str(path), 'FILE').replace(str(path.parent), 'FOLDER')
    # the folder of the run that saved the checkpoints, which they name
    text = re.sub(r'[^\s\'"]*/fuzz-\w{8}', 'FOLDER', text)
    return re.sub(r'amp-wrapper-hacked-\d+', 'HACKED', re.sub(r'\b0x[0-9a-f]{6,}', 'ADDRESS', text))


def _row(damage: str, verdict: str, error: Exception | None, path: Path, message: str = '') -> list[str]:
    text = message if error is None else _text(error, path)
    found = _KEY.search(text) if error is not None else None
    return [damage, verdict, '' if error is None else type(error).__name__, found.group() if found else '', text]


def refused(damage: str, error: Exception, path: Path) -> list[str]:
    """The verdict on a file that was refused."""
    return _row(damage, 'refused', error, path)


def failed(damage: str, error: Exception, path: Path) -> list[str]:
    """The verdict on a file that ended in an untyped error."""
    return _row(damage, 'failure', error, path)


def harmless(damage: str, differences: Sequence[str], end: Exception | None, path: Path) -> list[str]:
    """The verdict on a file that was taken.

    Args:
        damage: What was done to it.
        differences: Where the state is not that of the undamaged file.
        end: What the next iteration raised.
        path: The file.
    """
    where = sorted({row.partition(': ')[0] for row in differences})
    shown = where[0] + (f' and {len(where) - 1} more {_digest(where)}' if len(where) > 1 else '') if where else ''
    return _row(damage, 'harmless', end, path, f'differs: {shown}' if shown else '')


def _digest(rows: Sequence[str]) -> str:
    return hashlib.sha256('\n'.join(rows).encode()).hexdigest()[:8]


def versions() -> dict[str, str]:
    """What a comparison depends on beside the package."""
    return {'torch': torch.__version__.partition('+')[0], 'mmengine': mmengine.__version__}


def write(path: Path, seed: int, verdicts: Sequence[Sequence[str]], checkpoints: dict[str, bytes]) -> None:
    """Keep the verdicts, and the checkpoints beside them.

    Args:
        path: Ends in ``.json.xz``.
        seed: Of the damage.
        verdicts: One row for each file.
        checkpoints: What was damaged, by ``level/name``.
    """
    content = {'versions': versions(), 'seed': seed, 'columns': COLUMNS, 'verdicts': verdicts}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(lzma.compress(json.dumps(content, separators=(',', ':')).encode(), preset=9))
    with zipfile.ZipFile(_beside(path), 'w', zipfile.ZIP_LZMA) as archive:
        for name, content_of in checkpoints.items():
            # a fixed time: the same checkpoints make the same archive
            archive.writestr(zipfile.ZipInfo(name), content_of, zipfile.ZIP_LZMA)


def _beside(path: Path) -> Path:
    return path.with_name(path.name.removesuffix('.json.xz') + '.zip')


def read(path: Path, seed: int) -> Record | None:
    """What :func:`write` kept; None, with a line that says why, where it cannot be compared with."""
    content = json.loads(lzma.decompress(path.read_bytes()))
    here = {**versions(), 'seed': str(seed)}
    there = {**content['versions'], 'seed': str(content['seed'])}
    if here != there:
        print(f'{path} is not compared with: it was recorded with {there}, and this is {here}')
        return None
    with zipfile.ZipFile(_beside(path)) as archive:
        checkpoints = {name: archive.read(name) for name in archive.namelist()}
    return Record(content['verdicts'], checkpoints)


def compare(before: Record, now: Sequence[Sequence[str]], loose: bool = False) -> list[str]:
    """Where verdicts differ, in lines for people; nothing where they are the same.

    Args:
        before: From :func:`read`. The first files count where fewer are given now.
        now: One row for each file.
        loose: Leave the texts of messages out; what was done, verdicts, kinds of errors and named keys count still.
    """
    if len(now) > len(before.verdicts):
        print(
            f'{len(now) - len(before.verdicts)} files are more than were recorded, and have nothing to be compared with'
        )
    columns = len(COLUMNS) - (1 if loose else 0)
    lines, counts = [], dict.fromkeys(COLUMNS[:columns], 0)
    for number, (there, here) in enumerate(zip(before.verdicts, now)):
        differing = [name for name, a, b in zip(COLUMNS[:columns], there, here) if a != b]
        for name in differing:
            counts[name] += 1
        if differing and len(lines) < 40:
            lines.append(f'file {number}, {there[0]}: other {", ".join(differing)}')
            lines += [f'  before: {" | ".join(there[1:])}', f'  now:    {" | ".join(here[1:])}']
    total = min(len(now), len(before.verdicts))
    told = ', '.join(f'{count} in {name}' for name, count in counts.items())
    print(f'compared with the record: {total} files; differing: {told}')
    return lines
