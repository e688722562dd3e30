"""Pages of reports: self-contained, escaped, written whole or not at all."""

from __future__ import annotations

import json
import math
from html.parser import HTMLParser
from pathlib import Path
from unittest import mock

import jinja2
import pytest

from amp_wrapper.diagnostics import pages

PAGE = """{% extends 'base.html.j2' %}{% from 'macros.html.j2' import data_table, histogram %}
{% block title %}A <b> page{% endblock %}
{% block content %}{{ data_table(columns, rows, 'Find') }}{{ histogram(powers, -3, 2) }}{% endblock %}"""


class _Cells(HTMLParser):
    """The texts of cells, the attributes of bars, and every address that a browser would load."""

    def __init__(self) -> None:
        super().__init__()
        self.cells: list[str] = []
        self.bars: list[dict[str, str | None]] = []
        self.loads: list[str] = []
        self.attributes: list[dict[str, str | None]] = []
        self._open = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.loads += [str(found[key]) for key in ('src', 'href') if key in found]
        if tag == 'span' and 'height' in str(found.get('style')):
            self.bars.append(found)
        if tag == 'td':
            self._open = True
            self.cells.append('')
            self.attributes.append(found)

    def handle_endtag(self, tag: str) -> None:
        self._open = self._open and tag != 'td'

    def handle_data(self, data: str) -> None:
        if self._open:
            self.cells[-1] += data


@pytest.fixture
def page(tmp_path: Path) -> str:
    environment = pages._environment()
    both = jinja2.ChoiceLoader([jinja2.DictLoader({'page.html.j2': PAGE}), environment.loader])
    with mock.patch.object(environment, 'loader', both):
        return pages.render(
            'page.html.j2',
            columns=[dict(title='name'), dict(title='bytes', num=True)],
            rows=[['<script>x</script>', dict(text='1.0 KiB', value=1024, hint='a "quoted" hint')]],
            powers={-4: 1, 0: 4, 2: 2},
        )


def test_text_is_escaped_and_nothing_is_loaded(page: str) -> None:
    read = _Cells()
    read.feed(page)
    assert read.cells == ['<script>x</script>', '1.0 KiB']
    assert '<script>x' not in page
    assert read.attributes[1] == {'class': 'num ', 'data-value': '1024', 'title': 'a "quoted" hint'}
    assert read.loads == []
    assert 'http' not in page
    assert 'url(' not in page


def test_bars_are_as_high_as_their_counts_and_coloured_beyond_the_type(page: str) -> None:
    read = _Cells()
    read.feed(page)
    assert [bar['style'] for bar in read.bars] == [
        f'height:{height}%' for height in ('25.0', '0.0', '0.0', '0.0', '100.0', '0.0', '50.0')
    ]
    assert [bar.get('class') for bar in read.bars] == ['under', None, None, None, None, None, 'over']


def test_a_template_that_asks_for_more_is_an_error() -> None:
    with pytest.raises(jinja2.TemplateNotFound):
        pages.render('nothing.html.j2')
    environment = pages._environment()
    with mock.patch.object(environment, 'loader', jinja2.DictLoader({'x.j2': '{{ absent }}'})):
        with pytest.raises(jinja2.UndefinedError):
            pages.render('x.j2')


def test_both_files_are_written(tmp_path: Path) -> None:
    page, data = pages.write(
        tmp_path / 'a' / 'b', 'report', '<p>ä</p>', {'x': math.inf, 'y': [1, (2.5, math.nan)], 3: None}
    )
    assert page.read_bytes().decode('utf-8') == '<p>ä</p>'
    assert json.loads(data.read_text()) == {'x': 'inf', 'y': [1, [2.5, 'nan']], '3': None}
    assert sorted(path.name for path in (tmp_path / 'a' / 'b').iterdir()) == ['report.html', 'report.json']


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    pages.write(tmp_path, 'report', 'old', {})
    with mock.patch('os.replace', side_effect=OSError(28, 'No space left on device')):
        with pytest.raises(OSError, match='No space'):
            pages.write(tmp_path, 'report', 'new', {})
    assert (tmp_path / 'report.html').read_text() == 'old'
    assert sorted(path.name for path in tmp_path.iterdir()) == ['report.html', 'report.json']
    (tmp_path / 'file').touch()
    with pytest.raises(OSError):
        pages.write(tmp_path / 'file', 'report', 'new', {})


@pytest.mark.parametrize(
    'function, value, text',
    [
        (pages.bytes_text, 999, '999 B'),
        (pages.bytes_text, 1024, '1.0 KiB'),
        (pages.bytes_text, 3 * 2**29, '1.5 GiB'),
        (pages.bytes_text, 2**52, '4096.0 TiB'),
        (pages.share_text, 0, '0'),
        (pages.share_text, 1e-9, '< 0.01 %'),
        (pages.share_text, 0.125, '12.50 %'),
        (pages.share_text, 1 - 1e-9, '> 99.99 %'),
        (pages.share_text, 1.0, '100.00 %'),
        (pages.number_text, 65504.0, '65504'),
        (pages.number_text, 1.2345e5, '1.234e+05'),
        (pages.number_text, 1e-9, '1e-09'),
        (pages.number_text, math.inf, 'inf'),
    ],
)
def test_numbers_as_text(function: object, value: float, text: str) -> None:
    assert callable(function)
    assert function(value) == text
