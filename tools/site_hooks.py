"""Hooks of mkdocs: the version on every page, pages of measurements, references in docstrings, and where lines may break."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

# as a docstring writes it and Markdown renders it: :func:`~amp_wrapper.resolve`
REFERENCE = re.compile(r':(?:attr|class|data|func|meth|mod):<code>(~?)([^<]+)</code>')
# a block of output, and a line of four columns or more; a block with at least so many of them is a table or a drawing
OUTPUT = re.compile(r'<div class="language-(?:console|text) highlight">.*?</div>', re.DOTALL)
COLUMNS, ALIGNED_LINES = re.compile(r'(?:\S.*? {2,}){3}\S'), 3
# cells and headings, the names in them, and the places in a name at which a line may break
CELL = re.compile(r'<t[dh][ >].*?</t[dh]>', re.DOTALL)
HEADING = re.compile(r'<h[1-3][ >].*?</h[1-3]>', re.DOTALL)
CODE = re.compile(r'(?<=<code>)[^<]+(?=</code>)')
DOTTED = re.compile(r'(?<![\w.&#])[A-Za-z_]\w*(?:\.\w+)+(?=[^>]*<)')
BREAK = re.compile(r'(?<=[\w)\]][_./=,])(?=[A-Za-z_])|(?<=[a-z0-9]{3})(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z]{3})')
# names up to this length are broken on a phone alone (docs/stylesheets/pages.css); and what is on one line in a table
SHORT = 15
# an underscore that is not in code: an even number of backticks follows
UNDERSCORE = re.compile(r'_(?=(?:[^`]*`[^`]*`)*[^`]*$)')
# in code: an option of a command, in a piece of text between tags
OPTION = re.compile(r'(?<![\w-])--[a-z][a-z0-9-]*(?=[^<>]*<)')
# ... and the places at which a long line of code may break: behind an opening bracket, and behind =
OPENED = re.compile(r'<span class="p">[^<]*[(\[{]</span>|<span class="o">=</span>')
CODE_ELEMENT = re.compile(r'<code[ >].*?</code>', re.DOTALL)
DATE = re.compile(r'\b20\d\d-\d\d-\d\d\b(?![^<>]*>)')
ROOT = Path(__file__).resolve().parents[1]
VERSION = ROOT / 'amp_wrapper' / 'version.py'
# measurements: in the repository beside docs/, on the site in a folder of the pages
RESULTS, RESULTS_ON_SITE = 'benchmarks/results', 'results'
# What a page counts in the search, where not 1: guides come before the API, and that before pages of measurements. Of two
# pages with equally many hits the one for a newcomer comes first.
BOOSTS = {'opt_levels.md': 2.0, 'distributed.md': 2.0, 'nan.md': 1.5, 'first_config.md': 1.5, 'first_script.md': 1.5}
API_BOOST, RESULTS_BOOST = 0.4, 0.2


def on_config(config: Any) -> Any:
    """Called by mkdocs after it has read mkdocs.yml.

    Args:
        config: What mkdocs.yml says.

    Returns:
        The same object; its ``site_name`` ends with the version.
    """
    found = re.search(r"^__version__ = '(.+)'$", VERSION.read_text(encoding='utf-8'), re.MULTILINE)
    if found is None:
        raise ValueError(f'{VERSION} has no line __version__ = ...')
    config.site_name = f'{config.site_name} {found[1]}'
    return config


def on_files(files: Any, *, config: Any) -> Any:
    """Called by mkdocs with the files of ``docs/``.

    Args:
        files: Them.
        config: What mkdocs.yml says.

    Returns:
        The same object, with the pages and pictures of ``benchmarks/results``.
    """
    # the tests of the other hooks run without mkdocs
    from mkdocs.structure.files import File

    for path in sorted((ROOT / RESULTS).iterdir()):
        if path.suffix in {'.md', '.svg', '.png'}:
            files.append(File.generated(config, f'{RESULTS_ON_SITE}/{path.name}', abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Called by mkdocs with the source of each page.

    Args:
        markdown: The source.
        page: Its page.

    Returns:
        The source. Links to ``benchmarks/results`` lead to the pages of the site. A page of measurements has a way back, its
        heading as title, and the pages that it names as code are links.
    """
    name = page.file.src_uri
    is_result = name.startswith(f'{RESULTS_ON_SITE}/')
    boost = RESULTS_BOOST if is_result else BOOSTS.get(name, API_BOOST if name.startswith('api') else 1.0)
    page.meta.setdefault('search', {}).setdefault('boost', boost)
    if not is_result:
        return markdown.replace(f'](../{RESULTS}/', f']({RESULTS_ON_SITE}/')
    heading = re.search(r'^# (.+)$', markdown, re.MULTILINE)
    if heading is not None:
        page.meta.setdefault('title', heading[1])
    markdown = re.sub(r'`docs/(\w+\.md)`', r'[\1](../\1)', markdown).replace('](../../docs/', '](../')
    # names of functions in tables are no emphasis
    rows = (UNDERSCORE.sub(r'\\_', line) if line.startswith('|') else line for line in markdown.split('\n'))
    markdown = '\n'.join(rows)
    return f'[All measurements](../costs.md#all-measurements)\n\n{markdown}'


def on_page_content(html: str, **_: Any) -> str:
    """Called by mkdocs with each page that was rendered.

    Args:
        html: The page. ``:func:`~a.b``` of a docstring stands there as ``:func:<code>~a.b</code>``.

    Returns:
        The page with references as code: their last part where a ``~`` asks for it. mkdocs-autorefs makes links of those that a
        page of the site describes. Output that has columns is of the class ``aligned``, so that its lines are not wrapped.
    """

    def shown(reference: re.Match[str]) -> str:
        path = reference[2]
        code = f'<code>{path.rsplit(".", 1)[-1] if reference[1] else path}</code>'
        return f'<autoref identifier="{path}" optional>{code}</autoref>'

    def marked(block: re.Match[str]) -> str:
        lines = re.sub(r'<[^>]+>', '', block[0]).splitlines()
        is_aligned = sum(bool(COLUMNS.search(line)) for line in lines) >= ALIGNED_LINES
        return block[0].replace(' highlight">', ' highlight aligned">', 1) if is_aligned else block[0]

    return OUTPUT.sub(marked, REFERENCE.sub(shown, html))


def on_post_page(output: str, **_: Any) -> str:
    """Called by mkdocs with each whole page, after the index of the search was made.

    Args:
        output: The page.

    Returns:
        The page; long names in tables and headings may break after a dot, a slash, an underscore, or where a word of the name
        begins, and lines of code behind an opening bracket and ``=``. Dates in tables do not break, nor do options such as
        ``--json`` in code.
    """

    def broken(name: re.Match[str]) -> str:
        return BREAK.sub('<wbr>' if len(name[0]) > SHORT else '<wbr class="phone">', name[0])

    def laid_out(cell: re.Match[str]) -> str:
        return DATE.sub(r'<span class="date">\g<0></span>', CODE.sub(broken, cell[0]))

    def unbroken(code: re.Match[str]) -> str:
        return OPENED.sub(r'\g<0><wbr>', OPTION.sub(r'<span class="option">\g<0></span>', code[0]))

    output = CODE_ELEMENT.sub(unbroken, CELL.sub(laid_out, output))
    return HEADING.sub(lambda heading: DOTTED.sub(broken, heading[0]), output)
