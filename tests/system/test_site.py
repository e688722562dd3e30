"""The pages for readers: what they name exists, and what they say to type gives what they show."""

from __future__ import annotations

import ast
import os
import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from command_line import python
from snippets import FENCE, PAGES, ROOT, pages_of, snippets, table, titled
from torch import nn

import amp_wrapper
from amp_wrapper import errors
from amp_wrapper.diagnostics.sandbox import CannotCopyError
from amp_wrapper.ops.building import BuildError
from amp_wrapper.policy import LEVELS

FIRST_CONFIG = ROOT / 'docs/first_config.md'


def public_errors() -> set[type[Exception]]:
    """Those of ``errors.py``, and what the package defines elsewhere for others to catch."""
    own = {value for value in vars(errors).values() if isinstance(value, type) and value.__module__ == errors.__name__}
    return {*own, CannotCopyError, BuildError}


def path_of(error: type[Exception]) -> str:
    """Where a user imports it from."""
    name = error.__name__
    return name if name in amp_wrapper.__all__ else f'{error.__module__}.{name}'


def test_every_error_is_on_its_page_with_when_and_what_to_do() -> None:
    text = (ROOT / 'docs/errors.md').read_text()
    rows = table(text, 'class')[1:]
    assert sorted(row[0].strip('`') for row in rows) == sorted(error.__name__ for error in public_errors())
    elsewhere = {path_of(error) for error in public_errors()} - {error.__name__ for error in public_errors()}
    assert set(re.findall(r'`(amp_wrapper\.[\w.]+Error)`', text)) == elsewhere
    assert all(when and remedy for _, when, remedy in rows)


def test_no_error_class_is_left_out() -> None:
    """A new class anywhere in the package is looked at: public, or with an underscore."""
    defined = {
        name
        for path in (ROOT / 'amp_wrapper').rglob('*.py')
        for name in re.findall(r'^class ([A-Z]\w*Error)\(', path.read_text(), re.MULTILINE)
    }
    assert defined == {error.__name__ for error in public_errors()}


def test_the_kinds_of_errors_are_those_of_the_page() -> None:
    """The last paragraph of the page says which builtin classes catch which error."""
    config = errors.AmpConfigError
    assert all(issubclass(config, kind) for kind in (ValueError, TypeError, AssertionError, RuntimeError))
    for error in public_errors() - {errors.AmpError, BuildError}:
        assert issubclass(error, OSError if error is errors.CheckpointWriteError else RuntimeError), error
        assert issubclass(error, errors.AmpError), error
    assert not issubclass(BuildError, errors.AmpError)


def pages_of_the_api() -> dict[str, str]:
    """The pages that describe names, without the one that lists them."""
    return {path.name: path.read_text() for path in sorted((ROOT / 'docs').glob('api_*.md'))}


def described(page: str) -> list[str]:
    """The names with a heading, in the order of the page."""
    return re.findall(r'^::: ([\w.]+)$', page, re.MULTILINE)


def test_the_overview_of_the_api_links_to_every_name_in_order() -> None:
    overview = (ROOT / 'docs/api.md').read_text()
    sections = re.split(r'^\*\*\[.+\]\((\w+\.md)\)\*\*', overview, flags=re.MULTILINE)[1:]
    linked = {page: re.findall(r'\]\[([\w.]+)\]', text) for page, text in zip(sections[::2], sections[1::2])}
    assert linked == {page: described(text) for page, text in pages_of_the_api().items()}


def test_every_public_name_is_on_a_page_of_the_api_under_its_public_path() -> None:
    text = '\n'.join(pages_of_the_api().values())
    listed = set(re.findall(r'^::: amp_wrapper\.(\w+)$', text, re.MULTILINE))
    # a module, by its functions; and a class of mmengine, by a sentence
    by_words = {'amp', 'TorchAmpOptimWrapper'}
    assert {*amp_wrapper.__all__} - by_words - listed == set()
    # what is imported from the package itself may stand under that path alone
    own = re.findall(r'^::: (amp_wrapper\.[\w.]+)\.(\w+)$', text, re.MULTILINE)
    top = {name: getattr(amp_wrapper, name) for name in {*amp_wrapper.__all__} - by_words}
    elsewhere = [(module, name) for module, name in own if name in top and not module.startswith('amp_wrapper.amp')]
    assert elsewhere == []
    assert all(f'`amp_wrapper.{name}`' in text for name in by_words)
    functions = set(re.findall(r'^::: amp_wrapper\.amp\.(\w+)$', text, re.MULTILINE))
    assert {name for name in amp_wrapper.amp.__all__ if name[0].islower()} <= functions


