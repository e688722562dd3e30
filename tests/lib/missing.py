"""Tests where a package is missing: an image for GPUs may have no mmengine.

A file or a test that fails because it imports one of :data:`OPTIONAL` is skipped, with the reason. Where the package is
installed, nothing of this happens, so that a broken installation stays an error.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Generator
from typing import Any

import pytest
import torch

#: Packages that the tests can do without.
OPTIONAL = ('mmengine', 'mmcv', 'sklearn', 'PIL', 'cv2')


def missing() -> list[str]:
    """Those of :data:`OPTIONAL` that are not installed."""
    return [name for name in OPTIONAL if importlib.util.find_spec(name) is None]


def reason_of(text: str, absent: list[str]) -> str | None:
    """What a failure lacked: the package that its last error names; None where it failed for another reason.

    Args:
        text: The end of a traceback, or an error.
        absent: From :func:`missing`.
    """
    names = [
        *re.findall(r"No module named '(\w+)", text),
        *re.findall(r'amp_wrapper\.\w+ needs (\w+), which is not installed', text),
    ]
    return next((f'needs {name}, which is not installed' for name in names[-1:] if name in absent), None)


class SkipsWhatLacksAPackage:
    """A pytest plugin.

    Args:
        absent: From :func:`missing`.
    """

    def __init__(self, absent: list[str]) -> None:
        self._absent = absent

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: Any) -> Generator[None, Any, Any]:
        """A test file that cannot be imported."""
        report = yield
        if report.outcome == 'failed':
            reason = reason_of(str(report.longrepr), self._absent)
            if reason is not None:
                report.outcome = 'skipped'
                report.longrepr = (str(collector.path), 0, f'Skipped: {reason}')
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Generator[None, Any, Any]:
        """A test that imports it by itself."""
        report = yield
        if report.outcome == 'failed' and isinstance(call.excinfo.value, ImportError):
            reason = reason_of(str(call.excinfo.value), self._absent)
            if reason is not None:
                report.outcome = 'skipped'
                report.longrepr = (str(item.path), item.location[1] or 0, f'Skipped: {reason}')
        return report


def skip_without_fsdp(device: str = 'cpu') -> None:
    """Skip the test that calls this where torch cannot train what ``fully_shard`` has sharded on such a device.

    Args:
        device: Its type, such as ``cpu``.
    """
    if device == 'cpu' and torch.__version__ < (2, 7):
        pytest.skip('fully_shard of torch 2.6 needs a GPU')
