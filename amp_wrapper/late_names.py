"""What happens when mmengine is imported after this package, and when a name that needs it is imported without it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def needs_mmengine(name: str) -> str:
    """What to say where a name is asked for, and mmengine is not installed."""
    return f'amp_wrapper.{name} needs mmengine, which is not installed: pip install mmengine==0.10.7 (and mmcv-lite==2.1.0).'


class Finder(MetaPathFinder):
    """Finds nothing by itself: in front of ``sys.meta_path`` it is asked before the others, and learns what is imported.

    Args:
        register: Called right after mmengine is imported; it may import mmengine.
        names: Those of this package that need mmengine: importing one without it raises an error that says so.
    """

    def __init__(self, register: Callable[[], None], names: Collection[str]) -> None:
        self._register, self._names = register, names

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        """As Python asks: what the other finders have, or nothing.

        Raises:
            ImportError: ``from amp_wrapper import AmpOptimWrapper`` without mmengine.
        """
        package, _, name = fullname.rpartition('.')
        if package == 'amp_wrapper' and name in self._names:
            # Python looks for a module of this name where the package lacks the attribute
            raise ImportError(needs_mmengine(name))
        if fullname != 'mmengine':
            return None
        others = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((found for found in others if found is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                if 'amp_wrapper.registry' not in sys.modules:
                    # else it is what imports mmengine, and is not ready yet
                    self._register()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
