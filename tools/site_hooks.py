"""Hooks of mkdocs: the version of the package beside its name on every page, and the cross-references of docstrings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

# as a docstring writes it and Markdown renders it: :func:`~amp_wrapper.resolve`
REFERENCE = re.compile(r':(?:attr|class|data|func|meth|mod):<code>(~?)([^<]+)</code>')
VERSION = Path(__file__).resolve().parents[1] / 'amp_wrapper' / 'version.py'


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


def on_page_content(html: str, **_: Any) -> str:
    """Called by mkdocs with each page that was rendered.

    Args:
        html: The page. ``:func:`~a.b``` of a docstring stands there as ``:func:<code>~a.b</code>``.

    Returns:
        The page with references as code: their last part where a ``~`` asks for it, and as links where the page describes them.
    """
    described = set(re.findall(r'\bid="([\w.]+)"', html))

    def shown(reference: re.Match[str]) -> str:
        path = reference[2]
        code = f'<code>{path.rsplit(".", 1)[-1] if reference[1] else path}</code>'
        return f'<a href="#{path}">{code}</a>' if path in described else code

    return REFERENCE.sub(shown, html)
