"""Which names of a module a test file tries."""

from __future__ import annotations

import ast
from pathlib import Path
from types import ModuleType


def public_names(module: ModuleType) -> set[str]:
    """What a module defines: constants, functions and classes without a leading underscore."""
    tree = ast.parse(Path(str(module.__file__)).read_text(encoding='utf-8'))
    return {
        name
        for node in tree.body
        for target in (node.targets if isinstance(node, ast.Assign) else [getattr(node, 'target', node)])
        if (name := target.id if isinstance(target, ast.Name) else getattr(target, 'name', ''))
        and not name.startswith('_')
    }


def tried_names(file: str) -> set[str]:
    """What a file asks modules for: all names behind a dot."""
    tree = ast.parse(Path(file).read_text(encoding='utf-8'))
    return {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
