"""A hook of mkdocs: the version of the package stands beside its name on every page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

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
