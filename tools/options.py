"""What ``--cfg-options`` means, for every tool."""

from __future__ import annotations

from typing import Any

from mmengine.config import Config


def merge_options(cfg: Config, options: dict[str, Any] | None) -> None:
    """Put the command line's entries into the config; ``data_root=PATH`` moves every data set below the old root.

    Args:
        cfg: Changed in place.
        options: From ``--cfg-options``, or None.
    """
    if not options:
        return
    old, new = cfg.get('data_root'), options.get('data_root')
    if old is not None and new is not None:
        for loader in ('train_dataloader', 'val_dataloader', 'test_dataloader'):
            dataset = (cfg.get(loader) or {}).get('dataset', {})
            root = str(dataset.get('data_root', ''))
            if root == old or root.startswith(f'{old}/'):
                dataset.data_root = new + root[len(old) :]
    cfg.merge_from_dict(options)
