"""Windows: what was measured of a plan and its controls in one short stretch of time, and how noisy that is.

Step time drifts between windows by more than within one, so the noise has two parts: from repeat to repeat inside a
window, and from window to window. Both are learned from past windows of the same kind, robustly, and start from a
prior that counts as PRIOR_WINDOWS windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

PRIOR_WITHIN, PRIOR_BETWEEN = 0.01, 0.008
PRIOR_WINDOWS = 4.0
MAD_TO_SD = 1.4826
"""Median absolute deviation to standard deviation, for normal noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Repeats of one quantity in one window: ln of a speed or of a time; at least one."""

    at: datetime
    logs: tuple[float, ...]

    @property
    def centre(self) -> float:
        """Its middle: the mean, from five repeats on without the highest and the lowest."""
        values = np.sort(np.asarray(self.logs, dtype=np.float64))
        return float(np.mean(values[1:-1] if len(values) >= 5 else values))


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """Standard deviations within and between windows (of ln), and how many windows taught them."""

    within: float
    between: float
    windows: int

    def variance(self, windows: Sequence[Window]) -> float:
        """Of the mean of these windows' centres."""
        count = len(windows)
        repeats = float(np.mean([1.0 / len(window.logs) for window in windows]))
        return (self.between**2 + self.within**2 * repeats) / count


def noise_of(series: Sequence[Sequence[Window]]) -> Noise:
    """The noise that series of windows show; in each series nothing is believed to have changed.

    Args:
        series: of one quantity each; their levels may differ.
    """
    within, between = [], []
    for windows in series:
        for window in windows:
            if len(window.logs) >= 3:
                within.append(_spread(window.logs))
        centres = [window.centre for window in windows]
        if len(centres) >= 3:
            # Steps from window to window: a slow trend over weeks is no noise of a check.
            between += [abs(step) / np.sqrt(2.0) for step in np.diff(centres)]
    return Noise(
        within=_pooled(within, PRIOR_WITHIN, scale=1.0),
        between=_pooled(between, PRIOR_BETWEEN, scale=MAD_TO_SD),
        windows=len(between),
    )


def _spread(logs: Sequence[float]) -> float:
    """The standard deviation of a few values, by their median absolute deviation where there are enough."""
    values = np.asarray(logs, dtype=np.float64)
    if len(values) < 5:
        return float(np.std(values, ddof=1))
    return float(MAD_TO_SD * np.median(np.abs(values - np.median(values))))


def _pooled(found: Sequence[float], prior: float, *, scale: float) -> float:
    """The root of the mean of the prior's square, as PRIOR_WINDOWS values, and the found ones' robust square."""
    if not found:
        return prior
    middle = float(np.median(found)) * scale
    high = float(np.sqrt(np.mean(np.minimum(np.square(found), (4.0 * max(middle, prior / 4.0)) ** 2))))
    weight = len(found)
    return float(np.sqrt((PRIOR_WINDOWS * prior**2 + weight * max(middle, high) ** 2) / (PRIOR_WINDOWS + weight)))
