"""Configs as commands read them: from a file, with what ``--cfg-options`` says, and errors that say what is wrong in a line."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mmengine.config import Config, DictAction

from ..errors import AmpConfigError, AmpUsageError, nearest
from . import projects


def read_config(path: str | Path, options: dict[str, Any] | None = None) -> Config:
    """Read a config file.

    Args:
        path: Of a text config or a pure Python one.
        options: Entries to override, by dotted keys, as :func:`parse_options` gives them.

    Raises:
        AmpUsageError: There is no such file.
        AmpConfigError: It is no config, imports what cannot be imported, or inherits from a project that is not installed.
    """
    path = Path(path)
    if not path.is_file():
        beside = [file.stem for file in path.parent.glob('*.*')] if path.parent.is_dir() else []
        raise AmpUsageError(f'the config {str(path)!r} is no file{nearest(path.stem, beside)}.')
    projects.check(path)
    try:
        cfg = Config.fromfile(path)
    except ImportError as error:
        raise AmpConfigError(
            [
                f'{path} imports what cannot be imported: {_first(error)}. Modules are looked for among those that are '
                'installed, in PYTHONPATH and in the current folder.'
            ]
        ) from error
    except SyntaxError as error:
        # mmengine names no file where it is a base of this one
        place = f'line {error.lineno}' if _has_mistake(path) else 'in a config that it inherits from'
        raise AmpConfigError([f'{path} cannot be read as a config: {place}: {error.msg}.']) from error
    except Exception as error:
        # a config is a program, so it may raise anything
        text = str(error).strip().replace('\n', ' ')
        raise AmpConfigError([f'{path} cannot be read as a config: {type(error).__name__}: {text}']) from error
    merge_options(cfg, options)
    return cfg


def _first(error: BaseException) -> BaseException:
    """The error that led to this one; mmengine's own names the module of the config alone, and not what that misses."""
    cause = error.__cause__ or error.__context__
    return _first(cause) if isinstance(cause, ImportError) else error


def _has_mistake(path: Path) -> bool:
    """Whether it is this file that is no Python."""
    try:
        ast.parse(path.read_text(encoding='utf-8'))
    except SyntaxError:
        return True
    return False


def parse_options(words: Sequence[str]) -> dict[str, Any]:
    """What ``--cfg-options KEY=VALUE ...`` means, as mmengine reads it.

    Args:
        words: Each ``KEY=VALUE``; lists are written ``a,b`` or ``"[a,b]"``.

    Raises:
        ValueError: One of them has no ``=``, or brackets that do not match.
    """
    for word in words:
        if '=' not in word:
            raise ValueError(f'{word!r} is no KEY=VALUE')
    found = argparse.Namespace(options=None)
    try:
        DictAction(['--cfg-options'], 'options')(argparse.ArgumentParser(), found, list(words))
    except AssertionError as error:
        raise ValueError(str(error)) from None
    return dict(found.options)


def merge_options(cfg: Config, options: dict[str, Any] | None) -> None:
    """Put the command line's entries into the config; ``data_root=PATH`` moves every data set below the old root.

    Args:
        cfg: Changed in place.
        options: From ``--cfg-options``, or None.

    Raises:
        AmpConfigError: They do not fit the config.
    """
    if not options:
        return
    new = options.get('data_root')
    if new is not None:
        _move_data(cfg, str(new))
    try:
        cfg.merge_from_dict(options)
    except (KeyError, TypeError, IndexError) as error:
        raise AmpConfigError([f'--cfg-options do not fit the config: {type(error).__name__}: {error}']) from error


def _move_data(cfg: Config, new: str) -> None:
    """Replace the folder that the config's data lie in, wherever it is written: data sets inside others, annotations."""
    old = cfg.get('data_root')
    if old is None:
        # mmpretrain writes it into the data sets alone
        old = next(
            (dataset['data_root'] for dataset in _datasets(cfg.get('train_dataloader')) if 'data_root' in dataset), None
        )
    if old is None:
        raise AmpConfigError(
            ['data_root=PATH: the config names no data_root; give the entries of its data sets one by one.']
        )
    for key in list(cfg):
        if key.endswith(('_dataloader', '_evaluator')) and cfg[key] is not None:
            cfg[key] = _moved(cfg[key], str(old).rstrip('/'), new.rstrip('/'))


def _datasets(node: Any) -> Iterator[Any]:
    if isinstance(node, dict):
        if 'data_root' in node:
            yield node
        for value in node.values():
            yield from _datasets(value)
    elif isinstance(node, (list, tuple)):
        for value in node:
            yield from _datasets(value)


def _moved(node: Any, old: str, new: str) -> Any:
    if isinstance(node, dict):
        for key in list(node):
            node[key] = _moved(node[key], old, new)
        return node
    if isinstance(node, (list, tuple)):
        return type(node)(_moved(value, old, new) for value in node)
    if isinstance(node, str) and (node == old or node.startswith(f'{old}/')):
        return new + node[len(old) :]
    return node
