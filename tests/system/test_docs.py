"""The pages are true: snippets run, tables of levels agree with the policy, links and commands name what exists."""

from __future__ import annotations

import ast
import doctest
import importlib
import os
import pkgutil
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from missing import skip_without_fsdp
from mmengine.config import Config
from mmengine.logging import MMLogger
from mmengine.optim import build_optim_wrapper
from mmengine.registry import HOOKS
from processes import python
from snippets import FENCE, PAGES, foreign_packages, imported, not_installed, run_code, snippets, titled
from torch import nn

import amp_wrapper
from amp_wrapper import AmpOptimWrapper

ROOT = Path(__file__).resolve().parents[2]
#: A snippet of nothing but assignments and imports, one of them to a name of these, is a config.
CONFIG_NAMES = frozenset({'optim_wrapper', 'custom_hooks', 'default_hooks', 'custom_imports', 'load_from'})


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


# -- snippets ---------------------------------------------------------------------------------------------------------


def is_config(code: str) -> bool:
    body = ast.parse(code).body
    assigned = {t.id for node in body if isinstance(node, ast.Assign) for t in node.targets if isinstance(t, ast.Name)}
    return bool(assigned & CONFIG_NAMES) and all(isinstance(n, (ast.Assign, ast.Import, ast.ImportFrom)) for n in body)


class TinyDetector(nn.Module):
    """Has a module for every name that the pages use in ``keep_fp32``."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.ModuleDict({'conv1': nn.Conv2d(3, 4, 3), 'norm1': nn.BatchNorm2d(4)})
        self.bbox_head = nn.ModuleDict({'fc': nn.Linear(4, 4), 'norm': nn.LayerNorm(4)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.backbone['norm1'](self.backbone['conv1'](x)).mean((2, 3))
        return self.bbox_head['norm'](self.bbox_head['fc'](x))


def run_config(code: str) -> None:
    """Parse as mmengine does, build what can be built, and train one step."""
    # the project's own config, which is not installed here, brings the optimizer
    cfg = Config.fromstring(re.sub(r"^_base_ = '.+::.+'$", '', code, flags=re.MULTILINE), '.py')
    if '_base_' in code and 'optim_wrapper' in cfg:
        cfg.optim_wrapper.setdefault('optimizer', dict(type='SGD', lr=0.01))
    # a list would replace that of the base config, and its hooks with it
    assert 'custom_hooks' not in cfg
    for hook in cfg.get('default_hooks', {}).values():
        HOOKS.build(dict(hook))
    if 'optim_wrapper' not in cfg:
        return
    model = TinyDetector()
    wrapper = build_optim_wrapper(model, cfg.optim_wrapper)
    assert isinstance(wrapper, AmpOptimWrapper)
    with wrapper.optim_context(model):
        loss = model(torch.randn(2, 3, 6, 6)).square().mean()
    wrapper.update_params(loss)
    assert [name for name, parameter in model.named_parameters() if not parameter.isfinite().all()] == []


def run_page(text: str, name: str) -> None:
    namespace: dict[str, Any] = {'__name__': 'page'}
    blocks, files = snippets(text, 'python'), titled(text).values()
    # a fence that the pattern misses would be a snippet that nobody runs
    assert len(blocks) == len(re.findall(r'^ *```python', text, re.MULTILINE)) and text.count('```') % 2 == 0
    try:
        for line, code in blocks:
            if is_config(code) and code not in files:
                run_config(code)
            elif code not in files:
                run_code(code, namespace, f'{name}:{line}')
    finally:
        # torch.compile and the page's functions hold the names, and with them optimizers that amp.state_dict() would find
        namespace.clear()


@pytest.mark.parametrize('page', [page for page in PAGES if snippets(page.read_text(), 'python')], ids=name_of)
def test_python_snippets_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = page.read_text()
    # pages on packages that nox -s foreign installs are run there, by the same function
    if absent := not_installed(imported(text) & foreign_packages()):
        pytest.skip(f'{", ".join(absent)} not installed: nox -s foreign runs this page')
    if page.name == 'sharding.md':
        skip_without_fsdp()
    if page.name.startswith('recipes_'):
        # they write checkpoints
        monkeypatch.chdir(tmp_path)
    run_page(text, name_of(page))


@pytest.mark.long
def test_first_config_can_be_typed_from_top_to_bottom(tmp_path: Path) -> None:
    """In an empty folder: its files, and its commands in order, whose output has each line that the page shows."""
    text = (ROOT / 'docs/first_config.md').read_text()
    for name, code in titled(text).items():
        (tmp_path / name).write_text(code)
    environment = {**os.environ, 'PYTHONPATH': os.pathsep.join([str(ROOT), os.environ.get('PYTHONPATH', '')])}
    blocks = [code.split('\n', 1) for _, code in snippets(text, 'console')]
    assert len(blocks) >= 3
    for command, shown in blocks:
        words = shlex.split(command.removeprefix('$ '))
        run = python('-m', 'amp_wrapper', *words[1:], cwd=tmp_path, env=environment)
        printed = {re.sub(r'[\d.]+', '#', line.split(' - INFO - ')[-1]).strip() for line in run.stdout.splitlines()}
        wanted = {
            re.sub(r'[\d.]+', '#', line).strip()
            for line in shown.splitlines()
            if line.startswith(('Finished', 'Tested'))
        }
        assert run.returncode == 0 and wanted <= printed, f'{command}\n{run.stdout[-3000:]}{run.stderr[-3000:]}'


FOUND = ['amp_wrapper', *(module.name for module in pkgutil.walk_packages(amp_wrapper.__path__, 'amp_wrapper.'))]
# a library of ops is no module
MODULES = [name for name in FOUND if '.amp_ops_' not in name]


def test_docstring_examples_run() -> None:
    # made before doctest replaces sys.stdout, to which it would be bound
    MMLogger.get_current_instance()
    report: list[str] = []
    finder = doctest.DocTestFinder(exclude_empty=True)
    tests = [test for name in MODULES for test in finder.find(importlib.import_module(name)) if test.examples]
    for test in tests:
        doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=report.append)
    assert ''.join(report) == '' and len(tests) > 3


# -- links, paths, commands, names ------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    titles = re.findall(r'^#+ (.+)$', FENCE.sub('', page.read_text()), re.MULTILINE)
    return {re.sub(r'[^\w\- ]', '', title.lower()).strip().replace(' ', '-') for title in titles}


def broken_links(page: Path, text: str) -> list[str]:
    bad = []
    for target in re.findall(r'\]\(([^)\s]+)\)', FENCE.sub('', text)):
        file, _, anchor = target.partition('#')
        path = (page.parent / file).resolve() if file else page
        is_there = path.is_file() and (not anchor or anchor in anchors(path))
        if not re.match(r'[a-z]+:', target) and not is_there:
            bad.append(f'{page.name}: {target}')
    for path in re.findall(r'`((?:tools|configs|examples|tests|docs|csrc)/[\w./]+\.\w+)`', text):
        if not (ROOT / path).is_file():
            bad.append(f'{page.name}: {path}')
    return bad


def test_links_and_paths_lead_to_files() -> None:
    pages = [*PAGES, ROOT / 'CONTRIBUTING.md', ROOT / 'csrc/README.md']
    assert [link for page in pages for link in broken_links(page, page.read_text())] == []
    planted = '[a](docs/none.md) [b](LICENSE) [c](docs/nan.md#nowhere) [d](https://a.org) `tests/none.py`'
    assert len(broken_links(ROOT / 'README.md', planted)) == 3