def test_printed_properties_are_those_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    """What ``amp.initialize`` prints, at each level without overrides, None included."""
    rows = table((ROOT / 'docs/opt_levels.md').read_text(), 'property')
    for place, level in enumerate(LEVELS, start=1):
        amp_wrapper.amp.initialize(nn.Linear(2, 2), opt_level=level)
        printed = dict(re.findall(r'^    (\w+) *: (.+)$', capsys.readouterr().out, re.MULTILINE))
        assert {name.strip('`'): cells[place - 1] for name, *cells in rows[1:]}.items() <= printed.items(), level


def test_the_navigation_has_the_groups_of_readers() -> None:
    nav = yaml.safe_load((ROOT / 'mkdocs.yml').read_text())['nav']
    groups = {name: value for entry in nav for name, value in entry.items() if isinstance(value, list)}
    assert list(groups) == ['Start', 'Guides', 'Reference', 'Evidence', 'Develop']
    assert pages_of(groups['Start']) == ['install.md', 'first_config.md', 'first_script.md', 'choose_level.md']


def test_the_version_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / 'tools'))
    from site_hooks import on_config

    class Config:
        site_name = 'amp-wrapper'

    assert on_config(Config()).site_name == f'amp-wrapper {amp_wrapper.__version__}'


# -- the first config, typed -------------------------------------------------------------------------------------------


def test_references_of_docstrings_are_code_and_links(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / 'tools'))
    from site_hooks import on_page_content

    link = '<autoref identifier="{}" optional><code>{}</code></autoref>'
    for written, shown in (
        (':func:<code>amp_wrapper.resolve</code>', link.format('amp_wrapper.resolve', 'amp_wrapper.resolve')),
        (':func:<code>~amp_wrapper.resolve</code>', link.format('amp_wrapper.resolve', 'resolve')),
        (':class:<code>~torch.optim.SGD</code>', link.format('torch.optim.SGD', 'SGD')),
        ('nothing: <code>x</code>', 'nothing: <code>x</code>'),
    ):
        assert on_page_content(written, page=None) == shown


def test_output_with_columns_keeps_its_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / 'tools'))
    from site_hooks import on_page_content

    block = '<div class="language-console highlight"><pre><code>{}</code></pre></div>'
    table = 'level  <span>time</span>  memory  loss\nO0     1.00  1.00    0.1\nO5     0.66  0.58    0.1'
    for output in ('a sentence', table.replace('  ', ' '), 'Epoch  1  2  3\nEpoch  2  2  3'):
        assert on_page_content(block.format(output), page=None) == block.format(output)
    assert on_page_content(block.format(table), page=None) == block.format(table).replace('light"', 'light aligned"')


