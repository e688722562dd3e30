"""Writes lines to the package's logger, and to mmengine's where there is a runner."""

from __future__ import annotations

import logging

from mmengine.logging import MMLogger, print_log

from ..errors import logger


def log(text: str) -> None:
    """Write an INFO line."""
    logger.info(f'amp: {text}')


def warn(text: str) -> None:
    """Write a WARNING line."""
    logger.warning(f'amp: {text}')


class _ToMMEngine(logging.Handler):
    """Sends lines to mmengine's current logger, which knows ranks and files."""

    def emit(self, record: logging.LogRecord) -> None:
        print_log(record.getMessage(), logger='current', level=record.levelno)


def follow_runners() -> None:
    """Send the lines of the package to mmengine's logger, too, from now on, if a runner was built.

    They still go where the script's own configuration of ``logging`` says.
    """
    # that is the name of its logger where no runner was built
    is_alone = MMLogger.get_current_instance().instance_name == 'mmengine'
    if not is_alone and not any(isinstance(each, _ToMMEngine) for each in logger.handlers):
        logger.setLevel(logger.level or logging.INFO)
        logger.addHandler(_ToMMEngine())
