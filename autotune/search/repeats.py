"""Repeats of one plan as one figure: what holds up a run now and then (a busy node, a cold cache) must not decide."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

HELD_UP = 0.25
"""A run this far (ln) from the median of at least three is no measurement of the plan: repeats differ by some per cent
where nothing happens."""

SCATTERED = 3.0
"""Nor is it one beyond so many standard deviations of the runs, as the median of their deviations tells it."""

MAD_SD = 1.4826
"""Standard deviation of a normal distribution over the median of its absolute deviations."""


def believed(speeds: Sequence[float]) -> list[float]:
    """The runs that count, in order: all but those far from the median where there are three or more."""
    if len(speeds) < 3:
        return list(speeds)
    logs = [math.log(speed) for speed in speeds]
    middle = statistics.median(logs)
    off = [abs(value - middle) for value in logs]
    most = max(HELD_UP, SCATTERED * MAD_SD * statistics.median(off))
    return [speed for speed, far in zip(speeds, off, strict=True) if far <= most]


def pooled(speeds: Sequence[float]) -> float:
    """One figure of a plan's runs: the mean of those that count."""
    return statistics.fmean(believed(speeds))


def scatter(runs: Iterable[Sequence[float]]) -> float | None:
    """Standard deviation of ln(speed) between runs of a plan, over all plans with several; None where there are none.

    By the runs that count, so that a run that was held up makes the others no less certain.
    """
    squares, freedom = 0.0, 0
    for speeds in runs:
        logs = [math.log(speed) for speed in believed(speeds)]
        if len(logs) > 1:
            middle = statistics.fmean(logs)
            squares += sum((value - middle) ** 2 for value in logs)
            freedom += len(logs) - 1
    return math.sqrt(squares / freedom) if freedom else None
