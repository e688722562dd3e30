"""Writes lines to mmengine's log."""

from __future__ import annotations

import logging

from mmengine.logging import print_log


def log(text: str) -> None:
    """Write an INFO line."""
    print_log(f'amp: {text}', logger='current', level=logging.INFO)


def warn(text: str) -> None:
    """Write a WARNING line."""
    print_log(f'amp: {text}', logger='current', level=logging.WARNING)
