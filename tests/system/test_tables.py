"""The tables of the pages are whole: each row has the cells of its header."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    page
    for pattern in ('*.md', 'docs/*.md', 'csrc/*.md', 'benchmarks/results/*.md')
    for page in sorted(ROOT.glob(pattern))
]


def broken_rows(text: str) -> list[str]:
    """Rows that have not as many cells as their header, tables without a rule under it or a blank line above.

    GitHub and the site drop the cells, add empty ones, or show the rows as text, each in its own way.
    """
    found, width, is_fenced, before = [], 0, False, ''
    lines = text.splitlines()
    for line, after in zip(lines, [*lines[1:], '']):
        is_fenced ^= line.lstrip().startswith('```')
        if is_fenced or not line.startswith('|'):
            width = 0
        else:
            cells = len(re.findall(r'(?<!\\)\|', line)) - 1
            begins, width = not width, width or cells
            is_table = bool(re.fullmatch(r'(\| :?-+:? )+\|', after)) and not (before and not before.startswith('<!--'))
            if cells != width or not line.endswith('|') or (begins and not is_table):
                found.append(line)
        before = line
    return found


@pytest.mark.parametrize('page', PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_tables_are_whole(page: Path) -> None:
    assert broken_rows(page.read_text()) == []


def test_a_broken_table_is_found() -> None:
    whole = '| a | b |\n| --- | --- |\n| `x \\| y` | 2 |\n'
    assert broken_rows(f'Text.\n\n{whole}\nText.\n') == []
    for broken in (
        whole.replace('2', '2 | 3'),
        whole.replace('| 2 |', '|'),
        whole.replace('2 |', '2'),
        whole.replace('\\|', '|'),
        f'Text.\n{whole}',
        whole.replace('| --- | --- |\n', ''),
        # a row that stands apart is no row
        whole.replace('\n| `x', '\n\n| `x'),
    ):
        assert broken_rows(broken), broken
