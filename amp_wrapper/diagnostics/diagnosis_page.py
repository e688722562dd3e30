"""The report on a step that was not finite, as a page and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..errors import logger, some
from ..policy import dtype_name
from . import pages
from .diagnosis import CAUSES, Diagnosis
from .ranges import range_of

#: Of the JSON.
FORMAT = 1


def publish(
    found: Diagnosis, folder: str | Path, stem: str, facts: Mapping[str, Any], dtype: torch.dtype | None
) -> str:
    """Write a diagnosis as ``<stem>.html`` and ``<stem>.json``. A folder that cannot be written to costs a line in the log.

    Args:
        found: The diagnosis.
        folder: Made where it is missing.
        stem: Of the names of the files.
        facts: What else belongs to the report: iteration, rank.
        dtype: The 16-bit type of the level; None at O0.

    Returns:
        The path of the page; '' where it could not be written.
    """
    data = {'format': FORMAT, **facts, **found.plain()}
    try:
        html, _ = pages.write(folder, stem, page(found, facts, dtype), data)
    except OSError as error:
        logger.warning(f'amp: the report on a skipped step could not be written ({error})')
        return ''
    return str(html)


def page(found: Diagnosis, facts: Mapping[str, Any], dtype: torch.dtype | None) -> str:
    """The page.

    Args:
        found: The diagnosis.
        facts: Iteration, rank.
        dtype: The 16-bit type of the level; None at O0.
    """
    known = torch.float16 if dtype is None else dtype
    named = [(name, ranges) for name, ranges in found.ranges.items() if not name.startswith('gradient ')]
    gradients = [
        (name.removeprefix('gradient '), ranges)
        for name, ranges in found.ranges.items()
        if name.startswith('gradient ')
    ]
    return pages.render(
        'diagnosis.html.j2',
        title=f'Skipped step {facts.get("iteration", "")}'.strip(),
        found=found,
        facts=facts,
        meaning=CAUSES[found.cause],
        samples={key: some(values, 64) for key, values in found.samples.items()},
        limits=range_of(known),
        dtype=dtype_name(known),
        ranges=named,
        gradients=gradients,
        tried={True: 'finite', False: 'not finite', None: 'not tried'},
    )
