"""Numbers over iterations, and what of them is drawn."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

#: Points of one line at most; of longer ones, extremes are drawn.
MOST_POINTS = 4000


@dataclasses.dataclass(frozen=True)
class Series:
    """One number over the training.

    Attributes:
        iterations: int64, rising.
        values: float64, as many; NaN and infinities are what the training had there.
    """

    iterations: npt.NDArray[np.int64]
    values: npt.NDArray[np.float64]

    def between(self, first: int | None, last: int | None) -> Series:
        """The part from one iteration to another one, both included; None for no limit."""
        inside = np.ones(len(self.iterations), dtype=bool)
        if first is not None:
            inside &= self.iterations >= first
        if last is not None:
            inside &= self.iterations <= last
        return Series(self.iterations[inside], self.values[inside])


def smoothed(series: Series) -> Series | None:
    """The mean of a thirtieth of the points, around each one; None of fewer than 20 points.

    Args:
        series: NaN in it counts for nothing, and stays.
    """
    if len(series.values) < 20:
        return None
    half = max(len(series.values) // 60, 1)
    known = np.isfinite(series.values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, series.values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    low = np.clip(np.arange(len(known)) - half, 0, None)
    high = np.clip(np.arange(len(known)) + half + 1, None, len(known))
    with np.errstate(invalid='ignore', divide='ignore'):
        means = (sums[high] - sums[low]) / (counts[high] - counts[low])
    return Series(series.iterations, np.where(known, means, np.nan))


def thinned(series: Series, most: int = MOST_POINTS) -> Series:
    """A long series with the first, the least, the greatest and the last point of each piece; a short one as it is.

    Args:
        series: Any.
        most: Points of the result, at most.
    """
    if len(series.values) <= most:
        return series
    kept: set[int] = set()
    for piece in np.array_split(np.arange(len(series.values)), most // 4):
        kept.update((int(piece[0]), int(piece[-1])))
        inside = series.values[piece]
        if np.isfinite(inside).any():
            kept.update((int(piece[np.nanargmin(inside)]), int(piece[np.nanargmax(inside)])))
    chosen = np.array(sorted(kept))
    return Series(series.iterations[chosen], series.values[chosen])
