"""Files that grow by one JSON object a line while a training runs."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .pages import finite

logger = logging.getLogger('amp_wrapper')


class JsonLines:
    """Appends objects to a file. One that cannot be written costs a line in the log, and nothing more is written.

    Args:
        path: Folders on the way are made.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._works = True

    def append(self, values: Mapping[str, Any]) -> None:
        """Write one object; NaN and infinities become null.

        Args:
            values: Plain data.
        """
        if not self._works:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open('a', encoding='utf-8') as file:
                file.write(json.dumps(finite(values, null=True), allow_nan=False) + '\n')
        except OSError as error:
            self._works = False
            logger.warning(f'amp: {self.path.name} could not be written, and is given up ({error})')