def test_names_in_tables_and_headings_may_break(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / 'tools'))
    from site_hooks import on_post_page

    for written, shown in (
        ('<td><code>last_step_skipped</code></td>', '<td><code>last_<wbr>step_<wbr>skipped</code></td>'),
        ('<td>see <code>AmpCheckpointError</code></td>', '<td>see <code>AmpCheckpoint<wbr>Error</code></td>'),
        (
            '<td><code>FusedBiasLeakyReLUFunction</code></td>',
            '<td><code>Fused<wbr>Bias<wbr>Leaky<wbr>ReLU<wbr>Function</code></td>',
        ),
        (
            '<td><code>AmpOptimWrapper</code></td>',
            '<td><code>AmpOptim<wbr class="phone">Wrapper</code></td>',
        ),
        ('<td><a href="2026-11-26.html">a</a></td>',) * 2,
        (
            '<td>on 2026-11-26</td><p>2026-11-26</p>',
            '<td>on <span class="date">2026-11-26</span></td><p>2026-11-26</p>',
        ),
        ('<td><code>scale: 0.25</code></td>', '<td><code>scale: 0.25</code></td>'),
        ('<td>last_step_skipped</td><p><code>last_step_skipped</code></p>',) * 2,
        (
            '<h2 id="a.b.c"><span>amp.load_state_dict</span></h2>',
            '<h2 id="a.b.c"><span>amp.<wbr>load_<wbr>state_<wbr>dict</span></h2>',
        ),
        ('<h2>NaN and overflow</h2><pre>a.b</pre>',) * 2,
        (
            '<pre><code>plot <span class="w">a</span> --from 3</code></pre><p>--from</p>',
            '<pre><code>plot <span class="w">a</span> <span class="option">--from</span> 3</code></pre><p>--from</p>',
        ),
        (
            '<td><code>--cfg-options AB</code> a--b</td>',
            '<td><code><span class="option">--cfg-options</span> AB</code> a--b</td>',
        ),
        ('<code class="-x--y">a--b 1 --2</code>',) * 2,
        (
            '<code>dict<span class="p">(</span><span class="n">a</span><span class="o">=</span>1'
            '<span class="p">)</span></code>',
            '<code>dict<span class="p">(</span><wbr><span class="n">a</span><span class="o">=</span><wbr>1'
            '<span class="p">)</span></code>',
        ),
    ):
        assert on_post_page(written) == shown


def test_links_to_measurements_lead_to_the_pages_of_the_site(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / 'tools'))
    from site_hooks import on_page_markdown

    page = SimpleNamespace(file=SimpleNamespace(src_uri='numbers.md'), meta={})
    written = '[a](../benchmarks/results/step_cpu.md) [b](nan.md) `docs/ops.md`'
    assert on_page_markdown(written, page=page) == '[a](results/step_cpu.md) [b](nan.md) `docs/ops.md`'
    page.file.src_uri = 'results/step_cpu.md'
    rows = '| _foreach_copy_, `_x_` | a_b |\n_text_'
    assert on_page_markdown(rows, page=page).endswith('| \\_foreach\\_copy\\_, `_x_` | a\\_b |\n_text_')
    shown = on_page_markdown('# Title\n\nsee `docs/ops.md`, ![plot](step_cpu.svg)', page=page)
    assert (
        shown == '[All measurements](../measurements.md)\n\n# Title\n\nsee [ops.md](../ops.md), ![plot](step_cpu.svg)'
    )
    assert '[curves](../losses.png)' in on_page_markdown('[curves](../../docs/losses.png)', page=page)


def test_pages_of_measurements_have_their_headings_as_titles_and_come_last_in_the_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / 'tools'))
    from site_hooks import BOOSTS, on_page_markdown

    boosts = {}
    for name in ('results/step_cpu.md', 'api_amp.md', 'checkpoints.md', 'opt_levels.md'):
        page = SimpleNamespace(file=SimpleNamespace(src_uri=name), meta={})
        on_page_markdown('# The step\n\n# b', page=page)
        assert page.meta.get('title') == ('The step' if name.startswith('results/') else None)
        boosts[name] = page.meta['search']['boost']
    assert list(boosts.values()) == sorted(boosts.values())
    assert len(set(boosts.values())) == len(boosts)
    assert all((ROOT / 'docs' / name).is_file() for name in BOOSTS)


def test_the_search_finds_names_inside_of_code() -> None:
    plugins = yaml.safe_load((ROOT / 'mkdocs.yml').read_text())['plugins']
    separator = next(plugin['search']['separator'] for plugin in plugins if 'search' in plugin)
    words = re.split(separator, 'nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.5)')
    assert {'clip_grad_norm_', 'master_params', 'optimizer', '1.5'} <= set(words)


def test_every_page_of_measurements_is_listed() -> None:
    listed = re.findall(r'\]\(\.\./benchmarks/results/([\w.]+)\)', (ROOT / 'docs/measurements.md').read_text())
    written = {path.name for path in (ROOT / 'benchmarks/results').glob('*.md')}
    # what a run on a GPU writes is listed when it is committed
    on_a_gpu = {name for name in written if re.search('gpu|_cuda', name)}
    assert written - on_a_gpu - {*listed} == set() == {*listed} - written


