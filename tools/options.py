"""What the options of the tools have in common; imported before the answer to ``--help``, so without torch's optimizers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mmengine.config import Config

#: Those of :mod:`amp_wrapper.policy`, which is imported after the options are read: the package takes seconds with mmengine's.
LEVELS = ('O0', 'O1', 'O2', 'O3', 'O4', 'O5')


def merge_options(cfg: Config, options: dict[str, Any] | None) -> None:
    """Put the command line's entries into the config; ``data_root=PATH`` moves every data set below the old root.

    Args:
        cfg: Changed in place.
        options: From ``--cfg-options``, or None.
    """
    if not options:
        return
    new = options.get('data_root')
    if new is not None:
        _move_data(cfg, str(new))
    cfg.merge_from_dict(options)


def _move_data(cfg: Config, new: str) -> None:
    """Replace the folder that the config's data lie in, wherever it is written: data sets inside others, annotations."""
    old = cfg.get('data_root')
    if old is None:
        # mmpretrain writes it into the data sets alone
        old = next(
            (dataset['data_root'] for dataset in _datasets(cfg.get('train_dataloader')) if 'data_root' in dataset), None
        )
    if old is None:
        raise SystemExit('data_root=PATH: the config names no data_root; give the entries of its data sets one by one')
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
