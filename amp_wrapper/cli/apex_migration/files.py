"""Files: finding, reading and writing them."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

_SKIPPED = frozenset({'build', 'dist', 'venv', 'env', 'node_modules', 'site-packages', '__pycache__'})


def find(paths: Sequence[Path]) -> Iterator[Path]:
    """The Python files that are meant, each once.

    Args:
        paths: Files, and folders to look into. Hidden folders, virtual environments and what builds leave are not entered.

    Raises:
        OSError: A folder that cannot be listed.
    """
    seen: set[Path] = set()
    for path in paths:
        for file in [path] if path.is_file() else _below(path):
            resolved = file.resolve()
            if resolved not in seen:
                seen.add(resolved)
                yield file


def _below(folder: Path) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise error

    for root, folders, names in os.walk(folder, onerror=refuse):
        here = Path(root)
        folders[:] = sorted(
            name
            for name in folders
            if name not in _SKIPPED
            and not name.startswith('.')
            and not name.endswith('.egg-info')
            and not (here / name / 'pyvenv.cfg').exists()
        )
        yield from (here / name for name in sorted(names) if name.endswith('.py') and (here / name).is_file())


def write(path: Path, data: bytes) -> None:
    """Replace a file's content, whole or not at all; its mode stays, and so does a link to it.

    Args:
        path: A file that exists.
        data: New content.

    Raises:
        PermissionError: The file is read-only.
        OSError: It could not be written; the old one stands.
    """
    path = path.resolve()
    if not path.stat().st_mode & stat.S_IWUSR:
        raise PermissionError('the file is read-only; chmod u+w it first')
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f'.{path.name}.', suffix='.tmp')
    try:
        with os.fdopen(handle, 'wb') as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        shutil.copymode(path, name)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
