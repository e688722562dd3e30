"""What a host and a package index read of the repository: workflows, forms, metadata, and that they agree with each other."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import amp_wrapper
from amp_wrapper import torch_internals

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / '.github' / 'workflows').glob('*.yml'))
FORMS = sorted((ROOT / '.github' / 'ISSUE_TEMPLATE').glob('*.yml'))


def load(path: Path) -> dict[Any, Any]:
    return yaml.safe_load(path.read_text(encoding='utf-8'))


def steps(workflow: dict[Any, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow['jobs'].values() for step in job['steps']]


def rows(name: str, job: str) -> dict[str, Any]:
    return load(ROOT / '.github' / 'workflows' / f'{name}.yml')['jobs'][job]['strategy']['matrix']


@pytest.mark.parametrize('path', WORKFLOWS, ids=lambda path: path.name)
def test_workflows_call_the_targets_of_make(path: Path) -> None:
    workflow = load(path)
    # YAML takes the key "on" for a boolean
    assert workflow['name'] == path.stem and workflow[True] and workflow['permissions'] == {'contents': 'read'}
    targets = set(re.findall(r'^([a-z][\w-]*):', (ROOT / 'Makefile').read_text(), re.MULTILINE))
    commands = [step['run'] for step in steps(workflow) if 'run' in step]
    assert commands and all(job['timeout-minutes'] and job['runs-on'] for job in workflow['jobs'].values())
    for command in commands:
        assert command.startswith('make '), command
        called = re.sub(r'\$\{\{ matrix\.target \}\}', '|', command.split('make ')[1]).split()[0]
        chosen = {called} if called != '|' else {*rows('ci', 'check')['target'], *rows('ci', 'test')['target']}
        assert chosen <= targets, command
    # actions by a version, none by a branch
    assert all(re.search(r'@v\d+', step['uses']) for step in steps(workflow) if 'uses' in step)


def test_the_workflows_try_what_the_package_claims() -> None:
    tried = rows('ci', 'torch')['include']
    assert {row['torch'] for row in tried} >= {torch_internals.TRIED[0], torch_internals.TRIED[-1]}
    assert {row['engine'] for row in tried} == {'mmengine', 'onedl'}
    sys.path.insert(0, str(ROOT / 'tools'))
    try:
        import run_matrix
    finally:
        sys.path.pop(0)
    cells = rows('matrix', 'cell')
    assert (tuple(cells['python']), tuple(cells['torch'])) == (run_matrix.PYTHONS, run_matrix.TORCHES)
    assert tuple(cells['engine']) == run_matrix.ENGINES


@pytest.mark.parametrize('path', [path for path in FORMS if path.stem != 'config'], ids=lambda path: path.name)
def test_forms(path: Path) -> None:
    form = load(path)
    assert form['name'] and form['description']
    assert len({field['id'] for field in form['body']}) == len(form['body']) > 2
    for field in form['body']:
        assert field['type'] in ('textarea', 'input', 'checkboxes', 'dropdown') and field['attributes']['label']


def test_the_citation_names_this_version() -> None:
    citation = load(ROOT / 'CITATION.cff')
    assert citation['version'] == amp_wrapper.__version__ and citation['license'] == 'Apache-2.0'
    assert citation['cff-version'] == '1.2.0' and citation['title'] and citation['message'] and citation['authors']


def test_the_changelog_has_this_version() -> None:
    """``[Unreleased]`` first, then releases from the newest on, each with its date; this version among them or under work."""
    titles = re.findall(r'^## (.+)$', (ROOT / 'CHANGELOG.md').read_text(), re.MULTILINE)
    assert titles[0] == '[Unreleased]' and len(titles) == len(set(titles))
    released = [re.fullmatch(r'\[(\d+\.\d+\.\d+)\] - (\d{4}-\d\d-\d\d)', title) for title in titles[1:]]
    assert all(released), titles
    found = [(tuple(map(int, match[1].split('.'))), match[2]) for match in released if match is not None]
    assert found == sorted(found, reverse=True)
    assert not found or '.'.join(map(str, found[0][0])) == amp_wrapper.__version__
    assert not found or load(ROOT / 'CITATION.cff')['date-released'] == found[0][1]


def test_the_metadata_of_the_package() -> None:
    text = (ROOT / 'pyproject.toml').read_text()
    for python in ('3.10', '3.11', '3.12', '3.13'):
        assert f'"Programming Language :: Python :: {python}"' in text
    assert 'keywords = [' in text and 'authors = [' in text and 'license = "Apache-2.0"' in text
    # an address that leads nowhere is worse than none
    assert 'example.' not in text
