"""What the tests of tools/migrate_from_apex.py share."""

from __future__ import annotations

from pathlib import Path

from amp_wrapper.cli.apex_migration import Note, calls, files, migrate, tables

ROOT = Path(__file__).resolve().parents[2]


def migrated(text: str) -> str:
    result = migrate(text.encode())
    return result.after if result.changed else text


def left(text: str) -> list[str]:
    return [note.name for note in migrate(text.encode()).by_hand]


__all__ = ['ROOT', 'Note', 'calls', 'files', 'left', 'migrate', 'migrated', 'tables']
