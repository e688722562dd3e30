"""What the tests of tools/migrate_from_apex.py share."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / 'tools'))

from apex_migration import Note, calls, files, fp16_optimizer, migrate, tables


def migrated(text: str) -> str:
    result = migrate(text.encode())
    return result.after if result.changed else text


def left(text: str) -> list[str]:
    return [note.name for note in migrate(text.encode()).by_hand]


__all__ = ['ROOT', 'Note', 'calls', 'files', 'fp16_optimizer', 'left', 'migrate', 'migrated', 'tables']