def test_fragments_of_python_can_be_parsed() -> None:
    """Blocks of ``py`` name things of the reader, so they are not run."""
    fragments = [code for page in PAGES for _, code in snippets(page.read_text(), 'py')]
    assert fragments
    for code in fragments:
        ast.parse(code)


def test_lines_of_python_fit_beside_the_navigation() -> None:
    """At 1280 pixels; the size of code in ``docs/stylesheets/pages.css`` is made for this."""
    code = [code for page in PAGES for language in ('python', 'py') for _, code in snippets(page.read_text(), language)]
    assert max(len(line) for block in code for line in block.splitlines()) <= 118


def test_files_to_write_are_tried_here() -> None:
    """``test_docs.py`` leaves blocks with a file name to this file, which knows one page of them."""
    assert [page for page in PAGES if titled(page.read_text())] == [FIRST_CONFIG]
    for page in PAGES:
        text = page.read_text()
        assert len(re.findall('^ *```.* title=', text, re.MULTILINE)) == len(titled(text)), page


def typed(page: Path) -> list[tuple[str, list[str]]]:
    """(command, lines that it is shown to print) of each console block."""
    blocks = [code.splitlines() for _, code in snippets(page.read_text(), 'console')]
    assert all(block[0].startswith('$ ') for block in blocks)
    return [(block[0][2:], block[1:]) for block in blocks]


def without_numbers(line: str) -> str:
    """A line with its numbers left out, and what depends on the machine: the kind of ops, the verdict of a level."""
    line = re.sub(r'ops: .*', 'ops', line)
    line = re.sub(r'(?<=^O\d).*', '', line)
    return ' '.join(re.sub(r'-?\d+(\.\d+)?(e[-+]?\d+)?', '#', line).split())


def lines_not_printed(shown: list[str], printed: str) -> list[str]:
    """Those of the shown lines that the output lacks, in any place of a line, numbers apart."""
    found = [without_numbers(line.rpartition(' - INFO - ')[2]) for line in printed.splitlines()]
    return [line for line in shown if line not in ('', '...') and without_numbers(line) not in found]


def test_lines_that_are_not_printed_are_found() -> None:
    shown = ['...', 'Finished: epoch 5, accuracy 92.26', 'Tested at O2']
    assert lines_not_printed(shown, '01/02 - x - INFO - Finished: epoch 5, accuracy 91.5\n') == ['Tested at O2']


def test_the_first_config_page_can_be_typed_from_top_to_bottom(tmp_path: Path) -> None:
    """In an empty folder: its files, its commands in order, and each line that it shows comes."""
    for name, code in titled(FIRST_CONFIG.read_text()).items():
        (tmp_path / name).write_text(code)
    environment = {**os.environ, 'PYTHONPATH': os.pathsep.join([str(ROOT), os.environ.get('PYTHONPATH', '')])}
    accuracies = []
    commands = typed(FIRST_CONFIG)
    assert len(commands) == 5
    for command, shown in commands:
        words = shlex.split(command)
        assert words[0] == 'amp-wrapper'
        run = python('-m', 'amp_wrapper', *words[1:], cwd=tmp_path, env=environment)
        printed = (run.stdout + run.stderr).replace(f'{sys.executable} -m amp_wrapper', 'amp-wrapper')
        printed = printed.replace('python -m amp_wrapper', 'amp-wrapper')
        assert run.returncode == 0, f'{command}\n{printed[-3000:]}'
        assert lines_not_printed(shown, printed) == [], f'{command}\n{printed[-3000:]}'
        accuracies += re.findall(r'^(?:Finished|Tested).*accuracy ([\d.]+)$', printed, re.MULTILINE)
    assert len(accuracies) == 4
    assert min(map(float, accuracies)) > 85
    # the test of the last checkpoint, and the resumed training, have the accuracy of the first training
    assert accuracies[0] == accuracies[1] == accuracies[2]


def test_tables_have_as_many_cells_in_each_row() -> None:
    """A bar within a cell, or one too few, breaks the table on the page."""
    for page in PAGES:
        rows = FENCE.sub('', page.read_text()).splitlines()
        width = 0
        for line in rows:
            cells = len(re.findall(r'(?<!\\)\|', line)) if line.startswith('|') else 0
            assert not width or not cells or cells == width, f'{page.name}: {line}'
            width = cells
