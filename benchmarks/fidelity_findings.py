"""What was found out about levels that differ from FP32, by task and level: for ``python -m benchmarks.fidelity``."""

from __future__ import annotations

from collections.abc import Mapping

FINDINGS: Mapping[tuple[str, str], str] = {}
