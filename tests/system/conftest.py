"""What several tests of builds share."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
from source_tree import RECORD, Tree


@pytest.fixture(scope='module')
def new_tree(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    """Never built with ops."""
    return Tree(tmp_path_factory.mktemp('plain'))


@pytest.fixture
def tree(new_tree: Tree) -> Iterator[Tree]:
    yield new_tree
    (new_tree.root / RECORD).unlink(missing_ok=True)
    shutil.rmtree(new_tree.root / 'build', ignore_errors=True)
