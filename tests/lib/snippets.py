"""The Python snippets of a page: found, executed, and what they print compared with what the page says that they print."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / 'README.md', *sorted((ROOT / 'docs').glob('*.md'))]
FENCE = re.compile(r'^(?P<indent> *)```(?P<language>\w+)?[^\n]*\n(?P<code>.*?)^(?P=indent)```', re.M | re.S)


def snippets(text: str, language: str) -> list[tuple[int, str]]:
    """(line of the first character, code) of every fenced block in ``language``."""
    return [
        (text.count('\n', 0, match.start('code')) + 1, textwrap.dedent(match['code']))
        for match in FENCE.finditer(text)
        if match['language'] == language
    ]


def titled(text: str) -> dict[str, str]:
    """File name to code, of the fenced blocks that are files to be written: ``python title="config.py"``."""
    return dict(re.findall(r'^```\w+ title="([\w.]+)"\n(.*?)^```', text, re.M | re.S))


def run_code(code: str, namespace: dict[str, Any], where: str) -> None:
    """Execute; ``print(x)  # text`` must print the text."""
    printed: list[str] = []
    namespace['print'] = lambda *values: printed.append(' '.join(map(str, values)))
    expected = re.findall(r'^ *print\(.*\)  # (.+)$', code, re.MULTILINE)
    calls = sum(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == 'print'
        for node in ast.walk(ast.parse(code))
    )
    assert len(expected) == calls, f'{where}: each print() needs a comment with what it prints'
    # the page's line numbers in tracebacks
    exec(compile('\n' * (int(where.rsplit(':', 1)[1]) - 1) + code, where.rsplit(':', 1)[0], 'exec'), namespace)
    assert printed == expected, where


def run_all(page: Path) -> dict[str, Any]:
    """Execute every snippet of a page without configs, in order; returns what they have defined."""
    namespace: dict[str, Any] = {'__name__': 'page'}
    for line, code in snippets(page.read_text(), 'python'):
        run_code(code, namespace, f'{page.name}:{line}')
    return namespace


def definitions(page: Path) -> dict[str, Any]:
    """What the snippets of a page import and define, without the training that the page then runs."""
    namespace: dict[str, Any] = {'__name__': 'page'}
    for line, code in snippets(page.read_text(), 'python'):
        tree = ast.parse('\n' * (line - 1) + code)
        kinds = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
        tree.body = [node for node in tree.body if isinstance(node, kinds)]
        exec(compile(tree, page.name, 'exec'), namespace)
    return namespace


def imported(text: str) -> set[str]:
    """Top-level names of what the snippets of a page import."""
    nodes = [node for _, code in snippets(text, 'python') for node in ast.walk(ast.parse(code))]
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    return {name.split('.')[0] for name in names}


def foreign_packages() -> set[str]:
    """What ``nox -s foreign`` installs beyond the ordinary environment, by the names of the imports."""
    (group,) = re.findall(r'^foreign = \[(.*?)\]', (ROOT / 'pyproject.toml').read_text(), re.M | re.S)
    return {name.replace('-', '_') for name in re.findall(r'"(.+?)"', group)}


def foreign_pages() -> list[Path]:
    """The pages that ``nox -s foreign`` runs: their snippets import one of its packages."""
    return [page for page in sorted((ROOT / 'docs').glob('*.md')) if imported(page.read_text()) & foreign_packages()]


def not_installed(names: Iterable[str]) -> list[str]:
    """Those of the packages that this environment lacks."""
    return sorted(name for name in names if find_spec(name) is None)
