"""Finds the newest complete checkpoint of a run, a file or a folder of shards."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import AmpCheckpointError
from . import file, folder

#: Where a message hub keeps the marks of the files that a run has saved, the last one its own.
SAVES = 'amp_saves'
_OWN_NAME = re.compile(r'(epoch|iter)_\d+\.pth|preempted\.pth')
#: What a file must hold to go on from, beside the model's weights.
_RESUMABLE = ('state_dict', 'optimizer', 'meta', 'message_hub')


@dataclass(frozen=True)
class Newest:
    """What :func:`find_newest` found.

    Attributes:
        path: The newest complete checkpoint, or None.
        passed_over: One sentence per file that looked like a checkpoint of the run and cannot be resumed from.
    """

    path: Path | None
    passed_over: tuple[str, ...]


@dataclass(frozen=True)
class _Candidate:
    path: Path
    saves: tuple[str, ...]
    order: tuple[str, int, float]


def verify(path: str | os.PathLike[str]) -> None:
    """Compare a file or a folder of shards with its checksums.

    Raises:
        AmpCheckpointError: Missing, truncated or changed; names what.
    """
    if folder.is_folder(path):
        folder.verify(path)
    else:
        file.verify(path)


def load_without_shards(path: str | os.PathLike[str]) -> Any:
    """The content of a file, whose tensors are read when they are used; of a folder, what is not sharded.

    Raises:
        AmpCheckpointError: As of :func:`amp_wrapper.checkpoint.file.load`.
    """
    path = folder.standing(path)
    if path.is_dir():
        folder.listed(path)
        path = path / folder.REST
    return file.load(path, check=False, mmap=True)


def find_newest(work_dir: str | os.PathLike[str], more: Iterable[str | os.PathLike[str]] = ()) -> Newest:
    """The newest checkpoint of a folder that is complete and can be resumed from.

    That is the one ``last_checkpoint`` names, or one that was saved after it by the same run: each file knows those before it
    (``message_hub['runtime_info']['amp_saves']``). Where that file is missing or broken, it is the one saved last by the time
    inside, and then by its iteration.

    Args:
        work_dir: The work folder.
        more: Further folders that checkpoints of this run are saved to.
    """
    work_dir = Path(work_dir)
    passed: list[str] = []
    named = _named(work_dir, passed)
    folders = [work_dir, *map(Path, more)]
    # CheckpointHook(out_dir=...) makes a folder of the same name there; any other place is that of another run
    if named is not None and named.parent.name == work_dir.name and not any(work_dir.glob('*.pth')):
        folders.append(named.parent)
    endings = {'.pth', '.pth' if named is None else named.suffix}
    endings |= {ending + file.OLD_SUFFIX for ending in endings}
    paths = {
        Path(os.path.abspath(path).removesuffix(file.OLD_SUFFIX))
        for place in folders
        for ending in endings
        for path in place.glob(f'*{ending}')
    }
    if named is not None:
        paths.add(named)
    was_here = (work_dir / 'last_checkpoint').exists()
    found: list[_Candidate] = []
    for path in sorted(paths):
        try:
            candidate = _look_into(path)
        except AmpCheckpointError as error:
            # somebody's pretrained weights may lie there, too
            if was_here or _OWN_NAME.fullmatch(path.name):
                passed.append(str(error))
            continue
        if candidate is not None:
            found.append(candidate)
        elif path == named:
            passed.append(f'{path}, which last_checkpoint names, holds no optimizer, meta or message_hub')
    for candidate in _from_newest(found, named):
        try:
            verify(candidate.path)
        except AmpCheckpointError as error:
            passed.append(str(error))
            continue
        return Newest(candidate.path, tuple(passed))
    return Newest(None, tuple(passed))


def _named(work_dir: Path, passed: list[str]) -> Path | None:
    """The file or folder that ``last_checkpoint`` means: in this work folder, where it has one of that name."""
    pointer = work_dir / 'last_checkpoint'
    if not pointer.is_file():
        return None
    try:
        text = pointer.read_text(errors='replace').strip().removeprefix('file://')
        target = Path(text)
        if target.name and folder.standing(work_dir / target.name).exists():
            return Path(os.path.abspath(work_dir / target.name))
        if target.name and target.is_absolute() and folder.standing(target).exists():
            return target
    except (OSError, ValueError):
        text = 'a name that is none'
    passed.append(f'{pointer} is empty' if not text else f'{text[:200]}, which {pointer} names, is not there')
    return None


def _look_into(path: Path) -> _Candidate | None:
    """None for a file that was not meant to be resumed from, such as weights alone."""
    found = load_without_shards(path)
    if not isinstance(found, Mapping) or not all(key in found for key in _RESUMABLE):
        return None
    meta = found['meta'] if isinstance(found['meta'], Mapping) else {}
    hub = found['message_hub'] if isinstance(found['message_hub'], Mapping) else {}
    info = hub.get('runtime_info')
    saves = info.get(SAVES) if isinstance(info, Mapping) else None
    saves = tuple(map(str, saves)) if isinstance(saves, (list, tuple)) else ()
    time, iteration = meta.get('time'), meta.get('iter')
    order = (
        time if isinstance(time, str) else '',
        iteration if isinstance(iteration, int) else 0,
        folder.standing(path).stat().st_mtime,
    )
    return _Candidate(path, saves, order)


def _from_newest(found: list[_Candidate], named: Path | None) -> list[_Candidate]:
    by_time = sorted(found, key=lambda candidate: candidate.order, reverse=True)
    start = next((candidate for candidate in found if candidate.path == named), None)
    if start is None:
        return by_time
    # what was saved after it and knows it: the run died before it could say so
    later = [candidate for candidate in by_time if start.saves and start.saves[-1] in candidate.saves[:-1]]
    later.sort(key=lambda candidate: len(candidate.saves) - candidate.saves.index(start.saves[-1]), reverse=True)
    rest = [candidate for candidate in by_time if candidate is not start and candidate not in later]
    return [*later, start, *rest]
