"""The names of ``planted_overflows`` that other folders import from here."""

from __future__ import annotations

from planted_overflows import (  # noqa: F401
    Deep,
    Fault,
    ScaleGradient,
    batches,
    examine,
    in_range_of_fp32,
    nan_input,
    square,
)
