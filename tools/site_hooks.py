"""Hooks of mkdocs: the version on every page, pages of measurements, the help of commands, and references in docstrings."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

# as a docstring writes it and Markdown renders it: :func:`~amp_wrapper.resolve`
REFERENCE = re.compile(r':(?:attr|class|data|func|meth|mod):<code>(~?)([^<]+)</code>')
ROOT = Path(__file__).resolve().parents[1]
# measurements: in the repository beside docs/, on the site in a folder of the pages
RESULTS, RESULTS_ON_SITE = 'benchmarks/results', 'results'


def on_config(config: Any) -> Any:
    """Add the version to the name of the site."""
    text = (ROOT / 'amp_wrapper' / 'version.py').read_text(encoding='utf-8')
    (version,) = re.findall(r"^__version__ = '(.+)'$", text, re.MULTILINE)
    config.site_name = f'{config.site_name} {version}'
    return config


def on_files(files: Any, *, config: Any) -> Any:
    """Add the pages of ``benchmarks/results`` to the files of ``docs/``."""
    from mkdocs.structure.files import File

    for path in sorted((ROOT / RESULTS).glob('*.md')):
        files.append(File.generated(config, f'{RESULTS_ON_SITE}/{path.name}', abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Lead links to ``benchmarks/results`` to the pages of the site, and those of a page of measurements back."""
    if page.file.src_uri == 'commands.md':
        markdown = with_help(markdown)
    if not page.file.src_uri.startswith(f'{RESULTS_ON_SITE}/'):
        return markdown.replace(f'](../{RESULTS}/', f']({RESULTS_ON_SITE}/')
    # pages of the API come first in a search
    page.meta.setdefault('search', {}).setdefault('boost', 0.2)
    markdown = re.sub(r'`docs/(\w+\.md)`', r'[\1](../\1)', markdown).replace('](../../docs/', '](../')
    return f'[All measurements](../costs.md#all-measurements)\n\n{markdown}'


def with_help(markdown: str) -> str:
    """Put the help of each command under its heading; a command without a heading is an error."""
    from amp_wrapper.cli.commands import COMMANDS

    os.environ['COLUMNS'] = '100'
    for name, parser in COMMANDS.items():
        before, heading, after = markdown.partition(f'\n## {name}\n')
        assert heading, f'commands.md has no heading for {name}'
        markdown = f'{before}{heading}\n```text\n{parser.format_help()}```\n{after}'
    return markdown


def on_page_content(html: str, **_: Any) -> str:
    """Make links of the references in docstrings, which stand there as ``:func:<code>~a.b</code>``.

    mkdocs-autorefs resolves those that a page of the site describes; a ``~`` asks for the last part alone.
    """

    def link(reference: re.Match[str]) -> str:
        path = reference[2]
        shown = path.rsplit('.', 1)[-1] if reference[1] else path
        return f'<autoref identifier="{path}" optional><code>{shown}</code></autoref>'

    return REFERENCE.sub(link, html)
